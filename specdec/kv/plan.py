"""What one packed forward does to the cache: slots, positions and masks of each request's rows. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

AllowFunction = Callable[[Tensor, Tensor], Tensor]  # (query positions [m, 1], key positions [1, n]) -> bool [m, n]


@dataclass(frozen=True)
class MaskPattern:
    """Which earlier positions a layer may see, beyond causality and the tree: a window, a chunk.

    `key` names the pattern within one forward; `allow` decides by absolute positions, so siblings of a tree,
    which share a position, are treated alike. `local_size` is the size of the window or chunk, where it is known.
    """

    key: Hashable
    allow: AllowFunction
    local_size: int | None = None

    @cached_property
    def window(self) -> int | None:
        """Return the size of the sliding window that this is, or None if it is something else.

        `local_size` alone does not say so, as chunks have one too; the pattern is asked about keys around both ends of
        the window, for queries all over a few windows.
        """
        size = self.local_size
        if size is None or size < 1:
            return None
        queries = torch.tensor([size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size + size // 2])
        distances = torch.tensor([0, 1, size - 1, size, size + 1])
        keys = (queries[:, None] - distances).clamp_min(0).unique()[None, :]
        queries = queries[:, None]
        try:
            allowed = self.allow(queries, keys)
        except (RuntimeError, IndexError):  # it holds tensors, on another device or of so many positions: no arithmetic
            return None
        return size if bool((allowed == (keys > queries - size))[keys <= queries].all()) else None


def sliding_window(size: int) -> MaskPattern:
    """Return the pattern of a window: a token sees itself and the `size - 1` positions before it."""
    return MaskPattern(("window", size), lambda query, key: key > query - size, size)


# A read of at most so many pieces is a concatenation of slices; more are gathered by index.
_MOST_SLICES = 8


def read(stored: Tensor, pieces: Sequence[slice], indices: dict[torch.device, Tensor] | None = None) -> Tensor:
    """Return the rows of `stored` [slots, ...] in `pieces`, in order: a view where they are one run.

    `indices` keeps what many pieces come to, per device, for the next tensor that is read alike.
    """
    if len(pieces) == 1:
        return stored[pieces[0]]
    if len(pieces) <= _MOST_SLICES:
        return torch.cat([stored[piece] for piece in pieces])
    indices = {} if indices is None else indices
    if stored.device not in indices:
        indices[stored.device] = torch.cat([torch.arange(p.start, p.stop, device=stored.device) for p in pieces])
    return stored.index_select(0, indices[stored.device])


@dataclass(slots=True)
class PlannedSegment:
    """One request's rows, and where its keys and values live: in few contiguous pieces, mostly one."""

    request_id: int
    first_row: int
    num_rows: int
    pieces: Sequence[slice]  # slots of positions and rows 0 .. kv_len - 1, in order
    targets: Sequence[slice]  # slots of the segment's own rows, the last of them
    block_table: Sequence[int]  # the request's blocks, for kernels that page by themselves
    kv_len: int  # committed tokens + reservation rows up to and including this segment
    kv_positions: Tensor | None  # [kv_len] int64; None = 0 .. kv_len - 1 (no tree in the reservation)
    visible: Tensor | None  # [num_rows, kv_len] bool, ancestors only; None = a chain, causal in slot order
    positions: Tensor  # [num_rows] int64
    _masks: dict[Hashable, Tensor | None] = field(default_factory=dict)
    _indices: dict[torch.device, Tensor] = field(default_factory=dict)
    _seen: dict[Hashable, slice | Tensor] = field(default_factory=dict)

    def read(self, stored: Tensor) -> Tensor:
        """Return the request's rows [kv_len, ...] of `stored` [slots, ...]."""
        return read(stored, self.pieces, self._indices)

    @property
    def whole_causal(self) -> bool:
        """True when the rows are a chain that begins at position 0: plain causal attention, no mask needed."""
        return self.visible is None and self.num_rows == self.kv_len

    def mask(self, pattern: MaskPattern | None, like: Tensor, repeat: int) -> Tensor | None:
        """Return the additive mask [num_rows * repeat, kv_len], each row `repeat` times, or None if all is visible.

        Its dtype and device are those of `like`.

        Three rows of a chain after two committed tokens, then a tree root with two children:

            1 1 1 0 0      1 1 1 0 0
            1 1 1 1 0      1 1 1 1 0
            1 1 1 1 1      1 1 1 0 1
        """
        key = (None if pattern is None else pattern.key, like.dtype, like.device, repeat)
        if key not in self._masks:
            built = self._build(pattern, like.dtype, repeat)
            self._masks[key] = None if built is None else built.to(like.device)  # layers may be spread over devices
        return self._masks[key]

    def seen(self, row: int, pattern: MaskPattern | None, device: torch.device) -> slice | Tensor:
        """Return which of the request's rows one row sees: a slice where they are in one run, else indices [n]."""
        key = ("seen", row, None if pattern is None else pattern.key, device)
        if key not in self._seen:
            self._seen[key] = self._find_seen(row, pattern, device)
        return self._seen[key]

    def _find_seen(self, row: int, pattern: MaskPattern | None, device: torch.device) -> slice | Tensor:
        until = self.kv_len - self.num_rows + 1 + row
        if self.visible is None and (pattern is None or (pattern.window or 0) >= until):
            return slice(0, until)
        allowed = self._allowed(pattern)[row].nonzero().flatten().tolist()
        if allowed[-1] - allowed[0] + 1 == len(allowed):
            return slice(allowed[0], allowed[-1] + 1)
        return torch.tensor(allowed, dtype=torch.int64, device=device)

    def _build(self, pattern: MaskPattern | None, dtype: torch.dtype, repeat: int) -> Tensor | None:
        if self._sees_all(pattern):
            return None
        allowed = self._allowed(pattern)
        bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
        if repeat > 1:
            bias = bias[:, None, :].expand(-1, repeat, -1).reshape(-1, self.kv_len)
        return bias

    def _allowed(self, pattern: MaskPattern | None) -> Tensor:
        """Return bool [num_rows, kv_len]: which row sees which."""
        device = self.positions.device
        allowed = self.visible
        if allowed is None:
            slots = torch.arange(self.kv_len, device=device)
            allowed = slots <= slots[self.kv_len - self.num_rows :, None]
        if pattern is None:
            return allowed
        keys = self.kv_positions
        if keys is None:
            keys = torch.arange(self.kv_len, device=device)
        return allowed & pattern.allow(self.positions[:, None], keys[None, :])

    def _sees_all(self, pattern: MaskPattern | None) -> bool:
        """Tell whether no row needs a mask, by arithmetic: looking at one would make a GPU's caller wait for it."""
        alone = self.num_rows == 1 and self.visible is None
        return alone and (pattern is None or (pattern.window or 0) >= self.kv_len)


@dataclass(slots=True)
class StepPlan:
    """The packed forward: T rows in segment order."""

    segments: list[PlannedSegment]
    positions: Tensor  # [T] int64
    derived: dict[Hashable, Any] = field(default_factory=dict)  # by attention kernels, once for all layers

    @property
    def num_rows(self) -> int:
        return int(self.positions.shape[0])

    def write(self, stored: Tensor, rows: Tensor) -> None:
        """Put `rows` [T, ...] into their slots of `stored` [slots, ...], in one call for all requests."""
        first = self.segments[0]
        if len(self.segments) == len(first.targets) == 1:
            stored[first.targets[0]] = rows
            return
        key = ("slots", stored.device)
        if key not in self.derived:
            slots = [slot for s in self.segments for t in s.targets for slot in range(t.start, t.stop)]
            self.derived[key] = torch.tensor(slots, dtype=torch.int64).to(stored.device)
        stored.index_copy_(0, self.derived[key], rows.to(stored.dtype))

    def mask(self, like: Tensor) -> Tensor:
        """Return the additive mask [T, N] over the keys of all segments side by side; dtype and device of `like`.

        Two rows of a request with one committed token, then one row of a request with two:

            1 1 0 0 0 0
            1 1 1 0 0 0
            0 0 0 1 1 1
        """
        num_keys = sum(s.kv_len for s in self.segments)
        bias = torch.full((self.num_rows, num_keys), float("-inf"), dtype=like.dtype, device=like.device)
        first_key = 0
        for s in self.segments:
            own = s.mask(None, like, 1)
            block = bias[s.first_row : s.first_row + s.num_rows, first_key : first_key + s.kv_len]
            block.copy_(torch.zeros((), dtype=like.dtype) if own is None else own)
            first_key += s.kv_len
        return bias

    def alone(self) -> list[StepPlan]:
        """Return one plan per segment, for models whose rows cannot be packed."""
        return [StepPlan([replace(s, first_row=0)], s.positions) for s in self.segments]

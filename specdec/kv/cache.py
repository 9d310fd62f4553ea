"""One model's keys and values for all requests. The only object that knows slots and dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.errors import OutOfCacheError
from specdec.interfaces import Segment
from specdec.kv.attention import attend_segment
from specdec.kv.blocks import SlotPool
from specdec.kv.plan import MaskPattern, PlannedSegment, StepPlan


@dataclass(slots=True)
class _Sequence:
    """One request's run of slots: committed tokens first, then the open reservation."""

    start: int
    max_tokens: int
    context_len: int = 0
    reserved: int = 0
    used: int = 0  # reservation rows written so far
    parents: list[int] | None = None  # per used row, when the reservation holds a tree
    depths: list[int] = field(default_factory=list)

    def become_tree(self) -> list[int]:
        """Spell out the chain so far as parents and depths, so that tree rows can be appended to it."""
        if self.parents is None:
            self.parents = list(range(-1, self.used - 1))
            self.depths = list(range(self.used))
        return self.parents

    def close(self) -> None:
        self.reserved = self.used = 0
        self.parents = None
        self.depths = []


class KVCache:
    """Keys and values in one tensor pair per layer, `[slots, kv_heads, width]`, sized from what it is given.

    Forwards write only into a request's open reservation; `commit` keeps a root path of it and frees the rest.
    """

    def __init__(self, *, max_bytes: int | None = None, bytes_per_token: int = 0) -> None:
        self.max_bytes = max_bytes
        self._expected_bytes_per_token = bytes_per_token
        self._pool = SlotPool()
        self._sequences: dict[int, _Sequence] = {}
        self._keys: dict[int, Tensor] = {}  # layer -> [S, h, D]
        self._values: dict[int, Tensor] = {}  # layer -> [S, h, E]

    def open(self, request_id: int, max_tokens: int) -> None:
        """Give a request a contiguous run of `max_tokens` slots.

        Raises:
            OutOfCacheError: the memory limit does not allow it; nothing has changed.
        """
        assert request_id not in self._sequences, f"request {request_id} is open already"
        self._pool.max_slots = self.max_tokens
        self._sequences[request_id] = _Sequence(self._pool.allocate(max_tokens), max_tokens)

    @property
    def max_tokens(self) -> int | None:
        """Return how many tokens the memory limit allows for all requests together; None = no limit."""
        if self.max_bytes is None or not self.bytes_per_token:
            return None
        return self.max_bytes // self.bytes_per_token

    def check_fits(self, num_tokens: int) -> None:
        """Raise OutOfCacheError if a request of `num_tokens` could not even run alone."""
        most = self.max_tokens
        if most is not None and num_tokens > most:
            raise OutOfCacheError(
                f"the request needs KV for {num_tokens} tokens ({num_tokens * self.bytes_per_token} bytes) and the "
                f"limit of {self.max_bytes} bytes holds {most}; raise the limit or lower max_new_tokens"
            )

    def reserve(self, request_id: int, n: int) -> None:
        """Open a reservation of `n` rows behind the committed tokens.

        Raises:
            OutOfCacheError: the request's run has fewer than `n` free slots; nothing has changed.
        """
        sequence = self._sequences[request_id]
        if sequence.context_len + n > sequence.max_tokens:
            raise OutOfCacheError(
                f"request {request_id} holds {sequence.context_len} tokens of {sequence.max_tokens} "
                f"and cannot take {n} more"
            )
        sequence.close()
        sequence.reserved = n

    def rewind(self, request_id: int) -> None:
        """Forget what was written into the open reservation; the reservation stays open."""
        sequence = self._sequences[request_id]
        reserved = sequence.reserved
        sequence.close()
        sequence.reserved = reserved

    def commit(self, request_id: int, kept: Tensor) -> None:
        """Keep rows `kept` of the reservation, in order, and close it.

        A chain keeps a prefix and moves nothing, so the cost does not depend on the context; a tree path that is
        not leftmost is moved together.

        Args:
            request_id: whose reservation.
            kept: [n] int64, strictly increasing offsets into the reservation.
        """
        sequence = self._sequences[request_id]
        rows = kept.tolist()
        assert all(a < b for a, b in itertools.pairwise(rows)), f"kept rows must increase: {rows}"
        assert not rows or (rows[0] >= 0 and rows[-1] < sequence.used), f"kept {rows} of {sequence.used} rows"
        if rows and rows[-1] != len(rows) - 1:
            self._move(sequence.start + sequence.context_len, rows)
        sequence.context_len += len(rows)
        sequence.close()

    def _move(self, begin: int, rows: list[int]) -> None:
        """Gather `rows` of the reservation at slot `begin` to its front. Rows only ever move down."""
        first = next(i for i, row in enumerate(rows) if row != i)
        with torch.inference_mode():
            for store in (self._keys, self._values):
                for tensor in store.values():
                    source = torch.tensor(rows[first:], device=tensor.device) + begin
                    tensor[begin + first : begin + len(rows)] = tensor.index_select(0, source)

    def extend(self, request_id: int, max_tokens: int) -> None:
        """Move a request with no open reservation to a longer run.

        Raises:
            OutOfCacheError: there is no memory for it; nothing has changed.
        """
        sequence = self._sequences[request_id]
        sequence.close()
        self._pool.max_slots = self.max_tokens
        start = self._pool.allocate(max_tokens)
        try:
            self._copy(sequence.start, start, sequence.context_len)
        except BaseException:  # Ctrl-C included
            self._pool.free(start)
            raise
        self._pool.free(sequence.start)
        sequence.start, sequence.max_tokens = start, max_tokens

    def _copy(self, source: int, target: int, length: int) -> None:
        """Copy `length` slots from `source` to `target`, in a storage that is grown where `target` needs it."""
        with torch.inference_mode():
            for store in (self._keys, self._values):
                for layer, tensor in store.items():
                    if tensor.shape[0] < self._pool.capacity:
                        store[layer] = tensor = self._resized(tensor, layer)
                    tensor[target : target + length] = tensor[source : source + length].clone()

    def release(self, request_id: int) -> None:
        """Free all of a request's slots; unknown requests are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._pool.free(sequence.start)

    def is_open(self, request_id: int) -> bool:
        return request_id in self._sequences

    def context_len(self, request_id: int) -> int:
        """Return the number of committed tokens."""
        return self._sequences[request_id].context_len

    def room(self, request_id: int) -> int:
        """Return how many more tokens the request's run can hold."""
        sequence = self._sequences[request_id]
        return sequence.max_tokens - sequence.context_len

    def restore(self, request_id: int, context_len: int) -> None:
        """Undo every commit since the request held `context_len` tokens. Only a failed step may do this."""
        sequence = self._sequences[request_id]
        assert context_len <= sequence.context_len, "a cache cannot be restored forwards"
        sequence.context_len = context_len
        sequence.close()

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes over all layers; before the first forward what was expected, or 0."""
        if not self._keys:
            return self._expected_bytes_per_token
        return sum(
            tensor.shape[1] * tensor.shape[2] * tensor.element_size()
            for store in (self._keys, self._values)
            for tensor in store.values()
        )

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(t.numel() * t.element_size() for s in (self._keys, self._values) for t in s.values())

    def contents(self, request_id: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return copies of the committed keys [n, h, D] and values [n, h, E] of one layer."""
        sequence = self._sequences[request_id]
        run = slice(sequence.start, sequence.start + sequence.context_len)
        return self._keys[layer][run].clone(), self._values[layer][run].clone()

    @property
    def layers(self) -> list[int]:
        return sorted(self._keys)

    def check_integrity(self) -> None:
        """Raise AssertionError if slots leak or overlap, or a request holds more than its run."""
        self._pool.check_integrity()
        assert self._pool.num_used == sum(s.max_tokens for s in self._sequences.values()), "slots leak"
        for request_id, s in self._sequences.items():
            assert 0 <= s.used <= s.reserved and s.context_len + s.reserved <= s.max_tokens, (
                f"request {request_id} overruns its slots"
            )

    def plan(self, segments: Sequence[Segment], device: torch.device | str = "cpu") -> StepPlan:
        """Append every segment to its request's reservation and return slots, positions and masks."""
        planned: list[PlannedSegment] = []
        row = 0
        for segment in segments:
            planned.append(self._plan_segment(segment, row, device))
            row += planned[-1].num_rows
        if len(planned) == 1:
            return StepPlan(planned, planned[0].positions)
        return StepPlan(planned, torch.cat([p.positions for p in planned]))

    def _plan_segment(self, segment: Segment, first_row: int, device: torch.device | str) -> PlannedSegment:
        sequence = self._sequences[segment.request_id]
        m = int(segment.token_ids.shape[0])
        used, context = sequence.used, sequence.context_len
        assert used + m <= sequence.reserved, (
            f"{m} rows do not fit a reservation of {sequence.reserved} with {used} used"
        )
        kv_len = context + used + m
        sequence.used = used + m
        if segment.parents is None and sequence.parents is None:
            positions = torch.arange(kv_len - m, kv_len, device=device)
            return PlannedSegment(segment.request_id, first_row, m, sequence.start, kv_len, None, None, positions)
        sequence.used = used
        parents = sequence.become_tree()
        sequence.used = used + m
        new = list(range(used - 1, used + m - 1)) if segment.parents is None else segment.parents.tolist()
        depths = sequence.depths
        visible = torch.zeros(m, kv_len, dtype=torch.bool)
        visible[:, :context] = True
        for i, parent in enumerate(new):
            assert -1 <= parent < used + i, f"parent {parent} of row {used + i} is not before it"
            parents.append(parent)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            node = used + i
            while node >= 0:
                visible[i, context + node] = True
                node = parents[node]
        kv_positions = torch.cat([torch.arange(context), torch.tensor(depths) + context]).to(device)
        return PlannedSegment(
            segment.request_id,
            first_row,
            m,
            sequence.start,
            kv_len,
            kv_positions,
            visible.to(device),
            kv_positions[context + used :],
        )

    def attend(
        self,
        plan: StepPlan,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float | None = None,
        pattern: MaskPattern | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the rows' keys and values and attend over each request's own; return [T, H, E].

        Args:
            plan: of this forward.
            layer: whose storage.
            q: [T, H, D].
            k: [T, h, D].
            v: [T, h, E]; E may differ from D.
            scaling: factor on the scores; None = 1 / sqrt(D).
            pattern: window or chunk of this layer.
            softcap: see `attend_segment`.
            sinks: see `attend_segment`.
        """
        keys, values = self._storage(layer, k, v)
        outputs: list[Tensor] = []
        for s in plan.segments:
            run = _write(s, keys, values, k, v)
            outputs.append(
                attend_segment(
                    s,
                    q[s.first_row : s.first_row + s.num_rows],
                    keys[run],
                    values[run],
                    scaling=scaling,
                    pattern=pattern,
                    softcap=softcap,
                    sinks=sinks,
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def append(self, plan: StepPlan, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values; return those of all segments side by side, for `StepPlan.mask`.

        For models that attend by themselves. The result is for reading only.

        Args:
            plan: of this forward.
            layer: whose storage.
            k: [T, h, D].
            v: [T, h, E].

        Returns:
            Keys [N, h, D] and values [N, h, E], N the sum of the segments' `kv_len`.
        """
        keys, values = self._storage(layer, k, v)
        runs = [_write(s, keys, values, k, v) for s in plan.segments]
        if len(runs) == 1:
            return keys[runs[0]], values[runs[0]]
        return torch.cat([keys[run] for run in runs]), torch.cat([values[run] for run in runs])

    def _storage(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        values = self._values.get(layer)  # grown last, so it tells for both
        if values is None or values.shape[0] < self._pool.capacity:
            self._grow(layer, k, v)
        return self._keys[layer], self._values[layer]

    def _grow(self, layer: int, k: Tensor, v: Tensor) -> None:
        for store, rows in ((self._keys, k), (self._values, v)):
            old = store.get(layer)
            store[layer] = self._resized(rows[:0] if old is None else old, layer)

    def _resized(self, old: Tensor, layer: int) -> Tensor:
        """Return `old` [slots, h, width] with the pool's capacity. Growth is geometric: O(1) copies per slot."""
        twice = 2 * int(old.shape[0])
        slots = max(self._pool.capacity, min(twice, self._pool.max_slots or twice))
        try:
            new = torch.empty((slots, *old.shape[1:]), dtype=old.dtype, device=old.device)
        except RuntimeError as error:  # torch's out-of-memory errors, CPU and CUDA
            raise OutOfCacheError(
                f"no memory for a KV cache of {slots} tokens (layer {layer}); lower max_new_tokens, run fewer prompts "
                "at once or set kv_memory_bytes"
            ) from error
        new[: old.shape[0]] = old
        return new


def _write(segment: PlannedSegment, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> slice:
    """Store one segment's rows of k and v; return the slots of its whole context."""
    rows = slice(segment.first_row, segment.first_row + segment.num_rows)
    slots = slice(segment.first_slot, segment.first_slot + segment.num_rows)
    keys[slots] = k[rows]
    values[slots] = v[rows]
    return slice(segment.base, segment.base + segment.kv_len)

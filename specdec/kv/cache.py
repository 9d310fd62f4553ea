"""One model's keys and values for all requests. The only object that knows slots and dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from specdec.errors import OutOfCacheError
from specdec.interfaces import Segment
from specdec.kv.allocation import Allocation
from specdec.kv.attention import MOST_ROWS_ALONE, attend_rows, attend_segment
from specdec.kv.codecs import Codec, codec_of
from specdec.kv.flash import FlashBackend
from specdec.kv.plan import MaskPattern, PlannedSegment, StepPlan, read
from specdec.kv.storage import SlotStorage

BLOCK_TOKENS = 16
# A hint claims so many tokens behind the prompt at most: it may be far more than what will come, and tensors reach as
# far as the last slot in use. Who needs more moves to a run of twice the length.
_MOST_CLAIMED_TOKENS = 128
_FEATURES = "features"  # beside the layers' numbers, among the names in the storage


class KVCache:
    """Keys and values of all layers in blocks of `block_tokens` slots, sized from what it is given.

    Forwards write only into a request's open reservation; `commit` keeps a root path of it and frees the rest.

    Args:
        max_bytes: bound on what is stored; None = as much as is asked for.
        bytes_per_token: what is expected, until the first forward tells.
        block_tokens: slots per block, the unit in which memory is handed out and shared.
        codec: "int8", "int4" or a codec; None = as computed.
        prefix_caching: `publish` makes blocks findable for requests that begin alike.
        backend: takes the calls of `attend` that it supports; its pages are the blocks.

    Attributes:
        keeps_features: find only blocks whose hidden states were stored; true from the first `store_features` on.
    """

    def __init__(
        self,
        *,
        max_bytes: int | None = None,
        bytes_per_token: int = 0,
        block_tokens: int = BLOCK_TOKENS,
        codec: str | Codec | None = None,
        prefix_caching: bool = False,
        backend: FlashBackend | None = None,
    ) -> None:
        self.max_bytes, self.block_tokens = max_bytes, block_tokens
        self.codec, self.backend = codec_of(codec), backend
        self.prefix_caching, self.keeps_features = prefix_caching, False
        self._expected_bytes_per_token = bytes_per_token
        self._storage = SlotStorage()
        self._allocation = Allocation(self._storage, block_tokens)
        self._pool, self._sequences = self._allocation.pool, self._allocation.tables
        self._dtypes: dict[int, torch.dtype] = {}  # of what the layers compute with

    # ------------------------------------------------------------------ memory

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, scales and hidden states included; at first what was expected, or 0."""
        return self._storage.bytes_per_slot or self._expected_bytes_per_token

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self._storage.num_bytes

    @property
    def num_blocks(self) -> int | None:
        """Return how many blocks the memory limit allows; None = no limit."""
        if self.max_bytes is None or not self.bytes_per_token:
            return None
        return self.max_bytes // (self.bytes_per_token * self.block_tokens)

    @property
    def num_free_blocks(self) -> int | None:
        """Return how many blocks `reserve` could take now, those kept for prompts included; None = no limit."""
        self._set_limit()
        return None if self._pool.max_blocks is None else self._allocation.num_free

    @property
    def max_tokens(self) -> int | None:
        """Return how many tokens the memory limit allows for all requests together; None = no limit."""
        most = self.num_blocks
        return None if most is None else most * self.block_tokens

    def _set_limit(self) -> None:
        self._pool.max_blocks = self.num_blocks
        self._allocation.settle()

    def has_room(self, num_tokens: int) -> bool:
        """Tell whether a new request could reserve `num_tokens` now."""
        self._set_limit()
        return -(-num_tokens // self.block_tokens) <= self._allocation.num_free

    def num_blocks_to_open(self, num_tokens: int, token_ids: Sequence[int]) -> int:
        """Return how many of the free blocks a new request of `num_tokens` takes; what others hold already costs none.

        Args:
            num_tokens: that it is to have room for.
            token_ids: its first tokens, of which some may be known; see `open`.
        """
        self._set_limit()
        return self._allocation.num_to_open(num_tokens, token_ids if self.prefix_caching else None, self.keeps_features)

    def num_blocks_to_reach(self, request_id: int, num_tokens: int) -> int:
        """Return how many of the free blocks a request still takes until it has room for `num_tokens`."""
        return self._allocation.num_to_reach(request_id, num_tokens)

    def num_blocks_held_alone(self, request_id: int) -> int:
        """Return how many blocks would be free if a request were released."""
        return self._allocation.num_held_alone(request_id)

    def check_fits(self, num_tokens: int) -> None:
        """Raise OutOfCacheError if a request of `num_tokens` could not even run alone."""
        most = self.max_tokens
        if most is not None and num_tokens > most:
            raise OutOfCacheError(
                f"the request needs KV for {num_tokens} tokens ({num_tokens * self.bytes_per_token} bytes) and the "
                f"limit of {self.max_bytes} bytes holds {most}, in blocks of {self.block_tokens}; raise the limit or "
                "lower max_new_tokens"
            )

    def usage(self) -> dict[str, float]:
        """Return how many blocks are used, kept and free, and how scattered they are: the fields of `Occupancy`."""
        self._set_limit()
        return {**asdict(self._allocation.occupancy()), "num_bytes": self.num_bytes}

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks leak or overlap, or a request holds more than its own."""
        self._allocation.check_integrity()

    # ------------------------------------------------------------------ requests

    def open(self, request_id: int, expected_tokens: int, token_ids: Sequence[int] | None = None) -> int:
        """Begin a request; no free block is taken, though blocks that are found stay held for it.

        Args:
            request_id: its name.
            expected_tokens: how many it will probably hold: where so many slots in a row are free it begins there,
                and others avoid them while they can. Of what comes after `token_ids` a part is enough to begin with.
            token_ids: its first tokens, of which the KV of all but the last may be known already.

        Returns:
            The number of tokens that are committed already, out of shared blocks.
        """
        assert request_id not in self._sequences, f"request {request_id} is open already"
        self._set_limit()
        expected = min(expected_tokens, len(token_ids or ()) + _MOST_CLAIMED_TOKENS)
        known = token_ids if self.prefix_caching else None
        return self._allocation.open(request_id, expected, known, self.keeps_features)

    def reserve(self, request_id: int, n: int) -> None:
        """Open a reservation of `n` rows behind the committed tokens, in place of an earlier one.

        Raises:
            OutOfCacheError: there is no memory for it; nothing has changed.
        """
        table = self._sequences[request_id]
        self._set_limit()
        self._allocation.make_room(request_id, table.context_len + n)
        table.close()
        table.reserved = n

    def rewind(self, request_id: int) -> None:
        """Forget what was written into the open reservation; the reservation stays open."""
        table = self._sequences[request_id]
        reserved = table.reserved
        table.close()
        table.reserved = reserved

    def commit(self, request_id: int, kept: Tensor) -> None:
        """Keep rows `kept` of the reservation, in order, close it, and give back the blocks behind them.

        A chain keeps a prefix and moves nothing, so the cost does not depend on the context; a tree path that is
        not leftmost is moved together.

        Args:
            request_id: whose reservation.
            kept: [n] int64, strictly increasing offsets into the reservation.
        """
        table = self._sequences[request_id]
        rows = kept.tolist()
        assert all(a < b for a, b in itertools.pairwise(rows)), f"kept rows must increase: {rows}"
        assert not rows or (rows[0] >= 0 and rows[-1] < table.used), f"kept {rows} of {table.used} rows"
        if rows and rows[-1] != len(rows) - 1:
            self._move(request_id, rows)
        table.context_len += len(rows)
        table.close()
        if self.backend is None:  # whose kernel reads pages where they lie
            table.note_step()
        self._allocation.trim(request_id)

    def _move(self, request_id: int, rows: list[int]) -> None:
        """Gather `rows` of the reservation to its front. Rows only ever move down."""
        table = self._sequences[request_id]
        first = next(i for i, row in enumerate(rows) if row != i)
        sources = [table.slot(table.context_len + row) for row in rows[first:]]
        targets = [table.slot(table.context_len + i) for i in range(first, len(rows))]
        self._storage.move(sources, targets)

    def restore(self, request_id: int, context_len: int) -> None:
        """Undo every commit since the request held `context_len` tokens. Only a failed step may do this."""
        table = self._sequences[request_id]
        assert context_len <= table.context_len, "a cache cannot be restored forwards"
        table.context_len = context_len
        table.close()
        self._allocation.trim(request_id)

    def release(self, request_id: int) -> None:
        """Give back all of a request's blocks; unknown requests are ignored."""
        self._allocation.release(request_id)

    def is_open(self, request_id: int) -> bool:
        return request_id in self._sequences

    def context_len(self, request_id: int) -> int:
        """Return the number of committed tokens."""
        return self._sequences[request_id].context_len

    # ------------------------------------------------------------------ prompts that begin alike

    def publish(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Let other requests find a request's full blocks; costs what the new ones are.

        Args:
            request_id: whose blocks.
            token_ids: the tokens whose KV is committed, and possibly more.
        """
        if self.prefix_caching:
            assert len(token_ids) >= self._sequences[request_id].context_len, "committed tokens are missing"
            self._allocation.publish(request_id, token_ids)

    def forget_prefixes(self) -> None:
        """Drop what is kept of requests that are gone: the next one that begins alike is computed anew."""
        self._allocation.forget_prefixes()

    def store_features(self, request_id: int, start: int, rows: Tensor) -> None:
        """Keep hidden states [m, F] of committed positions from `start` on, for requests that begin alike."""
        table = self._sequences[request_id]
        stop = start + len(rows)
        assert start >= 0 and stop <= table.context_len, f"positions {start}-{stop} of {table.context_len} committed"
        if not len(rows):
            return
        self.keeps_features = True
        stored = self._storage.parts.get(_FEATURES) or self._storage.add(_FEATURES, [rows])
        first = 0
        with torch.no_grad():
            for piece in table.slices(start, stop):
                stored[0][piece] = rows[first : first + piece.stop - piece.start]
                first += piece.stop - piece.start
        self._allocation.featured.note(table.blocks, start, stop)

    def features(self, request_id: int, start: int, stop: int) -> Tensor:
        """Return copies of the hidden states [stop - start, F] that were kept for these positions."""
        table = self._sequences[request_id]
        self._allocation.featured.check(table.blocks, start, stop)
        return read(self._storage.parts[_FEATURES][0], table.slices(start, stop)).clone()

    # ------------------------------------------------------------------ what is stored

    @property
    def layers(self) -> list[int]:
        return sorted(self._dtypes)

    def contents(self, request_id: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return copies of the committed keys [n, h, D] and values [n, h, E] of one layer, as they are read."""
        keys, values = self._decoded(layer, self.stored(request_id, layer))
        return keys, values

    def stored(self, request_id: int, layer: int) -> list[Tensor]:
        """Return copies of what is stored of the committed tokens of one layer, [n, ...] each."""
        table = self._sequences[request_id]
        pieces = table.slices(0, table.context_len) or [slice(0, 0)]
        return [read(part, pieces).clone() for part in self._storage.parts[layer]]

    def _decoded(self, layer: int, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if self.codec is None:
            return stored[0], stored[1]
        return self.codec.decode(layer, stored, self._dtypes[layer])

    # ------------------------------------------------------------------ forwards

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
        table = self._sequences[segment.request_id]
        m = int(segment.token_ids.shape[0])
        assert table.used + m <= table.reserved, (
            f"{m} rows do not fit a reservation of {table.reserved} with {table.used} used"
        )
        kv_len = table.context_len + table.used + m
        kv_positions = visible = None
        if segment.parents is None and table.parents is None:
            table.used += m
            positions = torch.arange(kv_len - m, kv_len, device=device)
        else:
            above = None if segment.parents is None else segment.parents.tolist()
            kv_positions, visible = (t.to(device) for t in table.grow_tree(m, above))
            positions = kv_positions[kv_len - m :]
            if table.is_chain:
                kv_positions = visible = None
        return PlannedSegment(
            segment.request_id,
            first_row,
            m,
            table.slices(0, kv_len),
            table.slices(kv_len - m, kv_len),
            table.blocks,
            kv_len,
            kv_positions,
            visible,
            positions,
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
        outputs: list[Tensor] = []
        stored = self._write(plan, layer, k, v)
        if self.backend is not None and self.codec is None:
            keys, values = stored
            if self.backend.supports(plan, q, keys, values, pattern=pattern, sinks=sinks):
                return self.backend.attend(plan, q, keys, values, scaling=scaling, pattern=pattern, softcap=softcap)
        for s in plan.segments:
            keys, values = self._decoded(layer, [s.read(part) for part in stored])
            alone = self.rounds_alike and s.num_rows <= MOST_ROWS_ALONE
            attend = attend_rows if alone else attend_segment
            outputs.append(
                attend(
                    s,
                    q[s.first_row : s.first_row + s.num_rows],
                    keys,
                    values,
                    scaling=scaling,
                    pattern=pattern,
                    softcap=softcap,
                    sinks=sinks,
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @property
    def rounds_alike(self) -> bool:
        """True where a row must come out the same to the last bit, whatever runs beside it: see `attend_rows`."""
        return self.codec is not None

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
        stored = self._write(plan, layer, k, v)
        runs = [self._decoded(layer, [s.read(part) for part in stored]) for s in plan.segments]
        if len(runs) == 1:
            return runs[0]
        return torch.cat([keys for keys, _ in runs]), torch.cat([values for _, values in runs])

    def _write(self, plan: StepPlan, layer: int, k: Tensor, v: Tensor) -> list[Tensor]:
        """Store the rows' keys and values; return the layer's tensors."""
        rows = (k, v) if self.codec is None else self.codec.encode(layer, k, v)
        stored = self._storage.parts.get(layer)
        if stored is None:
            self._dtypes[layer] = k.dtype  # before the part, by which everything about a layer is known to be there
            stored = self._storage.add(layer, rows)
        for part, new in zip(stored, rows, strict=True):
            plan.write(part, new)
        return stored

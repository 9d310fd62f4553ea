"""Who has which blocks: sharing, copy on write, rollback and eviction, over the pool, the index and the storage.

Tables and the index are the truth; what the pool knows follows from them. So an operation that is broken off anywhere,
by Ctrl-C too, leaves nothing wrong: the next one begins by deriving the pool anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from specdec.errors import OutOfCacheError
from specdec.kv.blocks import BlockPool
from specdec.kv.featured import FeaturedRows
from specdec.kv.prefix import ROOT, PrefixIndex
from specdec.kv.storage import SlotStorage
from specdec.kv.table import BlockTable

# Without a memory limit so much is kept of what no request holds any more.
MOST_KEPT_BYTES = 2**30
# A request that was read in pieces for so many steps has paid for as many copies, and is likely to stay.
STEPS_IN_PIECES = 4
_NOBODY = -(1 << 62)  # no request's id


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full a cache is, in blocks."""

    num_blocks: int  # that the memory limit allows; without one, that are allocated
    num_used: int  # held by requests
    num_cached: int  # held by nobody, kept for prompts that begin alike
    num_free: int
    num_shared: int  # held by several requests
    fragmentation: float  # share of the slots of used blocks that hold no committed token
    runs_per_request: float  # contiguous pieces a request's blocks lie in; 1 = all are read as views


class Allocation:
    """Block tables of all requests."""

    def __init__(self, storage: SlotStorage, block_tokens: int) -> None:
        self.storage, self.block_tokens = storage, block_tokens
        self.pool, self.index = BlockPool(), PrefixIndex(block_tokens)
        self.tables: dict[int, BlockTable] = {}
        self.featured = FeaturedRows(block_tokens)
        self._unsettled = False

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark that the pool may not follow from the tables, until the end is reached."""
        self.settle()
        self._unsettled = True
        yield
        self._unsettled = False

    def settle(self) -> None:
        """Derive the pool from tables and index, if an operation was broken off."""
        if not self._unsettled:
            return
        self.index.rebuild()
        for table in self.tables.values():
            table.set_blocks(list(table.blocks))
        self.pool.rebuild(Counter(b for t in self.tables.values() for b in t.blocks), self.index)
        self._unsettled = False

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    @property
    def num_free(self) -> int:
        """Return how many blocks can be taken, those included that are kept for prompts only."""
        return self.pool.num_available + self.pool.num_parked

    # ------------------------------------------------------------------ requests come and go

    def open(self, request_id: int, expected_tokens: int, token_ids: Sequence[int] | None, featured: bool) -> int:
        """Begin a table with the blocks that are known to hold the KV of what `token_ids` begins with.

        Args:
            request_id: whose.
            expected_tokens: the number of slots it will probably need.
            token_ids: the tokens it begins with, or None. The last one's KV is never taken from elsewhere.
            featured: only blocks that have hidden states for all their rows will do.

        Returns:
            For how many tokens KV was found.
        """
        table = BlockTable(self.block_tokens)
        with self._changing():
            found, known = self._find(token_ids, featured)
            for block, _ in found:
                self.pool.share(block)
            table.extend(block for block, _ in found)
            table.keys = [key for _, key in found]
            table.context_len = known
            self.pool.claim(request_id, self._num_blocks(expected_tokens) - len(found), table.last)
            self.tables[request_id] = table
        return known

    def _find(self, token_ids: Sequence[int] | None, featured: bool) -> tuple[list[tuple[int, bytes]], int]:
        """Return the known blocks (block, key) that `token_ids` begins with, and for how many tokens they will do."""
        found = [] if token_ids is None else self.index.find(token_ids)
        if featured:
            complete = [self.featured.is_whole(block) for block, _ in found]
            found = found[: complete.index(False)] if False in complete else found
        known = 0 if token_ids is None else min(len(found) * self.block_tokens, len(token_ids) - 1)
        return found[: self._num_blocks(known)], known

    def num_to_open(self, num_tokens: int, token_ids: Sequence[int] | None, featured: bool) -> int:
        """Return how many of the free blocks a new request takes that begins with `token_ids` and has `num_tokens`."""
        self.settle()
        found, known = self._find(token_ids, featured)
        parked = sum(not self.pool.holders(block) for block, _ in found)
        copied = known % self.block_tokens > 0  # the last block is others' too, and written to
        return max(0, self._num_blocks(num_tokens) - len(found)) + parked + copied

    def num_to_reach(self, request_id: int, num_tokens: int) -> int:
        """Return how many of the free blocks a request takes until it has `num_tokens`."""
        self.settle()
        table = self.tables[request_id]
        copied = self._shared_block(table) is not None
        return max(0, self._num_blocks(num_tokens) - len(table.blocks)) + copied

    def num_held_alone(self, request_id: int) -> int:
        """Return how many blocks are free when a request is released."""
        self.settle()
        return sum(self.pool.holders(block) == 1 for block in self.tables[request_id].blocks)

    def release(self, request_id: int) -> None:
        """Give back everything of a request; unknown ones are ignored."""
        if request_id not in self.tables:
            return
        with self._changing():
            table = self.tables.pop(request_id)
            while table.blocks:  # the last one first: it is of use to the fewest, so it is evicted first
                self._drop(request_id, table.pop(), table.last)
            self.pool.unclaim(request_id)
            self._keep_within_bounds()

    def _drop(self, request_id: int, block: int, last: int | None = None) -> None:
        self.pool.drop(request_id, block, keep=block in self.index, last=last)

    def _keep_within_bounds(self) -> None:
        per_block = self.storage.bytes_per_slot * self.block_tokens
        if self.pool.max_blocks is None and per_block:
            self._evict(self.pool.num_parked - MOST_KEPT_BYTES // per_block)

    def _evict(self, count: int) -> None:
        """Forget the `count` blocks that were given back longest ago."""
        for _ in range(count):
            block = self.pool.oldest_parked()
            self.index.forget(block)
            self.pool.discard(block)

    def forget_prefixes(self) -> None:
        """Forget every block that is only kept to be found again."""
        with self._changing():
            self._evict(self.pool.num_parked)

    def trim(self, request_id: int) -> None:
        """Give back the blocks behind the committed tokens."""
        table = self.tables[request_id]
        needed = self._num_blocks(table.context_len)
        del table.keys[table.context_len // self.block_tokens :]
        if len(table.blocks) > needed:
            with self._changing():
                while len(table.blocks) > needed:
                    self._drop(request_id, table.pop(), table.last)

    # ------------------------------------------------------------------ room for rows

    def _is_frozen(self, block: int) -> bool:
        """Tell whether a block's content is somebody else's business too."""
        return self.pool.holders(block) > 1 or block in self.index

    def make_room(self, request_id: int, num_tokens: int) -> None:
        """Let a request's table reach over `num_tokens`, of which those behind the committed ones can be written.

        Raises:
            OutOfCacheError: there are not as many blocks, even without those kept for prompts, or the machine has no
                memory for them; nothing has changed.
        """
        table = self.tables[request_id]
        if num_tokens <= table.context_len:
            return
        if table.steps_in_pieces >= STEPS_IN_PIECES:
            self._gather(request_id, table, max(len(table.blocks), self._num_blocks(num_tokens)))
        shared = self._shared_block(table)
        more = max(0, self._num_blocks(num_tokens) - len(table.blocks))
        if not more and shared is None:
            return
        self.settle()
        alone = shared is not None and self.pool.holders(table.blocks[shared]) == 1
        short = more + (shared is not None) - self.num_free
        if short > 0 and not (short == 1 and alone):
            raise OutOfCacheError(
                f"the KV cache is full: {num_tokens - table.context_len} more tokens asked, {self.pool.num_used} of "
                f"{self.pool.max_blocks} blocks of {self.block_tokens} tokens in use; raise the memory limit, shorten "
                "max_new_tokens or run fewer prompts at once"
            )
        try:
            with self._changing():
                if shared is not None:
                    self._unshare(request_id, table, shared, in_place=short > 0)
                if more:
                    self._lengthen(request_id, table, more)
        except OutOfCacheError:  # of the storage: blocks that were taken stand in no table
            self.settle()
            raise

    def _shared_block(self, table: BlockTable) -> int | None:
        """Return which of a table's blocks the next row goes to, if its content is not the request's alone."""
        index, row = divmod(table.context_len, self.block_tokens)
        return index if row and self._is_frozen(table.blocks[index]) else None

    def _take(self, request_id: int, count: int, after: int | None) -> list[int]:
        self._evict(count - self.pool.num_available)
        taken = self.pool.take(request_id, count, after)
        most = self.pool.max_blocks
        self.storage.grow((max(taken) + 1) * self.block_tokens, None if most is None else most * self.block_tokens)
        self.featured.forget(taken)
        return taken

    def _unshare(self, request_id: int, table: BlockTable, index: int, *, in_place: bool) -> None:
        """Give a request a block of its own with the same content, or keep it from being found by others."""
        old = table.blocks[index]
        del table.keys[index:]
        if in_place:
            self.index.forget(old)
            return
        (new,) = self._take(request_id, 1, table.blocks[index - 1] if index else None)
        self._copy_blocks([old], new)
        table.set_blocks([*table.blocks[:index], new, *table.blocks[index + 1 :]])
        self._drop(request_id, old)

    def _copy_blocks(self, blocks: Sequence[int], first: int) -> None:
        """Copy blocks to those from `first` on."""
        size = self.block_tokens
        table = BlockTable(size)
        table.extend(blocks)
        self.storage.copy(table.slices(0, len(blocks) * size), first * size)
        for i, block in enumerate(blocks):
            self.featured.copy(block, first + i)

    def _lengthen(self, request_id: int, table: BlockTable, more: int) -> None:
        """Append blocks, contiguous with the others where possible.

        Where the place behind them is taken, a request whose blocks are its own moves to a run of twice the length, so
        that it is read as a view again; the copies are O(1) per token, as the run doubles.
        """
        last = table.last
        length = len(table.blocks) + more
        if last is None and self.pool.num_claimed(request_id) < more:  # it is more than was expected from the start
            self.pool.claim(request_id, 2 * length)
        outgrown = last is not None and not self.pool.continues(request_id, last, more)
        if not (outgrown and self._may_move(table) and self._move(request_id, table, length, 2 * length)):
            table.extend(self._take(request_id, more, last))

    def _may_move(self, table: BlockTable) -> bool:
        return len(table.runs) == 1 and all(self.pool.holders(block) == 1 for block in table.blocks)

    def _move(self, request_id: int, table: BlockTable, length: int, claimed: int) -> bool:
        """Move a request to the first `length` blocks of a free run of `claimed`, or return False if there is none.

        Blocks that others hold stay theirs, and are found where they were; of those it holds alone nothing stays.
        """
        if not self.pool.claim(request_id, claimed, whole=True):
            return False
        new = self._take(request_id, length, None)
        self._copy_blocks(table.blocks, new[0])
        old = table.blocks
        table.set_blocks(new)
        for block, other in zip(old, new, strict=False):
            alone = self.pool.holders(block) == 1
            if alone and block in self.index:
                self.index.replace(block, other)
            self.pool.drop(_NOBODY, block, keep=False)  # the owner's claim is elsewhere now
        return True

    def _gather(self, request_id: int, table: BlockTable, length: int) -> None:
        """Put the pieces of a request together for good, in a copy of its own, where memory is plenty.

        Shared blocks are what leaves a request in pieces: it continues elsewhere, and its whole context is concatenated
        in every layer of every step. The copy is one pass over it. No block is evicted for it, and half of those that a
        memory limit allows stay free; without a limit all such copies together are bounded.
        """
        table.steps_in_pieces = 0  # if it cannot be now, it is tried again after as many steps
        self.settle()
        most = self.pool.max_blocks
        if most is not None and 2 * (self.pool.num_available - length) < most:
            return
        if most is None:
            num_copied = sum(other.num_gathered for other in self.tables.values())
            if (num_copied + length) * self.storage.bytes_per_slot * self.block_tokens > MOST_KEPT_BYTES:
                return
        try:
            with self._changing():
                if self._move(request_id, table, length, length + length // 2):
                    table.num_gathered = length
        except OutOfCacheError:  # of the storage: it stays as it is
            self.settle()

    # ------------------------------------------------------------------ prompts that begin alike

    def publish(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Make a request's full blocks findable; `token_ids` begins with its committed tokens."""
        table, size = self.tables[request_id], self.block_tokens
        full = table.context_len // size
        if len(table.keys) >= full:
            return
        with self._changing():
            for i in range(len(table.keys), full):
                parent = table.keys[-1] if table.keys else ROOT
                added = self.index.add(parent, token_ids[i * size : (i + 1) * size], table.blocks[i])
                if added is None:
                    return
                key, block = added
                if self.featured.rows(block) < self.featured.rows(table.blocks[i]):
                    self._replace(block, table.blocks[i])
                table.keys.append(key)

    def _replace(self, block: int, other: int) -> None:
        self.index.replace(block, other)
        if not self.pool.holders(block):
            self.pool.discard(block)

    # ------------------------------------------------------------------ looking

    def occupancy(self) -> Occupancy:
        """Return how full the pool is."""
        self.settle()
        pool, tables = self.pool, [t for t in self.tables.values() if t.blocks]
        most = self.storage.slots // self.block_tokens if pool.max_blocks is None else pool.max_blocks
        committed = sum(t.context_len for t in tables)
        shared = Counter(b for t in tables for b in t.blocks)
        # A shared block counts once among the blocks and for each of its holders among the tokens.
        doubled = sum((n - 1) * self.block_tokens for n in shared.values())
        slots = pool.num_used * self.block_tokens
        return Occupancy(
            num_blocks=most,
            num_used=pool.num_used,
            num_cached=pool.num_parked,
            num_free=max(0, most - pool.num_used - pool.num_parked),
            num_shared=sum(n > 1 for n in shared.values()),
            fragmentation=max(0.0, 1 - (committed - doubled) / slots) if slots else 0.0,
            runs_per_request=sum(len(t.runs) for t in tables) / len(tables) if tables else 1.0,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks leak, have wrong holders, or a request overruns its own."""
        self.settle()
        self.pool.check_integrity()
        self.index.check_integrity()
        held = Counter(b for t in self.tables.values() for b in t.blocks)
        assert len(held) == self.pool.num_used, "blocks leak"
        assert all(self.pool.holders(b) == n for b, n in held.items()), "holders are not the tables'"
        assert self.pool.num_parked == sum(b not in held for b in self.index), "a kept block is not indexed"
        for request_id, t in self.tables.items():
            assert 0 <= t.used <= t.reserved and t.context_len + t.reserved <= len(t.blocks) * self.block_tokens, (
                f"request {request_id} overruns its blocks"
            )
            assert [b for first, n in t.runs for b in range(first, first + n)] == t.blocks, "runs are not the blocks"
            assert len(set(t.blocks)) == len(t.blocks), f"request {request_id} has a block twice"

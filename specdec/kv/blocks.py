"""Which block is whose: a pure Python pool with holders, soft claims and parked blocks. Knows no tensors, no model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_NO_LIMIT = 1 << 62


class Run(NamedTuple):
    """Blocks start .. stop - 1."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class BlockPool:
    """Hands out blocks, in contiguous runs where it can, and grows at the end up to `max_blocks`.

    A block is held by one or more tables, or parked (nobody holds it, its content is kept), or free. Free blocks may be
    claimed: a claim only steers placement; whoever finds nothing else takes from the end of another's claim.
    """

    def __init__(self, max_blocks: int | None = None) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0  # the highest block that is not free is num_blocks - 1
        self._holders: dict[int, int] = {}
        self._parked: dict[int, None] = {}  # longest parked first
        self._free: list[Run] = []  # sorted, never adjacent, none at the end of the pool
        self._claims: dict[int, Run] = {}  # by owner

    @property
    def num_used(self) -> int:
        return len(self._holders)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def _most(self) -> int:
        return _NO_LIMIT if self.max_blocks is None else self.max_blocks

    @property
    def num_available(self) -> int:
        """Return how many blocks can be taken without giving up parked ones."""
        there = self.num_blocks - self.num_used - self.num_parked
        growth = max(0, self._most - self.num_blocks)
        return max(0, min(there + growth, self._most - self.num_used - self.num_parked))

    def holders(self, block: int) -> int:
        return self._holders.get(block, 0)

    # ------------------------------------------------------------------ claims

    def claim(self, owner: int, length: int, after: int | None = None, *, whole: bool = False) -> bool:
        """Set a contiguous free run aside for `owner`, in place of an earlier claim.

        Args:
            owner: who will take it.
            length: blocks wanted; the run may be shorter where none is as long.
            after: where free, the run begins behind this block.
            whole: change nothing rather than claim less than `length`.

        Returns:
            Whether `length` blocks were claimed.
        """
        earlier = None
        if whole:  # whoever gets nothing keeps what he has
            earlier = self._claims.get(owner)
        else:
            self.unclaim(owner)
        found = self._find(length, after) if length > 0 else None
        if found is None or (whole and found.length < length):
            return False
        self._carve(found)
        self._claims[owner] = found
        if earlier is not None:
            self._insert(earlier)
        return found.length == length

    def unclaim(self, owner: int) -> None:
        claim = self._claims.pop(owner, None)
        if claim is not None:
            self._insert(claim)

    def num_claimed(self, owner: int) -> int:
        """Return how many blocks are set aside for `owner`."""
        return self._claims[owner].length if owner in self._claims else 0

    def continues(self, owner: int, after: int, count: int) -> bool:
        """Tell whether `owner` would get its next `count` blocks right behind block `after`."""
        claim = self._claims.get(owner)
        if claim is not None:
            return claim.start == after + 1 and claim.length >= count
        return any(run.start == after + 1 and run.length >= count for run in self._open_runs())

    def _open_runs(self) -> list[Run]:
        """Return the unclaimed free runs, and last what the pool may still grow by."""
        tail = [Run(self.num_blocks, self._most)] if self.num_blocks < self._most else []
        return self._free + tail

    def _find(self, length: int, after: int | None) -> Run | None:
        """Return at most `length` unclaimed free blocks: behind `after`, else the first run that fits, or longest."""
        runs = self._open_runs()
        chosen = next((run for run in runs if after is not None and run.start == after + 1), None)
        chosen = chosen or next((run for run in runs if run.length >= length), None)
        chosen = chosen or max(runs, key=lambda run: run.length, default=None)
        return None if chosen is None else Run(chosen.start, min(chosen.stop, chosen.start + length))

    def _carve(self, run: Run) -> None:
        """Remove the front of a free run from the free ones, or let the pool grow by it."""
        if run.start == self.num_blocks:
            self.num_blocks = run.stop
            return
        index = bisect_left(self._free, run.start, key=lambda r: r.start)
        rest = Run(run.stop, self._free[index].stop)
        self._free[index : index + 1] = [rest] if rest.length else []

    def _insert(self, run: Run) -> None:
        """Add a run to the free ones; what is free at the end is no part of the pool."""
        if not run.length:
            return
        index = bisect_left(self._free, run.start, key=lambda r: r.start)
        first, last = index, index
        if index and self._free[index - 1].stop == run.start:
            first, run = index - 1, Run(self._free[index - 1].start, run.stop)
        if index < len(self._free) and self._free[index].start == run.stop:
            last, run = index + 1, Run(run.start, self._free[index].stop)
        merged = [run]
        if run.stop == self.num_blocks:
            self.num_blocks, merged = run.start, []
        self._free[first:last] = merged

    # ------------------------------------------------------------------ blocks

    def take(self, owner: int, count: int, after: int | None = None) -> list[int]:
        """Return `count` <= `num_available` blocks that `owner` now holds, contiguous and behind `after` if it can.

        First its own claim, then what nobody claims, then the ends of other claims.
        """
        assert count <= self.num_available, f"{count} blocks asked, {self.num_available} available"
        taken: list[int] = []
        while len(taken) < count:
            missing = count - len(taken)
            claim = self._claims.get(owner)
            if claim is not None:
                run = Run(claim.start, min(claim.stop, claim.start + missing))
                self._shorten(owner, Run(run.stop, claim.stop))
            else:
                found = self._find(missing, taken[-1] if taken else after)
                if found is not None:
                    self._carve(found)
                run = self._from_others(missing) if found is None else found
            taken += range(run.start, run.stop)
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def _shorten(self, owner: int, claim: Run) -> None:
        if claim.length:
            self._claims[owner] = claim
        else:
            del self._claims[owner]

    def _from_others(self, count: int) -> Run:
        loser = max(self._claims, key=lambda o: self._claims[o].length)
        claim = self._claims[loser]
        run = Run(max(claim.start, claim.stop - count), claim.stop)
        self._shorten(loser, Run(claim.start, run.start))
        return run

    def share(self, block: int) -> None:
        """Add a holder to a block that is held or parked."""
        if block in self._parked:
            del self._parked[block]
            self._holders[block] = 1
        else:
            self._holders[block] += 1

    def drop(self, owner: int, block: int, *, keep: bool, last: int | None = None) -> None:
        """Remove a holder; with the last one the block is parked if its content is to be kept, else free.

        A free block right before the owner's claim joins it, and one right behind `last`, the last block the owner
        still has, is claimed: a shortened sequence grows again where it was.
        """
        self._holders[block] -= 1
        if self._holders[block]:
            return
        del self._holders[block]
        if keep:
            self._parked[block] = None
            return
        claim = self._claims.get(owner)
        if claim is None and last == block - 1:
            self._claims[owner] = Run(block, block + 1)
        elif claim is not None and claim.start == block + 1:
            self._claims[owner] = Run(block, claim.stop)
        else:
            self._insert(Run(block, block + 1))

    def oldest_parked(self) -> int:
        return next(iter(self._parked))

    def discard(self, block: int) -> None:
        """Free a parked block."""
        del self._parked[block]
        self._insert(Run(block, block + 1))

    # ------------------------------------------------------------------ after an interruption, and in tests

    def rebuild(self, holders: Mapping[int, int], kept: Iterable[int]) -> None:
        """Start anew from who holds what: `kept` blocks that nobody holds are parked, all others free; no claims."""
        self._holders = dict(holders)
        idle = dict.fromkeys(b for b in kept if b not in self._holders)
        self._parked = dict.fromkeys([*(b for b in self._parked if b in idle), *idle])
        self._claims, self._free, self.num_blocks = {}, [], 0
        for block in sorted([*self._holders, *self._parked]):
            if block > self.num_blocks:
                self._free.append(Run(self.num_blocks, block))
            self.num_blocks = block + 1

    def check_integrity(self) -> None:
        """Raise AssertionError unless held, parked, claimed and free blocks tile [0, num_blocks) exactly."""
        runs = [*self._free, *self._claims.values(), *(Run(b, b + 1) for b in (*self._holders, *self._parked))]
        position = 0
        for run in sorted(runs):
            assert run.start == position and run.length > 0, f"blocks overlap or leave a hole at {position}: {run}"
            position = run.stop
        assert position == self.num_blocks, f"blocks end at {position}, the pool has {self.num_blocks}"
        assert all(n > 0 for n in self._holders.values()), "a held block has no holder"
        assert not self._free or self._free[-1].stop < self.num_blocks, "the pool ends with free blocks"
        assert all(a.stop < b.start for a, b in zip(self._free, self._free[1:], strict=False)), "free runs touch"

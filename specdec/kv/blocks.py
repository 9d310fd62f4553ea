"""Which slots belong to whom: a pure Python allocator of contiguous runs. Knows no tensors and no model."""

from __future__ import annotations

from bisect import insort

from specdec.errors import OutOfCacheError


class SlotPool:
    """Hands out contiguous runs of slots, first fit, and grows at the end up to `max_slots`."""

    def __init__(self, max_slots: int | None = None) -> None:
        self.max_slots = max_slots
        self.capacity = 0
        self._free: list[tuple[int, int]] = []  # (start, length), sorted, never adjacent
        self._used: dict[int, int] = {}  # start -> length

    @property
    def num_used(self) -> int:
        return sum(self._used.values())

    def allocate(self, length: int) -> int:
        """Return the first slot of a free run of `length` slots.

        Raises:
            OutOfCacheError: no such run exists and growing would pass `max_slots`; nothing has changed.
        """
        for index, (start, free) in enumerate(self._free):
            if free >= length:
                if free == length:
                    del self._free[index]
                else:
                    self._free[index] = (start + length, free - length)
                self._used[start] = length
                return start
        start = self.capacity
        if self.max_slots is not None and start + length > self.max_slots:
            raise OutOfCacheError(
                f"the KV cache is full: {length} more tokens asked, {self.num_used} of {self.max_slots} in use; "
                "raise the memory limit, shorten max_new_tokens or run fewer prompts at once"
            )
        self.capacity = start + length
        self._used[start] = length
        return start

    def free(self, start: int) -> None:
        """Give back the run that begins at `start`."""
        length = self._used.pop(start)
        insort(self._free, (start, length))
        merged: list[tuple[int, int]] = []
        for run in self._free:
            if merged and sum(merged[-1]) == run[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + run[1])
            else:
                merged.append(run)
        # Nothing free stays at the end: a run too long for the memory must not be asked for again by the next one.
        if merged and sum(merged[-1]) == self.capacity:
            self.capacity = merged.pop()[0]
        self._free = merged

    def check_integrity(self) -> None:
        """Raise AssertionError unless used and free runs tile [0, capacity) exactly."""
        runs = sorted([*self._free, *self._used.items()])
        position = 0
        for start, length in runs:
            assert start == position and length > 0, f"slot runs overlap or leave a hole at {position}: {runs}"
            position += length
        assert position == self.capacity, f"slot runs end at {position}, capacity is {self.capacity}"

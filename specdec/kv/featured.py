"""Which rows of which blocks have hidden states beside their KV. Pure Python; knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence


class FeaturedRows:
    """For each block how many of its leading rows have hidden states."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._rows: dict[int, int] = {}

    def rows(self, block: int) -> int:
        """Return how many leading rows of a block have them."""
        return self._rows.get(block, 0)

    def is_whole(self, block: int) -> bool:
        return self.rows(block) == self.block_tokens

    def note(self, blocks: Sequence[int], start: int, stop: int) -> None:
        """Note that positions start .. stop - 1 of a request with these blocks have them; a gap before them stays."""
        size = self.block_tokens
        for index in range(start // size, -(-stop // size)):
            block = blocks[index]
            if start - index * size <= self.rows(block):
                self._rows[block] = max(self.rows(block), min(stop - index * size, size))

    def check(self, blocks: Sequence[int], start: int, stop: int) -> None:
        """Raise AssertionError unless positions start .. stop - 1 of a request with these blocks all have them."""
        size = self.block_tokens
        for index in range(start // size, -(-stop // size)):
            kept = index * size + self.rows(blocks[index])
            assert kept >= min(stop, (index + 1) * size), f"hidden states of positions {kept}-{stop} were not stored"

    def copy(self, block: int, other: int) -> None:
        """Note that `other` became a copy of `block`."""
        if block in self._rows:
            self._rows[other] = self._rows[block]

    def forget(self, blocks: Sequence[int]) -> None:
        """Note that what these blocks hold is of no use any more."""
        for block in blocks:
            self._rows.pop(block, None)

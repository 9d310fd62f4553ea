"""One request's blocks: committed tokens first, then the open reservation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class BlockTable:
    """Position p of a request lives in slot blocks[p // block_tokens] * block_tokens + p % block_tokens."""

    block_tokens: int
    blocks: list[int] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)  # [first block, number]: `blocks` as contiguous runs
    keys: list[bytes] = field(default_factory=list)  # of the leading blocks that other requests can find
    context_len: int = 0
    reserved: int = 0
    used: int = 0  # reservation rows written so far
    parents: list[int] | None = None  # per used row, when the reservation holds a tree
    depths: list[int] = field(default_factory=list)
    num_gathered: int = 0  # blocks that were copied to put it together
    steps_in_pieces: int = 0  # since the blocks lie in several runs, which are put together in every layer of a step

    # ------------------------------------------------------------------ blocks

    @property
    def last(self) -> int | None:
        return self.blocks[-1] if self.blocks else None

    def extend(self, blocks: Iterable[int]) -> None:
        """Append blocks."""
        new = list(blocks)
        self.blocks += new
        self._append_runs(new)

    def _append_runs(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.runs and sum(self.runs[-1]) == block:
                self.runs[-1][1] += 1
            else:
                self.runs.append([block, 1])

    def pop(self) -> int:
        """Remove and return the last block."""
        self.runs[-1][1] -= 1
        if not self.runs[-1][1]:
            self.runs.pop()
        return self.blocks.pop()

    def set_blocks(self, blocks: list[int]) -> None:
        """Put other blocks in place of all."""
        # At once: an interruption must not lose them. The runs follow from them.
        self.blocks, self.runs = blocks, []
        self._append_runs(blocks)

    def slices(self, start: int, stop: int) -> list[slice]:
        """Return the slots of positions start .. stop - 1 as few slices, in order."""
        size = self.block_tokens
        if len(self.runs) == 1:
            base = self.runs[0][0] * size
            return [slice(base + start, base + stop)]
        found: list[slice] = []
        first = 0  # position of the run's first slot
        for block, count in self.runs:
            low, high = max(start, first), min(stop, first + count * size)
            if low < high:
                base = block * size - first
                found.append(slice(base + low, base + high))
            first += count * size
            if first >= stop:
                break
        return found

    def slot(self, position: int) -> int:
        """Return the slot of one position."""
        return self.blocks[position // self.block_tokens] * self.block_tokens + position % self.block_tokens

    def note_step(self) -> None:
        """Count a step, if its rows were read in pieces."""
        self.steps_in_pieces = self.steps_in_pieces + 1 if len(self.runs) > 1 else 0

    # ------------------------------------------------------------------ the reservation

    @property
    def is_chain(self) -> bool:
        """Tell whether the rows written so far follow one another, as a tree or not."""
        return self.parents is None or self.parents == list(range(-1, len(self.parents) - 1))

    def become_tree(self) -> list[int]:
        """Spell out the chain so far as parents and depths, so that tree rows can be appended to it."""
        if self.parents is None:
            self.parents = list(range(-1, self.used - 1))
            self.depths = list(range(self.used))
        return self.parents

    def grow_tree(self, m: int, above: list[int] | None) -> tuple[Tensor, Tensor]:
        """Append `m` tree rows; `above` holds their parents, None = a chain on top of the last row.

        Returns:
            Positions [n] of everything the request holds now, and [m, n] bool: whom the new rows see.
        """
        used, context = self.used, self.context_len
        parents, depths = self.become_tree(), self.depths
        self.used = used + m
        visible = torch.zeros(m, context + used + m, dtype=torch.bool)
        visible[:, :context] = True
        for i, parent in enumerate(range(used - 1, used + m - 1) if above is None else above):
            assert -1 <= parent < used + i, f"parent {parent} of row {used + i} is not before it"
            parents.append(parent)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            node = used + i
            while node >= 0:
                visible[i, context + node] = True
                node = parents[node]
        return torch.cat([torch.arange(context), torch.tensor(depths) + context]), visible

    def close(self) -> None:
        """Forget the reservation; its blocks stay."""
        self.reserved = self.used = 0
        self.parents = None
        self.depths = []

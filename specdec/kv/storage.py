"""The tensors behind the slots: per layer what a codec stores of keys and values, and hidden states beside them."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from specdec.errors import OutOfCacheError

# torch's CPU allocator raises plain RuntimeErrors.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "DefaultCPUAllocator")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that a device has no memory left, and not that something else is wrong."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfCacheError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


class SlotStorage:
    """Named lists of tensors [slots, ...]: whatever moves in one moves in all.

    What was not asked for with `grow` holds nothing and is not kept.
    """

    def __init__(self) -> None:
        self.slots = 0  # that every tensor has at least
        self.bytes_per_slot = 0  # of all parts
        self.parts: dict[Hashable, list[Tensor]] = {}
        self._asked = 0  # the most slots that were asked for: what lies behind holds nothing

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._all())

    def _all(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(self.parts.values()))

    def add(self, name: Hashable, like: Sequence[Tensor]) -> list[Tensor]:
        """Create tensors with the row shapes, dtypes and devices of `like`, each [rows, ...]."""
        made = [self._resized(rows[:0], self.slots) for rows in like]
        # Derived, and before the part itself: who finds a part finds everything about it, wherever Ctrl-C came.
        self.bytes_per_slot = sum(t.shape[1:].numel() * t.element_size() for t in [*self._all(), *made])
        self.parts[name] = made
        return made

    def grow(self, slots: int, most: int | None) -> None:
        """Make room for at least `slots` slots. Growth is geometric up to `most`: O(1) copies per slot.

        Raises:
            OutOfCacheError: the machine has no memory for it; what is stored is as it was.
        """
        if slots > self.slots:
            twice = 2 * self.slots
            larger = max(slots, twice if most is None else min(twice, most))
            for tensors in self.parts.values():
                for i, tensor in enumerate(tensors):
                    if tensor.shape[0] < larger:
                        tensors[i] = self._resized(tensor, larger)
            self.slots = larger
        self._asked = max(self._asked, slots)

    def _resized(self, old: Tensor, slots: int) -> Tensor:
        try:
            # Plain tensors: they are written to in and out of inference mode.
            with torch.inference_mode(False), torch.no_grad():
                new = torch.empty((slots, *old.shape[1:]), dtype=old.dtype, device=old.device)
                kept = min(self._asked, old.shape[0])
                new[:kept] = old[:kept]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfCacheError(
                f"no memory for a KV cache of {slots} tokens; lower max_new_tokens, run fewer prompts at once or set "
                "kv_memory_bytes"
            ) from error
        return new

    def copy(self, pieces: Sequence[slice], target: int) -> None:
        """Copy slots, piece by piece, to those from `target` on; the two do not overlap."""
        with torch.no_grad():
            for tensor in self._all():
                first = target
                for piece in pieces:
                    stop = first + piece.stop - piece.start
                    tensor[first:stop] = tensor[piece]
                    first = stop

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the rows of slots `sources` to slots `targets`; all are read before any is written."""
        known: dict[torch.device, tuple[Tensor, Tensor]] = {}
        with torch.no_grad():
            for tensor in self._all():
                device = tensor.device
                if device not in known:
                    known[device] = (torch.tensor(sources, device=device), torch.tensor(targets, device=device))
                source, target = known[device]
                tensor.index_copy_(0, target, tensor.index_select(0, source))

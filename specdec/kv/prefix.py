"""Which full blocks hold the KV of which tokens: a hash chain. Pure Python; knows no tensors and no model."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

ROOT = b""  # the key before the first block


@dataclass(frozen=True, slots=True)
class _Entry:
    key: bytes
    parent: bytes
    token_ids: tuple[int, ...]


def chain_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a block with these tokens behind the block with key `parent`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


class PrefixIndex:
    """Finds blocks by their tokens and all tokens before them.

    KV depends on all earlier tokens, so a block's key is the digest of its own tokens and its parent's key. A block is
    found only if its tokens and its parent are equal too: two contents of one key are never taken for each other.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def find(self, token_ids: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return block and key of the longest known run of full blocks that `token_ids` begins with."""
        found: list[tuple[int, bytes]] = []
        parent, size = ROOT, self.block_tokens
        for start in range(0, len(token_ids) - size + 1, size):
            tokens = tuple(token_ids[start : start + size])
            key = chain_key(parent, tokens)
            block = self._blocks.get(key)
            if block is None or self._entries[block] != _Entry(key, parent, tokens):
                break
            found.append((block, key))
            parent = key
        return found

    def add(self, parent: bytes, token_ids: Sequence[int], block: int) -> tuple[bytes, int] | None:
        """Make a block findable, unless one with the same content is.

        Returns:
            The key and the block that is found under it now, or None where other content has the key.
        """
        entry = _Entry(chain_key(parent, token_ids), parent, tuple(token_ids))
        known = self._blocks.get(entry.key)
        if known is None:
            self._entries[block] = entry
            self._blocks[entry.key] = known = block
        return (entry.key, known) if self._entries[known] == entry else None

    def replace(self, block: int, other: int) -> None:
        """Let `other` be found in place of `block`; both hold the same content."""
        entry = self._entries.pop(block)
        self._entries[other] = entry
        self._blocks[entry.key] = other

    def forget(self, block: int) -> None:
        entry = self._entries.pop(block, None)
        if entry is not None and self._blocks.get(entry.key) == block:
            del self._blocks[entry.key]

    def rebuild(self) -> None:
        """Repair what an interrupted change left half done."""
        self._blocks = {entry.key: block for block, entry in self._entries.items()}
        self._entries = {block: self._entries[block] for block in self._blocks.values()}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every indexed block stands under its key, once."""
        assert len(self._blocks) == len(self._entries), "a block is indexed twice"
        for block, entry in self._entries.items():
            assert self._blocks.get(entry.key) == block, f"block {block} is not under its key"
            assert len(entry.token_ids) == self.block_tokens, f"block {block} is indexed and not full"

"""The outputs of finished requests, as one suffix tree of bounded size. Shared by drafters; drafts nothing itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from specdec.drafters.suffix_tree import Locus, SuffixTree


class Ended(NamedTuple):
    """A request that was released: its text and where its output begins."""

    request_id: int
    tokens: list[int]
    num_prompt_tokens: int


class SuffixCache:
    """Learns outputs, and forgets the oldest ones beyond `max_tokens`.

    A released request may come back: after a failed step a drafter is told to release it and hears of it anew. What
    it said is therefore learned only when another request is heard of.
    """

    def __init__(self, max_depth: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.version = 0  # loci are good for one version
        self.tree = SuffixTree(max_depth)
        self._texts: deque[list[int]] = deque()
        self._ended: list[Ended] = []

    def end(self, ended: Ended) -> None:
        """Take the text of a released request, to be learned soon."""
        self._ended.append(ended)

    def settle(self, heard: Collection[int]) -> list[Ended]:
        """Learn from the requests that ended, except those `heard` of again, which are returned."""
        back = [e for e in self._ended if e.request_id in heard]
        ended, self._ended = self._ended, []
        for e in ended:
            if e.request_id not in heard:
                self._learn(e.tokens[e.num_prompt_tokens :][-self.max_tokens :])
        return back

    def _learn(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self.version += 1
        while self._texts and self.num_tokens + len(tokens) > self.max_tokens:
            oldest = self._texts.popleft()
            self.tree.remove(oldest)
            self.num_tokens -= len(oldest)
        for token_id in tokens:
            self.tree.append(token_id)
        self._texts.append(self.tree.close())
        self.num_tokens += len(tokens)

    def clear(self) -> None:
        """Forget everything."""
        self.version += 1
        self.num_tokens = 0
        self.tree.clear()
        self._texts.clear()
        self._ended.clear()


class Cursor:
    """The suffixes of one request's text that occur in a cache, kept up to date as the text grows."""

    def __init__(self) -> None:
        self._version = -1
        self._length = 0
        self._loci: list[Locus] = []

    def suffixes(self, cache: SuffixCache, text: Sequence[int]) -> list[Locus]:
        """Return them, longest first. `text` may only have grown since the last call."""
        if self._version != cache.version:
            # What is longer than the tree is deep cannot match, so the end of the text will do.
            self._version, self._loci = cache.version, []
            self._length = max(0, len(text) - cache.tree.max_depth)
        for token_id in text[self._length :]:
            self._loci = cache.tree.advance(self._loci, token_id)
        self._length = len(text)
        return self._loci

"""A suffix tree with counts that grows a token at a time. Shared by drafters; drafts nothing itself.

Every substring of up to `max_depth` tokens has a count. One that occurs once is a leaf: it holds where it stands in
its text, and its continuation is read there. So ordinary text takes one to two nodes per token, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_CHILDREN = 8  # that `continuations` returns; kept in order while counts grow


class _Node:
    """A substring. `children` None: a leaf, or as deep as the tree goes."""

    __slots__ = ("best", "children", "continued", "count", "start", "text")

    def __init__(self, text: list[int] | None, start: int) -> None:
        self.count = 1
        self.text, self.start = text, start  # of a leaf: its only occurrence
        self.children: dict[int, _Node] | None = None
        self.continued = 0  # occurrences that something follows: the sum of the children's counts
        self.best: list[int] | None = None  # tokens of the children with the largest counts; None = to be sorted anew


class Locus(NamedTuple):
    """A substring as a place in the tree: `depth` tokens long; deeper than its node only below a leaf."""

    node: _Node
    depth: int


class Continuation(NamedTuple):
    """A token that followed, its share of all that followed, and where it leads."""

    token_id: int
    probability: float
    locus: Locus


class SuffixTree:
    """Counts of all substrings of several texts, one of which may be open at its end.

    Appending a token touches only the suffixes that occurred before, at most `max_depth` of them.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.clear()

    def clear(self) -> None:
        """Forget all texts."""
        self._root = _Node(None, 0)
        self._root.children, self._root.count, self._root.best = {}, 0, None
        self._text: list[int] = []
        self._active: list[Locus] = []  # suffixes of the open text that occurred before, longest first

    @property
    def num_tokens(self) -> int:
        """Tokens of the open text."""
        return len(self._text)

    def append(self, token_id: int) -> None:
        """Add a token to the open text."""
        self._text.append(token_id)
        grown: list[Locus] = []
        for node, depth in (*self._active, Locus(self._root, 0)):
            child = self._enter(node, token_id, depth + 1)
            if child is not None and depth + 1 < self.max_depth:
                grown.append(Locus(child, depth + 1))
        self._active = grown

    def _enter(self, node: _Node, token_id: int, depth: int) -> _Node | None:
        """Count the open text's suffix of `depth` tokens below `node`; return its node if it occurred before."""
        assert node.children is not None, "an active suffix stands at an inner node"
        node.continued += 1
        child = node.children.get(token_id)
        if child is None:
            node.children[token_id] = _Node(self._text, len(self._text) - depth)
            _raise(node, token_id)
            return None
        child.count += 1
        _raise(node, token_id)
        if child.children is None:
            self._open_leaf(child, depth)
        return child

    def _open_leaf(self, leaf: _Node, depth: int) -> None:
        """Give a leaf that occurs a second time a child for what followed the first time."""
        text, start = leaf.text, leaf.start
        leaf.text = None
        if depth == self.max_depth:
            return
        leaf.children, leaf.best = {}, []
        if text is not None and start + depth < len(text):
            leaf.children[text[start + depth]] = _Node(text, start)
            leaf.continued = 1
            leaf.best = [text[start + depth]]

    def close(self) -> list[int]:
        """End the open text and return it, for `remove`; the next token begins another."""
        text, self._text, self._active = self._text, [], []
        return text

    def remove(self, text: list[int]) -> None:
        """Take back every count of a closed text, the very list that `close` returned."""
        for first in range(len(text)):
            node = self._root
            for token_id in text[first : first + self.max_depth]:
                assert node.children is not None
                child = node.children[token_id]
                child.count -= 1
                node.continued -= 1
                if node.best is not None and token_id in node.best:
                    node.best = None
                if child.count == 0:
                    del node.children[token_id]
                    break
                node = child

    def count(self, tokens: Sequence[int]) -> int:
        """Return how often `tokens` (1 to `max_depth` of them) occurs."""
        locus = Locus(self._root, 0)
        for token_id in tokens:
            below = self._descend(locus, token_id)
            if below is None:
                return 0
            locus = below
        return locus.node.count

    def _descend(self, locus: Locus, token_id: int) -> Locus | None:
        node, depth = locus
        if node.children is not None:
            child = node.children.get(token_id)
            return None if child is None else Locus(child, depth + 1)
        if node.text is not None and node.start + depth < len(node.text) and node.text[node.start + depth] == token_id:
            return Locus(node, depth + 1)
        return None

    def suffixes(self) -> list[Locus]:
        """Return the suffixes of the open text, shorter than `max_depth`, that also occur earlier; longest first."""
        return self._active

    def advance(self, loci: Sequence[Locus], token_id: int) -> list[Locus]:
        """Return the suffixes of a foreign text that occur here, after one more token; longest first.

        Args:
            loci: the answer for the text before that token; empty at its beginning.
            token_id: the token.
        """
        longer = (self._descend(locus, token_id) for locus in (*loci, Locus(self._root, 0)))
        return [locus for locus in longer if locus is not None and locus.depth < self.max_depth]

    def continuations(self, locus: Locus, most: int = MOST_CHILDREN) -> list[Continuation]:
        """Return up to `most` tokens that followed a substring, the most frequent first; of equals, the newer."""
        node, depth = locus
        if node.children is None:
            at = node.start + depth
            if node.text is None or at >= len(node.text):
                return []
            return [Continuation(node.text[at], 1.0, Locus(node, depth + 1))]
        children = node.children
        if node.best is None:
            node.best = sorted(children, key=lambda token_id: -children[token_id].count)[:MOST_CHILDREN]
        return [
            Continuation(token_id, children[token_id].count / node.continued, Locus(children[token_id], depth + 1))
            for token_id in node.best[:most]
        ]


def _raise(node: _Node, token_id: int) -> None:
    """Move a child whose count has just grown to its place among the best."""
    best, children = node.best, node.children
    if best is None or children is None:
        return
    count = children[token_id].count
    if token_id in best:
        place = best.index(token_id)
    elif len(best) < MOST_CHILDREN:
        place = len(best)
        best.append(token_id)
    elif children[best[-1]].count <= count:
        place = len(best) - 1
        best[place] = token_id
    else:
        return
    while place and children[best[place - 1]].count <= count:
        best[place - 1], best[place] = best[place], best[place - 1]
        place -= 1

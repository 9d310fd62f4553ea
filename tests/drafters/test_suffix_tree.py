"""Counts of a suffix tree are those of counting by hand, whatever was appended, closed and removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafters.suffix_cache import Cursor, Ended, SuffixCache
from specdec.drafters.suffix_tree import MOST_CHILDREN, Locus, SuffixTree

TOKENS = st.integers(0, 2)
TEXTS = st.lists(st.lists(TOKENS, max_size=14), max_size=5)


def counted(texts: Sequence[Sequence[int]], max_depth: int) -> Counter[tuple[int, ...]]:
    """Return how often every substring of 1 to `max_depth` tokens occurs."""
    return Counter(
        tuple(text[i : i + n]) for text in texts for n in range(1, max_depth + 1) for i in range(len(text) - n + 1)
    )


def assert_counts(tree: SuffixTree, texts: Sequence[Sequence[int]]) -> None:
    """Assert all counts, those of absent substrings and the continuations of every substring."""
    expected = counted(texts, tree.max_depth)
    for tokens, count in expected.items():
        assert tree.count(tokens) == count, tokens
        for token_id in {t for text in texts for t in text}:
            longer = (*tokens, token_id)
            if len(longer) <= tree.max_depth and longer not in expected:
                assert tree.count(longer) == 0, longer
        if len(tokens) < tree.max_depth:
            assert_continuations(tree, tokens, expected)


def assert_continuations(tree: SuffixTree, tokens: tuple[int, ...], expected: Counter[tuple[int, ...]]) -> None:
    followed = {token_id: expected[(*tokens, token_id)] for (token_id, *more) in list(expected) if not more}
    followed = {token_id: count for token_id, count in followed.items() if count}
    loci: list[Locus] = []
    for token_id in tokens:
        loci = tree.advance(loci, token_id)
    assert loci[0].depth == len(tokens)
    found = tree.continuations(loci[0])
    assert {c.token_id: c.probability for c in found} == {t: n / sum(followed.values()) for t, n in followed.items()}, (
        tokens
    )
    assert [c.probability for c in found] == sorted((c.probability for c in found), reverse=True)
    assert tree.continuations(loci[0], 1) == found[:1]


def grow(tree: SuffixTree, text: Sequence[int]) -> None:
    for token_id in text:
        tree.append(token_id)


@given(TEXTS, st.integers(2, 6))
def test_counts_are_those_of_counting(texts: list[list[int]], max_depth: int) -> None:
    tree = SuffixTree(max_depth)
    for i, text in enumerate(texts):
        grow(tree, text)
        assert_counts(tree, texts[: i + 1])
        if i + 1 < len(texts):
            tree.close()


@given(TEXTS, st.integers(2, 6), st.data())
def test_removing_takes_everything_back(texts: list[list[int]], max_depth: int, data: st.DataObject) -> None:
    tree, kept = SuffixTree(max_depth), []
    for text in texts:
        grow(tree, text)
        kept.append(tree.close())
        if data.draw(st.booleans()):
            tree.remove(kept.pop(data.draw(st.integers(0, len(kept) - 1))))
        assert_counts(tree, kept)
    for text in kept:
        tree.remove(text)
    assert not tree._root.children
    assert tree._root.continued == 0


@given(st.lists(TOKENS, max_size=40), st.integers(2, 6))
def test_the_suffixes_are_those_that_occur_earlier(text: list[int], max_depth: int) -> None:
    tree = SuffixTree(max_depth)
    grow(tree, text)
    earlier = counted([text[:-1]], max_depth)
    expected = [n for n in range(max_depth - 1, 0, -1) if n < len(text) and earlier[tuple(text[-n:])]]
    assert [locus.depth for locus in tree.suffixes()] == expected


@given(st.lists(TOKENS, max_size=20), st.lists(TOKENS, max_size=20), st.integers(2, 6))
def test_a_foreign_text_finds_its_suffixes(text: list[int], foreign: list[int], max_depth: int) -> None:
    tree = SuffixTree(max_depth)
    grow(tree, text)
    tree.close()
    loci: list[Locus] = []
    for token_id in foreign:
        loci = tree.advance(loci, token_id)
    known = counted([text], max_depth)
    expected = [n for n in range(max_depth - 1, 0, -1) if n <= len(foreign) and known[tuple(foreign[-n:])]]
    assert [locus.depth for locus in loci] == expected


def test_of_equally_frequent_continuations_the_newer_comes_first() -> None:
    tree = SuffixTree(4)
    grow(tree, [1, 2, 1, 3, 1])
    assert [c.token_id for c in tree.continuations(tree.suffixes()[0])] == [3, 2]
    grow(tree, [2, 1])
    assert [c.token_id for c in tree.continuations(tree.suffixes()[-1])] == [2, 3]


def test_only_the_most_frequent_children_are_kept_in_order() -> None:
    tree = SuffixTree(3)
    for token_id in range(1, MOST_CHILDREN + 5):
        grow(tree, [0, token_id] * token_id)
    found = tree.continuations(tree.advance([], 0)[0])
    assert [c.token_id for c in found] == list(range(MOST_CHILDREN + 4, 4, -1))


@pytest.mark.parametrize("text", [[7] * 3000, [*range(50)] * 60, list(range(3000))], ids=["one", "loop", "no repeat"])
def test_nodes_do_not_grow_with_depth_times_length(text: list[int]) -> None:
    tree = SuffixTree(32)
    grow(tree, text)

    def num_nodes(node: object) -> int:
        children = node.children or {}  # type: ignore[attr-defined]
        return 1 + sum(num_nodes(child) for child in children.values())

    assert num_nodes(tree._root) <= len(text) + 32 * 50 + 2


def ended(request_id: int, *tokens: int) -> Ended:
    return Ended(request_id, [9, *tokens], 1)


def test_a_cache_learns_outputs_and_forgets_the_oldest() -> None:
    cache = SuffixCache(4, max_tokens=6)
    for request_id, tokens in enumerate(((1, 2, 3), (4, 5, 6), (7, 8))):
        cache.end(ended(request_id, *tokens))
        assert cache.settle(()) == []
    assert [cache.tree.count(t) for t in ((1, 2), (4, 5), (7, 8), (9,))] == [0, 1, 1, 0]
    assert cache.num_tokens == 5
    cache.end(ended(3, *range(10, 30)))  # more than there is room for: its end
    cache.settle(())
    assert cache.num_tokens == 6
    assert [cache.tree.count(t) for t in ((7,), (23,), (24,), (29,))] == [0, 0, 1, 1]
    cache.clear()
    assert cache.num_tokens == 0
    assert cache.tree.count((29,)) == 0


def test_a_cache_does_not_learn_from_a_request_that_comes_back() -> None:
    cache = SuffixCache(4, max_tokens=100)
    cache.end(ended(1, 1, 2))
    cache.end(ended(2, 5, 6))
    assert [e.request_id for e in cache.settle({1})] == [1]
    cache.end(ended(1, 1, 2, 3))
    cache.settle({7})
    assert [cache.tree.count(t) for t in ((1, 2), (2, 3), (5, 6))] == [1, 1, 1]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.lists(TOKENS, min_size=1, max_size=6)), max_size=12))
def test_a_cursor_is_right_after_any_mixture_of_growing_and_learning(turns: list[tuple[bool, list[int]]]) -> None:
    cache, cursor, text = SuffixCache(4, max_tokens=15), Cursor(), [0]
    for i, (learns, tokens) in enumerate(turns):
        if learns:
            cache.end(ended(i, *tokens))
            cache.settle(())
        else:
            text += tokens
        fresh = Cursor().suffixes(cache, text)
        assert [x.depth for x in cursor.suffixes(cache, text)] == [x.depth for x in fresh]
        assert [x.node for x in cursor.suffixes(cache, text)] == [x.node for x in fresh]

"""Where an answer begins to repeat itself: against brute force, through steps that fail, and as a stop criterion."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import ConfigError
from specdec.repetition import REPETITION, RepeatWatch, first_repeat
from specdec.request import Request, StopRules
from tests.decoding import GREEDY

TEXTS = st.lists(st.integers(0, 2), max_size=40)
WIDTHS = st.integers(1, 9)


def brute_force(tokens: list[int], n: int) -> int | None:
    starts = range(len(tokens) - n + 1)
    return next((s for s in starts if any(tokens[s : s + n] == tokens[r : r + n] for r in range(s))), None)


@pytest.mark.parametrize(
    ("tokens", "n", "cut"),
    [
        ([1, 2, 3, 1, 2, 3], 2, 3),
        ([7, 7, 7], 2, 1),  # the two may overlap
        ([7, 7], 2, None),
        ([1, 2, 3, 1, 2], 3, None),  # not complete
        ([], 8, None),
        ([*range(9), *range(8)], 8, 9),
        ([*range(9), *range(7), 20], 8, None),
    ],
)
def test_cut_by_hand(tokens: list[int], n: int, cut: int | None) -> None:
    assert first_repeat(tokens, n) == cut


@given(TEXTS, WIDTHS)
@settings(deadline=None, max_examples=150)
def test_cut_is_the_first_of_all_repetitions(tokens: list[int], n: int) -> None:
    cut = first_repeat(tokens, n)
    assert cut == brute_force(tokens, n)
    if cut is not None:
        assert first_repeat(tokens[: cut + n - 1], n) is None


@given(TEXTS, TEXTS, WIDTHS)
@settings(deadline=None, max_examples=150)
def test_watch_ends_where_the_first_repetition_is_complete(prompt: list[int], new: list[int], n: int) -> None:
    watch = RepeatWatch(len(prompt), n)
    answers = [watch([*prompt, *new[: i + 1]]) for i in range(len(new))]
    cut = first_repeat(new, n)
    assert next((i + 1 for i, answer in enumerate(answers) if answer), None) == (None if cut is None else cut + n)
    assert set(answers) <= {False, REPETITION}


@given(TEXTS, st.lists(st.tuples(st.integers(0, 40), TEXTS), max_size=6), WIDTHS)
@settings(deadline=None, max_examples=150)
def test_watch_forgets_what_did_not_come_to_be(first: list[int], retries: list[tuple[int, list[int]]], n: int) -> None:
    watch, new = RepeatWatch(2, n), []
    for kept, block in [(0, first), *retries]:
        del new[kept:]
        for token in block:
            new.append(token)
            repeated = brute_force(new, n) is not None and new[-n:] in [new[i : i + n] for i in range(len(new) - n)]
            assert watch([5, 5, *new]) == (REPETITION if repeated else False)


def test_watch_that_missed_tokens_catches_up() -> None:
    watch = RepeatWatch(1, 2)
    assert watch([9, 1, 2, 3, 1]) is False
    assert watch([9, 1, 2, 3, 1, 2]) == REPETITION


def test_criterion_ends_a_request_inside_a_block() -> None:
    prompt = [*range(1, 11)] * 2
    stop = StopRules(max_new_tokens=64, criteria=(RepeatWatch(len(prompt)),))
    request = Request(0, prompt, GREEDY, stop, 0)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    for block in (text[:1], text[1:9], text[9:12]):
        assert request.crop([*block, 63]) == ([*block, 63], None)  # the last of a block may be another one
        tokens, reason = request.crop(block)
        request.take(tokens, 0, reason)
    tokens, reason = request.crop(text[12:])
    assert (tokens, reason) == (text[12:17], REPETITION)
    assert first_repeat([*request.new_tokens, *tokens]) == 9


@pytest.mark.parametrize("n", [0, -1, True, 2.0])
def test_bad_widths_are_refused(n: int) -> None:
    with pytest.raises(ConfigError, match="n="):
        first_repeat([1], n)
    with pytest.raises(ConfigError, match="n="):
        RepeatWatch(0, n)


def test_negative_prompt_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_prompt_tokens=-1"):
        RepeatWatch(-1)

"""Which tokens a head learns to draft."""

from __future__ import annotations

import pytest
import torch

from specdec.errors import ConfigError
from specdec.train.vocabulary_choice import choose_vocabulary, count_tokens, coverage
from tests.train.toy import VOCAB_SIZE, toy_examples


def test_ties_go_to_the_lower_ids_and_some_tokens_are_always_in() -> None:
    counts = torch.tensor([0, 5, 5, 9, 0, 5, 0, 0])
    assert choose_vocabulary(counts, 3).target_ids.tolist() == [1, 2, 3]
    assert choose_vocabulary(counts, 6).target_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert choose_vocabulary(counts, 3, always=[7, 6]).target_ids.tolist() == [3, 6, 7]
    assert choose_vocabulary(counts, None).is_whole
    assert choose_vocabulary(counts, 8).is_whole


def test_other_text_decides_among_what_responses_hardly_know() -> None:
    counts = torch.tensor([0, 1, 0, 3, 0])
    outside = torch.tensor([2, 0, 7, 0, 0])
    assert choose_vocabulary(counts, 3, outside=outside).target_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("size", [0, -1, 9, True, 2.0])
def test_a_size_that_cannot_be_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"draft_vocab_size=.*allowed: 1 to the target's 8"):
        choose_vocabulary(torch.ones(8), size)  # type: ignore[arg-type]


def test_more_required_tokens_than_room_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft_vocab_size=1.*2 tokens"):
        choose_vocabulary(torch.ones(8), 1, always=[2, 3])


def test_coverage_is_the_share_of_responses() -> None:
    examples = toy_examples()
    counts = count_tokens(examples, VOCAB_SIZE)
    assert int(counts.sum()) == sum(e.num_response_tokens for e in examples)
    vocabulary = choose_vocabulary(counts, 4)
    expected = counts.sort(descending=True).values[:4].sum() / counts.sum()
    assert coverage(counts, vocabulary) == pytest.approx(float(expected))
    assert coverage(torch.zeros(VOCAB_SIZE), vocabulary) == 0.0

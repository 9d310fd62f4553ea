"""What is learned of a drafter from steps whose truth is known."""

from __future__ import annotations

import pytest

from specdec.draft_length.estimates import (
    Acceptance,
    DraftCost,
    all_acceptance,
    chain_gains,
    own_acceptance,
    tree_gain,
)


def taught(*steps: tuple[int, int]) -> Acceptance:
    record = own_acceptance()
    for accepted, judged in steps:
        record.add(accepted, judged)
    return record


def test_at_first_a_drafter_is_thought_good() -> None:
    gains = chain_gains(own_acceptance(), all_acceptance(), 3)
    assert gains == pytest.approx([0.8, 0.64, 0.512])
    assert chain_gains(own_acceptance(), all_acceptance(), 0) == []


def test_first_and_later_tokens_are_told_apart() -> None:
    """N-gram drafts: rarely right, but then for long."""
    record = taught(*[(0, 1), (0, 1), (4, 4)] * 40)
    first, second, third = chain_gains(record, all_acceptance(), 3)
    assert first == pytest.approx(1 / 3, abs=0.05)
    assert second / first > 0.9
    assert third / second > 0.9


def test_only_judged_tokens_are_trials() -> None:
    record = taught((0, 1))
    assert (record.first.weight, record.later.weight) == (1, 0)
    record = taught((2, 3))
    assert record.first.weight == 1
    assert record.later.weight == pytest.approx(1.96)
    assert record.later.total == pytest.approx(0.96)


def test_a_step_that_ended_at_an_accepted_token_shows_no_failure() -> None:
    assert taught((2, 2)).later.total == taught((2, 2)).later.weight == 1


def test_everyone_is_a_prior_that_fades() -> None:
    everyone = all_acceptance()
    for _ in range(200):
        everyone.add(1, 1)
    gain = [sum(chain_gains(taught(*[(0, 1)] * n), everyone, 1)) for n in (0, 1, 10, 100)]
    assert gain[0] > 0.95
    assert gain[1] > 0.8
    assert gain[2] < 0.4
    assert gain[3] < 0.01


def test_tree_gain_is_the_mean() -> None:
    assert tree_gain(taught(*[(1, 2), (3, 4)] * 50), all_acceptance()) == pytest.approx(2.0, abs=0.05)


def flat_cost() -> DraftCost:
    return DraftCost(lambda rows: 1.0)


def test_cost_is_not_free_before_anything_is_known() -> None:
    cost = flat_cost()
    assert cost.is_blank
    assert not cost.is_known
    assert cost.parts(1) == (0.0, 0.3)


@pytest.mark.parametrize(("fixed", "each"), [(0.0, 0.2), (0.5, 0.1), (1.0, 0.0)])
def test_fixed_and_per_token_cost(fixed: float, each: float) -> None:
    cost = flat_cost()
    for depth in [4, 1, 8, 2, 6, 1] * 5:
        cost.add(1, 1, depth, fixed + each * depth)
    found = cost.parts(1)
    for depth in (1, 4, 8):
        assert found[0] + found[1] * depth == pytest.approx(fixed + each * depth, rel=0.15)


def test_one_depth_is_taken_as_proportional() -> None:
    cost = flat_cost()
    for _ in range(5):
        cost.add(1, 1, 4, 0.8)
    assert cost.parts(1) == pytest.approx((0.0, 0.2))


def test_a_batch_size_not_seen_grows_as_the_target_does() -> None:
    cost = DraftCost(lambda rows: 1.0 + rows)
    cost.add(1, 1, 2, 0.4)
    assert cost.parts(1)[1] == pytest.approx(0.2)
    assert cost.parts(3)[1] == pytest.approx(0.2 * 4 / 2)
    assert cost.knows(1)
    assert not cost.knows(3)
    cost.add(4, 4, 2, 2.0)
    assert cost.parts(3)[1] == pytest.approx(1.0 * 4 / 5)


def test_catching_up_is_no_evidence_of_a_high_cost() -> None:
    cost = DraftCost(lambda rows: float(rows))
    cost.add(1, 1, 1, 5.0, num_unseen=100)
    assert not cost.is_known
    assert cost.parts(1)[1] == pytest.approx(0.05)
    cost.add(1, 1, 1, 0.3)
    assert cost.parts(1)[1] == pytest.approx(0.3)
    cost.add(1, 1, 1, 5.0, num_unseen=64)
    assert cost.parts(1)[1] == pytest.approx(0.3)
    cost.add(1, 1, 1, 0.1, num_unseen=64)
    assert cost.parts(1)[1] < 0.3, "cheaper even so"


def test_first_samples_may_hold_one_time_work_and_later_ones_a_pause() -> None:
    cost = flat_cost()
    cost.add(1, 1, 1, 3.0)
    cost.add(1, 1, 1, 0.2)
    assert cost.parts(1)[1] == pytest.approx(0.2)
    for _ in range(5):
        cost.add(1, 1, 1, 0.2)
    cost.add(1, 1, 1, 100.0)
    assert cost.parts(1)[1] < 0.3
    for _ in range(30):
        cost.add(1, 1, 1, 0.4)
    assert cost.parts(1)[1] == pytest.approx(0.4, rel=0.05)


def test_asking_in_vain_is_part_of_the_cost() -> None:
    cost = flat_cost()
    for _ in range(200):
        cost.add(1, 0, 0, 0.01)
        cost.add(1, 1, 4, 0.01)
    fixed, each = cost.parts(1)
    assert fixed == pytest.approx(0.02, rel=0.2)
    assert each < 0.001

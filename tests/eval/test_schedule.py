"""The order in which variants run is balanced for place and for who ran just before."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from specdec.eval.schedule import orders, turns


@pytest.mark.parametrize("count", range(1, 11))
def test_orders_are_balanced(count: int) -> None:
    found = orders(count)
    assert all(sorted(row) == list(range(count)) for row in found)
    places = Counter((place, own) for row in found for place, own in enumerate(row))
    after = Counter(pair for row in found for pair in pairwise(row))
    assert len(places) == count**2
    assert len(after) == count * (count - 1)
    assert len(set(places.values())) == 1
    assert len(set(after.values())) <= 1


def test_every_variant_runs_on_every_batch() -> None:
    found = list(turns(["a", "b", "c"], [["p"], ["q"]], repeats=2))
    assert len({(t.variant, t.batch, t.repeat) for t in found}) == len(found) == 12
    assert [t.place for t in found] == [0, 1, 2] * 4
    assert [t.repeat for t in found] == sorted(t.repeat for t in found)
    assert len({tuple(t.variant for t in found[i : i + 3]) for i in range(0, 12, 3)}) > 1


def test_batches_come_in_another_order_in_each_repeat() -> None:
    """Else a drafter that learns would always meet the last category with the longest memory."""
    names = [[f"p{i}"] for i in range(12)]
    orders_seen = [[t.batch for t in turns(["a"], names, repeats=3) if t.repeat == repeat] for repeat in range(3)]
    assert all(sorted(seen) == list(range(12)) for seen in orders_seen)
    assert len({tuple(seen) for seen in [*orders_seen, list(range(12))]}) == 4
    assert list(turns(["a"], names, 3)) == list(turns(["a"], names, 3)), "a resumed run has the same"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_turns_of_a_conversation_stay_in_order(size: int) -> None:
    prompts = [f"talk {i}" for i in range(9) for _ in range(1 + i % 3)]
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    for repeat in range(4):
        last: dict[str, int] = {}
        for turn in turns(["a"], batches, repeats=4):
            if turn.repeat == repeat:
                assert all(last.get(name, -1) < turn.batch for name in batches[turn.batch])
                last |= dict.fromkeys(batches[turn.batch], turn.batch)

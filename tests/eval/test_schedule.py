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
    found = list(turns(["a", "b", "c"], num_batches=2, repeats=2))
    assert len({(t.variant, t.batch, t.repeat) for t in found}) == len(found) == 12
    assert [t.place for t in found] == [0, 1, 2] * 4
    assert [t.repeat for t in found] == sorted(t.repeat for t in found)
    assert len({tuple(t.variant for t in found[i : i + 3]) for i in range(0, 12, 3)}) > 1

"""The slot allocator against a list of runs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import OutOfCacheError
from specdec.kv.blocks import SlotPool

# (True, length) allocates, (False, i) frees the i-th run that is held.
Actions = list[tuple[bool, int]]
actions = st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps=actions, max_slots=st.one_of(st.none(), st.integers(0, 40)))
def test_runs_tile_the_pool_and_never_overlap(steps: Actions, max_slots: int | None) -> None:
    pool = SlotPool(max_slots)
    held: dict[int, int] = {}
    for allocate, number in steps:
        if allocate:
            before = (pool.capacity, pool.num_used)
            try:
                start = pool.allocate(number)
            except OutOfCacheError:
                assert max_slots is not None
                assert (pool.capacity, pool.num_used) == before
                taken = {slot for s, n in held.items() for slot in range(s, s + n)}
                runs = "".join("x" if slot in taken else "." for slot in range(max_slots)).split("x")
                assert max(map(len, runs)) < number, "a run was free"
            else:
                held[start] = number
        elif held:
            start = sorted(held)[number % len(held)]
            pool.free(start)
            del held[start]
        slots = [slot for start, length in held.items() for slot in range(start, start + length)]
        assert len(slots) == len(set(slots)) == pool.num_used
        assert max(slots, default=-1) < pool.capacity
        assert max_slots is None or pool.capacity <= max_slots
        pool.check_integrity()


def test_the_first_run_that_fits_is_used_before_growing() -> None:
    pool = SlotPool()
    first, second, third = (pool.allocate(n) for n in (4, 2, 4))
    pool.free(first)
    pool.free(third)
    assert pool.allocate(3) == first
    assert pool.allocate(2) == third
    assert pool.allocate(1) == first + 3
    pool.free(second)
    assert pool.capacity == 8
    pool.check_integrity()


def test_a_free_tail_is_given_back() -> None:
    pool = SlotPool(max_slots=10)
    first, second, third = (pool.allocate(2) for _ in range(3))
    pool.free(second)
    pool.free(third)
    assert pool.capacity == 2
    pool.free(first)
    assert pool.capacity == 0
    assert pool.allocate(10) == 0
    assert pool.capacity == 10
    with pytest.raises(OutOfCacheError, match="1 more tokens asked, 10 of 10 in use"):
        pool.allocate(1)


def test_everything_freed_is_one_run_again() -> None:
    pool = SlotPool()
    starts = [pool.allocate(n) for n in (3, 1, 4, 1, 5)]
    for start in starts[::2] + starts[1::2]:
        pool.free(start)
    assert pool.allocate(20) == 0
    assert pool.capacity == 20


def test_integrity_check_can_fail() -> None:
    pool = SlotPool()
    pool.allocate(3)
    pool.capacity += 1
    with pytest.raises(AssertionError, match="capacity"):
        pool.check_integrity()

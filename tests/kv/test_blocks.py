"""The block pool against a plain account of who holds what."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kv.blocks import BlockPool

OWNERS = 3
# (what, owner, number): see `Account.do`.
actions = st.lists(
    st.tuples(
        st.sampled_from(["claim", "unclaim", "take", "share", "drop", "keep", "discard"]),
        st.integers(0, OWNERS - 1),
        st.integers(0, 9),
    ),
    max_size=60,
)


class Account:
    """A pool, and which blocks each owner holds."""

    def __init__(self, max_blocks: int | None) -> None:
        self.pool = BlockPool(max_blocks)
        self.held: dict[int, list[int]] = {owner: [] for owner in range(OWNERS)}
        self.parked: list[int] = []

    def do(self, what: str, owner: int, number: int) -> None:
        held = self.held[owner]
        if what == "claim":
            whole = self.pool.claim(owner, number, held[-1] if held else None)
            if whole and number <= self.pool.num_available and not held:
                assert self.pool.continues(owner, self.pool._claims[owner].start - 1, number)
        elif what == "unclaim":
            self.pool.unclaim(owner)
        elif what == "take" and number <= self.pool.num_available:
            taken = self.pool.take(owner, number, held[-1] if held else None)
            assert len(set(taken)) == number
            assert not set(taken) & self.everything(), "a block in use was handed out"
            held += taken
        elif what == "share" and self.everything():
            block = sorted(self.everything())[number % len(self.everything())]
            if block not in held:
                self.pool.share(block)
                held.append(block)
                self.parked = [b for b in self.parked if b != block]
        elif what in ("drop", "keep") and held:
            block = held.pop()
            self.pool.drop(owner, block, keep=what == "keep", last=held[-1] if held and number % 2 else None)
            if what == "keep" and not any(block in blocks for blocks in self.held.values()):
                self.parked.append(block)
        elif what == "discard" and self.parked:
            assert self.pool.oldest_parked() == self.parked[0]
            self.pool.discard(self.parked.pop(0))

    def everything(self) -> set[int]:
        return {b for blocks in self.held.values() for b in blocks} | set(self.parked)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps=actions, max_blocks=st.one_of(st.none(), st.integers(0, 20)))
def test_no_block_is_handed_out_twice(steps: list[tuple[str, int, int]], max_blocks: int | None) -> None:
    account = Account(max_blocks)
    pool = account.pool
    for step in steps:
        account.do(*step)
        pool.check_integrity()
        used = {b for blocks in account.held.values() for b in blocks}
        assert (pool.num_used, pool.num_parked) == (len(used), len(account.parked))
        for block in used:
            assert pool.holders(block) == sum(block in blocks for blocks in account.held.values())
        if max_blocks is not None:
            assert pool.num_available == max_blocks - len(used) - len(account.parked)
            assert pool.num_blocks <= max_blocks
    holders = {b: pool.holders(b) for b in account.everything() if pool.holders(b)}
    before = (pool.num_used, pool.num_parked, pool.num_available)
    pool.rebuild(holders, account.parked)
    pool.check_integrity()
    assert (pool.num_used, pool.num_parked, pool.num_available) == before
    assert list(pool._parked) == account.parked


def test_a_claim_keeps_others_away_while_they_have_a_choice() -> None:
    pool = BlockPool(max_blocks=8)
    assert pool.claim(0, 4)
    assert pool.take(1, 3) == [4, 5, 6]
    assert pool.take(0, 2) == [0, 1]
    assert pool.take(1, 2, 6) == [7, 3], "with nothing else free, the end of a claim"
    assert pool.take(0, 1, 1) == [2]
    assert pool.num_available == 0
    pool.check_integrity()


def test_what_is_given_back_before_a_claim_is_taken_again() -> None:
    pool = BlockPool()
    pool.claim(0, 3)
    taken = pool.take(0, 3)
    other = pool.take(1, 1)
    for block in reversed(taken[1:]):
        pool.drop(0, block, keep=False, last=block - 1)
    assert pool.take(1, 1, other[-1]) == [4]
    assert pool.take(0, 2, 0) == [1, 2]


def test_a_run_that_fits_is_used_before_growing() -> None:
    pool = BlockPool()
    first, second, third = (pool.take(owner, n) for owner, n in ((0, 4), (1, 2), (2, 4)))
    for owner, blocks in ((0, first), (2, third)):
        for block in reversed(blocks):
            pool.drop(owner, block, keep=False)
        pool.unclaim(owner)
    assert pool.num_blocks == 6, "what is free at the end is no part of the pool"
    assert pool.take(3, 3) == [0, 1, 2]
    assert pool.take(4, 2) == [6, 7]
    assert pool.take(5, 1, second[-1]) == [3]
    pool.check_integrity()


def test_a_lower_limit_than_what_is_there_hands_out_nothing() -> None:
    pool = BlockPool()
    blocks = pool.take(0, 4)
    pool.max_blocks = 2
    assert pool.num_available == 0
    for block in reversed(blocks[1:]):
        pool.drop(0, block, keep=False)
    assert pool.num_available == 1


def test_parked_blocks_go_oldest_first() -> None:
    pool = BlockPool(max_blocks=3)
    blocks = pool.take(0, 3)
    for block in (1, 0, 2):
        pool.drop(0, block, keep=True)
    assert pool.num_available == 0
    pool.share(0)
    assert pool.oldest_parked() == 1
    pool.drop(0, 0, keep=True)  # used again, so it is the newest now
    order = []
    for _ in blocks:
        order.append(pool.oldest_parked())
        pool.discard(order[-1])
    assert order == [1, 2, 0]
    pool.check_integrity()


@pytest.mark.parametrize("fault", ["hole", "twice", "no holder"])
def test_integrity_check_can_fail(fault: str) -> None:
    pool = BlockPool()
    pool.take(0, 3)
    if fault == "hole":
        pool.num_blocks += 1
    elif fault == "twice":
        pool._parked[1] = None
    else:
        pool._holders[1] = 0
    with pytest.raises(AssertionError, match=r"blocks end at|overlap|no holder"):
        pool.check_integrity()

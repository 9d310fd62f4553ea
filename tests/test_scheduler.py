"""Who runs when: ranks, budgets, memory running out. Simulated: no model, no tensor."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from specdec.errors import QueueFullError
from specdec.interfaces import SamplingParams
from specdec.request import Request, StopRules
from specdec.scheduler import ARRIVALS_PER_PRIORITY, Scheduler, Work


def scheduler(**options: int | None) -> Scheduler:
    defaults: dict[str, int | None] = {"max_batch_size": 4, "prefill_chunk_tokens": 8, "max_draft_tokens": 3}
    return Scheduler(**{**defaults, **options})  # type: ignore[arg-type]


def request(number: int, prompt: int = 1, new: int = 4, **options: int | bool) -> Request:
    rules = StopRules(max_new_tokens=new)
    return Request(number, [1] * prompt, SamplingParams(), rules, 0, **options)  # type: ignore[arg-type]


def run(work: Work, emitted: int = 1) -> None:
    """Do what the engine does to a request: its rows are computed, and one that samples gets tokens."""
    w = work.request
    w.num_computed += work.num_rows
    if work.samples:
        w.num_computed += emitted - 1
        w.take([1] * emitted, emitted - 1, "length" if emitted == w.num_remaining else None)


def shape(work: list[Work]) -> list[tuple[int, int, int]]:
    return [(w.request.request_id, w.num_rows, w.max_draft_tokens) for w in work]


class TestRanks:
    def test_first_come_first_served(self) -> None:
        s = scheduler(max_batch_size=2)
        for i in range(4):
            s.add(request(i))
        s.admit(lambda r: True)
        assert [r.request_id for r in s.running] == [0, 1]

    def test_priority_passes_so_many_and_no_more(self) -> None:
        s = scheduler(max_batch_size=ARRIVALS_PER_PRIORITY + 2)
        for i in range(ARRIVALS_PER_PRIORITY + 2):
            s.add(request(i))
        s.add(request(1000, priority=1))
        s.admit(lambda r: True)
        # It came as number 67 and ranks as number 3, behind the one that has that rank already.
        order = [r.request_id for r in s.running]
        assert order[:5] == [0, 1, 2, 1000, 3]

    def test_nobody_starves_under_better_priorities(self) -> None:
        s = scheduler(max_batch_size=1)
        s.add(request(0))
        ran: list[int] = []
        for i in range(1, 400):
            s.add(request(i, priority=1))
            s.admit(lambda r: True)
            ran.append(s.running[0].request_id)
            s.remove(s.running[0])
        assert ran.index(0) <= ARRIVALS_PER_PRIORITY + 1

    def test_no_memory_for_the_first_is_no_turn_for_the_second(self) -> None:
        s = scheduler()
        s.add(request(0, prompt=100))
        s.add(request(1))
        s.admit(lambda r: len(r.tokens) < 50)
        assert not s.running


class TestQueue:
    def test_full(self) -> None:
        s = scheduler(max_waiting=2)
        s.add(request(0))
        s.add(request(1))
        with pytest.raises(QueueFullError, match="2 requests wait already, which is what max_waiting allows"):
            s.add(request(2))
        assert [r.request_id for r in s.waiting] == [0, 1]
        s.admit(lambda r: True)
        s.add(request(2))

    def test_a_preempted_request_is_taken_back_by_a_full_queue(self) -> None:
        s = scheduler(max_waiting=1)
        s.add(request(0))
        s.admit(lambda r: True)
        s.add(request(1))
        s.preempt(s.running[0])
        assert [r.request_id for r in s.waiting] == [0, 1]


class TestSteps:
    def test_prompts_share_a_budget_while_others_decode(self) -> None:
        s = scheduler(prefill_chunk_tokens=8)
        first = request(0)
        s.add(first)
        s.admit(lambda r: True)
        run(s.schedule()[0])
        s.add(request(1, prompt=6))
        s.add(request(2, prompt=20))
        s.admit(lambda r: True)
        assert shape(s.schedule()) == [(0, 1, 2), (1, 6, 0), (2, 2, 0)]

    def test_rows_of_a_step_have_a_bound_and_decode_rows_come_before_it(self) -> None:
        s = scheduler(max_step_tokens=9, max_draft_tokens=4)
        for i in range(3):
            s.add(request(i, new=20))
        s.admit(lambda r: True)
        for w in s.schedule():
            run(w)
        assert shape(s.schedule()) == [(0, 1, 2), (1, 1, 2), (2, 1, 2)], "drafts share what is left"
        s.add(request(3, prompt=30))
        s.admit(lambda r: True)
        assert shape(s.schedule()) == [(0, 1, 0), (1, 1, 0), (2, 1, 0), (3, 6, 0)], "prompts go before drafts"
        s.max_step_tokens = 2
        assert shape(s.schedule()) == [(0, 1, 0), (1, 1, 0), (2, 1, 0)], "decode rows always run"

    def test_a_prompt_alone_always_gets_on(self) -> None:
        s = scheduler(max_step_tokens=1)
        s.add(request(0, prompt=3))
        s.admit(lambda r: True)
        for _ in range(2):
            (w,) = s.schedule()
            assert (w.num_rows, w.samples) == (1, False)
            run(w)
        assert s.schedule()[0].samples

    def test_no_drafts_for_who_wants_none(self) -> None:
        s = scheduler()
        s.add(request(0, draft=False))
        s.admit(lambda r: True)
        run(s.schedule()[0])
        assert shape(s.schedule()) == [(0, 1, 0)]

    def test_a_resumed_request_computes_all_but_its_last_token_and_then_decodes(self) -> None:
        s = scheduler(prefill_chunk_tokens=4)
        r = request(0, prompt=3, new=9)
        s.add(r)
        s.admit(lambda _: True)
        run(s.schedule()[0])
        run(s.schedule()[0], emitted=3)
        s.preempt(r)
        r.num_computed = 0
        s.admit(lambda _: True)
        seen = []
        while not (w := s.schedule()[0]).samples:
            seen.append((w.num_rows, w.is_prefill, w.max_draft_tokens))
            run(w)
        assert seen == [(4, True, 0), (2, True, 0)]
        assert (w.num_rows, w.is_prefill, w.max_draft_tokens) == (1, False, 3)
        assert r.num_computed == 6


@dataclass
class Machine:
    """Blocks of memory, as an engine hands them out."""

    blocks: int
    held: dict[int, int] = field(default_factory=dict)

    def take(self, request_id: int, count: int) -> bool:
        if sum(self.held.values()) - self.held.get(request_id, 0) + count > self.blocks:
            return False
        self.held[request_id] = count
        return True


@pytest.mark.parametrize("seed", range(5))
def test_everyone_finishes_whatever_the_memory(seed: int) -> None:
    """Random requests on a machine on which the longest just fits: all end, by rank, and the run repeats exactly."""

    def simulate() -> list[tuple[int, ...]]:
        dice = random.Random(seed)
        s = scheduler(max_batch_size=6, max_waiting=None, max_step_tokens=12)
        machine, log, arrived, preemptions = Machine(blocks=30), [], 0, 0
        for _ in range(3000):
            if arrived < 40 and dice.random() < 0.5:
                new = request(arrived, dice.randint(1, 14), dice.randint(1, 15), priority=dice.choice([0, 0, 1]))
                s.add(new)
                arrived += 1
            s.admit(lambda r: not s.running or machine.take(r.request_id, len(r.tokens) + 1))
            for w in s.schedule():
                if w.request not in s.running:
                    continue
                rows = w.num_rows + w.max_draft_tokens
                while w.request in s.running and not machine.take(w.request.request_id, w.request.num_computed + rows):
                    victim = s.victim()
                    assert victim is not None, "alone it fits"
                    s.preempt(victim)
                    machine.held.pop(victim.request_id, None)
                    victim.num_computed = 0
                    preemptions += 1
                if w.request in s.running:
                    run(w, emitted=1 + (dice.randint(0, w.max_draft_tokens) if w.samples else 0))
                    log.append((w.request.request_id, w.num_rows, w.request.num_new_tokens))
            for r in [r for r in s.running if r.finish_reason]:
                s.remove(r)
                del machine.held[r.request_id]
            if arrived == 40 and not s.running and not s.waiting:
                assert preemptions, "this test is to run out of memory"
                return log
        raise AssertionError("somebody never finished")

    assert simulate() == simulate()

"""Who runs when: ranks, budgets, memory running out. Simulated: no model, no tensor."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from specdec.errors import QueueFullError
from specdec.interfaces import SamplingParams
from specdec.request import Request, StopRules
from specdec.scheduler import ARRIVALS_PER_PRIORITY, LEAST_AHEAD, Claim, Scheduler, Work, most_blocks


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
        s = scheduler(max_waiting=2, max_batch_size=1)
        for i in range(3):
            s.add(request(i))  # one has a place, two wait
        with pytest.raises(QueueFullError, match="3 requests wait and 0 run, and max_waiting=2 allows no more"):
            s.add(request(3))
        assert [r.request_id for r in s.waiting] == [0, 1, 2]
        s.admit(lambda r: True)
        with pytest.raises(QueueFullError, match="2 requests wait and 1 run"):
            s.add(request(3))
        s.remove(s.running[0])
        s.add(request(3))

    def test_an_idle_engine_takes_what_it_has_places_for(self) -> None:
        s = scheduler(max_waiting=2, max_batch_size=64)
        for i in range(66):
            s.add(request(i))
        with pytest.raises(QueueFullError):
            s.add(request(66))

    def test_no_queue(self) -> None:
        s = scheduler(max_waiting=0, max_batch_size=2)
        s.add(request(0))
        s.add(request(1))
        for _ in range(2):
            with pytest.raises(QueueFullError):
                s.check_room()
            s.admit(lambda r: True)
        s.remove(s.running[1])
        s.add(request(2))

    def test_free_places_are_no_places_where_memory_is_short(self) -> None:
        s = scheduler(max_waiting=2, max_batch_size=64)
        for i in range(3):
            s.add(request(i))
        s.admit(lambda r: r.request_id < 1)
        with pytest.raises(QueueFullError, match="2 requests wait and 1 run"):
            s.add(request(3))
        for waiting in list(s.waiting):
            s.remove(waiting)
        for i in range(4, 8):
            s.add(request(i))

    def test_a_preempted_request_is_taken_back_by_a_full_queue(self) -> None:
        s = scheduler(max_waiting=1, max_batch_size=1)
        s.add(request(0))
        s.admit(lambda r: True)
        s.add(request(1))
        s.preempt(s.running[0])
        assert [r.request_id for r in s.waiting] == [0, 1]

    def test_whoever_waits_is_found_by_rank(self) -> None:
        s = scheduler(max_batch_size=2)
        some = [request(i, priority=i % 3) for i in range(100)]
        for r in some:
            s.add(r)
        s.admit(lambda r: True)
        for r in some[::2]:
            s.remove(r)
            s.remove(r)  # once more: nothing happens
        assert {r.request_id for r in [*s.running, *s.waiting]} == set(range(1, 100, 2))
        s.remove(request(7))  # of the same number, but another one
        assert len(s.running) + len(s.waiting) == 50


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

    def test_who_wants_no_drafts_has_no_share_in_them(self) -> None:
        s = scheduler(max_step_tokens=6, max_draft_tokens=4)
        for i in range(3):
            s.add(request(i, new=20, draft=i == 1))
        s.admit(lambda r: True)
        for w in s.schedule():
            run(w)
        assert shape(s.schedule()) == [(0, 1, 0), (1, 1, 3), (2, 1, 0)]

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


class TestMemory:
    def held(self, *numbers: int) -> Scheduler:
        s = scheduler(max_batch_size=8)
        for i in numbers:
            s.add(request(i, prompt=4, new=9))
        s.admit(lambda r: True)
        return s

    def test_the_worst_rank_gives_way(self) -> None:
        """Room for two of three: whoever came last goes, whoever asks."""
        s = self.held(0, 1, 2)
        gone: list[int] = []

        def preempt(r: Request) -> None:
            gone.append(r.request_id)
            s.preempt(r)

        kept = s.fit(s.schedule(), lambda w, alone: len(s.running) <= 2, preempt)
        assert gone == [2]
        assert [w.request.request_id for w in kept] == [0, 1]
        assert [r.request_id for r in s.waiting] == [2]

    def test_who_asks_is_preempted_himself_if_he_is_the_last(self) -> None:
        s = self.held(0, 1)
        kept = s.fit(s.schedule(), lambda w, alone: w.request.request_id == 0, s.preempt)
        assert [w.request.request_id for w in kept] == [0]

    def test_who_has_got_his_rows_may_still_lose_them(self) -> None:
        """By priority the second goes first; what the first was given counts for nothing then."""
        s = scheduler(max_batch_size=8, prefill_chunk_tokens=100)
        for i, rank in enumerate((0, 2)):
            s.add(request(i, prompt=4, priority=rank))
        s.admit(lambda r: True)
        kept = s.fit(list(reversed(s.schedule())), lambda w, alone: alone or w.request.request_id == 0, s.preempt)
        assert [w.request.request_id for w in kept] == [1]

    def test_alone_is_told(self) -> None:
        s = self.held(0)
        asked: list[bool] = []

        def take(w: Work, alone: bool) -> bool:
            asked.append(alone)
            return True

        s.fit(s.schedule(), take, s.preempt)
        assert asked == [True]

    def test_an_interruption_while_it_moves_loses_nobody(self) -> None:
        s = self.held(0, 1)
        insort_into = s.waiting
        s.waiting = [s.running[1], *insort_into]  # as in the middle of `preempt`, and of `admit`
        s.admit(lambda r: pytest.fail("it runs already"))
        assert [r.request_id for r in s.running] == [0, 1]
        assert not s.waiting

    def test_looking_ahead(self) -> None:
        block = 16
        fresh = Claim(num_tokens=10, num_remaining=100, num_blocks=1, num_returned=0)
        assert most_blocks([fresh], 1, block) == 1
        assert most_blocks([fresh], 7, block) == 1, "the last token has no KV yet"
        assert most_blocks([fresh], 8, block) == 2
        assert most_blocks([fresh], 1000, block) == 7, "not beyond its end"
        running = Claim(num_tokens=40, num_remaining=20, num_blocks=0, num_returned=3)
        assert most_blocks([running], 1000, block) == 1
        # At the end of the second the first has two blocks and it one more; then it gives back three.
        assert most_blocks([fresh, running], 20, block) == 3
        assert most_blocks([fresh, running], 60, block) == 3
        assert most_blocks([fresh, running], 100, block) == 4

    def test_preemptions_teach_to_look_further_ahead(self) -> None:
        s = self.held(0, 1)
        assert s.tokens_ahead == LEAST_AHEAD
        for _ in range(4):
            s.preempt(s.running[-1])
            s.admit(lambda r: True)
        assert s.tokens_ahead > 4 * LEAST_AHEAD
        for _ in range(300):
            s.admit(lambda r: True)
        assert s.tokens_ahead == LEAST_AHEAD


@dataclass
class Machine:
    """Blocks of memory and what runs on them, as an engine has it."""

    scheduler: Scheduler
    blocks: int
    block_tokens: int = 4
    held: dict[int, int] = field(default_factory=dict)
    num_preemptions: int = 0
    num_prompt_rows: int = 0
    most_running: int = 0

    @property
    def free(self) -> int:
        return self.blocks - sum(self.held.values())

    def reach(self, request_id: int, tokens: int) -> int:
        """Return how many blocks are missing for so many tokens."""
        return max(0, -(-tokens // self.block_tokens) - self.held.get(request_id, 0))

    def try_open(self, r: Request) -> bool:
        s = self.scheduler
        claims = [
            Claim(
                len(q.tokens),
                q.num_remaining,
                self.reach(q.request_id, len(q.tokens)),
                self.held.get(q.request_id, 0),
            )
            for q in [*s.running, r]
        ]
        return not s.running or most_blocks(claims, s.tokens_ahead, self.block_tokens) <= self.free

    def take(self, w: Work, is_alone: bool) -> bool:
        number = w.request.request_id
        more = self.reach(number, w.request.num_computed + w.num_rows)
        if more > self.free:
            assert not is_alone, "alone it fits"
            return False
        self.held[number] = self.held.get(number, 0) + more
        return True

    def with_drafts(self, w: Work) -> Work:
        """Give drafts what is left."""
        number, rows = w.request.request_id, w.num_rows + w.max_draft_tokens
        more = self.reach(number, w.request.num_computed + rows)
        if more > self.free:
            return replace(w, max_draft_tokens=0)
        self.held[number] += more
        return w

    def preempt(self, victim: Request) -> None:
        assert victim is self.scheduler.running[-1], "the worst rank goes"
        assert all(_place(r) <= _place(victim) for r in self.scheduler.running)
        self.scheduler.preempt(victim)
        self.held.pop(victim.request_id, None)
        victim.num_computed = 0
        self.num_preemptions += 1

    def step(self, emitted: Callable[[Work], int]) -> list[Work]:
        """Run a step; return what ran."""
        s = self.scheduler
        s.admit(self.try_open)
        assert not s.waiting or not s.running or _place(s.waiting[0]) > _place(s.running[-1]) or self.is_short()
        work = [self.with_drafts(w) for w in s.fit(s.schedule(), self.take, self.preempt)]
        assert work or not s.running, "a step in which nothing runs would be one of many"
        self.most_running = max(self.most_running, len(s.running))
        for w in work:
            self.num_prompt_rows += w.num_rows * w.is_prefill
            run(w, emitted(w) if w.samples else 0)
            self.held[w.request.request_id] = -(-w.request.num_computed // self.block_tokens)
        for r in [r for r in s.running if r.finish_reason]:
            s.remove(r)
            del self.held[r.request_id]
        return work

    def is_short(self) -> bool:
        """Tell whether the first that waits does not fit."""
        return len(self.scheduler.running) == self.scheduler.max_batch_size or not self.try_open(
            self.scheduler.waiting[0]
        )


def _place(r: Request) -> tuple[int, int]:
    return r.rank, r.request_id


@pytest.mark.parametrize("least_ahead", [1, LEAST_AHEAD])
@pytest.mark.parametrize("blocks", [8, 20, 60])
@pytest.mark.parametrize("seed", range(3))
def test_everyone_finishes_whatever_the_memory(seed: int, blocks: int, least_ahead: int) -> None:
    """Random requests, the longest of which just fits 8 blocks: all end, by rank, and the run repeats exactly."""

    def simulate() -> tuple[list[tuple[int, ...]], int]:
        dice = random.Random(seed)
        s = scheduler(max_batch_size=6, max_step_tokens=12, least_ahead=least_ahead)
        machine, log, coming = Machine(s, blocks), [], 200
        ages: dict[int, int] = {}  # steps since it came
        for _ in range(4000):
            if coming and dice.random() < 0.3:
                number = 200 - coming
                s.add(request(number, dice.randint(1, 15), dice.randint(1, 17), priority=dice.choice([0, 0, 1])))
                ages[number] = 0
                coming -= 1
            if s.waiting or s.running:
                work = machine.step(lambda w: 1 + dice.randint(0, w.max_draft_tokens))
                log += [(w.request.request_id, w.num_rows, w.request.num_new_tokens) for w in work]
            alive = {r.request_id for r in [*s.running, *s.waiting]}
            ages = {number: age + 1 for number, age in ages.items() if number in alive}
            if not coming and not alive:
                assert not machine.held
                return log, machine.num_preemptions
        raise AssertionError(f"somebody never finished: {ages}")

    log, num_preemptions = simulate()
    assert len({number for number, *_ in log}) == 200
    if blocks < 60 and least_ahead == 1:
        assert num_preemptions, "this test is to run out of memory"
    assert (log, num_preemptions) == simulate()


def test_nobody_starves_while_others_come_for_ever() -> None:
    """An old and large request gets its turn, however many small ones come after it."""
    s = scheduler(max_batch_size=6)
    machine = Machine(s, 8)
    old = request(0, prompt=15, new=17)
    for number in range(1, 7):
        s.add(request(number, prompt=4, new=6))
    s.add(old)
    for step in range(1, 200):
        machine.step(lambda w: 1)
        s.add(request(100 + step, prompt=2, new=3))
        if old.finish_reason:
            return
    raise AssertionError("the old one still waits")


def test_memory_is_not_computed_again_and_again() -> None:
    """Letting in whoever just fits takes 713 steps here and computes 5.1 times the rows of the prompts."""
    s = scheduler(max_batch_size=32, prefill_chunk_tokens=512, max_draft_tokens=0)
    machine = Machine(s, 40, block_tokens=16)
    for i in range(24):
        s.add(request(i, prompt=30, new=150))
    steps = 0
    while s.running or s.waiting:
        machine.step(lambda w: 1)
        steps += 1
    assert machine.num_prompt_rows <= 2.5 * 24 * 30
    assert steps <= 1.1 * 713

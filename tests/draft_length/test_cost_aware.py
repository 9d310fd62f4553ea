"""The cost-aware policy in simulated steps: it never loses much, takes nearly all there is, and goes quiet in time."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest
import torch

from specdec.acceptance import Verdict
from specdec.draft_length import CostAwareLength
from specdec.interfaces import SamplingParams
from specdec.request import Request, StopRules
from specdec.scheduler import Work
from tests.draft_length.simulator import CPU, FLAT, STEEP, Accepts, DraftSeconds, Fixed, Run, Times, per_token, simulate

PROMPT = 40
SHAPES = {"cpu": CPU, "steep": STEEP, "flat": FLAT}


def always(rate: float) -> Accepts:
    return lambda *_: rate


def plain(times: Times, lengths: list[int], batch: int) -> float:
    """Return the seconds without drafting."""
    return simulate(Fixed(0), times, lambda *_: 0.0, always(0), lengths=lengths, batch=batch, prompt=PROMPT).seconds


def ratios(times: Times, cost: float, rate: float, batch: int, rounds: int, seeds: int = 4) -> list[float]:
    """Return plain seconds over cost-aware seconds of requests of 128 tokens, from a policy that knows nothing."""
    lengths = [128] * (batch * rounds)
    spent = per_token(cost * times.at(1), times)
    runs = [
        simulate(
            CostAwareLength(times), times, spent, always(rate), lengths=lengths, batch=batch, prompt=PROMPT, seed=s
        )
        for s in range(seeds)
    ]
    return [plain(times, lengths, batch) / run.seconds for run in runs]


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_fault_24_and_25_it_never_loses_to_no_drafting(shape: str, batch: int) -> None:
    worst = {}
    for cost, rate in itertools.product((0.002, 0.2, 0.44, 1.0), (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)):
        found = ratios(SHAPES[shape], cost, rate, batch, rounds=2, seeds=4 if batch < 16 else 2)
        worst[cost, rate] = statistics.fmean(found)
    assert min(worst.values()) >= 0.98, {k: v for k, v in worst.items() if v < 0.98}


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_static_drafting_would_lose(batch: int) -> None:
    """The same simulation does punish drafting that does not pay."""
    lengths = [128] * batch
    run = simulate(Fixed(4), CPU, per_token(0.2 * CPU.at(1)), always(0.2), lengths=lengths, batch=batch, prompt=PROMPT)
    assert run.seconds > 1.3 * plain(CPU, lengths, batch)


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("cost", [0.002, 0.2])
@pytest.mark.parametrize("rate", [0.7, 0.9, 1.0])
def test_it_takes_nearly_all_there_is(batch: int, cost: float, rate: float) -> None:
    lengths = [128] * (3 * batch)
    spent = per_token(cost * CPU.at(1))

    def speedup(policy: Fixed | CostAwareLength, seed: int) -> float:
        run = simulate(policy, CPU, spent, always(rate), lengths=lengths, batch=batch, prompt=PROMPT, seed=seed)
        return plain(CPU, lengths, batch) / run.seconds

    best = max(statistics.fmean(speedup(Fixed(k), s) for s in range(3)) for k in (1, 2, 3, 4, 6, 8))
    assert statistics.fmean(speedup(CostAwareLength(CPU), s) for s in range(3)) > 0.88 * best


def adversary(batch: int, depth: int) -> float:
    """The test drafter of that name: one target forward per request, whatever the depth; nothing is ever right."""
    return batch * CPU.at(1) if depth else 0.0


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "spent", [adversary, per_token(1e-5), per_token(0.44 * CPU.at(1))], ids=["adversary", "free", "int8"]
)
def test_fault_24_an_adversary_is_switched_off_within_32_tokens(spent: DraftSeconds, batch: int) -> None:
    run = simulate(CostAwareLength(CPU), CPU, spent, always(0), lengths=[1000] * batch, batch=batch, prompt=PROMPT)
    at_first = [have for _, have, _ in run.drafted if have <= 64]
    assert 0 < max(at_first) <= 32
    assert plain(CPU, [1000] * batch, batch) / run.seconds > 0.99, "tries included"


def test_tries_become_rare_and_stay_cheap() -> None:
    run = simulate(CostAwareLength(CPU), CPU, per_token(1e-4), always(0), lengths=[5000], prompt=PROMPT)
    tries = [have for _, have, _ in run.drafted if have > 64]
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert len(tries) > 3
    assert min(gaps) >= 64
    assert all(b >= 1.9 * a for a, b in itertools.pairwise(gaps)), gaps


def test_an_expensive_try_is_rarer() -> None:
    """Half a percent of the time pays for one forward in 200 steps, not for one in 64."""
    run = simulate(CostAwareLength(CPU), CPU, adversary, always(0), lengths=[400] * 10, prompt=PROMPT)
    assert 5 <= len(run.drafted) <= 2 + 4000 // 200


def test_a_new_request_starts_from_what_others_showed() -> None:
    policy = CostAwareLength(CPU)
    first = simulate(policy, CPU, per_token(1e-3), always(0), lengths=[60] * 3, prompt=PROMPT)
    assert first.num_draft_tokens > 3
    later = simulate(policy, CPU, per_token(1e-3), always(0), lengths=[60] * 3, prompt=PROMPT, first=3)
    assert later.num_draft_tokens <= first.num_draft_tokens / 2


def test_drafting_resumes_when_the_text_changes() -> None:
    """E.g. n-gram drafts, where the answer begins to quote the prompt."""
    run = simulate(
        CostAwareLength(CPU),
        CPU,
        per_token(1e-4),
        lambda _, have, depth: 0.95 if have >= 300 else 0.0,
        lengths=[900],
        prompt=PROMPT,
    )
    quiet = simulate(CostAwareLength(CPU), CPU, per_token(1e-4), always(0), lengths=[900], prompt=PROMPT)
    assert sum(1 for _, have, _ in run.drafted if have < 300) < 16
    assert run.seconds < 0.7 * quiet.seconds


def test_requests_are_told_apart() -> None:
    """One of four requests has a good drafter: it is drafted for, the others are not."""
    run = simulate(
        CostAwareLength(CPU),
        CPU,
        per_token(1e-4),
        lambda request, *_: 0.9 if request == 2 else 0.0,
        lengths=[256] * 4,
        batch=4,
        prompt=PROMPT,
    )
    depths = {n: [d for request, _, d in run.drafted if request == n] for n in range(4)}
    assert statistics.fmean(depths[2][5:]) > 3
    assert all(len(depths[n]) < 32 for n in (0, 1, 3))


def test_fault_25_drafts_shrink_as_the_batch_grows() -> None:
    per_step = []
    for batch in (1, 4, 16, 64):
        lengths = [128] * batch
        run = simulate(CostAwareLength(CPU), CPU, per_token(1e-4), always(0.7), lengths=lengths, batch=batch, prompt=1)
        per_step.append(run.num_draft_tokens / run.num_tokens)
    assert per_step == sorted(per_step, reverse=True), per_step
    assert per_step[0] > 2 * per_step[-1]


def work_of(request_id: int, *, rows: int = 1, most: int = 8, is_prefill: bool = False) -> Work:
    request = Request(request_id, [1] * PROMPT, SamplingParams(), StopRules(max_new_tokens=1000), 0)
    return Work(request, rows, most, samples=not is_prefill, is_prefill=is_prefill)


def verdict_of(work: Work, accepted: int, depth: int) -> Verdict:
    return Verdict(torch.arange(work.num_rows), [2] * (accepted + 1), None, None, accepted, depth, depth)


def taught(accepted: int, depth: int, draft_s: float, steps: int = 30, times: Times = CPU) -> CostAwareLength:
    """Return a policy that heard the same of request 0 for so many steps."""
    policy = CostAwareLength(times)
    work = [replace(work_of(0), max_draft_tokens=depth)]
    for _ in range(steps):
        policy.learn(work, [verdict_of(work[0], accepted, depth)], draft_s)
    return policy


def test_rows_of_a_prompt_count() -> None:
    """Beside a long prompt every row costs what arithmetic costs, and a draft must be worth that."""
    # Up to 32 rows nothing, then a millisecond each: alone any draft pays, behind 256 rows an unlikely one does not.
    times = Times((1, 32, 33, 1000), (0.020, 0.020, 0.021, 0.988))
    policy = taught(0, 1, 1e-5, steps=12, times=times)
    alone = policy.allot([work_of(0)])[0].max_draft_tokens
    beside = policy.allot([work_of(0), work_of(1, rows=256, most=0, is_prefill=True)])
    assert alone > 0
    assert [w.max_draft_tokens for w in beside] == [0, 0]


def test_expensive_drafting_does_not_look_cheap_beside_a_prompt() -> None:
    """That the step is long anyway makes no draft worth its time: the next steps would use it better."""
    policy = taught(1, 2, 2 * CPU.at(1))
    assert policy.allot([work_of(0)])[0].max_draft_tokens == 0
    beside = policy.allot([work_of(0), work_of(1, rows=512, most=0, is_prefill=True)])
    assert beside[0].max_draft_tokens == 0


def test_the_first_draft_is_one_token_of_one_request() -> None:
    allotted = CostAwareLength(CPU).allot([work_of(0), work_of(1), work_of(2)])
    assert [w.max_draft_tokens for w in allotted] == [1, 0, 0]


def test_no_cap_is_passed() -> None:
    policy = taught(8, 8, 1e-5)
    policy.learn([work_of(1), work_of(2), work_of(3)], [verdict_of(work_of(i), 8, 8) for i in (1, 2, 3)], 1e-5)
    policy.learn([work_of(1), work_of(2), work_of(3)], [verdict_of(work_of(i), 8, 8) for i in (1, 2, 3)], 1e-5)
    caps = [3, 1, 0, 8]
    allotted = policy.allot([work_of(i, most=cap) for i, cap in enumerate(caps)])
    assert all(w.max_draft_tokens <= cap for w, cap in zip(allotted, caps, strict=True))
    assert allotted[0].max_draft_tokens == 3


def test_a_batch_size_not_seen_before_is_met_with_one_token_each() -> None:
    policy = taught(8, 8, 1e-5)
    assert [w.max_draft_tokens for w in policy.allot([work_of(0), work_of(1)])] == [1, 1]


def test_the_same_observations_give_the_same_choices() -> None:
    runs: list[Run] = [
        simulate(CostAwareLength(CPU), CPU, per_token(1e-3), always(0.6), lengths=[99] * 5, batch=3) for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_allotting_twice_changes_nothing() -> None:
    """A step that fails is allotted again."""
    policy = taught(3, 4, 1e-3)
    work = [work_of(0), work_of(1)]
    assert policy.allot(work) == policy.allot(work)


def test_whole_trees_or_none() -> None:
    """A tree is judged by what its steps gave."""
    good = simulate(
        CostAwareLength(CPU), CPU, per_token(1e-4), always(0.9), lengths=[200], branching=2, prompt=PROMPT, seed=1
    )
    assert {depth for _, have, depth in good.drafted[8:] if have < 190} == {4}
    assert plain(CPU, [200], 1) / good.seconds > 2
    bad = simulate(CostAwareLength(CPU), CPU, per_token(1e-4), always(0.0), lengths=[200], branching=2, prompt=PROMPT)
    assert max(have for _, have, _ in bad.drafted if have <= 64) <= 32
    assert plain(CPU, [200], 1) / bad.seconds > 0.98


@pytest.mark.parametrize("answers", [0.0, 0.05])
def test_a_drafter_that_takes_long_to_say_nothing_is_asked_less(answers: float) -> None:
    run = simulate(
        CostAwareLength(CPU),
        CPU,
        lambda batch, depth: 0.1 * CPU.at(1),
        always(0.3),
        lengths=[400],
        prompt=PROMPT,
        answers=answers,
    )
    assert plain(CPU, [400], 1) / run.seconds > 0.98


def test_rare_but_good_answers_are_kept() -> None:
    run = simulate(CostAwareLength(CPU), CPU, per_token(1e-5), always(0.9), lengths=[600], prompt=PROMPT, answers=0.15)
    assert plain(CPU, [600], 1) / run.seconds > 1.4


def test_one_time_work_of_a_first_draft_is_not_held_against_it() -> None:
    """A draft model reads the whole prompt first."""
    calls: list[int] = []

    def spent(batch: int, depth: int) -> float:
        calls.append(depth)
        return depth * 0.002 + (0.080 if len(calls) == 1 else 0.0)

    run = simulate(CostAwareLength(CPU), CPU, spent, always(0.9), lengths=[128], prompt=200)
    assert plain(CPU, [128], 1) / run.seconds > 1.8


def test_a_pause_of_the_machine_does_not_end_drafting() -> None:
    calls: list[int] = []

    def spent(batch: int, depth: int) -> float:
        calls.append(depth)
        return depth * 0.002 + (2.0 if len(calls) == 12 else 0.0)

    run = simulate(CostAwareLength(CPU), CPU, spent, always(0.9), lengths=[400], prompt=PROMPT)
    assert plain(CPU, [400], 1) / (run.seconds - 2.0) > 1.8


def test_an_absurd_first_sample_is_not_for_ever() -> None:
    calls: list[int] = []

    def spent(batch: int, depth: int) -> float:
        calls.append(depth)
        return depth * 0.002 + (3.0 if len(calls) == 1 else 0.0)

    run = simulate(CostAwareLength(CPU), CPU, spent, always(0.9), lengths=[3000], prompt=PROMPT)
    assert plain(CPU, [3000], 1) / (run.seconds - 3.0) > 1.5


def test_a_released_request_is_forgotten() -> None:
    policy = taught(0, 4, 1e-3)
    assert policy._requests
    policy.release(0)
    policy.release(0)
    assert not policy._requests


class Counting:
    """t(M) that cannot say how long many rows take, for a while."""

    def __init__(self) -> None:
        self.most = 1 << 30

    def at(self, rows: int) -> float:
        if rows > self.most:
            raise RuntimeError(f"{rows} rows were never timed")
        return CPU.at(min(rows, 32))


def due_for_a_try() -> tuple[CostAwareLength, list[Work]]:
    """Return a policy that tries request 0 in its next step, with savings for it, and the step's work."""
    policy = taught(0, 1, 1e-5)
    work = [work_of(0), work_of(1, most=0)]
    for _ in range(200):
        plain = [replace(w, max_draft_tokens=0) for w in work]
        policy.learn(plain, [verdict_of(w, 0, 0) for w in plain], 0.0)
    allotted = list(policy.allot(work))
    assert [w.max_draft_tokens for w in allotted] == [1, 0]
    return policy, allotted


@pytest.mark.parametrize("what_is_left", ["no drafts", "no request"])
def test_a_try_that_memory_took_away_is_not_paid_and_made_later(what_is_left: str) -> None:
    policy, allotted = due_for_a_try()
    both = [work_of(0), work_of(1, most=0)]
    saved = policy._budget_s
    left = [replace(allotted[0], max_draft_tokens=0), allotted[1]] if what_is_left == "no drafts" else allotted[1:]
    policy.learn(left, [verdict_of(w, 0, 0) for w in left], 0.0)
    assert policy._budget_s >= saved
    again = list(policy.allot(both))
    assert [w.max_draft_tokens for w in again] == [1, 0]
    policy.learn(again, [verdict_of(again[0], 0, 1), verdict_of(again[1], 0, 0)], 1e-3)
    assert policy._budget_s < saved
    assert [w.max_draft_tokens for w in policy.allot(both)] == [0, 0]


def test_what_cannot_be_learned_changes_nothing() -> None:
    """A step that is undone is run again: it must not have been learned from."""
    times = Counting()
    policies = [CostAwareLength(times) for _ in range(2)]
    for step in range(60):
        work = [replace(work_of(i), max_draft_tokens=1 + (step + i) % 3) for i in range(3)]
        verdicts = [verdict_of(w, step % 2, w.max_draft_tokens) for w in work]
        if step % 7 == 0:
            long = [work_of(90 + step, rows=500, most=0, is_prefill=True), *work]  # of these rows nothing is known
            times.most = 200
            with pytest.raises(RuntimeError, match="never timed"):
                policies[0].learn(long, [verdict_of(long[0], 0, 0), *verdicts], 1.0)
            times.most = 1 << 30
        for policy in policies:
            policy.learn(work, verdicts, 1e-3)
        caps = [work_of(i) for i in range(3)]
        one, other = (policy.allot(caps) for policy in policies)
        assert [w.max_draft_tokens for w in one] == [w.max_draft_tokens for w in other]
        assert policies[0]._budget_s == policies[1]._budget_s
        assert policies[0]._since_try == policies[1]._since_try

"""What waiting, preemption and shared KV do to a request: who is let in, what is counted, whose noise it draws with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.draft_length import CostAwareLength
from specdec.engine import Engine
from specdec.interfaces import DraftRequest, Noise, SamplingParams, TokenTree
from specdec.models.runner import ModelRunner
from specdec.request import Request, StopRules
from specdec.tree import stack_trees
from tests.decoding import add, drain, engine_of, looking_ahead, private_runner, prompts, reference
from tests.draft_length.simulator import CPU
from tests.models.architectures import model_of, named
from tests.odd_drafters import Plain

LLAMA = named("llama")


def runner_of(blocks: int | None, prefix_caching: bool = False) -> ModelRunner:
    cache = private_runner(model_of(LLAMA)).cache
    limit = None if blocks is None else blocks * cache.block_tokens * cache.bytes_per_token
    runner = private_runner(model_of(LLAMA), kv_memory_bytes=limit)
    runner.cache.prefix_caching = prefix_caching
    return runner


def engine_of_blocks(blocks: int | None, prefix_caching: bool = False, **options: Any) -> Engine:
    runner = runner_of(blocks, prefix_caching)
    return engine_of(model_of(LLAMA), runner=runner, prefix_caching=prefix_caching, **options)


class TestAdmission:
    def test_what_running_requests_hold_costs_the_next_one_nothing(self) -> None:
        """Twelve share 10 of 24 blocks and need one or two of their own: all of them run, not four."""
        engine = engine_of_blocks(24, prefix_caching=True, max_batch_size=32)
        shared, *tails = prompts(160, *[3] * 11, seed=3)
        first = add(engine, [*shared, 1, 2], 40)
        for _ in range(3):
            engine.step()
        others = [add(engine, [*shared, *tail], 10) for tail in tails]
        most = 0
        while engine.has_unfinished:
            engine.step()
            most = max(most, engine.num_running)
            engine.target.cache.check_integrity()
        assert most == 12
        assert engine.stats.num_preemptions == 0
        for request, text in zip([first, *others], [[1, 2], *tails], strict=True):
            assert request.new_tokens == reference(model_of(LLAMA), [*shared, *text], request.num_new_tokens)

    @pytest.mark.parametrize("tail", [0, 5])
    def test_kept_blocks_that_are_needed_are_no_free_ones(self, tail: int) -> None:
        """A hit on blocks nobody holds takes them from what is free, and writing behind a whole hit takes one more."""
        engine = engine_of_blocks(8, prefix_caching=True)
        shared, other = prompts(48, 40, seed=4)
        add(engine, shared, 1)
        drain(engine)
        cache = engine.target.cache
        assert cache.usage()["num_cached"] == 3
        assert cache.num_blocks_to_open(48 + tail, [*shared, *other[:tail]]) == 3 + 1
        first = add(engine, shared, 4)
        engine.step()
        # Held now, the last one as a copy of its own: two are shared, and the third is found where it is kept.
        assert cache.num_blocks_to_open(48 + tail, [*shared, *other[:tail]]) == 1 + 1
        assert [cache.num_blocks_to_reach(first.request_id, n) for n in (48, 64, 65)] == [0, 1, 2]
        drain(engine)

    def test_prompts_are_not_computed_again_and_again(self) -> None:
        """That of the scheduler on the real cache; without looking ahead 47 preemptions and 5.1 times the prompts."""
        engine = engine_of_blocks(40, max_batch_size=32)
        requests = [add(engine, prompt, 150) for prompt in prompts(*[30] * 24, seed=1)]
        steps = drain(engine, limit=1000)
        assert engine.stats.num_prefill_tokens <= 2.5 * 24 * 30
        assert engine.stats.num_preemptions <= 12
        assert steps <= 1.1 * 713
        assert all(r.num_new_tokens == 150 for r in requests)

    def test_one_that_never_ran_was_not_preempted(self) -> None:
        engine = engine_of_blocks(4, max_batch_size=2)
        looking_ahead(engine)
        first, second = (add(engine, prompt, 3) for prompt in prompts(15, 15, seed=2))
        engine.step()
        residency = engine.residency
        third = add(engine, prompts(4, seed=3)[0], 3)
        engine._scheduler.max_batch_size = 3
        residency.admit()
        assert third.stats.admission_s is not None
        residency.preempt(third)
        assert (third.stats.num_preemptions, third.stats.admission_s) == (0, None)
        residency.preempt(second)
        assert (second.stats.num_preemptions, engine.stats.num_preemptions) == (1, 1)
        drain(engine)
        assert [r.num_new_tokens for r in (first, second, third)] == [3, 3, 3]


class TestCounters:
    def preempted_early(self) -> tuple[Engine, Request]:
        """Return a request of a long prompt that lost its KV before its first token."""
        engine = engine_of_blocks(24, prefix_caching=True, prefill_chunk_tokens=4, max_batch_size=8)
        looking_ahead(engine)
        for prompt in prompts(40, 40, 40, seed=1):
            add(engine, prompt, 100)
        for _ in range(36):
            engine.step()
        late = add(engine, prompts(150, seed=2)[0], 5)
        admissions = set()
        for _ in range(400):
            engine.step()
            admissions.add(late.stats.admission_s)
            if late.stats.num_preemptions:
                assert not late.num_new_tokens, "this test is about a prompt that was not done"
                break
        drain(engine)
        assert len(admissions - {None}) == 1
        assert late.stats.admission_s in admissions, "being preempted later does not count again"
        return engine, late

    def test_what_a_preempted_prompt_finds_again_is_no_hit_of_it(self) -> None:
        engine, late = self.preempted_early()
        assert late.stats.num_preemptions > 0
        assert late.stats.num_cached_tokens == 0, "it was never seen before"
        assert engine.stats.num_cached_tokens > 0, "though what it had computed was found again"

    def test_prefill_speed_counts_rows_that_ran(self) -> None:
        engine, late = self.preempted_early()
        s = late.stats
        assert s.num_prefill_tokens > 0
        assert s.prefill_tokens_per_s == s.num_prefill_tokens / s.prefill_s
        warm = add(engine, late.tokens[:150], 3)
        drain(engine)
        assert warm.stats.num_cached_tokens + warm.stats.num_prefill_tokens == 150

    def test_requests_share_the_time_of_prefill(self) -> None:
        engine = engine_of_blocks(None, prefill_chunk_tokens=16)
        requests = [add(engine, prompt, 6) for prompt in prompts(5, 40, 9)]
        drain(engine)
        assert sum(r.stats.num_prefill_tokens for r in requests) == engine.stats.num_prefill_tokens == 54
        assert sum(r.stats.prefill_s for r in requests) == pytest.approx(engine.stats.prefill_s)

    def test_an_interruption_between_opening_and_running_tells_the_drafter(self) -> None:
        """Else it would know nothing of a prefix that was found."""
        engine = engine_of_blocks(None, prefix_caching=True, drafter="ngram")
        text = prompts(48, seed=9)[0]
        add(engine, text, 2)
        drain(engine)
        again = add(engine, text, 6)
        opened = engine.residency.tell_drafter

        def interrupted(request: Request) -> None:
            raise KeyboardInterrupt

        engine.residency.tell_drafter = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.residency.tell_drafter = opened  # type: ignore[method-assign]
        heard: list[int] = []
        observe = engine.drafter.observe
        engine.drafter.observe = lambda seen: (heard.extend(o.start for o in seen), observe(seen))  # type: ignore
        drain(engine)
        assert heard[0] == 0
        assert again.stats.num_cached_tokens == 47
        assert again.new_tokens == reference(model_of(LLAMA), text, 6)


def test_a_step_looks_at_no_request_that_only_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else thousands that wait would slow down every step of those that run."""
    engine = engine_of_blocks(None, max_batch_size=2)
    requests = [add(engine, [3, 4, 5], 5) for _ in range(300)]
    asked: list[int] = []
    has_news = Request.__dict__["has_news"]

    def counting(request: Request) -> bool:
        asked.append(request.request_id)
        answer: bool = has_news.__get__(request)
        return answer

    monkeypatch.setattr(Request, "has_news", property(counting))
    engine.step()
    assert set(asked) == {requests[0].request_id, requests[1].request_id}
    engine.abort(requests[200].request_id)
    assert [o.finish_reason for o in engine.step()] == [None, None, "abort"]
    assert Request.__eq__ is object.__eq__, "a request is found in a queue without comparing tokens"
    for request in requests:
        engine.forget(request.request_id)
    assert not engine._news
    assert not engine.has_unfinished


class TestNoise:
    """Two requests under `rejection` with one seed and one prompt, where one may decide on drafts of the other."""

    SAMPLED = SamplingParams(temperature=0.7, seed=5)

    def seeds(self, engine: Engine) -> list[int]:
        requests = [add(engine, [3, 4, 5], 4, sampling=self.SAMPLED) for _ in range(3)]
        drain(engine)
        alone = add(engine, [3, 4, 5], 4, sampling=self.SAMPLED)
        drain(engine)
        return [r.seed for r in [*requests, alone]]

    @pytest.mark.parametrize(
        "options",
        [{"max_step_tokens": 9}, {"runner": 20}, {"drafter": "token_recycling"}, {"policy": CostAwareLength(CPU)}],
        ids=["rows", "memory", "drafter", "policy"],
    )
    def test_each_has_its_own(self, options: dict[str, Any]) -> None:
        remembers = "drafter" in options or "policy" in options
        if "runner" in options:
            options = {"runner": runner_of(options["runner"])}
        else:
            options = {"runner": runner_of(None), **options}
        engine = engine_of(model_of(LLAMA), **{"drafter": "random", **options}, verifier="rejection")
        first, *others, alone = self.seeds(engine)
        assert first == 5
        assert len({first, *others}) == 3
        assert (alone == 5) != remembers, "whoever is gone decides on nothing, unless something remembers"

    def test_it_is_as_given_where_nobody_decides_for_another(self) -> None:
        for options in ({"verifier": "rejection"}, {"max_step_tokens": 9}):  # a seed alone means `match`
            engine = engine_of(model_of(LLAMA), "random", runner=runner_of(None), **options)
            assert self.seeds(engine) == [5, 5, 5, 5]

    def test_sharing_rows_biases_nobody(self) -> None:
        """The second drafts its second token only where the first accepted its own there.

        Drawing with the same noise it would take the draft in all of these cases, and in its share of the others.
        """
        drafter = Likeliest(temperature=1.5)
        engine = engine_of(
            model_of(LLAMA),
            drafter,
            verifier="rejection",
            runner=runner_of(None),
            max_step_tokens=3,
            max_draft_tokens=1,
        )
        hits, expected, variance, num_drafted = 0, 0.0, 0.0, 0
        for seed in range(200):
            sampling, stop = SamplingParams(temperature=drafter.temperature, seed=seed), StopRules(max_new_tokens=3)
            first = engine.add_request([3], sampling, stop)
            engine.step()
            # Of a better rank, it has the smaller half of the one draft row: none as long as the first decodes.
            second = engine.add_request([3], sampling, stop, priority=1)
            drain(engine)
            assert second.stats.num_draft_tokens == first.stats.num_accepted_tokens
            num_drafted += second.stats.num_draft_tokens
            probs = drafter.probs(second.tokens[1])
            hits += second.tokens[2] == int(probs.argmax())
            expected += float(probs.max())
            variance += float(probs.max() * (1 - probs.max()))
        assert 30 < num_drafted < 170, "it depends"
        assert abs(hits - expected) < 3 * variance**0.5


class Likeliest(Plain):
    """Drafts the likeliest second token after the prompt [3]."""

    name = "likeliest"

    def __init__(self, temperature: float) -> None:
        self.temperature, self._known = temperature, dict[int, torch.Tensor]()

    def probs(self, first: int) -> torch.Tensor:
        if first not in self._known:
            with torch.no_grad():
                logits = model_of(LLAMA)(input_ids=torch.tensor([[3, first]])).logits[0, -1].double()
            self._known[first] = torch.softmax(logits / self.temperature, -1)
        return self._known[first]

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        draft = [[int(self.probs(r.root_token_id).argmax())] if r.root_position == 1 else [] for r in requests]
        return stack_trees(
            [([r.root_token_id, *d], [-1, 0][: 1 + len(d)]) for r, d in zip(requests, draft, strict=True)]
        )

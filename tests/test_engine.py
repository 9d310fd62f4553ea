"""The engine's promises: a failed step did not happen, nothing leaks, memory and threads are minded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch

from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError, InputError, ModelOutputError, OutOfCacheError, WrongThreadError
from specdec.interfaces import SamplingParams
from specdec.kv.storage import SlotStorage
from specdec.models.build import RunnerConfig
from specdec.models.runner import ModelRunner
from specdec.request import Request, StopRules
from tests.decoding import GREEDY, add, assert_fresh_kv, drain, engine_of, private_runner, prompts, reference
from tests.models.architectures import build, model_of, named

PROMPTS = prompts(3, 7, 12)
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "oracle": {"accept_rate": 0.7, "width": 2},
    "random": {"branching": [2, 1]},
    "draft_model": {},
}


def options_of(drafter: str) -> dict[str, Any]:
    return {"model": model_of(named("qwen2"))} if drafter == "draft_model" else DRAFTERS[drafter]


class Once:
    """Replaces a method by one that raises at its n-th call, before or after the work is done."""

    def __init__(self, owner: Any, name: str, error: BaseException, at: int, *, after: bool = False) -> None:
        self.owner, self.name, self.error, self.at, self.after = owner, name, error, at, after
        self.original = getattr(owner, name)
        self.calls = 0
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls != self.at:
            return self.original(*args, **kwargs)
        if self.after:
            self.original(*args, **kwargs)
        raise self.error

    def undo(self) -> None:
        setattr(self.owner, self.name, self.original)


def snapshot(engine: Engine, requests: Sequence[Request]) -> list[Any]:
    cache = engine.target.cache
    return [
        (
            list(r.tokens),
            r.num_computed,
            r.finish_reason,
            deepcopy(r.stats),  # stats.copy() shares the emissions
            cache.context_len(r.request_id),
            [t.clone() for layer in cache.layers for t in cache.contents(r.request_id, layer)],
        )
        for r in requests
    ]


def assert_same(one: list[Any], other: list[Any]) -> None:
    for left, right in zip(one, other, strict=True):
        assert left[:5] == right[:5]
        assert all(torch.equal(a, b) for a, b in zip(left[5], right[5], strict=True))


STAGES = [
    "propose",
    "after_propose",
    "draft_forward",
    "forward",
    "verify",
    "commit",
    "second_commit",
    "observe",
    "after_observe",
    "count",
]


RUN_NOTHING = ("ngram", "random")  # drafters without a forward
DRAFTERS_OWN = ("propose", "after_propose", "draft_forward", "observe", "after_observe")


def is_the_drafters(stage: str, drafter: str) -> bool:
    """Tell whether what fails there fails inside of the drafter; the oracle asks the target itself."""
    return stage in DRAFTERS_OWN or (stage == "forward" and drafter == "oracle")


class TestAFailedStepDidNotHappen:
    def fault(self, engine: Engine, stage: str, error: BaseException) -> Once:
        if stage in ("propose", "observe"):
            return Once(engine.drafter, stage, error, 1)
        if stage.startswith("after_"):
            return Once(engine.drafter, stage.removeprefix("after_"), error, 1, after=True)
        if stage == "draft_forward":  # the second one of a proposal, where the drafter runs a model
            return Once(getattr(engine.drafter, "_runner", engine.target), "forward", error, 2)
        if stage == "forward":
            return Once(engine.target, "forward", error, 1)
        if stage in ("commit", "second_commit"):
            return Once(engine.target.cache, "commit", error, 1 if stage == "commit" else 2, after=True)
        if stage == "count":
            return Once(engine, "_count", error, 1)
        return Once(engine, "_verify", error, 1)

    @pytest.mark.parametrize(
        ("drafter", "stage", "error"),
        [
            pytest.param(drafter, stage, error, id=f"{drafter}-{stage}-{name}")
            for drafter in DRAFTERS
            for stage in STAGES
            for name, error in (("error", RuntimeError("broken")), ("interrupt", KeyboardInterrupt()))
            # What the drafter raises is no failed step: see the next test.
            if not (name == "error" and is_the_drafters(stage, drafter))
            if not (stage == "draft_forward" and drafter in RUN_NOTHING)
        ],
    )
    def test_every_stage(self, drafter: str, stage: str, error: BaseException) -> None:
        model = model_of(named("llama"))
        runner = private_runner(model)
        engine = engine_of(model, drafter, options_of(drafter), runner=runner, max_draft_tokens=4)
        requests = [add(engine, prompt, 16) for prompt in PROMPTS]
        for _ in range(4):
            engine.step()
            before = snapshot(engine, requests)
            fault = self.fault(engine, stage, error)
            with pytest.raises(type(error)):
                engine.step()
            fault.undo()
            assert_same(snapshot(engine, requests), before)
            engine.target.cache.check_integrity()
        while engine.has_unfinished:
            engine.step()
            for r in requests:
                if r.finish_reason is None:
                    assert_fresh_kv(engine.target, r.request_id, r.tokens)
                r.stats.check()
        assert [r.new_tokens for r in requests] == [reference(model, p, 16) for p in PROMPTS]

    @pytest.mark.parametrize(
        ("drafter", "stage"),
        [
            (drafter, stage)
            for drafter in DRAFTERS
            for stage in DRAFTERS_OWN
            if not (stage == "draft_forward" and drafter in RUN_NOTHING)
        ],
    )
    def test_a_drafter_that_throws_costs_its_drafts(
        self, drafter: str, stage: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = model_of(named("llama"))
        engine = engine_of(model, drafter, options_of(drafter), runner=private_runner(model), max_draft_tokens=4)
        requests = [add(engine, prompt, 16) for prompt in PROMPTS]
        for _ in range(2):
            engine.step()
        fault = self.fault(engine, stage, RuntimeError("broken"))
        engine.step()
        fault.undo()
        later = add(engine, PROMPTS[0], 16)
        drain(engine)
        assert [r.new_tokens for r in requests] == [reference(model, p, 16) for p in PROMPTS]
        assert [r.stats.num_drafter_errors for r in [*requests, later]] == [1, 1, 1, 0]
        assert engine.stats.num_drafter_errors == 3
        assert later.stats.num_draft_tokens > 0, "it is not given up for others"
        assert [r.message.count("raised RuntimeError in") for r in caplog.records].count(1) == 1, "said once"
        engine.target.cache.check_integrity()

    def test_a_drafter_that_throws_in_release(self, caplog: pytest.LogCaptureFixture) -> None:
        """The request is over all the same, and its tokens come with the step that ended it."""
        model = model_of(named("llama"))
        engine = engine_of(model, "ngram", runner=private_runner(model))
        requests = [add(engine, prompt, most) for prompt, most in zip(PROMPTS, (4, 9, 9), strict=True)]
        engine.drafter.release = lambda request_id: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        engine.step()
        engine.abort(requests[1].request_id)
        drain(engine)
        assert [r.new_tokens for r in requests[::2]] == [reference(model, PROMPTS[i], n) for i, n in ((0, 4), (2, 9))]
        assert engine.target.cache.usage()["num_used"] == 0
        assert sum("could not release request" in r.message for r in caplog.records) >= 3

    @pytest.mark.parametrize("stage", ["forward", "commit"])
    @pytest.mark.parametrize("drafter", DRAFTERS)
    def test_while_the_prompt_is_read(self, drafter: str, stage: str) -> None:
        model = model_of(named("llama"))
        engine = engine_of(model, drafter, options_of(drafter), runner=private_runner(model), prefill_chunk_tokens=4)
        requests = [add(engine, prompt, 8) for prompt in PROMPTS]
        for _ in range(1 if drafter == "oracle" else 5):  # which then asks the target itself
            fault = self.fault(engine, stage, RuntimeError("broken"))
            with pytest.raises(RuntimeError, match="broken"):
                engine.step()
            fault.undo()
            engine.step()
        drain(engine)
        assert [r.new_tokens for r in requests] == [reference(model, p, 8) for p in PROMPTS]

    def test_sampling_goes_on_with_the_same_noise(self) -> None:
        model = model_of(named("llama"))
        outputs = []
        for fail in (False, True):
            engine = engine_of(model, "draft_model", options_of("draft_model"), runner=private_runner(model))
            sampling = SamplingParams(temperature=1.0, seed=3)
            requests = [add(engine, prompt, 16, sampling=sampling) for prompt in PROMPTS]
            while engine.has_unfinished:
                if fail:
                    fault = self.fault(engine, "commit", RuntimeError("broken"))
                    with pytest.raises(RuntimeError, match="broken"):
                        engine.step()
                    fault.undo()
                engine.step()
            outputs.append([(r.tokens, r.stats.num_steps, r.stats.accepted_at) for r in requests])
        assert outputs[0] == outputs[1]

    def test_nothing_is_lost_when_the_hand_over_is_interrupted(self) -> None:
        """The step happened, its output was not handed out: the next step does it, also for finished requests."""
        model = model_of(named("llama"))
        for moment in range(1, 8):
            engine = engine_of(model, "oracle", runner=private_runner(model))
            requests = [add(engine, prompt, most) for prompt, most in zip(PROMPTS, (9, 16, 12), strict=True)]
            fault = Once(engine, "_emit", KeyboardInterrupt(), moment)
            emitted: dict[int, list[int]] = {r.request_id: [] for r in requests}
            for _ in range(30):
                try:
                    outputs = engine.step()
                except KeyboardInterrupt:
                    continue
                for o in outputs:
                    emitted[o.request_id] += o.token_ids
            fault.undo()
            for r, prompt, most in zip(requests, PROMPTS, (9, 16, 12), strict=True):
                assert r.new_tokens == emitted[r.request_id] == reference(model, prompt, most)
                assert r.finish_reason == "length"
            assert engine.target.cache._pool.num_used == 0
            assert not engine.has_unfinished


class TestAbortAndForget:
    def test_abort_frees_the_slots_and_leaves_the_others_alone(self) -> None:
        model = model_of(named("llama"))
        for drafter in DRAFTERS:
            engine = engine_of(model, drafter, options_of(drafter), runner=private_runner(model))
            requests = [add(engine, prompt, 14) for prompt in PROMPTS]
            for _ in range(3):
                engine.step()
            engine.abort(requests[1].request_id)
            engine.abort(requests[1].request_id)
            assert not engine.target.cache.is_open(requests[1].request_id)
            assert requests[1].finish_reason == "abort"
            said = list(requests[1].new_tokens)
            engine.target.cache.check_integrity()
            drain(engine)
            assert requests[1].new_tokens == said == reference(model, PROMPTS[1], 14)[: len(said)]
            for i in (0, 2):
                assert requests[i].new_tokens == reference(model, PROMPTS[i], 14)
            assert engine.target.cache._pool.num_used == 0

    def test_abort_of_one_that_waits(self) -> None:
        model = model_of(named("llama"))
        engine = engine_of(model, runner=private_runner(model), max_batch_size=1)
        first, second, third = (add(engine, prompt, 5) for prompt in PROMPTS)
        engine.step()
        engine.abort(second.request_id)
        drain(engine)
        assert (first.finish_reason, second.finish_reason, third.finish_reason) == ("length", "abort", "length")
        assert second.new_tokens == []

    def test_forget_makes_a_request_unknown(self) -> None:
        engine = engine_of(model_of(named("llama")))
        request = add(engine, PROMPTS[0], 5)
        engine.step()
        assert engine.request(request.request_id) is request
        engine.forget(request.request_id)
        engine.forget(request.request_id)
        engine.forget(10**9)
        for call in (engine.request, engine.abort):
            with pytest.raises(InputError, match=f"request {request.request_id} is unknown"):
                call(request.request_id)
        assert not engine.has_unfinished
        assert engine.step() == []

    def test_nothing_to_generate(self) -> None:
        engine = engine_of(model_of(named("llama")))
        request = add(engine, PROMPTS[0], 0)
        assert (request.finish_reason, request.new_tokens) == ("length", [])
        assert not engine.has_unfinished


class TestThreads:
    def in_thread(self, call: Any) -> Any:
        result: list[Any] = []

        def target() -> None:
            try:
                result.append(call())
            except Exception as error:
                result.append(error)

        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        return result[0]

    def test_a_second_thread_is_refused(self) -> None:
        engine = engine_of(build(named("llama")))
        add(engine, PROMPTS[0], 3)
        for call in (engine.step, lambda: add(engine, PROMPTS[0], 3)):
            error = self.in_thread(call)
            assert isinstance(error, WrongThreadError)
            assert "build one in each thread" in str(error)
        drain(engine)

    def test_the_first_user_owns_it(self) -> None:
        engine = engine_of(build(named("llama")))
        request = self.in_thread(lambda: (add(engine, PROMPTS[0], 3), drain(engine))[0])
        assert len(request.new_tokens) == 3
        with pytest.raises(WrongThreadError):
            add(engine, PROMPTS[0], 3)

    def test_one_model_may_serve_several_threads(self) -> None:
        import specdec

        model = build(named("llama"))
        ids = torch.tensor([PROMPTS[1]])
        want = [*PROMPTS[1], *reference(model, PROMPTS[1], 8)]
        for _ in range(2):
            for call in (lambda f: f(), self.in_thread):
                got = call(lambda: specdec.generate(model, ids, max_new_tokens=8, drafter="ngram"))
                assert got[0].tolist() == want


class TestMemory:
    def limited(self, tokens: int) -> tuple[Any, ModelRunner]:
        model = model_of(named("llama"))
        per_token = engine_of(model).target.cache.bytes_per_token
        from specdec.models.build import build_runner

        return model, build_runner(model, RunnerConfig(kv_memory_bytes=tokens * per_token))

    @pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
    def test_requests_wait_for_room_and_all_come(self, drafter: str) -> None:
        model, runner = self.limited(48)
        options = {} if drafter == "none" else options_of(drafter)
        engine = engine_of(model, drafter, options, runner=runner)
        rows = prompts(3, 12, 7, 20, 1, 9)
        requests = [add(engine, row, 16) for row in rows]
        most = 0
        while engine.has_unfinished:
            engine.step()
            runner.cache.check_integrity()
            assert runner.cache.usage()["num_used"] * runner.cache.block_tokens <= 48
            most = max(most, len(runner.cache._sequences))
        assert 1 < most < len(rows)
        assert runner.cache.num_bytes <= runner.cache.max_bytes
        assert [r.new_tokens for r in requests] == [reference(model, row, 16) for row in rows]

    def test_too_small_for_one_is_said_before_anything_runs(self) -> None:
        model, runner = self.limited(20)
        engine = engine_of(model, runner=runner)
        fault = Once(runner, "forward", AssertionError("it ran"), 1)
        add(engine, PROMPTS[0], 5)
        with pytest.raises(OutOfCacheError, match=r"needs KV for 22 tokens \(\d+ bytes\) and the limit of \d+ bytes"):
            add(engine, PROMPTS[1], 15)
        fault.undo()
        drain(engine)

    @pytest.mark.parametrize("num_bytes", [0, 1, 600])
    def test_through_the_door(self, num_bytes: int) -> None:
        import specdec

        model = model_of(named("llama"))
        with pytest.raises(OutOfCacheError, match="raise the limit"):
            specdec.generate(model, torch.tensor([PROMPTS[0]]), max_new_tokens=9, kv_memory_bytes=num_bytes)
        with pytest.raises(OutOfCacheError, match="raise the limit"):
            specdec.LLM(model, kv_memory_bytes=num_bytes).generate(PROMPTS[0], max_new_tokens=9)

    def test_a_full_memory_stops_one_step_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No memory while the storage grows: the step fails, and goes through when there is some again."""
        model = model_of(named("llama"))
        engine = engine_of(model, "oracle", runner=private_runner(model))
        requests = [add(engine, prompt, 6) for prompt in PROMPTS]

        def none_left(*args: Any) -> Any:
            raise OutOfCacheError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(SlotStorage, "_resized", none_left)
            with pytest.raises(OutOfCacheError):
                engine.step()
        assert all(r.num_computed == 0 for r in requests)
        drain(engine)
        assert [r.new_tokens for r in requests] == [reference(model, p, 6) for p in PROMPTS]

    def test_the_batch_is_bounded(self) -> None:
        model = model_of(named("llama"))
        engine = engine_of(model, "ngram", runner=private_runner(model), max_batch_size=2)
        requests = [add(engine, prompt, 8) for prompt in prompts(3, 7, 12, 4, 5)]
        while engine.has_unfinished:
            engine.step()
            assert len(engine.target.cache._sequences) <= 2
        assert [r.new_tokens for r in requests] == [reference(model, p, 8) for p in prompts(3, 7, 12, 4, 5)]


class TestModelOutput:
    @pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=1)], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("value", [torch.nan, -torch.inf])
    def test_no_token_can_be_chosen(self, value: float, sampling: SamplingParams) -> None:
        engine = engine_of(build(named("llama")), "ngram")
        request = add(engine, PROMPTS[1], 12, sampling=sampling)
        engine.step()
        engine.step()
        said = list(request.tokens)
        forward = engine.target.forward

        def poisoned(*args: Any) -> Any:
            out = forward(*args)
            out.logits.fill_(value)
            return out

        engine.target.forward = poisoned  # type: ignore[method-assign]
        word = "NaN" if value != value else "-inf for every token"
        with pytest.raises(ModelOutputError, match=f"logits are {word} after {len(said)} tokens"):
            engine.step()
        assert request.tokens == said
        engine.target.forward = forward  # type: ignore[method-assign]
        drain(engine)
        assert len(request.new_tokens) == 12

    def test_infinite_logits_cannot_be_drawn_from(self) -> None:
        """As in float16 that overflowed; greedy decoding takes the token."""
        for sampling in (SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=1.0)):
            engine = engine_of(build(named("llama")))
            add(engine, PROMPTS[1], 12, sampling=sampling)
            forward = engine.target.forward

            def poisoned(*args: Any, forward: Any = forward) -> Any:
                out = forward(*args)
                out.logits[:, 5] = torch.inf
                return out

            engine.target.forward = poisoned  # type: ignore[method-assign]
            with pytest.raises(ModelOutputError, match="inf"):
                engine.step()

    def test_a_model_of_nan_is_refused_when_it_is_built(self) -> None:
        model = build(named("llama"))
        model.lm_head.weight[3] = torch.nan
        with pytest.raises(ModelOutputError, match="LlamaForCausalLM's own forward gives NaN"):
            engine_of(model)


class TestConfig:
    @pytest.mark.parametrize(
        "options",
        [
            {"max_draft_tokens": -1}, {"max_draft_tokens": 2.0}, {"max_draft_tokens": True}, {"max_draft_tokens": "4"},
            {"max_batch_size": 0}, {"prefill_chunk_tokens": 0}, {"prefill_chunk_tokens": None},
        ],
        ids=str,
    )  # fmt: skip
    def test_values_out_of_range(self, options: dict[str, Any]) -> None:
        name, value = next(iter(options.items()))
        with pytest.raises(ConfigError, match=rf"{name}={value!r}; allowed: an integer >= \d"):
            EngineConfig(**options)

    @pytest.mark.parametrize("prompt", [[], [64], [-1], [3, 100]], ids=str)
    def test_prompts_out_of_range(self, prompt: list[int]) -> None:
        engine = engine_of(model_of(named("llama")))
        with pytest.raises(InputError):
            engine.add_request(prompt, GREEDY, StopRules(max_new_tokens=1))
        assert not engine.has_unfinished

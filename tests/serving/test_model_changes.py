"""Weights edited between two requests of one engine: nothing of the earlier ones is used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

import specdec
from specdec import ModelChangedError
from specdec.models import build as building
from specdec.models import matmul
from specdec.models.matmul import ROW_BUCKETS, KernelTable, KernelTables
from tests.decoding import prompts, reference
from tests.models.architectures import build, named
from tests.serving.engines import drain, read

PROMPT, OTHER = prompts(40, 7)
NUM = 12


@pytest.fixture
def model() -> Any:
    """Return a model of this test's own, in the dtype whose weights can be reordered."""
    return build(named("llama")).float()


def edit(model: Any) -> None:
    """Change all answers, as a training step would."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.add_(0.3)
            layer.mlp.down_proj.weight.mul_(-1.5)


def ask(serving: specdec.Engine, prompt: list[int] = PROMPT) -> list[int]:
    request_id = serving.add_request(prompt, max_new_tokens=NUM)
    return drain(serving)[request_id].token_ids


def with_reordered_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have even tiny models run on copies of their weights."""
    if not matmul.can_prepack(torch.zeros(8, 8)):
        pytest.skip("oneDNN has no prepacked product here")
    always = KernelTable((1.0,) * len(ROW_BUCKETS), (0.5,) * len(ROW_BUCKETS))
    monkeypatch.setattr(building, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(KernelTables, "get", lambda *a: always)


@pytest.mark.parametrize(("prefix_caching", "reordered"), [(True, False), (False, True), (True, True)])
def test_the_next_request_runs_on_the_new_weights(
    model: Any, prefix_caching: bool, reordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reordered:
        with_reordered_weights(monkeypatch)
    serving = specdec.Engine(model, drafter="ngram", prefix_caching=prefix_caching)
    assert (serving.llm.engine.target.extra_weight_bytes > 0) == reordered
    before = ask(serving)
    assert before == reference(model, PROMPT, NUM)
    assert ask(serving) == before
    edit(model)
    assert ask(serving) == reference(model, PROMPT, NUM) != before


def test_what_was_measured_stays(model: Any) -> None:
    serving = specdec.Engine(model)
    ask(serving)
    before = serving.metrics()
    edit(model)
    ask(serving)
    after = serving.metrics()
    assert (before.num_finished, after.num_finished) == (1, 2)
    assert after.engine.num_steps == 2 * before.engine.num_steps
    assert after.engine.num_prefill_tokens == 2 * len(PROMPT)
    assert after.engine.prefill_s > before.engine.prefill_s


class TestWhileRequestsRun:
    def test_further_ones_are_refused(self, model: Any) -> None:
        serving = specdec.Engine(model)
        serving.add_request(OTHER, max_new_tokens=NUM)
        serving.step()
        edit(model)
        for _ in range(2):
            with pytest.raises(ModelChangedError, match="let those finish"):
                serving.add_request(PROMPT, max_new_tokens=NUM)
        assert len(drain(serving)) == 1
        assert ask(serving) == reference(model, PROMPT, NUM)

    def test_further_ones_of_the_same_burst_end(self, model: Any) -> None:
        """Between two steps the model is looked at before the first and after the last."""
        serving = specdec.Engine(model)
        first = serving.add_request(OTHER, max_new_tokens=NUM)
        edit(model)
        second = serving.add_request(PROMPT, max_new_tokens=NUM)
        found = drain(serving)
        assert len(found[first].token_ids) == NUM
        assert (found[second].finish_reason, found[second].token_ids) == ("error", [])
        assert isinstance(found[second].error, ModelChangedError)
        assert serving.metrics().num_failed == 1
        assert ask(serving) == reference(model, PROMPT, NUM)

    def test_further_streams_are_refused(self, model: Any) -> None:
        serving = specdec.Engine(model)

        async def main() -> None:
            stream = serving.stream(OTHER, max_new_tokens=100)
            await anext(stream)
            await anext(stream)
            edit(model)
            with pytest.raises(ModelChangedError):
                await read(serving, PROMPT, NUM)
            await stream.aclose()
            assert await read(serving, PROMPT, NUM) == reference(model, PROMPT, NUM)

        asyncio.run(main())

    def test_nor_does_the_engine_of_another_door_pass_for_its_own(self, model: Any) -> None:
        serving = specdec.Engine(model)
        request_id = serving.add_request(OTHER, max_new_tokens=NUM)
        serving.step()
        edit(model)
        assert serving.llm.generate(PROMPT, max_new_tokens=NUM)[0].token_ids == reference(model, PROMPT, NUM)
        with pytest.raises(ModelChangedError):
            serving.add_request(PROMPT, max_new_tokens=NUM)
        assert list(drain(serving)) == [request_id]
        assert ask(serving) == reference(model, PROMPT, NUM)


def counting(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> list[Any]:
    calls: list[Any] = []

    def run(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    monkeypatch.setattr(building, function.__name__, run)
    return calls


def test_a_burst_looks_at_the_model_twice(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = specdec.Engine(model, max_batch_size=2)
    looks = counting(monkeypatch, building.fingerprint)
    for _ in range(20):
        serving.add_request(OTHER, max_new_tokens=2)
    serving.step()
    assert len(looks) == 2
    drain(serving)
    assert len(looks) == 2

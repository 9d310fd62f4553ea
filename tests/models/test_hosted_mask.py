"""Models with attention of their own: rows, features, packed requests, and which models are run this way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.errors import UnsupportedModelError
from specdec.interfaces import FeatureSpec, Segment
from specdec.kv.cache import KVCache
from specdec.models import hosting
from specdec.models.build import build_runner, runner_for
from specdec.models.clone import clone_sharing_parameters
from specdec.models.conformance import LONG, compare, take_reference
from specdec.models.hosted import HostedProgram, base_forward
from specdec.models.hosted_mask import MaskedProgram
from tests.decoding import add, drain, engine_of, prompts, reference
from tests.models.architectures import REFUSED, SUPPORTED, VOCAB_SIZE, build, model_of, named
from tests.models.test_runner import hidden

OWN_ATTENTION = ["gptj", "codegen", "falcon", "falcon_new_decoder", "falcon_mha", "gpt_neox_japanese", "mpt"]
PROMPTS = prompts(3, 9, 6)
ALL = FeatureSpec(layers=(0, 1), final_norm=True)


def segments_of(*wanted: list[int]) -> list[Segment]:
    return [
        Segment(i, torch.tensor(p), None, torch.tensor(w, dtype=torch.int64))
        for i, (p, w) in enumerate(zip(PROMPTS, wanted, strict=True))
    ]


def test_who_runs_this_way() -> None:
    found = {a.name for a in SUPPORTED if isinstance(runner_for(model_of(a)).program, MaskedProgram)}
    assert found == set(OWN_ATTENTION)


@pytest.mark.parametrize(
    ("name", "attention"), [*((n, "eager") for n in OWN_ATTENTION), ("falcon", "sdpa"), ("falcon_new_decoder", "sdpa")]
)
def test_it_conforms_past_any_window(name: str, attention: str) -> None:
    model = build(named(name))
    model.config._attn_implementation = attention
    forward = lambda ids: base_forward(model, ids)  # noqa: E731
    probe = take_reference(forward, VOCAB_SIZE, torch.device("cpu"), LONG)
    program = MaskedProgram(clone_sharing_parameters(model))
    assert compare(program, probe, trees=False) < 1e-6
    assert (compare(program, probe) < 1e-6) == named(name).trees


@pytest.mark.parametrize("name", ["gptj", "falcon", "mpt"])
@pytest.mark.parametrize("wanted", [[[2], [8], [5]], [[], [0, 3], [1]], [[0, 1, 2], [], []], [[], [], []]], ids=str)
def test_only_the_wanted_rows_of_packed_requests(name: str, wanted: list[list[int]]) -> None:
    model = model_of(named(name))
    runner = runner_for(model).with_own_cache()
    for i, prompt in enumerate(PROMPTS):
        runner.cache.open(i, len(prompt))
        runner.cache.reserve(i, len(prompt))
    for spec in (FeatureSpec(), ALL):
        for i in range(len(PROMPTS)):
            runner.cache.rewind(i)
        out = runner.forward(segments_of(*wanted), spec)
        rows = [base_forward(model, torch.tensor([p]))[0, w] for p, w in zip(PROMPTS, wanted, strict=True)]
        torch.testing.assert_close(out.logits, torch.cat(rows), rtol=1e-5, atol=1e-5)
        if spec:
            assert out.features is not None
            whole = torch.cat([hidden(model, p) for p in PROMPTS])
            torch.testing.assert_close(out.features, whole, rtol=1e-4, atol=1e-4)


def test_slots_do_not_depend_on_neighbours() -> None:
    """MPT's biases count slots: beside a long request, a short one must give what it gives alone, to the last bit."""
    model = model_of(named("mpt"))
    short, long = prompts(5, 120)

    def run(*rows: list[int]) -> Tensor:
        runner = runner_for(model).with_own_cache()
        for i, row in enumerate(rows):
            runner.cache.open(i, len(row))
            runner.cache.reserve(i, len(row))
        asked = [Segment(i, torch.tensor(r), None, torch.tensor([len(r) - 1])) for i, r in enumerate(rows)]
        return runner.forward(asked).logits[-1]

    assert torch.equal(run(short), run(long, short))


def test_requests_longer_together_than_the_model() -> None:
    """MPT's table of biases ends at max_seq_len, which one packed row of all requests would pass."""
    model = build(named("mpt"), max_seq_len=32)
    rows = prompts(20, 19, 17)
    engine = engine_of(model, "oracle", max_draft_tokens=3)
    requests = [add(engine, row, 8) for row in rows]
    drain(engine)
    assert [r.new_tokens for r in requests] == [reference(model, row, 8) for row in rows]
    assert engine.target.max_positions == 32


def test_drafted_trees_are_dropped_where_only_chains_conform(caplog: pytest.LogCaptureFixture) -> None:
    model = build(named("mpt"))
    engine = engine_of(model, "oracle", {"width": 2}, max_draft_tokens=4)
    requests = [add(engine, row, 12) for row in PROMPTS]
    drain(engine)
    assert [r.new_tokens for r in requests] == [reference(model, row, 12) for row in PROMPTS]
    assert all(r.stats.num_rejected_drafts > 0 for r in requests)
    assert sum("chains only" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gptj", "falcon", "mpt"])
def test_lower_precision(name: str, dtype: torch.dtype) -> None:
    runner = build_runner(build(named(name), dtype))
    assert isinstance(runner.program, MaskedProgram)
    assert runner.supports_trees == named(name).trees
    assert runner.dtype == dtype


def test_refused_by_name_although_chains_would_pass() -> None:
    """GPT-Neo's local window counts slots, which only shows where requests are packed; it is refused before."""
    model = build(next(a for a in REFUSED if a.name == "gpt_neo"))
    with pytest.raises(UnsupportedModelError, match=r"attention mask of its own.*; use transformers' own generate"):
        build_runner(model)


def test_attention_that_nobody_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer attends past both the interface and the cache."""

    def blind(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return hidden_states, None

    model = build(named("gemma"))
    monkeypatch.setattr(type(model.model.layers[1].self_attn), "forward", blind)
    with pytest.raises(UnsupportedModelError, match=r"keys and values to its cache 0 times for 2 layers"):
        build_runner(model)


def test_the_interface_is_left_where_some_layers_pass_by_it() -> None:
    """A model that mixes both kinds of attention goes the way on which all layers are seen."""
    model = build(named("gptj"))
    probe = take_reference(lambda ids: base_forward(model, ids), VOCAB_SIZE, torch.device("cpu"))
    found = hosting.host(model, probe)
    assert (found.level, found.trees, found.chain_error) == ("mask", True, None)
    found = hosting.host(model_of(named("gemma")), probe)
    assert found.level == "attention"
    assert not found.chains  # another model's reference
    assert isinstance(found.program, HostedProgram)


def test_the_mask_holds_requests_apart() -> None:
    cache = KVCache()
    for request_id, length in ((0, 4), (1, 5)):
        cache.open(request_id, length)
    cache.reserve(0, 1)
    cache.plan([Segment(0, torch.zeros(1, dtype=torch.int64), None, torch.arange(0))])
    cache.commit(0, torch.arange(1))
    cache.reserve(0, 2)
    cache.reserve(1, 3)
    ids = torch.zeros(3, dtype=torch.int64)
    plan = cache.plan(
        [Segment(0, ids[:2], None, torch.arange(0)), Segment(1, ids, torch.tensor([-1, 0, 0]), torch.arange(0))]
    )
    visible = plan.mask(torch.empty(0, dtype=torch.float64)) == 0
    want = [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 0, 1]]
    assert visible.int().tolist() == want
    assert [p.mask(torch.empty(0)).shape for p in plan.alone()] == [(2, 3), (3, 3)]
    k = torch.arange(5.0).view(5, 1, 1)
    keys, values = cache.append(plan, 0, k, 10 * k)
    assert keys.shape == (6, 1, 1)
    assert keys[1:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert values[1:, 0, 0].tolist() == [0, 10, 20, 30, 40]

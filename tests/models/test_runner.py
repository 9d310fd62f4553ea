"""Runners: features, rows, long prompts, and the gate that a program must pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor

import specdec
from specdec.errors import UnsupportedModelError
from specdec.interfaces import DraftRequest, FeatureSpec, Noise, Observation, Segment, TokenTree
from specdec.models import build as build_module
from specdec.models import hosting as hosting_module
from specdec.models import matmul
from specdec.models.build import RunnerConfig, build_runner, runner_for
from specdec.models.conformance import compare, conforms, take_reference
from specdec.models.hosted import HostedProgram, base_forward
from specdec.models.lean import LeanProgram
from specdec.models.matmul import ROW_BUCKETS, KernelTable, KernelTables, can_prepack, measure_table
from specdec.models.runner import ModelRunner
from tests.decoding import add, drain, engine_of, gap_at_divergence, one, private_runner, prompts, reference
from tests.models.architectures import SUPPORTED, VOCAB_SIZE, Architecture, build, model_of, named
from tests.odd_drafters import KnownTrees

PROMPTS = prompts(3, 7, 12)
ALL = FeatureSpec(layers=(0, 1), final_norm=True)


def hidden(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return [n, 3F]: the outputs of blocks 0 and 1, and the final norm's, of the unmodified model."""
    seen: list[Tensor] = []
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    hooks = [
        block.register_forward_hook(lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out))
        for block in blocks
    ]
    with torch.no_grad():
        last = model.base_model(input_ids=one(tokens), use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    return torch.cat([t.reshape(len(tokens), -1) for t in (*seen, last)], dim=-1)


class Listener(KnownTrees):
    """Drafts trees around the known answers and keeps everything it hears."""

    features = ALL

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tokens: dict[int, list[int]] = {}
        self.heard: dict[int, list[Tensor]] = {}  # feature rows in the order of their positions

    def observe(self, seen: Sequence[Observation]) -> None:
        super().observe(seen)
        for o in seen:
            known = self.tokens.setdefault(o.request_id, [])
            assert o.start <= len(known)
            known[o.start :] = o.token_ids.tolist()
            assert o.features is not None
            # Right-aligned: the last row belongs to the position before the last token.
            rows = self.heard.setdefault(o.request_id, [])
            first = len(known) - 1 - o.features.shape[0]
            assert first == len(rows)
            rows.extend(o.features)

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        for r in requests:
            assert self.tokens[r.request_id][-1] == r.root_token_id
            assert len(self.tokens[r.request_id]) == r.root_position + 1
        return super().propose(requests, noise)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "mixtral"])
def test_fault_08_features_belong_to_their_positions(name: str, lean: bool) -> None:
    """Through prefill chunks, trees and rejections; row i is the state that predicted token i + 1."""
    model = model_of(named(name))
    texts = [prompt + reference(model, prompt, 24) for prompt in PROMPTS]
    drafter = Listener(texts, seed=1)
    engine = engine_of(
        model, drafter, runner=private_runner(model, lean=lean), max_draft_tokens=8, prefill_chunk_tokens=5
    )
    requests = [add(engine, prompt, 20) for prompt in PROMPTS]
    drain(engine)
    assert all(r.stats.num_accepted_tokens > 3 for r in requests)
    for request, text in zip(requests, texts, strict=True):
        assert drafter.tokens[request.request_id] == request.tokens == text[:-4]
        heard = torch.stack(drafter.heard[request.request_id])
        want = hidden(model, request.tokens)[:-1]
        torch.testing.assert_close(heard, want[: heard.shape[0]], rtol=1e-4, atol=1e-4)
        assert heard.shape[0] == len(request.tokens) - 1


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("rows", [[], [3], [0, 2], [0, 1, 2, 3, 4, 5, 6]], ids=str)
def test_only_the_wanted_rows(rows: list[int], lean: bool) -> None:
    model = model_of(named("qwen3"))
    runner = private_runner(model, lean=lean)
    runner.cache.open(0, 7)
    runner.cache.open(1, 3)
    runner.cache.reserve(0, 7)
    runner.cache.reserve(1, 3)
    short, long = (torch.tensor(p) for p in PROMPTS[:2])
    for spec in (FeatureSpec(), FeatureSpec(layers=(1,)), FeatureSpec(final_norm=True), ALL):
        runner.cache.rewind(0)
        runner.cache.rewind(1)
        out = runner.forward(
            [Segment(0, long, None, torch.tensor(rows, dtype=torch.int64)), Segment(1, short, None, torch.tensor([2]))],
            spec,
        )
        want = torch.cat([base_forward(model, long[None])[0, rows], base_forward(model, short[None])[0, [2]]])
        torch.testing.assert_close(out.logits, want, rtol=1e-5, atol=1e-5)
        if not spec:
            assert out.features is None
            continue
        whole = torch.cat([hidden(model, PROMPTS[1]), hidden(model, PROMPTS[0])])
        width = whole.shape[1] // 3
        columns = [whole[:, i * width : (i + 1) * width] for i in (*spec.layers, *([2] if spec.final_norm else []))]
        torch.testing.assert_close(out.features, torch.cat(columns, dim=1), rtol=1e-5, atol=1e-5)


_SHAPED = {"gemma2", "cohere", "granite"}  # logits that are scaled or capped


@pytest.mark.parametrize("architecture", SUPPORTED, ids=str)
def test_the_last_feature_is_what_the_lm_head_reads(architecture: Architecture) -> None:
    model = model_of(architecture)
    runner = private_runner(model, lean=False)
    runner.cache.open(0, 4)
    runner.cache.reserve(0, 4)
    token_ids = torch.tensor([3, 1, 4, 15])
    out = runner.forward([Segment(0, token_ids, None, torch.arange(4))], FeatureSpec((0,), final_norm=True))
    head = model.get_output_embeddings()
    assert out.features is not None
    logits = head(out.features[:, -head.in_features :])
    if architecture.name in _SHAPED:
        assert bool((logits.argsort() == out.logits.argsort()).all())
    else:
        torch.testing.assert_close(logits, out.logits, rtol=1e-6, atol=1e-6)


def test_a_last_hidden_state_of_another_width_is_refused() -> None:
    runner = private_runner(build(named("opt"), word_embed_proj_dim=16), lean=False)
    runner.cache.open(0, 1)
    runner.cache.reserve(0, 1)
    with pytest.raises(UnsupportedModelError, match=r"last hidden state of width 32.*OPTDecoder.*width 16"):
        runner.forward([Segment(0, torch.tensor([1]), None, torch.tensor([0]))], FeatureSpec(final_norm=True))


def test_a_feature_layer_that_is_not_there() -> None:
    runner = private_runner(model_of(named("gemma")))
    runner.cache.open(0, 1)
    runner.cache.reserve(0, 1)
    with pytest.raises(UnsupportedModelError, match="feature layer 2 of a model with 2 layers"):
        runner.forward([Segment(0, torch.tensor([1]), None, torch.tensor([0]))], FeatureSpec(layers=(2,)))


@pytest.mark.parametrize("architecture", SUPPORTED, ids=str)
def test_fault_01_long_prompts(architecture: Architecture) -> None:
    """Many rows take another way through attention than a few."""
    model = model_of(architecture)
    rows = prompts(70, 45, 3, seed=5)
    want = [reference(model, row, 8) for row in rows]
    for chunk in (512, 50):
        engine = engine_of(model, "oracle", {"width": 2}, max_draft_tokens=6, prefill_chunk_tokens=chunk)
        requests = [add(engine, row, 8) for row in rows]
        drain(engine)
        assert [r.new_tokens for r in requests] == want


ROPE = {"rope_theta": 10000.0, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any], type]] = {
    "tied": ("llama", {"tie_word_embeddings": True}, LeanProgram),
    "tied_qwen2": ("qwen2", {"tie_word_embeddings": True}, LeanProgram),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, LeanProgram),
    "wide_heads": ("llama", {"head_dim": 20}, LeanProgram),
    "one_kv_head": ("llama", {"num_key_value_heads": 1}, LeanProgram),
    "linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", **ROPE}}, LeanProgram),
    "llama3_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                **ROPE,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        LeanProgram,
    ),
    "yarn_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", **ROPE, "original_max_position_embeddings": 64}},
        HostedProgram,
    ),
    "gelu": ("llama", {"hidden_act": "gelu"}, HostedProgram),
    "mixed_windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
        LeanProgram,
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_fault_01_variants_of_llama(variant: str) -> None:
    name, options, program = VARIANTS[variant]
    model = build(named(name), **options)
    assert type(runner_for(model).program) is program
    for prompt in PROMPTS:
        got = specdec.generate(model, one(prompt), max_new_tokens=40, do_sample=False, drafter="oracle")
        assert got[0, len(prompt) :].tolist() == reference(model, prompt, 40)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_fault_01_far_positions(name: str) -> None:
    """Past the first size of the lean program's rotary table, and past any small buffer."""
    model = build(named(name), max_position_embeddings=4096)
    for length in (1018, 2050):
        prompt = prompts(length)[0]
        got = specdec.generate(model, one(prompt), max_new_tokens=12, do_sample=False, drafter="oracle")
        assert got[0, length:].tolist() == reference(model, prompt, 12)


def test_fault_01_a_steered_model_is_run_as_it_is() -> None:
    """A hook of the caller's that changes the output changes ours; the lean forward knows no hooks and stands back."""
    model = build(named("llama"))
    plain = reference(model, PROMPTS[1], 12)
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
    want = reference(model, PROMPTS[1], 12)
    assert want != plain
    assert isinstance(runner_for(model).program, HostedProgram)
    got = specdec.generate(model, one(PROMPTS[1]), max_new_tokens=12, do_sample=False, drafter="oracle")
    assert got[0, 7:].tolist() == want


def broken_program(change: Callable[[Any], None], name: str = "qwen2_window") -> tuple[Any, Any]:
    """Return a lean program that was changed after it was built, and the reference of its model."""
    model = build(named(name))
    program = build_runner(model).program
    assert isinstance(program, LeanProgram)
    change(program)
    return program, take_reference(lambda ids: base_forward(model, ids), VOCAB_SIZE, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", ["llama_mha_biases", "qwen2", "phi", "mixtral"])
def test_fault_01_prepacked_weights(name: str, lean: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another kernel for every other number of rows, and room for some of the layers only."""
    times = tuple(0.5 if i % 2 else 2.0 for i in range(len(ROW_BUCKETS)))
    table = KernelTable(tuple(1.0 for _ in ROW_BUCKETS), times)
    monkeypatch.setattr(KernelTables, "get", lambda *args: table)
    monkeypatch.setattr(build_module, "SMALL_MODEL_BYTES", 0)
    if not can_prepack(torch.zeros(8, 8, dtype=dtype)):
        pytest.skip("this machine cannot prepack this dtype")
    model = build(named(name), dtype)
    runner = build_runner(model, RunnerConfig(lean=lean, prepack_limit_bytes=12000))
    assert 0 < runner.extra_weight_bytes <= 12000
    engine = engine_of(model, "oracle", {"width": 2}, runner=runner, max_draft_tokens=6)
    requests = [add(engine, prompt, 20) for prompt in PROMPTS]
    drain(engine)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        want = reference(model, prompt, 20)
        if dtype == torch.float32:
            assert request.new_tokens == want
        elif request.new_tokens != want:
            assert gap_at_divergence(model, prompt, want, request.new_tokens) < 0.02


def test_timing_kernels_leaves_the_global_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ROTATE_BYTES", 2**20)
    before = torch.get_rng_state()
    with torch.inference_mode():
        measure_table((256, 256), torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


class TestTheGate:
    """What the conformance probe finds."""

    def test_it_passes_what_is_right(self) -> None:
        program, probe = broken_program(lambda p: None)
        assert conforms(program, probe)
        assert compare(program, probe) < 1e-6

    @pytest.mark.parametrize(
        "change",
        [
            lambda p: setattr(p._blocks[0], "scaling", p._blocks[0].scaling * 1.01),
            lambda p: setattr(p._blocks[1], "pattern", None),
            lambda p: setattr(p._blocks[0], "pattern", p._blocks[1].pattern),
            lambda p: setattr(p._blocks[0], "mlp_norm", p._blocks[0].input_norm),
            lambda p: setattr(p, "_heads", 4) or setattr(p._blocks[1], "down", lambda x: x[:, :32] * 0),
        ],
        ids=["scale", "no_window", "extra_window", "norm", "mlp"],
    )
    def test_it_finds(self, change: Callable[[Any], None]) -> None:
        program, probe = broken_program(change)
        assert not conforms(program, probe)

    def test_a_lean_program_that_differs_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_rope(self: Any, plan: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            ones = torch.ones(plan.num_rows, 1, 8, dtype=dtype)
            return ones, ones * 0

        monkeypatch.setattr(LeanProgram, "_rope", no_rope)
        model = build(named("llama"))
        assert isinstance(build_runner(model).program, HostedProgram)
        got = specdec.generate(model, one(PROMPTS[1]), max_new_tokens=8, do_sample=False)
        assert got[0, 7:].tolist() == reference(model, PROMPTS[1], 8)

    def test_a_lean_program_of_nan_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LeanProgram, "_rope", lambda self, plan, dtype: (torch.tensor(torch.nan),) * 2)
        assert isinstance(build_runner(build(named("llama"))).program, HostedProgram)

    def test_a_model_that_differs_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build_module, "base_forward", lambda model, ids: base_forward(model, ids) * 1.01)
        with pytest.raises(
            UnsupportedModelError, match=r"GemmaForCausalLM over .* differs from its own forward by 0.0"
        ):
            build_runner(build(named("gemma")))

    def test_chains_only(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        """A model whose trees do not conform runs chains; drafted trees are dropped and said so once."""
        monkeypatch.setattr(
            hosting_module,
            "compare",
            lambda program, probe, trees=True: 1.0 if trees else compare(program, probe, trees=False),
        )
        model = build(named("gemma"))
        runner = build_runner(model, RunnerConfig())
        assert not runner.supports_trees
        for width, rejected in ((1, False), (2, True)):
            engine = engine_of(model, "oracle", {"width": width}, runner=runner, max_draft_tokens=4)
            requests = [add(engine, prompt, 12) for prompt in PROMPTS]
            drain(engine)
            assert [r.new_tokens for r in requests] == [reference(model, p, 12) for p in PROMPTS]
            assert all((r.stats.num_rejected_drafts > 0) == rejected for r in requests)
        assert sum("chains only" in r.message for r in caplog.records) == 1


def test_a_runner_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(named("llama"))
    first = runner_for(model)
    assert runner_for(model) is first
    assert runner_for(model, RunnerConfig(lean=False)) is not first
    assert runner_for(model) is first
    assert isinstance(first, ModelRunner)


def test_a_runner_dies_with_its_model() -> None:
    import gc
    import weakref

    model = build(named("llama"))
    specdec.generate(model, one(PROMPTS[0]), max_new_tokens=2, drafter="self_int8")
    runner = weakref.ref(runner_for(model))
    del model
    gc.collect()
    assert runner() is None


def test_a_draft_model_is_loaded_in_the_dtype_asked_for(tmp_path: Any) -> None:
    build(named("llama"), torch.float32, seed=1).save_pretrained(tmp_path)
    target = model_of(named("llama"))
    for dtype, want in ((None, target.dtype), ("bfloat16", torch.bfloat16)):
        llm = specdec.LLM(target, drafter="draft_model", drafter_options={"model": str(tmp_path), "dtype": dtype})
        assert llm.engine.drafter._runner.dtype == want
        assert llm.generate(PROMPTS[0], max_new_tokens=8)[0].token_ids == reference(target, PROMPTS[0], 8)
    with pytest.raises(specdec.ConfigError, match="dtype='bfloat16' has no effect"):
        specdec.LLM(target, drafter="draft_model", drafter_options={"model": target, "dtype": "bfloat16"})


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_fault_01_an_offloaded_model(name: str) -> None:
    """Accelerate's hooks bring the weights in for each layer and take them away again."""
    model = build(named(name))
    want = [reference(model, prompt, 10) for prompt in PROMPTS]
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    for prompt, answer in zip(PROMPTS, want, strict=True):
        got = specdec.generate(model, one(prompt), max_new_tokens=10, do_sample=False, drafter="oracle")
        assert got[0, len(prompt) :].tolist() == answer
    assert reference(model, PROMPTS[0], 10) == want[0]
    with pytest.raises(specdec.IncompatibleDrafterError, match="offloaded"):
        specdec.generate(model, one(PROMPTS[0]), max_new_tokens=2, drafter="self_int8")

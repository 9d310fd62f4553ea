"""Targets with PEFT adapters: run as they stand at each call, or refused by name; the caller's model is untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import specdec
from specdec.errors import ConfigError, IncompatibleDrafterError, UnsupportedModelError
from specdec.models import lean
from specdec.models.build import RunnerConfig, build_runner, runner_for
from specdec.models.clone import clone_sharing_parameters, fingerprint
from specdec.models.int8 import Int8Linear
from specdec.models.int8_copy import int8_copy
from specdec.models.matmul import FusedLinear
from specdec.models.wrapped import unwrapped
from tests.decoding import one, padded, prompts, reference
from tests.models.architectures import build, named

peft = pytest.importorskip("peft", reason="needs peft: pip install peft")

PROMPTS = prompts(3, 7, 12)
NUM_NEW = 12
PROJECTIONS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def adapted(config: Any, *, architecture: str = "llama", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return a PeftModel whose adapters have random weights, large enough to change what is said."""
    model = peft.get_peft_model(build(named(architecture), dtype), config, **options).eval()
    fill(model, seed=1)
    return model.to(dtype)


def fill(model: nn.Module, seed: int) -> None:
    """Give every adapter weight a random value; a new adapter changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if any(part in name for part in ("lora_", "ia3_", "hada_", "lokr_", "oft_", "vera_", "adaption_")):
                noise = torch.randn(p.shape, generator=generator).to(p.dtype)
                p.copy_(1.0 + 0.5 * noise if "ia3_" in name else 0.5 * noise if p.dim() > 1 else p + 0.2 * noise)


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM", **options})


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "rslora": lambda: lora(use_rslora=True, lora_dropout=0.5),
    "dora": lambda: lora(use_dora=True),
    "lora_all": lambda: lora(target_modules="all-linear", lora_bias=True),
    "lora_embedding": lambda: lora(target_modules=["embed_tokens", "q_proj"]),
    "modules_to_save": lambda: lora(modules_to_save=["lm_head"]),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=PROJECTIONS, task_type="CAUSAL_LM"),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=PROJECTIONS, task_type="CAUSAL_LM"),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"),
    "adaption_prompt": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"),
}


def theirs(model: Any, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
    """Return what the PeftModel itself says."""
    ids = one(prompt)
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False)
    return out[0, len(prompt) :].tolist()


def ours(model: Any, prompt: list[int], num_new: int = NUM_NEW, **options: Any) -> list[int]:
    options = {"drafter": "ngram", **options}
    out = specdec.generate(model, one(prompt), max_new_tokens=num_new, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class TestAdaptersRun:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_like_the_peft_model(self, name: str) -> None:
        model = adapted(CONFIGS[name]())
        before, seen = state(model), fingerprint(model)
        base = build(named("llama"))
        got = [ours(model, p) for p in PROMPTS]
        assert fingerprint(model) == seen
        assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
        assert got == [theirs(model, p) for p in PROMPTS]
        assert got != [reference(base, p, NUM_NEW) for p in PROMPTS]

    @pytest.mark.parametrize(
        ("drafter", "options"),
        [
            ("none", {}),
            ("oracle", {"accept_rate": 0.7}),
            ("adversary", {"width": 2}),
            ("random", {"branching": [3, 2]}),
        ],
    )
    def test_with_every_kind_of_draft(self, drafter: str, options: dict[str, Any]) -> None:
        model = adapted(lora(), architecture="qwen2")
        ids, mask = padded(PROMPTS)
        got = specdec.generate(
            model, ids, mask, max_new_tokens=NUM_NEW, do_sample=False, drafter=drafter, drafter_options=options
        )
        assert got[:, ids.shape[1] :].tolist() == [theirs(model, p) for p in PROMPTS]

    def test_through_llm(self) -> None:
        model = adapted(lora())
        llm = specdec.LLM(model, drafter="ngram")
        assert llm.generate(PROMPTS[1], max_new_tokens=NUM_NEW)[0].token_ids == theirs(model, PROMPTS[1])
        with model.disable_adapter():
            plain = theirs(model, PROMPTS[1])
            assert llm.generate(PROMPTS[1], max_new_tokens=NUM_NEW)[0].token_ids == plain
        assert llm.generate(PROMPTS[1], max_new_tokens=NUM_NEW)[0].token_ids == theirs(model, PROMPTS[1]) != plain

    def test_through_the_model_s_own_generate(self) -> None:
        model, ids = adapted(lora()), one(PROMPTS[1])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            custom_generate=specdec.custom_generate,
            drafter="ngram",
        )
        assert out[0, ids.shape[1] :].tolist() == theirs(model, PROMPTS[1])

    def test_a_draft_model_may_have_them(self) -> None:
        target, draft = build(named("llama")), adapted(lora())
        want = reference(target, PROMPTS[1], NUM_NEW)
        assert ours(target, PROMPTS[1], drafter="draft_model", drafter_options={"model": draft}) == want
        merged = copy.deepcopy(draft).merge_and_unload()
        out = specdec.LLM(merged, drafter="draft_model", drafter_options={"model": draft}).generate(
            PROMPTS[1], max_new_tokens=NUM_NEW
        )[0]
        assert out.stats.num_accepted_tokens == out.stats.num_draft_tokens > 0

    def test_mixed_kinds(self) -> None:
        model = adapted(lora(), mixed=True)
        model.add_adapter("other", peft.LoHaConfig(r=4, target_modules=PROJECTIONS))
        fill(model.double(), seed=2)
        model.set_adapter(["default", "other"])
        assert ours(model, PROMPTS[1]) == theirs(model, PROMPTS[1])

    def test_put_in_by_transformers_itself(self) -> None:
        model = build(named("llama"))
        plain = reference(model, PROMPTS[1], NUM_NEW)
        model.add_adapter(lora())
        fill(model.double(), seed=1)
        want = reference(model, PROMPTS[1], NUM_NEW)
        assert ours(model, PROMPTS[1]) == want != plain
        model.disable_adapters()
        assert ours(model, PROMPTS[1]) == plain

    def test_on_experts_as_parameters(self) -> None:
        config = lora(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
        model = adapted(config, architecture="qwen3_moe")
        seen = fingerprint(model)
        got = ours(model, PROMPTS[1])
        assert fingerprint(model) == seen  # not so after PEFT's own forward, which sets the parameters it wraps
        assert got == theirs(model, PROMPTS[1])


class TestSwitches:
    """Every call runs what the model is at that moment."""

    @pytest.fixture
    def model(self) -> Any:
        model = adapted(lora())
        model.add_adapter("other", lora(r=2))
        return model.double()

    def test_every_switch_is_noticed(self, model: Any) -> None:
        fill(model, seed=1)
        said = []

        def check() -> None:
            said.append(theirs(model, PROMPTS[1]))
            assert ours(model, PROMPTS[1]) == said[-1]

        check()
        model.set_adapter("other")
        check()
        with model.disable_adapter():
            check()
        check()
        model.base_model.set_adapter(["default", "other"])
        check()
        model.set_adapter("default")
        check()
        assert said[0] == said[5] and said[1] == said[3]
        assert len({tuple(s) for s in said}) == 4  # default, other, none, both

    def test_a_merge_is_noticed_and_undone(self, model: Any) -> None:
        fill(model, seed=1)
        want = theirs(model, PROMPTS[1])
        assert ours(model, PROMPTS[1]) == want
        first = runner_for(unwrapped(model))
        model.merge_adapter()
        assert ours(model, PROMPTS[1]) == theirs(model, PROMPTS[1]) == want
        assert runner_for(unwrapped(model)) is not first
        model.unmerge_adapter()
        assert ours(model, PROMPTS[1]) == want
        model.set_adapter("other")
        model.merge_adapter(["other"])
        assert ours(model, PROMPTS[1]) == theirs(model, PROMPTS[1]) != want

    def test_merged_and_unloaded(self, model: Any) -> None:
        fill(model, seed=1)
        want = theirs(model, PROMPTS[1])
        merged = copy.deepcopy(model).merge_and_unload()
        assert ours(merged, PROMPTS[1]) == want
        assert ours(model.unload(), PROMPTS[1]) == reference(build(named("llama")), PROMPTS[1], NUM_NEW)

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: m.set_adapter("other"),
            lambda m: m.base_model.disable_adapter_layers(),
            lambda m: m.merge_adapter(),
            lambda m: m.add_adapter("third", lora()),
            lambda m: m.delete_adapter("other"),
            lambda m: rescale(m),
            lambda m: next(p for n, p in m.named_parameters() if "lora_B" in n).data.mul_(2.0),
            lambda m: fill(m, seed=5),
        ],
        ids=["set", "disable", "merge", "add", "delete", "scale", "data", "weights"],
    )
    def test_fingerprint(self, model: Any, change: Callable[[Any], Any]) -> None:
        fill(model, seed=1)
        inside = unwrapped(model)
        before = fingerprint(inside)
        assert fingerprint(inside) == before
        change(model)
        assert fingerprint(inside) != before

    def test_merged_and_disabled_would_write_the_callers_weights(self, model: Any) -> None:
        model.merge_adapter()
        before = state(model)
        with (
            model.disable_adapter(),
            pytest.raises(UnsupportedModelError, match=r"merged .* disabled.*unmerge_adapter"),
        ):
            ours(model, PROMPTS[1])
        assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def rescale(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 0.5


class TestOurOwnForwards:
    """The lean forward, reordered weights and the int8 copy must not leave an adapter out."""

    def test_the_lean_forward_does_not_apply(self) -> None:
        model = adapted(lora(), dtype=torch.float32)
        assert lean.applies_to(build(named("llama"), torch.float32))
        assert not lean.applies_to(unwrapped(model))
        assert not lean.applies_to(unwrapped(adapted(lora(target_modules=["embed_tokens"]), dtype=torch.float32)))

    def test_an_effect_below_the_tolerance_of_half_precision_is_not_lost(self) -> None:
        """The comparison at load cannot see it, so the forward is chosen by what the modules are."""
        model = adapted(lora(target_modules=["q_proj"]), dtype=torch.bfloat16)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.mul_(0.001)
        assert not isinstance(build_runner(unwrapped(model)).program, lean.LeanProgram)

    def test_a_hook_is_not_left_out(self) -> None:
        model = build(named("llama"), torch.float32)
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda m, args, out: out * 1.001)
        assert not lean.applies_to(model)

    @pytest.mark.parametrize("config", ["lora", "dora", "lora_all", "modules_to_save"])
    def test_around_reordered_weights(self, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from specdec.models import build as building

        class Always(building.KernelFactory):
            def __call__(self, linears: Any) -> FusedLinear:
                layer = FusedLinear(linears, [True] * 20)
                self.extra_bytes += layer.extra_bytes
                return layer

        monkeypatch.setattr(building, "SMALL_MODEL_BYTES", 0)
        monkeypatch.setattr(building, "KernelFactory", Always)
        model = adapted(CONFIGS[config](), dtype=torch.float32)
        runner = build_runner(unwrapped(model), RunnerConfig(lean=False))
        fused = [m for m in runner.program.model.modules() if isinstance(m, FusedLinear)]
        assert len(fused) >= 10  # the layers under the adapters, and none of the adapters' own
        assert all(min(m.weight.shape) > 4 for m in fused)
        llm = specdec.LLM(model, lean=False)
        assert llm.generate(PROMPTS[1], max_new_tokens=NUM_NEW)[0].token_ids == theirs(model, PROMPTS[1])

    def test_the_int8_copy_has_the_adapter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specdec.models.int8_copy.LEAST_LINEAR_SHARE", 0.5)
        model = adapted(lora(), dtype=torch.float32)
        copied = int8_copy(build_runner(unwrapped(model)), None)
        assert any(isinstance(m, Int8Linear) for m in copied.program.model.modules())
        accepted = []
        for prompt in PROMPTS:
            llm = specdec.LLM(model, drafter="self_int8")
            out = llm.generate(prompt, max_new_tokens=24)[0]
            assert out.token_ids == theirs(model, prompt, 24)
            accepted.append(out.stats.num_accepted_tokens / out.stats.num_draft_tokens)
        assert min(accepted) > 0.5  # that of another model's copy is next to nothing

    def test_an_int8_copy_that_does_not_run_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specdec.models.int8_copy.LEAST_LINEAR_SHARE", 0.5)
        model = adapted(lora(use_dora=True), dtype=torch.float32)
        with pytest.raises(IncompatibleDrafterError, match=r"'self_int8'.*int8 layers.*merge_and_unload"):
            ours(model, PROMPTS[1], drafter="self_int8")


class TestRefused:
    @pytest.mark.parametrize(
        "config",
        [
            lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
            lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
            lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, task_type="CAUSAL_LM"),
        ],
        ids=["prompt_tuning", "prefix_tuning", "p_tuning"],
    )
    def test_virtual_tokens(self, config: Callable[[], Any]) -> None:
        model = peft.get_peft_model(build(named("llama")), config()).eval()
        for call in (lambda: ours(model, PROMPTS[1]), lambda: specdec.LLM(model), lambda: runner_for(model)):
            with pytest.raises(UnsupportedModelError, match=r"virtual tokens .*LoRA.*disable_adapter"):
                call()
        with model.disable_adapter():
            assert ours(model, PROMPTS[1]) == reference(build(named("llama")), PROMPTS[1], NUM_NEW)

    def test_activated_lora(self) -> None:
        model = adapted(lora(alora_invocation_tokens=[3, 4]))
        with pytest.raises(UnsupportedModelError, match=r"'default' is an activated LoRA.*invocation"):
            ours(model, PROMPTS[1])

    def test_x_lora(self, tmp_path: Any) -> None:
        adapted(lora(target_modules=["q_proj"])).save_pretrained(tmp_path / "a")
        config = peft.XLoraConfig(
            task_type="CAUSAL_LM", hidden_size=32, adapters={"0": str(tmp_path / "a")}, use_trainable_adapters=True
        )
        base = build(named("llama"))
        base.config.use_cache = False
        model = peft.get_peft_model(base, config).eval()
        with pytest.raises(UnsupportedModelError, match="X-LoRA, which runs the model twice"):
            ours(model, PROMPTS[1])

    def test_poly(self) -> None:
        config = peft.PolyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2, n_tasks=2, n_skills=2)
        model = peft.get_peft_model(build(named("llama")), config).eval()
        with pytest.raises(UnsupportedModelError, match="Poly, which needs task_ids"):
            ours(model, PROMPTS[1])

    def test_a_batch_of_several_adapters(self) -> None:
        model = adapted(lora())
        with pytest.raises(ConfigError, match=r"adapter_names.*set_adapter\(\)"):
            ours(model, PROMPTS[1], adapter_names=["default"])

    def test_wrappers_for_several_devices(self) -> None:
        model = nn.DataParallel(build(named("llama")))
        for call in (lambda: ours(model, PROMPTS[1]), lambda: specdec.LLM(model)):
            with pytest.raises(UnsupportedModelError, match=r"wrapped in DataParallel.*pass its \.module"):
                call()


class TestClone:
    def test_it_shares_the_adapters(self) -> None:
        model = adapted(CONFIGS["vera"]())
        clone = clone_sharing_parameters(unwrapped(model))
        want = {t.data_ptr() for t in [*model.parameters(), *model.buffers()]}
        assert {t.data_ptr() for t in [*clone.parameters(), *clone.buffers()]} <= want

    def test_settings_are_the_clones_own(self) -> None:
        model = adapted(lora())
        clone = clone_sharing_parameters(unwrapped(model))
        with model.disable_adapter():
            assert all(not m._disable_adapters for m in clone.modules() if hasattr(m, "_disable_adapters"))

"""Quantised targets: weight-only ones run over the caller's own storage, others are refused by name.

GPTQ and AWQ need CUDA or large packages; layers of their form (packed integers in buffers) stand in for them here.
bitsandbytes, torchao and optimum-quanto run on CPUs and are tested where they are installed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AwqConfig

import specdec
from specdec.errors import IncompatibleDrafterError, UnsupportedModelError
from specdec.models import lean
from specdec.models.build import build_runner
from specdec.models.clone import clone_sharing_parameters, fingerprint
from specdec.models.quantised import coupled_rows, quantisation_of
from tests.decoding import one, prompts, reference
from tests.models import test_multimodal
from tests.models.architectures import SUPPORTED, build, model_of, named

PROMPTS = prompts(3, 7, 12)
NUM_NEW = 12


class PackedLinear(nn.Module):
    """A stand-in for GPTQ's and AWQ's layers: 4 bits per weight, eight of them in an int32, one scale per output."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.dtype = weight.dtype
        scales = weight.abs().amax(dim=1, keepdim=True) / 7
        codes = (weight / scales).round().clamp(-8, 7).to(torch.int32) + 8
        packed = sum(codes[:, i::8] << (4 * i) for i in range(8))
        self.register_buffer("qweight", packed)
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack([(self.qweight >> (4 * i)) & 15 for i in range(8)], dim=-1).flatten(1)
        return F.linear(x, (codes - 8).to(x.dtype) * self.scales, self.bias)


class MovingParameter(nn.Parameter):
    """As bitsandbytes' Int8Params: scales lie beside the data until the first forward takes them away."""

    scales: Tensor | None


class MovingLinear(nn.Module):
    """A stand-in for Linear8bitLt: its first forward changes its own parameter."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        self.weight = MovingParameter((weight / scales).round().to(torch.int8), requires_grad=False)
        self.weight.scales = scales
        self.state = SimpleNamespace(scales=None)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.scales is not None:
            self.state.scales, self.weight.scales = self.weight.scales, None
            self.weight.data = self.weight.data.clone()
        return F.linear(x, self.weight.to(x.dtype) * self.state.scales)


def replaced(kind: Callable[[nn.Linear], nn.Module], dtype: torch.dtype = torch.float64) -> Any:
    """Return a tiny model whose decoder blocks are of `kind` layers."""
    model = build(named("llama"), dtype)
    for parent in list(model.model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, kind(child))
    return model


def ours(model: Any, prompt: list[int], **options: Any) -> list[int]:
    options = {"drafter": "oracle", "drafter_options": {"accept_rate": 0.6}, **options}
    out = specdec.generate(model, one(prompt), max_new_tokens=NUM_NEW, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


def storages(model: nn.Module) -> set[int]:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    # A tensor that wraps others has no storage of its own.
    return {id(t) if is_traceable_wrapper_subclass(t) else t.untyped_storage().data_ptr() for t in tensors}


class TestWeightOnly:
    def test_packed_weights_run(self) -> None:
        model = replaced(PackedLinear)
        before = fingerprint(model)
        want = [reference(model, p, NUM_NEW) for p in PROMPTS]
        assert [ours(model, p) for p in PROMPTS] == want
        assert want != [reference(model_of(named("llama")), p, NUM_NEW) for p in PROMPTS]
        assert fingerprint(model) == before

    def test_packed_weights_are_not_doubled(self) -> None:
        model = replaced(PackedLinear)
        assert storages(clone_sharing_parameters(model)) == storages(model)
        program: Any = build_runner(model).program
        assert storages(program.model) == storages(model)

    def test_other_codes_are_noticed(self) -> None:
        model = replaced(PackedLinear)
        first = ours(model, PROMPTS[1])
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.qweight.bitwise_not_()
        assert ours(model, PROMPTS[1]) == reference(model, PROMPTS[1], NUM_NEW) != first

    def test_a_first_forward_that_moves_scales_leaves_the_callers_model(self) -> None:
        model = replaced(MovingLinear)
        got = [ours(model, p) for p in PROMPTS]
        layer = model.model.layers[0].mlp.down_proj
        assert layer.weight.scales is not None and layer.state.scales is None
        assert got == [reference(model, p, NUM_NEW) for p in PROMPTS]
        assert [ours(model, p) for p in PROMPTS] == got  # and after a forward of the caller's own

    def test_our_own_forward_is_not_used(self) -> None:
        for kind in (PackedLinear, MovingLinear):
            assert not lean.applies_to(replaced(kind, torch.float32))

    def test_weights_within_a_wrapping_tensor_are_no_plain_linear(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        from specdec.models.matmul import is_plain_linear

        linear = nn.Linear(4, 4, bias=False)
        assert is_plain_linear(linear)
        linear.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
        assert not is_plain_linear(linear)


class TestNames:
    @pytest.mark.parametrize(
        ("declared", "name"),
        [
            (None, "tests"),
            ({"quant_method": "gptq", "bits": 4}, "gptq"),
            (AwqConfig(bits=4), "awq"),
        ],
    )
    def test_the_int8_copy_is_refused(self, declared: Any, name: str) -> None:
        model = replaced(PackedLinear, torch.float32)
        if declared is not None:
            model.config.quantization_config = declared
        assert quantisation_of(model) == f"{name}, PackedLinear layers"
        with pytest.raises(IncompatibleDrafterError, match=rf"'self_int8'.*quantised already \({name}, PackedLinear"):
            ours(model, PROMPTS[0], drafter="self_int8", drafter_options={})
        with pytest.raises(IncompatibleDrafterError, match="quantised already"):
            specdec.LLM(model, drafter="self_int8")

    def test_models_that_are_not_quantised(self) -> None:
        for architecture in SUPPORTED:
            assert quantisation_of(model_of(architecture)) is None
        for kind in ("llava", "gemma3", "qwen2_5_vl"):  # their image towers hold numbered positions
            assert quantisation_of(test_multimodal.model_for(kind)) is None
        model = build(named("llama"))
        model.config.quantization_config = {"quant_method": "gguf"}  # what a dequantised model may still declare
        assert quantisation_of(model) is None

    def test_float8(self) -> None:
        model = build(named("llama"))
        layer = model.model.layers[1].mlp.down_proj
        layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
        assert quantisation_of(model) == "torch, Linear layers"
        with pytest.raises(UnsupportedModelError, match="own forward fails"):
            ours(model, PROMPTS[0])


class TestCoupledRows:
    """Where a row's result depends on its neighbours, a token would depend on what is drafted beside it."""

    @pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning", "ignore:.*deprecated:UserWarning")
    def test_torchs_dynamic_quantisation(self) -> None:
        plain = build(named("llama"), torch.float32)
        model: Any = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, torch.qint8)
        layer = model.model.layers[0].mlp.down_proj
        rows = torch.randn(2, 48, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [50.0]])
        assert not torch.allclose(layer(rows)[0], layer(rows[:1])[0], rtol=1e-3, atol=1e-3)  # the reason
        clone: Any = clone_sharing_parameters(model)
        packed = clone.model.layers[0].mlp.down_proj._packed_params._packed_params
        assert packed is layer._packed_params._packed_params
        for call in (lambda: ours(model, PROMPTS[0]), lambda: specdec.LLM(model)):
            with pytest.raises(UnsupportedModelError, match=r"dynamic quantisation.*quantise the weights only"):
                call()

    def test_llm_int8(self) -> None:
        class Linear8bitLt(nn.Linear):
            state = SimpleNamespace(threshold=6.0)

        model = nn.Sequential(Linear8bitLt(2, 2))
        assert "llm_int8_threshold=6.0" in str(coupled_rows(model))
        model[0].state = SimpleNamespace(threshold=0.0)
        assert coupled_rows(model) is None


# ------------------------------------------------------------------ libraries, where they are installed


def loaded(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    build(named("llama"), dtype, hidden_size=64, intermediate_size=128).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype, device_map="cpu")
    model.generation_config.pad_token_id = 0
    return model.eval()


def bits_and_bytes(**options: Any) -> Any:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


def torchao() -> Any:
    quantisation = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install torchao")
    from transformers import TorchAoConfig

    return TorchAoConfig(quantisation.Int8WeightOnlyConfig())


def quanto() -> Any:
    pytest.importorskip("optimum.quanto", reason="needs optimum-quanto: pip install optimum-quanto")
    from transformers import QuantoConfig

    return QuantoConfig(weights="int8")


LIBRARIES: dict[str, Callable[[], Any]] = {
    "bitsandbytes_8bit": lambda: bits_and_bytes(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes_4bit": lambda: bits_and_bytes(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    "bitsandbytes_nested": lambda: bits_and_bytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "torchao": torchao,
    "quanto": quanto,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_library(library: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = LIBRARIES[library]()
    model = loaded(tmp_path, config, dtype)
    before = fingerprint(model)
    assert quantisation_of(model) is not None
    got = [ours(model, p) for p in PROMPTS]
    assert fingerprint(model) == before
    assert got == [reference(model, p, NUM_NEW) for p in PROMPTS]
    assert got == [ours(model, p) for p in PROMPTS]
    assert storages(clone_sharing_parameters(model)) == storages(model)
    with pytest.raises(IncompatibleDrafterError, match="quantised already"):
        ours(model, PROMPTS[0], drafter="self_int8", drafter_options={})


def test_library_llm_int8_with_outliers(tmp_path: Path) -> None:
    model = loaded(tmp_path, bits_and_bytes(load_in_8bit=True), torch.float32)
    layer = model.model.layers[0].mlp.down_proj
    rows = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))
    rows[1, 5] = 50.0  # a column that only the second row makes an outlier
    alone, beside = copy.deepcopy(layer)(rows[:1])[0], copy.deepcopy(layer)(rows)[0]
    assert not torch.allclose(alone, beside, rtol=1e-4, atol=1e-4)  # the reason
    with pytest.raises(UnsupportedModelError, match=r"llm_int8_threshold=6\.0.*llm_int8_threshold=0\.0"):
        ours(model, PROMPTS[0])


def test_library_adapters_over_quantised_weights(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    model = loaded(tmp_path, LIBRARIES["bitsandbytes_4bit"](), torch.float32)
    plain = reference(model, PROMPTS[1], NUM_NEW)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])).eval()
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    got = ours(adapted, PROMPTS[1])
    out = adapted.generate(input_ids=one(PROMPTS[1]), max_new_tokens=NUM_NEW, do_sample=False)
    assert got == out[0, len(PROMPTS[1]) :].tolist() != plain

"""`specdec.check`: the right verdict from a config, a directory, a file or a model, and everything the report says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from specdec.check import ModelReport, check
from specdec.errors import ConfigError, ModelLoadError
from specdec.kv.plan import PlannedSegment
from specdec.models import loading, sizes
from specdec.models.build import runner_for
from tests.models.architectures import REFUSED, SUPPORTED, Architecture, build, model_of, named
from tests.models.tiny_gguf import tiny_llama, write_gguf

# transformers' own default configs, those of the published models: what they are refused for, or "" = trees.
PUBLISHED = {
    "llama": "",
    "mistral": "",
    "gemma2": "",
    "gemma3_text": "",
    "gpt_oss": "",
    "llama4_text": "",
    "deepseek_v3": "",
    "qwen3_moe": "",
    "olmo3": "",
    "cohere2": "",
    "gpt_bigcode": "",
    "gptj": "",
    "falcon": "",
    "codegen": "",
    "bert": "attention of its own",  # it looks ahead, unless configured as a decoder
    "openai-gpt": "no KV cache",
    "qwen3_next": "recurrent state",
    "jamba": "recurrent state",
    "mamba2": "recurrent state",
    "rwkv": "recurrent state",
    "bloom": "ALiBi",
    "deepseek_v32": "sparse attention indexer",
    "gemma3n_text": "shared KV layers",
    "bart": "encoder-decoder",
    "gpt_neo": "attention mask of its own",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail wherever weights would be read."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("weights were loaded")

    monkeypatch.setattr(loading, "load_causal_lm", refuse)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)


def config_of(architecture: Architecture, **options: Any) -> Any:
    try:
        return AutoConfig.for_model(architecture.model_type, **{**architecture.options, **options})
    except (ValueError, KeyError) as error:
        pytest.skip(f"this transformers release has no {architecture.model_type}: {error}")


def assert_refused(report: ModelReport, feature: str) -> None:
    assert report.verdict == "refused"
    assert not report.runs
    assert feature in str(report.feature)
    assert report.advice
    assert report.drafters == {}


class TestVerdicts:
    @pytest.mark.parametrize("architecture", SUPPORTED, ids=str)
    def test_runs_says_the_config(self, architecture: Architecture, no_weights: None) -> None:
        report = check(config_of(architecture))
        assert report.verdict == ("trees" if architecture.trees else "chains")
        assert report.weights is None
        assert (report.feature, report.advice) == (None, "") or not architecture.trees
        json.dumps(report.to_dict())

    @pytest.mark.parametrize("architecture", SUPPORTED, ids=str)
    def test_runs_says_the_model(self, architecture: Architecture) -> None:
        model = model_of(architecture)
        report = check(model)
        assert report.verdict == ("trees" if architecture.trees else "chains")
        assert report.architecture == type(model).__name__
        assert report.weights is not None
        assert report.weights.error <= report.weights.tolerance
        assert report.weights.dtype == report.dtype == "float64"
        runner = runner_for(model)
        assert report.kv_bytes_per_token == runner.cache.bytes_per_token
        assert report.num_parameters == sum(p.numel() for p in model.parameters())
        assert report.max_positions == runner.max_positions

    @pytest.mark.parametrize("architecture", SUPPORTED, ids=str)
    def test_sizes_from_the_config_are_the_models(self, architecture: Architecture, no_weights: None) -> None:
        model = model_of(architecture)
        report = check(config_of(architecture), dtype="float64")
        assert report.weight_bytes == sum(p.numel() * 8 for p in model.parameters())
        assert report.kv_bytes_per_token == runner_for(model).cache.bytes_per_token

    @pytest.mark.parametrize("architecture", REFUSED, ids=str)
    def test_refused_says_the_config(self, architecture: Architecture, no_weights: None) -> None:
        assert_refused(check(config_of(architecture)), architecture.refused)

    @pytest.mark.parametrize("architecture", REFUSED, ids=str)
    def test_refused_says_the_model(self, architecture: Architecture) -> None:
        assert_refused(check(build(architecture)), architecture.refused)

    @pytest.mark.parametrize("model_type", PUBLISHED)
    def test_published_sizes(self, model_type: str, no_weights: None) -> None:
        feature = PUBLISHED[model_type]
        try:
            config = AutoConfig.for_model(model_type)
        except ValueError as error:
            pytest.skip(f"this transformers release has no {model_type}: {error}")
        report = check(config)
        if feature:
            assert_refused(report, feature)
        else:
            assert report.verdict == "trees"
            assert report.num_parameters is not None
            assert report.num_parameters > 1e8

    def test_enough_are_covered(self) -> None:
        refused = {a.name for a in REFUSED} | {name for name, feature in PUBLISHED.items() if feature}
        assert len({a.name for a in (*SUPPORTED, *REFUSED)} | set(PUBLISHED)) >= 36
        assert len(refused) >= 10

    def test_chains_have_a_reason(self) -> None:
        report = check(config_of(named("mpt")))
        assert (report.verdict, report.feature, report.level) == ("chains", "ALiBi", "mask")
        assert "trees are dropped" in report.advice
        assert report.probe["tree_error"] > 1e-3 > report.probe["chain_error"]
        assert report.drafters["ngram"] is None

    def test_a_lost_window_is_found_in_a_half_precision_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = build(named("gemma3"), torch.bfloat16, sliding_window=64)
        assert check(model).verdict == "trees"
        monkeypatch.setenv("SPECDEC_CACHE", "")
        monkeypatch.setattr("specdec.models.verdicts._read", lambda path, key: None)
        whole = PlannedSegment.mask
        monkeypatch.setattr(PlannedSegment, "mask", lambda self, pattern, like, n: whole(self, None, like, n))
        monkeypatch.setattr("specdec.models.verdicts._write", lambda *args: None)
        assert_refused(check(model), "attention masks (sliding_attention)")

    def test_it_could_not_be_tried(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Nothing is claimed from the config; the real weights decide."""

        def fails(*args: Any) -> Any:
            raise RuntimeError("no such layer")

        build(named("gemma"), torch.float32).save_pretrained(tmp_path / "model")
        monkeypatch.setattr("specdec.models.probe.small_instance", fails)
        report = check(tmp_path / "model")
        assert (report.verdict, report.runs, report.drafters) == ("unknown", False, {})
        assert "RuntimeError: no such layer" in str(report.feature)
        assert report.advice
        report = check(tmp_path / "model", weights=True)
        assert (report.verdict, report.feature, report.advice) == ("trees", None, "")


class TestReport:
    def test_what_a_directory_with_a_config_alone_says(self, tmp_path: Path, no_weights: None) -> None:
        options = {"sliding_window": 512, "num_hidden_layers": 12, "hidden_size": 256, "num_attention_heads": 4}
        config = AutoConfig.for_model("gemma3_text", head_dim=64, vocab_size=1000, dtype="bfloat16", **options)
        config.save_pretrained(tmp_path)
        GenerationConfig(eos_token_id=[7, 3]).save_pretrained(tmp_path)
        report = check(tmp_path)
        assert report.architecture == "Gemma3ForCausalLM"
        assert (report.verdict, report.level, report.model_type) == ("trees", "attention", "gemma3_text")
        assert report.layers == {"sliding_attention": 10, "full_attention": 2}
        assert report.windows == [512]
        assert (report.dtype, report.vocab_size, report.num_layers) == ("bfloat16", 1000, 12)
        assert report.eos_token_ids == [3, 7]
        assert report.kv_bytes_per_token == 12 * 2 * config.num_key_value_heads * 64 * 2
        assert report.weight_bytes == 2 * report.num_parameters
        assert not report.lean
        assert report.notes == ["the sizes are those of bfloat16; on this machine it is loaded in float32 by default"]
        report = check(str(tmp_path), weights=True, dtype="float32")
        assert report.notes == [f"there are no weights in {tmp_path}"]
        assert report.weights is None

    def test_the_lean_forward(self) -> None:
        assert check(config_of(named("qwen2_window"))).lean
        assert not check(config_of(named("gemma"))).lean
        report = check(model_of(named("qwen2_window")))
        assert report.lean
        assert report.weights is not None
        assert report.weights.lean

    def test_which_attention_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = config_of(named("llama"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert check(config).attention == "SDPA (flash-attn needs a CUDA device, this is cpu)"
        assert check(config_of(named("gptj"))).attention is None  # its own
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        assert (
            check(config, dtype="float32").attention == "SDPA (flash-attn needs float16 or bfloat16, this is float32)"
        )
        assert check(config, dtype="bfloat16").attention == "SDPA (flash-attn is not installed)"

    def test_drafters(self) -> None:
        llama, mixtral = (check(config_of(named(name))).drafters for name in ("llama", "mixtral"))
        assert {"none", "ngram", "draft_model", "self_int8"} <= set(llama)
        assert not {"oracle", "adversary", "scripted", "random"} & set(llama)
        trained = {"eagle", "eagle3", "medusa"}  # none ships for a tiny random model
        assert all("head ships for llama (hidden size" in str(llama[name]) for name in trained)
        assert {reason for name, reason in llama.items() if name not in trained} == {None}
        assert "Linear layers" in str(mixtral["self_int8"])
        assert all(reason is None for name, reason in mixtral.items() if name not in {"self_int8", *trained})

    def test_from_weights_on_disk(self, tmp_path: Path) -> None:
        model = build(named("gptj"), torch.bfloat16)
        model.save_pretrained(tmp_path)
        report = check(tmp_path, weights=True)
        assert report.weights is not None
        assert (report.verdict, report.dtype, report.weights.dtype) == ("trees", "bfloat16", "bfloat16")
        assert report.weights.error <= report.weights.tolerance == 0.1
        assert check(tmp_path, weights=True, dtype="float32").dtype == "float32"
        assert check(tmp_path).weights is None

    def test_weights_that_overflow(self, tmp_path: Path) -> None:
        model = build(named("llama"), torch.float16)
        model.lm_head.weight.fill_(60000)
        report = check(model)
        assert_refused_by_weights(report, "NaN or infinite logits")
        assert check(model, weights=False).verdict == "trees"

    def test_a_configs_weights(self) -> None:
        assert check(config_of(named("llama")), weights=True).notes == ["a config has no weights to run"]

    def test_quantised_weights_have_no_known_size(self) -> None:
        config = config_of(named("llama"))
        config.quantization_config = {"quant_method": "gptq", "bits": 4}
        report = check(config)
        assert report.verdict == "trees"
        assert report.weight_bytes is None
        assert "quantised" in report.notes[0]

    def test_a_size_that_cannot_be_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*args: Any) -> Any:
            raise RuntimeError("needs a device")

        monkeypatch.setattr(sizes, "sizes_of", fails)
        report = check(config_of(named("llama")))
        assert (report.verdict, report.weight_bytes) == ("trees", None)
        assert "RuntimeError: needs a device" in report.notes[0]

    def test_the_callers_model_stays_as_it_is(self) -> None:
        model = build(named("gemma2"))
        before = (model.config.to_dict(), {n: id(p) for n, p in model.named_parameters()}, model.training)
        check(model)
        assert (model.config.to_dict(), {n: id(p) for n, p in model.named_parameters()}, model.training) == before


def assert_refused_by_weights(report: ModelReport, reason: str) -> None:
    assert report.verdict == "refused"
    assert reason in str(report.feature)
    assert report.advice


ROPE: dict[str, Callable[[gguf.GGUFWriter], None]] = {
    "rope_freqs.weight": lambda writer: writer.add_tensor("rope_freqs.weight", torch.ones(8).numpy()),
    "llama.rope.scaling.factor": lambda writer: writer.add_float32("llama.rope.scaling.factor", 4.0),
    "llama.rope.scaling.type": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
}


class TestGguf:
    def test_it_is_not_converted_for_a_look(self, tmp_path: Path, cache: Path, no_weights: None) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
        report = check(path)
        assert (report.verdict, report.architecture, report.lean) == ("trees", "LlamaForCausalLM", True)
        assert (report.max_positions, report.num_layers, report.eos_token_ids) == (128, 2, [0])
        assert not (cache / "models").exists()

    def test_with_weights(self, tmp_path: Path, cache: Path) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
        report = check(path, weights=True)
        assert report.weights is not None
        assert report.weights.lean
        assert report.num_parameters == tiny_llama().num_parameters()
        assert check(path).num_parameters == report.num_parameters  # now from where it was converted to

    @pytest.mark.parametrize("what", ROPE)
    def test_lost_rope_scaling(self, what: str, tmp_path: Path, no_weights: None) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), extra=ROPE[what])
        report = check(path)
        assert_refused(report, "RoPE scaling dropped by GGUF loading")
        assert what in str(report.feature)
        assert "safetensors" in report.advice
        assert report.architecture == "llama"
        with pytest.raises(ModelLoadError, match="uses RoPE scaling"):
            loading.load_model(path)

    def test_a_damaged_file(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
        path.write_bytes(path.read_bytes()[:2000])
        with pytest.raises(ModelLoadError, match=r"damaged|truncated"):
            check(path)


class TestErrors:
    @pytest.mark.parametrize("name", ["/no/such/dir", "./nothing", "smolm2", ""])
    def test_what_is_not_there(self, name: str) -> None:
        with pytest.raises(ModelLoadError, match="built-in models: smollm2"):
            check(name)

    def test_a_hub_id_offline(self) -> None:
        """The hub is asked, through AutoConfig."""
        with pytest.raises(ModelLoadError, match="cannot be loaded from the Hugging Face Hub"):
            check("someone/some-model")

    def test_a_hub_id(self, monkeypatch: pytest.MonkeyPatch, no_weights: None) -> None:
        asked: list[str] = []

        def from_hub(name: str, **options: Any) -> PretrainedConfig:
            asked.append(name)
            return config_of(named("llama"))

        monkeypatch.setattr(AutoConfig, "from_pretrained", from_hub)
        assert check("someone/some-model").verdict == "trees"
        assert asked == ["someone/some-model"]

    @pytest.mark.parametrize(
        "model", [None, 3, torch.nn.Linear(2, 2), object()], ids=lambda model: type(model).__name__
    )
    def test_no_model(self, model: Any) -> None:
        with pytest.raises(ModelLoadError, match="cannot be checked; give a built-in name"):
            check(model)

    def test_dtype(self) -> None:
        with pytest.raises(ConfigError, match="available: auto"):
            check(config_of(named("llama")), dtype="int4")

    def test_a_config_without_a_causal_language_model(self) -> None:
        report = check(AutoConfig.for_model("clip_vision_model"))
        assert report.verdict in ("refused", "unknown")
        assert "without a causal language model" in report.architecture
        assert report.advice

    def test_a_model_without_a_head(self) -> None:
        assert_refused(check(model_of(named("llama")).model), "not a transformers model that generates")

"""The shrunk probe: what it finds, what it keeps, and how runners use it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.errors import UnsupportedModelError
from specdec.kv.plan import PlannedSegment
from specdec.models import hosting, verdicts
from specdec.models import probe as probe_module
from specdec.models.build import build_runner
from specdec.models.lean import LeanProgram
from specdec.models.shrink import MAX_LAYERS, WINDOW, shrink, windows
from specdec.models.verdicts import verdict_of
from tests.models.architectures import SUPPORTED, Architecture, build, named

WINDOWED = [a for a in SUPPORTED if a.windowed]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    return tmp_path / "compatibility"


@pytest.fixture
def lost_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget every window and chunk, as a mask bug would."""
    whole = PlannedSegment.mask
    monkeypatch.setattr(PlannedSegment, "mask", lambda self, pattern, like, repeat: whole(self, None, like, repeat))


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows with every probe that runs."""
    seen: list[Any] = []
    real = verdicts.probe_small

    def counted(small: Any, model_class: Any) -> Any:
        seen.append(small)
        return real(small, model_class)

    monkeypatch.setattr(verdicts, "probe_small", counted)
    return seen


def config_of(architecture: Architecture, **options: Any) -> Any:
    return AutoConfig.for_model(architecture.model_type, **{**architecture.options, **options})


BIG = {
    "gemma3": ("gemma3_text", {}, ["sliding_attention", "full_attention"]),
    "llama4": ("llama4_text", {}, ["chunked_attention", "full_attention"]),
    "gpt_oss": ("gpt_oss", {}, ["sliding_attention", "full_attention"]),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 20}, ["full_attention", "sliding_attention"]),
    "deepseek_v3": ("deepseek_v3", {}, []),
    "falcon": ("falcon", {}, []),
    "gptj": ("gptj", {}, []),
    "mistral": ("mistral", {}, []),
    "mixtral": ("mixtral", {}, []),
}


class TestShrinking:
    @pytest.mark.parametrize("name", BIG)
    def test_every_kind_of_layer_stays_and_sizes_do_not(self, name: str) -> None:
        model_type, options, kinds = BIG[name]
        config = AutoConfig.for_model(model_type, **options)
        small = shrink(config)
        assert 2 <= small.num_hidden_layers <= MAX_LAYERS
        assert set(getattr(small, "layer_types", None) or []) == set(kinds)
        assert len(windows(config)) == len(windows(small))
        assert all(size <= WINDOW for size in windows(small))
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
        assert sum(p.numel() for p in model.parameters()) < 2_000_000

    def test_query_groups_and_dense_layers_stay(self) -> None:
        config = AutoConfig.for_model("llama", num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)
        small = shrink(config)
        assert small.num_attention_heads == 4 * small.num_key_value_heads == 8
        config = AutoConfig.for_model("deepseek_v3")
        small = shrink(config)
        assert config.first_k_dense_replace == 3
        assert 1 <= small.first_k_dense_replace < small.num_hidden_layers

    def test_a_window_of_an_unfamiliar_name_is_said(self) -> None:
        config = config_of(named("gemma3"))
        config.sliding_window = None
        config.far_sight = 4096
        found = verdict_of(config)
        assert found.verdict == "unknown"
        assert "sliding_attention whose size has no familiar name" in str(found.feature)


class TestNegativeControls:
    @pytest.mark.parametrize("architecture", WINDOWED, ids=str)
    def test_a_lost_window_is_found(self, architecture: Architecture, lost_windows: None) -> None:
        found = verdict_of(config_of(architecture))
        assert found.verdict == "refused"
        assert found.advice

    @pytest.mark.parametrize("architecture", WINDOWED, ids=str)
    def test_a_real_window_is_crossed(self, architecture: Architecture, request: pytest.FixtureRequest) -> None:
        """4096 positions, as the models have; the probe must not pass because nothing reaches so far."""
        field = "attention_chunk_size" if architecture.model_type == "llama4_text" else "sliding_window"
        config = config_of(architecture, **{field: 4096})
        assert verdict_of(config).verdict == "trees"
        request.getfixturevalue("lost_windows")
        (verdicts.cache_dir() / "compatibility").rename(verdicts.cache_dir() / "gone")
        assert verdict_of(config).verdict == "refused"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("name", ["mistral_window", "gemma3", "gpt_oss"])
    def test_a_runner_is_refused(self, name: str, dtype: torch.dtype, lost_windows: None) -> None:
        """11 tokens of the real weights cross no window of 64, in no dtype."""
        model = build(named(name), dtype, sliding_window=64)
        with pytest.raises(UnsupportedModelError, match="does not compute what transformers does") as caught:
            build_runner(model)
        assert type(model).__name__ in str(caught.value)

    @pytest.mark.parametrize("name", ["mistral_window", "gemma3"])
    def test_a_runner_is_not_refused_without_a_fault(self, name: str) -> None:
        assert build_runner(build(named(name), torch.bfloat16, sliding_window=64)).supports_trees

    def test_a_lost_tree_mask_makes_chains(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hosting, "compare", lambda p, r, trees=True: 1.0 if trees else 0.0)
        found = verdict_of(config_of(named("gemma")))
        assert (found.verdict, found.tree_error, found.chain_error) == ("chains", 1.0, 0.0)
        assert found.advice

    def test_a_lean_forward_that_differs_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its own window is as far from 11 tokens as the model's."""
        model = build(named("mistral_window"), torch.float32, sliding_window=64)
        assert isinstance(build_runner(model).program, LeanProgram)
        monkeypatch.setattr("specdec.models.lean.sliding_window", lambda size: None)
        (verdicts.cache_dir() / "compatibility").rename(verdicts.cache_dir() / "gone")
        assert verdict_of(model.config, type(model)).lean is False
        assert not isinstance(build_runner(model).program, LeanProgram)

    def test_one_unlucky_draw_refuses_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, calls = hosting.compare, []

        def unlucky(program: Any, reference: Any, trees: bool = True) -> float:
            calls.append(trees)
            return 1.0 if len(calls) <= 2 else real(program, reference, trees=trees)

        monkeypatch.setattr(hosting, "compare", unlucky)
        assert verdict_of(config_of(named("gemma"))).verdict == "trees"


class TestKeeping:
    def test_a_second_look_reads_the_first(self, cache: Path, probes: list[Any]) -> None:
        first = verdict_of(config_of(named("llama")))
        assert len(list(cache.glob("llama-*.json"))) == len(probes) == 1
        assert verdict_of(config_of(named("llama"))) == first
        assert len(probes) == 1

    def test_models_of_other_sizes_share_it(self, probes: list[Any]) -> None:
        for layers, hidden in ((32, 4096), (80, 8192)):
            verdict_of(AutoConfig.for_model("llama", num_hidden_layers=layers, hidden_size=hidden))
        assert len(probes) == 1

    def test_another_config_is_tried(self, probes: list[Any]) -> None:
        verdict_of(config_of(named("llama")))
        verdict_of(config_of(named("llama"), attention_bias=True))
        verdict_of(config_of(named("qwen2")))
        assert len(probes) == 3

    @pytest.mark.parametrize(
        "damage",
        [
            lambda path: path.write_text(""),
            lambda path: path.write_text("[1, 2]"),
            lambda path: path.write_text(path.read_text()[:-40]),
            lambda path: path.write_bytes(b"\xff\xfe\x00"),
            lambda path: path.write_text(path.read_text().replace('"trees"', '"perhaps"')),
            lambda path: path.write_text(path.read_text().replace('"lean"', '"loan"')),
        ],
        ids=["empty", "list", "truncated", "bytes", "verdict", "field"],
    )
    def test_damage_is_replaced(self, damage: Callable[[Path], Any], cache: Path, probes: list[Any]) -> None:
        first = verdict_of(config_of(named("llama")))
        (path,) = cache.glob("llama-*.json")
        damage(path)
        assert verdict_of(config_of(named("llama"))) == first
        assert len(probes) == 2
        assert verdict_of(config_of(named("llama"))) == first
        assert len(probes) == 2

    @pytest.mark.parametrize("library", ["torch", "transformers", "specdec", "sources"])
    def test_other_versions_are_tried(
        self, library: str, cache: Path, probes: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        verdict_of(config_of(named("llama")))
        if library == "specdec":
            monkeypatch.setattr(verdicts, "version", lambda name: "99.0")
        elif library == "sources":
            monkeypatch.setattr(verdicts, "_sources", lambda: "other")
        else:
            monkeypatch.setattr(getattr(verdicts, library), "__version__", "99.0")
        verdict_of(config_of(named("llama")))
        assert len(probes) == 2
        assert len(list(cache.iterdir())) == 1  # old versions do not pile up

    def test_no_writable_cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, probes: list[Any]) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file" / "below"))
        assert [verdict_of(config_of(named("llama"))).verdict for _ in range(2)] == ["trees", "trees"]
        assert len(probes) == 2

    def test_what_could_not_be_tried_is_tried_again(
        self, cache: Path, probes: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*args: Any) -> Any:
            raise RuntimeError("no such layer")

        with monkeypatch.context() as patch:
            patch.setattr(probe_module, "small_instance", fails)
            found = verdict_of(config_of(named("llama")))
        assert found.verdict == "unknown"
        assert "RuntimeError: no such layer" in str(found.feature)
        assert found.advice
        assert not cache.exists()
        assert verdict_of(config_of(named("llama"))).verdict == "trees"

    def test_an_instance_that_stays_large_is_not_built(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe_module, "_MAX_PARAMETERS", 1000)
        found = verdict_of(config_of(named("llama")))
        assert found.verdict == "unknown"
        assert "parameters" in str(found.feature)

    def test_the_file_says_what_it_is_about(self, cache: Path) -> None:
        verdict_of(config_of(named("mpt")))
        (path,) = cache.glob("mpt-*.json")
        stored = json.loads(path.read_text())
        assert stored["key"]["torch"] == torch.__version__
        assert stored["found"]["verdict"] == "chains"


def test_probing_leaves_the_callers_randomness_alone() -> None:
    before = torch.get_rng_state()
    verdict_of(config_of(named("llama")))
    assert torch.equal(torch.get_rng_state(), before)

"""A checkpoint's advice about its drafts: it holds where the caller says nothing, as a whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

from specdec.api import LLM
from specdec.build import build_drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.engine_config import DEFAULT_DRAFT_TOKENS
from specdec.errors import ConfigError
from specdec.heads.draft_vocabulary import whole_vocabulary
from specdec.heads.small_model import load_small_model, save_small_model
from specdec.heads.target import head_target
from specdec.models.build import runner_for
from specdec.models.rotary import RotaryTable
from specdec.models.small_copy import small_copy
from tests.heads.tiny_heads import tiny_eagle, tiny_medusa
from tests.models.architectures import build, model_of, named

TREE = {"depth": 3, "top_k": 3, "total_tokens": 9}
ADVICE = {"tree": TREE, "max_draft_tokens": 8}


@pytest.mark.parametrize("make", [tiny_eagle, tiny_medusa], ids=["eagle3", "medusa"])
def test_the_advised_number_goes_with_the_advised_shape(make: Any) -> None:
    model = model_of(named("llama"))
    advice: dict[str, Any] = ADVICE if make is tiny_eagle else {"tree": [3, 1], "max_draft_tokens": 6}
    head = make(runner_for(model), settings=advice)
    name = "eagle3" if make is tiny_eagle else "medusa"

    def asked(settings: dict[str, Any], tree: Any = None, **options: Any) -> int:
        head.settings.clear()
        head.settings.update(settings)
        llm = LLM(model, drafter=name, drafter_options={"model": head, "tree": tree}, **options)
        found = llm.engine.config.max_draft_tokens
        stats = llm.generate([[5, 6, 7]], max_new_tokens=10, ignore_eos=True)[0].stats
        assert stats.num_draft_tokens > 0
        assert found is not None
        return found

    assert asked(advice) == advice["max_draft_tokens"]
    assert asked(advice, max_draft_tokens=2) == 2
    assert asked(advice, "chain") == DEFAULT_DRAFT_TOKENS  # the number is that of another shape
    assert asked({"tree": "chain", "max_draft_tokens": 2}) == 2
    assert asked({"tree": advice["tree"]}) == 16
    assert asked({}) == (DEFAULT_DRAFT_TOKENS if make is tiny_eagle else 16)  # Medusa heads draft trees anyway
    with pytest.raises(ConfigError, match="max_draft_tokens='many'"):
        asked({"tree": "chain", "max_draft_tokens": "many"})


def test_a_distilled_draft_model_advises_too(tmp_path: Path) -> None:
    model = model_of(named("llama"))
    runner = runner_for(model)
    target = head_target(runner)
    save_small_model(
        tmp_path, small_copy(runner.model, [0]), (0,), whole_vocabulary(target.vocab_size), target, settings=ADVICE
    )
    llm = LLM(model, drafter=str(tmp_path))
    assert isinstance(llm.engine.drafter, DraftModelDrafter)
    assert llm.engine.config.max_draft_tokens == 8
    assert not llm.engine.drafter.samples
    chain = build_drafter("draft_model", runner, None, {"model": str(tmp_path), "tree": "chain"})
    assert chain.samples


def distilled(folder: Path, layer: int) -> Path:
    """Write a draft model that begins as one of the target's blocks."""
    runner = runner_for(model_of(named("llama")))
    target = head_target(runner)
    return save_small_model(
        folder, small_copy(runner.model, [layer]), (layer,), whole_vocabulary(target.vocab_size), target
    )


def test_a_distilled_draft_model_by_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = distilled(tmp_path / "small", 0)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo_id, name: str(folder / name))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, allow_patterns: str(folder))
    llm = LLM(model_of(named("llama")), drafter="draft_model", drafter_options={"model": "someone/small"})
    drafter = llm.engine.drafter
    assert isinstance(drafter, DraftModelDrafter)
    own = [p for n, p in load_file(folder / "model.safetensors").items() if not n.endswith("_scale")]
    assert drafter.weight_bytes == 8 * sum(p.numel() for p in own), "embedding and lm_head are the target's"


def test_a_model_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    model = model_of(named("llama"))
    read = [_blocks(model, distilled(tmp_path / "small", layer)) for layer in (0, 1, 1)]
    assert not torch.equal(read[0], read[1])
    assert torch.equal(read[1], read[2])


def _blocks(model: Any, folder: Path) -> torch.Tensor:
    drafter = build_drafter("draft_model", runner_for(model), None, {"model": str(folder)})
    assert isinstance(drafter, DraftModelDrafter)
    return next(p for n, p in drafter._runner.model.named_parameters() if n.endswith("q_proj.weight"))


def test_rotary_tables_of_a_half_precision_draft_model_are_not_rounded(tmp_path: Path) -> None:
    model = model_of(named("llama"))
    runner = runner_for(model)
    target = head_target(runner)
    save_small_model(tmp_path, small_copy(runner.model, [0]), (0,), whole_vocabulary(target.vocab_size), target)
    half = build(named("llama"), torch.bfloat16)
    small, _ = load_small_model(tmp_path, half, head_target(runner_for(half)))
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    tables = [b for name, b in small.named_buffers() if "inv_freq" in name]
    assert tables
    assert all(t.dtype != torch.bfloat16 for t in tables)


def test_a_head_that_has_drafted_can_be_trained_on() -> None:
    table = RotaryTable({"rope_theta": 10000.0}, 8, 64)
    with torch.inference_mode():
        table(torch.arange(4), torch.float32)
    x = torch.ones(4, 8, requires_grad=True)
    cos, _ = table(torch.arange(4), torch.float32)
    (x * cos).sum().backward()
    assert x.grad is not None

"""A checkpoint's advice about its drafts: it holds where the caller says nothing, as a whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.api import LLM
from specdec.build import build_drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.engine import DEFAULT_DRAFT_TOKENS
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
    assert asked({}) == DEFAULT_DRAFT_TOKENS
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

"""What a measurement's config groups become: nothing that is set is dropped, and lists and dicts are plain ones."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module

from specdec.eval.llm_options import llm_options

GROUPS = ("acceptance", "chunked_prefill", "prefix", "serve", "speedup")


@pytest.mark.parametrize("name", GROUPS)
def test_every_group_counts(name: str) -> None:
    settings = [
        "target.dtype=float64", "engine.max_draft_tokens=7", "engine.max_batch_size=3", "verifier=typical",
        "verifier.options.posterior_alpha=0.7", "drafter=eagle3", "drafter.options.tree={depth: 2, top_k: 3}",
    ]  # fmt: skip
    with initialize_config_module("specdec.configs", version_base="1.3"):
        found = llm_options(compose(name, settings))
    assert found == {
        "dtype": "float64",
        "max_draft_tokens": 7,
        "max_batch_size": 3,
        "drafter": "eagle3",
        "drafter_options": {"tree": {"depth": 2, "top_k": 3}},
        "verifier": "typical",
        "verifier_options": {"posterior_alpha": 0.7},
    }
    assert type(found["drafter_options"]["tree"]) is dict

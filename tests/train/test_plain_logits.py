"""Targets whose logits are not their lm_head times the last hidden state are refused before anything is captured."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.errors import IncompatibleDrafterError
from specdec.heads.target import head_target
from specdec.models.build import runner_for
from specdec.train.plain_logits import refuse_shaped_logits
from tests.models.architectures import Architecture, build, named


def check(architecture: str, **options: Any) -> None:
    like = named(architecture)
    runner = runner_for(build(Architecture(like.name, like.model_type, {**like.options, **options})))
    refuse_shaped_logits(runner, head_target(runner))


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gemma2", {"final_logit_softcapping": 0.5}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.0625}),
    ],
)
def test_refused(architecture: str, options: dict[str, float]) -> None:
    with pytest.raises(IncompatibleDrafterError, match="it scales or caps them"):
        check(architecture, **options)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("llama", {}), ("gemma2", {"final_logit_softcapping": None}), ("granite", {"logits_scaling": 1.0})],
)
def test_not_refused(architecture: str, options: dict[str, Any]) -> None:
    check(architecture, **options)

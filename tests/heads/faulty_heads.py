"""Good heads of several layouts, and what to change in them so that they must be refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec.errors import CheckpointError, IncompatibleDrafterError, SpecdecError
from specdec.heads.loading import load_head
from tests.heads.layout_files import (
    DRAFTED,
    LLAMA,
    TARGET,
    TARGET_IDS,
    eagle1_weights,
    eagle3_weights,
    medusa_weights,
    renamed,
    speculators,
    write,
)
from tests.heads.small_heads import VOCAB_SIZE, WIDTH

Config, Weights = dict[str, Any], dict[str, Tensor]
Change = Callable[[Config, Weights], None]
Case = tuple[Callable[[], tuple[Config, Weights]], Change, type[SpecdecError], str]
Q = "midlayer.self_attn.q_proj.weight"
OTHER = nn.Embedding(VOCAB_SIZE, WIDTH, dtype=torch.float64).requires_grad_(False)
DAMAGED, ANOTHERS = CheckpointError, IncompatibleDrafterError
D2T = TARGET_IDS - torch.arange(DRAFTED)


def eagle3() -> tuple[Config, Weights]:
    config = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
    return config, eagle3_weights() | {"embed_tokens.weight": TARGET.embedding.weight}


def spec() -> tuple[Config, Weights]:
    return speculators(), renamed(eagle3_weights(), ("midlayer.", "layers.0."))


def eagle1() -> tuple[Config, Weights]:
    return dict(LLAMA), eagle1_weights()


def medusa() -> tuple[Config, Weights]:
    return {"medusa_num_heads": 2, "medusa_num_layers": 1}, medusa_weights(2, 1)


def vllm_medusa() -> tuple[Config, Weights]:
    config = {"hidden_size": WIDTH, "vocab_size": VOCAB_SIZE, "num_heads": 2, "original_lm_head": True}
    weights = renamed(
        medusa_weights(2, 1, projections=False), *((f"{i}.0.linear.", f"blocks.{i}.layers.0.") for i in (0, 1))
    )
    return config, weights | {"lm_head.weight": TARGET.output_weight}


def lose(*names: str) -> Change:
    """Return the change that takes tensors out of a file."""

    def change(config: Config, weights: Weights) -> None:
        for name in names:
            del weights[name]

    return change


def put(**tensors: Tensor) -> Change:
    """Return the change that adds or replaces tensors; a dot in a name is written as two underscores."""
    return lambda config, weights: weights.update({name.replace("__", "."): t for name, t in tensors.items()})


def say(**fields: Any) -> Change:
    """Return the change of some fields of the config."""
    return lambda config, weights: config.update(fields)


def say_in(inner: str, **fields: Any) -> Change:
    """Return the change of some fields of an object in the config."""
    return lambda config, weights: config.update({inner: config[inner] | fields})


def both(*changes: Change) -> Change:
    def change(config: Config, weights: Weights) -> None:
        for one in changes:
            one(config, weights)

    return change


def check(case: Case, tmp_path: Path) -> None:
    """Load the head as it is, then changed, which has to give the error."""
    make, change, kind, message = case
    config, weights = make()
    load_head(write(tmp_path / "good", config, weights), TARGET)
    change(config, weights)
    with pytest.raises(kind, match=rf"(?s){message}") as caught:
        load_head(write(tmp_path / "bad", config, weights), TARGET)
    assert str(tmp_path / "bad") in str(caught.value)

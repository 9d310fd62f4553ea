"""Medusa heads in every layout load and compute what a plain implementation computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.heads.loading import kind_of, load_head
from tests.heads import reference_heads as reference
from tests.heads.layout_files import LLAMA, TARGET, medusa_weights, random, renamed, rows, same, write
from tests.heads.small_heads import VOCAB_SIZE, WIDTH

EMBEDDING, OUTPUT = TARGET.embedding.weight, TARGET.output_weight
TOKENS = 7

MEDUSA_CONFIG = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "a/target"}
VLLM_MEDUSA = {
    "model_type": "medusa",
    "architectures": ["MedusaModel"],
    "hidden_size": WIDTH,
    "vocab_size": VOCAB_SIZE,
    "truncated_vocab_size": VOCAB_SIZE,
    "num_heads": 3,
    "num_hidden_layers": 2,
}
TO_VLLM = [
    *((f"{i}.{j}.linear.", f"blocks.{i}.layers.{j}.") for i in range(3) for j in range(2)),
    *((f"{i}.2.", f"lm_heads.{i}.") for i in range(3)),
]
BASE = {"model.embed_tokens.weight": EMBEDDING, "model.layers.0.mlp.up_proj.weight": random(8, 8)}
MEDUSA: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[tuple[str, str]], str]] = {
    "legacy": ("medusa-legacy", MEDUSA_CONFIG, {"projections": False}, [], "medusa_lm_head.pt"),
    "with projections": ("medusa", MEDUSA_CONFIG, {}, [], "medusa_lm_head.safetensors"),
    "fewer heads in an early config": ("medusa", MEDUSA_CONFIG | {"medusa_num_heads": 2}, {}, [], "medusa_lm_head.pt"),
    "inside the whole model": ("medusa-2", LLAMA | MEDUSA_CONFIG, {}, [("", "medusa_head.")], "pytorch_model.bin"),
    "vllm": ("medusa-vllm", VLLM_MEDUSA, {"bias": False}, TO_VLLM, "model.safetensors"),
    "vllm, biases": ("medusa-vllm", VLLM_MEDUSA | {"medusa_fc_bias": True}, {}, TO_VLLM, "model.safetensors"),
    "vllm, one lm_head": (
        "medusa-vllm",
        VLLM_MEDUSA | {"original_lm_head": True},
        {"projections": False},
        TO_VLLM,
        "model.safetensors",
    ),
}


@pytest.mark.parametrize("case", MEDUSA)
def test_medusa(case: str, tmp_path: Path) -> None:
    layout, config, options, pairs, file = MEDUSA[case]
    weights = medusa_weights(**options)
    in_file = renamed(weights, *pairs) if pairs != [("", "medusa_head.")] else renamed(weights, prefix="medusa_head.")
    if layout == "medusa-2":
        in_file |= BASE
    if config.get("original_lm_head"):
        in_file["lm_heads.0.weight"] = OUTPUT
    head = load_head(write(tmp_path, config, in_file, file), TARGET)
    assert (head.layout, kind_of(tmp_path)) == (layout, "medusa")
    hidden = rows(TOKENS, WIDTH)
    same(head.module.logits(hidden), reference.medusa(weights, 3, 2, hidden, OUTPUT))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_medusa_of_vllm_with_a_cut_vocabulary(tmp_path: Path, whole: bool, shared: bool) -> None:
    kept, ordered = torch.tensor([9, 4, 60, 17]), [4, 9, 17, 60]
    weights = medusa_weights(projections=not shared)
    in_file = renamed(weights, *TO_VLLM) | {"token_map": kept}
    if shared:
        in_file["lm_head.weight"] = OUTPUT
    in_file = {n: t if whole or not n.startswith("lm_head") else t[kept] for n, t in in_file.items()}
    config = VLLM_MEDUSA | {"truncated_vocab_size": 4, "original_lm_head": shared}
    head = load_head(write(tmp_path, config, in_file), TARGET)
    hidden = rows(TOKENS, WIDTH)
    assert head.vocabulary.target_ids.tolist() == ordered
    same(head.module.logits(hidden), reference.medusa(weights, 3, 2, hidden, OUTPUT)[..., ordered])

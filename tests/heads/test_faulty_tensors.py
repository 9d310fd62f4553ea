"""Tensors and vocabulary maps that a head cannot have: each is named in the error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.heads.faulty_heads import (
    ANOTHERS,
    D2T,
    DAMAGED,
    Case,
    Q,
    both,
    check,
    eagle1,
    eagle3,
    lose,
    medusa,
    put,
    say,
    say_in,
    spec,
    vllm_medusa,
)
from tests.heads.layout_files import TARGET_IDS, maps, random

FAULTS: dict[str, Case] = {
    # tensors
    "missing, two of them": (
        eagle3,
        lose("fc.weight", Q),
        DAMAGED,
        rf"\(2\):.*fc.weight is missing; expected \(32, 96\).*{Q} is missing; expected \(48, 64\)",
    ),
    "unexpected": (eagle3, put(midlayer__extra=random(3)), DAMAGED, r"midlayer.extra \(3,\) is unexpected"),
    "not finite": (
        eagle3,
        put(fc__weight=random(32, 96) / 0),
        DAMAGED,
        r"fc.weight has values that are NaN, infinite or too large",
    ),
    "wrong shape": (
        eagle3,
        put(fc__weight=random(32, 64)),
        DAMAGED,
        r"fc.weight has shape \(32, 64\), expected \(32, 96\)",
    ),
    "missing, unexpected and wrong at once": (
        eagle1,
        both(lose("fc.weight"), put(more=random(2), layers__0__mlp__up_proj__weight=random(9, 32))),
        DAMAGED,
        r"\(3\):.*fc.weight is missing.*up_proj.weight has shape \(9, 32\), expected \(40, 32\).*"
        r"more \(2,\) is unexpected",
    ),
    "head_dim": (eagle3, say(head_dim=8), DAMAGED, rf"{Q} has shape \(48, 64\), expected \(32, 64\)"),
    "KV heads": (
        eagle3,
        say(num_key_value_heads=4),
        DAMAGED,
        r"k_proj.weight has shape \(24, 64\), expected \(48, 64\)",
    ),
    "more layers than in the file": (
        spec,
        say_in("transformer_layer_config", num_hidden_layers=2),
        DAMAGED,
        r"layers.1.input_layernorm.weight is missing.*layers.1.mlp.down_proj.weight is missing",
    ),
    "one bias of three": (
        eagle1,
        put(layers__0__self_attn__q_proj__bias=random(48)),
        DAMAGED,
        r"\(2\):.*k_proj.bias is missing; expected \(24,\).*v_proj.bias is missing",
    ),
    "a bias that the config denies": (eagle1, say(bias=False), DAMAGED, r"fc.bias \(32,\) is unexpected"),
    "a bias that the config asks for": (
        eagle1,
        both(say(bias=True), lose("fc.bias")),
        DAMAGED,
        r"fc.bias is missing; expected \(32,\)",
    ),
    "a head that is missing": (
        medusa,
        lose("1.0.linear.weight", "1.1.weight"),
        DAMAGED,
        r"1.0.linear.weight is missing; expected \(32, 32\).*1.1.weight is missing; expected \(64, 32\)",
    ),
    "fewer heads than the config has": (
        medusa,
        say(medusa_num_heads=3),
        DAMAGED,
        r"\(3\):.*2.0.linear.weight is missing.*2.1.weight is missing",
    ),
    "in vLLM's names": (
        vllm_medusa,
        lose("blocks.1.layers.0.weight"),
        DAMAGED,
        r"blocks.1.layers.0.weight is missing; expected \(32, 32\)",
    ),
    "lm_head": (eagle3, lose("lm_head.weight"), DAMAGED, r"lm_head.weight is missing; expected \(24, 32\)"),
    "quantised": (
        eagle3,
        put(fc__weight=torch.zeros(32, 96, dtype=torch.int8)),
        DAMAGED,
        r"fc.weight is stored as int8; quantised heads are not supported",
    ),
    # maps
    "d2t is missing": (eagle3, lose("d2t"), DAMAGED, r"d2t is missing; expected \(24,\)"),
    "d2t of another length": (eagle3, put(d2t=D2T[:9]), DAMAGED, r"d2t has shape \(9,\), expected \(24,\)"),
    "out of range": (eagle3, put(d2t=D2T + 40), DAMAGED, r"maps 12 ids outside the target's 64, the first to 65"),
    "two to one": (
        eagle3,
        both(put(d2t=D2T.index_fill(0, torch.tensor(1), 0)), lose("t2d")),
        DAMAGED,
        "two draft ids to one target id",
    ),
    "t2d marks others": (
        eagle3,
        put(t2d=maps(TARGET_IDS - 1)["t2d"]),
        DAMAGED,
        "t2d .* marks 24 tokens and d2t maps 24 others",
    ),
    "t2d of another target": (
        eagle3,
        put(t2d=torch.ones(99, dtype=torch.bool)),
        ANOTHERS,
        "t2d is for 99 tokens and a/target has 64",
    ),
    "d2t cast with the weights": (
        eagle3,
        put(d2t=D2T.to(torch.bfloat16)),
        DAMAGED,
        "d2t is stored as bfloat16, which cannot hold token ids",
    ),
    "token_map is missing": (
        vllm_medusa,
        say(truncated_vocab_size=4),
        DAMAGED,
        r"token_map is missing; expected \(4,\)",
    ),
    "token_map out of range": (
        vllm_medusa,
        both(say(truncated_vocab_size=2), put(token_map=torch.tensor([1, 64]))),
        DAMAGED,
        "maps 1 ids outside the target's 64, the first to 64",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tensors(fault: str, tmp_path: Path) -> None:
    check(FAULTS[fault], tmp_path)

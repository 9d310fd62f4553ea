"""Heads of another target, and configs that ask for what cannot be: each is named in the error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.heads.faulty_heads import (
    ANOTHERS,
    DAMAGED,
    OTHER,
    Case,
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
from tests.heads.layout_files import TARGET, random

FAULTS: dict[str, Case] = {
    # another target
    "hidden size": (eagle3, say(hidden_size=16), ANOTHERS, "hidden_size=16 and the hidden size of a/target is 32"),
    "hidden size of the target": (
        eagle3,
        say(target_hidden_size=48),
        ANOTHERS,
        "target_hidden_size=48 and the hidden size of a/target is 32",
    ),
    "hidden size of EAGLE-1": (eagle1, say(hidden_size=16), ANOTHERS, "hidden_size=16 and"),
    "hidden size of Medusa": (medusa, put(**{"0__0__linear__weight": random(16, 16)}), ANOTHERS, "hidden size=16 and"),
    "hidden size of speculators": (spec, say(target_hidden_size=48), ANOTHERS, "hidden size of the target=48 and"),
    "vocabulary": (eagle3, say(vocab_size=99), ANOTHERS, r"\(vocab_size\) is for 99 tokens and a/target has 64"),
    "vocabulary of Medusa": (medusa, put(**{"0__1__weight": random(99, 32)}), ANOTHERS, "0.1.weight is for 99 tokens"),
    "a layer behind the last": (
        eagle3,
        say(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}),
        ANOTHERS,
        r"outputs of blocks \[0, 3, 6\].*has 6 blocks; no block 6",
    ),
    "the embedding as a layer": (
        spec,
        say(eagle_aux_hidden_state_layer_ids=[0, 3, 6]),
        ANOTHERS,
        r"counted from the embedding.*no block -1",
    ),
    "another embedding": (
        eagle3,
        put(embed_tokens__weight=OTHER.weight),
        ANOTHERS,
        r"embed_tokens.weight is not the embedding of a/target: 64 rows .* mean cosine similarity of -?0\.\d+ with",
    ),
    "an embedding of zeros": (
        eagle3,
        put(embed_tokens__weight=torch.zeros(64, 32)),
        DAMAGED,
        "embed_tokens.weight is damaged: the 64 rows",
    ),
    "another lm_head": (
        vllm_medusa,
        put(lm_head__weight=OTHER.weight),
        ANOTHERS,
        "lm_head.weight is not the lm_head of a/target",
    ),
    "an lm_head that was trained": (
        vllm_medusa,
        put(lm_head__weight=TARGET.output_weight + OTHER.weight),
        DAMAGED,
        "shares? .* it was trained on",
    ),
    # configs
    "no norm_before_residual": (
        spec,
        say(norm_before_residual=None),
        DAMAGED,
        "has no 'norm_before_residual', and readers",
    ),
    "two norms": (
        spec,
        say(norm_before_fc=True, fc_norm=True),
        DAMAGED,
        "fc_norm and norm_before_fc exclude each other",
    ),
    "norm of the wrong kind": (
        spec,
        say(fc_norm=True),
        DAMAGED,
        r"fc_norm.0.weight is missing.*fc_norm.2.weight is missing",
    ),
    "no field": (eagle3, say(num_attention_heads=None), DAMAGED, "has no 'num_attention_heads'"),
    "a field of the wrong kind": (eagle3, say(hidden_size="32"), DAMAGED, "hidden_size='32'; allowed: an integer > 0"),
    "heads that do not divide": (
        eagle3,
        say(num_key_value_heads=3),
        DAMAGED,
        "4 attention heads do not divide into 3 KV heads",
    ),
    "activation": (eagle3, say(hidden_act="relu2"), DAMAGED, "hidden_act='relu2'; allowed: silu"),
    "rotary type": (
        eagle3,
        say(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        DAMAGED,
        "rope_type='dynamic' is not supported",
    ),
    "part of each head turned": (eagle3, say(partial_rotary_factor=0.5), DAMAGED, "partial_rotary_factor=0.5"),
    "window": (
        spec,
        say_in("transformer_layer_config", layer_types=["sliding_attention"]),
        DAMAGED,
        "sliding_attention",
    ),
    "layer type": (
        spec,
        say_in("transformer_layer_config", model_type="mamba"),
        DAMAGED,
        "model_type='mamba'; allowed: 'llama', 'qwen3'",
    ),
    "last hidden state alone": (
        eagle3,
        say(eagle_config={"use_aux_hidden_state": False}),
        DAMAGED,
        "use_aux_hidden_state=false",
    ),
    "flags that contradict": (eagle1, say(bias=True, eagle_fc_bias=False), DAMAGED, "contradict each other"),
    "tied to the embedding": (
        eagle3,
        both(say(tie_word_embeddings=True, draft_vocab_size=None), lose("lm_head.weight", "d2t", "t2d")),
        DAMAGED,
        "has an lm_head apart from it",
    ),
    "scaled logits": (vllm_medusa, say(logit_scale=0.5), DAMAGED, "logit_scale=0.5; allowed: 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_configs(fault: str, tmp_path: Path) -> None:
    check(FAULTS[fault], tmp_path)

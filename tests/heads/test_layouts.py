"""Heads in every layout load and compute what plain implementations of their architectures compute."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec.errors import CheckpointError
from specdec.heads import checkpoint
from specdec.heads.loading import kind_of, load_head
from specdec.heads.saving import save_head
from tests.heads import reference_heads as reference
from tests.heads.layout_files import (
    DRAFTED,
    LLAMA,
    TARGET,
    TARGET_IDS,
    eagle1_weights,
    eagle3_weights,
    forward,
    layer,
    maps,
    medusa_weights,
    random,
    renamed,
    rows,
    same,
    speculators,
    write,
)
from tests.heads.small_heads import VOCAB_SIZE, WIDTH

EMBEDDING, OUTPUT = TARGET.embedding.weight, TARGET.output_weight
TOKENS = 7


MIDLAYER = ("midlayer.", "layers.0.")
SGLANG3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
PUBLISHED3 = LLAMA | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFTED}
AUX = "eagle_aux_hidden_state_layer_ids"


def extra_layer() -> dict[str, Tensor]:
    return layer("layers.1", WIDTH) | {"layers.1.input_layernorm.weight": random(WIDTH)}


# layout, config, weights under published names, how the file renames them, flags of the reference, blocks fused
EAGLE3: dict[
    str, tuple[str, dict[str, Any], dict[str, Any], list[tuple[str, str]], dict[str, bool], tuple[int, ...]]
] = {
    "published": ("eagle3", PUBLISHED3, {}, [], {}, (1, 2, 2)),
    "with model. in front": ("eagle3", PUBLISHED3, {}, [("", "model.")], {}, (1, 2, 2)),
    "sglang": ("eagle3-sglang", SGLANG3 | {"eagle_config": {AUX: [0, 3, 5]}}, {}, [], {}, (0, 3, 5)),
    "vllm ids": ("eagle3-sglang", SGLANG3 | {AUX: [1, 3, 6]}, {}, [], {}, (0, 2, 5)),
    "eagle 3.1": (
        "eagle3-sglang",
        SGLANG3 | {"fc_norm": True, "norm_output": True},
        {"fc_norm": True},
        [],
        {"norm_output": True},
        (1, 2, 2),
    ),
    "qkv biases": ("eagle3-sglang", SGLANG3 | {"attention_bias": True}, {"biases": True}, [], {}, (1, 2, 2)),
    "speculators": ("eagle3-speculators", speculators(), {}, [MIDLAYER], {}, (1, 2, 2)),
    "speculators, residual behind the norm": (
        "eagle3-speculators",
        speculators(norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[1, 4, 6]),
        {},
        [MIDLAYER],
        {"norm_before_residual": True},
        (0, 3, 5),
    ),
    "speculators, norm before fc, q and k norms": (
        "eagle3-speculators",
        speculators({"model_type": "qwen3"}, norm_before_fc=True, norm_output=True),
        {"input_norm": True, "qk_norm": True},
        [MIDLAYER],
        {"norm_output": True},
        (1, 2, 2),
    ),
}


@pytest.mark.parametrize("case", EAGLE3)
def test_eagle3(case: str, tmp_path: Path) -> None:
    layout, config, options, pairs, flags, blocks = EAGLE3[case]
    weights = eagle3_weights(**options)
    if layout == "eagle3-speculators":
        weights["embed_tokens.weight"] = EMBEDDING.clone()
    prefix = "model." if ("", "model.") in pairs else ""
    in_file = renamed(weights, *(p for p in pairs if p[0]), prefix=prefix)
    head = load_head(write(tmp_path, config, in_file), TARGET)
    assert (head.layout, kind_of(tmp_path)) == (layout, "eagle3")
    assert head.module.config.feature_layers == blocks
    assert torch.equal(head.vocabulary.target_ids, TARGET_IDS)
    assert head.module.shares_embedding and not head.module.shares_lm_head
    assert not head.module.training and not any(p.requires_grad for p in head.module.parameters())
    check_eagle3(head.module, weights, flags)
    assert head.settings == ({"max_draft_tokens": 5} if layout == "eagle3-speculators" else {})


def check_eagle3(module: Any, weights: dict[str, Tensor], flags: dict[str, bool]) -> None:
    """Compare the first step, on features, and the second, on the first one's own hidden states."""
    features, embedded = rows(TOKENS, 3 * WIDTH), EMBEDDING[3 : 3 + TOKENS]
    hidden, logits = forward(module, features, embedded)
    expected_hidden, expected = reference.eagle3(weights, features, embedded, **flags)
    same(hidden, expected_hidden)
    same(logits, expected)
    later = EMBEDDING[20 : 20 + TOKENS]
    same(
        forward(module, hidden, later, 5)[1],
        reference.eagle3(weights, expected_hidden, later, first=5, **flags)[1],
    )


def test_eagle3_of_two_layers(tmp_path: Path) -> None:
    weights = eagle3_weights() | extra_layer()
    config = speculators({"num_hidden_layers": 2})
    head = load_head(write(tmp_path, config, renamed(weights, MIDLAYER)), TARGET)
    check_eagle3(head.module, weights, {})


def test_eagle3_over_the_whole_vocabulary_needs_no_maps(tmp_path: Path) -> None:
    weights = eagle3_weights(drafted=VOCAB_SIZE)
    head = load_head(write(tmp_path, SGLANG3 | {"draft_vocab_size": VOCAB_SIZE}, weights), TARGET)
    assert head.vocabulary.is_whole
    check_eagle3(head.module, weights, {})


def test_eagle3_without_draft_vocabulary_ends_in_the_targets_lm_head(tmp_path: Path) -> None:
    weights = eagle3_weights(drafted=VOCAB_SIZE)
    del weights["lm_head.weight"]
    head = load_head(write(tmp_path, SGLANG3 | {"draft_vocab_size": None}, weights), TARGET)
    assert head.module.shares_lm_head
    check_eagle3(head.module, weights | {"lm_head.weight": OUTPUT}, {})


def test_maps_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    weights = eagle3_weights()
    shuffled = torch.randperm(DRAFTED, generator=torch.Generator().manual_seed(0))
    in_file = weights | maps(TARGET_IDS[shuffled]) | {"lm_head.weight": weights["lm_head.weight"][shuffled]}
    head = load_head(write(tmp_path, SGLANG3, in_file), TARGET)
    assert torch.equal(head.vocabulary.target_ids, TARGET_IDS)
    check_eagle3(head.module, weights, {})


@pytest.mark.parametrize("trained", [False, True])
def test_an_embedding_that_was_trained_is_used_and_a_copy_is_shared(tmp_path: Path, trained: bool) -> None:
    changed = EMBEDDING + 0.5 * rows(VOCAB_SIZE, WIDTH) if trained else EMBEDDING.to(torch.bfloat16)
    weights = eagle3_weights() | {"embed_tokens.weight": changed}
    head = load_head(write(tmp_path, SGLANG3, weights), TARGET)
    assert head.module.shares_embedding is not trained
    expected = changed if trained else EMBEDDING
    assert torch.equal(head.module.embed_tokens(torch.arange(VOCAB_SIZE)), expected)


def test_a_narrower_head_has_an_embedding_of_its_own(tmp_path: Path) -> None:
    weights = eagle3_weights() | {
        "fc.weight": random(WIDTH, 3 * 2 * WIDTH),
        "embed_tokens.weight": random(VOCAB_SIZE, WIDTH),
    }
    wide = replace(TARGET, hidden_size=2 * WIDTH, embedding=nn.Embedding(VOCAB_SIZE, 2 * WIDTH), output_weight=None)
    folder = write(tmp_path, SGLANG3 | {"target_hidden_size": 2 * WIDTH}, weights)
    head = load_head(folder, wide)
    assert not head.module.shares_embedding
    features, embedded = rows(TOKENS, 6 * WIDTH), head.module.embed_tokens(torch.arange(TOKENS))
    same(forward(head.module, features, embedded)[1], reference.eagle3(weights, features, embedded)[1])
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is missing; expected \(64, 32\).*not as wide"):
        load_head(
            write(tmp_path / "b", SGLANG3 | {"target_hidden_size": 2 * WIDTH}, drop(weights, "embed_tokens.weight")),
            wide,
        )


def drop(weights: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name not in names}


VLLM1 = {"model_type": "eagle", "architectures": ["EAGLEModel"], "vocab_size": VOCAB_SIZE}
EAGLE1: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[tuple[str, str]], str]] = {
    "published": ("eagle", LLAMA | {"architectures": ["LlamaForCausalLM"]}, {}, [], "pytorch_model.bin"),
    "published, no bias": ("eagle", LLAMA | {"bias": False}, {"bias": False}, [], "pytorch_model.bin"),
    "published, q k v biases": ("eagle", LLAMA | {"qkv_bias": True}, {"qkv_bias": True}, [], "pytorch_model.bin"),
    "sglang": ("eagle-sglang", LLAMA | {"architectures": ["LlamaForCausalLMEagle"]}, {}, [], "model.safetensors"),
    "vllm": (
        "eagle-vllm",
        VLLM1 | {"model": LLAMA | {"eagle_fc_bias": True}},
        {},
        [("layers.", "model.layers."), ("embed_tokens.", "model.embed_tokens.")],
        "model.safetensors",
    ),
    "vllm, twice model. in front": (
        "eagle-vllm",
        VLLM1 | {"model": LLAMA, "bias": False},
        {"bias": False},
        [("layers.", "model.model.layers."), ("embed_tokens.", "model.model.embed_tokens.")],
        "model.safetensors",
    ),
}


@pytest.mark.parametrize("case", EAGLE1)
@pytest.mark.parametrize("lm_head", [None, "the target's", "its own"])
def test_eagle1(case: str, lm_head: str | None, tmp_path: Path) -> None:
    layout, config, options, pairs, file = EAGLE1[case]
    weights = eagle1_weights(**options)
    own = OUTPUT + 0.5 * rows(VOCAB_SIZE, WIDTH) if lm_head == "its own" else OUTPUT
    in_file = renamed(weights, *pairs) | ({"lm_head.weight": own} if lm_head else {})
    in_file["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)  # a buffer of old versions of transformers
    head = load_head(write(tmp_path, config, in_file, file), TARGET)
    assert (head.layout, kind_of(tmp_path), head.module.shares_lm_head) == (layout, "eagle", lm_head != "its own")
    features, embedded = rows(TOKENS, WIDTH), EMBEDDING[3 : 3 + TOKENS]
    hidden, logits = forward(head.module, features, embedded)
    expected = reference.eagle1(weights, features, embedded)
    same(hidden, expected)
    same(logits, expected @ own.T)
    later = EMBEDDING[20 : 20 + TOKENS]
    same(forward(head.module, hidden, later, 5)[0], reference.eagle1(weights, expected, later, 5))


@pytest.mark.parametrize("whole", [False, True])
def test_eagle1_of_vllm_with_a_cut_vocabulary(tmp_path: Path, whole: bool) -> None:
    kept = torch.tensor([9, 4, 60, 17])  # not in order, as frequencies have it
    own = OUTPUT + 0.5 * rows(VOCAB_SIZE, WIDTH)
    in_file = eagle1_weights() | {"token_map": kept, "lm_head.weight": own if whole else own[kept]}
    config = VLLM1 | {"model": LLAMA, "truncated_vocab_size": 4}
    head = load_head(write(tmp_path, config, in_file), TARGET)
    assert head.vocabulary.target_ids.tolist() == [4, 9, 17, 60]
    features, embedded = rows(TOKENS, WIDTH), EMBEDDING[3 : 3 + TOKENS]
    expected = reference.eagle1(in_file, features, embedded) @ own[[4, 9, 17, 60]].T
    same(forward(head.module, features, embedded)[1], expected)


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa"])
def test_what_is_saved_loads_as_it_was(tmp_path: Path, kind: str) -> None:
    config, weights = {
        "eagle3": (SGLANG3, eagle3_weights()),
        "eagle": (LLAMA, eagle1_weights()),
        "medusa": ({"medusa_num_heads": 3}, medusa_weights()),
    }[kind]
    head = load_head(write(tmp_path / "a", config, weights), TARGET)
    folder = save_head(
        tmp_path / "b", head.module, head.vocabulary, TARGET, settings={"tree": "2.1"}, dtype=torch.float64
    )
    again = load_head(folder, TARGET)
    assert (again.layout, kind_of(folder), again.settings) == ("specdec", kind, {"tree": "2.1"})
    assert again.module.config == head.module.config
    assert torch.equal(again.vocabulary.target_ids, head.vocabulary.target_ids)
    before, after = head.module.state_dict(), again.module.state_dict()
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_read_as_their_index_says(tmp_path: Path, suffix: str) -> None:
    weights, stem = eagle3_weights(), "model" if suffix == "safetensors" else "pytorch_model"
    names = sorted(weights)
    files = [f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
    for i, file in enumerate(files):
        write(tmp_path, SGLANG3, {name: weights[name] for name in names[i::2]}, file)
    index = {"weight_map": {name: files[i % 2] for i, name in enumerate(names)}}
    (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    check_eagle3(load_head(tmp_path, TARGET).module, weights, {})
    (tmp_path / files[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{files[1]} is missing"):
        load_head(tmp_path, TARGET)


def test_a_hub_id_is_downloaded_once_pickles_only_if_need_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    write(tmp_path / "safe", SGLANG3, eagle3_weights())
    write(tmp_path / "pickled", LLAMA, eagle1_weights(), "pytorch_model.bin")
    asked: list[tuple[str, list[str]]] = []

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        if repo_id == "someone/gone":
            raise OSError("offline mode is enabled")
        return str(tmp_path / repo_id.split("/")[1])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint._downloaded.cache_clear()
    assert kind_of("someone/safe") == "eagle3"
    assert load_head("someone/safe", TARGET).source == "someone/safe"
    assert asked == [("someone/safe", ["*.json", "*.safetensors"])]
    assert kind_of("someone/pickled") == "eagle"
    assert asked[-1] == ("someone/pickled", ["*.json", "*.bin", "*.pt"])
    with pytest.raises(CheckpointError, match=r"someone/gone.*offline mode is enabled.*HF_HUB_OFFLINE"):
        kind_of("someone/gone")
    checkpoint._downloaded.cache_clear()

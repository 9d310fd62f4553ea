"""Shapes of decoders: of config.json files as the hub has them, of every class, and as the engine stores them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.errors import ConfigError, UnsupportedModelError
from specdec.interfaces import FeatureSpec, Segment
from specdec.kv.cache import KVCache
from specdec.models.clone import clone_sharing_parameters
from specdec.models.config_fields import class_fields
from specdec.models.hosted import AttentionNotSeenError, HostedProgram
from specdec.models.hosted_mask import MaskedProgram
from specdec.models.kv_shape import kv_shape
from specdec.models.sizes import _kv_values
from specdec.planner import read_model
from specdec.planner.architecture import Architecture as Shape
from specdec.planner.architecture import read_architecture
from specdec.planner.kv import KvStorage
from specdec.planner.silent import COMPLETE
from tests.models.architectures import SUPPORTED, Architecture, model_of, named
from tests.planner import hub

DEEPSEEK_V2 = Architecture("deepseek_v2", "deepseek_v2", named("deepseek_v3").options)


@pytest.mark.parametrize("architecture", [*SUPPORTED, DEEPSEEK_V2], ids=str)
def test_keys_and_values_are_those_of_the_engine(architecture: Architecture) -> None:
    model = model_of(architecture)
    stored = cache_after_one_token(model).bytes_per_token
    assert model.dtype == torch.float64
    assert 2 * KvStorage(read_architecture(model.config.to_dict()), "fp32").bytes_per_token == stored
    assert 8 * _kv_values(model.config) == stored  # what `specdec check` says


def cache_after_one_token(model: Any) -> KVCache:
    """Return a cache that a model has run one token over, as the engine hosts it."""
    token = torch.tensor([1])
    for kind in (HostedProgram, MaskedProgram):
        cache = KVCache()
        cache.open(0, 1)
        cache.reserve(0, 1)
        try:
            program = kind(clone_sharing_parameters(model))
            with torch.inference_mode():
                program(cache, cache.plan([Segment(0, token, None, torch.arange(1))]), token, None, FeatureSpec())
        except (AttentionNotSeenError, TypeError, ValueError):  # its attention is its own
            continue
        return cache
    raise AssertionError(f"{type(model).__name__} did not run")


@pytest.mark.parametrize("kind", ["gpt_neox", "opt"])
def test_a_number_of_key_heads_that_the_class_does_not_have_is_ignored(kind: str) -> None:
    fields = {**named(kind).options, "model_type": kind, "num_key_value_heads": 1, "sliding_window": 8}
    shape = read_architecture(fields)
    assert (shape.attention, shape.windows) == ("MHA", (None, None))


def test_falcon_40b_stores_what_its_heads_share_for_each_of_them() -> None:
    shape = read_architecture(hub.FALCON_40B)
    assert (shape.attention, shape.num_kv_heads, shape.stored_kv_heads) == ("GQA", 8, 128)
    full, compact = KvStorage(shape, "bf16"), KvStorage(shape, "bf16", "compact")
    assert full.bytes_per_token == 16 * compact.bytes_per_token == 60 * 2 * 128 * 64 * 2


# (config, weights in billions, heads, key heads, width, layers with a window, its size, tied)
PUBLISHED: list[tuple[dict[str, Any], float, int, int, int, int, int | None, bool]] = [
    (hub.GEMMA3_1B, 1.000, 4, 1, 256, 22, 512, True),  # "5 local layers for every global one"
    (hub.GEMMA3_4B, 3.880, 8, 4, 256, 29, 1024, True),
    (hub.GEMMA3_27B, 27.009, 32, 16, 128, 52, 1024, True),
    (hub.GEMMA2_9B, 9.242, 16, 8, 256, 21, 4096, True),
    (hub.MISTRAL_7B, 7.242, 32, 8, 128, 32, 4096, False),
    (hub.QWEN2_7B, 7.616, 28, 4, 128, 0, None, False),
    (hub.QWEN3_8B, 8.191, 32, 8, 128, 0, None, False),
    (hub.SMOLLM3_3B, 3.075, 16, 4, 128, 0, None, True),
    (hub.COHERE2_7B, 8.028, 32, 8, 128, 24, 4096, True),
    (hub.LLAMA4_SCOUT, 107.770, 40, 8, 128, 36, 8192, False),
    (hub.GPT_NEO_1B, 1.316, 16, 16, 128, 12, 256, True),
    (hub.DBRX, 131.597, 48, 8, 128, 0, None, False),
    (hub.MPT_7B, 6.649, 32, 32, 128, 0, None, True),
    (hub.LLAVA_7B, 6.739, 32, 32, 128, 0, None, False),
]


@pytest.mark.parametrize(
    ("config", "billions", "heads", "kv_heads", "width", "windowed", "window", "tied"),
    PUBLISHED,
    ids=[str(config["model_type"]) + f"-{billions:.0f}b" for config, billions, *_ in PUBLISHED],
)
def test_published_shapes(
    config: dict[str, Any],
    billions: float,
    heads: int,
    kv_heads: int,
    width: int,
    windowed: int,
    window: int | None,
    tied: bool,
) -> None:
    model = read_model(config)
    shape = model.shape
    assert (shape.num_heads, shape.num_kv_heads, shape.key_dim, shape.tied) == (heads, kv_heads, width, tied)
    expected = {window: windowed, None: shape.num_layers - windowed}
    assert shape.window_counts == {key: count for key, count in expected.items() if count}
    assert model.weights.total / 1e9 == pytest.approx(billions, abs=5e-4)


def test_windows_begin_after_max_window_layers() -> None:
    shape = read_architecture(hub.QWEN2_7B | {"use_sliding_window": True, "max_window_layers": 20})
    assert shape.windows == (None,) * 20 + (131072,) * 8


def test_local_attention_of_gpt_neo_is_that_of_every_second_layer() -> None:
    assert read_architecture(hub.GPT_NEO_1B).windows == (None, 256) * 12


def test_values_narrower_than_keys() -> None:
    shape = kv_shape({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "v_head_dim": 12})
    assert shape.values_per_token == 2 * (16 + 12)


@pytest.mark.parametrize(
    ("config", "expected"), [(hub.LLAMA4_SCOUT, (16, 1, 48, 8192)), (hub.DBRX, (16, 4, 40, 10752))]
)
def test_experts(config: dict[str, Any], expected: tuple[int, ...]) -> None:
    experts = read_architecture(config).experts
    assert experts is not None
    assert (experts.num, experts.chosen, experts.num_layers, experts.inner) == expected


def test_experts_of_alternate_layers() -> None:
    sparse = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}
    shape = read_architecture(hub.QWEN3_8B | sparse | {"model_type": "qwen3_moe", "mlp_only_layers": [1, 3]})
    assert shape.experts is not None
    assert shape.experts.num_layers == 18 - 2


def test_compact_latent_attention_has_one_scale_per_layer() -> None:
    shape = read_architecture(hub.DEEPSEEK_V3)
    assert KvStorage(shape, "int8", "compact").bytes_per_layer_token == 512 + 64 + 2


@pytest.mark.parametrize("kind", COMPLETE)
def test_a_complete_config_is_read_as_its_class_reads_it(kind: str) -> None:
    """Without what the planner calls complete, by which it spares itself the import of transformers."""
    options = (
        DEEPSEEK_V2.options if kind == "deepseek_v2" else next(a for a in SUPPORTED if a.model_type == kind).options
    )
    whole = class_fields({**options, "model_type": kind})
    fields = {"model_type": kind, **{field: whole[field] for field in COMPLETE[kind]}}
    read, expected = read_architecture(fields), read_architecture(class_fields(fields))
    assert _without_positions(read) == _without_positions(expected)
    assert {"attention_bias", "mlp_bias"} & {name for name, value in expected.fields.items() if value} <= {
        "attention_bias"
    }


def _without_positions(shape: Shape) -> list[Any]:
    names = [name for name in Shape.__slots__ if name not in ("max_positions", "fields")]
    return [getattr(shape, name) for name in names]


def test_a_complete_config_needs_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "specdec.models.config_fields", None)
    for config in (hub.MISTRAL_7B, hub.QWEN2_7B, hub.QWEN3_8B, hub.DEEPSEEK_V3):
        read_model(config)
    with pytest.raises(ImportError):
        read_model({key: value for key, value in hub.MISTRAL_7B.items() if key != "num_key_value_heads"})


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (hub.QWEN3_NEXT, "layers of type linear_attention"),
        (hub.MINIMAX, "layers of type linear_attention"),
        (hub.MLLAMA_11B, "layers of type cross_attention"),
        ({"model_type": "jamba"}, "recurrent state"),
        ({"model_type": "longcat_flash"}, "attends twice in each layer"),
        ({"model_type": "llama", "swa_num_key_value_heads": 8}, "differ in width"),
        ({"model_type": "t5", "d_model": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}, "encoder-decoder"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_layers_without_a_formula_are_refused_by_name(config: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedModelError, match=what):
        read_architecture(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 64}, "its config has no model_type"),
        ({"model_type": "llava", "text_config": [1]}, "text_config is [1] in its config; allowed: an object"),
        ({"model_type": ["llama"]}, "model_type is ['llama'] in its config; allowed: a name"),
        (hub.GEMMA3_1B | {"rope_parameters": 3}, "config class of 'gemma3_text' does not take its values"),
        (hub.GEMMA3_1B | {"sliding_window": None}, "layers of type sliding_attention but no size"),
    ],
    ids=["no type", "part", "type", "class", "window"],
)
def test_configs_that_make_no_sense(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_architecture(config, "my model")
    assert str(caught.value).startswith("my model: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_output_matrix_of_the_whole_counts_where_its_text_part_says_nothing() -> None:
    assert not read_architecture(hub.GEMMA3_4B | {"tie_word_embeddings": False}).tied
    text = {**hub.GEMMA3_4B["text_config"], "tie_word_embeddings": True}
    assert read_architecture(hub.GEMMA3_4B | {"tie_word_embeddings": False, "text_config": text}).tied

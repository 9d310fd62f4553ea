"""Multimodal targets: text prompts run as in transformers, everything else that a processor returns is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import specdec
from specdec.errors import ConfigError, ModelLoadError, UnsupportedModelError
from specdec.models import lean
from specdec.models.clone import fingerprint
from specdec.models.wrapped import is_multimodal, refuse_inputs
from tests.decoding import one, padded, prompts, reference
from tests.models.architectures import model_of, named

IMAGE, VIDEO, START, END = 63, 62, 61, 60
# The last two hold the tokens that stand for images, which a text may name.
PROMPTS = [*prompts(3, 7, 12), [5, START, IMAGE, IMAGE, 7], [5, VIDEO, IMAGE, END, 7, START, IMAGE, 9]]
NUM_NEW = 16

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# As many layers as the text model, so that looking for "the" list of blocks has two to choose from.
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 48,
    "patch_size": 14,
}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def _qwen(kind: str, vision: dict[str, Any], **rope: Any) -> dict[str, Any]:
    """Return a config whose rotary angles have three axes: time, height and width."""
    axes = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], **rope}
    text = {**_TEXT, "model_type": f"{kind}_text", "rope_parameters": axes}
    return {"text_config": text, "vision_config": vision, **_QWEN_TOKENS}


CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        "image_token_index": IMAGE,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "pixtral"},
        "image_token_index": IMAGE,
    },
    "idefics3": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": _VISION,
        "image_token_id": IMAGE,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": IMAGE,
    },
    "qwen2_vl": _qwen("qwen2_vl", {**_QWEN_VISION, "embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": _qwen("qwen2_5_vl", _QWEN_VISION),
    "qwen3_vl": _qwen("qwen3_vl", {**_QWEN_VISION, "deepstack_visual_indexes": [0]}, mrope_interleaved=True),
}
PALIGEMMA = {
    "text_config": {**_TEXT, "model_type": "gemma"},
    "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    "image_token_index": IMAGE,
    "projection_dim": 32,
}
MLLAMA = {
    "text_config": {
        **_TEXT,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "model_type": "mllama_text_model",
        "cross_attention_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    },
    "image_token_index": IMAGE,
}


def build(kind: str, options: dict[str, Any]) -> Any:
    """Return a random float64 model whose greedy output wanders."""
    try:
        config = AutoConfig.for_model(kind, tie_word_embeddings=False, **options)
    except (ValueError, KeyError) as error:
        pytest.skip(f"this transformers release has no {kind}: {error}")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() < 2:
                p.copy_(0.1 * noise + (1.0 if name.endswith("weight") and "gemma" not in kind else 0.0))
            else:
                scale = 3.0 if "lm_head" in name else 0.7 if "embed" in name else 1.8
                p.copy_(noise * scale / (1.0 if "embed" in name else p.shape[-1] ** 0.5))
    for name in ("bos_token_id", "eos_token_id"):
        setattr(model.generation_config, name, None)
    model.generation_config.pad_token_id = 0
    return model.double().requires_grad_(False)


@cache
def model_for(kind: str) -> Any:
    return build(kind, CONFIGS[kind])


def ours(model: Any, prompt: list[int], drafter: str = "oracle", **options: Any) -> list[int]:
    options = {"drafter_options": {"accept_rate": 0.6} if drafter == "oracle" else {}, **options}
    out = specdec.generate(model, one(prompt), max_new_tokens=NUM_NEW, do_sample=False, drafter=drafter, **options)
    return out[0, len(prompt) :].tolist()


class TestTextPrompts:
    @pytest.mark.parametrize("kind", CONFIGS)
    def test_like_transformers(self, kind: str) -> None:
        model = model_for(kind)
        before = fingerprint(model)
        want = [reference(model, p, NUM_NEW) for p in PROMPTS]
        assert len({t for w in want for t in w}) > 20
        assert [ours(model, p) for p in PROMPTS] == want
        assert fingerprint(model) == before

    @pytest.mark.parametrize("kind", CONFIGS)
    def test_trees_in_a_ragged_batch(self, kind: str) -> None:
        model = model_for(kind)
        ids, mask = padded(PROMPTS)
        out = specdec.generate(
            model,
            ids,
            mask,
            max_new_tokens=NUM_NEW,
            do_sample=False,
            drafter="random",
            drafter_options={"branching": [3, 2]},
            max_draft_tokens=8,
        )
        assert out[:, ids.shape[1] :].tolist() == [reference(model, p, NUM_NEW) for p in PROMPTS]

    @pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
    def test_through_llm(self, kind: str) -> None:
        model = model_for(kind)
        llm = specdec.LLM(model, drafter="ngram")
        got = [c.token_ids for c in llm.generate(PROMPTS, max_new_tokens=NUM_NEW)]
        assert got == [reference(model, p, NUM_NEW) for p in PROMPTS]

    def test_after_a_vision_prompt_of_the_callers(self) -> None:
        """Qwen's models keep the shift of the last prompt's positions on the module."""
        model = build("qwen2_5_vl", CONFIGS["qwen2_5_vl"])
        want = reference(model, PROMPTS[2], NUM_NEW)
        for module in model.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = torch.tensor([[-7]])
        assert ours(model, PROMPTS[2]) == want

    def test_the_blocks_of_the_text_model_are_found(self) -> None:
        from specdec.models.taps import find_blocks

        for kind in CONFIGS:
            model = model_for(kind)
            blocks = find_blocks(model, model.config.get_text_config().num_hidden_layers)
            assert blocks is model.get_decoder().layers, kind

    def test_the_lean_forward_is_not_for_them(self) -> None:
        assert not lean.applies_to(build("llava", CONFIGS["llava"]).float())

    def test_by_path(self, tmp_path: Path) -> None:
        """What AutoModelForCausalLM loads goes by its path, the others by the object."""
        build("gemma3", CONFIGS["gemma3"]).save_pretrained(tmp_path / "gemma3")
        assert specdec.LLM(tmp_path / "gemma3", dtype="float64").generate(PROMPTS[0], max_new_tokens=NUM_NEW)[
            0
        ].token_ids == reference(model_for("gemma3"), PROMPTS[0], NUM_NEW)
        model_for("llava").save_pretrained(tmp_path / "llava")
        with pytest.raises(ModelLoadError, match=r"pass the object that AutoModelForImageTextToText"):
            specdec.LLM(tmp_path / "llava")


class TestOtherInputs:
    @pytest.mark.parametrize(
        "name",
        [
            *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes"),
            *("pixel_attention_mask", "input_features", "feature_attention_mask", "input_values", "audio_values"),
            *("aspect_ratio_ids", "cross_attention_mask", "image_embeds"),
        ],
    )
    def test_media_are_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match=rf"{name}=.*text prompts only.*use model\.generate"):
            ours(model_for("gemma3"), PROMPTS[0], **{name: torch.zeros(1, 3, 28, 28)})

    def test_on_a_text_model_too(self) -> None:
        with pytest.raises(ConfigError, match=r"pixel_values=.*text prompts only"):
            ours(model_of(named("llama")), PROMPTS[0], pixel_values=torch.zeros(1))

    @pytest.mark.parametrize("name", ["token_type_ids", "mm_token_type_ids"])
    def test_kinds_of_tokens(self, name: str) -> None:
        """Processors give them with every prompt; zeros say that all of it is text."""
        model, prompt = model_for("gemma3"), PROMPTS[1]
        zeros = torch.zeros(1, len(prompt), dtype=torch.int64)
        assert ours(model, prompt, **{name: zeros}) == reference(model, prompt, NUM_NEW)
        with pytest.raises(ConfigError, match=rf"{name}=.*all tokens of a prompt are text"):
            ours(model, prompt, **{name: zeros + 1})
        with pytest.raises(ConfigError, match=name):  # GPT-2, for one, adds an embedding for kind 0
            ours(model_of(named("gpt2")), prompt, **{name: zeros})

    def test_nothing_else_is_touched(self) -> None:
        model = model_for("gemma3")
        options = {"max_new_tokens": 3, "pixel_values": None, "image_grid_thw": None, "temperature": 1.0}
        assert refuse_inputs(model, options) == options

    def test_multimodal_by_config(self) -> None:
        assert all(is_multimodal(model_for(kind)) for kind in CONFIGS)
        assert not is_multimodal(model_of(named("gemma3")))
        assert not is_multimodal(torch.nn.Linear(1, 1))


class TestRefused:
    def test_prompts_that_attend_in_both_directions(self) -> None:
        with pytest.raises(UnsupportedModelError, match="bidirectional attention"):
            ours(build("paligemma", PALIGEMMA), PROMPTS[0])

    def test_cross_attention_to_images(self) -> None:
        with pytest.raises(UnsupportedModelError, match="MllamaForConditionalGeneration"):
            ours(build("mllama", MLLAMA), PROMPTS[0])

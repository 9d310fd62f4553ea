"""A tiny target with peaked random output, and what a training run sees of it, computed the plain way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.heads.draft_vocabulary import DraftVocabulary, whole_vocabulary
from specdec.heads.target import HeadTarget, head_target
from specdec.interfaces import FeatureSpec
from specdec.models.build import runner_for
from specdec.train.capture import fused_layers
from specdec.train.store import Example
from tests.decoding import prompts, reference
from tests.heads.plain_forward import features_of

VOCAB_SIZE, WIDTH, NUM_LAYERS = 64, 32, 6
SPEC = FeatureSpec(fused_layers(NUM_LAYERS), final_norm=True)


@cache
def toy_model(*, tied: bool = False, sharpness: float = 4.0) -> Any:
    """Return a float32 llama with grouped queries whose lm_head is scaled, so that it is sure of what it says."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    if not tied:
        model.lm_head.weight.mul_(sharpness)
    return model


def toy_target(model: Any) -> HeadTarget:
    return head_target(runner_for(model))


def vocabulary_of(drafted: Sequence[int] | None = None) -> DraftVocabulary:
    """Return a draft vocabulary of some of the target's ids; None = all."""
    return whole_vocabulary(VOCAB_SIZE) if drafted is None else DraftVocabulary(torch.tensor(drafted), VOCAB_SIZE)


def example_of(model: Any, key: str, token_ids: Sequence[int], num_prompt: int, temperature: float = 0.0) -> Example:
    """Return what a capture of a text should keep; the last token was never run."""
    features: Tensor = features_of(model, token_ids, SPEC)[:-1].to(torch.bfloat16)
    return Example(key, torch.tensor(list(token_ids)), features, num_prompt, temperature)


@cache
def toy_examples(count: int = 6, new_tokens: int = 14, seed: int = 0) -> tuple[Example, ...]:
    """Return ragged prompts with the toy model's own greedy answers."""
    model = toy_model()
    lengths = [3 + 5 * i % 11 for i in range(count)]
    rows = prompts(*lengths, seed=seed, vocab_size=VOCAB_SIZE)
    return tuple(
        example_of(model, f"{i:08x}.0", [*row, *reference(model, row, new_tokens - i % 3)], len(row))
        for i, row in enumerate(rows)
    )

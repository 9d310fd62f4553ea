"""Medusa heads that are right about a text, for tests of where their guesses go."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.heads.loaded import LoadedHead
from specdec.models.build import runner_for
from tests.decoding import prompts, reference
from tests.drafters.looping import following, looping_model
from tests.heads.tiny_heads import tiny_medusa
from tests.models.architectures import model_of, named

RAGGED = prompts(1, 3, 7, 12, 2, 19, 5, 8)


def knowing_heads(num_heads: int = 3) -> LoadedHead:
    """Return heads that know how the looping model goes on."""
    model = looping_model()
    head = tiny_medusa(runner_for(model), num_heads=num_heads, num_layers=0, own_heads=True)
    for i, rows in enumerate(head.module.lm_heads):
        for token_id in range(64):
            guess = token_id
            for _ in range(i + 2):
                guess = following(guess)
            rows.weight[guess] = model.model.embed_tokens.weight[token_id]
    return head


@cache
def answers(name: str, new_tokens: int = 16) -> list[list[int]]:
    """Return the greedy answers of a shared model to the ragged prompts."""
    return [reference(model_of(named(name)), prompt, new_tokens) for prompt in RAGGED]


@cache
def fitted(name: str, num_heads: int = 3) -> LoadedHead:
    """Return heads of a shared model that are right about much of its answers."""
    texts = [prompt + answer for prompt, answer in zip(RAGGED, answers(name), strict=True)]
    return fitted_heads(model_of(named(name)), texts, num_heads)


def final_hidden(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return [n, H] what the target's lm_head reads, by the model's own forward."""
    with torch.no_grad():
        return model.base_model(input_ids=torch.tensor([list(tokens)])).last_hidden_state[0]


def fitted_heads(model: Any, texts: Sequence[Sequence[int]], num_heads: int = 3) -> LoadedHead:
    """Return heads that are right about many tokens of the texts: least squares from hidden states to tokens."""
    head = tiny_medusa(runner_for(model), num_heads=num_heads, num_layers=0, own_heads=True)
    for i, rows in enumerate(head.module.lm_heads):
        hidden = torch.cat([final_hidden(model, text[: -i - 2]) for text in texts])
        wanted = torch.cat([torch.tensor(list(text[i + 2 :])) for text in texts])
        rows.weight.copy_(torch.linalg.lstsq(hidden, torch.eye(64, dtype=hidden.dtype)[wanted]).solution.T)
    return head

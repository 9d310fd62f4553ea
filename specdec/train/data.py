"""From prompts to what the target is asked: which of them, as token ids, in which order, and which are held out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from specdec.errors import ConfigError
from specdec.train.capture import CaptureConfig, TokenPrompt
from specdec.train.prompts import Prompt, held_out, read_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which prompts, and what is made of them."""

    prompts: str = "sharegpt"
    max_examples: int | None = None  # of the target's own responses
    max_prompt_tokens: int = 224
    ascii_share: float = 0.0  # of a prompt's letters, at least; 0 takes every script
    held_out_share: float = 0.04  # by prompt, never trained on
    max_held_out: int = 128
    samples_per_prompt: int = 1  # sample i is drawn at temperatures[i % n]
    max_given: int | None = 0  # of the answers that the source holds, which the target only reads; None = all
    max_given_tokens: int = 280

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "samples_per_prompt", "max_given_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"data.{name}={getattr(self, name)!r}; allowed: an integer >= 1")
        for name, least in (("max_examples", 1), ("max_held_out", 0), ("max_given", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"data.{name}={value!r}; allowed: an integer >= {least}")
        for name in ("ascii_share", "held_out_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"data.{name}={getattr(self, name)!r}; allowed: 0 to 1")


def token_prompts(data: DataConfig, capture: CaptureConfig, tokenizer: Any) -> list[TokenPrompt]:
    """Return the prompts of a run as ids, in an order that depends on nothing but them."""
    own: list[TokenPrompt] = []
    given: list[TokenPrompt] = []
    kept_back: list[TokenPrompt] = []
    for prompt in read_prompts(data.prompts):
        token_ids = _token_ids(prompt, data, tokenizer)
        if token_ids is None:
            continue
        samples = [
            TokenPrompt(f"{prompt.key}.{i}", token_ids, capture.temperatures[i % len(capture.temperatures)])
            for i in range(data.samples_per_prompt)
        ]
        if held_out(prompt, data.held_out_share):
            kept_back.append(samples[0])
            continue
        own += samples
        response_ids = _given(prompt, data, tokenizer)
        if response_ids:
            given.append(TokenPrompt(f"{prompt.key}.g", token_ids, 1.0, response_ids))
    return [
        *_mixed(kept_back)[: data.max_held_out],
        *_mixed(own)[: data.max_examples],
        *_mixed(given)[: data.max_given],
    ]


def _mixed(prompts: list[TokenPrompt]) -> list[TokenPrompt]:
    """Return the prompts in an order without order: any beginning of it is a mixture of everything."""
    return sorted(prompts, key=lambda p: hashlib.sha256(p.key.encode()).hexdigest())


def _token_ids(prompt: Prompt, data: DataConfig, tokenizer: Any) -> tuple[int, ...] | None:
    if _ascii_share(prompt.text) < data.ascii_share or len(prompt.text) > 16 * data.max_prompt_tokens:
        return None
    if getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    else:
        encoded = tokenizer(prompt.text).input_ids
    return tuple(encoded) if 0 < len(encoded) <= data.max_prompt_tokens else None


def _given(prompt: Prompt, data: DataConfig, tokenizer: Any) -> tuple[int, ...]:
    if data.max_given == 0 or not prompt.response or _ascii_share(prompt.response) < data.ascii_share:
        return ()
    text = prompt.response[: 8 * data.max_given_tokens]
    return tuple(tokenizer(text, add_special_tokens=False).input_ids[: data.max_given_tokens])


def _ascii_share(text: str) -> float:
    return sum(map(str.isascii, text)) / max(len(text), 1)


def is_held_out(key: str, data: DataConfig) -> bool:
    """Tell whether the prompt of a key is never trained on."""
    return held_out(Prompt(key.partition(".")[0], ()), data.held_out_share)

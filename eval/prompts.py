"""The first turns of a prompt set, a fair choice of them, and their token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.api import LLM
from specdec.errors import ConfigError, InputError
from specdec.eval.conversations import load_conversations


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a conversation of a prompt set begins with."""

    text: str
    name: str  # of the conversation
    category: str


def load_texts(config: Any) -> tuple[list[str], int]:
    """Return the prompts of a prompts config, and how many rows were left out for their length.

    Raises:
        ConfigError: the source cannot be read, or nothing in it can be used.
    """
    texts = [prompt.text for prompt in load_prompts(config)]
    short = [t for t in texts if config.max_words is None or len(t.split()) <= config.max_words]
    if not short:
        raise ConfigError(
            f"{config.path or 'prompts.texts'} has no prompt of at most {config.max_words} words in {len(texts)} rows"
        )
    return _spread(short, config.limit), len(texts) - len(short)


def load_prompts(config: Any) -> list[Prompt]:
    """Return the first turn of every conversation of a prompts config, without a system prompt.

    Raises:
        ConfigError: the source cannot be read, or a row of it has no text.
    """
    return [Prompt(c.turns[0], c.name, c.category) for c in load_conversations(config)]


def _spread(texts: list[str], limit: int | None) -> list[str]:
    """Return `limit` prompts evenly spaced over the file, which is ordered by category."""
    return [texts[i] for i in _spaced(len(texts), limit)]


def _spaced(count: int, limit: int | None) -> list[int]:
    """Return the indices of `limit` of `count` things, evenly spaced."""
    if limit is None or limit >= count:
        return list(range(count))
    if limit < 1:
        raise ConfigError(f"prompts.limit={limit}; allowed: at least 1")
    return [i * count // limit for i in range(limit)]


def stratify(categories: Sequence[str], limit: int | None) -> list[int]:
    """Return the indices of `limit` rows, dealt to the categories in turn and evenly spaced within each.

    What does not go round goes to evenly spaced categories: in a file that is ordered by them, neighbours are alike.

    Raises:
        ConfigError: the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"prompts.limit={limit}; allowed: at least 1")
    members: dict[str, list[int]] = {}
    for i, category in enumerate(categories):
        members.setdefault(category, []).append(i)
    shares = dict.fromkeys(members, 0)
    left = len(categories) if limit is None else min(limit, len(categories))
    while left:
        with_more = [c for c in members if shares[c] < len(members[c])]
        turn = _spaced(len(with_more), left)
        for place in turn:
            shares[with_more[place]] += 1
        left -= len(turn)
    return sorted(members[c][i] for c, share in shares.items() if share for i in _spaced(len(members[c]), share))


def encode(llm: LLM, texts: list[str], chat: bool) -> list[list[int]]:
    """Return token ids, through the chat template where `chat` and the tokenizer has one."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise InputError("the target came without a tokenizer, so text prompts cannot be encoded")
    if chat and getattr(tokenizer, "chat_template", None):
        return [llm.chat_token_ids([{"role": "user", "content": text}]) for text in texts]
    return [list(tokenizer(text).input_ids) for text in texts]


def long_prompt(prompts: Sequence[Sequence[int]], num_tokens: int, first: int = 0) -> list[int]:
    """Return `num_tokens` ids: the prompts one after the other, again and again, from number `first` on.

    Raises:
        InputError: there are no tokens to make it of.
    """
    if not any(prompts):
        raise InputError("the prompts have no tokens, so no long one can be made of them")
    ids: list[int] = []
    while len(ids) < num_tokens:
        ids += prompts[first % len(prompts)]
        first += 1
    return ids[:num_tokens]

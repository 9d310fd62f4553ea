"""Prompt sets: texts of the config or rows of a JSON Lines file, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.api import LLM
from specdec.errors import ConfigError, InputError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt set."""

    text: str
    name: str  # its "question_id" or "id", else its number
    category: str


def load_texts(config: Any) -> tuple[list[str], int]:
    """Return the prompts of a prompts config, and how many rows were left out for their length.

    Raises:
        ConfigError: no such file, or nothing in it can be used.
    """
    texts = [prompt.text for prompt in load_prompts(config)]
    short = [t for t in texts if config.max_words is None or len(t.split()) <= config.max_words]
    if not short:
        raise ConfigError(
            f"{config.path or 'prompts.texts'} has no prompt of at most {config.max_words} words in {len(texts)} rows"
        )
    return _spread(short, config.limit), len(texts) - len(short)


def load_prompts(config: Any) -> list[Prompt]:
    """Return every row of a prompts config; those without a "category" are of the category "other".

    Raises:
        ConfigError: no such file, or a row of it has no text.
    """
    if config.texts is not None:
        return [Prompt(text, str(i), "other") for i, text in enumerate(config.texts)]
    return _read(config.path)


def _read(name: str) -> list[Prompt]:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"prompts.path={name!r} is not a file; give a JSON Lines file")
    from datasets import load_dataset

    try:
        rows = load_dataset("json", data_files=str(path.resolve()), split="train")
    except Exception as error:  # datasets raises its own kinds, and those of pandas and pyarrow
        raise ConfigError(f"prompts.path={name!r} cannot be read as JSON Lines: {error}") from error
    return [_prompt(row, i, path) for i, row in enumerate(rows)]


def _prompt(row: dict[str, Any], number: int, path: Path) -> Prompt:
    name = next((row[key] for key in ("question_id", "id") if row.get(key) is not None), number)
    return Prompt(_text(row, path), str(name), str(row.get("category") or "other"))


def _text(row: dict[str, Any], path: Path) -> str:
    if row.get("turns"):
        return str(row["turns"][0])
    if isinstance(row.get("prompt"), str):
        return str(row["prompt"])
    raise ConfigError(f"{path}: a row has neither 'turns' nor 'prompt'; its columns are {', '.join(row)}")


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

    Raises:
        ConfigError: the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"prompts.limit={limit}; allowed: at least 1")
    members: dict[str, list[int]] = {}
    for i, category in enumerate(categories):
        members.setdefault(category, []).append(i)
    shares = dict.fromkeys(members, 0)
    for _ in range(len(categories) if limit is None else min(limit, len(categories))):
        # The first of those with the fewest that have more to give: each category in turn.
        shares[min((c for c in members if shares[c] < len(members[c])), key=lambda c: shares[c])] += 1
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

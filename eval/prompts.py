"""Prompt sets: texts of the config or rows of a JSON Lines file, as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.api import LLM
from specdec.errors import ConfigError, InputError


def load_texts(config: Any) -> tuple[list[str], int]:
    """Return the prompts of a prompts config, and how many rows were left out for their length.

    Raises:
        ConfigError: no such file, or nothing in it can be used.
    """
    texts = _read(config.path) if config.texts is None else list(config.texts)
    short = [t for t in texts if config.max_words is None or len(t.split()) <= config.max_words]
    if not short:
        raise ConfigError(
            f"{config.path or 'prompts.texts'} has no prompt of at most {config.max_words} words in {len(texts)} rows"
        )
    return _spread(short, config.limit), len(texts) - len(short)


def _read(name: str) -> list[str]:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"prompts.path={name!r} is not a file; give a JSON Lines file")
    from datasets import load_dataset

    try:
        rows = load_dataset("json", data_files=str(path.resolve()), split="train")
    except Exception as error:  # datasets raises its own kinds, and those of pandas and pyarrow
        raise ConfigError(f"prompts.path={name!r} cannot be read as JSON Lines: {error}") from error
    return [_text(row, path) for row in rows]


def _text(row: dict[str, Any], path: Path) -> str:
    if row.get("turns"):
        return str(row["turns"][0])
    if isinstance(row.get("prompt"), str):
        return str(row["prompt"])
    raise ConfigError(f"{path}: a row has neither 'turns' nor 'prompt'; its columns are {', '.join(row)}")


def _spread(texts: list[str], limit: int | None) -> list[str]:
    """Return `limit` prompts evenly spaced over the file, which is ordered by category."""
    if limit is None or limit >= len(texts):
        return texts
    if limit < 1:
        raise ConfigError(f"prompts.limit={limit}; allowed: at least 1")
    return [texts[i * len(texts) // limit] for i in range(limit)]


def encode(llm: LLM, texts: list[str], chat: bool) -> list[list[int]]:
    """Return token ids, through the chat template where `chat` and the tokenizer has one."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise InputError("the target came without a tokenizer, so text prompts cannot be encoded")
    if chat and getattr(tokenizer, "chat_template", None):
        return [llm.chat_token_ids([{"role": "user", "content": text}]) for text in texts]
    return [list(tokenizer(text).input_ids) for text in texts]

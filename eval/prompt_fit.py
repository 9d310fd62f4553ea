"""A prompt's token ids, and whether it is run: short enough for its settings and for the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.api import LLM
from specdec.errors import InputError

LEAST_NEW_TOKENS = 2  # of an answer, or nothing is decoded: the first is prefill's

Message = dict[str, str]


def encode_messages(llm: LLM, messages: Sequence[Message], chat: bool) -> list[int]:
    """Return the token ids of a conversation, through the chat template where `chat` and the tokenizer has one.

    Raises:
        InputError: the target came without a tokenizer.
    """
    if llm.tokenizer is None:
        raise InputError("the target came without a tokenizer, so text prompts cannot be encoded")
    if chat and getattr(llm.tokenizer, "chat_template", None):
        return llm.chat_token_ids(messages)
    return list(llm.tokenizer("\n\n".join(message["content"] for message in messages)).input_ids)


def too_long(
    llm: LLM, text: str, ids: Sequence[int], prompts: Any, num_new_tokens: int = LEAST_NEW_TOKENS
) -> str | None:
    """Return why a prompt is not run, or None if it is.

    Args:
        llm: of the target.
        text: the last message.
        ids: of the whole prompt.
        prompts: a prompts config.
        num_new_tokens: for which there must be room behind it.
    """
    num_words, count = len(text.split()), len(ids)
    if prompts.max_words is not None and num_words > prompts.max_words:
        return f"{num_words} words, prompts.max_words={prompts.max_words}"
    if prompts.max_prompt_tokens is not None and count > prompts.max_prompt_tokens:
        return f"{count} tokens, prompts.max_prompt_tokens={prompts.max_prompt_tokens}"
    if count == 0:
        return "no tokens"
    most = llm.engine.target.max_positions
    if most is not None and count + num_new_tokens > most:
        return f"{count} tokens and {num_new_tokens} new ones, the target takes {most}"
    return None

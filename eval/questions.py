"""The prompts of a quality measurement with what is known about their answers; the first turn of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from specdec.api import LLM
from specdec.errors import ConfigError
from specdec.eval.conversations import Conversation, load_conversations
from specdec.eval.final_answer import reference_number
from specdec.eval.prompts import encode, stratify
from specdec.eval.records import LeftOut


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt."""

    name: str
    category: str
    token_ids: list[int]
    number: Fraction | None  # the right final answer; None if its reference has none


def load_questions(llm: LLM, prompts: Any, max_new_tokens: int) -> tuple[list[Question], list[LeftOut]]:
    """Return `prompts.limit` questions, and what was left out for its length.

    Args:
        llm: for its tokenizer and the length of its context, in which the answer must fit too.
        prompts: a prompts config.
        max_new_tokens: of an answer.

    Raises:
        ConfigError: the prompts cannot be read, or all are too long.
        InputError: the target came without a tokenizer.
    """
    fitting: list[Question] = []
    left_out: list[LeftOut] = []
    for row in load_conversations(prompts):
        ids = _encode(llm, row, prompts.chat)
        reason = _too_long(row.turns[0], ids, prompts, llm.engine.target.max_positions, max_new_tokens)
        if reason is None:
            fitting.append(Question(row.name, row.category, ids, reference_number(row.reference)))
        else:
            left_out.append(LeftOut(row.name, row.category, reason, len(ids)))
    if not fitting:
        raise ConfigError(f"none of the {len(left_out)} prompts can be run, the first because: {left_out[0].reason}")
    return [fitting[i] for i in stratify([q.category for q in fitting], prompts.limit)], left_out


def _encode(llm: LLM, row: Conversation, chat: bool) -> list[int]:
    if row.system is None:
        return encode(llm, [row.turns[0]], chat)[0]
    if chat and getattr(llm.tokenizer, "chat_template", None):
        return llm.chat_token_ids(
            [{"role": "system", "content": row.system}, {"role": "user", "content": row.turns[0]}]
        )
    return encode(llm, [f"{row.system}\n\n{row.turns[0]}"], chat=False)[0]


def _too_long(text: str, ids: Sequence[int], prompts: Any, most: int | None, max_new_tokens: int) -> str | None:
    num_words = len(text.split())
    if prompts.max_words is not None and num_words > prompts.max_words:
        return f"{num_words} words, prompts.max_words={prompts.max_words}"
    if prompts.max_prompt_tokens is not None and len(ids) > prompts.max_prompt_tokens:
        return f"{len(ids)} tokens, prompts.max_prompt_tokens={prompts.max_prompt_tokens}"
    if not ids:
        return "no tokens"
    if most is not None and len(ids) + max_new_tokens > most:
        return f"{len(ids)} tokens and max_new_tokens={max_new_tokens}, the target takes {most}"
    return None

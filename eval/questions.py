"""The first turns of a prompt set that are short enough, with what is known about their answers."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from specdec.api import LLM
from specdec.errors import ConfigError
from specdec.eval.conversations import load_conversations
from specdec.eval.final_answer import reference_number
from specdec.eval.prompt_fit import encode_messages, too_long
from specdec.eval.prompts import stratify
from specdec.eval.records import LeftOut


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt."""

    name: str
    category: str
    token_ids: list[int]
    number: Fraction | None  # the right final answer; None if its reference has none


def load_questions(llm: LLM, prompts: Any, num_new_tokens: int) -> tuple[list[Question], list[LeftOut]]:
    """Return `prompts.limit` questions, and what was left out for its length.

    Args:
        llm: for its tokenizer and the length of its context.
        prompts: a prompts config.
        num_new_tokens: for which there must be room.

    Raises:
        ConfigError: the prompts cannot be read, or all are too long.
        InputError: the target came without a tokenizer.
    """
    fitting: list[Question] = []
    left_out: list[LeftOut] = []
    for row in load_conversations(prompts):
        system = [] if row.system is None else [{"role": "system", "content": row.system}]
        ids = encode_messages(llm, [*system, {"role": "user", "content": row.turns[0]}], prompts.chat)
        reason = too_long(llm, row.turns[0], ids, prompts, num_new_tokens)
        if reason is None:
            fitting.append(Question(row.name, row.category, ids, reference_number(row.reference)))
        else:
            left_out.append(LeftOut(row.name, row.category, reason, len(ids)))
    if not fitting:
        raise ConfigError(
            f"none of the {len(left_out)} prompts can be run, the first because: {left_out[0].reason}"
            if left_out
            else "the prompt set is empty"
        )
    return [fitting[i] for i in stratify([q.category for q in fitting], prompts.limit)], left_out

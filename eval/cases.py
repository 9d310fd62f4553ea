"""The prompts of a point as token ids, the same for every variant; later turns follow the target's own answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.api import LLM
from specdec.errors import ConfigError, InputError
from specdec.eval.conversations import Conversation, load_conversations
from specdec.eval.prompts import long_prompt, stratify
from specdec.eval.records import Case, LeftOut

_BATCH = 16  # conversations that are answered at once while cases are made; not timed
_LEAST_TOKENS = 2  # of an answer, or there is nothing to time: the first is prefill's
_SEED = 0  # where the config has none: the same cases again when a point is resumed

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Cases:
    """What a point runs. `token_ids` are in the order of `cases`."""

    cases: list[Case]
    token_ids: list[list[int]]
    left_out: list[LeftOut]

    def batches(self, size: int) -> list[list[int]]:
        """Return the cases' indices in batches."""
        return [list(range(i, min(i + size, len(self.cases)))) for i in range(0, len(self.cases), size)]


@dataclass(slots=True)
class _Talk:
    """A conversation under way."""

    source: Conversation
    messages: list[Message]
    ids: list[int]


def make_cases(llm: LLM, config: Any) -> Cases:
    """Return the cases of a config: turns of its prompt set that are short enough, `prompts.limit` conversations.

    Later turns of a conversation follow the undrafted target's own answer, whoever is measured, so that every variant
    gets the same prompts; peers are asked for as many tokens as that answer has.

    Args:
        llm: the undrafted target.
        config: with `prompts`, `peers`, `max_new_tokens`, `ignore_eos`, `context_tokens`, `temperature`, `seed`.

    Raises:
        ConfigError: no prompt is short enough.
        InputError: the target came without a tokenizer.
    """
    conversations = load_conversations(config.prompts)
    left_out: list[LeftOut] = []
    talks = []
    for conversation in conversations:
        system = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
        talk = _Talk(conversation, [*system, {"role": "user", "content": conversation.turns[0]}], [])
        talk.ids = _encode(llm, talk.messages, config.prompts.chat)
        reason = _too_long(llm, talk, config)
        if reason is None:
            talks.append(talk)
        else:
            left_out.append(LeftOut(conversation.name, conversation.category, reason, len(talk.ids)))
    if not talks:
        raise ConfigError(
            f"none of the {len(conversations)} prompts can be run, the first because: {left_out[0].reason}"
            if left_out
            else "the prompt set is empty"
        )
    talks = [talks[i] for i in stratify([t.source.category for t in talks], config.prompts.limit)]
    if config.context_tokens is not None:
        _fill(llm, talks, config.context_tokens)
    return _run_turns(llm, talks, left_out, config)


def _fill(llm: LLM, talks: Sequence[_Talk], num_tokens: int) -> None:
    """Put other prompts of the set before each, up to `num_tokens`: a long context without a long prompt set.

    Raises:
        ConfigError: the target does not take so many.
    """
    most = llm.engine.target.max_positions
    if num_tokens < 1 or (most is not None and num_tokens + _LEAST_TOKENS > most):
        raise ConfigError(f"context_tokens={num_tokens}; allowed: 1 to {most and most - _LEAST_TOKENS}")
    own = [talk.ids for talk in talks]
    for i, talk in enumerate(talks):
        talk.ids = [*long_prompt(own, max(0, num_tokens - len(talk.ids)), i + 1), *talk.ids]


def _run_turns(llm: LLM, talks: list[_Talk], left_out: list[LeftOut], config: Any) -> Cases:
    found: list[tuple[int, int, Case, list[int]]] = []
    order = {id(talk): i for i, talk in enumerate(talks)}
    turn, most_turns = 0, 1 if config.context_tokens is not None else config.prompts.max_turns
    while talks:
        more = [t for t in talks if turn + 1 < min(len(t.source.turns), most_turns or len(t.source.turns))]
        needed = talks if config.peers else more
        answers = dict(zip(map(id, needed), _answers(llm, needed, config), strict=True))
        for talk in talks:
            count = len(answers[id(talk)]) if id(talk) in answers else None
            case = Case(talk.source.name, talk.source.category, turn, len(talk.ids), count)
            found.append((order[id(talk)], turn, case, talk.ids))
        turn += 1
        talks = [t for t in more if _go_on(llm, t, answers[id(t)], turn, left_out, config)]
    found.sort(key=lambda part: part[:2])
    return Cases([case for _, _, case, _ in found], [ids for *_, ids in found], left_out)


def _go_on(llm: LLM, talk: _Talk, answer: list[int], turn: int, left_out: list[LeftOut], config: Any) -> bool:
    """Append an answer and the next turn to a conversation; tell whether it still fits."""
    assert llm.tokenizer is not None, "the first turn was encoded with it"
    text = llm.tokenizer.decode(answer, skip_special_tokens=True)
    talk.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": talk.source.turns[turn]}]
    talk.ids = _encode(llm, talk.messages, config.prompts.chat)
    reason = _too_long(llm, talk, config)
    if reason is not None:
        left_out.append(LeftOut(talk.source.name, talk.source.category, f"turn {turn}: {reason}", len(talk.ids)))
    return reason is None


def _answers(llm: LLM, talks: Sequence[_Talk], config: Any) -> list[list[int]]:
    """Return the target's own answers, undrafted and untimed."""
    found: list[list[int]] = []
    with torch.random.fork_rng():
        torch.manual_seed(_SEED if config.seed is None else config.seed)
        for start in range(0, len(talks), _BATCH):
            prompts = [talk.ids for talk in talks[start : start + _BATCH]]
            options = {"temperature": config.temperature, "seed": config.seed, "ignore_eos": config.ignore_eos}
            found += [done.token_ids for done in llm.generate(prompts, max_new_tokens=config.max_new_tokens, **options)]
    return found


def _encode(llm: LLM, messages: Sequence[Message], chat: bool) -> list[int]:
    if llm.tokenizer is None:
        raise InputError("the target came without a tokenizer, so text prompts cannot be encoded")
    if chat and getattr(llm.tokenizer, "chat_template", None):
        return llm.chat_token_ids(messages)
    return list(llm.tokenizer("\n\n".join(message["content"] for message in messages)).input_ids)


def _too_long(llm: LLM, talk: _Talk, config: Any) -> str | None:
    """Return why a prompt is not run, if it is not."""
    prompts, count = config.prompts, len(talk.ids)
    num_words = len(talk.messages[-1]["content"].split())
    if prompts.max_words is not None and num_words > prompts.max_words:
        return f"{num_words} words, prompts.max_words={prompts.max_words}"
    if prompts.max_prompt_tokens is not None and count > prompts.max_prompt_tokens:
        return f"{count} tokens, prompts.max_prompt_tokens={prompts.max_prompt_tokens}"
    if count == 0:
        return "no tokens"
    most = llm.engine.target.max_positions
    if most is not None and count + _LEAST_TOKENS > most:
        return f"{count} tokens, the target takes {most}"
    return None

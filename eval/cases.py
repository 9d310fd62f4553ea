"""The prompts of a point as token ids, the same for every variant; later turns follow the target's own answers."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.api import LLM
from specdec.errors import ConfigError
from specdec.eval.conversations import Conversation, load_conversations
from specdec.eval.prompt_fit import LEAST_NEW_TOKENS, Message, encode_messages, too_long
from specdec.eval.prompts import stratify
from specdec.eval.records import Case, LeftOut

_BATCH = 16  # conversations that are answered at once while cases are made; not timed
_SEED = 0  # where the config has none: the same cases again when a point is resumed

_DIGEST = 12  # characters


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
        talk.ids = encode_messages(llm, talk.messages, config.prompts.chat)
        reason = too_long(llm, talk.messages[-1]["content"], talk.ids, config.prompts)
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
    pool = [talk.ids for talk in talks]
    chosen = stratify([t.source.category for t in talks], config.prompts.limit)
    talks = [talks[i] for i in chosen]
    if config.context_tokens is not None:
        talks = _fill(llm, talks, chosen, pool, config.context_tokens, left_out)
    return _run_turns(llm, talks, left_out, config)


def _fill(
    llm: LLM,
    talks: Sequence[_Talk],
    places: Sequence[int],
    pool: Sequence[list[int]],
    num_tokens: int,
    left_out: list[LeftOut],
) -> list[_Talk]:
    """Put other prompts of the set before each, up to `num_tokens`: a long context without a long prompt set.

    No prompt comes twice in a context: repetition would be what grows with its length.

    Args:
        llm: the target.
        talks: to be lengthened; longer ones are left out.
        places: of the talks in the pool.
        pool: all prompts of the set.
        num_tokens: of a prompt then.
        left_out: gets what is longer already.

    Raises:
        ConfigError: the target does not take so many, or the set has not that many.
    """
    most = llm.engine.target.max_positions
    if num_tokens < 1 or (most is not None and num_tokens + LEAST_NEW_TOKENS > most):
        raise ConfigError(f"context_tokens={num_tokens}; allowed: 1 to {most and most - LEAST_NEW_TOKENS}")
    found = []
    for talk, place in zip(talks, places, strict=True):
        missing = num_tokens - len(talk.ids)
        others = [*pool[place + 1 :], *pool[:place]]
        if missing < 0:
            reason = f"{len(talk.ids)} tokens, context_tokens={num_tokens}"
            left_out.append(LeftOut(talk.source.name, talk.source.category, reason, len(talk.ids)))
        elif missing > sum(map(len, others)):
            raise ConfigError(
                f"context_tokens={num_tokens}, but the other prompts of the set have {sum(map(len, others))} tokens; "
                "give a larger set, or fewer"
            )
        else:
            talk.ids = [*itertools.chain.from_iterable(others)][:missing] + talk.ids
            found.append(talk)
    if not found:
        raise ConfigError(f"every prompt is longer than context_tokens={num_tokens}")
    return found


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
            case = Case(talk.source.name, talk.source.category, turn, len(talk.ids), count, _digest(talk.ids))
            found.append((order[id(talk)], turn, case, talk.ids))
        turn += 1
        talks = [t for t in more if _go_on(llm, t, answers[id(t)], turn, left_out, config)]
    found.sort(key=lambda part: part[:2])
    return Cases([case for _, _, case, _ in found], [ids for *_, ids in found], left_out)


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:_DIGEST]


def _go_on(llm: LLM, talk: _Talk, answer: list[int], turn: int, left_out: list[LeftOut], config: Any) -> bool:
    """Append an answer and the next turn to a conversation; tell whether it still fits."""
    assert llm.tokenizer is not None, "the first turn was encoded with it"
    text = llm.tokenizer.decode(answer, skip_special_tokens=True)
    talk.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": talk.source.turns[turn]}]
    talk.ids = encode_messages(llm, talk.messages, config.prompts.chat)
    reason = too_long(llm, talk.messages[-1]["content"], talk.ids, config.prompts)
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

"""What a trained drafter is worth: held-out prompts decoded by the engine, with it and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.api import LLM, Completion
from specdec.drafters.advised_shape import TREE_TOKENS
from specdec.errors import ConfigError
from specdec.repetition import first_repeat
from specdec.stats import total


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """How a trained drafter is measured on held-out prompts, greedily."""

    num_prompts: int = 32  # 0 = not at all
    max_new_tokens: int = 128
    max_draft_tokens: int = 4  # of the chain

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 0), ("max_new_tokens", 2), ("max_draft_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"measure.{name}={getattr(self, name)!r}; allowed: an integer >= {least}")


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of drafting over the same prompts."""

    name: str
    num_prompts: int
    num_loops: int  # answers that begin to repeat themselves; they count up to there
    acceptance_length: float  # tokens per target forward, each answer up to its repetition
    acceptance_length_all: float  # of whole answers
    decode_tokens_per_s: float  # of whole answers, one prompt at a time
    num_equal: int  # answers with the undrafted run's ids; near-ties may part them


def measure(
    method: str,
    folder: Path,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    config: MeasureConfig,
    settings: dict[str, Any],
    advance: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """Return `Measured` as dicts: without a drafter, with chains, and with the tree that `settings` advise.

    Small models answer greedily in circles, and there every drafter looks good: an answer counts up to its repetition.

    Args:
        method: the drafter's registered name.
        folder: of the trained drafter.
        model: its target.
        tokenizer: the target's.
        prompts: token ids, never trained on.
        config: how.
        settings: the advised options that are stored with the drafter.
        advance: called with the number of prompts decoded so far, over all ways.
    """
    plain: list[Completion] = []
    rows = []
    for number, (name, llm) in enumerate(_ways(method, folder, model, tokenizer, config, settings)):
        done: list[Completion] = []
        for prompt in prompts:  # one at a time: in a batch, times overlap
            done += llm.generate(list(prompt), max_new_tokens=config.max_new_tokens)
            advance(number * len(prompts) + len(done))
        plain = plain or done
        rows.append(asdict(_measured(name, done, plain)))
    return rows


def num_ways(settings: dict[str, Any]) -> int:
    """Return how many rows `measure` has."""
    return 2 + bool(_advised(settings))


def _advised(settings: dict[str, Any]) -> Any:
    tree = settings.get("tree")
    return None if tree == "chain" else tree


def _ways(
    method: str, folder: Path, model: Any, tokenizer: Any, config: MeasureConfig, settings: dict[str, Any]
) -> Iterator[tuple[str, LLM]]:
    yield "none", LLM(model, tokenizer=tokenizer)
    options = {"model": str(folder)}
    length = config.max_draft_tokens
    chain = LLM(
        model,
        tokenizer=tokenizer,
        drafter=method,
        drafter_options={**options, "tree": "chain"},
        max_draft_tokens=length,
    )
    yield f"{method}, chain of {length}", chain
    tree = _advised(settings)
    if tree:
        length = int(settings.get("max_draft_tokens", TREE_TOKENS))
        options = {**options, "tree": tree}
        drafter = LLM(model, tokenizer=tokenizer, drafter=method, drafter_options=options, max_draft_tokens=length)
        yield f"{method}, tree {tree} of at most {length}", drafter


def _measured(name: str, done: Sequence[Completion], plain: Sequence[Completion]) -> Measured:
    cuts = [first_repeat(c.token_ids) for c in done]
    emitted, steps = (sum(column) for column in zip(*map(_up_to, done, cuts), strict=True))
    stats = total(c.stats for c in done)
    return Measured(
        name=name,
        num_prompts=len(done),
        num_loops=sum(cut is not None for cut in cuts),
        acceptance_length=round(emitted / max(steps, 1), 4),
        acceptance_length_all=round(stats.acceptance_length or 0.0, 4),
        decode_tokens_per_s=round(stats.num_emitted_tokens / max(stats.decode_s, 1e-9), 2),
        num_equal=sum(a.token_ids == b.token_ids for a, b in zip(done, plain, strict=True)),
    )


def _up_to(done: Completion, cut: int | None) -> tuple[int, int]:
    """Return (tokens, steps) of the decode steps that emitted tokens before `cut`."""
    sizes = [size for _, size in done.stats.emissions]
    at, emitted, steps = sum(sizes[:1]), 0, 0  # the first emission is prefill's
    for size in sizes[1:]:
        left = size if cut is None else min(size, cut - at)
        if left <= 0:
            break
        at, emitted, steps = at + size, emitted + left, steps + 1
    return emitted, steps

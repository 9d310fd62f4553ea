"""What a trained drafter is worth: held-out prompts decoded by the engine, with it and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.api import LLM, Completion
from specdec.drafters.advised_shape import TREE_TOKENS
from specdec.errors import ConfigError
from specdec.models.build import runner_for
from specdec.repetition import first_repeat
from specdec.stats import total

CHAIN_TOKENS = 4  # of a chain that nobody gave a number of: the engine's default, which a test compares


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
class Way:
    """One way of drafting. Without options there is no drafter; without a number it is what is drafted by default."""

    name: str
    options: dict[str, Any] | None = None
    max_draft_tokens: int | None = None


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
    """Return `Measured` as dicts, one for each of `ways`.

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
    for number, way in enumerate(ways(method, settings, config, runner_for(model).supports_trees)):
        llm = _llm(way, folder, model, tokenizer)
        done: list[Completion] = []
        for prompt in prompts:  # one at a time: in a batch, times overlap
            done += llm.generate(list(prompt), max_new_tokens=config.max_new_tokens)
            advance(number * len(prompts) + len(done))
        plain = plain or done
        rows.append(asdict(_measured(way.name, done, plain)))
    return rows


def _llm(way: Way, folder: Path, model: Any, tokenizer: Any) -> LLM:
    if way.options is None:
        return LLM(model, tokenizer=tokenizer)
    return LLM(
        model,
        tokenizer=tokenizer,
        drafter=str(folder),
        drafter_options=way.options,
        max_draft_tokens=way.max_draft_tokens,
    )


def ways(method: str, settings: dict[str, Any], config: MeasureConfig, trees: bool) -> list[Way]:
    """Return what is measured: no drafter, a chain, and what is drafted by default where that is something else.

    Args:
        method: the drafter's registered name.
        settings: the advised options that are stored with the drafter.
        config: how long the chain is.
        trees: whether the target runs them; if not, none is drafted by default.
    """
    chain = Way(f"{method}, chain of {config.max_draft_tokens}", {"tree": "chain"}, config.max_draft_tokens)
    tree = settings.get("tree", "medusa" if method == "medusa" else "chain")
    found = [Way("none"), chain]
    if tree == "chain" or not trees:
        length = settings.get("max_draft_tokens", CHAIN_TOKENS) if tree == "chain" else CHAIN_TOKENS
        served = Way(f"{method}, chain of {length}", {})
    else:
        served = Way(f"{method}, tree {tree} of at most {settings.get('max_draft_tokens', TREE_TOKENS)}", {})
    return found if served.name == chain.name else [*found, served]


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

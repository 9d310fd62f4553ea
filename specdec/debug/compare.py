"""Two runs of one prompt, with and without drafting: where they part, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.debug.near_tie import behind, first_difference
from specdec.debug.watch import Choice, Watched
from specdec.interfaces import NoiseKey, Stream
from specdec.noise import KeyedNoise
from specdec.trace import top_two

IDENTICAL, NEAR_TIE, DIVERGED = "identical", "near-tie", "diverged"


@dataclass(frozen=True, slots=True)
class Side:
    """What one run saw at the position at which the runs part; `pair` is (undrafted run's token, drafted run's)."""

    token_id: int
    text: str | None
    top_token_ids: tuple[int, ...]  # the two with the largest logits
    gap: float  # between their logits: the target's, before processors, temperature and filters
    pair_logits: tuple[float, float] | None  # None where the other run had ended
    pair_probs: tuple[float, float] | None  # of the distribution the token was drawn from; None when greedy
    # How far the one of the pair that does worse lies below the best token, in logits: after processors when greedy,
    # else in the race that the noise of this position decides, times the temperature. infinity: it cannot be chosen.
    behind: float
    is_best: bool  # the run took what its own scores (and noise) say, near-ties apart


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt's verdict: "identical", "near-tie" or "diverged", and why."""

    prompt: int
    verdict: str
    why: str
    num_prompt_tokens: int
    num_tokens: tuple[int, int]  # of the undrafted and of the drafted run, as in every pair
    finish_reasons: tuple[str | None, str | None]
    position: int | None = None  # of the new tokens, from 0
    undrafted: Side | None = None  # None if that run had ended
    drafted: Side | None = None
    largest_change: float | None = None  # of any logit between the runs at that position
    from_draft: bool | None = None  # whether the drafted run's token was drafted, or the target's own
    step: int | None = None  # of the drafted run's engine
    draft_token_ids: list[int] = field(default_factory=list)  # of that step; draft token i is node i + 1
    draft_parents: list[int] = field(default_factory=list)
    draft_texts: list[str] = field(default_factory=list)


def compare(index: int, plain: Watched, drafted: Watched, near_tie: float, tokenizer: Any | None) -> Comparison:
    """Return the verdict on one prompt.

    Args:
        index: of the prompt.
        plain: the undrafted run, with the choice of every token.
        drafted: the drafted run, with the first choice that differs.
        near_tie: two logits closer than this are a tie to the arithmetic.
        tokenizer: for texts.
    """
    tokens = plain.new_tokens, drafted.new_tokens
    known: dict[str, Any] = {
        "prompt": index,
        "num_prompt_tokens": len(plain.prompt_token_ids),
        "num_tokens": (len(tokens[0]), len(tokens[1])),
        "finish_reasons": (plain.finish_reason, drafted.finish_reason),
    }
    position = first_difference(*tokens)
    if position is None:
        if len(tokens[0]) == len(tokens[1]):
            return Comparison(**known, verdict=IDENTICAL, why="all tokens are equal")
        position = min(map(len, tokens))
    pair = [run.choices.get(position) for run in (plain, drafted)]
    sides = [_side(run, position, c, pair, near_tie, tokenizer) for run, c in zip((plain, drafted), pair, strict=True)]
    verdict, why, change = _verdict(pair, sides, near_tie, plain.sampling.greedy)
    choice = pair[1]
    if choice is not None:
        known |= {
            "from_draft": choice.from_draft,
            "step": choice.step,
            "draft_token_ids": choice.draft_token_ids,
            "draft_parents": choice.draft_parents,
            "draft_texts": [] if tokenizer is None else [tokenizer.decode([t]) for t in choice.draft_token_ids],
        }
    return Comparison(
        **known,
        verdict=verdict,
        why=why,
        position=position,
        undrafted=sides[0],
        drafted=sides[1],
        largest_change=change,
    )


def _side(
    run: Watched,
    position: int,
    own: Choice | None,
    pair: Sequence[Choice | None],
    near_tie: float,
    tokenizer: Any | None,
) -> Side | None:
    """Return what `run` saw when it chose `own`, or None if it had ended."""
    if own is None:
        return None
    taken = [c.token_id for c in pair if c is not None]
    best, gap = top_two(own.logits[None])
    scores, probs = own.scores.double(), None
    if not run.sampling.greedy:
        shares = own.scores.softmax(dim=-1)
        probs = _two(shares, taken)
        scores = _race(shares, run, position)
    far = behind(scores, taken)
    return Side(
        own.token_id,
        None if tokenizer is None else tokenizer.decode([own.token_id]),
        tuple(best[0].tolist()),
        float(gap),
        _two(own.logits, taken),
        probs,
        far if not math.isnan(far) else math.inf,
        behind(scores, [own.token_id]) < near_tie,  # False for NaN
    )


def _race(probs: Tensor, run: Watched, position: int) -> Tensor:
    """Return [V] float64: what the noise of a position makes of probabilities [V], in units of logits."""
    if bool(probs.isnan().any()):
        return torch.full_like(probs, torch.nan, dtype=torch.float64)
    root = torch.tensor([len(run.prompt_token_ids) + position - 1])
    noise = KeyedNoise(torch.tensor([run.seed]), root, torch.tensor([False]))
    key = NoiseKey(torch.tensor([0]), 1, Stream.TOKEN)
    return run.sampling.temperature * noise.scores(probs[None], key)[0].log()


def _two(values: Tensor, tokens: Sequence[int]) -> tuple[float, float] | None:
    return (float(values[tokens[0]]), float(values[tokens[1]])) if len(tokens) == 2 else None


def _verdict(
    pair: Sequence[Choice | None], sides: Sequence[Side | None], near_tie: float, greedy: bool
) -> tuple[str, str, float | None]:
    """Return the verdict, the reason, and the largest change of a logit."""
    (one, other), (left, right) = pair, sides
    if one is None or other is None or left is None or right is None:
        ended = "undrafted" if left is None else "drafted"
        return DIVERGED, f"the {ended} run ended here and the other one went on: stop rules, limits or criteria", None
    both = one.logits.isfinite() & other.logits.isfinite()
    change = float((one.logits - other.logits)[both].abs().max()) if bool(both.any()) else 0.0
    if max(left.behind, right.behind) < near_tie:
        return NEAR_TIE, "both runs saw the two tokens closer than rounding can tell apart; this is no bug", change
    if not greedy and left.is_best and right.is_best and change < near_tie and math.inf in (left.behind, right.behind):
        why = "both runs saw the same logits but for rounding, and one token lies at the edge of a filter; no bug"
        return NEAR_TIE, why, change
    if not right.is_best:
        return DIVERGED, "the verifier took a token that the drafted run's own scores do not choose", change
    if change < near_tie:
        return DIVERGED, "both runs saw the same logits and scored them differently: a processor with a memory", change
    return (
        DIVERGED,
        (
            "the runs saw different logits after the same text, so the forward is wrong: KV cache, positions, masks of "
            "several rows, or a drafter that changed what it shares with the target"
        ),
        change,
    )

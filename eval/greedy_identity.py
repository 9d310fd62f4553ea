"""Greedy ids against transformers' generate(): where they part, and whether the two best logits nearly tie there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from specdec.api import LLM
from specdec.debug.near_tie import behind, first_difference, near_tie_limit, top_gap
from specdec.eval.next_scores import next_scores


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two greedy runs of one prompt part, and how close the two best tokens were there."""

    prompt: int
    position: int  # of the new tokens
    expected: int
    got: int
    gap: float  # best minus second-best logit of the unmodified model, after its generation config's processors
    engine_gap: float  # the same of the engine's own forward, after the same tokens
    is_near_tie: bool


class _TopGap:
    """A logits processor that changes nothing and notes the gap between the two best logits."""

    gap = float("nan")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.gap = top_gap(scores[0])
        return scores


def next_logits(model: Any, prefix: Sequence[int]) -> torch.Tensor:
    """Return the logits [V] that transformers' greedy generate() chooses the next token by, processors applied."""
    return next_scores(model, torch.tensor([list(prefix)], device=model.device))[0]


def first_divergence(
    llm: LLM, index: int, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int], near_tie: float
) -> Divergence | None:
    """Return where `got` leaves `expected`, with both models' top-2 gaps at that place, or None.

    Answers of unequal length are compared as far as both go.
    """
    position = first_difference(expected, got)
    if position is None:
        return None
    prefix = [*prompt, *expected[:position]]
    logits = next_logits(llm.model, prefix)
    probe = _TopGap()
    llm.generate(prefix, max_new_tokens=1, ignore_eos=True, logits_processor=[probe])
    tokens = expected[position], got[position]
    return Divergence(index, position, *tokens, top_gap(logits), probe.gap, behind(logits, tokens) < near_tie)


def compare_answers(
    llm: LLM, prompts: Sequence[Sequence[int]], expected: Sequence[list[int]], got: Sequence[list[int]], near_tie: float
) -> dict[str, Any]:
    """Return how many greedy answers are the expected ones, and where the others part, unequal lengths included.

    Args:
        llm: of the target, for its logits where answers part.
        prompts: token ids.
        expected: answers to them.
        got: likewise.
        near_tie: how close two logits must be to be one.
    """
    parted: list[dict[str, Any]] = []
    for i, (prompt, a, b) in enumerate(zip(prompts, expected, got, strict=True)):
        found = first_divergence(llm, i, prompt, a, b, near_tie)
        if found is not None:
            parted.append(asdict(found))
        elif len(a) != len(b):
            parted.append({"prompt": i, "position": min(len(a), len(b)), "gap": None, "is_near_tie": False})
    return {"equal": len(prompts) - len(parted), "of": len(prompts), "parted": parted}


def num_near_ties(found: dict[str, Any]) -> int:
    """Return how many of the answers that `compare_answers` found part at a near-tie."""
    return sum(d["is_near_tie"] for d in found["parted"])


def only_near_ties(found: dict[str, Any]) -> bool:
    """Tell whether near-ties explain all that `compare_answers` found."""
    return num_near_ties(found) == len(found["parted"])


def lossy_rules(llm: LLM) -> list[str]:
    """Return the names of the acceptance rules of an LLM, greedy and sampled, that say that they are lossy."""
    rules = llm.engine.verifiers
    return list(dict.fromkeys(rule.name for rule in (rules.greedy, rules.seeded, rules.sampled) if not rule.lossless))


def check_drafter(
    llm: LLM, name: str, size: int, prompts: list[list[int]], expected: list[list[int]], config: Any
) -> dict[str, Any]:
    """Return how many answers of an LLM are the expected ones, and where the others part.

    "lossless" is whether near-ties explain all differences; in float32 and wider they may also not be many.

    Args:
        llm: with the drafter.
        name: the drafter's.
        size: of the batches the prompts are given in.
        prompts: token ids.
        expected: transformers' greedy answers.
        config: with `max_new_tokens`, `near_tie` and `near_ties_per_prompt`, see lossless.yaml.
    """
    dtype = llm.model.dtype
    near_tie = near_tie_limit(dtype, config.near_tie)
    found: list[Divergence] = []
    unequal: list[dict[str, Any]] = []  # lengths that differ: the engine ends at the context limit
    num_draft_tokens = num_drafter_errors = 0
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        done = llm.generate(batch, max_new_tokens=config.max_new_tokens, ignore_eos=True)
        for i, completion in enumerate(done, start):
            got = completion.token_ids
            num_draft_tokens += completion.stats.num_draft_tokens
            num_drafter_errors += completion.stats.num_drafter_errors
            divergence = first_divergence(llm, i, prompts[i], expected[i], got, near_tie)
            if divergence is not None:
                found.append(divergence)
            if len(got) != len(expected[i]):
                at_limit = len(prompts[i]) + len(got) == llm.engine.target.max_positions
                unequal.append({"prompt": i, "expected": len(expected[i]), "got": len(got), "at_limit": at_limit})
    # In half precision near-ties are common and say nothing; each is still reported.
    share = config.near_ties_per_prompt
    few = max(1.0, share * len(prompts)) if share > 0 else 0.0  # a share of a few prompts may be less than one
    allowed = few if dtype.itemsize >= 4 else len(prompts)
    good = all(d.is_near_tie for d in found) and len(found) <= allowed and all(u["at_limit"] for u in unequal)
    return {
        "drafter": name,
        "dtype": str(dtype).removeprefix("torch."),
        "batch_size": size,
        "num_prompts": len(prompts),
        "identical": len(prompts) - len(found),
        "lossless": good,
        "num_draft_tokens": num_draft_tokens,
        "num_drafter_errors": num_drafter_errors,
        "lossy_rules": lossy_rules(llm),
        "divergences": [asdict(d) for d in found],
        "unequal_lengths": unequal,
    }

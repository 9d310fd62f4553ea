"""Is the output the target's own: greedy ids against transformers' generate(), with near-tie analysis.

    python -m specdec.eval.lossless drafters=[none,ngram,self_int8] prompts=jsonl prompts.path=FILE

Exit code 0 = lossless, 1 = a difference that is no near-tie or too many near-ties, 2 = bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdec.api import LLM
from specdec.debug.near_tie import behind, first_difference, near_tie_limit, top_gap
from specdec.errors import ConfigError
from specdec.eval.entry import run_and_write
from specdec.eval.prompts import encode, load_texts
from specdec.eval.timing import transformers_variant
from specdec.provenance import provenance

console = Console()


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
    ids = torch.tensor([list(prefix)], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores: torch.Tensor = out.scores[0][0]
    return scores.double()


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


def measure(config: Any) -> dict[str, Any]:
    """Compare every drafter at every batch size with transformers and return all divergences."""
    engine = OmegaConf.to_container(config.engine, resolve=True) or {}
    base = LLM(config.target.name, dtype=config.target.dtype, **engine)
    texts, _ = load_texts(config.prompts)
    prompts = encode(base, texts, config.prompts.chat)
    reference = transformers_variant(base.model, config.max_new_tokens, 0.0, None)
    checks: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("transformers", total=len(prompts))
        expected = []
        for prompt in prompts:
            expected.append(reference(prompt).token_ids)
            progress.advance(bar)
        bar = progress.add_task("drafters", total=len(config.drafters) * len(config.batch_sizes))
        for name in config.drafters:
            options = OmegaConf.to_container(config.drafter_options.get(name) or OmegaConf.create({}), resolve=True)
            llm = LLM(
                base.model,
                tokenizer=base.tokenizer,
                drafter=name,
                drafter_options=options,
                verifier=config.verifier.name,
                verifier_options=OmegaConf.to_container(config.verifier.options, resolve=True),
                **engine,
            )
            for size in config.batch_sizes:
                checks.append(check_drafter(llm, name, size, prompts, expected, config))
                progress.advance(bar)
    return {"config": OmegaConf.to_container(config, resolve=True), "provenance": provenance(), "checks": checks}


def check_drafter(
    llm: LLM, name: str, size: int, prompts: list[list[int]], expected: list[list[int]], config: Any
) -> dict[str, Any]:
    """Return how many answers of an LLM are the expected ones, and where the others part.

    Args:
        llm: with the drafter.
        name: the drafter's.
        size: of the batches the prompts are given in.
        prompts: token ids.
        expected: transformers' greedy answers.
        config: with `max_new_tokens`, `near_tie` and `near_ties_per_prompt`, see lossless.yaml.
    """
    if size < 1:
        raise ConfigError(f"batch_sizes holds {size}; allowed: at least 1")
    dtype = llm.model.dtype
    near_tie = near_tie_limit(dtype, config.near_tie)
    found: list[Divergence] = []
    unequal: list[dict[str, Any]] = []  # lengths that differ: the engine ends at the context limit
    num_draft_tokens = 0
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        done = llm.generate(batch, max_new_tokens=config.max_new_tokens, ignore_eos=True)
        for i, completion in enumerate(done, start):
            got = completion.token_ids
            num_draft_tokens += completion.stats.num_draft_tokens
            divergence = first_divergence(llm, i, prompts[i], expected[i], got, near_tie)
            if divergence is not None:
                found.append(divergence)
            if len(got) != len(expected[i]):
                at_limit = len(prompts[i]) + len(got) == llm.engine.target.max_positions
                unequal.append({"prompt": i, "expected": len(expected[i]), "got": len(got), "at_limit": at_limit})
    # In half precision near-ties are common and say nothing; each is still reported.
    allowed = config.near_ties_per_prompt * len(prompts) if dtype.itemsize >= 4 else len(prompts)
    good = all(d.is_near_tie for d in found) and len(found) <= allowed and all(u["at_limit"] for u in unequal)
    return {
        "drafter": name,
        "batch_size": size,
        "num_prompts": len(prompts),
        "identical": len(prompts) - len(found),
        "lossless": good,
        "num_draft_tokens": num_draft_tokens,
        "divergences": [asdict(d) for d in found],
        "unequal_lengths": unequal,
    }


def show(result: dict[str, Any]) -> bool:
    """Print the table and the verdict; return whether everything is lossless."""
    table = Table(title=f"greedy, {result['config']['target']['dtype']}, against transformers generate()")
    for column in ("drafter", "batch", "identical", "prompt@token: both top-2 gaps", "verdict"):
        table.add_column(column)
    for check in result["checks"]:
        notes = [f"{d['prompt']}@{d['position']}: {d['gap']:.1e}, {d['engine_gap']:.1e}" for d in check["divergences"]]
        for u in check["unequal_lengths"]:
            why = "the context limit" if u["at_limit"] else "NO context limit"
            notes.append(f"{u['prompt']}: {u['got']} of {u['expected']} tokens, {why}")
        table.add_row(
            check["drafter"],
            str(check["batch_size"]),
            f"{check['identical']}/{check['num_prompts']}",
            "\n".join(notes) or "-",
            "lossless" if check["lossless"] else "DIFFERENT",
        )
    console.print(table)
    good = all(check["lossless"] for check in result["checks"])
    console.print("verdict: lossless" if good else "verdict: NOT lossless", highlight=False)
    return good


@hydra.main(version_base="1.3", config_path="pkg://specdec.configs", config_name="lossless")
def main(config: DictConfig) -> None:
    """Measure, print, write; the exit code is the verdict."""
    sys.exit(0 if run_and_write(config, "lossless", measure, show) else 1)


if __name__ == "__main__":
    main()

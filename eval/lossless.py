"""Is the output the target's own: greedy ids against transformers' generate(), with near-tie analysis.

    python -m specdec.eval.lossless drafters=[none,ngram,self_int8] prompts=jsonl prompts.path=FILE

Exit code 0 = lossless, 1 = a difference that is no near-tie or too many near-ties, 2 = bad input.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers.utils import logging as transformers_logging

from specdec.api import LLM
from specdec.errors import ConfigError, SpecdecError
from specdec.eval.prompts import encode, load_texts
from specdec.eval.provenance import provenance
from specdec.eval.timing import transformers_variant

console = Console()


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two greedy runs of one prompt part, and how close the two best tokens were there."""

    prompt: int
    position: int  # of the new tokens
    expected: int
    got: int
    gap: float  # best minus second-best logit of the unmodified model
    is_near_tie: bool


def first_divergence(
    model: Any, index: int, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int], near_tie: float
) -> Divergence | None:
    """Return where `got` leaves `expected`, with the unmodified model's top-2 gap at that place, or None."""
    pairs = zip(expected, got, strict=True)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        return None
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *expected[:position]]], device=model.device)).logits[0, -1]
    top = logits.float().topk(2).values
    gap = float(top[0] - top[1])
    # A near-tie is between the two tokens at hand; a third token is never one.
    both = {expected[position], got[position]} == set(logits.float().topk(2).indices.tolist())
    return Divergence(index, position, expected[position], got[position], gap, both and gap < near_tie)


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
                **engine,
            )
            for size in config.batch_sizes:
                checks.append(_check(llm, name, size, prompts, expected, config))
                progress.advance(bar)
    return {"config": OmegaConf.to_container(config, resolve=True), "provenance": provenance(), "checks": checks}


def _check(
    llm: LLM, name: str, size: int, prompts: list[list[int]], expected: list[list[int]], config: Any
) -> dict[str, Any]:
    if size < 1:
        raise ConfigError(f"batch_sizes holds {size}; allowed: at least 1")
    found: list[Divergence] = []
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        done = llm.generate(batch, max_new_tokens=config.max_new_tokens, ignore_eos=True)
        for i, completion in enumerate(done, start):
            divergence = first_divergence(llm.model, i, prompts[i], expected[i], completion.token_ids, config.near_tie)
            if divergence is not None:
                found.append(divergence)
    allowed = config.near_ties_per_prompt * len(prompts)
    good = all(d.is_near_tie for d in found) and len(found) <= allowed
    return {
        "drafter": name,
        "batch_size": size,
        "num_prompts": len(prompts),
        "identical": len(prompts) - len(found),
        "lossless": good,
        "divergences": [asdict(d) for d in found],
    }


def show(result: dict[str, Any]) -> bool:
    """Print the table and the verdict; return whether everything is lossless."""
    table = Table(title=f"greedy, {result['config']['target']['dtype']}, against transformers generate()")
    for column in ("drafter", "batch", "identical", "first divergences (prompt@token: top-2 gap)", "verdict"):
        table.add_column(column)
    for check in result["checks"]:
        parted = ", ".join(f"{d['prompt']}@{d['position']}: {d['gap']:.1e}" for d in check["divergences"]) or "-"
        table.add_row(
            check["drafter"],
            str(check["batch_size"]),
            f"{check['identical']}/{check['num_prompts']}",
            parted,
            "lossless" if check["lossless"] else "DIFFERENT",
        )
    console.print(table)
    good = all(check["lossless"] for check in result["checks"])
    console.print("verdict: lossless" if good else "verdict: NOT lossless", highlight=False)
    return good


@hydra.main(version_base="1.3", config_path="pkg://specdec.configs", config_name="lossless")
def main(config: DictConfig) -> None:
    """Measure, print, write; the exit code is the verdict."""
    logging.getLogger("specdec").setLevel(logging.INFO)
    transformers_logging.set_verbosity_error()
    try:
        result = measure(config)
    except SpecdecError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        sys.exit(2)
    path = Path(config.output or Path(HydraConfig.get().runtime.output_dir) / "lossless.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    good = show(result)
    console.print(f"written to {path}", highlight=False)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

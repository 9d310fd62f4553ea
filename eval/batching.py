"""What sharing a batch buys: requests that arrive together, one by one, and transformers' own continuous batching.

python -m specdec.eval.batching

All three give the same number of tokens to the same prompts; within a repeat transformers runs first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import GenerationConfig

from specdec.api import LLM
from specdec.debug.near_tie import first_difference, near_tie_limit
from specdec.errors import ConfigError
from specdec.eval.entry import run_and_write
from specdec.eval.llm_options import llm_options
from specdec.eval.lossless import first_divergence
from specdec.eval.prompts import encode, load_texts
from specdec.provenance import provenance

console = Console()
OVER_ONE_BY_ONE, OVER_TRANSFORMERS = 3.0, 1.0  # what batching must be worth
TOGETHER, ALONE, THEIRS = "together", "one by one", "generate_batch"

Answers = list[list[int]]
Variant = Callable[[Sequence[list[int]]], Answers]


def measure(config: Any) -> dict[str, Any]:
    """Time the variants `repeats` times on the same prompts, and compare their greedy ids with the solo runs'."""
    if config.repeats < 1 or config.num_requests < 1 or config.max_new_tokens < 1:
        raise ConfigError(
            f"repeats={config.repeats}, num_requests={config.num_requests}, max_new_tokens={config.max_new_tokens}; "
            "allowed: at least 1 each"
        )
    llm = LLM(config.target.name, **llm_options(config))
    texts, _ = load_texts(config.prompts)
    few = encode(llm, texts, config.prompts.chat)
    prompts = [few[i % len(few)] for i in range(config.num_requests)]
    own: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "ignore_eos": True}
    variants: dict[str, Variant] = {}
    peer = _GenerateBatch(llm.model, config) if config.transformers else None
    if peer is not None:
        variants[THEIRS] = peer
    variants[TOGETHER] = lambda batch: [done.token_ids for done in llm.generate(list(batch), **own)]
    variants[ALONE] = lambda batch: [llm.generate(prompt, **own)[0].token_ids for prompt in batch]
    try:
        times, answers, excuses = _time(variants, prompts, config.repeats)
    finally:
        if peer is not None:
            peer.close()
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "drafter": config.drafter.name,
        "excuses": excuses,
        **compare(times, config.num_requests * config.max_new_tokens),
        "identity": {name: _identity(llm, prompts, answers[ALONE], got, config) for name, got in answers.items()},
    }


def _time(
    variants: dict[str, Variant], prompts: Sequence[list[int]], repeats: int
) -> tuple[dict[str, list[float]], dict[str, Answers], dict[str, str]]:
    """Return seconds per repeat and the last answers of each variant, and why one did not run."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    answers: dict[str, Answers] = {}
    excuses: dict[str, str] = {}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("repeats", total=(repeats + 1) * len(variants))
        for repeat in range(-1, repeats):  # the first is a warm-up, with few prompts
            for name, run in variants.items():
                progress.advance(bar)
                if name in excuses:
                    continue
                batch = prompts if repeat >= 0 or name == THEIRS else prompts[:4]
                start = time.perf_counter()
                try:
                    answers[name] = run(batch)
                except Exception as error:
                    if name != THEIRS:
                        raise
                    excuses[name] = f"{type(error).__name__}: {error}"  # not every machine and model can
                    continue
                if repeat >= 0:
                    times[name].append(time.perf_counter() - start)
    for name in excuses:
        answers.pop(name, None)
        del times[name]
    return times, answers, excuses


def compare(times: dict[str, list[float]], num_tokens: int) -> dict[str, Any]:
    """Return tokens per second of each variant and the ratios, medians over repeats of paired times."""
    rates = {name: num_tokens / median(found) for name, found in times.items()}
    ratios = {
        name: median(other / ours for other, ours in zip(found, times[TOGETHER], strict=True))
        for name, found in times.items()
        if name != TOGETHER
    }
    return {"tokens_per_s": rates, "speedup_over": ratios, "seconds": times}


class _GenerateBatch:
    """transformers' continuous batching, its cache and manager made once and kept: only generating is timed."""

    def __init__(self, model: Any, config: Any) -> None:
        self._model = model
        self._options = OmegaConf.to_container(config.peer, resolve=True)
        self._generation = GenerationConfig(
            max_new_tokens=config.max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )

    def __call__(self, batch: Sequence[list[int]]) -> Answers:
        from transformers import ContinuousBatchingConfig

        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        done = self._model.generate_batch(
            inputs=[list(prompt) for prompt in batch],
            generation_config=self._generation,
            continuous_batching_config=ContinuousBatchingConfig(**self._options),
            progress_bar=False,
            persistent_manager=True,
        )
        found = [list(output.generated_tokens) for output in done.values()]
        if len(found) != len(batch) or any(len(ids) != self._generation.max_new_tokens for ids in found):
            raise RuntimeError(f"{len(found)} of {len(batch)} answers, of {sorted({len(ids) for ids in found})} tokens")
        return found

    def close(self) -> None:
        """Free what transformers keeps on the model."""
        self._model.destroy_cached_continuous_batching_manager()


def _identity(llm: LLM, prompts: Sequence[list[int]], expected: Answers, got: Answers, config: Any) -> dict[str, Any]:
    """Return how many answers are the solo run's, and at how many of the others a near-tie decided."""
    near_tie = near_tie_limit(llm.model.dtype, None)
    parted = [i for i, ids in enumerate(got) if first_difference(expected[i], ids) is not None]
    found = [first_divergence(llm, i, prompts[i], expected[i], got[i], near_tie) for i in parted]
    ties = sum(d is not None and d.is_near_tie for d in found)
    return {"equal": len(got) - len(parted), "of": len(got), "near_ties": ties, "parted": parted}


def show(result: dict[str, Any]) -> None:
    """Print the table and the verdict."""
    config = result["config"]
    table = Table(
        title=f"{config['num_requests']} requests of {config['max_new_tokens']} tokens; drafter {result['drafter']}, "
        f"median of {config['repeats']}"
    )
    for column in ("", "tokens/s", "together over it", "ids = one by one", "near-ties"):
        table.add_column(column, justify="right" if column else "left")
    for name, rate in result["tokens_per_s"].items():
        ratio = result["speedup_over"].get(name)
        same = result["identity"][name]
        shown = "" if ratio is None else f"{ratio:.2f}x"
        table.add_row(name, f"{rate:,.1f}", shown, f"{same['equal']}/{same['of']}", str(same["near_ties"]))
    console.print(table)
    for name, why in result["excuses"].items():
        console.print(f"{name} did not run here: {why}", highlight=False)
    console.print(
        f"to be worth it: {OVER_ONE_BY_ONE:g}x over one by one, {OVER_TRANSFORMERS:g}x over transformers",
        highlight=False,
    )


@hydra.main(version_base="1.3", config_path="pkg://specdec.configs", config_name="batching")
def main(config: DictConfig) -> None:
    """Measure, print and write."""
    run_and_write(config, "batching", measure, show)


if __name__ == "__main__":
    main()

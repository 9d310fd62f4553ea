"""What sharing a batch buys: requests that arrive together, one by one, and transformers' own continuous batching.

python -m specdec.eval.batching

All three give the same number of tokens to the same prompts; within a repeat transformers runs first. Exit code 0 =
measured, and the ids of those that ran together are those of one by one but for near-ties, 1 = they are not, 2 = bad
input. What batching is worth depends on the machine, and is printed.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import GenerationConfig

from specdec.api import LLM
from specdec.debug.near_tie import near_tie_limit
from specdec.errors import ConfigError
from specdec.eval.entry import run_and_write
from specdec.eval.hydra_main import hydra_main
from specdec.eval.llm_options import llm_options
from specdec.eval.lossless import compare_answers, num_near_ties, only_near_ties
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
    lengths = {len(ids) for name in (TOGETHER, ALONE) for ids in answers[name]}
    if lengths != {config.max_new_tokens}:
        raise ConfigError(
            f"max_new_tokens={config.max_new_tokens}, and answers have {sorted(lengths)} tokens: the model's context "
            "ends before; lower max_new_tokens"
        )
    near_tie = near_tie_limit(llm.model.dtype, config.near_tie)
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "drafter": config.drafter.name,
        "excuses": excuses,
        **compare(times, config.num_requests * config.max_new_tokens),
        "identity": {
            name: compare_answers(llm, prompts, answers[ALONE], got, near_tie) for name, got in answers.items()
        },
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


def show(result: dict[str, Any]) -> bool:
    """Print the table and the verdicts; return whether those that ran together got the ids of one by one."""
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
        table.add_row(name, f"{rate:,.1f}", shown, f"{same['equal']}/{same['of']}", str(num_near_ties(same)))
    console.print(table)
    for name, why in result["excuses"].items():
        console.print(f"{name} did not run here: {why}", highlight=False)
    console.print(
        f"to be worth it: {OVER_ONE_BY_ONE:g}x over one by one, {OVER_TRANSFORMERS:g}x over transformers",
        highlight=False,
    )
    same = only_near_ties(result["identity"][TOGETHER])
    console.print(f"answers together are {'' if same else 'NOT '}those of one by one, near-ties aside", highlight=False)
    return same


@hydra_main("batching")
def main(config: DictConfig) -> None:
    """Measure, print, write; the exit code says whether answers are the same."""
    sys.exit(0 if run_and_write(config, "batching", measure, show) else 1)


if __name__ == "__main__":
    main()

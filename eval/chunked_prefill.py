"""What a long prompt does to those who are being answered: chunk sizes from the best TTFT to the smoothest ITL.

python -m specdec.eval.chunked_prefill

Some requests decode; then a long prompt arrives. Per chunk size: the longest gap between two emissions of the running
ones while it is prefilled, and its own TTFT. Exit code 0 = measured, 2 = bad input; which sizes are worth it depends on
the machine, and is printed. No answers are compared: `specdec.eval.batching` and the tests do that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdec import Engine, Piece
from specdec.errors import ConfigError
from specdec.eval.entry import run_and_write
from specdec.eval.hydra_main import hydra_main
from specdec.eval.llm_options import llm_options
from specdec.eval.prompts import encode, load_texts, long_prompt
from specdec.provenance import provenance

console = Console()
# What the trade must be worth at one size at least: see `compare`.
GAP_CUT, TTFT_COST = 3.0, 0.25
_PLENTY = 1024  # tokens: no running request is to end meanwhile


def measure(config: Any) -> dict[str, Any]:
    """Run every chunk size `repeats` times, in rotated order, and return medians; the first size is the baseline."""
    sizes = list(config.chunk_tokens)
    if config.repeats < 1 or config.num_running < 1 or config.prompt_tokens < 2 or len(set(sizes)) < 2:
        raise ConfigError(
            f"repeats={config.repeats}, num_running={config.num_running}, prompt_tokens={config.prompt_tokens}, "
            f"chunk_tokens={sizes}; allowed: at least 1, 1, 2, and two different sizes"
        )
    options = llm_options(config)
    first = Engine(config.target.name, **{**options, "prefill_chunk_tokens": sizes[0]})
    engines = {sizes[0]: first}
    for size in sizes[1:]:
        own = {**options, "dtype": None, "prefill_chunk_tokens": size}  # the model is loaded
        engines[size] = Engine(first.llm.model, tokenizer=first.llm.tokenizer, **own)
    texts, _ = load_texts(config.prompts)
    prompts = encode(first.llm, texts, config.prompts.chat)
    samples: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("repeats", total=(config.repeats + 1) * len(sizes))
        for repeat in range(-1, config.repeats):  # the first is a warm-up
            for turn in range(len(sizes)):
                size = sizes[(repeat + turn) % len(sizes)]
                sample = disturb(engines[size], prompts, config.num_running, config.prompt_tokens, max(repeat, 0))
                if repeat >= 0:
                    samples[size].append(sample)
                progress.advance(bar)
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "drafter": config.drafter.name,
        **compare(samples),
    }


def compare(samples: dict[int, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return a row per chunk size with medians and their ratios to the first size's, and whether a size is worth it.

    Args:
        samples: chunk size -> (longest gap, TTFT) of each repeat, seconds.
    """
    middle = {size: (median(g for g, _ in found), median(t for _, t in found)) for size, found in samples.items()}
    gap, ttft = next(iter(middle.values()))
    rows: list[dict[str, Any]] = [
        {
            "chunk_tokens": size,
            "longest_gap_s": own_gap,
            "ttft_s": own_ttft,
            "gap_cut": gap / own_gap,
            "ttft_cost": own_ttft / ttft - 1,
            "samples": [list(sample) for sample in samples[size]],
        }
        for size, (own_gap, own_ttft) in middle.items()
    ]
    worth = [r["chunk_tokens"] for r in rows if r["gap_cut"] >= GAP_CUT and r["ttft_cost"] < TTFT_COST]
    return {"rows": rows, "worth_it": worth}


def disturb(
    engine: Engine, prompts: Sequence[list[int]], num_running: int, prompt_tokens: int, number: int
) -> tuple[float, float]:
    """Let some requests decode, then a long prompt arrive; return their longest gap meanwhile, and its TTFT.

    Args:
        engine: without other requests.
        prompts: of the running ones; the long one is made of them.
        num_running: how many decode.
        prompt_tokens: of the long one.
        number: the long prompt begins with that prompt.

    Raises:
        ConfigError: a running one ended before the long prompt's first token, so that nobody waited for it.
    """
    running = [
        engine.add_request(prompts[i % len(prompts)], max_new_tokens=_PLENTY, ignore_eos=True)
        for i in range(num_running)
    ]
    last: dict[int, float] = {}
    counts = dict.fromkeys(running, 0)
    while min(counts.values()) < 8:  # all of them are in the middle of their answers
        for piece in _going_on(engine.step(), running):
            counts[piece.index] += len(piece.token_ids)
            last[piece.index] = time.perf_counter()
    start = time.perf_counter()
    late = engine.add_request(long_prompt(prompts, prompt_tokens, number), max_new_tokens=2, ignore_eos=True)
    longest, ttft = 0.0, None
    while ttft is None:
        pieces = _going_on(engine.step(), running)
        now = time.perf_counter()
        for piece in pieces:
            if piece.index == late:
                ttft = now - start
            else:
                longest = max(longest, now - last[piece.index])
                last[piece.index] = now
    for request_id in (*running, late):
        engine.abort(request_id)
    return longest, ttft


def _going_on(pieces: list[Piece], running: Sequence[int]) -> list[Piece]:
    for piece in pieces:
        if piece.index in running and piece.completion is not None:
            raise ConfigError(
                f"a running request ended after {len(piece.completion.token_ids)} tokens ({piece.finish_reason}), "
                "before the long prompt had its first, so that there was no gap to measure; lower prompt_tokens, or "
                f"take a target with room for {_PLENTY} new tokens"
            )
    return pieces


def show(result: dict[str, Any]) -> None:
    """Print the table and which sizes are worth it."""
    config = result["config"]
    table = Table(
        title=f"{config['num_running']} requests decode, a prompt of {config['prompt_tokens']:,} tokens arrives; "
        f"drafter {result['drafter']}, median of {config['repeats']}"
    )
    for column in ("prefill_chunk_tokens", "longest gap ms", "cut", "TTFT ms", "more"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        table.add_row(
            f"{row['chunk_tokens']:,}",
            f"{1e3 * row['longest_gap_s']:,.1f}",
            f"{row['gap_cut']:.2f}x",
            f"{1e3 * row['ttft_s']:,.1f}",
            f"{row['ttft_cost']:+.1%}",
        )
    console.print(table)
    worth = ", ".join(map(str, result["worth_it"])) or "none"
    console.print(
        f"gap of the running ones cut at least {GAP_CUT:g}x at under {TTFT_COST:.0%} more TTFT: {worth}",
        highlight=False,
    )


@hydra_main("chunked_prefill")
def main(config: DictConfig) -> None:
    """Measure, print and write."""
    run_and_write(config, "chunked_prefill", measure, show)


if __name__ == "__main__":
    main()

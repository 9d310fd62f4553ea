"""What a prefix hit saves: TTFT of a prompt whose beginning was seen before, and of one whose beginning was not.

python -m specdec.eval.prefix
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from specdec import Engine
from specdec.errors import ConfigError
from specdec.eval.entry import run_and_write
from specdec.eval.llm_options import llm_options
from specdec.eval.prompts import encode, load_texts, long_prompt
from specdec.provenance import provenance

console = Console()
SPEEDUP = 5.0  # what a hit must be worth
_OPTIONS: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}


def measure(config: Any) -> dict[str, Any]:
    """Send pairs of prompts that share a beginning, cold then warm, and return both TTFTs and whether answers agree."""
    if config.repeats < 1 or config.prefix_tokens < 1 or config.suffix_tokens < 1:
        raise ConfigError(
            f"repeats={config.repeats}, prefix_tokens={config.prefix_tokens}, suffix_tokens={config.suffix_tokens}; "
            "allowed: at least 1 each"
        )
    engine = Engine(config.target.name, **{**llm_options(config), "prefix_caching": True})
    texts, _ = load_texts(config.prompts)
    prompts = encode(engine.llm, texts, config.prompts.chat)
    pairs = []
    for repeat in range(-1, config.repeats):  # the first is a warm-up
        # First tokens of their own: prompts of one chat template begin alike, and here only pairs may.
        prefix = [repeat + 2, *long_prompt(prompts, config.prefix_tokens - 1, max(repeat, 0))]
        ends = [[token, *long_prompt(prompts, config.suffix_tokens - 1)] for token in (1, 2)]
        cold = ask(engine, [*prefix, *ends[0]], config.max_new_tokens)
        warm = ask(engine, [*prefix, *ends[1]], config.max_new_tokens)
        if repeat >= 0:
            pairs.append({"cold": cold, "warm": warm})
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "drafter": config.drafter.name,
        "pairs": pairs,
        "cold_ttft_s": median(p["cold"]["ttft_s"] for p in pairs),
        "warm_ttft_s": median(p["warm"]["ttft_s"] for p in pairs),
        "speedup": median(p["cold"]["ttft_s"] / p["warm"]["ttft_s"] for p in pairs),
        "acceptance_length": {kind: _mean_length(pairs, kind) for kind in ("cold", "warm")},
    }


def ask(engine: Engine, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
    """Return TTFT, tokens taken from the prefix cache, and decode counters of one prompt alone."""
    engine.add_request(prompt, max_new_tokens=max_new_tokens, **_OPTIONS)
    done = None
    while engine.has_unfinished:
        done = next((p.completion for p in engine.step() if p.completion is not None), done)
    assert done is not None, "the only request ends"
    stats = done.stats
    return {
        "ttft_s": stats.ttft_s,
        "num_cached_tokens": stats.num_cached_tokens,
        "num_steps": stats.num_steps,
        "num_emitted_tokens": stats.num_emitted_tokens,
    }


def _mean_length(pairs: list[dict[str, Any]], kind: str) -> float | None:
    steps = sum(p[kind]["num_steps"] for p in pairs)
    return sum(p[kind]["num_emitted_tokens"] for p in pairs) / steps if steps else None


def show(result: dict[str, Any]) -> None:
    """Print the table and the verdict."""
    config = result["config"]
    table = Table(
        title=f"prompts of {config['prefix_tokens']:,} + {config['suffix_tokens']} tokens; drafter "
        f"{result['drafter']}, median of {config['repeats']}"
    )
    for column in ("prefix", "TTFT ms", "tokens from the cache", "acceptance length"):
        table.add_column(column, justify="right" if column != "prefix" else "left")
    for kind, name in (("cold", "not seen before"), ("warm", "seen before")):
        found = median(p[kind]["num_cached_tokens"] for p in result["pairs"])
        length = result["acceptance_length"][kind]
        shown = "-" if length is None else f"{length:.2f}"
        table.add_row(name, f"{1e3 * result[f'{kind}_ttft_s']:,.1f}", f"{found:,.0f}", shown)
    console.print(table)
    console.print(
        f"a hit is {result['speedup']:.1f}x faster to the first token (to be worth it: {SPEEDUP:g}x)", highlight=False
    )


@hydra.main(version_base="1.3", config_path="pkg://specdec.configs", config_name="prefix")
def main(config: DictConfig) -> None:
    """Measure, print and write."""
    run_and_write(config, "prefix", measure, show)


if __name__ == "__main__":
    main()

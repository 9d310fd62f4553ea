"""What a prefix hit saves: TTFT of a prompt whose beginning was seen before, and of one whose beginning was not.

    python -m specdec.eval.prefix drafter=eagle3

The same prompts also go to an engine without prefix caching, and answers and acceptance are compared. Exit code 0 = a
hit changes neither (near-ties aside), 1 = answers differ or acceptance falls behind a hit, or there was no hit; 2 = bad
input. What a hit is worth depends on the machine, and is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from specdec import Engine
from specdec.debug.near_tie import near_tie_limit
from specdec.errors import ConfigError
from specdec.eval.entry import run_and_write
from specdec.eval.hydra_main import hydra_main
from specdec.eval.llm_options import llm_options
from specdec.eval.lossless import compare_answers, num_near_ties, only_near_ties
from specdec.eval.prompts import encode, load_texts, long_prompt
from specdec.provenance import provenance

console = Console()
SPEEDUP = 5.0  # what a hit must be worth
FALL = 0.05  # of the acceptance length, that rounding may cost: in the drafter too a near-tie can fall either way
_OPTIONS: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}


def measure(config: Any) -> dict[str, Any]:
    """Send pairs of prompts that share a beginning; return TTFTs, cold and warm, and whether hits change answers."""
    if config.repeats < 1 or config.prefix_tokens < 1 or config.suffix_tokens < 1:
        raise ConfigError(
            f"repeats={config.repeats}, prefix_tokens={config.prefix_tokens}, suffix_tokens={config.suffix_tokens}; "
            "allowed: at least 1 each"
        )
    options = llm_options(config)
    engine = Engine(config.target.name, **{**options, "prefix_caching": True})
    own = {**options, "dtype": None, "prefix_caching": False}  # the model is loaded
    uncached = Engine(engine.llm.model, tokenizer=engine.llm.tokenizer, **own)
    texts, _ = load_texts(config.prompts)
    prompts = encode(engine.llm, texts, config.prompts.chat)
    pairs, hits = [], []
    for repeat in range(-1, config.repeats):  # the first is a warm-up
        # First tokens of their own: prompts of one chat template begin alike, and here only pairs may.
        prefix = [repeat + 2, *long_prompt(prompts, config.prefix_tokens - 1, max(repeat, 0))]
        seed, hit = ([*prefix, token, *long_prompt(prompts, config.suffix_tokens - 1)] for token in (1, 2))
        pair = {
            "cold": ask(engine, seed, config.max_new_tokens),
            "warm": ask(engine, hit, config.max_new_tokens),
            "uncached": ask(uncached, hit, config.max_new_tokens),
        }
        if repeat >= 0:
            pairs.append(pair)
            hits.append(hit)
    expected, got = ([p[kind]["token_ids"] for p in pairs] for kind in ("uncached", "warm"))
    near_tie = near_tie_limit(engine.llm.model.dtype, config.near_tie)
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "drafter": config.drafter.name,
        "pairs": pairs,
        "cold_ttft_s": median(p["cold"]["ttft_s"] for p in pairs),
        "warm_ttft_s": median(p["warm"]["ttft_s"] for p in pairs),
        "speedup": median(p["cold"]["ttft_s"] / p["warm"]["ttft_s"] for p in pairs),
        "identity": compare_answers(uncached.llm, hits, expected, got, near_tie),
        **compare(pairs),
    }


def compare(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return acceptance lengths, whether every warm prompt hit, and whether acceptance falls behind hits.

    Acceptance is compared over the pairs with equal answers, as other texts are accepted otherwise.
    """
    same = [p for p in pairs if p["warm"]["token_ids"] == p["uncached"]["token_ids"]]
    warm, uncached = _mean_length(same, "warm"), _mean_length(same, "uncached")
    return {
        "acceptance_length": {kind: _mean_length(pairs, kind) for kind in ("cold", "warm", "uncached")},
        "all_hit": all(p["warm"]["num_cached_tokens"] > 0 for p in pairs),
        "acceptance_falls": warm is not None and uncached is not None and warm < (1 - FALL) * uncached,
    }


def ask(engine: Engine, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
    """Return the answer to one prompt alone, its TTFT, tokens taken from the prefix cache and decode counters."""
    engine.add_request(prompt, max_new_tokens=max_new_tokens, **_OPTIONS)
    done = None
    while engine.has_unfinished:
        done = next((p.completion for p in engine.step() if p.completion is not None), done)
    assert done is not None, "the only request ends"
    stats = done.stats
    return {
        "token_ids": done.token_ids,
        "ttft_s": stats.ttft_s,
        "num_cached_tokens": stats.num_cached_tokens,
        "num_steps": stats.num_steps,
        "num_emitted_tokens": stats.num_emitted_tokens,
    }


def _mean_length(pairs: list[dict[str, Any]], kind: str) -> float | None:
    steps = sum(p[kind]["num_steps"] for p in pairs)
    return sum(p[kind]["num_emitted_tokens"] for p in pairs) / steps if steps else None


def show(result: dict[str, Any]) -> bool:
    """Print the table and the verdicts; return whether hits changed neither answers nor acceptance."""
    config, same = result["config"], result["identity"]
    table = Table(
        title=f"prompts of {config['prefix_tokens']:,} + {config['suffix_tokens']} tokens; drafter "
        f"{result['drafter']}, median of {config['repeats']}"
    )
    for column in ("prefix", "TTFT ms", "tokens from the cache", "acceptance length"):
        table.add_column(column, justify="right" if column != "prefix" else "left")
    kinds = (("cold", "not seen before"), ("warm", "seen before"), ("uncached", "the same, without prefix caching"))
    for kind, name in kinds:
        found = median(p[kind]["num_cached_tokens"] for p in result["pairs"])
        ttft = median(p[kind]["ttft_s"] for p in result["pairs"])
        length = result["acceptance_length"][kind]
        table.add_row(name, f"{1e3 * ttft:,.1f}", f"{found:,.0f}", "-" if length is None else f"{length:.2f}")
    console.print(table)
    good = only_near_ties(same) and result["all_hit"] and not result["acceptance_falls"]
    for line in (
        f"a hit is {result['speedup']:.1f}x faster to the first token (to be worth it: {SPEEDUP:g}x)",
        f"answers behind a hit: {same['equal']} of {same['of']} those without prefix caching, {num_near_ties(same)} "
        "part at a near-tie",
        f"verdict: {'good' if good else 'NOT good'}"
        + ("" if result["all_hit"] else "; a prompt seen before was not found: prefix_tokens is less than a block")
        + (f"; acceptance falls by more than {FALL:.0%} behind a hit" if result["acceptance_falls"] else ""),
    ):
        console.print(line, highlight=False)
    return good


@hydra_main("prefix")
def main(config: DictConfig) -> None:
    """Measure, print, write; the exit code says whether hits change anything but time."""
    sys.exit(0 if run_and_write(config, "prefix", measure, show) else 1)


if __name__ == "__main__":
    main()

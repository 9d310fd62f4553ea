"""Requests that arrive over time against an engine in this process: latency, goodput and memory under a load.

    python -m specdec.eval.serve load.rate=2 load.num_requests=100 drafter=self_int8
    python -m specdec.eval.serve load.rate=4 load.duration_s=1800 load.abort_share=0.2 engine.max_waiting=64

`specdec bench serve` does the same. Exit code 0, or 1 if the KV cache's books were wrong, 2 = bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from specdec import Engine, InputError, OutOfCacheError, QueueFullError
from specdec.eval.entry import run_and_write
from specdec.eval.hydra_main import hydra_main
from specdec.eval.llm_options import llm_options
from specdec.eval.load import Load, LoadConfig, Moment, Run
from specdec.eval.outcomes import summarise
from specdec.eval.prompts import encode, load_texts
from specdec.eval.serve_plot import check_plot_path, plot_serve
from specdec.eval.serve_report import notes, tables
from specdec.provenance import provenance
from specdec.stats import EngineStats

console = Console()
_MOST_GAPS = 20_000  # in a result: evenly taken of all, for the picture
_WARM_UP_TOKENS, _MOST_WARM_UP = 8, 16


def serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    load: LoadConfig,
    model: str = "",
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run a load on an engine that has nothing else to do and return everything that was measured.

    Args:
        engine: with at most `max_waiting` requests in its queue; more are refused and counted.
        prompts: token ids of each.
        load: what is asked.
        model: the model's name, for the record.
        settings: what the engine was built with, for the record.

    Raises:
        ConfigError: a burst has no number of requests.
        InputError: there are no prompts.
    """
    arriving = load.arriving(prompts)
    _warm_up(engine, prompts)
    before = engine.metrics().engine
    run = Load(engine, load).run(arriving)
    stats = engine.metrics().engine
    outcomes = run.outcomes
    gaps = [gap for o in outcomes for gap in o.gaps_s]
    summary = summarise(outcomes, run.wall_s, load.slo_ttft_s, load.slo_tpot_s)
    core = engine.llm.engine
    return {
        "provenance": provenance(),
        "model": model,
        "settings": dict(settings or {}),
        "drafter": core.drafter.name,
        "lossless": core.verifiers.sampled.lossless,
        "engine": asdict(core.config),
        "load": asdict(load),
        "wall_s": run.wall_s,
        "is_interrupted": run.is_interrupted,
        "fault": run.fault,
        "num_checks": run.num_checks,
        "phases": _phases(before, stats),
        "num_steps": stats.num_steps - before.num_steps,
        **summary,
        "kv": _kv(engine, run),
        "rss_bytes": _memory(run.timeline),
        "timeline": [asdict(moment) for moment in run.timeline],
        "gaps_s": gaps[:: len(gaps) // _MOST_GAPS + 1],
        "requests": [outcome.as_dict() for outcome in outcomes],
    }


def _warm_up(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Let kernels be chosen and memory be taken before anything is timed, with one request and with several."""
    most = min(engine.llm.engine.config.max_batch_size, _MOST_WARM_UP)
    for number in dict.fromkeys((1, most)):
        for i in range(number):
            # No prompt of the load begins like it.
            backwards = list(reversed(prompts[i % len(prompts)]))
            with suppress(QueueFullError, InputError, OutOfCacheError):  # the load will say so
                engine.add_request(backwards, max_new_tokens=_WARM_UP_TOKENS, ignore_eos=True)
        while engine.has_unfinished:
            engine.step()


def _phases(before: EngineStats, after: EngineStats) -> dict[str, dict[str, float | None]]:
    """Return tokens and wall time of the two phases; steps that did both are split by rows."""
    found: dict[str, dict[str, float | None]] = {}
    for phase in ("prefill", "decode"):
        tokens = getattr(after, f"num_{phase}_tokens") - getattr(before, f"num_{phase}_tokens")
        seconds = getattr(after, f"{phase}_s") - getattr(before, f"{phase}_s")
        found[phase] = {
            "num_tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds if seconds else None,
        }
    return found


def _kv(engine: Engine, run: Run) -> dict[str, Any]:
    """Return what requests held of the KV cache, in blocks between steps, and how many blocks there may be."""
    cache, at_end = engine.llm.engine.target.cache, engine.kv_usage()
    return {
        "block_tokens": cache.block_tokens,
        "most_blocks": int(at_end["num_blocks"]) if cache.max_bytes is not None else None,  # None: no limit
        "most_used": run.most_kv,
        "mean_used": fmean(moment.kv_used for moment in run.timeline) if run.timeline else None,
        "num_left": at_end["num_used"],  # blocks that somebody holds after everybody has gone: none
        "num_left_drafter": (engine.metrics().drafter_kv or {"num_used": 0})["num_used"],  # in its own cache: none
        "at_end": at_end,
    }


def _memory(timeline: Sequence[Moment]) -> dict[str, int]:
    """Return the process's resident memory on the way; `timeline` is evenly spread and has at least one moment."""
    rss = [moment.rss_bytes for moment in timeline] or [0]
    return {"start": rss[0], "middle": rss[len(rss) // 2], "end": rss[-1], "peak": max(rss)}


def measure(config: Any) -> dict[str, Any]:
    """Build the engine a config describes, load it and return what was measured."""
    load = LoadConfig(**OmegaConf.to_container(config.load, resolve=True))
    if config.plot is not None:
        check_plot_path(Path(config.plot))
    options = llm_options(config)
    engine = Engine(config.target.name, **options)
    texts, _ = load_texts(config.prompts)
    found = serve(engine, encode(engine.llm, texts, config.prompts.chat), load, config.target.name, options)
    return {"config": OmegaConf.to_container(config, resolve=True), **found}


def show(result: dict[str, Any], to: Console = console) -> bool:
    """Print the tables of a result; return whether the KV cache's books were right."""
    for table in tables(result):
        to.print(table)
    for note in notes(result):
        to.print(note, highlight=False, style="dim")
    return result["fault"] is None


@hydra_main("serve")
def main(config: DictConfig) -> None:
    """Measure, print, draw, write; the exit code tells whether the KV cache's books were right."""

    def show_and_draw(result: dict[str, Any]) -> bool:
        good = show(result)
        path = Path(config.plot or Path(HydraConfig.get().runtime.output_dir) / "serve.png")
        console.print(f"drawn to {plot_serve(result, path)}", highlight=False)
        return good

    sys.exit(0 if run_and_write(config, "serve", measure, show_and_draw) else 1)


if __name__ == "__main__":
    main()

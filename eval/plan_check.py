"""The planner's floors against what the engine does on this machine.

    python -m specdec.eval.plan_check

Exit code 0 = measured, 2 = bad input; how near the floors are is for the reader of the table.
"""

from __future__ import annotations

import shlex
from itertools import product
from statistics import median
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from specdec.api import LLM
from specdec.errors import ConfigError
from specdec.eval.entry import markdown_table, run_and_write
from specdec.eval.hydra_main import hydra_main
from specdec.eval.llm_options import engine_options
from specdec.eval.prompts import encode, load_texts
from specdec.planner import Device, PlannedModel, Workload, make_plan, read_model
from specdec.planner.names import canonical
from specdec.planner.speculation import tokens_per_step
from specdec.planner.this_device import this_device
from specdec.provenance import provenance

console = Console()
_COLUMNS = (
    *("drafter", "batch", "prompt", "TTFT floor, ms", "TTFT, ms", "TPOT floor, ms", "TPOT, ms"),
    *("speedup planned", "speedup"),
)


def measure(config: Any) -> dict[str, Any]:
    """Run every batch and prompt length with every drafter, and plan the same.

    Raises:
        ConfigError: nothing or too few tokens to time, or "none", which speedups are over, is not the first drafter.
    """
    for name, values in (
        ("repeats", [config.repeats]),
        ("batches", config.batches),
        ("prompt_tokens", config.prompt_tokens),
    ):
        if not values or not all(isinstance(n, int) and n >= 1 for n in values):
            raise ConfigError(f"{name}={config[name]}; allowed: integers >= 1, one at least")
    if config.max_new_tokens < 8:
        raise ConfigError(f"max_new_tokens={config.max_new_tokens}; allowed: at least 8, or there is little to time")
    if not config.drafters or config.drafters[0] != "none":
        raise ConfigError("drafters must begin with none: speedups are over it")
    engine = engine_options(config)
    base = LLM(config.target.name, dtype=config.target.dtype, **engine)
    llms = {name: LLM(base.model, drafter=name, tokenizer=base.tokenizer, **engine) for name in config.drafters}
    model, device = read_model(config.target.name), this_device(canonical(str(base.engine.target.dtype)))
    texts, _ = load_texts(config.prompts)
    ids = [token for prompt in encode(base, texts, config.prompts.chat) for token in prompt]
    rows: list[dict[str, Any]] = []
    for batch, prompt_tokens in product(config.batches, config.prompt_tokens):
        for name, llm in llms.items():
            measured = _timed(llm, ids, batch, prompt_tokens, config)
            planned = _planned(model, device, llm, batch, prompt_tokens, config, measured["acceptance_length"])
            rows.append({"drafter": name, "batch": batch, "prompt_tokens": prompt_tokens, **planned, **measured})
            plain = next(r for r in rows if (r["batch"], r["prompt_tokens"]) == (batch, prompt_tokens))
            rows[-1]["speedup"] = plain["tpot_s"] / rows[-1]["tpot_s"]
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
        "flops_per_s": device.flops_per_s,
        "rows": rows,
    }


def _timed(llm: LLM, ids: list[int], batch: int, prompt_tokens: int, config: Any) -> dict[str, float]:
    """Return medians over repeats: the last request's TTFT, and TPOT while all requests decode."""
    times: list[dict[str, float]] = []
    for repeat in range(config.repeats + 1):
        first = repeat * batch * 17  # prompts differ, so that no cache of prefixes helps
        prompts = [_slice(ids, first + 17 * i, prompt_tokens) for i in range(batch)]
        done = llm.generate(prompts, max_new_tokens=config.max_new_tokens, ignore_eos=True)
        stats = [completion.stats for completion in done]
        begun = max(s.emissions[0][0] for s in stats)
        later = [[e for e in s.emissions if e[0] > begun] for s in stats]
        gaps = [(e[-1][0] - begun) / sum(count for _, count in e) for e in later if e]
        times.append(
            {
                "ttft_s": max(s.ttft_s or 0.0 for s in stats),
                "tpot_s": median(gaps),
                "acceptance_length": sum(s.num_emitted_tokens for s in stats) / sum(s.num_steps for s in stats),
            }
        )
    return {name: median(t[name] for t in times[1:]) for name in times[0]}  # the first warms up


def _slice(ids: list[int], first: int, length: int) -> list[int]:
    return [ids[(first + i) % len(ids)] for i in range(length)]


def _planned(
    model: PlannedModel, device: Device, llm: LLM, batch: int, prompt_tokens: int, config: Any, length: float
) -> dict[str, float]:
    drafts = llm.engine.config.max_draft_tokens or 0
    name = llm.engine.drafter.name
    load = Workload(
        batch=batch,
        context=prompt_tokens + config.max_new_tokens // 2,  # halfway through the answer
        prompt_tokens=prompt_tokens,
        prefill_chunk_tokens=llm.engine.config.prefill_chunk_tokens,
        drafter=name,
        acceptance=_acceptance(length, drafts),
    )
    plan = make_plan(model, device, load)
    choice = plan.speculation.at(batch, 0 if name == "none" else min(drafts, plan.speculation.most))
    return {
        "ttft_floor_s": plan.last_ttft_floor_s,
        "tpot_floor_s": choice.tpot_s,
        "planned_speedup": choice.speedup,
        "acceptance": plan.speculation.acceptance,
    }


def _acceptance(length: float, drafts: int) -> float:
    """Return the acceptance per token that gives a measured number of tokens per step."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_step(middle, drafts) < length else (low, middle)
    return low


def show(result: dict[str, Any]) -> None:
    """Print the table of a result."""
    console.print(_machine(result), highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "drafter" else "right", no_wrap=column == "drafter")
    for cells in _cells(result):
        table.add_row(*cells)
    console.print(table)


def markdown(result: dict[str, Any]) -> str:
    """Return what docs/planner.md has of a run: its command, what the machine does per second, and the table."""
    table = markdown_table([_COLUMNS, *_cells(result)])
    return f"```bash\n{_command(result)}\n```\n\n{_machine(result)}:\n\n{table}"


def _command(result: dict[str, Any]) -> str:
    """Return the command that ran, but for where it wrote to."""
    overrides = [word for word in result["provenance"]["argv"][1:] if not word.startswith("output=")]
    return shlex.join(["python", "-m", "specdec.eval.plan_check", *overrides])


def _machine(result: dict[str, Any]) -> str:
    ((dtype, rate),) = result["flops_per_s"].items()
    where = result["provenance"]
    return (
        f"{result['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s read and {rate / 1e9:,.0f} GFLOP/s of square products in "
        f"{dtype}, as measured in the same run on {where['gpu'] or where['cpu']} ({where['num_threads']} threads)"
    )


def _cells(result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            row["drafter"],
            str(row["batch"]),
            str(row["prompt_tokens"]),
            *(f"{1e3 * row[name]:.1f}" for name in ("ttft_floor_s", "ttft_s", "tpot_floor_s", "tpot_s")),
            f"{row['planned_speedup']:.2f}x",
            f"{row['speedup']:.2f}x",
        ]
        for row in result["rows"]
    ]


@hydra_main("plan_check")
def main(config: DictConfig) -> None:
    """Measure, print and write."""
    run_and_write(config, "plan_check", measure, show, markdown)


if __name__ == "__main__":
    main()

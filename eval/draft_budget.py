"""What drafting is worth as the batch grows: real drafters, static and cost-aware, against no drafting.

python -m specdec.eval.draft_budget
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdec.api import LLM, Completion
from specdec.errors import ConfigError
from specdec.eval.batch_run import BatchRun, over
from specdec.eval.entry import markdown_table, run_and_write
from specdec.eval.hydra_main import hydra_main
from specdec.eval.llm_options import llm_options
from specdec.eval.prompts import encode, load_texts
from specdec.provenance import provenance
from specdec.stats import total

console = Console()
POLICIES = ("static", "cost_aware")
NONE, AGAIN = "none", "none again"  # twice: what the machine makes of two equal runs is the noise
_HEAD = ("drafter", "batch", "policy", "over none", "none again", "drafts/step", "accepted", "ids of none")

Row = dict[str, Any]


def measure(config: Any) -> Row:
    """Time every drafter and policy at every batch size against the same engine without drafting.

    Raises:
        ConfigError: there is nothing to run.
    """
    if config.rounds < 1 or config.max_new_tokens < 2 or any(size < 1 for size in config.batch_sizes):
        raise ConfigError(
            f"rounds={config.rounds}, max_new_tokens={config.max_new_tokens}, batch_sizes={list(config.batch_sizes)}; "
            "allowed: at least 1 round, 2 tokens, the first of which is prefill's, and batches of at least 1"
        )
    options = llm_options(config)
    none = LLM(config.target.name, drafter="none", **options)
    texts, _ = load_texts(config.prompts)
    prompts = encode(none, texts, config.prompts.chat)
    shared = {**options, "tokenizer": none.tokenizer}
    del shared["dtype"]  # the model is loaded already
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("batches", total=len(config.drafters) * len(config.batch_sizes))
        for drafter in config.drafters:
            # One engine for all sizes, as in a service: what a policy has learned at one load it brings to the next.
            llms = {p: LLM(none.model, **{**shared, "drafter": drafter, "draft_length": p}) for p in POLICIES}
            for size in config.batch_sizes:
                batch = [prompts[i % len(prompts)] for i in range(size)]
                rows += _cell(drafter, {NONE: none, AGAIN: none, **llms}, batch, config)
                progress.advance(bar)
    return {"config": OmegaConf.to_container(config, resolve=True), "provenance": provenance(), "rows": rows}


def _cell(drafter: str, llms: dict[str, LLM], batch: Sequence[list[int]], config: Any) -> list[Row]:
    """Return a row per policy at one batch size."""
    names = list(llms)
    samples: dict[str, list[BatchRun]] = {name: [] for name in names}
    answers: dict[str, list[Completion]] = {}
    for number in range(-1, config.rounds):  # the first is a warm-up
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            sample, answers[name] = _run(llms[name], batch, number, config.max_new_tokens)
            if number >= 0:
                samples[name].append(sample)
    plain = samples[NONE] + samples[AGAIN]
    noise = over(samples[NONE], samples[AGAIN])
    rows = []
    for policy in POLICIES:
        stats = total(done.stats for done in answers[policy])
        rows.append(
            {
                "drafter": drafter,
                "batch_size": len(batch),
                "policy": policy,
                "ratio": over(plain, samples[policy] * 2),
                "noise": noise,
                "drafts_per_step": stats.num_draft_tokens / stats.num_steps,
                "acceptance_rate": stats.acceptance_rate,
                "num_equal": sum(
                    a.token_ids == b.token_ids for a, b in zip(answers[NONE], answers[policy], strict=True)
                ),
                "seconds": [sample.decode_s for sample in samples[policy]],
                "none_seconds": [sample.decode_s for sample in samples[NONE]],
            }
        )
    return rows


def _run(llm: LLM, batch: Sequence[list[int]], number: int, max_new_tokens: int) -> tuple[BatchRun, list[Completion]]:
    done = llm.generate(list(batch), max_new_tokens=max_new_tokens, ignore_eos=True)
    return BatchRun.of(number, [completion.stats for completion in done]), done


def lines(result: Row) -> list[list[str]]:
    """Return the table of a result, its head first."""
    found = [list(_HEAD)]
    for row in result["rows"]:
        accepted = "-" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}"
        found.append(
            [
                row["drafter"],
                str(row["batch_size"]),
                row["policy"],
                _interval(row["ratio"]),
                f"{row['noise']['median']:.2f}",
                f"{row['drafts_per_step']:.2f}",
                accepted,
                f"{row['num_equal']}/{row['batch_size']}",
            ]
        )
    return found


def _interval(ratio: Row) -> str:
    return f"{ratio['median']:.2f} [{min(ratio['per_unit'].values()):.2f}, {max(ratio['per_unit'].values()):.2f}]"


def show(result: Row) -> None:
    """Print the table."""
    head, *rows = lines(result)
    table = Table(title="decoding speed over no drafting, by requests that share the steps")
    for column in head:
        table.add_column(column, justify="left" if column in ("drafter", "policy") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print("medians of rounds [lowest, highest]", style="dim", markup=False)


def markdown(result: Row) -> str:
    """Return the same for the docs."""
    return markdown_table(lines(result))


@hydra_main("draft_budget")
def main(config: DictConfig) -> None:
    """Measure, print and write."""
    run_and_write(config, "draft_budget", measure, show, markdown)


if __name__ == "__main__":
    main()

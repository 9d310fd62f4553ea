"""How many tokens a target forward yields with a drafter: acceptance by category, looping answers reported apart.

    python -m specdec.eval.acceptance target=smollm2 drafter=ngram prompts=jsonl prompts.path=FILE

Exit code 0 = measured, and greedy ids are the undrafted run's but for near-ties (a lossy variant's may be any), 1 =
they are not, 2 = bad input.
"""

from __future__ import annotations

import sys
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.debug.near_tie import near_tie_limit
from specdec.eval.cases import make_cases
from specdec.eval.hydra_main import hydra_main
from specdec.eval.lossless import first_divergence
from specdec.eval.point_run import run_point
from specdec.eval.point_view import number, say, show_left_out
from specdec.eval.records import BASELINE, Records
from specdec.eval.target import load_target

console = Console()


def measure(config: Any) -> bool:
    """Measure, print and write; return whether the check found nothing that a lossless variant may not do."""
    records, summary = run_point(config, console)
    for name, own in summary["variants"].items():
        if own["num_steps"] and name != BASELINE:
            _show_variant(name, records, summary)
    show_left_out(records.header.left_out, console)
    return _check(config, records, summary)


def _interval(view: dict[str, Any]) -> str:
    found = view["acceptance_length_interval"]
    return "-" if found is None else f"{found[0]:.2f}-{found[1]:.2f}"


def _show_variant(name: str, records: Records, summary: dict[str, Any]) -> None:
    header, whole = records.header, summary["variants"][name]
    info = next(info for info in header.variants if info.name == name)
    how = "greedy" if header.temperature == 0 else f"temperature {header.temperature}"
    lossy = "" if info.lossless else " (LOSSY)"
    table = Table(title=Text(f"{name}, {info.max_draft_tokens} draft tokens, {how}, {info.verifier}{lossy}"))
    for column in ("", "loops", "cut", "95 %", "all", "no loops", "node rate" if whole["tree"] else "rate"):
        table.add_column(column, justify="right" if column else "left")
    parts = {category: own[name] for category, own in summary["categories"].items() if name in own}
    for category, part in [*parts.items(), ("total", whole)]:
        table.add_row(
            Text(category),
            f"{part['num_loops']} of {part['num_answers']}",
            number(part["cut"]["acceptance_length"], ".3f"),
            _interval(part["cut"]),
            number(part["acceptance_length"], ".3f"),
            number(part["no_loops"]["acceptance_length"], ".3f"),
            number(part["cut"]["acceptance_rate"], ".3f"),
        )
    console.print(table)
    console.print(
        "tokens per target decode forward; cut: up to where an answer repeats eight tokens in a row, with its 95 % "
        "interval over prompts; no loops: answers that never do; rate: accepted per draft token up to the cut (of "
        "trees: per node)"
    )
    _show_positions(whole)


def _show_positions(whole: dict[str, Any]) -> None:
    table = Table(title="accepted at depth, of all steps / of those that came so far")
    table.add_column("")
    views = {"cut": whole["cut"], "all": whole, "no loops": whole["no_loops"]}
    for depth in range(len(whole["acceptance_at_unconditional"])):
        table.add_column(str(depth + 1), justify="right")
    for name, view in views.items():
        pairs = zip(view["acceptance_at_unconditional"], view["acceptance_at_conditional"], strict=True)
        table.add_row(name, *(f"{number(u, '.3f')} / {number(c, '.3f')}" for u, c in pairs))
    console.print(table)


def _check(config: Any, records: Records, summary: dict[str, Any]) -> bool:
    """Say which greedy answers are not the undrafted run's, with near-tie analysis."""
    if records.header.temperature > 0:
        return True
    good = True
    for info in records.header.variants:
        same = summary["identity"].get(info.name)
        if info.name == BASELINE or same is None:
            continue
        say(console, f"{same['equal']} of {same['of']} answers of {info.name} have the undrafted run's ids")
        if same["parted"] and info.kind == "engine":
            good &= _near_ties_only(config, records, info.name, same["parted"]) or not info.lossless
    return good


def _near_ties_only(config: Any, records: Records, name: str, parted: list[dict[str, Any]]) -> bool:
    llm = load_target(config)
    prompts = make_cases(llm, config).token_ids
    answers = {
        (variant, sample.repeat, request.case): request.token_ids
        for variant in (BASELINE, name)
        for sample in records.of(variant)
        for request in sample.requests
    }
    limit = near_tie_limit(llm.model.dtype, config.near_tie)
    only_near_ties = True
    for d in parted:
        key = d["repeat"], d["case"]
        found = first_divergence(
            llm, d["case"], prompts[d["case"]], answers[BASELINE, *key], answers[name, *key], limit
        )
        is_near_tie = found is not None and found.is_near_tie
        gap = "-" if found is None else f"{found.gap:.1e}"
        what = "a near-tie" if is_near_tie else "DIFFERENT"
        say(console, f"prompt {records.header.cases[d['case']].name} at token {d['position']}: {what}, gap {gap}")
        only_near_ties &= is_near_tie
    return only_near_ties


@hydra_main("acceptance")
def main(config: DictConfig) -> None:
    """Measure, print, write; the exit code is the check's verdict."""
    sys.exit(0 if measure(config) else 1)


if __name__ == "__main__":
    main()

"""A point's figures in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.eval.records import BASELINE, Header, LeftOut, Records

_NAMES_SHOWN = 8  # of prompts left out; the file has all
_ORDER_NOTED = 0.02  # a place or third of the run this much slower or faster than the others is said


def number(value: float | None, form: str = ".1f", times: float = 1.0) -> str:
    """Return a figure, or - if there is none."""
    return "-" if value is None else format(times * value, form)


def ratio(found: dict[str, Any] | None) -> str:
    """Return a ratio with its interval."""
    return "-" if found is None else f"{found['median']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]"


def _faster(found: dict[str, Any] | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (f"{found['median']:.2f}x", f"{found['low']:.2f}-{found['high']:.2f}")


def show_point(records: Records, summary: dict[str, Any], console: Console) -> None:
    """Print the comparison of a point's variants."""
    header = records.header
    console.print(
        f"{header.target} {header.dtype}, {len(header.cases)} prompts in batches of {header.batch_size}, "
        f"{header.repeats} repeats"
    )
    trees = any(own["tree"] for own in summary["variants"].values())
    columns = ["", "speedup", "95 %", "e2e", "decode/s", "TTFT ms", "length", "rate", "= none"]
    if trees:
        columns.insert(-1, "node rate")  # of trees: another thing than a chain's
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    speedups = {s["variant"]: s for s in summary["speedups"]}
    for name, own in summary["variants"].items():
        same, faster = summary["identity"][name], speedups.get(name, {"decode": None, "e2e": None})
        rate = number(own["acceptance_rate"], ".3f")
        table.add_row(
            name if own["lossless"] else f"{name} (LOSSY)",
            *_faster(faster["decode"]),
            _faster(faster["e2e"])[0],
            number(own["decode_tokens_per_s"]),
            number(own["ttft_s"]["p50"], times=1e3),
            number(own["acceptance_length"], ".2f"),
            "-" if own["tree"] else rate,
            *([rate if own["tree"] else "-"] if trees else []),
            f"{same['equal']}/{same['of']}",
        )
    console.print(table)
    console.print(
        "speedup: decode time of none, the undrafted engine, over the variant's, median over batches; e2e: with "
        "prefill; length: tokens per target forward; rate: accepted per draft token; = none: answers with none's ids",
        highlight=False,
    )
    for s in summary["over_peers"]:
        console.print(
            f"{s['variant']} over {s['over']}: decode {ratio(s['decode'])}, end to end {ratio(s['e2e'])}",
            highlight=False,
        )
    _show_noise(summary, console)
    _show_notes(header, console)
    show_left_out(header.left_out, console)


def _show_noise(summary: dict[str, Any], console: Console) -> None:
    control = summary["control"]
    if control is not None:
        verdict = "holds" if control["holds"] else "does NOT hold 1.0: do not trust differences this small"
        console.print(
            f"control, none against itself: {control['median']:.3f}x, 99 % interval [{control['low']:.3f}, "
            f"{control['high']:.3f}], {verdict}",
            highlight=False,
        )
    if "wall_s" in summary:
        outside = summary["outside_s"] / summary["wall_s"]
        console.print(f"{summary['wall_s']:.0f} s, {outside:.1%} of it outside of any variant", highlight=False)
    for entry in summary["order"]:
        if abs(entry["relative_time"] - 1) > _ORDER_NOTED:
            what = (
                f"place {entry['number']} of a turn" if entry["by"] == "place" else f"third {entry['number'] + 1} of 3"
            )
            console.print(f"runs in {what} took {entry['relative_time']:.3f} of the usual time", highlight=False)
    loops = {name: own["num_loops"] for name, own in summary["variants"].items() if own["num_loops"]}
    if loops:
        name = BASELINE if BASELINE in loops else next(iter(loops))
        answers = summary["variants"][name]["num_answers"]
        console.print(f"{loops[name]} of {answers} answers of {name} repeat themselves; without them:", highlight=False)
        for s in summary["speedups"]:
            console.print(f"  {s['variant']} {ratio(s['decode_no_loops'])}", highlight=False)


def _show_notes(header: Header, console: Console) -> None:
    for info in header.variants:
        if info.note:
            console.print(f"{info.name}: {info.note}", highlight=False)
    for peer in header.absent:
        console.print(f"absent: {peer['name']}: {peer['reason']}", highlight=False)


def show_left_out(left_out: Sequence[LeftOut], console: Console) -> None:
    """Print how many prompts of which category were not run, and why."""
    groups: dict[tuple[str, str], list[LeftOut]] = {}
    for row in left_out:
        kind = row.reason.split(",")[-1].strip()
        groups.setdefault((row.category, kind), []).append(row)
    for (category, kind), rows in groups.items():
        shown = ", ".join(row.name for row in rows[:_NAMES_SHOWN]) + (", ..." if len(rows) > _NAMES_SHOWN else "")
        console.print(f"left out: {len(rows)} of {category} ({shown}): {kind}", highlight=False)


def show_step_times(records: Records, console: Console) -> None:
    """Print t(M), the time of a forward by its rows."""
    machine = records.machine
    if machine is None:
        return
    table = Table(title="t(M): one forward of M rows after 128 tokens")
    for column in ("M", "engine ms", "transformers ms", "ratio"):
        table.add_column(column, justify="right")
    for row in machine.step_times:
        ours, theirs = row["runner_s"], row.get("transformers_s")
        shared = None if theirs is None else ours / theirs
        table.add_row(str(int(row["rows"])), number(ours, times=1e3), number(theirs, times=1e3), number(shared, ".2f"))
    console.print(table)
    bandwidth, weights = machine.read_bandwidth_bytes_per_s, machine.weight_bytes_per_step
    if bandwidth is not None and weights is not None:
        console.print(
            f"read bandwidth {bandwidth / 1e9:.1f} GB/s, {weights / 1e6:.0f} MB of weights per step: floor "
            f"{1e3 * weights / bandwidth:.1f} ms per forward",
            highlight=False,
        )

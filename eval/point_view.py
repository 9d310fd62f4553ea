"""A point's figures in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.eval.ratios import num_needed
from specdec.eval.records import BASELINE, LeftOut, Records
from specdec.eval.summary import drafter_faults

_NAMES_SHOWN = 8  # of prompts left out; the file has all
_ORDER_NOTED = 0.02  # a place or third of the run this much slower or faster than the others is said


def number(value: float | None, form: str = ".1f", times: float = 1.0) -> str:
    """Return a figure, or - if there is none."""
    return "-" if value is None else format(times * value, form)


def ratio(found: dict[str, Any] | None) -> str:
    """Return a ratio with its interval, if it has one."""
    if found is None:
        return "-"
    ends = "" if found["low"] is None else f" [{found['low']:.2f}, {found['high']:.2f}]"
    return f"{found['median']:.2f}x{ends}"


def say(console: Console, text: str) -> None:
    """Print a line that may hold other people's words."""
    console.print(Text(text))


def show_point(records: Records, summary: dict[str, Any], console: Console) -> None:
    """Print the comparison of a point's variants."""
    header = records.header
    say(
        console,
        f"{header.target} {header.dtype}, conversations: {len({case.name for case in header.cases})}, their prompts: "
        f"{len(header.cases)}, batch size: {header.batch_size}, repeats: {header.repeats}",
    )
    trees = any(own["tree"] for own in summary["variants"].values())
    table = Table(box=None, pad_edge=False)
    table.add_column("", overflow="fold")
    for column in ("speedup", "95 %", "e2e", "tok/s", "TTFT ms", "length", "rate", *["nodes"] * trees, "= none"):
        table.add_column(column, justify="right", no_wrap=True)
    speedups = {s["variant"]: s for s in summary["speedups"]}
    for name, own in summary["variants"].items():
        same, faster = summary["identity"][name], speedups.get(name, {"decode": None, "e2e": None})
        rate = number(own["acceptance_rate"], ".2f")
        table.add_row(
            Text(name if own["lossless"] else f"{name} LOSSY"),
            *_faster(faster["decode"]),
            _faster(faster["e2e"])[0],
            number(own["decode_tokens_per_s"]),
            number(own["ttft_s"]["p50"], ".0f", times=1e3),
            number(own["acceptance_length"], ".2f"),
            "-" if own["tree"] else rate,
            *([rate if own["tree"] else "-"] if trees else []),
            f"{same['equal']}/{same['of']}",
        )
    console.print(table)
    say(
        console,
        "speedup: decode time of none, the undrafted engine, over the variant's, median over conversations, or full "
        f"batches (few: less than the {num_needed(0.95)} that an interval takes); e2e: with prefill; of all answers "
        "together, tok/s: decoded tokens per second, length: tokens per target forward, rate: accepted per draft token"
        + (" (nodes: of trees)" if trees else "")
        + "; = none: answers with none's ids",
    )
    for s in summary["over_peers"]:
        both = f"decode {ratio(s['decode'])}, end to end {ratio(s['e2e'])}"
        say(console, f"{s['variant']} over {s['over']}: {both}")
    _show_noise(summary, console)
    _show_notes(records, summary, console)
    show_left_out(header.left_out, console)


def _faster(found: dict[str, Any] | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return f"{found['median']:.2f}x", "few" if found["low"] is None else f"{found['low']:.2f}-{found['high']:.2f}"


def _show_noise(summary: dict[str, Any], console: Console) -> None:
    control = summary["control"]
    if control is not None:
        verdict = {None: f"too few to tell, it takes {num_needed(0.99)}", True: "holds 1.0"}.get(
            control["holds"], "does NOT hold 1.0: differences this small mean nothing"
        )
        ends = "" if control["low"] is None else f", 99 % interval [{control['low']:.3f}, {control['high']:.3f}]"
        say(console, f"control, none against itself: {control['median']:.3f}x{ends}, {verdict}")
    if "wall_s" in summary:
        outside = summary["outside_s"] / summary["wall_s"]
        setup = f"after {summary['setup_s']:.0f} s of preparation"
        say(console, f"{summary['wall_s']:.0f} s, {outside:.1%} of it outside of any variant, {setup}")
    for entry in summary["order"]:
        effect = abs(entry["relative_time"] - 1)
        if effect > max(_ORDER_NOTED, entry["error"]):
            what = "at place {} of a turn" if entry["by"] == "place" else "in third {} of the run"
            what = what.format(entry["number"] + 1)
            say(console, f"runs {what} took {entry['relative_time']:.3f} of the usual time, +- {entry['error']:.3f}")
    loops = {name: own["num_loops"] for name, own in summary["variants"].items() if own["num_loops"]}
    if loops:
        name = BASELINE if BASELINE in loops else next(iter(loops))
        answers = summary["variants"][name]["num_answers"]
        calm = ", ".join(f"{s['variant']} {ratio(s['decode_no_loops'])}" for s in summary["speedups"])
        say(console, f"{loops[name]} of {answers} answers of {name} repeat themselves; without them: {calm}")


def _show_notes(records: Records, summary: dict[str, Any], console: Console) -> None:
    for info in records.header.variants:
        if info.note:
            say(console, f"{info.name}: {info.note}")
        for fault in drafter_faults(summary["variants"].get(info.name, {})):
            say(console, f"{info.name}: {fault}")
    for entry in records.header.absent:
        say(console, f"absent: {entry['name']}: {entry['reason']}")
    for dropped in records.dropped:
        say(console, f"{dropped.variant} gave up: {dropped.reason}")


def show_left_out(left_out: Sequence[LeftOut], console: Console) -> None:
    """Print how many prompts of which category were not run, and why."""
    groups: dict[tuple[str, str], list[LeftOut]] = {}
    for row in left_out:
        kind = row.reason.split(",")[-1].strip()
        groups.setdefault((row.category, kind), []).append(row)
    for (category, kind), rows in groups.items():
        shown = ", ".join(row.name for row in rows[:_NAMES_SHOWN]) + (", ..." if len(rows) > _NAMES_SHOWN else "")
        say(console, f"left out: {len(rows)} of {category} ({shown}): {kind}")


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

"""Tables of a draft-length measurement, for the terminal and for the docs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.eval.entry import markdown_table

Rows = list[list[str]]

LEAST = 0.98  # of the speed without drafting


def tables(result: dict[str, Any]) -> list[tuple[str, Rows]]:
    """Return (title, rows) of every table, the first row being its head."""
    config = result["config"]
    shapes = [(d, b) for d in config["drafters"] for b in config["batch_sizes"]]
    cells = {(c["drafter"], c["batch_size"], c["rate"]): c for c in result["sweep"]}
    sweep = [["drafter", "batch", "policy", *(f"{rate:g}" for rate in config["rates"])]]
    for drafter, size in shapes:
        row = [cells[drafter, size, rate] for rate in config["rates"]]
        sweep.append([drafter, str(size), f"static, {config['static_tokens']}", *(f"{c['static']:.2f}" for c in row)])
        sweep.append([drafter, str(size), f"cost_aware, up to {config['most_tokens']}", *map(_interval, row)])
    hopeless = [["drafter", "last drafted for after", "draft tokens", "over none"]]
    for r in result["hopeless"]:
        ratio = f"{r['ratio']:.3f}"
        hopeless.append([r["drafter"], f"{r['last_drafted_at']} tokens", str(r["num_draft_tokens"]), ratio])
    real = [["drafter", "policy", "over none", "drafted per step", "accepted", "ids of none"]]
    for r in result["real"]:
        accepted = "-" if r["acceptance_rate"] is None else f"{r['acceptance_rate']:.2f}"
        ratio = _span(r["ratio"])
        per_step = f"{r['draft_tokens_per_step']:.2f}"
        real.append([r["drafter"], r["policy"], ratio, per_step, accepted, f"{r['identical']}/{r['of']}"])
    found = [
        ("Speed over no drafting by acceptance rate, LOSSY verifier `synthetic`", sweep),
        (f"Always wrong: a first request of {config['hopeless_tokens']} tokens", hopeless),
        ("Real drafters, lossless, batch 1", real),
    ]
    times = result["step_times"]
    if times is not None:
        curve = [["M", *map(str, times["rows"])], ["ms", *(f"{1e3 * s:.1f}" for s in times["seconds"])]]
        found.append(("t(M)", curve))
    return found


def _interval(cell: dict[str, Any]) -> str:
    return _span(cell["cost_aware"])


def _span(ratio: dict[str, Any]) -> str:
    """Return a median with the lowest and the highest of its rounds: these are too few for an interval."""
    per_unit = ratio["per_unit"].values()
    return f"{ratio['median']:.2f} [{min(per_unit):.2f}, {max(per_unit):.2f}]"


def verdict(result: dict[str, Any]) -> str:
    """Return in words whether drafting ever lost, beside what two equal runs differ by."""
    cells = result["sweep"]
    below = [c for c in cells if max(c["cost_aware"]["per_unit"].values()) < LEAST]
    worst = min(cells, key=lambda c: c["cost_aware"]["median"])
    noise = sorted(abs(c["noise"]["median"] - 1) for c in cells)
    names = ", ".join(f"{c['drafter']} batch {c['batch_size']} rate {c['rate']:g}" for c in below)
    return (
        f"{len(below)} of {len(cells)} cells lie below {LEAST} in every round{names and ': ' + names}; "
        f"the lowest median is {worst['cost_aware']['median']:.3f} ({worst['drafter']}, batch {worst['batch_size']}, "
        f"rate {worst['rate']:g}). Two equal runs without drafting differ by {100 * noise[len(noise) // 2]:.1f} % "
        f"(median), {100 * noise[int(0.9 * len(noise))]:.1f} % (90th percentile)."
    )


def show(result: dict[str, Any], console: Console) -> None:
    """Print the tables and the verdict."""
    for title, (head, *rows) in tables(result):
        table = Table(title=title)
        for i, column in enumerate(head):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(verdict(result), highlight=False)


def markdown(result: dict[str, Any]) -> str:
    """Return the same for the docs."""
    parts = [f"**{title}**\n\n{markdown_table(rows)}" for title, rows in tables(result)]
    return "\n".join([*parts, verdict(result)]) + "\n"

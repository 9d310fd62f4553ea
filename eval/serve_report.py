"""What a load test found, as tables: the two phases apart, as llama.cpp prints them, then requests and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

_MIB = 2**20


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of a result of `serve`."""
    yield _phases(result)
    yield _requests(result)


def notes(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines below the tables."""
    yield (
        "prefill sets TTFT, decode sets TPOT; times count from when a request was due; ITL: gaps between emissions of "
        "one request, which may hold several tokens; queue, TTFT, ITL: all who got so far; the rest: answered ones"
    )
    if result["fault"]:
        yield f"THE KV CACHE'S BOOKS ARE WRONG: {result['fault']}"
    if result["is_interrupted"]:
        yield "interrupted: what was under way was aborted and counts as gone away"


def _phases(result: dict[str, Any]) -> Table:
    lossy = "" if result["lossless"] else " (LOSSY verifier)"
    table = _table(f"{result['num_arrived']} requests in {result['wall_s']:.1f} s{lossy}")
    for column in ("phase", "tokens", "seconds", "tokens/s", "p50 ms", "p90 ms", "p99 ms"):
        table.add_column(column, justify="left" if column == "phase" else "right", no_wrap=True)
    for phase, times in (("prefill", ("queue_s", "ttft_s")), ("decode", ("tpot_s", "itl_s")), ("", ("total_s",))):
        if phase:
            figures = result["phases"][phase]
            row = (f"{figures['num_tokens']:,}", _number(figures["seconds"], ".2f"), _number(figures["tokens_per_s"]))
            table.add_row(phase, *row, "", "", "")
        for name in times:
            shown = "queue" if name == "queue_s" else "whole answer" if name == "total_s" else name[:-2].upper()
            table.add_row(f"  {shown}", "", "", "", *(_milliseconds(result[name][p]) for p in ("p50", "p90", "p99")))
    return table


def _requests(result: dict[str, Any]) -> Table:
    table = _table(None, header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    good, load, kv, rss = result["goodput"], result["load"], result["kv"], result["rss_bytes"]
    limits = [(load["slo_ttft_s"], "TTFT"), (load["slo_tpot_s"], "TPOT")]
    within = " and ".join(f"{name} within {limit:g} s" for limit, name in limits if limit is not None) or "answered"
    refused = ", ".join(f"{kind} {count}" for kind, count in result["refused"].items())
    table.add_row("answered", _count(result["num_complete"]), "to their ends")
    table.add_row("goodput", _share(good["share"]), f"{within}; {_number(good['requests_per_s'], '.2f')} requests/s")
    table.add_row("refused", _count(result["num_refused"]), refused)
    table.add_row("gone away", _count(result["num_aborted"]), "aborted by their callers")
    if result["num_failed"]:
        table.add_row("failed", _count(result["num_failed"]), "their own processor or criterion raised")
    table.add_row("output", _number(result["tokens_per_s"]), "tokens/s over the whole run")
    table.add_row("longest gap", f"{_milliseconds(result['longest_gap_s'])} ms", "between two emissions of one request")
    length = f"acceptance length {_number(result['acceptance_length'], '.2f')}"
    table.add_row("acceptance rate", _share(result["acceptance_rate"]), length)
    if result["num_drafter_errors"]:
        table.add_row("drafter errors", _count(result["num_drafter_errors"]), "after each a request went on without")
    table.add_row("preemptions", _count(result["num_preemptions"]), "KV given up for others, computed again")
    table.add_row("prefix hits", _count(result["num_cached_tokens"]), "prompt tokens not computed")
    table.add_row("KV occupancy", *_occupancy(kv))
    way = " -> ".join(f"{rss[name] / _MIB:,.0f}" for name in ("start", "middle", "end"))
    later = f"{(rss['end'] - rss['middle']) / _MIB:+,.0f} MiB"
    table.add_row("memory", later, f"in the second half; the process: {way} MiB")
    checks = "WRONG" if result["fault"] else "clean"
    table.add_row("KV integrity", checks, f"checked {result['num_checks']} times, while idle and at the end")
    return table


def _occupancy(kv: dict[str, Any]) -> tuple[str, str]:
    """Return the most that requests held, as a share of the limit or, where there is none, in tokens; and the rest."""
    size, limit = kv["block_tokens"], kv["most_blocks"]
    mean, left = kv["mean_used"] or 0.0, f"{kv['num_left']:g} blocks left at the end"
    if limit:
        tokens = f"of room for {limit * size:,} tokens, {_share(mean / limit)} on average"
        return _share(kv["most_used"] / limit), f"{tokens}; {left}"
    return _count(kv["most_used"] * size), f"tokens at most, {mean * size:,.0f} on average; {left}"


def _table(title: str | None, header: bool = True) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=header)


def _count(value: int) -> str:
    return f"{value:,}"


def _number(value: float | None, form: str = ",.1f") -> str:
    return "-" if value is None else format(value, form)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"

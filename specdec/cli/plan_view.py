"""What `specdec plan` prints: the verdict in three lines, then the tables and sentences that it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.cli.console import plain

_SHOWN_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_FLOPS = ((1e12, "TFLOP"), (1e9, "GFLOP"))
_BYTES = ((1e9, "GB"), (1e6, "MB"))


def print_plan(out: Console, plan: dict[str, Any]) -> None:
    """Print a plan as `Plan.to_dict` gives it."""
    _verdict(out, plan)
    _heading(out, plan)
    _memory(out, plan)
    _speed(out, plan)
    if plan["speculation"] is not None:
        _speculation(out, plan)
    out.print()
    for text in plan["warnings"]:
        _paragraph(out, "warning", text, "yellow")
    for text in plan["assumptions"]:
        _paragraph(out, "assumed", text, "dim")


def _verdict(out: Console, plan: dict[str, Any]) -> None:
    memory, prefill, decode, load = plan["memory"], plan["prefill"], plan["decode"], plan["workload"]
    needed = f"{_gigabytes(memory['total_bytes'])} of {_gigabytes(memory['usable_bytes'])} GB usable"
    if memory["fits"]:
        _print(out, Text(f"fits: {needed}", "green"))
    else:
        count = memory["num_devices_by_memory"]
        _print(out, Text(f"does not fit: {needed}; by memory alone {count:,} such devices", "red"))
    _print(
        out,
        Text(f"TTFT at least {_time(prefill['ttft_floor_s'])} ({prefill['bound']}-bound), ")
        + Text(f"TPOT at least {_time(decode['tpot_floor_s'])} ({decode['bound']}-bound)"),
    )
    spec = plan["speculation"]
    if spec is None:
        return
    at = f"at acceptance {spec['acceptance']:g} and batch {load['batch']:,}"
    if spec["pays"]:
        best, is_cpu = spec["best"], plan["device"]["is_cpu"]
        pays = "may pay (on a CPU less, or not)" if is_cpu else "pays"
        text = f"drafting {pays}: {_tokens(best['num_draft_tokens'])}, {best['speedup']:.2f}x {at}"
        _print(out, Text(text, "yellow" if is_cpu else "green"))
    else:
        _print(out, Text(f"drafting does not pay {at}", "yellow"))


def _heading(out: Console, plan: dict[str, Any]) -> None:
    model, device, load = plan["model"], plan["device"], plan["workload"]
    active = model["num_active_parameters"]
    some = "" if active == model["num_parameters"] else f", {_count(active)} active per token"
    out.print()
    _paragraph(
        out,
        model["name"],
        f"{_count(model['num_parameters'])} weights{some} ({model['model_type']}, {model['attention']}, "
        f"{model['num_layers']} layers; counted by {model['counted_by']})",
    )
    rate = device["flops_per_s"][load["dtype"]]
    _paragraph(
        out,
        "device",
        f"{device['title']}: {device['memory_bytes'] / 1e9:,.1f} GB, {device['bandwidth_bytes_per_s'] / 1e9:,.0f} "
        f"GB/s, {_rate(rate)} in {load['dtype']}, balanced at {device['flops_per_byte_balance']:.0f} FLOP/byte "
        f"({device['source']})",
    )
    _paragraph(
        out,
        "load",
        f"{load['batch']:,} x {load['context']:,} tokens, {load['dtype']} weights, {load['kv_dtype']} keys and values",
    )


def _memory(out: Console, plan: dict[str, Any]) -> None:
    memory, load = plan["memory"], plan["workload"]
    table = _table("Memory", ("", "GB", "GiB", ""), right=(1, 2))
    per_request = f"{_binary(memory['kv_bytes_per_request'])} per request"
    rows: list[tuple[str, float, str]] = [
        ("weights", memory["weight_bytes"], ""),
        ("keys and values", memory["kv_bytes"], f"{_binary(memory['kv_bytes_per_token'])} per token, {per_request}"),
        ("activations", memory["activation_bytes"], "estimate, widest moment"),
    ]
    drafters = (("weights", memory["drafter_weight_bytes"]), ("keys and values", memory["drafter_kv_bytes"]))
    rows += [(f"drafter's {name}", num_bytes, "") for name, num_bytes in drafters if num_bytes]
    rows.append(("total", memory["total_bytes"], ""))
    rows.append(("usable", memory["usable_bytes"], f"{load['memory_fraction']:.0%} of the device"))
    for name, num_bytes, note in rows:
        table.add_row(name, f"{num_bytes / 1e9:,.2f}", f"{num_bytes / 2**30:,.2f}", note)
    out.print()
    out.print(table)
    _print(out, Text(_most(plan)))
    if memory["kv_bytes_per_request_compact"] < memory["kv_bytes_per_request_full"]:
        _print(
            out,
            Text(
                f"keys and values of a request: {_binary(memory['kv_bytes_per_request_full'])} as specdec stores them, "
                f"{_binary(memory['kv_bytes_per_request_compact'])} with windows cut and latent attention compressed"
            ),
        )


def _most(plan: dict[str, Any]) -> str:
    memory, load = plan["memory"], plan["workload"]
    requests, longest, limit = memory["max_batch"], memory["max_context_tokens"], plan["model"]["max_positions"]
    beyond = f" (the model was made for {limit:,})" if limit is not None and longest > limit else ""
    many = f"{requests:,} requests of {load['context']:,} tokens"
    long = f"{load['batch']:,} of {longest:,} tokens{beyond}"
    if requests and longest:
        return f"most: {many}, or {long}"
    if longest:
        return f"not one request of {load['context']:,} tokens fits; most: {long}"
    if requests:
        return f"{load['batch']:,} requests do not fit however short; most: {many}"
    return "not one request fits, however short"


def _speed(out: Console, plan: dict[str, Any]) -> None:
    prefill, decode, load = plan["prefill"], plan["decode"], plan["workload"]
    _phase(out, f"Prefill of {load['prompt_tokens']:,} tokens", prefill)
    even = prefill["ttft_even_experts_s"]
    last = prefill["last_ttft_floor_s"]
    notes = [
        *([f"about {_time(even)} if rows choose experts evenly"] if even is not None else []),
        *([f"the last of {load['batch']:,} that come together waits {_time(last)}"] if load["batch"] > 1 else []),
        f"{prefill['tokens_per_s_at_most']:,.0f} tokens/s at most",
    ]
    _paragraph(out, f"TTFT at least {_time(prefill['ttft_floor_s'])}", "; ".join(notes))
    _phase(out, f"Decode of {load['batch']:,} after {load['context']:,} tokens", decode)
    even = decode["tpot_even_experts_s"]
    notes = [
        *([f"about {_time(even)} if rows choose experts evenly"] if even is not None else []),
        f"{decode['tokens_per_s_at_most']:,.1f} tokens/s at most",
    ]
    _paragraph(out, f"TPOT at least {_time(decode['tpot_floor_s'])}", "; ".join(notes))


def _phase(out: Console, title: str, phase: dict[str, Any]) -> None:
    rows = [*phase["parts"], {"name": "all, side by side", **phase}]
    flops, flop_unit = _column([row["flops"] for row in rows], _FLOPS)
    num_bytes, byte_unit = _column([row["num_bytes"] for row in rows], _BYTES)
    seconds, time_unit = _column([row["seconds"] for row in rows], _TIMES)
    columns = ("", flop_unit, f"{byte_unit} moved", "FLOP/byte", "bound by", f"at least, {time_unit}")
    table = _table(title, columns, right=(1, 2, 3, 5))
    for i, row in enumerate(rows):
        style = "bold" if i == len(rows) - 1 else None
        intensity = f"{row['flops_per_byte']:,.1f}"
        table.add_row(row["name"], flops[i], num_bytes[i], intensity, row["bound"], seconds[i], style=style)
    out.print()
    out.print(table)


def _speculation(out: Console, plan: dict[str, Any]) -> None:
    spec, load = plan["speculation"], plan["workload"]
    best = spec["best"]["num_draft_tokens"]
    rows = [row for row in spec["curve"] if row["num_draft_tokens"] in (*_SHOWN_LENGTHS, best)]
    names = {"verify": "verify_s", "draft": "draft_s", "TPOT": "tpot_s"}
    times, unit = _column([row[name] for row in rows for name in names.values()], _TIMES)
    table = _table(
        f"Drafter {spec['drafter']} at acceptance {spec['acceptance']:g}",
        ("draft tokens", "tokens/step", *(f"{name}, {unit}" for name in names), "speedup"),
        right=range(6),
    )
    for i, row in enumerate(rows):
        count = row["num_draft_tokens"]
        own = times[3 * i : 3 * i + 3]
        style = "green" if count == best and best else None
        table.add_row(str(count), f"{row['tokens_per_step']:.2f}", *own, f"{row['speedup']:.2f}x", style=style)
    out.print()
    out.print(table)
    even = spec["break_even_acceptance"]
    costs = f"a draft token costs {spec['cost_ratio']:.3f} target steps"
    breaks = "no acceptance makes it pay" if even is None else f"it breaks even at acceptance {even:.2f}"
    _print(out, Text(f"at batch {load['batch']:,} {costs}; {breaks}"))
    _print(out, Text(_batches(plan)))


def _batches(plan: dict[str, Any]) -> str:
    spec, most = plan["speculation"], plan["speculation"]["tried_up_to_batch"]
    why = "as many as fit" if most == plan["memory"]["max_batch"] else "no larger ones were tried"
    after = f"after {plan['workload']['context']:,} tokens"
    ranges = [(first, last) for first, last in spec["pays_at_batches"]]
    if not ranges:
        return f"it pays at no batch from 1 to {most:,} ({why}) {after}"
    if ranges == [(1, most)]:
        return f"it pays at every batch from 1 to {most:,} ({why}) {after}"
    said = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in ranges]
    return f"it pays at batches {', '.join(said)} of 1 to {most:,} ({why}) {after}"


def _table(title: str, columns: tuple[str, ...], right: Any) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in right else "left", no_wrap=i in right or i == 0)
    return table


def _paragraph(out: Console, head: str, text: str, style: str = "") -> None:
    _print(out, Text.assemble((plain(head), "bold"), (f": {plain(text)}", style)))


def _print(out: Console, text: Text) -> None:
    out.print(text, soft_wrap=not out.is_terminal)  # a file, or grep, gets whole paragraphs


def _column(values: Sequence[float], units: Sequence[tuple[float, str]]) -> tuple[list[str], str]:
    """Return the numbers of a column in the one unit that suits the largest, which keeps four digits or more."""
    largest = max(values)
    size, unit = next((pair for pair in units if largest >= pair[0]), units[-1])
    digits = min(4, max(0, 3 - floor(log10(largest / size)))) if largest else 0
    return [f"{value / size:,.{digits}f}" for value in values], unit


def _time(seconds: float) -> str:
    (text,), unit = _column([seconds], _TIMES)
    return f"{text} {unit}"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f}" if num_bytes >= 1e9 else f"{num_bytes / 1e9:.2g}"


def _tokens(count: int) -> str:
    return f"{count} draft token{'s' * (count > 1)}"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e9 else f"{number / 1e6:,.1f} million"


def _rate(flops_per_s: float) -> str:
    if flops_per_s >= 1e12:
        return f"{flops_per_s / 1e12:,.1f} TFLOP/s"
    return f"{flops_per_s / 1e9:,.1f} GFLOP/s"


def _binary(num_bytes: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.4g} {unit}"
    return f"{num_bytes:,.0f} bytes"

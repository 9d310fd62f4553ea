"""The tables of `specdec plan`, and the sentences that say what they mean."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.cli.console import plain

_SHOWN_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)


def print_plan(out: Console, plan: dict[str, Any]) -> None:
    """Print a plan as `Plan.to_dict` gives it."""
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


def _heading(out: Console, plan: dict[str, Any]) -> None:
    model, device, load = plan["model"], plan["device"], plan["workload"]
    active = model["num_active_parameters"]
    some = "" if active == model["num_parameters"] else f", {_count(active)} active per token"
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
    if plan["speculation"] is not None:
        rows.append(("drafter's weights", memory["drafter_weight_bytes"], ""))
        rows.append(("drafter's keys and values", memory["drafter_kv_bytes"], ""))
    rows.append(("total", memory["total_bytes"], ""))
    rows.append(("usable", memory["usable_bytes"], f"{load['memory_fraction']:.0%} of the device"))
    for name, num_bytes, note in rows:
        table.add_row(name, f"{num_bytes / 1e9:,.2f}", f"{num_bytes / 2**30:,.2f}", note)
    out.print()
    out.print(table)
    verdict = Text("fits", "green") if memory["fits"] else Text("does not fit", "red")
    if not memory["fits"]:
        verdict.append(f": by memory alone {memory['num_devices_by_memory']} such devices are needed", "")
    _print(out, verdict)
    longest = memory["max_context_tokens"]
    limit = plan["model"]["max_positions"]
    beyond = f" (the model was made for {limit:,})" if limit is not None and longest > limit else ""
    _print(
        out,
        Text(
            f"most: {memory['max_batch']:,} requests of {load['context']:,} tokens, or {load['batch']:,} of "
            f"{longest:,} tokens{beyond}"
        ),
    )
    if memory["kv_bytes_per_request_compact"] < memory["kv_bytes_per_request_full"]:
        _print(
            out,
            Text(
                f"keys and values of a request: {_binary(memory['kv_bytes_per_request_full'])} as specdec stores them, "
                f"{_binary(memory['kv_bytes_per_request_compact'])} with windows cut and latent attention compressed"
            ),
        )


def _speed(out: Console, plan: dict[str, Any]) -> None:
    prefill, decode, load = plan["prefill"], plan["decode"], plan["workload"]
    table = _table(
        "Least times", ("", "", "GFLOP", "GB moved", "FLOP/byte", "bound by", "at least"), right=(2, 3, 4, 6)
    )
    for name, phase in (("prefill", prefill), ("decode", decode)):
        for row in (*phase["parts"], {"name": "all", **phase}):
            table.add_row(
                name if row["name"] == phase["parts"][0]["name"] else "",
                row["name"],
                f"{row['flops'] / 1e9:,.1f}",
                f"{row['num_bytes'] / 1e9:,.2f}",
                f"{row['flops_per_byte']:,.1f}",
                row["bound"],
                _time(row["seconds"]),
                end_section=row["name"] == "all",
                style="bold" if row["name"] == "all" else None,
            )
    out.print()
    out.print(table)
    together = (
        f"; of {load['batch']:,} that come together the last has it after {_time(prefill['last_ttft_floor_s'])}"
        if load["batch"] > 1
        else ""
    )
    _paragraph(
        out,
        f"TTFT at least {_time(prefill['ttft_floor_s'])}",
        f"prefill of {load['prompt_tokens']:,} tokens is {prefill['bound']}-bound, "
        f"{prefill['tokens_per_s_at_most']:,.0f} tokens/s at most{together}",
    )
    _paragraph(
        out,
        f"TPOT at least {_time(decode['tpot_floor_s'])}",
        f"decode of {load['batch']:,} after {load['context']:,} tokens is {decode['bound']}-bound, "
        f"{decode['tokens_per_s_at_most']:,.1f} tokens/s at most",
    )


def _speculation(out: Console, plan: dict[str, Any]) -> None:
    spec, load = plan["speculation"], plan["workload"]
    best = spec["best"]["num_draft_tokens"]
    table = _table(
        f"Drafter {spec['drafter']} at acceptance {spec['acceptance']:g}",
        ("draft tokens", "tokens/step", "verify", "draft", "TPOT", "speedup"),
        right=range(6),
    )
    for row in spec["curve"]:
        count = row["num_draft_tokens"]
        if count in _SHOWN_LENGTHS or count == best:
            table.add_row(
                str(count),
                f"{row['tokens_per_step']:.2f}",
                _time(row["verify_s"]),
                _time(row["draft_s"]),
                _time(row["tpot_s"]),
                f"{row['speedup']:.2f}x",
                style="green" if count == best and best else None,
            )
    out.print()
    out.print(table)
    if spec["pays"]:
        _print(out, Text(f"pays: {best} draft tokens, {spec['best']['speedup']:.2f}x over no drafting", "green"))
    else:
        _print(out, Text("does not pay: best is not to draft", "yellow"))
    _print(out, Text(f"a draft token costs {spec['cost_ratio']:.3f} target steps at this batch"))
    even = spec["break_even_acceptance"]
    _print(
        out,
        Text(
            "no acceptance makes it pay at this batch"
            if even is None
            else f"breaks even at acceptance {even:.2f} at this batch"
        ),
    )
    _print(out, Text(_batches(spec, load["context"])))


def _batches(spec: dict[str, Any], context: int) -> str:
    first, last = spec["pays_from_batch"], spec["pays_up_to_batch"]
    after = f"after {context:,} tokens"
    if first is None:
        return f"pays at no batch size {after}"
    if last is None:
        return (
            f"pays at every batch from {first:,} to the largest tried (4,096) {after}: reading KV outweighs arithmetic"
        )
    return f"pays at batch sizes {first:,} to {last:,} {after}; above, arithmetic bounds the step"


def _table(title: str, columns: tuple[str, ...], right: Any) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in right else "left", no_wrap=i in right or i == 0)
    return table


def _paragraph(out: Console, head: str, text: str, style: str = "") -> None:
    _print(out, Text.assemble((plain(head), "bold"), (f": {plain(text)}", style)))


def _print(out: Console, text: Text) -> None:
    out.print(text, soft_wrap=not out.is_terminal)  # a file, or grep, gets whole paragraphs


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e9 else f"{number / 1e6:,.1f} million"


def _rate(flops_per_s: float) -> str:
    if flops_per_s >= 1e12:
        return f"{flops_per_s / 1e12:,.1f} TFLOP/s"
    return f"{flops_per_s / 1e9:,.1f} GFLOP/s"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 or not seconds else f"{1e6 * seconds:.1f} us"


def _binary(num_bytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.4g} {unit}"
    return f"{num_bytes:,.0f} bytes"

"""`specdec check MODEL`: whether and how a model runs, before anything is rented for it."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.cli import completion
from specdec.cli import options as given_as
from specdec.cli.console import REFUSED, ending_with_a_status, output, plain, write_json
from specdec.cli.loading import is_local, quiet_transformers
from specdec.cli.progress import LogView
from specdec.cli.report import shown

_VERDICTS = {
    "trees": ("green", "runs, with chains and trees of draft tokens"),
    "chains": ("green", "runs, with chains of draft tokens only"),
    "refused": ("red", "does not run"),
    "unknown": ("yellow", "nothing is known against it, but it was not tried"),
}
_FACTS = (
    *("architecture", "model_type", "level", "num_layers", "layers", "windows", "dtype", "num_parameters"),
    *("weight_bytes", "kv_bytes_per_token", "vocab_size", "max_positions", "eos_token_ids", "lean", "attention"),
)
_APART = {"name", "verdict", "runs", "feature", "advice", "drafters", "shipped", "probe", "weights", "notes", *_FACTS}


def check_command(
    model: Annotated[
        str,
        typer.Argument(
            help="Built-in name, hub id, directory (a config.json is enough) or .gguf file.",
            autocompletion=completion.models,
        ),
    ],
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFT_MODEL",
            help="Also tell whether this one can draft for it.",
            show_default=False,
            autocompletion=completion.models,
        ),
    ] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Load the weights and run them once as well.")] = False,
    dtype: Annotated[
        str, typer.Option(help="Weight type that sizes are given for.", autocompletion=completion.dtypes)
    ] = "auto",
    trust_remote_code: given_as.TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Tell whether and how a model runs, and with whom as its draft model.

    Ends with 0 if it runs, with 1 if it does not or the draft model does not fit.
    """
    with ending_with_a_status(), LogView() as view:
        quiet_transformers()
        with view.doing(f"checking {model}", spin=is_local(model) and (draft is None or is_local(draft))):
            from specdec.check import check, check_pair

            report = check(model, weights=weights, dtype=dtype, trust_remote_code=trust_remote_code).to_dict()
            pair = None
            if draft is not None:
                pair = check_pair(model, draft, trust_remote_code=trust_remote_code).to_dict()
        if as_json:
            write_json(report if pair is None else {**report, "pair": pair})
        else:
            out = output()
            _print_report(out, report)
            if pair is not None:
                _print_pair(out, pair)
        if not report["runs"] or not (pair is None or pair["fits"]):
            raise typer.Exit(REFUSED)


def _print_report(out: Console, report: dict[str, Any]) -> None:
    style, meaning = _VERDICTS.get(report["verdict"], ("", ""))
    _print_wrapped(out, Text.assemble((plain(report["name"]), "bold"), ": ", (meaning or report["verdict"], style)))
    if report.get("feature"):
        _paragraph(out, "why", report["feature"])
    if report.get("advice"):
        _paragraph(out, "what to do", report["advice"])
    rows = {name: report.get(name) for name in _FACTS}
    rows |= {name: value for name, value in report.items() if name not in _APART}
    out.print()
    out.print(_facts({name: value for name, value in rows.items() if value not in (None, [], {}, "")}))
    if report.get("weights"):
        found = report["weights"]
        out.print()
        _paragraph(
            out,
            "its weights",
            f"in {found['dtype']} on specdec's cache they differ from transformers by {found['error']:.2g} of the "
            f"largest logit ({found['tolerance']:.2g} allowed)",
        )
    if report.get("drafters"):
        out.print()
        out.print(_drafters(report["drafters"], report.get("shipped") or {}))
    for note in report.get("notes") or ():
        _paragraph(out, "note", note)


def _print_pair(out: Console, pair: dict[str, Any]) -> None:
    out.print()
    fits = pair["fits"]
    role = f"drafter ({pair['drafter']})" if pair.get("drafter") else "draft model"
    style, meaning = ("green", f"fits as {role}") if fits else ("red", f"does not fit as {role}")
    _print_wrapped(out, Text.assemble((plain(pair["draft"]), "bold"), ": ", (meaning, style)))
    if pair.get("reason"):
        _paragraph(out, "why", pair["reason"])
    for warning in pair.get("warnings") or ():
        _paragraph(out, "note", warning)


def _paragraph(out: Console, head: str, text: str) -> None:
    _print_wrapped(out, Text.assemble((head, "bold"), f": {plain(text)}"))


def _print_wrapped(out: Console, text: Text) -> None:
    out.print(text, soft_wrap=not out.is_terminal)  # a file, or grep, gets whole paragraphs


def _facts(facts: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(style="cyan")
    for name, value in facts.items():
        table.add_row(name, Text(plain(_shown(name, value))))
    return table


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(
            f"{count} {kind}" if isinstance(count, int) else f"{kind} {count}" for kind, count in value.items()
        )
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if name == "kv_bytes_per_token":
        return f"{value:,}"
    return shown(name, value) if isinstance(value, int | float) else str(value)


def _drafters(drafters: dict[str, str | None], shipped: dict[str, str]) -> Table:
    table = Table("drafter", "", box=None, pad_edge=False)
    for name, reason in drafters.items():
        with_what = f" ({shipped[name]})" if name in shipped else ""
        found = Text(f"can run{with_what}", style="green") if reason is None else Text(plain(reason), style="yellow")
        table.add_row(name, found)
    return table

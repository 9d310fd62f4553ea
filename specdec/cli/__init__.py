"""The `specdec` command. Torch and transformers are imported by the commands that need them, when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from specdec import __version__
from specdec.cli.bench import serve_command
from specdec.cli.chat import chat_command
from specdec.cli.check import check_command
from specdec.cli.console import output
from specdec.cli.eval_command import UNTOUCHED, eval_command
from specdec.cli.export import export_command
from specdec.cli.generate import generate_command
from specdec.cli.listing import list_command
from specdec.cli.plan import plan_command
from specdec.cli.report_command import report_command
from specdec.cli.trace_command import trace_command
from specdec.cli.train import train_command

__all__ = ["app"]

_EXIT_CODES = (
    "Exit codes: 0 done; 1 `check`: does not run, `bench`: KV books wrong; 2 something you can change, said in one "
    "line on standard error; 130 Ctrl-C; 141 nobody reads the output any more."
)

app = typer.Typer(
    help="Exact speculative decoding for Hugging Face causal LMs.",
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        output().print(f"specdec {__version__}")
        raise typer.Exit


@app.callback(epilog=_EXIT_CODES)
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Exact speculative decoding for Hugging Face causal LMs."""


app.command("generate", epilog=_EXIT_CODES)(generate_command)
app.command("chat", epilog=_EXIT_CODES)(chat_command)
app.command("check", epilog=_EXIT_CODES)(check_command)
app.command("plan", epilog=_EXIT_CODES)(plan_command)
bench = typer.Typer(help="Put a load on an engine and measure.", epilog=_EXIT_CODES, no_args_is_help=True)
bench.callback()(lambda: None)  # a group, also while it has one command
bench.command("serve", epilog=_EXIT_CODES)(serve_command)
app.add_typer(bench, name="bench")
app.command("eval", epilog=_EXIT_CODES, context_settings=UNTOUCHED)(eval_command)
app.command("trace", epilog=_EXIT_CODES)(trace_command)
app.command("report", epilog=_EXIT_CODES)(report_command)
app.command("train", epilog=_EXIT_CODES)(train_command)
app.command("export", epilog=_EXIT_CODES)(export_command)
app.command("list", epilog=_EXIT_CODES)(list_command)

"""`specdec train METHOD`: a drafter for a model of your own, from prompts to a measured checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from specdec.cli import completion
from specdec.cli import options as given_as
from specdec.cli.console import ending_with_a_status, output, say, write_json
from specdec.cli.loading import quiet_transformers
from specdec.cli.progress import LogView

if TYPE_CHECKING:
    from specdec.cli.train_view import TrainView
    from specdec.train.run import RunConfig


def train_command(
    method: Annotated[
        str, typer.Argument(help="eagle3, medusa or draft_model, see above.", autocompletion=completion.train_methods)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Any setting: loop.num_tokens=200000 data.max_examples=500. All are listed in "
            "docs/train_a_drafter.md.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Built-in name, hub id, local directory or .gguf file.",
            show_default="the recipe's",
            autocompletion=completion.models,
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="A .jsonl, .json or .parquet file, the id of a `datasets` dataset, or sharegpt.",
            show_default="the recipe's",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Of the run.", show_default="outputs/train/METHOD-TARGET or the recipe's name"
        ),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where responses and hidden states are kept; runs of one target may share it.",
            show_default="inside of --out",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Settings of a drafter that ships (smollm2_eagle3, smollm2_medusa, smollm2_draft_model), or a "
            ".yaml file.",
            show_default=False,
            autocompletion=completion.recipes,
        ),
    ] = None,
    trust_remote_code: given_as.TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train a drafter for a model: it answers prompts, a head learns from its hidden states, the engine measures it.

    eagle3: one decoder layer over hidden states of three of the target's blocks. The longest drafts; can be exported.

    medusa: residual blocks on the last hidden state, which guess all places in one pass. The fastest training.

    draft_model: copies of some of the target's blocks as a small model, which reads the whole text itself.

    The same command goes on where a stopped or killed run was.
    """
    with ending_with_a_status(), LogView() as log:
        quiet_transformers()
        from specdec.cli.recipes import compose
        from specdec.cli.train_view import TrainView
        from specdec.train.run import run

        given = given_as.given(target=target, out=_text(out), features=_text(features))
        if trust_remote_code:
            given["trust_remote_code"] = True
        if prompts is not None:
            given["data.prompts"] = prompts
        config = compose(method, given, recipe, overrides or [])
        with TrainView(log.console) as view:
            folder = run(config, view)
        if view.has_finished:
            _show(config, folder, view, as_json)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _show(config: RunConfig, folder: Path, view: TrainView, as_json: bool) -> None:
    if as_json:
        last = view.curve[-1] if view.curve else {}
        write_json({"folder": str(folder), "last": last, "acceptance": list(view.acceptance)})
        return
    out = output()
    if view.acceptance:
        out.print(_table(view))
        say("acceptance length: tokens per target forward, of answers up to where they repeat themselves", console=out)
    say(f"{config.method} for {config.target} written to {folder}; README.md there is its card", style="", console=out)
    say(f"specdec generate --model {config.target} --drafter {folder} --prompt ...", style="", console=out)
    if config.method == "eagle3":
        say(f"specdec export {folder} --target {config.target} --to sglang --out ...", style="", console=out)


def _table(view: TrainView) -> Table:
    table = Table(title="held-out prompts, greedy", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("drafter", no_wrap=True)
    for column in ("acceptance length", "uncut", "loops", "tokens/s", "same ids"):
        table.add_column(column, justify="right")
    for row in view.acceptance:
        of = f"of {row['num_prompts']}"
        table.add_row(
            str(row["name"]),
            f"{row['acceptance_length']:.3f}",
            f"{row['acceptance_length_all']:.3f}",
            f"{row['num_loops']} {of}",
            f"{row['decode_tokens_per_s']:.1f}",
            f"{row['num_equal']} {of}",
        )
    return table

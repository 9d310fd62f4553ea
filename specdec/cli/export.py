"""`specdec export SOURCE --to LAYOUT --out DIR`: an EAGLE-3 head in the files of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.syntax import Syntax

from specdec.cli import completion
from specdec.cli import options as given_as
from specdec.cli.console import ending_with_a_status, has_colours, output, say, write_json
from specdec.cli.loading import is_local, quiet_transformers
from specdec.cli.progress import LogView
from specdec.errors import ConfigError
from specdec.models.builtin import BUILTIN_MODELS


def export_command(
    source: Annotated[str, typer.Argument(help="The head: a folder, a hub id, or the name of one that ships.")],
    to: Annotated[str, typer.Option(metavar="LAYOUT", help="speculators (vLLM) or sglang (SGLang, vLLM).")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write: a new one, or an earlier export.")],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The head's target, whose embedding and lm_head rows are written with it.",
            show_default="what the head names",
            autocompletion=completion.models,
        ),
    ] = None,
    target_name: Annotated[
        str | None,
        typer.Option(
            metavar="HUB_ID", help="What the engine is to load as target.", show_default="what --target stands for"
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Type of the written weights.", autocompletion=completion.dtypes)
    ] = "float16",
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens per step to launch the engine with.")] = 3,
    trust_remote_code: given_as.TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Write an EAGLE-3 head for vLLM or SGLang, and print the command that serves it."""
    with ending_with_a_status(), LogView() as view:
        quiet_transformers()
        from specdec.heads.exporting import layout_named, refuse_draft_model

        layout_named(to)
        refuse_draft_model(source)
        model = target or _named_target(source)
        name = target_name or _served_name(model)
        with view.doing(f"loading {model}", spin=is_local(model)):
            commands = _export(source, model, out, to, name, dtype, num_draft_tokens, trust_remote_code)
        if as_json:
            write_json({"folder": str(out), "layout": to, "target": name, "commands": commands})
            return
        console = output()
        say(f"{source} written to {out}; to serve it:", style="", console=console)
        for engine, command in commands.items():
            say(f"\n# {engine}", console=console)
            if has_colours(console):
                console.print(Syntax(command, "bash", background_color="default", word_wrap=True))
            else:
                say(command, style="", console=console)


def _export(
    source: str, model: str, out: Path, to: str, name: str, dtype: str, num_draft_tokens: int, trust_remote_code: bool
) -> dict[str, str]:
    """Write the head and return engine -> command."""
    import torch

    from specdec.heads.exporting import export_head, launch_commands
    from specdec.heads.loading import load_head
    from specdec.heads.target import head_target
    from specdec.models.build import RunnerConfig, runner_for
    from specdec.models.dtypes import parse_dtype
    from specdec.models.loading import load_model

    stored = parse_dtype(dtype)
    if not isinstance(stored, torch.dtype):
        raise ConfigError(f"--dtype {dtype}: give a type, such as float16; what the head is stored in is not kept")
    loaded, _ = load_model(model, trust_remote_code=trust_remote_code)
    of = head_target(runner_for(loaded, RunnerConfig(kernels="off")))
    export_head(
        load_head(source, of), of, out, to=to, target_name=name, dtype=stored, num_draft_tokens=num_draft_tokens
    )
    return launch_commands(to, out.absolute(), name, num_draft_tokens)


def _named_target(source: str) -> str:
    """Return the target that a head's own config names.

    Raises:
        ConfigError: it names none that can be loaded.
    """
    from specdec.heads.checkpoint import open_checkpoint

    config: Any = open_checkpoint(source).config.values
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    found = (config.get("target") or {}).get("name") or verifier.get("name_or_path")
    if isinstance(found, str) and ("/" in found or is_local(found)):
        return found
    said = f"it names {found!r}, which is no model that can be loaded" if found else "its config.json names none"
    raise ConfigError(f"--target is needed to export {source}: {said}; give its built-in name, folder or hub id")


def _served_name(model: str) -> str:
    """Return what another engine can load as the same model."""
    if model in BUILTIN_MODELS:
        return BUILTIN_MODELS[model].hub_id
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model

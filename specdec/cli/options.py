"""The options that commands share."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from specdec.cli import completion

# Also in `LLM.generate` and `EngineConfig`, which import torch; a test compares them.
DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 128,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_draft_tokens": None,
    "draft_length": "static",
    "confidence_threshold": 0.4,
}

_MODEL, _DRAFTING, _SAMPLING = "Model", "Drafting", "Sampling and stopping"

Model = Annotated[
    str,
    typer.Option(
        help="Built-in name, hub id, local directory or .gguf file.",
        autocompletion=completion.models,
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bf16, ..., auto.",
        show_default="float32 on CPU, else auto",
        autocompletion=completion.dtypes,
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...", show_default="cpu", rich_help_panel=_MODEL)]
DeviceMap = Annotated[
    str | None,
    typer.Option(help="Placement by Accelerate instead, such as auto.", show_default=False, rich_help_panel=_MODEL),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with the model.", rich_help_panel=_MODEL),
]
Drafter = Annotated[
    str,
    typer.Option(
        help="Who proposes tokens: a name, see `specdec list`, or a trained head's folder or hub id.",
        autocompletion=completion.drafters,
        rich_help_panel=_DRAFTING,
    ),
]
DrafterOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Option of the drafter; may be repeated.", rich_help_panel=_DRAFTING),
]
VerifierOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Option of the verifier; may be repeated.", rich_help_panel=_DRAFTING),
]
Verifier = Annotated[
    str,
    typer.Option(
        help="Acceptance rule: auto, or a name from `specdec list`.",
        autocompletion=completion.verifiers,
        rich_help_panel=_DRAFTING,
    ),
]
MaxDraftTokens = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Most draft tokens per step.",
        show_default="what the drafter advises, else 4",
        rich_help_panel=_DRAFTING,
    ),
]
DraftLength = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="static: always the most; confidence: until the drafter is unsure; cost_aware: as many as pay.",
        autocompletion=completion.draft_lengths,
        rich_help_panel=_DRAFTING,
    ),
]
ConfidenceThreshold = Annotated[
    float,
    typer.Option(
        help="Of `confidence`: drafting ends after a token drafted with less.",
        rich_help_panel=_DRAFTING,
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(min=0, help="Most tokens to generate.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End before this text; may be repeated.", rich_help_panel=_SAMPLING),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-new-tokens.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float, typer.Option(help="1 is off.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)]
Seed = Annotated[
    int | None,
    typer.Option(show_default=False, help="The same seed gives the same tokens.", rich_help_panel=_SAMPLING),
]


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given: the others keep their defaults where they are used."""
    return {name: value for name, value in options.items() if value is not None}


def parse_pairs(pairs: list[str] | None, option: str = "--drafter-option") -> dict[str, Any]:
    """Return keyword arguments from NAME=VALUE; a value is JSON (4, 0.5, true, [1, 2]) or else a text.

    Raises:
        BadParameter: a pair has no name.
    """
    options: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint=f"'{option}'")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options

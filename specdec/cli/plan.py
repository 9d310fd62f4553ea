"""`specdec plan MODEL`: what fits, what bounds each phase, and whether drafting pays, before anything is downloaded."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specdec.cli import completion
from specdec.cli import options as given_as
from specdec.cli.console import ending_with_a_status, output, write_json
from specdec.cli.plan_view import print_plan
from specdec.cli.progress import LogView
from specdec.errors import ConfigError
from specdec.planner import Device, PlannedModel, Workload, custom_device, find_device, make_plan, read_model
from specdec.planner.device import THIS
from specdec.planner.plan import DEFAULT_ACCEPTANCE, choose_dtype

_DEVICE, _LOAD, _DRAFTING = "Device", "Load", "Drafting"
_DEFAULTS = Workload()


def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            help="Built-in name, hub id (only its config.json is downloaded), directory, config.json or .gguf file.",
            autocompletion=completion.models,
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="h100, a100, l4, ..., or this, which measures this machine.",
            show_default="this, or what the three figures say",
            autocompletion=completion.devices,
            rich_help_panel=_DEVICE,
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(metavar="GB/S", help="Memory bandwidth.", show_default=False, rich_help_panel=_DEVICE),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(metavar="TFLOP/S", help="Dense rate in --dtype.", show_default=False, rich_help_panel=_DEVICE),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GB", help="Memory of the device.", show_default=False, rich_help_panel=_DEVICE),
    ] = None,
    memory_fraction: Annotated[
        float, typer.Option(help="Share of the memory that may be used.", rich_help_panel=_DEVICE)
    ] = _DEFAULTS.memory_fraction,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Of each request, prompt and answer.",
            show_default=f"{_DEFAULTS.context}, or the model's most",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", help="That prefill computes.", show_default="the whole context", rich_help_panel=_LOAD
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests at once.", rich_help_panel=_LOAD)] = _DEFAULTS.batch,
    dtype: Annotated[
        str,
        typer.Option(
            help="fp16, bf16 or fp32: weights and arithmetic; auto: the checkpoint's, on CPUs fp32.",
            autocompletion=completion.planned_dtypes,
            rich_help_panel=_LOAD,
        ),
    ] = _DEFAULTS.dtype,
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="Of keys and values: fp32, bf16, fp16, int8, int4; auto: as --dtype.",
            autocompletion=completion.kv_dtypes,
            rich_help_panel=_LOAD,
        ),
    ] = _DEFAULTS.kv_dtype,
    kv_layout: Annotated[
        str,
        typer.Option(
            help="full: as specdec stores them; compact: windows cut, latent attention compressed.",
            rich_help_panel=_LOAD,
        ),
    ] = _DEFAULTS.kv_layout,
    prefill_chunk_tokens: Annotated[
        int, typer.Option(help="Prompt rows per forward.", rich_help_panel=_LOAD)
    ] = _DEFAULTS.prefill_chunk_tokens,
    drafter: Annotated[
        str,
        typer.Option(
            help="A name, see `specdec list`; a trained head or a model that drafts (directory, config.json or hub "
            "id); with --cost-ratio also a drafter of your own.",
            autocompletion=completion.drafters,
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULTS.drafter,
    drafter_option: given_as.DrafterOption = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            help="Probability that a draft token is accepted if those before it were.",
            show_default=f"{DEFAULT_ACCEPTANCE}, a guess",
            rich_help_panel=_DRAFTING,
        ),
    ] = None,
    cost_ratio: Annotated[
        float | None,
        typer.Option(
            help="Measured time of one draft token over a target step.",
            show_default="from the drafter's shape",
            rich_help_panel=_DRAFTING,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Say what fits on a device, what bounds prefill and decode, how fast they can be, and whether drafting pays.

    Reads configs only. Times are floors: what the device's bandwidth and arithmetic allow, not what software reaches.
    """
    with ending_with_a_status(), LogView() as view:
        if not model.strip():
            raise ConfigError("the model has no name; give a built-in name, a hub id, a directory or a config.json")
        planned = read_model(model)
        load = Workload(
            batch=batch,
            context=_context(context, planned),
            prompt_tokens=prompt,
            dtype=dtype,
            kv_dtype=kv_dtype,
            kv_layout=kv_layout,
            prefill_chunk_tokens=prefill_chunk_tokens,
            drafter=drafter,
            drafter_options=given_as.parse_pairs(drafter_option),
            acceptance=acceptance,
            cost_ratio=cost_ratio,
            memory_fraction=memory_fraction,
        )
        own = given_as.given(memory_gb=memory, bandwidth_gb_per_s=bandwidth, tflops=flops)
        found = _device(device, own, planned, dtype, view)
        plan = make_plan(planned, found, load)
        if as_json:
            write_json(plan.to_dict())
        else:
            print_plan(output(), plan.to_dict())


def _context(given: int | None, model: PlannedModel) -> int:
    if given is not None:
        return given
    return min(_DEFAULTS.context, model.shape.max_positions or _DEFAULTS.context)


def _device(name: str | None, own: dict[str, Any], model: PlannedModel, dtype: str, view: LogView) -> Device:
    """Return the named or measured device, or one of the user's own figures."""
    if name is None and own:
        missing = [flag for flag, key in _FLAGS.items() if key not in own]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} is missing; give all three figures, or --device with those that differ"
            )
        kind = choose_dtype(dtype, model, None) if dtype != "auto" else model.dtype or "fp16"
        return custom_device(kind, **own)
    name = THIS if name is None else name
    base = _measured(model, dtype, view) if name.strip().lower() == THIS else find_device(name)
    if not own:
        return base
    kind = choose_dtype(dtype, model, base)
    known = {"memory_gb": base.memory_bytes / 1e9, "bandwidth_gb_per_s": base.bandwidth_bytes_per_s / 1e9}
    if "tflops" not in own:
        known["tflops"] = base.rate(kind) / 1e12
    return custom_device(kind, **{**known, **own}, base=base)


def _measured(model: PlannedModel, dtype: str, view: LogView) -> Device:
    with view.doing("measuring this machine's bandwidth and matrix products", spin=True):
        from specdec.planner.this_device import has_accelerator, this_device

        kind = choose_dtype(dtype, model, None)
        if has_accelerator() and dtype == "auto":
            kind = model.dtype or "fp16"
        return this_device(kind)


_FLAGS = {"--memory": "memory_gb", "--bandwidth": "bandwidth_gb_per_s", "--flops": "tflops"}

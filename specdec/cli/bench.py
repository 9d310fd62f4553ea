"""`specdec bench serve`: a load on an engine in this process, and what its callers would have seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli import completion
from specdec.cli import options as given_as
from specdec.cli.console import INTERRUPTED, REFUSED, ending_with_a_status, output, say, write_json
from specdec.cli.loading import is_local, quiet_transformers
from specdec.cli.progress import LogView
from specdec.cli.prompts import Prompt, read_prompts
from specdec.errors import InputError
from specdec.models.byte_size import num_bytes_of

if TYPE_CHECKING:
    from specdec.serving.engine import Engine

_LOAD, _ENGINE, _REPORT = "Load", "Engine", "Report"
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a short, polite email asking a colleague to review a report by Friday.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five ways to save energy at home.",
    "What is the difference between a virus and a bacterium?",
    "Summarise the story of Little Red Riding Hood in four sentences.",
)


def serve_command(
    model: given_as.Model = "smollm2",
    drafter: given_as.Drafter = "none",
    drafter_option: given_as.DrafterOption = None,
    verifier: given_as.Verifier = "auto",
    max_draft_tokens: given_as.MaxDraftTokens = given_as.DEFAULTS["max_draft_tokens"],
    draft_length: given_as.DraftLength = given_as.DEFAULTS["draft_length"],
    dtype: given_as.Dtype = None,
    device: given_as.Device = None,
    trust_remote_code: given_as.TrustRemoteCode = False,
    arrivals: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="poisson, constant, or burst: all at once.",
            show_default="poisson",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second on average.", show_default="1", rich_help_panel=_LOAD)
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(help="How many.", show_default="64, or what --duration gives", rich_help_panel=_LOAD)
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Nothing arrives from then on; what has arrived is answered.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help='One per line: a text, {"prompt": ...} or {"messages": [...]}.',
            show_default="six short ones",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Prompts as they are, without chat template.", rich_help_panel=_LOAD)
    ] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of each answer.", show_default="64", rich_help_panel=_LOAD)
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers go on to --max-new-tokens.", rich_help_panel=_LOAD)
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.", show_default="0", rich_help_panel=_LOAD)
    ] = None,
    abort_share: Annotated[
        float | None,
        typer.Option(
            help="Share of callers that go away before their answer's end.", show_default="0", rich_help_panel=_LOAD
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of arrivals, prompts and aborts.", show_default="0", rich_help_panel=_LOAD)
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Requests that run at once.", show_default="64", rich_help_panel=_ENGINE)
    ] = None,
    max_waiting: Annotated[
        int | None,
        typer.Option(help="Requests that may wait; more are refused.", show_default="1024", rich_help_panel=_ENGINE),
    ] = None,
    prefill_chunk_tokens: Annotated[
        int | None,
        typer.Option(
            help="Prompt rows per step: large is the best TTFT, small the smoothest ITL.",
            show_default="512",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    max_step_tokens: Annotated[
        int | None,
        typer.Option(help="Rows of a step, drafts included.", show_default="no bound", rich_help_panel=_ENGINE),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of the KV cache: 512MiB.", show_default="no bound", rich_help_panel=_ENGINE),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How keys and values are stored: int8 or int4.",
            show_default="as computed",
            autocompletion=completion.quantised_kv,
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    prefix_caching: Annotated[
        bool,
        typer.Option("--prefix-caching", help="Keep KV for prompts that begin alike.", rich_help_panel=_ENGINE),
    ] = False,
    slo_ttft: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="TTFT that counts as good.", show_default="2", rich_help_panel=_REPORT),
    ] = None,
    slo_tpot: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="TPOT that counts as good.", show_default="0.2", rich_help_panel=_REPORT),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A PNG to draw.", show_default=False, rich_help_panel=_REPORT)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=_REPORT)
    ] = False,
) -> None:
    """Put a load on an engine in this process: TTFT, ITL, goodput and memory. Ctrl-C reports what was until then."""
    load = given_as.given(
        arrivals=arrivals,
        rate=rate,
        num_requests=num_requests,
        duration_s=duration,
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        temperature=temperature,
        abort_share=abort_share,
        slo_ttft_s=slo_ttft,
        slo_tpot_s=slo_tpot,
        seed=seed,
    )
    with ending_with_a_status(), LogView() as view:
        engine_options = given_as.given(
            drafter=drafter,
            drafter_options=given_as.parse_pairs(drafter_option),
            verifier=verifier,
            max_draft_tokens=max_draft_tokens,
            draft_length=draft_length,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            max_batch_size=max_batch_size,
            max_waiting=max_waiting,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_step_tokens=max_step_tokens,
            kv_memory_bytes=num_bytes_of("--kv-memory", kv_memory),
            kv_dtype=kv_dtype,
            prefix_caching=prefix_caching,
        )
        prompts = [Prompt(text) for text in PROMPTS] if prompts_file is None else read_prompts(None, prompts_file)
        _serve(view, model, engine_options, prompts, raw, load, plot, as_json)


def _serve(
    view: LogView,
    model: str,
    engine_options: dict[str, Any],
    prompts: Sequence[Prompt],
    raw: bool,
    given: dict[str, Any],
    plot: Path | None,
    as_json: bool,
) -> None:
    quiet_transformers()
    with view.doing(f"loading {model} with drafter {engine_options['drafter']}", spin=is_local(model)):
        from specdec.eval.load import LoadConfig
        from specdec.eval.serve import serve, show
        from specdec.eval.serve_plot import check_plot_path, plot_serve
        from specdec.serving.engine import Engine

        load = LoadConfig(**given)
        if plot is not None:
            check_plot_path(plot)
        engine = Engine(model, **engine_options)
    ids = _encoded(engine, prompts, raw)
    with view.doing(
        "all at once" if load.arrivals == "burst" else f"{load.arrivals} load, {load.rate:g} requests/s", spin=False
    ):
        result = serve(engine, ids, load, model, engine_options)
    if as_json:
        write_json(result)
    else:
        show(result, output())
    if plot is not None:  # after the figures, which must not be lost to a full disk
        say(f"drawn to {plot_serve(result, plot)}")
    if result["is_interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if result["fault"] is not None:
        raise typer.Exit(REFUSED)


def _encoded(engine: Engine, prompts: Sequence[Prompt], raw: bool) -> list[list[int]]:
    if engine.llm.tokenizer is None:
        raise InputError("the model came without a tokenizer, so there are no prompts; use specdec.Engine")
    return [prompt.token_ids(engine.llm, raw) for prompt in prompts]

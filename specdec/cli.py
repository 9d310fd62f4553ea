"""The `specdec` command: generate in a terminal, with one table at the end, and list what can be chosen."""

from __future__ import annotations

import inspect
import json
import logging
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text
from transformers import TextStreamer
from transformers.utils import logging as transformers_logging

from specdec import __version__
from specdec.api import LLM, Completion
from specdec.engine import EngineConfig
from specdec.errors import ConfigError, InputError, SpecdecError
from specdec.interfaces import SamplingParams
from specdec.models.builtin import BUILTIN_MODELS
from specdec.registry import DRAFTERS, VERIFIERS, Registry
from specdec.sampling import check_sampling, warn_ignored

app = typer.Typer(
    help="Exact speculative decoding for Hugging Face causal LMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

log = logging.getLogger("specdec")
_GENERATE = inspect.signature(LLM.generate).parameters
_STATS = (
    *("num_prompt_tokens", "prefill_s", "prefill_tokens_per_s", "ttft_s"),
    *("num_emitted_tokens", "decode_s", "decode_tokens_per_s", "tpot_s", "itl_s"),
    *("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_truncated", "num_rejected_drafts"),
    *("acceptance_rate", "acceptance_length", "acceptance_at_unconditional", "acceptance_at_conditional"),
    *("draft_s", "verify_s", "other_s"),
)
_TABLE = {  # group -> rows
    "prefill": ("num_prompt_tokens", "prefill_tokens_per_s", "ttft_s"),
    "decode": ("num_emitted_tokens", "decode_tokens_per_s", "tpot_s"),
    "drafts": ("acceptance_rate", "acceptance_length"),
    "time": ("draft_s", "verify_s", "other_s"),
}
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])  # all but tab and newline


def _show_version(wanted: bool) -> None:
    if wanted:
        Console(highlight=False).print(f"specdec {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Exact speculative decoding for Hugging Face causal LMs."""


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="Built-in name, hub id, local directory or .gguf file.")] = "smollm2",
    drafter: Annotated[str, typer.Option(help="Who proposes tokens; see `specdec list`.")] = "none",
    verifier: Annotated[str, typer.Option(help="Acceptance rule: auto, or a name from `specdec list`.")] = "auto",
    prompt: Annotated[str | None, typer.Option(help="Text, or - for standard input.", show_default="-")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Most tokens to generate.")] = _GENERATE[
        "max_new_tokens"
    ].default,
    max_draft_tokens: Annotated[
        int, typer.Option(min=0, help="Most draft tokens per step.")
    ] = EngineConfig().max_draft_tokens,
    drafter_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Option of the drafter; may be repeated.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = _GENERATE["temperature"].default,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = _GENERATE["top_p"].default,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = _GENERATE["top_k"].default,
    seed: Annotated[int | None, typer.Option(show_default=False, help="The same seed gives the same tokens.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bf16, ..., auto.", show_default="float32 on CPU, else auto")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...", show_default="cpu")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text and table.")] = False,
) -> None:
    """Generate from one prompt: the text as it comes, then what it took."""
    transformers_logging.set_verbosity_error()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" instead of failing
    out = Console(highlight=False)
    with _ending_with_a_status():
        text = _read_prompt(prompt)
        sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        check_sampling(sampling)  # before a model is loaded for minutes
        options = _parse_options(drafter_option or [])
        is_local = model in BUILTIN_MODELS or Path(model).expanduser().exists()
        with _progress(f"loading {model} with drafter {drafter}", spin=is_local):
            warn_ignored(sampling)
            llm = LLM(
                model,
                drafter=drafter,
                verifier=verifier,
                dtype=dtype,
                device=device,
                drafter_options=options,
                max_draft_tokens=max_draft_tokens,
            )
        ids = _encode(llm, text, raw)
        done = _run(llm, ids, max_new_tokens, sampling, None if as_json else _Writer(llm.tokenizer, out))
        result = _report(llm, model, sampling, text, done)
        if as_json:
            sys.stdout.write(json.dumps(result) + "\n")
        else:
            out.print()
            out.print(_table(result))


def _run(llm: LLM, ids: list[int], max_new_tokens: int, sampling: SamplingParams, writer: _Writer | None) -> Completion:
    try:
        return llm.generate(
            ids,
            max_new_tokens=max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            streamer=writer,
        )[0]
    except BaseException:
        if writer is not None and not writer.next_tokens_are_prompt:
            writer.end()  # a writer holds back the last word; what was generated is shown
        raise


@app.command("list")
def list_command() -> None:
    """List drafters, verifiers and built-in models."""
    out = Console(highlight=False)
    models = Table("model", "", "from", title="Built-in models", title_justify="left", box=None, pad_edge=False)
    for builtin in BUILTIN_MODELS.values():
        installed = find_spec(builtin.package) is not None
        models.add_row(builtin.name, builtin.title, "installed" if installed else f"`{builtin.install}`")
    for table in (_registry_table("Drafters", DRAFTERS), _registry_table("Verifiers", VERIFIERS), models):
        out.print(table)
        out.print()
    out.print("Your own drafter or verifier: package.module:Class, or an entry point.")
    out.print("Other models: a hub id, a local directory or a .gguf file.")


def _registry_table(title: str, registry: Registry) -> Table:
    table = Table(registry.kind, "what it does", "options", title=title, title_justify="left", box=None, pad_edge=False)
    for name in registry.names():
        try:
            kind = registry.load(name)
        except Exception as error:  # somebody else's entry point must not hide the rest
            table.add_row(name, Text(f"cannot be loaded: {error}", style="red"), "")
            continue
        what = (inspect.getdoc(kind) or "").split("\n")[0]
        if not getattr(kind, "lossless", True):
            what = f"NOT LOSSLESS. {what}"
        build = getattr(kind, "build", None)
        parameters = list(inspect.signature(build).parameters.values())[1:] if build else []
        shown = [p.name if p.default in (None, p.empty) else f"{p.name}={p.default}" for p in parameters]
        table.add_row(name, Text(what), Text(", ".join(shown)))
    return table


@contextmanager
def _ending_with_a_status() -> Iterator[None]:
    """Turn what a user can change into one red line and exit status 2, and Ctrl-C into status 130."""
    try:
        yield
    except SpecdecError as error:
        message = Text("error: " + " ".join(str(error).split()), style="red")
        Console(stderr=True, highlight=False).print(message, soft_wrap=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        Console(stderr=True, highlight=False).print("[yellow]interrupted[/yellow]")
        raise typer.Exit(130) from error


def _read_prompt(prompt: str | None) -> str:
    """Return the prompt, from standard input for "-" or, where that is no terminal, for none.

    Raises:
        InputError: it is empty or no text.
    """
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give a text, or - and the text on standard input", param_hint="'--prompt'")
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt in (None, "-") else prompt
        assert text is not None
        text.encode()  # arguments that are no UTF-8 arrive as lone surrogates
    except UnicodeError as error:
        raise InputError(f"the prompt is not valid UTF-8 ({error}); convert it first") from error
    if not text:
        where = "standard input" if prompt in (None, "-") else "--prompt"
        raise InputError(f"the prompt from {where} is empty; give at least one character")
    return text


def _parse_options(pairs: list[str]) -> dict[str, Any]:
    """Return keyword arguments from NAME=VALUE; a value is JSON (4, 0.5, true, [1, 2]) or else a text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint="'--drafter-option'")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _encode(llm: LLM, text: str, raw: bool) -> list[int]:
    if llm.tokenizer is None:
        raise InputError("the model came without a tokenizer, so there is no text to begin from; use specdec.generate")
    if raw:
        return list(llm.tokenizer(text).input_ids)
    if not getattr(llm.tokenizer, "chat_template", None):
        raise ConfigError("the model has no chat template; add --raw to continue the prompt as plain text")
    return llm.chat_token_ids([{"role": "user", "content": text}])


class _Progress(logging.Handler):
    """Shows specdec's log on standard error: warnings stay, information passes by in the status line."""

    def __init__(self, console: Console, status: Status | None) -> None:
        super().__init__()
        self._console, self._status = console, status

    def emit(self, record: logging.LogRecord) -> None:
        text = Text(record.getMessage(), style="dim")
        if self._status is not None and record.levelno < logging.WARNING:
            self._status.update(text)
        else:
            self._console.print(text, soft_wrap=True)


@contextmanager
def _progress(what: str, spin: bool) -> Iterator[None]:
    """Say what the wait is for; measuring and calibrating on a first run say so themselves through the log.

    Args:
        what: being done.
        spin: on a terminal, in one line that is gone afterwards. Downloads draw bars of their own instead.
    """
    console = Console(stderr=True, highlight=False)
    # Few refreshes: kernels may be timed meanwhile.
    status = Status(Text(what, style="dim"), console=console, refresh_per_second=4)
    shown = spin and console.is_terminal
    handler, level, propagate = _Progress(console, status if shown else None), log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    start = time.perf_counter()
    try:
        if shown:
            with status:
                yield
        else:
            console.print(Text(f"{what} ...", style="dim"), soft_wrap=True)
            yield
        console.print(Text(f"{what}: {time.perf_counter() - start:.1f} s", style="dim"), soft_wrap=True)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


class _Writer(TextStreamer):
    """Writes text as it comes. A terminal gets whole words per line and no control characters, a file the text."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._console, self._column = console, 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._console.is_terminal:
            text = self._wrapped(text.translate(_CONTROL))
        self._console.file.write(text + "\n" if stream_end else text)
        self._console.file.flush()

    def _wrapped(self, text: str) -> str:
        """Return `text` with a line break before each word that would cross the right edge."""
        width = self._console.width
        parts: list[str] = []
        for word in text.replace("\t", "    ").replace("\n", " \n ").split(" "):
            gap = "" if not parts or "\n" in (parts[-1], word) else " "
            column = self._column + len(gap) + cell_len(word)
            if word == "\n":
                column = 0
            elif column > width and not word:
                gap, column = "", width  # a space has no place at the edge
            elif column > width and self._column:
                gap, column = "\n", cell_len(word)
            self._column = column
            parts += [gap, word]
        return "".join(parts)


def _report(llm: LLM, model: str, sampling: SamplingParams, prompt: str, done: Completion) -> dict[str, Any]:
    """Return everything the table and --json say, under the names of `specdec.stats`."""
    engine, target = llm.engine, llm.engine.target
    rule = engine.verifiers.of(sampling, engine.drafter.samples)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = {
        "weight_bytes": sum(p.numel() * p.element_size() for p in llm.model.parameters()),
        "extra_weight_bytes": target.extra_weight_bytes,
        "drafter_weight_bytes": getattr(engine.drafter, "weight_bytes", 0),
        "kv_cache_bytes": target.cache.num_bytes,
        "kv_bytes_per_token": target.cache.bytes_per_token,
        "peak_rss_bytes": peak if sys.platform == "darwin" else 1024 * peak,
    }
    if target.device.type == "cuda":
        memory["device_peak_bytes"] = torch.cuda.max_memory_allocated(target.device)
    return {
        "model": model,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "num_threads": torch.get_num_threads(),
        "drafter": engine.drafter.name,
        "max_draft_tokens": engine.config.max_draft_tokens,
        "verifier": rule.name,
        "lossless": rule.lossless,
        "sampling": {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "seed")},
        "prompt": prompt,
        "text": done.text,
        "finish_reason": done.finish_reason,
        "prompt_token_ids": done.prompt_token_ids,
        "token_ids": done.token_ids,
        "stats": {name: getattr(done.stats, name) for name in _STATS},
        "memory": memory,
    }


def _table(result: dict[str, Any]) -> Table:
    values = {**result["stats"], **result["memory"]}
    notes = {
        "ttft_s": "request in to first token out",
        "num_emitted_tokens": f"in {values['num_steps']} steps; ended by {result['finish_reason']}",
        "tpot_s": "after the first emission",
        "acceptance_rate": f"{values['num_accepted_tokens']:,} of {values['num_draft_tokens']:,} draft tokens",
        "acceptance_length": "tokens per target forward",
        "extra_weight_bytes": "prepacked copies of weights",
        "drafter_weight_bytes": "the drafter's own weights",
        "kv_cache_bytes": "allocated",
        "peak_rss_bytes": "whole process",
    }
    for part in _TABLE["time"] if values["decode_s"] else ():
        notes[part] = f"{values[part] / values['decode_s']:.0%} of decode"
    verifier = result["verifier"] if result["lossless"] else f"{result['verifier']} (NOT LOSSLESS)"
    place = f"{result['dtype']}, {result['device']}, {result['num_threads']} threads"
    name = Path(result["model"]).name if Path(result["model"]).expanduser().exists() else result["model"]
    title = f"{name} ({place}), drafter {result['drafter']}, verifier {verifier}"
    table = Table(title=Text(title), title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="cyan", justify="right")
    table.add_column(style="dim")
    for group, names in {**_TABLE, "memory": tuple(result["memory"])}.items():
        for name in names:
            heading = group if name == names[0] else ""
            table.add_row(heading, name, _shown(name, values[name]), notes.get(name, ""), end_section=name == names[-1])
    return table


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    if isinstance(value, int):
        return f"{value:,}"
    if name.endswith("per_s"):
        return f"{value:,.1f}"
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"

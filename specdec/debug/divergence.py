"""Run prompts with and without drafting and explain the first token at which the outputs differ.

    python -m specdec.debug --model smollm2 --drafter self_int8 --prompt "Once upon a time"

Exit code 0 = identical or near-tie, 1 = diverged, 2 = bad input. See docs/debug.md.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging

from specdec.api import LLM
from specdec.debug.compare import DIVERGED, IDENTICAL, NEAR_TIE, Comparison, Side, compare
from specdec.debug.near_tie import near_tie_limit
from specdec.debug.watch import Watch, Watched
from specdec.errors import ConfigError, InputError, SpecdecError
from specdec.interfaces import Drafter, SamplingParams, Verifier
from specdec.sampling import check_sampling
from specdec.trace import VARIABLE, Trace, TraceFile, json_text, run_header

_GENERATE = {n for n, p in inspect.signature(LLM.generate).parameters.items() if p.kind is p.KEYWORD_ONLY}


@dataclass(frozen=True, slots=True)
class Report:
    """What `diverge` found."""

    verdict: str  # the worst of all prompts: "identical", "near-tie" or "diverged"
    advice: str
    run: dict[str, Any]  # the drafted run: versions, model class, dtype, drafter, verifiers, engine options
    lossless: bool  # whether the verifier claims to be
    near_tie: float  # two logits closer than this are a tie to the arithmetic
    prompts: list[Comparison]

    def json(self) -> str:
        """Return the report on one line; infinities become null."""
        return json_text(asdict(self))


def diverge(
    model: Any,
    prompts: Any,
    *,
    drafter: str | Drafter,
    verifier: str | Verifier = "auto",
    drafter_options: dict[str, Any] | None = None,
    tokenizer: Any | None = None,
    dtype: Any | None = None,
    device: Any | None = None,
    device_map: Any | None = None,
    trust_remote_code: bool = False,
    near_tie: float | None = None,
    trace: str | Path | None = None,
    **options: Any,
) -> Report:
    """Generate without and with drafting and say where the outputs part, and whether that is a bug.

    Greedy, or sampled with a seed. The undrafted run is drafter "none" under verifier "match": plain decoding. Its
    logits are kept meanwhile, 4 bytes per vocabulary entry and generated token.

    Args:
        model: what `LLM` takes, as are verifier, drafter_options, tokenizer, dtype, device, device_map and
            trust_remote_code.
        prompts: what `LLM.generate` takes; several run as one batch.
        drafter: who drafts in the second run.
        near_tie: two logits closer than this are a tie; None = by the model's dtype.
        trace: a file that both runs are traced to, like SPECDEC_TRACE.
        options: those of `LLM.generate` (max_new_tokens, temperature, seed, ...) and of `LLM` (max_draft_tokens, ...).

    Raises:
        ConfigError: an option is unknown or out of range, or the two runs could not be expected to be equal.
        InputError: a prompt cannot be generated from.
    """
    asked = {name: options.pop(name) for name in sorted(_GENERATE) if name in options}
    sampling = SamplingParams(temperature=asked.get("temperature", 0.0), seed=asked.get("seed"))
    check_sampling(sampling)  # before a model is loaded for minutes
    drafting = LLM(
        model,
        drafter=drafter,
        verifier=verifier,
        drafter_options=drafter_options,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        **options,
    )
    limit = near_tie_limit(drafting.engine.target.dtype, near_tie)
    rule = drafting.engine.verifiers.of(sampling, drafting.engine.drafter.samples)
    _check_comparable(sampling, rule)
    plain = LLM(drafting.model, drafter="none", verifier="match", tokenizer=drafting.tokenizer, **options)
    expected = _watched(plain, prompts, asked, trace, None)
    got = _watched(drafting, prompts, asked, trace, expected)
    found = [
        compare(i, one, other, limit, drafting.tokenizer)
        for i, (one, other) in enumerate(zip(expected, got, strict=True))
    ]
    verdict = max((c.verdict for c in found), key=(IDENTICAL, NEAR_TIE, DIVERGED).index, default=IDENTICAL)
    lossless = bool(getattr(rule, "lossless", False))
    advice = _advice(verdict, rule, drafting.engine.target.dtype)
    return Report(verdict, advice, _header(drafting), lossless, limit, found)


def _check_comparable(sampling: SamplingParams, rule: Verifier) -> None:
    if sampling.greedy:
        return
    if sampling.seed is None:
        raise ConfigError("two sampled runs differ by chance unless they share a seed; pass seed=, or temperature=0")
    if not getattr(rule, "couples_draft", False):
        raise ConfigError(
            f"verifier {rule.name!r} gives a seed's undrafted tokens only when greedy: it promises the distribution; "
            "pass verifier='match', or temperature=0"
        )


def _watched(
    llm: LLM, prompts: Any, options: dict[str, Any], path: str | Path | None, expected: Sequence[Watched] | None
) -> list[Watched]:
    """Generate and return what the run saw, one entry per prompt."""
    engine = llm.engine
    before: Trace | None = engine.trace
    others = [before] if before is not None else []
    if path is not None:
        others.append(TraceFile(path, _header(llm), llm.tokenizer))
    watch = Watch(others, expected)
    engine.trace = watch
    try:
        done = llm.generate(prompts, **options)
    finally:
        engine.trace = before
    runs = list(watch.runs.values())
    if not runs:  # nothing to generate
        return [Watched(c.prompt_token_ids, SamplingParams(), 0, finish_reason=c.finish_reason) for c in done]
    assert [w.new_tokens for w in runs] == [c.token_ids for c in done], "the trace and the completions differ"
    return runs


def _header(llm: LLM) -> dict[str, Any]:
    engine = llm.engine
    return run_header(engine.target, engine.drafter, engine.verifiers, engine.config)


def _advice(verdict: str, rule: Verifier, dtype: torch.dtype) -> str:
    if verdict == IDENTICAL:
        return "nothing to do: drafting changed no token"
    if verdict == NEAR_TIE:
        return "nothing to do: rounding decided; a wider dtype makes it rarer"
    if not getattr(rule, "lossless", False):
        return f"expected: verifier {rule.name!r} says itself that it is not lossless; use verifier='auto'"
    rounding = "if dtype='float32' gives no difference it was rounding after all; else " if dtype.itemsize < 4 else ""
    return (
        f"a bug: {rounding}see whether drafter='random' differs too (then the engine or the verifier is at fault, else "
        "the drafter), and report it to the authors of that part with this report (--json) and a trace of both runs "
        f"(--trace FILE, trace=FILE or {VARIABLE}=FILE)"
    )


def _drafter_options(pairs: list[str]) -> dict[str, Any]:
    """Return keyword arguments from NAME=VALUE; a value is JSON or else a text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--drafter-option {pair!r} is not NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def main(
    prompt: Annotated[list[str], typer.Option(help="Text; may be repeated, all run as one batch.")],
    drafter: Annotated[str, typer.Option(help="Who proposes tokens; see `specdec list`.")],
    model: Annotated[str, typer.Option(help="Built-in name, hub id, local directory or .gguf file.")] = "smollm2",
    verifier: Annotated[str, typer.Option(help="Acceptance rule: auto, or a name from `specdec list`.")] = "auto",
    drafter_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Option of the drafter; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Most tokens to generate.")] = 128,
    max_draft_tokens: Annotated[
        int | None, typer.Option(min=0, help="Most draft tokens per step; default: what the drafter advises, else 4.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Needed when sampling.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bf16, ...", show_default="float32 on CPU")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...", show_default="cpu")] = None,
    trace: Annotated[Path | None, typer.Option(help="Trace both runs to this file.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run prompts with and without drafting and explain the first token at which the outputs differ."""
    transformers_logging.set_verbosity_error()
    logging.getLogger("specdec").setLevel(logging.WARNING)
    try:
        report = diverge(
            model,
            prompt,
            drafter=drafter,
            verifier=verifier,
            drafter_options=_drafter_options(drafter_option or []) or None,
            max_new_tokens=max_new_tokens,
            max_draft_tokens=max_draft_tokens,
            temperature=temperature,
            seed=seed,
            dtype=dtype,
            device=device,
            trace=trace,
        )
    except SpecdecError as error:
        message = Text("error: " + " ".join(str(error).split()), style="red")
        Console(stderr=True, highlight=False).print(message, soft_wrap=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(report.json())
    else:
        show(report, Console(highlight=False))
    raise typer.Exit(int(report.verdict == DIVERGED))


def show(report: Report, console: Console) -> None:
    """Print the verdict on each prompt, and both runs' views where one differs."""
    styles = {IDENTICAL: "green", NEAR_TIE: "yellow", DIVERGED: "bold red"}
    for c in report.prompts:
        console.print(Text.assemble(f"prompt {c.prompt}: ", (c.verdict, styles[c.verdict]), f": {c.why}"))
        if c.position is None:
            console.print(f"  {c.num_tokens[0]} new tokens, ended by {c.finish_reasons[0]}")
            continue
        table = Table("run", "token", "top two", "gap", "logits of both", "behind", box=None, pad_edge=False)
        for name, side in (("undrafted", c.undrafted), ("drafted", c.drafted)):
            table.add_row(name, *_cells(side))
        console.print(f"  at new token {c.position}, after {c.num_prompt_tokens} prompt tokens")
        console.print(table)
        if c.step is not None:
            origin = "was drafted" if c.from_draft else "is the target's own"
            console.print(f"  drafted run: step {c.step} drafted {c.draft_token_ids}; its token {origin}")
        if c.largest_change is not None:
            console.print(f"  largest change of a logit: {c.largest_change:.2e}; a near-tie is {report.near_tie:.0e}")
    console.print(Text.assemble("verdict: ", (report.verdict, styles[report.verdict]), f"; {report.advice}"))


def _cells(side: Side | None) -> list[str | Text]:
    if side is None:
        return ["ended", "", "", "", ""]
    token = str(side.token_id) if side.text is None else f"{side.token_id} {side.text!r}"
    both = "" if side.pair_logits is None else "{:.6g}, {:.6g}".format(*side.pair_logits)
    return [Text(token), str(list(side.top_token_ids)), f"{side.gap:.2e}", both, f"{side.behind:.2e}"]

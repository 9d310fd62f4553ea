"""`specdec generate`: text as it comes, then what it took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli import options as given_as
from specdec.cli.answering import answer
from specdec.cli.attribution import Span
from specdec.cli.console import INTERRUPTED, ending_with_a_status, has_colours, output, plain, say, write_json
from specdec.cli.loading import load, sampling_of
from specdec.cli.progress import LogView
from specdec.cli.prompts import Prompt, read_prompts
from specdec.cli.report import report, stats_table, total_of
from specdec.cli.writer import Writer, show_legend


def generate_command(
    model: given_as.Model = "smollm2",
    prompt: Annotated[str | None, typer.Option(help="Text, or - for standard input.", show_default="-")] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help='Many prompts in one batch, one per line: a text, {"prompt": ...} or {"messages": [...]}.',
            show_default=False,
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without chat template.")] = False,
    drafter: given_as.Drafter = "none",
    drafter_option: given_as.DrafterOption = None,
    verifier: given_as.Verifier = "auto",
    verifier_option: given_as.VerifierOption = None,
    max_draft_tokens: given_as.MaxDraftTokens = given_as.DEFAULTS["max_draft_tokens"],
    draft_length: given_as.DraftLength = given_as.DEFAULTS["draft_length"],
    confidence_threshold: given_as.ConfidenceThreshold = given_as.DEFAULTS["confidence_threshold"],
    max_new_tokens: given_as.MaxNewTokens = given_as.DEFAULTS["max_new_tokens"],
    stop: given_as.Stop = None,
    ignore_eos: given_as.IgnoreEos = False,
    temperature: given_as.Temperature = given_as.DEFAULTS["temperature"],
    top_p: given_as.TopP = given_as.DEFAULTS["top_p"],
    top_k: given_as.TopK = given_as.DEFAULTS["top_k"],
    min_p: given_as.MinP = given_as.DEFAULTS["min_p"],
    seed: given_as.Seed = None,
    dtype: given_as.Dtype = None,
    device: given_as.Device = None,
    device_map: given_as.DeviceMap = None,
    trust_remote_code: given_as.TrustRemoteCode = False,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, help="With --json: log-probabilities of each token and its N likeliest rivals."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt and nothing else.")] = False,
) -> None:
    """Generate from a prompt, or from many: the text as it comes, then what it took."""
    if logprobs is not None and not as_json:
        raise typer.BadParameter("goes with --json", param_hint="'--logprobs'")
    wanted = given_as.given(
        max_new_tokens=max_new_tokens,
        stop=stop or None,
        ignore_eos=ignore_eos,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        logprobs=logprobs,
    )
    llm_options = given_as.given(
        verifier=verifier,
        verifier_options=given_as.parse_pairs(verifier_option, "--verifier-option"),
        drafter_options=given_as.parse_pairs(drafter_option),
        max_draft_tokens=max_draft_tokens,
        draft_length=draft_length,
        confidence_threshold=confidence_threshold,
        dtype=dtype,
        device=device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
    )
    with ending_with_a_status():
        prompts = read_prompts(prompt, prompts_file)
        with LogView() as view:
            _generate(view, model, drafter, prompts, raw, wanted, llm_options, as_json)


def _generate(
    view: LogView,
    model: str,
    drafter: str,
    prompts: list[Prompt],
    raw: bool,
    wanted: dict[str, Any],
    llm_options: dict[str, Any],
    as_json: bool,
) -> None:
    sampling = sampling_of(wanted)
    llm = load(view, model, drafter, sampling, llm_options)
    ids = [prompt.token_ids(llm, raw) for prompt in prompts]
    out = output()
    display = _Display(out, prompts, coloured=llm.engine.drafter.name != "none")
    with view.held():
        completions, interrupted = answer(llm, ids, wanted, _nothing if as_json else display.show)
    results = [
        report(llm, model, sampling, prompt.text, done, wanted.get("stop"))
        for prompt, done in zip(prompts, completions, strict=True)
    ]
    if as_json:
        for result in results:
            write_json(result)
    elif any(done.token_ids for done in completions) or not interrupted:
        out.print()
        out.print(stats_table(results[0] if len(results) == 1 else total_of(results, completions)))
    if interrupted:
        say("interrupted", style="yellow")
        raise typer.Exit(INTERRUPTED)


def _nothing(prompt: int, spans: Sequence[Span], is_last: bool) -> None: ...


class _Display:
    """Shows one answer as it comes, then the next: what the others say meanwhile waits for its turn."""

    def __init__(self, console: Console, prompts: list[Prompt], coloured: bool) -> None:
        self._console, self._prompts, self._coloured = console, prompts, coloured and has_colours(console)
        self._writer = Writer(console, self._coloured)
        self._turn = -1
        self._waiting: list[list[Span]] = [[] for _ in prompts]
        self._ended = [False] * len(prompts)

    def show(self, prompt: int, spans: Sequence[Span], is_last: bool) -> None:
        """Take what came for a prompt."""
        self._waiting[prompt] += spans
        self._ended[prompt] |= is_last
        if self._turn < 0:
            if self._coloured:
                show_legend(self._console)
            self._begin(0)
        while self._turn < len(self._prompts):
            for text, drafted in self._waiting[self._turn]:
                self._writer.write(text, drafted)
            self._waiting[self._turn].clear()
            if not self._ended[self._turn]:
                break
            self._writer.end()
            self._begin(self._turn + 1)

    def _begin(self, turn: int) -> None:
        self._turn = turn
        if len(self._prompts) > 1 and turn < len(self._prompts):
            text = " ".join(plain(self._prompts[turn].text).split())
            say(f"[{turn + 1} of {len(self._prompts)}] {text:.60}", console=self._console)

"""`specdec chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from specdec.cli import options as given_as
from specdec.cli.console import ending_with_a_status
from specdec.cli.conversation import Conversation
from specdec.cli.loading import load, sampling_of
from specdec.cli.progress import LogView
from specdec.cli.talk import talk


def chat_command(
    model: given_as.Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default=False)] = None,
    drafter: given_as.Drafter = "none",
    drafter_option: given_as.DrafterOption = None,
    verifier: given_as.Verifier = "auto",
    verifier_option: given_as.VerifierOption = None,
    max_draft_tokens: given_as.MaxDraftTokens = given_as.DEFAULTS["max_draft_tokens"],
    draft_length: given_as.DraftLength = given_as.DEFAULTS["draft_length"],
    confidence_threshold: given_as.ConfidenceThreshold = given_as.DEFAULTS["confidence_threshold"],
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens per answer.", rich_help_panel="Sampling and stopping")
    ] = 512,
    stop: given_as.Stop = None,
    temperature: given_as.Temperature = given_as.DEFAULTS["temperature"],
    top_p: given_as.TopP = given_as.DEFAULTS["top_p"],
    top_k: given_as.TopK = given_as.DEFAULTS["top_k"],
    min_p: given_as.MinP = given_as.DEFAULTS["min_p"],
    seed: given_as.Seed = None,
    dtype: given_as.Dtype = None,
    device: given_as.Device = None,
    device_map: given_as.DeviceMap = None,
    trust_remote_code: given_as.TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per answer and nothing else.")] = False,
) -> None:
    """Talk with a model; /help lists what else a line can say. Reads line by line from a pipe too.

    Ctrl-C ends an answer, Ctrl-D the chat.
    """
    wanted = given_as.given(
        max_new_tokens=max_new_tokens,
        stop=stop or None,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
    llm_options: dict[str, Any] = given_as.given(
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
    with ending_with_a_status(), LogView() as view:
        sampling = sampling_of(wanted)
        llm = load(view, model, drafter, sampling, llm_options)
        conversation = Conversation(llm, model, sampling, wanted, system)
        status = talk(conversation, view, as_json, is_terminal=sys.stdin.isatty())
        if status:
            raise typer.Exit(status)

"""Where prompts come from: an option, standard input, or a file of many."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specdec.cli.loading import chat_ids
from specdec.errors import InputError
from specdec.registry import refuse_unknown

if TYPE_CHECKING:
    from specdec.api import LLM


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or a conversation."""

    text: str
    messages: list[dict[str, Any]] | None = None

    def token_ids(self, llm: LLM, raw: bool) -> list[int]:
        """Return its token ids, through the chat template unless it is `raw`."""
        if raw and self.messages is None:
            assert llm.tokenizer is not None
            return list(llm.tokenizer(self.text).input_ids)
        messages = self.messages or [{"role": "user", "content": self.text}]
        return chat_ids(llm, messages, "add --raw to continue the prompt as plain text")


def read_prompts(prompt: str | None, file: Path | None) -> list[Prompt]:
    """Return the prompts: those of a file, one from --prompt, or one from standard input if that is no terminal.

    Raises:
        BadParameter: there is none, or both are given.
        InputError: one is empty or no text.
    """
    if file is not None:
        if prompt is not None:
            raise typer.BadParameter("give --prompt or --prompts-file", param_hint="'--prompts-file'")
        return _read_file(file)
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
    return [Prompt(text)]


def _read_file(file: Path) -> list[Prompt]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeError as error:
        raise InputError(f"{file} is not valid UTF-8 ({error}); convert it first") from error
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
    prompts = [_parse(line, f"{file}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise InputError(f"{file} holds no prompts; allowed: one per line, a text or a JSON object")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    """Return the prompt of a line: JSON with "prompt" or "messages", or the text itself."""
    if not line.startswith("{"):
        return Prompt(line)
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} begins like a JSON object and is none: {error}") from error
    refuse_unknown(where, row, ("prompt", "messages"))
    text, messages = row.get("prompt"), row.get("messages")
    if (text is None) == (messages is None) or not isinstance(text or "", str) or text == "":
        raise InputError(f'{where}: allowed: {{"prompt": a non-empty text}} or {{"messages": [...]}}')
    if messages is None:
        return Prompt(text)
    last = messages[-1] if isinstance(messages, list) and messages else None
    return Prompt(str(last.get("content", "")) if isinstance(last, dict) else "", messages)

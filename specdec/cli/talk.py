"""The loop of `specdec chat`: lines in, answers out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rich.table import Table

from specdec.cli.attribution import Span
from specdec.cli.console import USER_ERROR, has_colours, messages, output, say, say_error, write_json
from specdec.cli.conversation import Conversation
from specdec.cli.progress import LogView
from specdec.cli.report import shown
from specdec.cli.writer import Writer, show_legend
from specdec.errors import InputError, SpecdecError
from specdec.stats import RequestStats, total

_PROMPT = "> "
_HELP = """\
/help    this list
/stats   what the chat has taken so far
/reset   forget the conversation; the system prompt stays
/exit    leave, as Ctrl-D does
Ctrl-C ends an answer. A line that begins with // is sent with one /."""


def talk(conversation: Conversation, view: LogView, as_json: bool, is_terminal: bool) -> int:
    """Answer line after line until the last; return the exit status.

    At a terminal nothing that is refused counts; of a pipe, one refused line makes the status 2.
    """
    chat = _Chat(conversation, view, as_json, is_terminal)
    if is_terminal:
        say("/help lists what else a line can say; Ctrl-D leaves")
        if chat.coloured:
            show_legend(chat.out)
    status = 0
    for line in _lines(is_terminal, as_json):
        try:
            if isinstance(line, InputError):
                raise line
            if not chat.obey(line):
                break
        except SpecdecError as error:
            chat.refuse(error)
            status = status if is_terminal else USER_ERROR
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            say("interrupted", style="yellow")
    return status


def _lines(is_terminal: bool, as_json: bool) -> Iterator[str | InputError]:
    """Yield what is typed or piped, line by line; a line that is no UTF-8 as the error to say."""
    if not is_terminal:
        raw = getattr(sys.stdin, "buffer", None)
        for number, data in enumerate(raw or [], start=1):
            try:
                yield data.decode().rstrip("\r\n")
            except UnicodeError as error:
                yield InputError(f"line {number} is not valid UTF-8 ({error}); convert it first")
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() editing and history
    while True:
        try:
            if as_json or not sys.stdout.isatty():
                messages().print(_PROMPT, end="")  # standard output holds answers only
                line = sys.stdin.readline()
                if not line:
                    raise EOFError
            else:
                line = input(_PROMPT)
            line.encode()
            yield line.rstrip("\n")
        except UnicodeError as error:
            yield InputError(f"the line is not valid UTF-8 ({error})")
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("\n/exit or Ctrl-D leaves")


class _Chat:
    """Does what a line says."""

    def __init__(self, conversation: Conversation, view: LogView, as_json: bool, is_terminal: bool) -> None:
        self._conversation, self._view = conversation, view
        self._as_json, self._is_terminal = as_json, is_terminal
        self.out = output()
        can_draft = conversation.llm.engine.drafter.name != "none"
        self.coloured = can_draft and not as_json and has_colours(self.out)

    def obey(self, line: str) -> bool:
        """Do what a line says: a command, or a message to answer. False if it is the last.

        Raises:
            SpecdecError: the message is refused.
        """
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            return self._command(text)
        if text:
            self._answer(text.removeprefix("/") if text.startswith("//") else text)
        return True

    def refuse(self, error: SpecdecError) -> None:
        """Say what was wrong with a message; the conversation is as it was before."""
        if self._as_json:
            write_json({"error": " ".join(str(error).split())})
            return
        say_error(error)
        if isinstance(error, InputError) and "context limit" in str(error):
            self._offer_reset()

    def _command(self, text: str) -> bool:
        if text in ("/exit", "/quit"):
            return False
        if text == "/help":
            say(_HELP)
        elif text == "/reset":
            self._conversation.reset()
            say("the conversation begins anew")
        elif text == "/stats":
            messages().print(_totals(self._conversation))
        else:
            raise InputError(f"unknown command {text.split()[0]}; /help lists the commands, // sends a / to the model")
        return True

    def _answer(self, text: str) -> None:
        writer = Writer(self.out, self.coloured)

        def show(prompt: int, spans: Sequence[Span], is_last: bool) -> None:
            for part, drafted in spans:
                writer.write(part, drafted)
            if is_last:
                writer.end()

        def nothing(prompt: int, spans: Sequence[Span], is_last: bool) -> None: ...

        with self._view.held():
            done, interrupted = self._conversation.ask(text, nothing if self._as_json else show)
        if self._as_json:
            write_json(self._conversation.report(text, done))
        else:
            say(_line(done.stats, self._conversation.llm.engine.drafter.name, interrupted))
            if self._conversation.is_full:
                self._offer_reset()
        if interrupted and not self._is_terminal:
            raise KeyboardInterrupt

    def _offer_reset(self) -> None:
        conversation = self._conversation
        say(
            f"the conversation holds {conversation.num_tokens:,} of the {conversation.max_tokens:,} tokens of the "
            "model's context; /reset begins anew",
            style="yellow",
        )


def _line(stats: RequestStats, drafter: str, interrupted: bool) -> str:
    """Return what an answer took, in one line."""
    parts = [f"{stats.num_emitted_tokens + bool(stats.emissions)} tokens"]
    if stats.decode_tokens_per_s:
        parts.append(f"{stats.decode_tokens_per_s:.1f} tokens/s")
    if stats.acceptance_length and drafter != "none":
        parts.append(f"acceptance length {stats.acceptance_length:.2f} ({drafter})")
    return ", ".join([*parts, *(["interrupted"] if interrupted else [])])


def _totals(conversation: Conversation) -> Table:
    stats = total(conversation.stats)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(style="cyan", justify="right")
    limit = conversation.max_tokens
    table.add_row("answers", f"{len(conversation.stats):,}")
    table.add_row("tokens in context", f"{conversation.num_tokens:,}" + ("" if limit is None else f" of {limit:,}"))
    for name in ("num_prompt_tokens", "prefill_tokens_per_s", "num_emitted_tokens", "decode_tokens_per_s"):
        table.add_row(name, shown(name, getattr(stats, name)))
    for name in ("acceptance_rate", "acceptance_length"):
        table.add_row(name, shown(name, getattr(stats, name)))
    return table

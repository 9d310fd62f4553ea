"""Running prompts while showing their answers, and what is left of them after Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from specdec.cli.attribution import Attribution, Span
from specdec.stats import RequestStats

if TYPE_CHECKING:
    from specdec.api import LLM, Completion, Piece

Show = Callable[[int, Sequence[Span], bool], None]  # prompt, what came, whether it is the last


class Interrupts:
    """Lets Ctrl-C end a stream between two steps, so that text and counters agree.

    A second Ctrl-C, or one before the first token, interrupts at once as usual.
    """

    def __init__(self) -> None:
        self.is_patient = False
        self.seen = False
        self._previous: Any = None

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        # Whoever ignores Ctrl-C, such as nohup, goes on ignoring it.
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.seen or not self.is_patient:
            raise KeyboardInterrupt
        self.seen = True


class _Answer:
    """One prompt's answer as far as it has come."""

    def __init__(self, llm: LLM, prompt: Sequence[int]) -> None:
        self.attribution = Attribution(llm.tokenizer)
        self.completion: Completion | None = None
        self._prompt, self._text = list(prompt), ""
        self._tokens: list[int] = []
        self._from_draft: list[bool] = []
        self._logprobs: list[Any] | None = None
        self._stats = RequestStats(num_prompt_tokens=len(prompt))

    @property
    def has_begun(self) -> bool:
        return bool(self._tokens)

    def take(self, piece: Piece) -> list[Span]:
        spans = self.attribution.push(piece)
        self._text += piece.text
        self._tokens += piece.token_ids
        self._from_draft += piece.from_draft
        self._stats = piece.stats or self._stats
        if piece.logprobs is not None:
            self._logprobs = (self._logprobs or []) + piece.logprobs
        self.completion = piece.completion
        return spans

    def interrupt(self) -> list[Span]:
        """End it here; what was held back is shown."""
        from specdec.api import Completion

        rest = self.attribution.rest()
        self.completion = Completion(
            prompt_token_ids=self._prompt,
            token_ids=self._tokens,
            text=self._text + "".join(text for text, _ in rest),
            finish_reason="interrupt",
            stats=self._stats,
            from_draft=self._from_draft,
            logprobs=self._logprobs,
        )
        return rest


def answer(
    llm: LLM, prompts: Sequence[Sequence[int]], options: dict[str, Any], show: Show
) -> tuple[list[Completion], bool]:
    """Generate from prompts of token ids; return their completions, and whether Ctrl-C ended them.

    The finish reason of an interrupted one is "interrupt". Whatever else ends a stream is raised, after what had come
    was shown.

    Args:
        llm: what generates.
        prompts: token ids.
        options: of `LLM.stream`.
        show: called with what comes.
    """
    answers = [_Answer(llm, prompt) for prompt in prompts]
    interrupted = False
    stream = llm.stream([list(prompt) for prompt in prompts], **options)
    try:
        with Interrupts() as interrupts:
            for piece in stream:
                interrupts.is_patient = True
                show(piece.index, answers[piece.index].take(piece), piece.completion is not None)
                if interrupts.seen:
                    break
            interrupted = interrupts.seen
    except KeyboardInterrupt:
        interrupted = True
    finally:
        stream.close()  # type: ignore[attr-defined]
        has_begun = any(one.has_begun for one in answers)
        for i, one in enumerate(answers):
            if one.completion is None:
                rest = one.interrupt()
                if has_begun:
                    show(i, rest, True)
    return [one.completion for one in answers if one.completion is not None], interrupted

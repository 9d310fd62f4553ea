"""A chat's history and what it took. Prints nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.cli.answering import Show, answer
from specdec.cli.loading import chat_ids
from specdec.cli.report import report

if TYPE_CHECKING:
    from specdec.api import LLM, Completion
    from specdec.interfaces import SamplingParams
    from specdec.stats import RequestStats


class Conversation:
    """Turns of user and assistant through the model's chat template.

    A message that is refused leaves the history as it was. An answer that Ctrl-C ended stays as far as it came.

    Args:
        llm: what answers.
        model: its name, for reports.
        sampling: as in `options`, for reports.
        options: of `LLM.stream`.
        system: the first message, if given.

    Raises:
        ConfigError: the model has no chat template.
        InputError: its template takes no system message.
    """

    def __init__(
        self, llm: LLM, model: str, sampling: SamplingParams, options: dict[str, Any], system: str | None
    ) -> None:
        self.llm, self._model, self._sampling, self._options = llm, model, sampling, options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()
        self._ids("Hello")  # a template that cannot be used is refused before anything is typed

    def reset(self) -> None:
        """Begin anew: the system prompt stays."""
        self.messages: list[dict[str, Any]] = list(self._system)
        self.stats: list[RequestStats] = []
        self.num_tokens = 0  # of the conversation

    @property
    def max_tokens(self) -> int | None:
        """How many tokens the model's context holds."""
        limit: int | None = self.llm.engine.target.max_positions
        return limit

    @property
    def is_full(self) -> bool:
        return self.max_tokens is not None and self.num_tokens >= self.max_tokens

    def _ids(self, text: str) -> list[int]:
        messages = [*self.messages, {"role": "user", "content": text}]
        return chat_ids(self.llm, messages, "use `specdec generate --raw` to continue a plain text")

    def ask(self, text: str, show: Show) -> tuple[Completion, bool]:
        """Return the answer to a message, and whether Ctrl-C ended it.

        Raises:
            SpecdecError: the message is refused, for example because the context is full.
        """
        (done,), interrupted = answer(self.llm, [self._ids(text)], self._options, show)
        self.stats.append(done.stats)
        if done.token_ids:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": done.text}]
            self.num_tokens = len(done.prompt_token_ids) + len(done.token_ids)
        return done, interrupted

    def report(self, text: str, done: Completion) -> dict[str, Any]:
        """Return an answer's report, as of `specdec generate --json`."""
        return report(self.llm, self._model, self._sampling, text, done, self._options.get("stop"))

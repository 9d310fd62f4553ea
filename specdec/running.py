"""Running prompts on an engine to their ends, or piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from specdec.engine import Engine
from specdec.errors import ConfigError, SpecdecError
from specdec.interfaces import SamplingParams
from specdec.record import Keep
from specdec.request import Request, StopRules


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and what is wanted of it."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    stop: StopRules
    keep: Keep = Keep()
    priority: int = 0
    draft: bool = True


def start(engine: Engine, jobs: Sequence[Job]) -> list[Request]:
    """Queue all jobs and return their requests, or none: a prompt that is refused takes the others back.

    Raises:
        SpecdecError: a prompt is refused; where there are several, the message names which.
    """
    requests: list[Request] = []
    try:
        for i, job in enumerate(jobs):
            try:
                requests.append(_add(engine, job))
            except SpecdecError as error:
                if len(jobs) > 1:
                    raise type(error)(f"prompt {i} of {len(jobs)}: {error}") from error
                raise
    except BaseException:
        forget(engine, requests)
        raise
    return requests


def _add(engine: Engine, job: Job) -> Request:
    return engine.add_request(
        job.prompt_token_ids, job.sampling, job.stop, job.keep, priority=job.priority, draft=job.draft
    )


def forget(engine: Engine, requests: Sequence[Request]) -> None:
    """Drop requests and what they hold; each of them, also if dropping one fails."""
    with ExitStack() as stack:
        for request in requests:
            stack.callback(engine.forget, request.request_id)


class Follower:
    """Hands out what requests emit, however many others run on the same engine and whoever steps it."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self.engine, self.requests = engine, requests
        self._seen = [0] * len(requests)
        self._ended = [False] * len(requests)

    @property
    def is_done(self) -> bool:
        return all(self._ended)

    def advance(self) -> None:
        """Step the engine unless something waits to be handed out already.

        Raises what a processor or criterion of one of these requests raised; other requests' faults end those only.
        """
        own = {r.request_id for r in self.requests}
        while not self.is_done and not any(True for _ in self._waiting()):
            try:
                self.engine.step()
                return
            except Exception as error:
                culprit = getattr(error, "specdec_request_id", None)
                if culprit is None or culprit in own:
                    raise
                self.engine.fail(culprit, error)  # the step did not happen: it is run again without that request
        for request in self.requests:
            if request.error is not None:
                raise request.error

    def take(self) -> list[tuple[int, int]]:
        """Return (index of a request, its first new token not handed out before) for each with news."""
        found = []
        for i in self._waiting():
            found.append((i, self._seen[i]))
            self._seen[i] = self.requests[i].num_new_tokens
            self._ended[i] = self.requests[i].finish_reason is not None
        return found

    def _waiting(self) -> Iterator[int]:
        for i, request in enumerate(self.requests):
            if request.num_new_tokens > self._seen[i] or (request.finish_reason is not None and not self._ended[i]):
                yield i


def check_streamer(streamer: Any, num_prompts: int, num_return_sequences: int = 1) -> None:
    """Raise ConfigError unless `streamer` is None, or a transformers streamer and there is one sequence for it."""
    if streamer is None:
        return
    if isinstance(streamer, type) or not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise ConfigError(f"streamer={streamer!r}; allowed: a transformers streamer, with put() and end()")
    if num_prompts != 1:
        raise ConfigError(f"a streamer takes one prompt, {num_prompts} were given")
    if num_return_sequences != 1:
        raise ConfigError(f"a streamer takes one sequence; num_return_sequences is {num_return_sequences}")


def run(engine: Engine, jobs: Sequence[Job], streamer: Any | None = None) -> list[Request]:
    """Run prompts to their ends and return their requests; the engine holds nothing of them afterwards.

    All prompts are checked before anything runs. A transformers streamer gets the prompt, each token alone, and the
    end, as from transformers' generate().
    """
    requests = start(engine, jobs)
    try:
        if streamer is not None:
            streamer.put(torch.tensor([jobs[0].prompt_token_ids]))
        follow = Follower(engine, requests)
        while not follow.is_done:
            follow.advance()
            for i, first in follow.take():
                for token in requests[i].new_tokens[first:] if streamer is not None else ():
                    streamer.put(torch.tensor([token]))  # type: ignore[union-attr]
        if streamer is not None:
            streamer.end()
    finally:
        forget(engine, requests)
    return requests

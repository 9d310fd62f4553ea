"""Running prompts on an engine to their ends, or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
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


class Steps:
    """Steps an engine and tells whose requests have news, whoever else steps it in between."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_steps = -1  # of the engine, after the last one here
        self._num_last = -1

    @property
    def were_others(self) -> bool:
        """True at first, and when the engine was stepped from elsewhere since the last step here."""
        return self._engine.stats.num_steps != self._num_steps

    def step(self) -> list[int] | None:
        """Run one step; return the ids of the requests with news, or None where any request may have some."""
        were_others, before = self.were_others, self._engine.stats.num_steps
        self._num_steps = -1  # until `taken`
        outputs = self._engine.step()
        self._num_last = self._engine.stats.num_steps
        # A step without work hands out what others left; so requests are looked at before one waits in vain.
        return None if were_others or self._num_last == before else [output.request_id for output in outputs]

    def taken(self) -> None:
        """Say that the news of the last step are noted; had that failed, any request may have some at the next."""
        self._num_steps = self._num_last


class Follower:
    """Hands out what requests emit, however many others run on the same engine and whoever steps it.

    What a step costs here depends on how many requests have news, not on how many there are.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self.engine, self.requests = engine, requests
        self._steps = Steps(engine)
        self._places = {request.request_id: i for i, request in enumerate(requests)}
        self._seen = [0] * len(requests)
        self._open = set(range(len(requests)))  # whose ends were not handed out
        self._news: set[int] = set()

    @property
    def is_done(self) -> bool:
        return not self._open

    def advance(self) -> None:
        """Step the engine unless something waits to be handed out already.

        Raises what a processor or criterion of one of these requests raised; other requests' faults end those only.
        """
        if self._steps.were_others:
            self.look()
        while not self.is_done and not self._news:
            try:
                self._note(self._steps.step())
                self._steps.taken()
                break
            except BaseException as error:
                culprit = getattr(error, "specdec_request_id", None)
                if culprit is None or culprit in self._places:
                    raise
                self.engine.fail(culprit, error)  # the step did not happen: it is run again without that request
        for i in self._news:
            own = self.requests[i].error
            if own is not None:
                raise own

    def look(self) -> None:
        """Look for news in all requests: the engine may have been stepped from elsewhere."""
        self._news.update(i for i in self._open if self._has_news(i))

    def take(self) -> list[tuple[int, int]]:
        """Return (index of a request, its first new token not handed out before) for each with news."""
        found = []
        for i in sorted(self._news):
            found.append((i, self._seen[i]))
            self._seen[i] = self.requests[i].num_new_tokens
            if self.requests[i].finish_reason is not None:
                self._open.discard(i)
        self._news.clear()
        return found

    def _note(self, request_ids: Sequence[int] | None) -> None:
        if request_ids is None:
            self.look()
        else:
            places = (self._places.get(request_id) for request_id in request_ids)
            self._news.update(i for i in places if i is not None and i in self._open and self._has_news(i))

    def _has_news(self, i: int) -> bool:
        request = self.requests[i]
        return request.num_new_tokens > self._seen[i] or request.finish_reason is not None


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

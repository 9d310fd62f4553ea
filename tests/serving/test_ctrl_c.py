"""Ctrl-C in direct use, wherever it strikes: what was produced is handed out later, and nothing is held by nobody."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specdec import Engine, ModelChangedError, WrongThreadError
from tests.serving.engines import PROMPTS, assert_empty, drain, engine, solo
from tests.serving.test_model_changes import edit


def interrupting(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Have Ctrl-C come at the end of the next call of a method of `Engine`; what is returned empties then."""
    honest, pending = getattr(Engine, name), [1]

    def method(self: Engine, *args: Any) -> Any:
        result = honest(self, *args)
        if pending:
            pending.clear()
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(Engine, name, method)
    return pending


def test_a_request_whose_id_was_never_told_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = engine()
    interrupting(monkeypatch, "_add")
    with pytest.raises(KeyboardInterrupt):
        serving.add_request(PROMPTS[0], max_new_tokens=8)
    assert_empty(serving)
    request_id = serving.add_request(PROMPTS[0], max_new_tokens=8)
    assert drain(serving)[request_id].token_ids == solo(PROMPTS[0], 8)


def test_what_abort_would_have_returned_comes_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = engine()
    request_id = serving.add_request(PROMPTS[0], max_new_tokens=99)
    serving.step()
    interrupting(monkeypatch, "_take")
    with pytest.raises(KeyboardInterrupt):
        serving.abort(request_id)
    assert serving.has_unfinished
    assert drain(serving)[request_id].finish_reason == "abort"
    assert_empty(serving)


def test_a_refusal_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests come between two steps and the model changes between them; Ctrl-C comes while the second is told."""
    serving = engine()
    first = serving.add_request(PROMPTS[0], max_new_tokens=8)
    edit(serving.llm.model)
    second = serving.add_request(PROMPTS[1], max_new_tokens=8)
    interrupting(monkeypatch, "_refuse_uncompared")
    with pytest.raises(KeyboardInterrupt):
        serving.step()
    found = drain(serving)
    assert isinstance(found[second].error, ModelChangedError)
    assert first in found
    assert_empty(serving)


def test_a_call_from_a_wrong_thread_changes_nothing() -> None:
    serving = engine()
    request_id = serving.add_request(PROMPTS[0], max_new_tokens=8)
    refused = []

    def wrong() -> None:
        for call in (serving.step, lambda: serving.add_request(PROMPTS[1]), lambda: serving.abort(request_id)):
            try:
                call()
            except WrongThreadError as error:
                refused.append(error)

    thread = threading.Thread(target=wrong)
    thread.start()
    thread.join()
    assert len(refused) == 3
    assert serving._changing_in is None
    assert drain(serving)[request_id].token_ids == solo(PROMPTS[0], 8)
    assert serving.metrics().num_finished == 1


def test_a_thread_that_cannot_be_started_leaves_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool takes the call and then fails to start its thread: the call runs with the next one."""
    serving = engine()
    honest = ThreadPoolExecutor._adjust_thread_count
    failures = [1]

    def adjust(self: ThreadPoolExecutor) -> None:
        if failures:
            failures.clear()
            raise RuntimeError("can't start new thread")
        honest(self)

    monkeypatch.setattr(ThreadPoolExecutor, "_adjust_thread_count", adjust)
    done = []
    with pytest.raises(RuntimeError, match="can't start"):
        serving._worker.post(done.append, 1)
    serving._worker.post(done.append, 2)
    request_id = serving.add_request(PROMPTS[0], max_new_tokens=8)  # waits for the thread to have nothing left
    assert done == [1, 2]
    assert drain(serving)[request_id].token_ids == solo(PROMPTS[0], 8)

"""Shared by the tests of `specdec.Engine`: engines over one tiny model, what a request gets alone, and how to read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import specdec
from specdec import Completion
from tests.decoding import prompts
from tests.models.architectures import model_of, named
from tests.tiny_chat_model import tiny_tokenizer

PROMPTS = prompts(3, 9, 14, 5)


def engine(**options: Any) -> specdec.Engine:
    options = {"drafter": "ngram", **options}
    return specdec.Engine(model_of(named("llama")), tokenizer=tiny_tokenizer(), **options)


def solo(prompt: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
    llm = specdec.LLM(model_of(named("llama")), tokenizer=tiny_tokenizer())
    return llm.generate(list(prompt), max_new_tokens=max_new_tokens, **options)[0].token_ids


def drain(serving: specdec.Engine, found: dict[int, Completion] | None = None) -> dict[int, Completion]:
    found = {} if found is None else found
    for _ in range(300):
        if not serving.has_unfinished:
            return found
        take(serving, found)
    raise AssertionError("the engine does not end")


def take(serving: specdec.Engine, found: dict[int, Completion]) -> None:
    found |= {piece.index: piece.completion for piece in serving.step() if piece.completion is not None}


def assert_empty(serving: specdec.Engine) -> None:
    serving.check_integrity()
    assert serving.kv_usage()["num_used"] == 0
    assert (serving.metrics().drafter_kv or {"num_used": 0})["num_used"] == 0
    assert not serving.has_unfinished
    assert not serving.llm.engine._requests


async def read(serving: specdec.Engine, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
    tokens: list[int] = []
    async for piece in serving.stream(list(prompt), max_new_tokens=max_new_tokens, **options):
        tokens += piece.token_ids
    return tokens


async def settled(serving: specdec.Engine) -> None:
    """Wait until nobody uses the engine, as a cancelled stream leaves it a moment later."""
    for _ in range(500):
        if not serving.has_unfinished:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a request is left")


def instead_of_forward(serving: specdec.Engine, function: Callable[..., Any]) -> Callable[..., Any]:
    """Have steps call `function(*args)` in place of the target's forward, and return that."""
    target = serving.llm.engine.target
    forward = target.forward
    target.forward = function  # type: ignore[assignment,method-assign]
    return forward


class Gate:
    """Holds steps in the middle until it is opened, and tells when one has come."""

    def __init__(self, serving: specdec.Engine) -> None:
        self.is_reached, self._is_open = threading.Event(), threading.Event()
        self._forward = instead_of_forward(serving, self._pass)

    def _pass(self, *args: Any) -> Any:
        self.is_reached.set()
        assert self._is_open.wait(20), "nobody opened the gate"
        return self._forward(*args)

    async def reached(self) -> None:
        while not self.is_reached.is_set():
            await asyncio.sleep(0.001)

    def open(self) -> None:
        self._is_open.set()

"""Ctrl-C on any line of the cache's code: nothing leaks, nothing is lost, and the same call works afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from specdec.kv.cache import KVCache
from tests.kv.test_prefix import SIZE, TEXT, Shared

Operation = tuple[str, int, list[int]]  # what, request, tokens
MOST_BLOCKS = 9
# First writes, hits, copies, eviction, moves, release.
OPERATIONS: list[Operation] = [
    ("run", 0, TEXT[:13]),
    ("run", 1, TEXT[:8]),
    ("run", 2, [9, *TEXT[1:9]]),
    ("release", 0, []),
    ("run", 3, TEXT[:12]),
    ("release", 1, []),
    ("run", 3, [*TEXT[:12], 70, 71, 72, 73, 74]),
    ("release", 2, []),
    ("run", 5, [3] * 10),
    ("release", 3, []),
]
# After a hit and some steps the pieces are put together.
GATHERED: list[Operation] = [
    ("run", 0, TEXT[:13]),
    *(("run", 1, [*TEXT[:12], *range(60, 61 + i)]) for i in range(7)),
    ("run", 2, TEXT[:12]),
    ("release", 1, []),
]


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which pytest takes for its own."""


class Interruption:
    """A trace function that raises as line number `line` of specdec/kv is about to run."""

    def __init__(self, line: int) -> None:
        self.left, self.where = line, ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        return self.on_line if "/specdec/kv/" in frame.f_code.co_filename else None

    def on_line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise Interrupted
        return self.on_line


def do(shared: Shared, what: str, request_id: int, tokens: list[int]) -> None:
    if what == "release":
        shared.cache.release(request_id)
        return
    if not shared.cache.is_open(request_id):
        shared.begin(request_id, tokens)
    if shared.cache.context_len(request_id) < len(tokens):
        shared.run(request_id, tokens)


def interrupted(shared: Shared, operation: Operation, line: int) -> str:
    """Do an operation with an interruption on one of its lines; return where that was, or "" if it has fewer."""
    interruption, before = Interruption(line), sys.gettrace()
    sys.settrace(interruption)
    try:
        do(shared, *operation)
    except Interrupted:
        pass
    finally:
        sys.settrace(before)
    return interruption.where


def fresh(codec: str | None, most_blocks: int | None) -> Shared:
    shared = Shared(max_blocks=most_blocks, featured=True)
    if codec is not None:
        shared.cache = KVCache(block_tokens=SIZE, prefix_caching=True, codec=codec)
    return shared


def try_line(shared: Shared, operations: list[Operation], index: int, line: int) -> str:
    """Interrupt one of all operations on one of its lines and check what comes of it; return where, or ""."""
    held: dict[int, list[int]] = {}
    where = ""
    for number, operation in enumerate(operations):
        what, request_id, tokens = operation
        if number == index:
            before = shared.cache.context_len(request_id) if shared.cache.is_open(request_id) else 0
            where = interrupted(shared, operation, line)
            if not where:
                return ""
            if what == "run" and shared.cache.is_open(request_id):  # as the engine does after a failed step
                shared.cache.restore(request_id, before)
            shared.cache.check_integrity()
        do(shared, *operation)
        held[request_id] = tokens
        if what == "release":
            del held[request_id]
    shared.cache.check_integrity()
    stored = [tensor for parts in shared.cache._storage.parts.values() for tensor in parts]
    assert shared.cache.bytes_per_token == sum(t[0].numel() * t.element_size() for t in stored)
    for request_id, tokens in held.items() if shared.cache.codec is None else ():
        shared.holds(request_id, tokens)
    return where


@pytest.mark.parametrize(("codec", "stride"), [(None, 5), ("int8", 9)])
def test_on_any_line_of_any_operation(codec: str | None, stride: int) -> None:
    places = []
    for index in range(len(OPERATIONS)):
        line = 1 + index % stride
        while where := try_line(fresh(codec, MOST_BLOCKS), OPERATIONS, index, line):
            places.append(where)
            line += stride
    assert len(places) > 200
    assert len(set(places)) > 100


@pytest.mark.parametrize(
    ("codec", "operations", "index"),
    [
        # It makes the tensors: what says that they are there must come last.
        pytest.param(None, OPERATIONS, 0, id="first write"),
        pytest.param("int8", OPERATIONS, 0, id="first write of codes"),
        pytest.param(None, GATHERED, 5, id="putting pieces together"),
    ],
)
def test_on_every_line(codec: str | None, operations: list[Operation], index: int) -> None:
    lines = iter(range(1, 10**6))
    most_blocks = MOST_BLOCKS if operations is OPERATIONS else None
    places = list(iter(lambda: try_line(fresh(codec, most_blocks), operations, index, next(lines)), ""))
    assert any("storage.py" in where for where in places)


def test_pieces_are_put_together_by_the_operation_that_is_interrupted() -> None:
    shared = fresh(None, None)
    runs = []
    for operation in GATHERED[:6]:
        do(shared, *operation)
        runs.append(int(max(len(t.runs) for t in shared.cache._sequences.values())))
    assert runs == [1, 2, 2, 2, 2, 1]

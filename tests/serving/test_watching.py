"""Looking at an engine while its thread steps: recent figures, never the books in the middle of an operation."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.decoding import prompts
from tests.models.architectures import model_of, named
from tests.serving.engines import PROMPTS, Gate, assert_empty, drain, engine, read

DRAFT_MODEL = {"drafter": "draft_model", "drafter_options": {"model": model_of(named("qwen2"))}}


def watch(cache: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list in which the threads are noted that look at a cache."""
    threads: list[int] = []
    usage = cache.usage

    def look() -> Any:
        threads.append(threading.get_ident())
        return usage()

    monkeypatch.setattr(cache, "usage", look)
    return threads


def test_streams_are_watched_from_outside_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = engine(prefix_caching=True, **DRAFT_MODEL)
    core = serving.llm.engine
    serving.add_request(PROMPTS[0], max_new_tokens=2)
    drain(serving)
    gate = Gate(serving)
    threads = [watch(cache, monkeypatch) for cache in (core.target.cache, core.drafter.own_cache)]  # type: ignore[attr-defined]

    async def main() -> None:
        tasks = [asyncio.create_task(read(serving, p, 20)) for p in PROMPTS]
        await gate.reached()
        found = serving.metrics()  # in the middle of a step
        assert serving.kv_usage() == found.kv
        assert (found.kv["num_used"], found.num_running, found.num_finished) == (0, len(PROMPTS), 1)
        gate.open()
        while not all(task.done() for task in tasks):
            serving.metrics()
            await asyncio.sleep(0)

    asyncio.run(main())
    for own in threads:
        assert own, "nobody looked"
        assert threading.get_ident() not in own
    after = serving.metrics()
    assert (after.num_finished, after.kv["num_used"]) == (1 + len(PROMPTS), 0)
    assert_empty(serving)


def test_figures_of_streams_are_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.serving.engine._LOOK_EVERY_S", 0.0)
    serving = engine()

    async def main() -> list[float]:
        seen = []
        async for _ in serving.stream(prompts(40)[0], max_new_tokens=30):
            seen.append((serving.kv_usage()["num_used"], serving.metrics().engine.num_steps))
        return seen

    seen = asyncio.run(main())
    blocks = [used for used, _ in seen[:-1]]
    assert min(blocks) > 0
    assert all(later >= i for i, (_, later) in enumerate(seen))


def test_another_thread_watches_direct_use() -> None:
    serving = engine()
    found: list[Any] = []

    def look(*args: Any) -> Any:
        thread = threading.Thread(target=lambda: found.append((serving.metrics(), serving.kv_usage())))
        thread.start()
        thread.join()
        return args[1]

    serving.add_request(PROMPTS[0], max_new_tokens=6, logits_processor=[look])
    drain(serving)
    assert len(found) == 6
    assert serving.metrics().num_finished == 1
    assert_empty(serving)


def test_a_processor_sees_the_figures_before_its_step() -> None:
    serving = engine()
    found: list[float] = []

    def look(input_ids: Any, scores: Any) -> Any:
        found.append(serving.kv_usage()["num_used"])
        return scores

    serving.add_request(PROMPTS[0], max_new_tokens=4, logits_processor=[look])
    serving.step()
    assert found[0] == 0
    drain(serving)
    assert_empty(serving)


class TestTheDraftersOwnCache:
    def test_what_it_holds_is_told_apart(self) -> None:
        serving = engine(**DRAFT_MODEL)
        serving.add_request(prompts(40)[0], max_new_tokens=8)
        for _ in range(3):
            serving.step()
        found = serving.metrics()
        assert found.drafter_kv is not None
        assert found.drafter_kv["num_used"] > 0
        assert serving.kv_usage() == found.kv
        drain(serving)
        assert_empty(serving)
        assert engine(drafter="ngram").metrics().drafter_kv is None

    def test_what_leaks_there_is_seen(self) -> None:
        serving = engine(**DRAFT_MODEL)
        cache = serving.llm.engine.drafter.own_cache  # type: ignore[attr-defined]
        serving.add_request(PROMPTS[0], max_new_tokens=4)
        drain(serving)
        cache.open(10**6, 20)
        cache.reserve(10**6, 20)
        serving.add_request(PROMPTS[0], max_new_tokens=4)
        drain(serving)
        left = serving.metrics().drafter_kv
        assert left is not None
        assert left["num_used"] > 0
        cache._allocation.tables.clear()  # the pool does not hear of it
        with pytest.raises(AssertionError, match="leak"):
            serving.check_integrity()

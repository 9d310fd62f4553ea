"""`specdec.Engine`, step by step and from asyncio: requests come, go, fail and are left, and others never notice."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from specdec import Completion, ConfigError, Engine, InputError, Piece, QueueFullError
from specdec.api import Pieces
from specdec.interfaces import DraftRequest, Noise, Observation, TokenTree
from tests.odd_drafters import Plain
from tests.serving.engines import PROMPTS, assert_empty, drain, engine, read, settled, solo, take


def test_kernel_caches_are_bounded_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    engine()
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"


class FailsAt:
    """A logits processor that raises at its n-th call."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise RuntimeError("on purpose")
        return scores


class Throws(Plain):
    """A drafter that raises, in one of its methods, from some call on."""

    name = "throws"

    def __init__(self, where: str, calls: int) -> None:
        self.where, self.left = where, calls

    def _count(self, where: str) -> None:
        if where == self.where:
            self.left -= 1
            if self.left < 0:
                raise ZeroDivisionError("on purpose")

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        from specdec.interfaces import empty_tree

        self._count("propose")
        return empty_tree(requests, "cpu")

    def observe(self, seen: Sequence[Observation]) -> None:
        self._count("observe")


class TestSteps:
    def test_requests_come_while_others_run(self) -> None:
        serving = engine(max_batch_size=2)
        found: dict[int, Completion] = {}
        ids = [serving.add_request(PROMPTS[0], max_new_tokens=20)]
        for prompt in PROMPTS[1:]:
            take(serving, found)
            ids.append(serving.add_request(prompt, max_new_tokens=12, temperature=0.8, seed=5))
        assert serving.num_running + serving.num_waiting >= 3
        drain(serving, found)
        assert found[ids[0]].token_ids == solo(PROMPTS[0], 20)
        for request_id, prompt in zip(ids[1:], PROMPTS[1:], strict=True):
            assert found[request_id].token_ids == solo(prompt, 12, temperature=0.8, seed=5)
        assert_empty(serving)

    def test_pieces_are_the_completion(self) -> None:
        serving = engine()
        serving.add_request("abcabcabc", max_new_tokens=12)
        pieces = []
        while serving.has_unfinished:
            pieces += serving.step()
        assert pieces[-1].completion is not None
        assert "".join(p.text for p in pieces) == pieces[-1].completion.text
        assert [t for p in pieces for t in p.token_ids] == pieces[-1].completion.token_ids

    def test_a_request_may_opt_out_of_drafting(self) -> None:
        serving = engine(drafter="random")
        drafted, plain = (serving.add_request(PROMPTS[1], max_new_tokens=12, draft=d) for d in (True, False))
        found = drain(serving)
        assert found[drafted].stats.num_draft_tokens > 0
        assert found[plain].stats.num_draft_tokens == 0
        assert found[plain].token_ids == found[drafted].token_ids

    def test_a_step_costs_what_had_news(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not what waits: with thousands in the queue steps would take many times as long."""
        serving = engine(max_batch_size=2, drafter="none")
        for _ in range(2):
            serving.add_request(PROMPTS[0], max_new_tokens=20)
        serving.step()
        looked: list[int] = []
        take = Pieces.take

        def counting(self: Pieces) -> list[Piece]:
            looked.append(1)
            return take(self)

        monkeypatch.setattr(Pieces, "take", counting)
        for _ in range(50):
            serving.add_request(PROMPTS[1], max_new_tokens=2)
        for _ in range(5):
            serving.step()
        assert len(looked) == 2 * 5

    def test_steps_that_another_door_runs_are_noticed(self) -> None:
        serving = engine()
        ids = [serving.add_request(p, max_new_tokens=6) for p in PROMPTS[:2]]
        pieces = serving.step()
        serving.llm.generate(PROMPTS[2], max_new_tokens=20)  # runs them to their ends on the way
        assert serving.has_unfinished
        pieces += serving.step()
        found = {p.index: p.completion.token_ids for p in pieces if p.completion is not None}
        assert found == dict(zip(ids, (solo(p, 6) for p in PROMPTS[:2]), strict=True))
        for i in ids:
            assert [t for p in pieces if p.index == i for t in p.token_ids] == found[i]
        assert_empty(serving)

    def test_priority_goes_first(self) -> None:
        serving = engine(max_batch_size=1)
        low, high = (serving.add_request(PROMPTS[0], max_new_tokens=4, priority=p) for p in (0, 1))
        found: dict[int, Completion] = {}
        while high not in found:
            take(serving, found)
        assert low not in found
        assert list(drain(serving, found)) == [high, low]

    def test_abort_mid_way(self) -> None:
        serving = engine(max_batch_size=2)
        kept, left, waits = (serving.add_request(p, max_new_tokens=20) for p in PROMPTS[:3])
        for _ in range(4):
            serving.step()
        done, never = serving.abort(left), serving.abort(waits)
        assert done is not None
        assert never is not None
        assert done.finish_reason == never.finish_reason == "abort"
        assert 0 < len(done.token_ids) < 20
        assert done.token_ids == solo(PROMPTS[1], 20)[: len(done.token_ids)]
        assert never.token_ids == []
        assert serving.abort(left) is None
        assert drain(serving)[kept].token_ids == solo(PROMPTS[0], 20)
        assert (serving.metrics().num_aborted, serving.metrics().num_finished) == (2, 1)
        assert_empty(serving)

    def test_a_full_queue_refuses_at_once_and_changes_nothing(self) -> None:
        serving = engine(max_batch_size=1, max_waiting=1)
        first = serving.add_request(PROMPTS[0], max_new_tokens=6)
        serving.step()
        second = serving.add_request(PROMPTS[1], max_new_tokens=6)
        for _ in range(3):
            with pytest.raises(QueueFullError, match="max_waiting"):
                serving.add_request(PROMPTS[2], max_new_tokens=6)
        found = drain(serving)
        assert found[first].token_ids == solo(PROMPTS[0], 6)
        assert found[second].token_ids == solo(PROMPTS[1], 6)
        assert len(found) == 2

    @pytest.mark.parametrize("call", [1, 4])
    def test_a_failing_processor_ends_its_own_request(self, call: int) -> None:
        serving = engine()
        good = serving.add_request(PROMPTS[0], max_new_tokens=12)
        bad = serving.add_request(PROMPTS[1], max_new_tokens=12, logits_processor=[FailsAt(call)])
        found = drain(serving)
        assert found[bad].finish_reason == "error"
        assert str(found[bad].error) == "on purpose"
        assert found[good].error is None
        assert found[bad].token_ids == solo(PROMPTS[1], 12)[: len(found[bad].token_ids)]
        assert found[good].token_ids == solo(PROMPTS[0], 12)
        assert (serving.metrics().num_failed, serving.metrics().num_finished) == (1, 1)
        assert_empty(serving)

    @pytest.mark.parametrize("where", ["propose", "observe"])
    def test_a_drafter_that_throws_costs_drafts_only(self, where: str, caplog: pytest.LogCaptureFixture) -> None:
        serving = engine(drafter=Throws(where, 2))
        ids = [serving.add_request(p, max_new_tokens=12) for p in PROMPTS[:3]]
        with caplog.at_level(logging.WARNING, "specdec"):
            found = drain(serving)
        for request_id, prompt in zip(ids, PROMPTS, strict=False):
            assert found[request_id].token_ids == solo(prompt, 12)
            assert found[request_id].stats.num_drafter_errors == 1
        assert serving.metrics().engine.num_drafter_errors == 3
        said = [r for r in caplog.records if "raised ZeroDivisionError" in r.getMessage()]
        assert len(said) == 1
        assert_empty(serving)

    def test_bad_requests_are_refused_by_name(self) -> None:
        serving = engine()
        with pytest.raises(InputError, match="takes one prompt, got 2"):
            serving.add_request(PROMPTS[:2])
        with pytest.raises(ConfigError, match="max_tokens"):
            serving.add_request(PROMPTS[0], max_tokens=3)
        with pytest.raises(ConfigError, match="priority"):
            serving.add_request(PROMPTS[0], priority="high")
        with pytest.raises(InputError, match="takes one prompt, got 0"):
            serving.add_request([])
        with pytest.raises(InputError, match="context limit"):
            serving.add_request([1] * 300)
        assert_empty(serving)


class TestInterrupts:
    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_ctrl_c_while_news_are_handed_out_loses_none(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """It comes when the `count`-th request of a step has been taken; what was taken is there for the next step."""
        serving = engine()
        ids = [serving.add_request(p, max_new_tokens=6) for p in PROMPTS[:3]]
        taken = 0
        honest = Engine._take

        def take_and_interrupt(self: Engine, request_id: int) -> list[Piece]:
            nonlocal taken
            taken += 1
            pieces = honest(self, request_id)
            if taken in (count, count + 6, count + 12):
                signal.raise_signal(signal.SIGINT)
            return pieces

        monkeypatch.setattr(Engine, "_take", take_and_interrupt)
        told: dict[int, list[int]] = {i: [] for i in ids}
        done: dict[int, list[int]] = {}
        num_interrupts = 0
        for _ in range(60):
            if not serving.has_unfinished:
                break
            try:
                pieces = serving.step()
            except KeyboardInterrupt:
                num_interrupts += 1
                continue
            for piece in pieces:
                told[piece.index] += piece.token_ids
                if piece.completion is not None:
                    done[piece.index] = piece.completion.token_ids
        assert num_interrupts >= 2
        assert told == done == {i: solo(p, 6) for i, p in zip(ids, PROMPTS, strict=False)}
        assert_empty(serving)


class TestStreams:
    def test_concurrent_streams_are_solo_runs(self) -> None:
        serving = engine(max_batch_size=3)

        async def main() -> list[list[int]]:
            sampled = read(serving, PROMPTS[3], 14, temperature=0.7, seed=2)
            return await asyncio.gather(*(read(serving, p, 14) for p in PROMPTS[:3]), sampled)

        found = asyncio.run(main())
        assert found[:3] == [solo(p, 14) for p in PROMPTS[:3]]
        assert found[3] == solo(PROMPTS[3], 14, temperature=0.7, seed=2)
        assert_empty(serving)
        assert asyncio.run(main()) == found  # in another event loop
        assert serving.metrics().num_finished == 8

    def test_a_cancelled_stream_takes_its_request_along(self) -> None:
        serving = engine()

        async def main() -> list[int]:
            endless = asyncio.create_task(read(serving, PROMPTS[1], 200))
            other = asyncio.create_task(read(serving, PROMPTS[0], 24))
            while not serving.num_running:
                await asyncio.sleep(0.001)
            endless.cancel()
            with pytest.raises(asyncio.CancelledError):
                await endless
            return await other

        assert asyncio.run(main()) == solo(PROMPTS[0], 24)
        assert serving.metrics().num_aborted == 1
        assert_empty(serving)

    def test_an_abandoned_stream_takes_its_request_along(self) -> None:
        serving = engine()

        async def look() -> None:
            async for piece in serving.stream(PROMPTS[1], max_new_tokens=200):
                if piece.token_ids:
                    break

        async def main() -> list[int]:
            other = asyncio.create_task(read(serving, PROMPTS[0], 24))
            await look()
            gc.collect()
            tokens = await other
            await settled(serving)
            return tokens

        assert asyncio.run(main()) == solo(PROMPTS[0], 24)
        assert_empty(serving)

    def test_a_full_queue_refuses_at_once(self) -> None:
        serving = engine(max_batch_size=1, max_waiting=1)

        async def main() -> tuple[list[Any], list[list[int]]]:
            running = asyncio.create_task(read(serving, PROMPTS[0], 40))
            while not serving.num_running:
                await asyncio.sleep(0.001)
            waiting = asyncio.create_task(read(serving, PROMPTS[1], 4))
            while not serving.num_waiting:
                await asyncio.sleep(0.001)
            refused = await asyncio.gather(*(read(serving, PROMPTS[2], 4) for _ in range(10)), return_exceptions=True)
            return refused, list(await asyncio.gather(running, waiting))

        refused, answered = asyncio.run(main())
        assert [type(error) for error in refused] == [QueueFullError] * 10
        assert answered == [solo(PROMPTS[0], 40), solo(PROMPTS[1], 4)]
        assert_empty(serving)

    def test_a_failing_processor_ends_its_own_stream(self) -> None:
        serving = engine()

        async def main() -> tuple[Completion, list[int]]:
            bad = serving.generate(PROMPTS[1], max_new_tokens=12, logits_processor=[FailsAt(3)])
            done, tokens = await asyncio.gather(bad, read(serving, PROMPTS[0], 12))
            return done, tokens

        done, tokens = asyncio.run(main())
        assert done.finish_reason == "error"
        assert tokens == solo(PROMPTS[0], 12)
        assert_empty(serving)

    def test_a_broken_model_reaches_every_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        serving = engine()
        forward = serving.llm.engine.target.forward
        monkeypatch.setattr(serving.llm.engine.target, "forward", lambda *a: 1 / 0)

        async def main() -> list[Any]:
            return await asyncio.gather(*(read(serving, p, 8) for p in PROMPTS[:2]), return_exceptions=True)

        assert [type(error) for error in asyncio.run(main())] == [ZeroDivisionError] * 2
        assert_empty(serving)
        monkeypatch.setattr(serving.llm.engine.target, "forward", forward)
        assert asyncio.run(read(serving, PROMPTS[0], 8)) == solo(PROMPTS[0], 8)

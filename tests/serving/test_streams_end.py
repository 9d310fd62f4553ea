"""However streams and their event loops end: nobody waits for ever, nothing is held, the engine can be used again."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import specdec
from specdec import ConfigError, InputError, QueueFullError, WrongThreadError
from tests.models.architectures import model_of, named
from tests.serving.engines import PROMPTS, Gate, assert_empty, drain, engine, instead_of_forward, read, settled, solo

_PATIENCE_S = 20.0  # a stream that never ends fails instead of hanging


class Fatal(BaseException):
    """Nothing that `except Exception` catches."""


async def outcomes(*streams: Any) -> list[Any]:
    """Return what each of several streams gives or raises, KeyboardInterrupt included."""

    async def one(stream: Any) -> Any:
        try:
            return await stream
        except BaseException as error:  # a task that raised KeyboardInterrupt would end the event loop
            return error

    return list(await asyncio.wait_for(asyncio.gather(*map(one, streams)), _PATIENCE_S))


class TestErrors:
    @pytest.mark.parametrize("raised", [Fatal, KeyboardInterrupt, StopIteration, StopAsyncIteration, ZeroDivisionError])
    def test_whatever_a_step_raises_reaches_every_stream(self, raised: type[BaseException]) -> None:
        serving = engine()

        def fail(*args: Any) -> Any:
            raise raised

        forward = instead_of_forward(serving, fail)
        errors = asyncio.run(outcomes(*(read(serving, p, 8) for p in PROMPTS[:3])))
        # A generator cannot raise the two: they would end it as if it were done.
        expected = RuntimeError if raised in (StopIteration, StopAsyncIteration) else raised
        assert [type(error) for error in errors] == [expected] * 3
        assert_empty(serving)
        instead_of_forward(serving, forward)
        assert asyncio.run(read(serving, PROMPTS[0], 8)) == solo(PROMPTS[0], 8)

    def test_what_an_llm_raises_reaches_its_caller(self, monkeypatch: pytest.MonkeyPatch) -> None:
        llm = specdec.LLM(model_of(named("llama")))

        def fail(*args: Any) -> Any:
            raise StopIteration

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.target, "forward", fail)
            (error,) = asyncio.run(outcomes(llm.agenerate(PROMPTS[0], max_new_tokens=8)))
        assert isinstance(error, RuntimeError)
        assert isinstance(error.__cause__, StopIteration)
        assert llm.generate(PROMPTS[0], max_new_tokens=8)[0].token_ids == solo(PROMPTS[0], 8)

    def test_what_cannot_be_handed_out_reaches_every_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        serving = engine()

        def fail(*args: Any) -> Any:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(serving._mail, "send", fail)
            errors = asyncio.run(outcomes(*(read(serving, p, 8) for p in PROMPTS[:2])))
        assert [type(error) for error in errors] == [ZeroDivisionError] * 2
        assert_empty(serving)
        assert asyncio.run(read(serving, PROMPTS[0], 8)) == solo(PROMPTS[0], 8)

    def test_ctrl_c(self) -> None:
        serving = engine(max_batch_size=2)

        async def main() -> None:
            streams = [asyncio.create_task(read(serving, p, 200)) for p in PROMPTS[:3]]
            while not serving.num_running:
                await asyncio.sleep(0.001)
            signal.raise_signal(signal.SIGINT)
            await asyncio.gather(*streams)

        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
        serving.add_request(PROMPTS[0], max_new_tokens=8)
        assert [c.token_ids for c in drain(serving).values()] == [solo(PROMPTS[0], 8)]
        assert_empty(serving)


def close_with_open_streams(serving: specdec.Engine, *prompts: Sequence[int]) -> list[Any]:
    """Leave an event loop in the middle of streams, as a Ctrl-C does, close it, and return what holds them."""
    loop = asyncio.new_event_loop()
    kept: list[Any] = []

    async def begin() -> None:
        kept.extend(asyncio.ensure_future(read(serving, prompt, 200)) for prompt in prompts)
        while serving.num_running + serving.num_waiting < len(prompts):
            await asyncio.sleep(0.001)

    loop.run_until_complete(begin())
    loop.close()
    return kept


# What asyncio says of tasks that its loop left behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestLettingGo:
    """What is dropped after a fault of the whole engine: all of it, whatever else fails."""

    def test_one_that_cannot_be_dropped_keeps_no_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of a closed loop are dropped together, and by nobody else."""
        serving = engine()
        core = serving.llm.engine
        honest = core.forget
        ids = [serving.add_request(p, max_new_tokens=50) for p in PROMPTS[:3]]
        serving.step()

        def forget(request_id: int) -> None:
            honest(request_id)
            if request_id == ids[1]:
                raise RuntimeError("cannot be dropped")

        monkeypatch.setattr(core, "forget", forget)
        with pytest.raises(RuntimeError, match="cannot be dropped"):
            serving._drop(ids)
        assert_empty(serving)

    def test_what_failed_streams_were_not_told_is_told_to_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Taking the second one's news fails when those of the first are ready."""
        serving = engine()
        honest = specdec.Engine._take
        taken: list[int] = []

        def take(self: specdec.Engine, request_id: int) -> list[specdec.Piece]:
            taken.append(request_id)
            if len(taken) > 4 and request_id != taken[0]:
                raise MemoryError
            return honest(self, request_id)

        monkeypatch.setattr(specdec.Engine, "_take", take)

        async def main() -> list[Any]:
            streams = [read(serving, p, 50) for p in PROMPTS[:2]]
            return await asyncio.gather(*streams, return_exceptions=True)

        assert [type(raised) for raised in asyncio.run(main())] == [MemoryError] * 2
        monkeypatch.undo()
        assert_empty(serving)
        request_id = serving.add_request(PROMPTS[0], max_new_tokens=8)
        assert drain(serving)[request_id].token_ids == solo(PROMPTS[0], 8)


class TestClosedLoops:
    @pytest.fixture(autouse=True)
    def _collect(self) -> Iterator[None]:
        yield
        gc.collect()

    def test_the_next_loop(self) -> None:
        serving = engine(max_batch_size=1)
        kept = close_with_open_streams(serving, PROMPTS[0], PROMPTS[2])
        assert asyncio.run(asyncio.wait_for(read(serving, PROMPTS[1], 8), _PATIENCE_S)) == solo(PROMPTS[1], 8)
        assert_empty(serving)
        assert serving.metrics().num_aborted == 2
        del kept

    def test_direct_use(self) -> None:
        serving = engine()
        kept = close_with_open_streams(serving, PROMPTS[0])
        serving.add_request(PROMPTS[1], max_new_tokens=8)
        assert [c.token_ids for c in drain(serving).values()] == [solo(PROMPTS[1], 8)]
        assert_empty(serving)
        del kept

    def test_streams_of_another_loop_go_on(self) -> None:
        serving = engine()

        async def main() -> list[int]:
            running = asyncio.create_task(read(serving, PROMPTS[1], 40))
            while not serving.num_running:
                await asyncio.sleep(0.001)
            thread = threading.Thread(target=close_with_open_streams, args=(serving, PROMPTS[0], PROMPTS[2]))
            thread.start()
            tokens = await running
            await asyncio.to_thread(thread.join)
            await settled(serving)
            return tokens

        assert asyncio.run(asyncio.wait_for(main(), _PATIENCE_S)) == solo(PROMPTS[1], 40)
        assert_empty(serving)
        assert serving.metrics().num_aborted == 2

    def test_of_an_llm(self) -> None:
        llm = specdec.LLM(model_of(named("llama")))
        loop = asyncio.new_event_loop()
        stream = llm.astream(PROMPTS[0], max_new_tokens=200)
        loop.run_until_complete(anext(stream))
        loop.close()
        assert llm.generate(PROMPTS[1], max_new_tokens=8)[0].token_ids == solo(PROMPTS[1], 8)
        assert not llm.engine._requests
        assert asyncio.run(llm.agenerate(PROMPTS[1], max_new_tokens=8))[0].token_ids == solo(PROMPTS[1], 8)


def test_two_loops_share_the_steps() -> None:
    serving = engine(max_batch_size=4)
    found: dict[int, Any] = {}
    begin = threading.Barrier(2)

    def serve(k: int) -> None:
        async def main() -> list[list[int]]:
            begin.wait(_PATIENCE_S)
            return list(await asyncio.gather(*(read(serving, p, 24) for p in PROMPTS[k : k + 2])))

        found[k] = asyncio.run(asyncio.wait_for(main(), _PATIENCE_S))

    threads = [threading.Thread(target=serve, args=(k,)) for k in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {k: [solo(p, 24) for p in PROMPTS[k : k + 2]] for k in (0, 2)}
    assert_empty(serving)


class TestDoors:
    def test_direct_use_waits_for_what_cancelled_streams_left(self) -> None:
        """Cancelled twice, a stream ends before the thread has heard of it, in the middle of a step."""
        serving = engine()
        gate = Gate(serving)

        async def main() -> None:
            task = asyncio.create_task(read(serving, PROMPTS[0], 50))
            await gate.reached()
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        timer = threading.Timer(0.05, gate.open)
        timer.start()
        request_id = serving.add_request(PROMPTS[1], max_new_tokens=8)
        assert drain(serving)[request_id].token_ids == solo(PROMPTS[1], 8)
        assert serving.metrics().num_aborted == 1
        assert_empty(serving)

    def test_the_next_loop_does_not_take_it_for_direct_use(self) -> None:
        serving = engine()
        gate = Gate(serving)

        async def first() -> None:
            task = asyncio.create_task(read(serving, PROMPTS[0], 50))
            await gate.reached()
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)

        asyncio.run(first())
        threading.Timer(0.05, gate.open).start()
        assert asyncio.run(read(serving, PROMPTS[1], 8)) == solo(PROMPTS[1], 8)
        assert_empty(serving)

    def test_direct_use_beside_streams_is_refused(self) -> None:
        serving = engine()

        async def main() -> None:
            stream = serving.stream(PROMPTS[0], max_new_tokens=50)
            await anext(stream)
            calls = (
                lambda: serving.add_request(PROMPTS[1]),
                serving.step,
                serving.check_integrity,
            )
            for call in calls:
                with pytest.raises(WrongThreadError, match="streams are open"):
                    call()
            await stream.aclose()
            serving.check_integrity()

        asyncio.run(main())
        serving.add_request(PROMPTS[0], max_new_tokens=8)
        with pytest.raises(WrongThreadError, match="added directly"):
            asyncio.run(read(serving, PROMPTS[1], 8))
        assert [c.token_ids for c in drain(serving).values()] == [solo(PROMPTS[0], 8)]

    def test_abort_ends_a_stream_with_its_completion(self) -> None:
        serving = engine()

        async def main() -> list[Any]:
            other = asyncio.create_task(read(serving, PROMPTS[1], 24))
            pieces = []
            async for piece in serving.stream(PROMPTS[0], max_new_tokens=200):
                pieces.append(piece)
                if len(pieces) == 2:
                    assert serving.abort(piece.index) is None
                    assert serving.abort(piece.index) is None  # twice is once
            assert await other == solo(PROMPTS[1], 24)
            return pieces

        pieces = asyncio.run(main())
        assert pieces[-1].finish_reason == "abort"
        told = [token for piece in pieces for token in piece.token_ids]
        assert told == pieces[-1].completion.token_ids == solo(PROMPTS[0], 200)[: len(told)]
        assert len(told) < 200
        assert serving.metrics().num_aborted == 1
        assert_empty(serving)

    def test_a_processor_that_uses_the_engine_does_not_wait_for_itself(self) -> None:
        serving = engine()

        def nested(input_ids: Any, scores: Any) -> Any:
            serving.check_integrity()
            return scores

        done = asyncio.run(serving.generate(PROMPTS[0], max_new_tokens=8, logits_processor=[nested]))
        assert done.finish_reason == "error"
        assert isinstance(done.error, WrongThreadError)
        assert_empty(serving)

    def test_nor_does_one_whose_stream_is_gone(self) -> None:
        serving = engine()
        is_reached, is_gone = threading.Event(), threading.Event()
        raised: list[WrongThreadError] = []

        def nested(input_ids: Any, scores: Any) -> Any:
            is_reached.set()
            is_gone.wait(_PATIENCE_S)
            try:
                serving.check_integrity()
            except WrongThreadError as error:
                raised.append(error)
            return scores

        async def main() -> None:
            stream = serving.generate(PROMPTS[0], max_new_tokens=50, logits_processor=[nested])
            task = asyncio.create_task(stream)
            while not is_reached.is_set():
                await asyncio.sleep(0.001)
            for _ in range(4):
                task.cancel()
                await asyncio.sleep(0)
            assert task.done()

        asyncio.run(main())
        assert not serving._worker._users
        is_gone.set()
        serving.add_request(PROMPTS[1], max_new_tokens=8)
        assert [c.token_ids for c in drain(serving).values()] == [solo(PROMPTS[1], 8)]
        assert [str(error)[:17] for error in raised] == ["a step is running"]


class TestBursts:
    def test_refused_while_a_step_runs(self) -> None:
        """Those on their way to the thread count, so nobody waits for the step to be told that there is no room."""
        serving = engine(max_batch_size=1, max_waiting=4)
        gate = Gate(serving)

        async def main() -> tuple[int, list[Any]]:
            running = asyncio.create_task(read(serving, PROMPTS[0], 4))
            await gate.reached()
            burst = [asyncio.create_task(read(serving, PROMPTS[1], 4)) for _ in range(40)]
            for _ in range(5):
                await asyncio.sleep(0)
            num_done = sum(task.done() for task in burst)
            gate.open()
            return num_done, list(await asyncio.gather(running, *burst, return_exceptions=True))

        num_done, (first, *rest) = asyncio.run(main())
        refused = [type(outcome) for outcome in rest if isinstance(outcome, Exception)]
        assert (num_done, refused) == (36, [QueueFullError] * 36)
        assert first == solo(PROMPTS[0], 4)
        assert [tokens for tokens in rest if isinstance(tokens, list)] == [solo(PROMPTS[1], 4)] * 4
        assert_empty(serving)

    def test_whoever_is_refused_or_cancelled_takes_no_place(self) -> None:
        serving = engine(max_batch_size=1, max_waiting=2)
        gate = Gate(serving)

        async def main() -> list[Any]:
            running = asyncio.create_task(read(serving, PROMPTS[0], 4))
            await gate.reached()
            for _ in range(5):
                errors = await outcomes(read(serving, PROMPTS[0], -1), read(serving, [], 4))
                assert [type(error) for error in errors] == [ConfigError, InputError]
            gone = [asyncio.create_task(read(serving, PROMPTS[2], 4)) for _ in range(2)]
            await asyncio.sleep(0.001)
            for task in gone:
                task.cancel()
            gate.open()
            await asyncio.wait(gone)
            rest = await asyncio.gather(*(read(serving, PROMPTS[1], 4) for _ in range(2)))
            return [await running, *rest]

        assert asyncio.run(main()) == [solo(PROMPTS[0], 4), solo(PROMPTS[1], 4), solo(PROMPTS[1], 4)]
        assert not serving._coming
        assert_empty(serving)

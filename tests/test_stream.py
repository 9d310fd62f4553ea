"""LLM.stream, its asynchronous variants, and the text that both hand out."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import signal
import threading
from typing import Any

import pytest

import specdec
from specdec.errors import ConfigError, InputError, WrongThreadError
from specdec.stream import TextStream, as_stop_strings, text_of
from tests.decoding import prompts
from tests.models.architectures import build, named
from tests.tiny_chat_model import tiny_tokenizer

PROMPTS = prompts(3, 7, 12)
TOKENIZER = tiny_tokenizer()


@pytest.fixture
def llm() -> specdec.LLM:
    model = build(named("llama"))
    return specdec.LLM(model, tokenizer=TOKENIZER, drafter="oracle", drafter_options={"accept_rate": 0.7})


def is_idle(llm: specdec.LLM) -> bool:
    llm.engine.target.cache.check_integrity()
    return not llm.engine._requests and not llm.engine.has_unfinished


class TestTextStream:
    IDS = TOKENIZER("hello world, é è ab").input_ids

    @pytest.mark.parametrize("size", [1, 2, 3, 50])
    @pytest.mark.parametrize("stop", [(), ("world",), ("o w",), ("zzz",), ("ab", "wor")], ids=str)
    def test_pieces_are_the_text(self, size: int, stop: tuple[str, ...]) -> None:
        stream = TextStream(TOKENIZER, stop)
        pieces = [stream.push(self.IDS[i : i + size]) for i in range(0, len(self.IDS), size)]
        pieces.append(stream.finish(stopped=True))
        whole = TOKENIZER.decode(self.IDS)
        cuts = [whole.find(s) for s in stop if s in whole]
        assert "".join(pieces) == stream.text == whole[: min(cuts, default=len(whole))]
        assert text_of(TOKENIZER, self.IDS, stop, stopped=True) == stream.text

    def test_a_character_of_two_tokens_comes_whole(self) -> None:
        ids = TOKENIZER("é").input_ids
        assert len(ids) == 2
        stream = TextStream(TOKENIZER)
        assert [stream.push([t]) for t in ids] == ["", "é"]
        half = TextStream(TOKENIZER)
        assert half.push(ids[:1]) == ""
        assert half.finish(stopped=False) == "\N{REPLACEMENT CHARACTER}"

    def test_what_could_begin_a_stop_string_waits(self) -> None:
        stream = TextStream(TOKENIZER, ["abc"])
        assert [stream.push(TOKENIZER(c).input_ids) for c in "xabab"] == ["x", "", "", "ab", ""]
        assert stream.push(TOKENIZER("d").input_ids) == "abd"
        assert stream.push(TOKENIZER("a").input_ids) == ""
        assert stream.finish(stopped=False) == "a"

    def test_a_stop_string_of_special_tokens(self) -> None:
        """The text leaves them out, so it ends where the token stood."""
        ids = [*TOKENIZER("ab").input_ids, 0]
        assert text_of(TOKENIZER, ids, ("b<pad>",), stopped=True) == "a"
        stream = TextStream(TOKENIZER, ("b<pad>",))
        pieces = [stream.push([t]) for t in ids]
        assert ["".join(pieces), stream.finish(stopped=True)] == ["a", ""]

    @pytest.mark.parametrize("stop", [5, "", ["a", ""], [None]], ids=repr)
    def test_bad_stops(self, stop: Any) -> None:
        with pytest.raises(ConfigError, match="stop="):
            as_stop_strings(stop)


class TestStream:
    @pytest.mark.parametrize("stop", [None, ["b", "k"]], ids=str)
    @pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
    def test_pieces_are_the_completions(self, llm: specdec.LLM, stop: Any, sampling: dict[str, Any]) -> None:
        want = llm.generate(PROMPTS, max_new_tokens=20, stop=stop, **sampling)
        pieces = list(llm.stream(PROMPTS, max_new_tokens=20, stop=stop, **sampling))
        for i, done in enumerate(want):
            own = [p for p in pieces if p.index == i]
            assert "".join(p.text for p in own) == done.text
            assert [t for p in own for t in p.token_ids] == done.token_ids
            assert [d for p in own for d in p.from_draft] == done.from_draft
            assert [p.completion is None for p in own] == [True] * (len(own) - 1) + [False]
            last = own[-1].completion
            assert last is not None
            assert (last.text, last.token_ids, last.finish_reason) == (done.text, done.token_ids, done.finish_reason)
            assert own[-1].finish_reason == done.finish_reason
        assert len(pieces) > len(want)
        assert is_idle(llm)

    def test_what_was_drafted(self, llm: specdec.LLM) -> None:
        done = llm.generate(PROMPTS[0], max_new_tokens=20)[0]
        assert sum(done.from_draft) == done.stats.num_accepted_tokens > 0
        assert len(done.from_draft) == 20
        assert done.from_draft[0] is False, "prefill's token is the target's own"

    def test_an_abandoned_stream_leaves_the_engine_usable(self, llm: specdec.LLM) -> None:
        want = llm.generate(PROMPTS[1], max_new_tokens=20)[0].token_ids
        stream = llm.stream(PROMPTS, max_new_tokens=50)
        next(stream)
        assert not is_idle(llm)
        del stream
        gc.collect()
        assert is_idle(llm)
        never_begun = llm.stream(PROMPTS, max_new_tokens=50)
        del never_begun
        assert is_idle(llm)
        assert llm.generate(PROMPTS[1], max_new_tokens=20)[0].token_ids == want

    def test_an_interrupt_leaves_the_engine_usable(self, llm: specdec.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        want = llm.generate(PROMPTS[1], max_new_tokens=20)[0].token_ids
        step, count = llm.engine.step, 0

        def interrupted() -> Any:
            nonlocal count
            count += 1
            if count == 4:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(llm.engine, "step", interrupted)
        stream, got = llm.stream(PROMPTS[1], max_new_tokens=20), [0][:0]
        for _ in range(3):
            got += next(stream).token_ids
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        assert got == want[: len(got)] != []
        assert is_idle(llm)
        assert llm.generate(PROMPTS[1], max_new_tokens=20)[0].token_ids == want

    def test_streams_take_turns_in_one_batch(self, llm: specdec.LLM) -> None:
        want = [c.token_ids for c in llm.generate(PROMPTS, max_new_tokens=16)]
        streams = [llm.stream(p, max_new_tokens=16) for p in PROMPTS]
        got: list[list[int]] = [[], [], []]
        while any(streams):
            for i, stream in enumerate(streams):
                piece = next(stream, None) if stream is not None else None
                if piece is None:
                    streams[i] = None  # type: ignore[call-overload]
                else:
                    got[i] += piece.token_ids
        assert got == want
        assert is_idle(llm)

    def test_steps_between_two_pieces(self, llm: specdec.LLM) -> None:
        """Of a stream of several prompts, while another stream steps the same engine."""
        want = llm.generate(PROMPTS[:2], max_new_tokens=16)
        pieces, other = [], llm.stream(PROMPTS[2], max_new_tokens=40)
        for piece in llm.stream(PROMPTS[:2], max_new_tokens=16):
            pieces.append(piece)
            next(other, None)
        for i, done in enumerate(want):
            own = [p for p in pieces if p.index == i]
            assert [t for p in own for t in p.token_ids] == done.token_ids
            assert "".join(p.text for p in own) == done.text
            assert [p.completion.text for p in own if p.completion is not None] == [done.text]

    def test_a_call_beside_an_open_stream(self, llm: specdec.LLM) -> None:
        want = [c.token_ids for c in llm.generate(PROMPTS[:2], max_new_tokens=16)]
        stream = llm.stream(PROMPTS[0], max_new_tokens=16)
        got = next(stream).token_ids
        assert llm.generate(PROMPTS[1], max_new_tokens=16)[0].token_ids == want[1]
        assert [*got, *(t for p in stream for t in p.token_ids)] == want[0]

    def test_options_are_checked_at_once(self, llm: specdec.LLM) -> None:
        with pytest.raises(ConfigError, match=r"LLM\.stream has no option 'max_token'; did you mean 'max_new_tokens'"):
            llm.stream("ab", max_token=3)
        with pytest.raises(ConfigError, match="no option 'streamer'"):
            llm.stream("ab", streamer=None)
        with pytest.raises(InputError, match="a prompt is a text"):
            llm.stream([5.0])
        with pytest.raises(InputError, match="prompt 1 of 2: prompt token id 64"):
            list(llm.stream([[1], [64]]))
        assert is_idle(llm)


class TestAsync:
    def test_concurrent_calls_share_the_engine(self, llm: specdec.LLM) -> None:
        want = [c.token_ids for c in llm.generate(PROMPTS, max_new_tokens=16)]

        async def streamed(prompt: list[int]) -> list[int]:
            return [t async for piece in llm.astream(prompt, max_new_tokens=16) for t in piece.token_ids]

        async def main() -> list[Any]:
            both = await asyncio.gather(*(streamed(p) for p in PROMPTS), llm.agenerate(PROMPTS, max_new_tokens=16))
            return list(both)

        *streams, completions = asyncio.run(main())
        assert streams == want
        assert [c.token_ids for c in completions] == want
        assert is_idle(llm)
        assert [c.token_ids for c in llm.generate(PROMPTS, max_new_tokens=16)] == want, "and back in this thread"

    def test_a_slow_reader_beside_a_fast_one(self, llm: specdec.LLM) -> None:
        want = llm.generate(PROMPTS, max_new_tokens=20)

        async def read(prompts: list[list[int]], pause: float) -> list[Any]:
            pieces = []
            async for piece in llm.astream(prompts, max_new_tokens=20):
                pieces.append(piece)
                await asyncio.sleep(pause)
            return pieces

        async def main() -> list[Any]:
            return list(await asyncio.gather(read(PROMPTS[:2], 0.02), read(PROMPTS[2:], 0.0)))

        slow, fast = asyncio.run(main())
        for pieces, answers in ((slow, want[:2]), (fast, want[2:])):
            for i, done in enumerate(answers):
                own = [p for p in pieces if p.index == i]
                assert [t for p in own for t in p.token_ids] == done.token_ids
                assert "".join(p.text for p in own) == done.text

    def test_the_loop_goes_on(self, llm: specdec.LLM) -> None:
        async def main() -> int:
            ticks = 0
            task = asyncio.create_task(llm.agenerate(PROMPTS, max_new_tokens=40))
            while not task.done():
                await asyncio.sleep(0)
                ticks += 1
            return ticks

        assert asyncio.run(main()) > 20

    def test_cancelling_ends_the_requests(self, llm: specdec.LLM) -> None:
        want = llm.generate(PROMPTS[0], max_new_tokens=16)[0].token_ids

        async def main() -> list[int]:
            begun = asyncio.Event()

            async def endless() -> None:
                async for _ in llm.astream(PROMPTS, max_new_tokens=200):
                    begun.set()

            task = asyncio.create_task(endless())
            await begun.wait()
            other = asyncio.create_task(llm.agenerate(PROMPTS[0], max_new_tokens=16))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return (await other)[0].token_ids

        assert asyncio.run(main()) == want
        assert llm.generate(PROMPTS[0], max_new_tokens=16)[0].token_ids == want
        assert is_idle(llm)

    @pytest.mark.parametrize("delay", [0.0, 0.001, 0.01])
    def test_cancelling_at_any_time(self, llm: specdec.LLM, delay: float) -> None:
        async def main() -> None:
            task = asyncio.create_task(llm.agenerate(PROMPTS, max_new_tokens=200))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        llm.generate(PROMPTS[0], max_new_tokens=2)
        assert is_idle(llm)

    def test_an_error_reaches_the_caller(self, llm: specdec.LLM) -> None:
        with pytest.raises(InputError, match="outside the target's vocabulary"):
            asyncio.run(llm.agenerate([64]))
        with pytest.raises(ConfigError, match=r"LLM\.agenerate has no option"):
            asyncio.run(llm.agenerate([1], nothing=1))
        assert is_idle(llm)

    def test_threads_are_kept_apart(self, llm: specdec.LLM) -> None:
        async def beside() -> None:
            stream = llm.astream(PROMPTS[0], max_new_tokens=50)
            await anext(stream)  # type: ignore[arg-type]
            with pytest.raises(WrongThreadError, match="await them"):
                llm.generate(PROMPTS[0], max_new_tokens=2)
            await stream.aclose()  # type: ignore[attr-defined]

        asyncio.run(beside())
        open_stream = llm.stream(PROMPTS[0], max_new_tokens=50)
        next(open_stream)
        with pytest.raises(WrongThreadError, match="a stream is still open"):
            asyncio.run(llm.agenerate(PROMPTS[0], max_new_tokens=2))
        open_stream.close()  # type: ignore[attr-defined]
        errors: list[BaseException] = []

        def other() -> None:
            try:
                llm.generate(PROMPTS[0], max_new_tokens=2)
            except WrongThreadError as error:
                errors.append(error)

        llm.generate(PROMPTS[0], max_new_tokens=2)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(errors) == 1


class Raises:
    """A criterion or processor of one caller's that fails at its second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("this caller's own")
        return scores if scores is not None else False


class TestNeighbours:
    @pytest.mark.parametrize("name", ["stopping_criteria", "logits_processor"])
    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_one_callers_fault_is_no_others(self, llm: specdec.LLM, name: str, order: tuple[int, int]) -> None:
        want = llm.generate(PROMPTS[0], max_new_tokens=16)[0].token_ids

        async def main() -> list[Any]:
            calls = [
                llm.agenerate(PROMPTS[0], max_new_tokens=16),
                llm.agenerate(PROMPTS[1], max_new_tokens=16, **{name: [Raises()]}),
            ]
            return await asyncio.gather(*(calls[i] for i in order), return_exceptions=True)

        answers = asyncio.run(main())
        good, bad = (answers[order.index(i)] for i in (0, 1))
        assert good[0].token_ids == want
        assert isinstance(bad, RuntimeError)
        assert is_idle(llm)

    def test_of_interleaved_streams(self, llm: specdec.LLM) -> None:
        want = llm.generate(PROMPTS[0], max_new_tokens=16)[0].token_ids
        good = llm.stream(PROMPTS[0], max_new_tokens=16)
        bad = llm.stream(PROMPTS[1], max_new_tokens=16, logits_processor=[Raises()])
        next(bad)
        got = [t for piece in good for t in piece.token_ids]
        assert got == want
        with pytest.raises(RuntimeError, match="this caller's own"):
            list(bad)
        assert is_idle(llm)

    @pytest.mark.parametrize("how", ["close", "drop"])
    def test_a_stream_that_ends_in_another_thread(self, llm: specdec.LLM, how: str) -> None:
        streams = [llm.stream(PROMPTS[0], max_new_tokens=50)]
        next(streams[0])
        thread = threading.Thread(target=streams[0].close if how == "close" else streams.clear)  # type: ignore[attr-defined]
        thread.start()
        thread.join()
        del thread
        streams.clear()
        gc.collect()
        assert not llm.engine.has_unfinished
        assert is_idle(llm)

    def test_a_loop_in_another_thread_takes_an_idle_engine_over(self, llm: specdec.LLM) -> None:
        want = llm.generate(PROMPTS[0], max_new_tokens=8)[0].token_ids
        found: list[Any] = []
        for _ in range(2):
            thread = threading.Thread(
                target=lambda: found.append(asyncio.run(llm.agenerate(PROMPTS[0], max_new_tokens=8)))
            )
            thread.start()
            thread.join()
        assert [c[0].token_ids for c in found] == [want, want]
        assert llm.generate(PROMPTS[0], max_new_tokens=8)[0].token_ids == want

    def test_a_loop_that_ends_closes_what_is_open_quietly(self, llm: specdec.LLM, caplog: Any) -> None:
        kept: list[Any] = []

        async def main() -> None:
            kept.append(llm.astream(PROMPTS[0], max_new_tokens=50))
            await anext(kept[0])

        asyncio.run(main())
        assert not caplog.records
        llm.generate(PROMPTS[0], max_new_tokens=2)
        assert is_idle(llm)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_forked_process_begins_anew(self, llm: specdec.LLM) -> None:
        asyncio.run(llm.agenerate(PROMPTS[0], max_new_tokens=2))
        assert copy.deepcopy(llm._worker) is not llm._worker
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            llm._worker.settle(llm.engine)
            os._exit(0 if llm._worker._pool is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

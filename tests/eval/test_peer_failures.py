"""A peer that fails while it runs is dropped and told, and the rest of the point goes on, now and when resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdec import InputError
from specdec.eval import variants
from specdec.eval.peers import PeerAnswer
from specdec.eval.point import measure_point
from specdec.eval.point_view import show_point
from specdec.eval.records import Dropped, Records, VariantInfo, read_records
from specdec.eval.report.gather import gather
from specdec.eval.report.tables import notes
from specdec.eval.summary import summarise
from tests.eval.known_model import config_for, save_known_model
from tests.eval.test_point import Killed, stop_after

PEER = "llama_cpp"
# Three prompts, two repeats: six samples of each of none, scripted and the peer.
SMALL = ["max_new_tokens=6", "repeats=2", "batch_size=1", f"peers=[{PEER}]"]
Fail = Callable[[int], PeerAnswer]


class FakePeer:
    """Answers 0, 1, 2, ..., but for one run, the first being 1 and the warm-up."""

    max_batch = 1

    def __init__(self, bad: int, fail: Fail) -> None:
        self.info = VariantInfo(PEER, "peer")
        self.num_runs = self.num_closed = 0
        self._bad, self._fail = bad, fail

    def run(self, prompts: Sequence[list[int]], num_new_tokens: Sequence[int]) -> list[PeerAnswer]:
        (count,) = num_new_tokens
        self.num_runs += 1
        return [self._fail(count) if self.num_runs == self._bad else answer(count)]

    def close(self) -> None:
        self.num_closed += 1


def answer(count: int) -> PeerAnswer:
    return PeerAnswer(list(range(count)), [[1e-6 * (i + 1), 1] for i in range(count)])


def raising(error: BaseException) -> Fail:
    def fail(count: int) -> PeerAnswer:
        raise error

    return fail


BROKEN = raising(RuntimeError("out of\n  luck"))
REASON = "RuntimeError: out of luck"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_known_model(tmp_path_factory.mktemp("known"))


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakePeer], FakePeer]:
    """Return what puts a peer in the place of llama.cpp."""

    def give(peer: FakePeer) -> FakePeer:
        monkeypatch.setattr(variants, "build_peer", lambda name, base, **options: peer)
        return peer

    return give


def num_samples(records: Records) -> dict[str, int]:
    return {info.name: len(records.of(info.name)) for info in records.header.variants}


@pytest.mark.parametrize("bad", [1, 2, 5])
def test_it_is_dropped_and_the_others_go_on(
    known: Path, tmp_path: Path, put: Any, bad: int, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    peer = put(FakePeer(bad, BROKEN))
    told: list[tuple[int, int]] = []
    records = measure_point(
        config_for("acceptance", known, *SMALL), tmp_path, progress=lambda done, total: told.append((done, total))
    )
    assert num_samples(records) == {"none": 6, "scripted": 6, PEER: max(0, bad - 2)}
    assert records.dropped == [Dropped(PEER, REASON)]
    assert records.end is not None and records.end.num_samples == len(records.samples)
    assert told == [(i, 18) for i in range(1, 19)]
    assert peer.num_runs == bad and peer.num_closed
    assert f"{PEER} gave up, the others go on: {REASON}" in caplog.text
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["dropped"] == [{"variant": PEER, "reason": REASON}]
    assert (PEER in summary["variants"]) == (bad > 2)
    assert f"{PEER} gave up: {REASON}." in notes(gather([tmp_path]).points)
    show_point(records, summarise(records), Console(width=200))
    assert f"{PEER} gave up: {REASON}" in capsys.readouterr().out


def test_a_resumed_session_does_not_try_it_again(
    known: Path, tmp_path: Path, put: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for("acceptance", known, *SMALL)
    put(FakePeer(3, BROKEN))
    with monkeypatch.context() as patch:
        stop_after(patch, 8, Killed())
        with pytest.raises(Killed):
            measure_point(config, tmp_path)
    before = read_records(tmp_path / "records.jsonl")
    assert before.dropped and before.end is None
    monkeypatch.setattr(variants, "build_peer", lambda *_, **__: pytest.fail("built again"))
    records = measure_point(config, tmp_path)
    assert num_samples(records) == {"none": 6, "scripted": 6, PEER: 1}
    assert records.dropped == [Dropped(PEER, REASON)]
    assert records.end is not None and records.end.num_samples == 13


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (lambda count: answer(count - 1), "RuntimeError: answers of [5] tokens where [6] were asked for"),
        (lambda count: PeerAnswer(list(range(count)), [[0.1, 1]]), "ValueError: 6 tokens, 1 of them emitted"),
        (lambda count: PeerAnswer(list(range(count)), []), "ValueError: an answer without emissions"),
        (lambda count: PeerAnswer(list(range(count)), [[0.2, 1], [0.1, 5]]), "ValueError: emissions whose times"),
    ],
)
def test_answers_that_cannot_be_are_not_written(known: Path, tmp_path: Path, put: Any, fail: Fail, reason: str) -> None:
    put(FakePeer(3, fail))
    records = measure_point(config_for("acceptance", known, *SMALL, "ignore_eos=true"), tmp_path)
    assert records.dropped[0].reason.startswith(reason)
    assert num_samples(records) == {"none": 6, "scripted": 6, PEER: 1}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("none left"), SystemExit(3)])
def test_what_is_not_the_peers_own_failure_ends_the_point(
    known: Path, tmp_path: Path, put: Any, error: BaseException
) -> None:
    config = config_for("acceptance", known, *SMALL)
    put(FakePeer(3, raising(error)))
    with pytest.raises(type(error)):
        measure_point(config, tmp_path)
    put(FakePeer(99, BROKEN))
    records = measure_point(config, tmp_path)
    assert records.dropped == []
    assert set(num_samples(records).values()) == {6}


def test_an_engines_failure_ends_the_point(
    known: Path, tmp_path: Path, put: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(FakePeer(99, BROKEN))
    run, seen = variants.EngineVariant.run, [0]

    def failing(self: Any, *arguments: Any) -> Any:
        seen[0] += 1
        if seen[0] == 6:
            raise RuntimeError("out of luck")
        return run(self, *arguments)

    monkeypatch.setattr(variants.EngineVariant, "run", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        measure_point(config_for("acceptance", known, *SMALL), tmp_path)


def test_a_peer_that_does_not_close_costs_nothing(known: Path, tmp_path: Path, put: Any, caplog: Any) -> None:
    peer = put(FakePeer(99, BROKEN))
    peer.close = lambda: BROKEN(1)
    records = measure_point(config_for("acceptance", known, *SMALL), tmp_path)
    assert records.end is not None and records.dropped == []
    assert f"{PEER} did not close: RuntimeError" in caplog.text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"variant": "scripted", "reason": "x"}, "'scripted', which was dropped, is no peer"),
        ({"variant": PEER, "reason": "x"}, f"{PEER} was dropped twice"),
        ({"variant": PEER}, "reason"),
        ({"variant": PEER, "reason": 3}, "reason of dropped is 3"),
    ],
)
def test_lines_that_cannot_be_are_named(known: Path, tmp_path: Path, put: Any, line: Any, said: str) -> None:
    put(FakePeer(2, BROKEN))
    measure_point(config_for("acceptance", known, *SMALL, "repeats=1"), tmp_path)
    path = tmp_path / "records.jsonl"
    path.write_text(path.read_text() + json.dumps({"type": "dropped", **line}) + "\n")
    with pytest.raises(InputError, match="is corrupt") as raised:
        read_records(path)
    assert said in str(raised.value)

"""A point's folder: what is written, that a killed one goes on, that nothing finished is lost; and known rates."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from rich.console import Console

from specdec import ConfigError, InputError, SpecdecError
from specdec.drafters.ngram import NgramDrafter
from specdec.eval import point, runner, variants
from specdec.eval.point import is_finished, measure_point
from specdec.eval.point_view import show_point
from specdec.eval.records import RecordWriter, Sample, read_records
from specdec.eval.summary import summarise
from specdec.eval.sweep_point import score_of
from specdec.planner.speculation import tokens_per_step
from tests.eval.known_model import config_for, save_known_model

SMALL = ["max_new_tokens=6", "repeats=2", "batch_size=2"]  # 3 cases in 2 batches


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_known_model(tmp_path_factory.mktemp("known"))


class Killed(BaseException):
    """As a signal: no handler of errors sees it."""


class _Full:
    """A file on a disk that is full."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def write(self, text: str) -> None:
        raise self._error

    def flush(self) -> None: ...

    def fileno(self) -> int:
        return os.open(__file__, os.O_RDONLY)

    def close(self) -> None: ...


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """Let the `count`-th sample fail while it is written, a part of its line written."""
    write, seen = RecordWriter.write, [0]

    def failing(self: RecordWriter, line: Any) -> None:
        if isinstance(line, Sample):
            seen[0] += 1
            if seen[0] == count:
                self._file.write('{"type":"sample","variant":"no')
                self._file.flush()
                if not isinstance(error, OSError):
                    raise error
                self._file.close()
                self._file = _Full(error)
        write(self, line)

    monkeypatch.setattr(RecordWriter, "write", failing)


def test_a_folder_says_what_was_measured(known: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    records = measure_point(
        config_for("speedup", known, *SMALL, "peers=[]"),
        tmp_path,
        name="mine",
        overrides={"drafter": "scripted"},
        progress=lambda done, total: told.append((done, total)),
    )
    assert [v.name for v in records.header.variants] == ["none", "control", "scripted"]
    assert (records.header.name, records.header.overrides) == ("mine", {"drafter": "scripted"})
    keys = [(s.variant, s.batch, s.repeat) for s in records.samples]
    assert len(set(keys)) == len(keys) == 3 * 2 * 2
    assert told == [(i, 12) for i in range(1, 13)]
    assert records.end is not None
    assert records.end.num_samples == 12
    assert 0 < records.end.outside_s < records.end.wall_s
    where = json.loads((tmp_path / "provenance.json").read_text())
    assert {"git_sha", "git_dirty", "versions", "cpu", "gpu", "num_threads", "argv"} <= set(where)
    assert "hydra" not in (tmp_path / "config.yaml").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == json.loads(json.dumps(summarise(records)))
    assert summary["identity"]["scripted"]["equal"] == 6
    for sample in records.samples:
        assert all(sum(n for _, n in r.emissions) == len(r.token_ids) for r in sample.requests)


def test_a_finished_point_is_not_run_again(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for("acceptance", known, *SMALL)
    first = measure_point(config, tmp_path)
    before = (tmp_path / "records.jsonl").read_bytes()
    monkeypatch.setattr(runner.Run, "_run", lambda *_: pytest.fail("run again"))
    assert measure_point(config, tmp_path) == first
    assert (tmp_path / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize("count", [1, 4, 12])
def test_a_killed_point_goes_on(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    config = config_for("speedup", known, *SMALL, "peers=[]")
    with monkeypatch.context() as patch:
        stop_after(patch, count, Killed())
        with pytest.raises(Killed):
            measure_point(config, tmp_path)
    kept = (tmp_path / "records.jsonl").read_text().splitlines()[:-1]
    assert len(kept) == 1 + count - 1  # the header and the samples before
    assert not is_finished(tmp_path)
    records = measure_point(config, tmp_path)
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert lines[: len(kept)] == kept
    assert len(records.samples) == len({(s.variant, s.batch, s.repeat) for s in records.samples}) == 12
    assert [s.start_s for s in records.samples] == sorted(s.start_s for s in records.samples)
    assert len(json.loads((tmp_path / "provenance.json").read_text())["resumed"]) == 1


def test_a_full_disk_keeps_what_was_measured(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for("speedup", known, *SMALL, "peers=[]")
    with monkeypatch.context() as patch:
        stop_after(patch, 5, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(SpecdecError, match=r"No space left.*make room and run the same command again"):
            measure_point(config, tmp_path)
    assert len(read_records(tmp_path / "records.jsonl").samples) == 4
    assert len(measure_point(config, tmp_path).samples) == 12


def test_a_folder_holds_one_point(known: Path, tmp_path: Path) -> None:
    measure_point(config_for("acceptance", known, *SMALL), tmp_path)
    with pytest.raises(ConfigError, match="holds another point: its repeats differs"):
        measure_point(config_for("acceptance", known, *SMALL, "repeats=3"), tmp_path)


def test_prompts_that_changed_are_not_mixed(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "aA"}\n{"prompt": "bB"}')
    config = config_for("acceptance", known, *SMALL, f"prompts.path={rows}")
    with monkeypatch.context() as patch:
        stop_after(patch, 2, Killed())
        with pytest.raises(Killed):
            measure_point(config, tmp_path / "point")
    rows.write_text('{"prompt": "aaaaA"}\n{"prompt": "bB"}')
    monkeypatch.setattr(point, "digests", lambda config: {})  # as if they came from where nobody can look
    with pytest.raises(ConfigError, match="begun with other prompts"):
        measure_point(config, tmp_path / "point")


def test_records_are_of_their_own_settings_whatever_the_config_beside_them(known: Path, tmp_path: Path) -> None:
    measure_point(config_for("acceptance", known, *SMALL), tmp_path)
    (tmp_path / "config.yaml").unlink()
    for changed in ("repeats=3", "batch_size=1", "max_new_tokens=7", "temperature=0.5", "seed=1"):
        with pytest.raises(ConfigError, match=f"holds another point: its {changed.partition('=')[0]} differs"):
            measure_point(config_for("acceptance", known, *SMALL, changed), tmp_path)
    assert not (tmp_path / "config.yaml").exists()
    assert measure_point(config_for("acceptance", known, *SMALL), tmp_path).end is not None


def test_records_that_cannot_be_read_are_named(known: Path, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").mkdir()
    with pytest.raises(InputError, match=r"records\.jsonl cannot be read: .*directory"):
        measure_point(config_for("acceptance", known, *SMALL), tmp_path)


def test_corrupt_records_are_named(known: Path, tmp_path: Path) -> None:
    config = config_for("acceptance", known, *SMALL)
    measure_point(config, tmp_path)
    path = tmp_path / "records.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{broken", *lines[2:]]) + "\n")
    with pytest.raises(InputError, match="line 2 is corrupt"):
        measure_point(config, tmp_path)


def test_two_processes_do_not_share_a_folder(known: Path, tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(ConfigError, match="being measured by another process"):
        measure_point(config_for("acceptance", known, *SMALL), tmp_path)


def test_drafters_forget_between_repeats(known: Path, tmp_path: Path) -> None:
    # A drafter that remembers answers would draft a prompt it has seen to its end.
    settings = ["drafter=suffix", "drafter.options.share=true", "repeats=2", "max_new_tokens=20", "batch_size=1"]
    records = measure_point(config_for("acceptance", known, *settings), tmp_path)
    steps: dict[tuple[int, int], Any] = {
        (s.batch, s.repeat): [r.steps for r in s.requests] for s in records.of("suffix")
    }
    assert all(steps[batch, 0] == steps[batch, 1] for batch in range(3))


def test_what_was_learned_is_learned_again_when_a_repeat_goes_on(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four times the same prompt: from the second on, what was shared drafts it to its end.
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join('{"prompt": "yB"}' for _ in range(4)))
    settings = ["drafter=suffix", "drafter.options.share=true", "max_new_tokens=20", "batch_size=1", "repeats=2"]
    config = config_for("acceptance", known, *settings, f"prompts.path={rows}")

    def steps(folder: Path) -> list[int]:
        return [r.stats().num_steps for s in read_records(folder / "records.jsonl").of("suffix") for r in s.requests]

    measure_point(config, tmp_path / "whole")
    whole = steps(tmp_path / "whole")
    assert whole[0] > whole[1]
    for count in (6, 13):
        folder = tmp_path / str(count)
        with monkeypatch.context() as patch:
            stop_after(patch, count, Killed())
            with pytest.raises(Killed):
                measure_point(config, folder)
        measure_point(config, folder)
        assert steps(folder) == whole


def test_answers_that_are_given_again_are_no_time_of_the_run(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for("acceptance", known, *SMALL, "drafter=suffix", "drafter.options.share=true")
    with monkeypatch.context() as patch:
        stop_after(patch, 7, Killed())  # of the second repeat one batch is done, which suffix has learned from
        with pytest.raises(Killed):
            measure_point(config, tmp_path)
    learn, again = runner.Run._learn_again, []

    def slow(self: Any, variant: Any, batch: int) -> float:
        run = self._run
        self._run = lambda *arguments: (time.sleep(0.3), run(*arguments))[1]
        again.append(learn(self, variant, batch))
        self._run = run
        return again[-1]

    monkeypatch.setattr(runner.Run, "_learn_again", slow)
    records = measure_point(config, tmp_path)
    assert records.end is not None
    assert len(again) == 1
    assert records.end.outside_s < 0.3 < sum(again) < records.end.setup_s
    before, after = records.samples[5:7]
    assert after.start_s - before.start_s - before.total_s < 0.3, "the clock stood still meanwhile"


def cached_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each run of an engine: how many tokens its prefix cache had."""
    seen: list[int] = []
    run_variant = variants.EngineVariant.run

    def counted(self: Any, *arguments: Any) -> Any:
        before = self.llm.engine.stats.num_cached_tokens
        found = run_variant(self, *arguments)
        seen.append(self.llm.engine.stats.num_cached_tokens - before)
        return found

    monkeypatch.setattr(variants.EngineVariant, "run", counted)
    return seen


def test_prefixes_that_were_kept_are_kept_again_when_a_repeat_goes_on(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": "a" * 64}) for _ in range(4)))
    settings = ["engine.prefix_caching=true", f"prompts.path={rows}", "prompts.max_prompt_tokens=null", "batch_size=1"]
    config = config_for("acceptance", known, *settings, "max_new_tokens=6", "repeats=1")
    seen = cached_tokens(monkeypatch)
    measure_point(config, tmp_path / "whole")
    whole = seen[:]
    assert whole[:4] == [0] * 4  # warm-up, and the first prompt
    assert all(whole[4:])
    with monkeypatch.context() as patch:
        stop_after(patch, 6, Killed())
        with pytest.raises(Killed):
            measure_point(config, tmp_path / "killed")
    seen.clear()
    measure_point(config, tmp_path / "killed")
    assert seen == whole  # those that are given again, too


@pytest.mark.parametrize("left", ["", "a: [", "[1]"])
def test_what_a_full_disk_left_of_a_new_folder_is_no_other_point(known: Path, tmp_path: Path, left: str) -> None:
    (tmp_path / "config.yaml").write_text(left)
    (tmp_path / "provenance.json").write_text(left)
    assert measure_point(config_for("acceptance", known, *SMALL), tmp_path).end is not None


def test_long_numbers_do_not_keep_a_point_from_going_on(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["drafter=oracle", "drafter.options.accept_rate=0.12345678901234567"]
    config = config_for("acceptance", known, *SMALL, *settings)
    with monkeypatch.context() as patch:
        stop_after(patch, 2, Killed())
        with pytest.raises(Killed):
            measure_point(config, tmp_path)
    assert measure_point(config, tmp_path).end is not None


class FailingDrafter(NgramDrafter):
    """Raises in its third step."""

    name = "failing"

    @classmethod
    def build(cls, context: Any) -> Any:
        return cls(3, 1)

    def propose(self, requests: Any, noise: Any) -> Any:
        raise RuntimeError("nothing to say")


class NoSuchFile(NgramDrafter):
    @classmethod
    def build(cls, context: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory", "/head/weights.bin")


def test_a_drafter_that_fails_is_told(known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for("acceptance", known, *SMALL, "drafter=ngram", f"drafter.name={__name__}:FailingDrafter")
    records = measure_point(config, tmp_path)
    summary = summarise(records)
    name = records.header.variants[1].name
    assert summary["variants"][name]["num_drafter_errors"] > 0
    show_point(records, summary, Console())
    assert "its drafter FAILED in" in capsys.readouterr().out
    assert f"{name}: its drafter FAILED in" in str(score_of(summary))


def test_other_peoples_errors_are_no_full_disk(known: Path, tmp_path: Path) -> None:
    config = config_for("acceptance", known, *SMALL, "drafter=ngram", f"drafter.name={__name__}:NoSuchFile")
    with pytest.raises(FileNotFoundError, match=r"weights\.bin"):
        measure_point(config, tmp_path)


def test_what_does_not_fit_beside_is_absent_and_what_nobody_has_is_refused(known: Path, tmp_path: Path) -> None:
    records = measure_point(config_for("acceptance", known, *SMALL, "+beside.eagle3={}"), tmp_path)
    (absent,) = records.header.absent
    assert absent["name"] == "eagle3"
    with pytest.raises(ConfigError, match="egle3"):
        measure_point(config_for("acceptance", known, *SMALL, "+beside.egle3={}"), tmp_path / "two")


def test_the_baseline_has_no_policy(known: Path, tmp_path: Path) -> None:
    settings = ["engine.draft_length=confidence", "engine.max_draft_tokens=2", "control=true"]
    seen = {}

    def kept(*arguments: Any) -> Any:
        found = variants.build_variants(*arguments)
        seen.update({v.info.name: v.llm.engine.draft_length.name for v in found.found if hasattr(v, "llm")})
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(point, "build_variants", kept)
        measure_point(config_for("acceptance", known, *SMALL, *settings), tmp_path)
    assert seen == {"none": "static", "control": "static", "scripted": "confidence"}


def test_names_of_people_are_no_markup(known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "[/x]", "category": "[/c]", "prompt": "' + "z" * 30 + '"}\n{"prompt": "yB"}')
    records = measure_point(config_for("acceptance", known, *SMALL, f"prompts.path={rows}"), tmp_path / "p")
    show_point(records, summarise(records), Console())
    assert "left out: 1 of [/c] ([/x])" in capsys.readouterr().out


def test_prefixes_are_forgotten_between_repeats(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a" * 64}))
    settings = ["engine.prefix_caching=true", f"prompts.path={rows}", "prompts.max_prompt_tokens=null", "repeats=2"]
    seen = cached_tokens(monkeypatch)
    measure_point(config_for("acceptance", known, *settings), tmp_path / "point")
    assert seen == [0] * 6  # two warm-ups, two repeats of two variants


def test_the_oracles_rate_is_measured(known: Path, tmp_path: Path) -> None:
    rate = 0.7
    settings = ["drafter=oracle", f"drafter.options.accept_rate={rate}", "temperature=0", "max_new_tokens=400"]
    records = measure_point(config_for("acceptance", known, *settings), tmp_path)
    stats = [r.stats() for s in records.of("oracle") for r in s.requests]
    accepted = sum(sum(s.accepted_at) for s in stats)
    reached = sum(sum(s.reached_at) for s in stats)
    assert reached > 500
    assert abs(accepted / reached - rate) < 3 * (rate * (1 - rate) / reached) ** 0.5


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_synthetic_acceptance_is_the_papers_formula(known: Path, tmp_path: Path, rate: float) -> None:
    drafts = 4
    settings = ["drafter=random", "verifier=synthetic", f"verifier.options.rate={rate}", "seed=1", "temperature=1"]
    settings += [f"engine.max_draft_tokens={drafts}", "max_new_tokens=600", "ignore_eos=true"]
    records = measure_point(config_for("acceptance", known, *settings), tmp_path)
    emitted = [e for s in records.of("random") for r in s.requests for d, _, _, e in r.steps or [] if d == drafts]
    assert len(emitted) > 300
    mean = sum(emitted) / len(emitted)
    deviation = (sum((e - mean) ** 2 for e in emitted) / (len(emitted) - 1)) ** 0.5
    assert abs(mean - tokens_per_step(rate, drafts)) < 3 * deviation / len(emitted) ** 0.5


def test_conversations_go_on_with_the_targets_answers(known: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    turns = [{"id": "talk", "turns": ["A", "second B", "z" * 600]}, {"id": "one", "turns": ["C"]}]
    rows.write_text("\n".join(map(json.dumps, turns)))
    settings = [f"prompts.path={rows}", "prompts.chat=true", "prompts.max_prompt_tokens=300", "max_new_tokens=5"]
    records = measure_point(config_for("acceptance", known, *settings), tmp_path / "point")
    cases = [(c.name, c.turn) for c in records.header.cases]
    assert cases == [("talk", 0), ("talk", 1), ("one", 0)]
    first, second, _ = records.header.cases
    assert second.num_prompt_tokens > first.num_prompt_tokens + 5
    (left,) = records.header.left_out
    assert (left.name, left.reason.split(":")[0]) == ("talk", "turn 2")
    assert summarise(records)["identity"]["scripted"]["equal"] == 3


def test_beside_adds_variants_with_settings_of_their_own(known: Path, tmp_path: Path) -> None:
    more = ["+beside.ngram={max_draft_tokens: 2}", "+beside.wide={drafter: oracle, drafter_options: {width: 2}}"]
    records = measure_point(config_for("acceptance", known, *SMALL, *more), tmp_path)
    found = {v.name: (v.drafter, v.max_draft_tokens) for v in records.header.variants}
    assert found == {"none": ("none", 0), "scripted": ("scripted", 4), "ngram": ("ngram", 2), "wide": ("oracle", 4)}
    assert summarise(records)["variants"]["wide"]["tree"]
    assert not summarise(records)["variants"]["scripted"]["tree"]
    with pytest.raises(ConfigError, match="two variants called 'scripted'"):
        measure_point(config_for("acceptance", known, *SMALL, "+beside.scripted={}"), tmp_path / "two")


def test_absent_peers_are_listed(known: Path, tmp_path: Path) -> None:
    settings = ["batch_size=1", "peers=[transformers,transformers_assisted,llama_cpp]"]
    records = measure_point(config_for("acceptance", known, *settings), tmp_path)
    absent = {entry["name"]: entry["reason"] for entry in records.header.absent}
    assert "llama_cpp" in absent  # there is no GGUF file of this model
    assert all(absent.values())
    summary = summarise(records)
    assert summary["identity"]["transformers"] == {"equal": 3, "of": 3, "parted": []}
    assert summary["variants"]["transformers"]["acceptance_length"] is None


def test_contexts_are_filled_with_other_prompts(known: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": chr(97 + i) * (20 + i)}) for i in range(6)))
    settings = [*SMALL, f"prompts.path={rows}", "prompts.max_prompt_tokens=null", "prompts.limit=2"]
    records = measure_point(config_for("acceptance", known, *settings, "context_tokens=64"), tmp_path / "p")
    assert {c.num_prompt_tokens for c in records.header.cases} == {64}
    assert summarise(records)["identity"]["scripted"]["equal"] == 4
    with pytest.raises(ConfigError, match="the other prompts of the set have 1"):
        measure_point(config_for("acceptance", known, *settings, "context_tokens=300"), tmp_path / "q")

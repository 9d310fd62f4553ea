"""The trace file: every line is JSON, its numbers are the model's and add up, and no fault of it costs a token."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from specdec import LLM, generate
from specdec.debug.read_trace import TracedRun, read_trace
from specdec.engine import Engine
from specdec.errors import ConfigError, InputError
from specdec.interfaces import SamplingParams
from specdec.request import Request
from specdec.sampling import probabilities
from specdec.trace import FORMAT, VARIABLE, TraceFile, json_text, run_header, top_two, trace_from_environment
from tests.decoding import GREEDY, add, drain, engine_of, one, private_runner, prompts, reference
from tests.models.architectures import build, model_of, named

PROMPTS = prompts(3, 7, 12)
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=3)
CASES: dict[str, tuple[str, dict[str, Any], SamplingParams]] = {
    "ngram": ("ngram", {}, GREEDY),
    "oracle_tree": ("oracle", {"accept_rate": 0.7, "width": 2}, GREEDY),
    "draft_model_sampled": ("draft_model", {}, SAMPLED),
    "random_tree_sampled": ("random", {"branching": [2, 1]}, SAMPLED),
    "none": ("none", {}, GREEDY),
}


@cache
def draft_model() -> Any:
    """Return a model close to the target, so that some of what it drafts is accepted."""
    model = build(named("llama"))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.03 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def traced(path: Path, drafter: str = "ngram", options: dict[str, Any] | None = None, **more: Any) -> Engine:
    model = model_of(named("llama"))
    options = {"model": draft_model()} if drafter == "draft_model" else options
    engine = engine_of(model, drafter, options, runner=private_runner(model), **more)
    header = run_header(engine.target, engine.drafter, engine.verifiers, engine.config)
    engine.trace = TraceFile(path, header)
    return engine


def run(engine: Engine, sampling: SamplingParams = GREEDY, texts: Sequence[list[int]] = PROMPTS) -> list[Request]:
    requests = [add(engine, prompt, 16, sampling=sampling) for prompt in texts]
    drain(engine)
    return requests


def only_run(path: Path) -> TracedRun:
    contents = read_trace(path)
    assert contents.num_broken_lines == 0
    assert len(contents.runs) == 1
    return contents.runs[0]


@pytest.mark.parametrize("case", CASES)
def test_lines_add_up_to_the_counters(case: str, tmp_path: Path) -> None:
    drafter, options, sampling = CASES[case]
    path = tmp_path / "t.jsonl"
    engine = traced(path, drafter, options, prefill_chunk_tokens=5)
    requests = run(engine, sampling)
    whole = only_run(path)
    assert [s["step"] for s in whole.steps] == list(range(1, engine.stats.num_steps + 1))
    assert all(s["total_s"] >= s["draft_s"] + s["verify_s"] for s in whole.steps)
    assert whole.request_ids == [r.request_id for r in requests]
    for r in requests:
        entries = list(whole.of(r.request_id))
        decode = [e for e in entries if e["phase"] == "decode"]
        assert len(decode) == r.stats.num_steps
        assert sum(len(e["draft_token_ids"]) for e in decode) == r.stats.num_draft_tokens
        assert sum(len(e["accepted"]) for e in decode) == r.stats.num_accepted_tokens
        assert sum(len(e["emitted"]) for e in decode) == r.stats.num_emitted_tokens
        assert [t for e in entries for t in e.get("emitted", [])] == r.new_tokens
        assert sum(e["num_rows"] for e in entries if e["phase"] == "prefill") == r.num_prompt_tokens
        assert [e.get("finish_reason") for e in entries] == [None] * (len(entries) - 1) + ["length"]
        assert [("sampling" in e, e.get("num_prompt_tokens")) for e in entries] == (
            [(True, r.num_prompt_tokens)] + [(False, None)] * (len(entries) - 1)
        )
        assert entries[0]["sampling"]["seed"] == r.seed
        assert_coherent(r, entries)
    if not drafter.startswith(("none", "random")):
        assert any(r.stats.num_accepted_tokens for r in requests)


def assert_coherent(request: Request, entries: Sequence[dict[str, Any]]) -> None:
    """Assert that roots follow each other and that what was accepted is a path and was emitted."""
    for e in entries:
        if "emitted" not in e:
            continue
        assert request.tokens[e["root_position"]] == e["root_token_id"]
        after = e["root_position"] + 1
        assert request.tokens[after : after + len(e["emitted"])] == e["emitted"]
        nodes = [0, *e["accepted"]]
        assert [e["draft_parents"][node - 1] for node in nodes[1:]] == nodes[:-1]
        assert [e["draft_token_ids"][node - 1] for node in nodes[1:]] == e["emitted"][: len(nodes) - 1]
        assert len(e["draft_probs"]) == len(e["target_probs"]) == len(e["draft_token_ids"]) <= e["max_draft_tokens"]
        assert len(e["top_token_ids"]) == len(e["top_gaps"]) == len(e["emitted"])


@pytest.mark.parametrize("case", CASES)
def test_probabilities_are_those_of_a_plain_forward(case: str, tmp_path: Path) -> None:
    drafter, options, sampling = CASES[case]
    path = tmp_path / "t.jsonl"
    requests = run(traced(path, drafter, options), sampling)
    whole = only_run(path)
    model = model_of(named("llama"))
    num_checked = 0
    for r in requests:
        for e in whole.of(r.request_id):
            paths = {0: r.tokens[: e["root_position"] + 1]}
            for i, (token, parent) in enumerate(zip(e["draft_token_ids"], e["draft_parents"], strict=True)):
                paths[i + 1] = [*paths[parent], token]
                logits = model(input_ids=one(paths[parent])).logits[:, -1]
                true = logits.float().softmax(-1) if sampling.greedy else probabilities(logits, [sampling])
                assert e["target_probs"][i] == pytest.approx(float(true[0, token]), rel=1e-5, abs=1e-9)
                num_checked += 1
            for node, best, gap in zip([0, *e["accepted"]], e["top_token_ids"], e["top_gaps"], strict=False):
                logits = model(input_ids=one(paths[node])).logits[0, -1]
                first, second = logits.topk(2).values.tolist()
                assert best == int(logits.argmax())
                assert gap == pytest.approx(first - second, rel=1e-4, abs=1e-5)
    assert num_checked > 20 or drafter == "none"


def test_draft_probabilities_are_those_the_drafter_drew_from(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    requests = run(traced(path, "draft_model"), SAMPLED)
    seen = 0
    for r in requests:
        for e in only_run(path).of(r.request_id):
            text = r.tokens[: e["root_position"] + 1]
            for token, prob in zip(e["draft_token_ids"], e["draft_probs"], strict=True):
                true = probabilities(draft_model()(input_ids=one(text)).logits[:, -1], [SAMPLED])
                assert prob == pytest.approx(float(true[0, token]), rel=1e-4)
                text = [*text, token]
                seen += 1
    assert seen > 20
    run(traced(tmp_path / "greedy.jsonl", "draft_model"))  # point masses
    greedy = [p for s in only_run(tmp_path / "greedy.jsonl").steps for e in s["requests"] for p in e["draft_probs"]]
    assert greedy
    assert set(greedy) == {None}


def test_where_processors_did_not_run_there_is_no_probability(tmp_path: Path) -> None:
    """They run at the nodes the verifier walked over, and a trace must not run them again."""
    path = tmp_path / "t.jsonl"
    calls: list[int] = []

    class Counting(RepetitionPenaltyLogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            calls.append(input_ids.shape[1])
            result: torch.Tensor = super().__call__(input_ids, scores)
            return result

    sampling = SamplingParams(processors=(Counting(1.3),))
    model = model_of(named("llama"))
    untraced = engine_of(model, "oracle", {"accept_rate": 0.5}, runner=private_runner(model))
    plain = run(untraced, sampling)
    num_calls, calls[:] = len(calls), []
    requests = run(traced(path, "oracle", {"accept_rate": 0.5}), sampling)
    assert len(calls) == num_calls
    assert [r.tokens for r in requests] == [r.tokens for r in plain]
    num_known = num_unknown = 0
    for r in requests:
        for e in only_run(path).of(r.request_id):
            for parent, prob in zip(e["draft_parents"], e["target_probs"], strict=True):
                walked = parent in [0, *e["accepted"]]
                assert (prob is not None) == walked
                num_known, num_unknown = num_known + walked, num_unknown + (not walked)
            if e["draft_token_ids"]:
                text = r.tokens[: e["root_position"] + 1]
                logits = model(input_ids=one(text)).logits[:, -1].float()
                true = RepetitionPenaltyLogitsProcessor(1.3)(one(text), logits).softmax(-1)
                token = e["draft_token_ids"][0]
                assert e["target_probs"][0] == pytest.approx(float(true[0, token]), rel=1e-4, abs=1e-9)
    assert num_known > 5
    assert num_unknown > 5


def test_header_says_what_ran(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    engine = traced(path, "ngram", max_draft_tokens=3)
    assert path.read_bytes() == b""  # nothing ran yet
    run(engine)
    run(engine)
    header = only_run(path).header
    assert json.loads(path.read_text().splitlines()[0]) == header
    assert (header["format"], header["pid"]) == (FORMAT, os.getpid())
    assert header["versions"]["torch"] == torch.__version__
    assert header["model_class"] == "LlamaForCausalLM"
    assert (header["dtype"], header["device"], header["drafter"]) == ("float64", "cpu", "ngram")
    assert header["verifiers"] == {"greedy": "match", "seeded": "match", "sampled": "rejection"}
    assert header["engine"]["max_draft_tokens"] == 3


def test_every_field_is_documented(tmp_path: Path) -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "x"

    engine = traced(tmp_path / "t.jsonl")
    header = run_header(engine.target, engine.drafter, engine.verifiers, engine.config)
    engine.trace = TraceFile(tmp_path / "t.jsonl", header, Tokenizer())
    run(engine)
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line} | {n for s in lines[1:] for e in s["requests"] for n in e}
    text = (Path(__file__).parents[1] / "docs" / "debug.md").read_text()
    assert len(names) > 25
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_texts_of_tokens(tmp_path: Path) -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return f"<{ids[0]}>"

    engine = traced(tmp_path / "t.jsonl", "oracle")
    engine.trace = TraceFile(tmp_path / "t.jsonl", {}, Tokenizer())
    run(engine)
    entry = only_run(tmp_path / "t.jsonl").steps[1]["requests"][0]
    assert entry["draft_texts"] == [f"<{t}>" for t in entry["draft_token_ids"]]
    assert entry["emitted_texts"] == [f"<{t}>" for t in entry["emitted"]]
    assert len(entry["draft_texts"]) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1.0, (float("-inf"),)], {"a": float("nan")}])
def test_no_word_that_json_lacks(value: Any) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert "null" in json_text(value)
    json.loads(json_text(value), parse_constant=refuse)


def test_digits_are_those_of_float32() -> None:
    value = float(torch.tensor(0.1) * 3)
    assert torch.tensor(json.loads(json_text(value))) == torch.tensor(0.1) * 3
    assert len(json_text(value)) <= 12


def test_infinite_logits_give_valid_lines(tmp_path: Path) -> None:
    """A target that forbids all tokens but one: the second best is -inf, and so is the gap's other end."""
    model = build(named("gpt_neox"))
    path = tmp_path / "t.jsonl"
    engine = engine_of(model, "oracle", runner=private_runner(model))
    engine.trace = TraceFile(path, {})
    forward = engine.target.forward

    def one_token(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        result.logits[:, 1:] = -torch.inf
        return result

    engine.target.forward = one_token  # type: ignore[method-assign]
    run(engine)
    gaps = [g for s in only_run(path).steps for e in s["requests"] for g in e["top_gaps"]]
    assert set(gaps) == {None}


def test_top_two_of_a_vocabulary_of_one() -> None:
    ids, gaps = top_two(torch.tensor([[1.5]]))
    assert (ids.tolist(), gaps.tolist()) == ([[0]], [float("inf")])


class TestEnvironment:
    def of(self, engine: Engine) -> TraceFile | None:
        return trace_from_environment(engine.target, engine.drafter, engine.verifiers, engine.config)

    @pytest.mark.parametrize("value", [None, ""])
    def test_unset_is_off(self, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        assert self.of(engine_of(model_of(named("llama")))) is None

    def test_set_is_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv(VARIABLE, "~/t.jsonl")
        engine = traced(tmp_path / "other.jsonl")
        engine.trace = self.of(engine)
        run(engine)
        assert only_run(tmp_path / "t.jsonl").header["drafter"] == "ngram"

    def test_every_door_is_traced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "t.jsonl"
        monkeypatch.setenv(VARIABLE, str(path))
        model = model_of(named("llama"))
        llm = LLM(model, drafter="ngram")
        done = [llm.generate(prompt, max_new_tokens=8)[0].token_ids for prompt in PROMPTS]
        generate(model, one(PROMPTS[0]), drafter="oracle", max_new_tokens=8)
        runs = read_trace(path).runs
        assert [r.header["drafter"] for r in runs] == ["ngram", "oracle"]
        emitted = [[t for e in runs[0].of(i) for t in e["emitted"]] for i in runs[0].request_ids]
        assert emitted == done
        monkeypatch.setenv(VARIABLE, str(tmp_path))
        with pytest.raises(ConfigError, match="cannot be written"):
            LLM(model)

    @pytest.mark.parametrize("name", [".", "absent/t.jsonl", "a\0b"])
    def test_a_path_that_cannot_be_written(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot be written .*unset SPECDEC_TRACE"):
            TraceFile(f"{tmp_path}/{name}", {})


class TestSharedFile:
    def test_engines_that_take_turns(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        engines = [traced(path, "ngram"), traced(path, "oracle")]
        requests = [[add(e, prompt, 12) for prompt in PROMPTS] for e in engines]
        while any(e.has_unfinished for e in engines):
            for e in engines:
                if e.has_unfinished:
                    e.step()
        contents = read_trace(path)
        assert contents.num_broken_lines == 0
        assert [r.header["drafter"] for r in contents.runs] == ["ngram", "oracle"]
        for whole, engine, own in zip(contents.runs, engines, requests, strict=True):
            assert len(whole.steps) == engine.stats.num_steps
            for r in own:
                assert [t for e in whole.of(r.request_id) for t in e["emitted"]] == r.new_tokens

    def test_processes_that_write_at_once(self, tmp_path: Path) -> None:
        """Lines of 50 kB from three processes: none is torn."""
        path = tmp_path / "t.jsonl"
        program = (
            "import sys\n"
            "from specdec.trace import TraceFile\n"
            "trace = TraceFile(sys.argv[1], {})\n"
            "trace._begin()\n"
            "step = {'type': 'step', 'run': trace._run, 'requests': [], 'x': sys.argv[2] * 50000}\n"
            "for i in range(200):\n"
            "    trace._write(step | {'step': i})\n"
        )
        writers = [subprocess.Popen([sys.executable, "-c", program, str(path), mark]) for mark in "abc"]
        assert [w.wait() for w in writers] == [0, 0, 0]
        contents = read_trace(path)
        assert contents.num_broken_lines == 0
        assert [[s["step"] for s in r.steps] for r in contents.runs] == [list(range(200))] * 3
        assert all(len({s["x"] for s in r.steps}) == 1 for r in contents.runs)

    def test_a_line_that_was_not_finished_is_left_behind(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        run(traced(path))
        whole = path.read_bytes()
        path.write_bytes(whole[:-9])
        run(traced(path))
        contents = read_trace(path)
        assert contents.num_broken_lines == 1
        assert len(contents.runs) == 2
        assert len(contents.runs[0].steps) == len(contents.runs[1].steps) - 1


class TestFaults:
    def assert_generates(self, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "specdec"):
            requests = run(engine)
        assert [r.new_tokens for r in requests] == [reference(engine.target.model, p, 16) for p in PROMPTS]
        said = [r.getMessage() for r in caplog.records if "trace" in r.getMessage()]
        assert len(said) == 1
        assert "generation goes on" in said[0]

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
    def test_a_full_disk(self, caplog: pytest.LogCaptureFixture) -> None:
        self.assert_generates(traced(Path("/dev/full"), "oracle"), caplog)

    def test_a_write_that_is_cut(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = traced(tmp_path / "t.jsonl")
        whole = os.write
        monkeypatch.setattr(os, "write", lambda file, data: whole(file, data[:-3] if b'"step": 3' in data else data))
        self.assert_generates(engine, caplog)
        contents = read_trace(tmp_path / "t.jsonl")
        assert [s["step"] for s in contents.runs[0].steps] == [1, 2]
        assert contents.num_broken_lines == 1

    def test_a_tokenizer_that_raises(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        engine = traced(tmp_path / "t.jsonl")
        engine.trace = TraceFile(tmp_path / "t.jsonl", {}, tokenizer=object())
        self.assert_generates(engine, caplog)

    def test_the_file_is_closed_with_its_trace(self, tmp_path: Path) -> None:
        engine = traced(tmp_path / "t.jsonl")
        run(engine)
        trace = engine.trace
        assert isinstance(trace, TraceFile)
        file = trace._file
        assert file is not None
        os.fstat(file)
        engine.trace = None
        del trace
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


class TestReading:
    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="cannot be read"):
            read_trace(tmp_path / "absent")

    def test_another_format(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text('{"type": "header", "run": "x", "format": 99}\n')
        with pytest.raises(InputError, match="format 99"):
            read_trace(path)

    def test_other_lines_are_counted(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text('[1]\nnonsense\n{"type": "step", "run": "unknown"}\n\n')
        assert read_trace(path).num_broken_lines == 3

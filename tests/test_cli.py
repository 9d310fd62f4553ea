"""The `specdec` command on a tiny model in a local directory."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from specdec import LLM, __version__
from specdec.cli import _Writer, app
from specdec.engine import Engine
from specdec.registry import DRAFTERS, VERIFIERS
from specdec.verifiers.match import MatchVerifier
from tests.tiny_chat_model import save_tiny_chat_model

Result = Any  # of typer's runner, which builds on click or on its own copy of it, by version
PROMPT = "one two one two one"
TABLE_ROWS = (
    *("num_prompt_tokens", "prefill_tokens_per_s", "ttft_s", "num_emitted_tokens", "decode_tokens_per_s", "tpot_s"),
    *("acceptance_rate", "acceptance_length", "draft_s", "verify_s", "other_s", "weight_bytes", "extra_weight_bytes"),
    *("kv_cache_bytes", "kv_bytes_per_token", "peak_rss_bytes"),
)


class LossyVerifier(MatchVerifier):
    """Stands for a rule that changes the distribution."""

    name = "lossy"
    lossless = False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("cli") / "tiny"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))


def run(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, args, input=stdin)


def generate(model: str, *args: str, prompt: str = PROMPT, stdin: str | bytes | None = None) -> Result:
    return run("generate", "--model", model, "--prompt", prompt, "--max-new-tokens", "12", *args, stdin=stdin)


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(result: Result) -> str:
    """Return the one line that a refused command leaves on standard error."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in result.output
    return lines[0]


class TestGenerate:
    def test_text_then_table(self, model: str) -> None:
        result = generate(model, "--drafter", "ngram")
        assert result.exit_code == 0, result.output
        expected = LLM(model).chat([{"role": "user", "content": PROMPT}], max_new_tokens=12)
        assert result.stdout.startswith(expected.text + "\n")
        for name in TABLE_ROWS:
            assert re.search(rf"\b{name}\b", result.stdout), name
        assert "drafter ngram, verifier match" in result.stdout
        assert "LOSSLESS" not in result.stdout
        assert "\x1b" not in result.output
        assert max(len(line) for line in result.stdout.removeprefix(expected.text).splitlines()) <= 80

    @pytest.mark.parametrize("drafter", ["none", "ngram", "self_int8", "oracle"])
    def test_json(self, model: str, drafter: str) -> None:
        found = as_json(generate(model, "--drafter", drafter, "--max-draft-tokens", "3", "--json"))
        assert found["token_ids"] == as_json(generate(model, "--json"))["token_ids"]
        assert (found["drafter"], found["max_draft_tokens"]) == (drafter, 3)
        assert (found["verifier"], found["lossless"], found["finish_reason"]) == ("match", True, "length")
        assert len(found["token_ids"]) == 12
        stats, memory = found["stats"], found["memory"]
        assert {*TABLE_ROWS} <= {*stats, *memory}
        assert stats["num_prompt_tokens"] == len(found["prompt_token_ids"])
        assert stats["num_emitted_tokens"] == 11
        assert stats["decode_s"] == pytest.approx(stats["draft_s"] + stats["verify_s"] + stats["other_s"])
        assert memory["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # k and v, layers, heads, width, float32
        assert memory["peak_rss_bytes"] > memory["weight_bytes"] > 0
        drafted = stats["num_draft_tokens"]
        assert stats["acceptance_rate"] == (stats["num_accepted_tokens"] / drafted if drafted else None)

    def test_sampling_options_arrive(self, model: str) -> None:
        sampled = ("--temperature", "1", "--top-p", "0.9", "--top-k", "50", "--seed", "3", "--dtype", "fp64", "--json")
        found = as_json(generate(model, *sampled, "--drafter", "self_int8", "--verifier", "rejection"))
        assert found["sampling"] == {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 3}
        assert (found["verifier"], found["dtype"]) == ("rejection", "float64")
        again = as_json(generate(model, *sampled, "--drafter", "ngram"))
        plain = as_json(generate(model, *sampled))
        assert again["verifier"] == "match"
        assert again["token_ids"] == plain["token_ids"]
        assert plain["token_ids"] != as_json(generate(model, "--json"))["token_ids"]

    def test_setting_without_effect_is_named(self, model: str) -> None:
        assert "top_p: no effect at temperature 0" in generate(model, "--top-p", "0.5").stderr

    def test_raw_leaves_the_template_out(self, model: str) -> None:
        llm = LLM(model)
        raw, chat = as_json(generate(model, "--raw", "--json")), as_json(generate(model, "--json"))
        assert raw["prompt_token_ids"] == llm.tokenizer(PROMPT).input_ids
        assert chat["prompt_token_ids"] == llm.chat_token_ids([{"role": "user", "content": PROMPT}])

    def test_nothing_to_generate(self, model: str) -> None:
        result = generate(model, "--max-new-tokens", "0")
        assert result.exit_code == 0
        assert re.search(r"ttft_s\s+│\s+-", result.stdout)

    def test_lossy_verifier_is_labelled(self, model: str) -> None:
        own = f"{__name__}:LossyVerifier"
        assert "lossy (NOT LOSSLESS)" in generate(model, "--verifier", own).stdout
        assert as_json(generate(model, "--verifier", own, "--json"))["lossless"] is False

    def test_drafter_options(self, model: str) -> None:
        half = ("--drafter", "oracle", "--drafter-option", "accept_rate=0", "--json")
        assert as_json(generate(model, *half))["stats"]["acceptance_rate"] == 0
        assert "--drafter-option" in generate(model, "--drafter-option", "accept_rate").stderr
        assert "accept_rate" in refused(generate(model, "--drafter", "oracle", "--drafter-option", "acept_rate=1"))


class TestPrompt:
    @pytest.mark.parametrize("arguments", [("--prompt", "-"), ()])
    def test_from_standard_input(self, model: str, arguments: tuple[str, ...]) -> None:
        given = as_json(generate(model, "--json"))
        options = ("--model", model, "--max-new-tokens", "12", "--json")
        read = as_json(run("generate", *options, *arguments, stdin=PROMPT + "\n"))
        assert read["prompt"] == PROMPT
        assert read["token_ids"] == given["token_ids"]

    def test_empty(self, model: str) -> None:
        assert "the prompt from --prompt is empty" in refused(generate(model, prompt=""))
        assert "the prompt from standard input is empty" in refused(generate(model, prompt="-", stdin="\n"))

    def test_no_text(self, model: str) -> None:
        assert "not valid UTF-8" in refused(generate(model, prompt="-", stdin=b"\xff"))
        assert "not valid UTF-8" in refused(generate(model, prompt=os.fsdecode(b"\xff")))

    def test_too_long(self, model: str) -> None:
        assert "context limit is 4096" in refused(generate(model, prompt="x" * 5000))

    def test_without_chat_template(self, tmp_path: Path) -> None:
        plain = str(save_tiny_chat_model(tmp_path / "plain", chat_template=None))
        assert "add --raw" in refused(generate(plain))
        assert generate(plain, "--raw").exit_code == 0

    def test_without_tokenizer(self, tmp_path: Path, model: str) -> None:
        bare = tmp_path / "bare"
        bare.mkdir()
        for name in ("config.json", "model.safetensors"):
            (bare / name).write_bytes((Path(model) / name).read_bytes())
        assert "without a tokenizer" in refused(generate(str(bare)))


class TestRefused:
    def test_unknown_drafter(self, model: str) -> None:
        line = refused(generate(model, "--drafter", "ngrm"))
        assert "unknown drafter 'ngrm'; did you mean 'ngram'?" in line

    def test_unknown_verifier_and_model(self, model: str) -> None:
        assert "did you mean 'rejection'?" in refused(generate(model, "--verifier", "rejction"))
        assert "did you mean 'smollm2'?" in refused(generate("smolm2"))

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [("--top-p", "2", "top_p must be"), ("--temperature", "nan", "temperature must be"), ("--dtype", "f", "dtype")],
    )
    def test_out_of_range(self, model: str, option: str, value: str, message: str) -> None:
        assert message in refused(generate(model, option, value))

    @pytest.mark.parametrize(
        ("option", "value"), [("--top-k", "many"), ("--max-new-tokens", "-1"), ("--max-draft-tokens", "-1")]
    )
    def test_wrong_type_is_typers(self, model: str, option: str, value: str) -> None:
        result = generate(model, option, value)
        assert result.exit_code == 2
        assert f"Invalid value for '{option}'" in result.stderr

    def test_error_while_generating_keeps_the_text(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        text = interrupted_after(monkeypatch, 4, RuntimeError("broken"), model).stdout
        assert text.rstrip("\n") == LLM(model).chat([{"role": "user", "content": PROMPT}], max_new_tokens=4).text


def interrupted_after(monkeypatch: pytest.MonkeyPatch, num_steps: int, error: BaseException, model: str) -> Result:
    """Generate, and have the engine raise after some steps; the prompt is one of them, and each gives a token."""
    step, left = Engine.step, [num_steps]

    def counted(engine: Engine) -> Any:
        if not left[0]:
            raise error
        left[0] -= 1
        return step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", counted)
        return generate(model)


class TestInterrupt:
    def test_keeps_the_text(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        result = interrupted_after(monkeypatch, 5, KeyboardInterrupt(), model)
        assert result.exit_code == 130
        assert result.stderr.endswith("interrupted\n")
        assert "Traceback" not in result.output
        expected = LLM(model).chat([{"role": "user", "content": PROMPT}], max_new_tokens=5).text
        assert result.stdout == expected + "\n"

    def test_while_loading(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("specdec.cli.LLM.__init__", interrupt)
        result = generate(model)
        assert (result.exit_code, result.stdout) == (130, "")

    def test_in_a_terminal(self, model: str) -> None:
        parent, child = pty.openpty()
        command = [sys.executable, "-c", "from specdec.cli import app; app()", "generate", "--model", model]
        process = subprocess.Popen(
            [*command, "--prompt", "hello", "--max-new-tokens", "4000"],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
            start_new_session=True,
        )
        os.close(child)
        try:
            output = read_until(parent, re.compile(r"loading .*: \d+\.\d s"))
            time.sleep(1.0)  # thousands of tokens take longer
            process.send_signal(signal.SIGINT)
            output += read_until(parent, None)
            assert process.wait(timeout=20) == 130
        finally:
            process.kill()
            process.wait()
            os.close(parent)
        assert output.rstrip().endswith("interrupted\x1b[0m")
        assert output.count("\x1b[?25l") == output.count("\x1b[?25h"), "the cursor stays hidden"
        assert "Traceback" not in output


def read_until(descriptor: int, pattern: re.Pattern[str] | None, timeout_s: float = 60.0) -> str:
    """Return what a terminal shows until `pattern` is seen or, with None, until its program is gone."""
    text, deadline = "", time.monotonic() + timeout_s
    while time.monotonic() < deadline and not (pattern and pattern.search(text)):
        try:
            data = os.read(descriptor, 4096)
        except OSError:  # how Linux says that nobody holds the other end any more
            break
        if not data:
            break
        text += data.decode(errors="replace").replace("\r\n", "\n")
    assert pattern is None or pattern.search(text), text
    return text


class TestWriter:
    """Words arrive in pieces of any length and are broken at the right edge of a terminal."""

    def write(self, pieces: list[str], *, terminal: bool = True, width: int = 20) -> str:
        file = io.StringIO()
        writer = _Writer(None, Console(file=file, force_terminal=terminal, width=width))
        for piece in pieces:
            writer.on_finalized_text(piece)
        writer.on_finalized_text("", stream_end=True)
        return file.getvalue()

    def test_lines_fit_and_words_stay_whole(self) -> None:
        words = re.findall(r"\w+", "the quick brown fox jumps over the lazy dog and runs away from all of them")
        for size in (1, 2, 5):
            pieces = [" ".join(words[i : i + size]) + " " for i in range(0, len(words), size)]
            text = self.write(pieces)
            assert text.split() == words
            assert max(map(len, text.splitlines())) <= 20
            assert text.count("\n") == 4

    def test_line_breaks_and_indentation_stay(self) -> None:
        text = "def f(x):\n    return x\n\n\tprint(1)\n"
        assert self.write([text]) == text.replace("\t", "    ") + "\n"

    def test_line_of_exact_width(self) -> None:
        assert self.write(["abcdefghi abcdefghij ", "next \nx"]) == "abcdefghi abcdefghij\nnext \nx\n"

    def test_word_longer_than_a_line(self) -> None:
        assert self.write(["so ", "x" * 30 + " ", "end"]) == f"so \n{'x' * 30}\nend\n"

    def test_wide_characters(self) -> None:
        assert self.write(["漢字" * 2, "漢字" * 3, "漢"]) == "漢字漢字漢字漢字漢字\n漢\n"

    def test_control_characters(self) -> None:
        assert self.write(["a\x1b[31mb\x07\r\x9b c"]) == "a[31mb c\n"

    def test_file_gets_the_text(self) -> None:
        text = "a" * 50 + " b" * 50 + "\x1b[31m\t\n"
        assert self.write([text], terminal=False) == text + "\n"


class TestList:
    def test_names_all(self) -> None:
        result = run("list")
        assert result.exit_code == 0
        for name in (*DRAFTERS.names(), *VERIFIERS.names(), "smollm2", "SmolLM2-135M-Instruct"):
            assert re.search(rf"\b{name}\b", result.stdout), name
        assert "max_ngram=3, min_ngram=1" in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 80

    def test_broken_plug_in_does_not_hide_the_rest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(DRAFTERS.table, "broken", "no_such_package:Drafter")
        result = run("list")
        assert result.exit_code == 0
        assert "cannot be loaded" in result.stdout
        assert "self_int8" in result.stdout


def test_version_and_help() -> None:
    assert run("--version").stdout == f"specdec {__version__}\n"
    for arguments in (["--help"], ["generate", "--help"], ["list", "-h"]):
        assert run(*arguments).exit_code == 0

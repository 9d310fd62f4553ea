"""`specdec chat` from a pipe; in a terminal: test_terminal.py."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM
from specdec.engine import Engine
from tests.cli.running import Result, refused, run
from tests.tiny_chat_model import save_tiny_chat_model


def chat(model: str, *args: str, stdin: str | bytes) -> Result:
    return run("chat", "--model", model, "--max-new-tokens", "8", *args, stdin=stdin)


def answers(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def turns(model: str, *texts: str, system: str | None = None) -> list[str]:
    """Return the answers to a conversation, each with the whole history before it."""
    llm, said = LLM(model), []
    messages = [] if system is None else [{"role": "system", "content": system}]
    for text in texts:
        messages.append({"role": "user", "content": text})
        said.append(llm.chat(messages, max_new_tokens=8).text)
        messages.append({"role": "assistant", "content": said[-1]})
    return said


class TestTurns:
    def test_history_is_kept(self, model: str) -> None:
        result = chat(model, "--json", "--drafter", "ngram", stdin="one\n\n  two \nthree")
        assert result.exit_code == 0, result.output
        found = answers(result)
        assert [row["text"] for row in found] == turns(model, "one", "two", "three")
        assert [row["prompt"] for row in found] == ["one", "two", "three"]
        assert {row["finish_reason"] for row in found} == {"length"}
        assert [row["stats"]["num_emitted_tokens"] for row in found] == [7, 7, 7]

    def test_text_and_one_line_each(self, model: str) -> None:
        result = chat(model, "--drafter", "oracle", stdin="one\ntwo\n")
        assert result.exit_code == 0, result.output
        assert result.stdout == "".join(f"{text}\n" for text in turns(model, "one", "two"))
        lines = [line for line in result.stderr.splitlines() if "tokens/s" in line]
        assert len(lines) == 2
        for line in lines:
            assert line.startswith("8 tokens, ")
            assert "acceptance length 3.50 (oracle)" in line  # 5 and 2

    def test_system_prompt(self, model: str) -> None:
        expected = turns(model, "one", system="be brief")
        assert answers(chat(model, "--system", "be brief", "--json", stdin="one"))[0]["text"] == expected[0]
        assert expected != turns(model, "one")

    def test_reset_keeps_the_system_prompt(self, model: str) -> None:
        found = answers(chat(model, "--system", "be brief", "--json", stdin="one\n/reset\ntwo\n"))
        assert found[1]["text"] == turns(model, "two", system="be brief")[0]

    def test_options_arrive(self, model: str) -> None:
        sampled = ("--temperature", "1", "--seed", "4", "--min-p", "0.01")
        (found,) = answers(chat(model, *sampled, "--json", stdin="one"))
        assert found["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.01, "seed": 4}
        assert found["text"] != turns(model, "one")[0]


class TestCommands:
    def test_exit_leaves_the_rest_alone(self, model: str) -> None:
        assert len(answers(chat(model, "--json", stdin="one\n/exit\ntwo\n"))) == 1

    def test_help_and_stats(self, model: str) -> None:
        result = chat(model, stdin="/stats\none\n/stats\n/help\n")
        assert result.exit_code == 0, result.output
        for word in ("/reset", "answers", "decode_tokens_per_s", "of 4,096"):
            assert word in result.stderr

    def test_unknown(self, model: str) -> None:
        result = chat(model, "--json", stdin="/rest\none\n")
        assert result.exit_code == 2
        error, answer = answers(result)
        assert "unknown command /rest" in error["error"]
        assert answer["text"] == turns(model, "one")[0]

    def test_two_slashes_send_one(self, model: str) -> None:
        (found,) = answers(chat(model, "--json", stdin="//etc\n"))
        assert found["prompt"] == "/etc"
        assert found["text"] == turns(model, "/etc")[0]


class TestRefused:
    def test_full_context_loses_nothing(self, model: str) -> None:
        result = chat(model, "--json", stdin=f"one\n{'x' * 5000}\ntwo\n")
        first, error, second = answers(result)
        assert result.exit_code == 2
        assert "context limit is 4096" in error["error"]
        assert [first["text"], second["text"]] == turns(model, "one", "two")
        said = chat(model, stdin=f"one\n{'x' * 5000}\n").stderr
        assert "/reset begins anew" in said
        assert "Traceback" not in said

    def test_answer_that_fills_the_context(self, model: str) -> None:
        result = chat(model, "--max-new-tokens", "8000", stdin="x" * 4000)
        assert result.exit_code == 0, result.output
        assert "4,096 of the 4,096 tokens" in result.stderr

    def test_no_text(self, model: str) -> None:
        result = chat(model, "--json", stdin=b"one\n\xff\ntwo\n")
        first, error, second = answers(result)
        assert result.exit_code == 2
        assert "line 2 is not valid UTF-8" in error["error"]
        assert [first["text"], second["text"]] == turns(model, "one", "two")

    def test_no_chat_template(self, tmp_path: Path) -> None:
        plain = str(save_tiny_chat_model(tmp_path / "plain", chat_template=None))
        assert "no chat template; use `specdec generate --raw`" in refused(chat(plain, stdin="one"))

    def test_template_without_system_prompt(self, tmp_path: Path) -> None:
        template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
        picky = str(save_tiny_chat_model(tmp_path / "picky", chat_template=template))
        assert "no system" in refused(chat(picky, "--system", "be brief", stdin="one"))
        assert chat(picky, stdin="one").exit_code == 0


def test_interrupt_ends_a_pipe(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, left = Engine._forward, [4]

    def pressed(engine: Engine, *rest: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine, *rest)

    monkeypatch.setattr(Engine, "_forward", pressed)
    result = chat(model, "--json", stdin="one\ntwo\n")
    assert result.exit_code == 130
    (found,) = answers(result)
    assert (found["finish_reason"], len(found["token_ids"])) == ("interrupt", 4)

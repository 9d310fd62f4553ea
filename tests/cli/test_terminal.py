"""The command in a terminal: colours, Ctrl-C, Ctrl-D."""

from __future__ import annotations

import re
import signal

from specdec import LLM
from specdec.stream import TextStream
from tests.cli.running import PROMPT, as_json, generate, terminal, without_colours

GREEN, MAGENTA = r"\x1b\[32m(.*?)\x1b\[0m", r"\x1b\[35m(.*?)\x1b\[0m"
LOADED = r"loading .*: \d+\.\d s"


def generate_in_a_terminal(model: str, *args: str, **environment: str) -> str:
    """Return what `specdec generate` shows after loading."""
    with terminal(
        *("generate", "--model", model, "--prompt", PROMPT, "--max-new-tokens", "40", *args), **environment
    ) as screen:
        shown = screen.read_until(None)
        assert screen.process.wait(timeout=20) == 0, shown
    return re.split(LOADED + r"\x1b\[0m\n", shown)[-1]


def letters(text: str) -> str:
    """Return what a terminal shows of a text, without its spaces."""
    return re.sub(r"[\x00-\x20\x7f-\x9f]", "", text)


class TestColours:
    DRAFTER = ("--drafter", "oracle", "--drafter-option", "accept_rate=0.6")

    def test_drafted_apart_from_own(self, model: str) -> None:
        shown = generate_in_a_terminal(model, *self.DRAFTER)
        legend, _, rest = shown.partition("\n")
        assert without_colours(legend) == "drafted and accepted | the target's own"
        text, _, table = rest.partition("\n\n")
        found = as_json(generate(model, *self.DRAFTER, "--max-new-tokens", "40", "--json"))
        stream, said = TextStream(LLM(model).tokenizer), {True: "", False: ""}
        for token, drafted in zip(found["token_ids"], found["from_draft"], strict=True):
            said[drafted] += stream.push([token])
        said[drafted] += stream.finish(stopped=False)
        assert letters("".join(re.findall(GREEN, text))) == letters(said[True]) != ""
        assert letters("".join(re.findall(MAGENTA, text))) == letters(said[False]) != ""
        assert letters(without_colours(text)) == letters(found["text"])
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", without_colours(text)), "the terminal obeys these"
        assert "drafter oracle, verifier match" in without_colours(table)
        assert max(map(len, without_colours(shown).splitlines())) <= 80

    def test_nobody_drafts(self, model: str) -> None:
        shown = generate_in_a_terminal(model)
        assert "drafted and accepted" not in shown
        assert "\x1b" not in shown.partition("\n\n")[0]

    def test_not_wanted(self, model: str) -> None:
        shown = generate_in_a_terminal(model, *self.DRAFTER, NO_COLOR="1")
        assert "drafted and accepted" not in shown
        assert not re.search(r"\x1b\[3\d", shown)


def test_ctrl_c_ends_an_answer(model: str) -> None:
    with terminal("generate", "--model", model, "--prompt", "hello", "--max-new-tokens", "4000") as screen:
        screen.read_until(LOADED + r"\x1b\[0m\n.")  # some of the thousands of tokens
        screen.process.send_signal(signal.SIGINT)
        screen.read_until(None)
        assert screen.process.wait(timeout=20) == 130
    assert screen.text.rstrip().endswith("interrupted\x1b[0m")
    assert "ended by interrupt" in screen.text
    assert screen.text.count("\x1b[?25l") == screen.text.count("\x1b[?25h"), "the cursor stays hidden"
    assert "Traceback" not in screen.text


def test_ctrl_c_keeps_the_chat(model: str) -> None:
    with terminal("chat", "--model", model, "--max-new-tokens", "4000") as screen:
        screen.read_until("> $")
        screen.interrupt_prompt()  # where nothing is lost
        screen.read_until(r"/exit or Ctrl-D leaves(.|\n)*> $")
        screen.type("one\n")
        screen.read_until(r"one\n.")
        screen.process.send_signal(signal.SIGINT)
        screen.read_until(r"tokens/s.*interrupted(.|\n)*> $")
        screen.type("/nonsense\n")
        screen.read_until(r"unknown command(.|\n)*> $")
        screen.type("/stats\n")
        assert re.search(r"answers +1\b", without_colours(screen.read_until(r"acceptance_length(.|\n)*> $")))
        screen.type("\x04")
        screen.read_until(None)
        assert screen.process.wait(timeout=20) == 0
    assert "Traceback" not in screen.text

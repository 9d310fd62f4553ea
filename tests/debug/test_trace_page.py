"""The page of a trace: its data are the engine's, no text gets out of it, keys and a phone are enough to read it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM
from specdec.debug.read_trace import read_trace
from specdec.errors import InputError
from specdec.eval.trace_page import build
from specdec.eval.trace_page.build import trace_page
from specdec.eval.trace_page.page_data import page_data
from specdec.eval.trace_page.visible import readable, script_json, visible
from specdec.trace import VARIABLE
from tests.browser import PHONE, OpenPage
from tests.debug.traces import NASTY, entry, first, header, nasty, step, write
from tests.decoding import prompts
from tests.models.architectures import model_of, named
from tests.tiny_chat_model import tiny_tokenizer

COUNTERS = ("num_prompt_tokens", "num_steps", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")
RATES = ("acceptance_rate", "acceptance_length", "ttft_s", "tpot_s")


def page_of(trace: Path, **options: Any) -> Path:
    page = trace.with_suffix(".html")
    page.write_text(trace_page(trace, **options), encoding="utf-8")
    return page


def request_of(path: Path, index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = page_data(path)["runs"][0]["requests"][index]
    return found


@pytest.fixture
def engine_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Any]]:
    """Return a trace of a batch under a tree drafter, and the completions."""
    path = tmp_path / "engine.jsonl"
    monkeypatch.setenv(VARIABLE, str(path))
    model, options = model_of(named("llama")), {"width": 2, "accept_rate": 0.5}
    llm = LLM(model, tokenizer=tiny_tokenizer(), drafter="oracle", drafter_options=options, max_draft_tokens=6)
    return path, llm.generate(prompts(3, 7, 12), max_new_tokens=20)


class TestData:
    def test_figures_are_the_engines_own(self, engine_trace: tuple[Path, list[Any]]) -> None:
        path, done = engine_trace
        requests = page_data(path)["runs"][0]["requests"]
        assert len(requests) == len(done) == 3
        for request, completion in zip(requests, done, strict=True):
            assert [t for s in request["steps"] for t in s.get("out", [])] == completion.token_ids
            stats = completion.stats
            assert {name: request["figures"][name] for name in COUNTERS} == {n: getattr(stats, n) for n in COUNTERS}
            for name in RATES:
                assert request["figures"][name] == pytest.approx(getattr(stats, name), rel=1e-3), name
            assert (request["rule"], request["lossless"]) == ("match", True)
            assert request["prompt_text"]
            assert request["finish_reason"] == completion.finish_reason
            states = "".join(s.get("state", "") for s in request["steps"])
            assert states.count("a") == stats.num_accepted_tokens
            assert set(states) == {"a", "r", "n"}

    def test_probabilities_of_emitted_tokens_are_those_of_a_plain_forward(
        self, engine_trace: tuple[Path, list[Any]]
    ) -> None:
        path, done = engine_trace
        for request, completion in zip(page_data(path)["runs"][0]["requests"], done, strict=True):
            ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
            start = len(completion.prompt_token_ids) - 1
            with torch.no_grad():
                probs = model_of(named("llama"))(input_ids=ids).logits[0, start:-1].softmax(-1)
            true = probs.gather(1, ids[0, start + 1 :, None])[:, 0].tolist()
            assert [p for s in request["steps"] for p in s.get("out_p", [])] == pytest.approx(true, rel=1e-4, abs=1e-9)

    def test_a_request_behind_a_found_prefix_says_its_sampling(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "t.jsonl"
        monkeypatch.setenv(VARIABLE, str(path))
        llm = LLM(model_of(named("llama")), drafter="ngram", prefix_caching=True)
        prompt = prompts(60)[0]
        for _ in range(2):
            done = llm.generate([prompt], max_new_tokens=4)
        assert done[0].stats.num_cached_tokens > 0
        for request in page_data(path)["runs"][0]["requests"]:
            assert request["sampling"]["temperature"] == 0
            assert request["figures"]["num_prompt_tokens"] == 60
            assert request["prompt_token_ids"] == prompt

    @pytest.mark.parametrize(
        ("rule", "temperature", "accepted", "expected"),
        [
            ("match", 0.0, [1], "arnrr"),
            ("rejection", 0.8, [1], "annrr"),  # behind an accepted sibling nothing is tried
            ("typical", 0.8, [1], "atttt"),
            ("somebodys", 0.0, [1], "atttt"),
            ("match", 0.0, [], "rrnnn"),
            ("match", 0.0, [1, 4], "arnar"),
        ],
    )
    def test_states(self, rule: str, temperature: float, accepted: list[int], expected: str, tmp_path: Path) -> None:
        """Nodes 1 and 2 continue the root, 3 continues 2, 4 and 5 continue 1."""
        drafts = {"draft_token_ids": [11, 12, 13, 14, 15], "draft_parents": [0, 0, 2, 1, 1]}
        emitted = [10 + node for node in accepted] + [20]
        begin = first(0, [9]) | {"sampling": {"temperature": temperature, "seed_given": False}}
        drawn = entry(1, emitted, **drafts, accepted=accepted, draft_probs=[0.1] * 5)
        rules = dict.fromkeys(("greedy", "seeded", "sampled"), rule)
        path = write(tmp_path / "t.jsonl", header(verifiers=rules), step(1, begin), step(2, drawn))
        assert request_of(path)["steps"][1]["state"] == expected

    def test_nothing_behind_a_stop_was_rejected(self, tmp_path: Path) -> None:
        cut = entry(1, [11], draft_token_ids=[11, 12], accepted=[1], finish_reason="stop")
        path = write(tmp_path / "t.jsonl", header(), step(1, first(0, [9])), step(2, cut))
        assert request_of(path)["steps"][1]["state"] == "an"

    @pytest.mark.parametrize(
        ("lossless", "rules", "expected"),
        [
            ({"greedy": False}, "match", False),
            (None, "typical", False),
            (None, "match", True),
            (None, "os", None),  # no name of ours: nothing is imported by it
        ],
    )
    def test_lossless(self, lossless: Any, rules: str, expected: bool | None, tmp_path: Path) -> None:
        said = header(verifiers=dict.fromkeys(("greedy", "seeded", "sampled"), rules), lossless=lossless)
        path = write(tmp_path / "t.jsonl", said, step(1, first(0, [9])))
        assert request_of(path)["lossless"] is expected

    def test_a_trace_of_an_earlier_release(self, tmp_path: Path, open_page: OpenPage) -> None:
        absent = ("emitted_probs", "emitted_at_s", "emitted_texts", "draft_texts")
        old = [
            {k: v for k, v in e.items() if k not in absent}
            for e in (first(0, [9]), entry(1, [11, 20], draft_token_ids=[11, 12], accepted=[1]))
        ]
        head = header()
        del head["lossless"]
        del old[0]["sampling"]["seed_given"]
        path = write(tmp_path / "t.jsonl", head, *(step(i, e) for i, e in enumerate(old, 1)))
        found = request_of(path)
        assert found["figures"]["ttft_s"] is None
        assert found["figures"]["acceptance_length"] == 2
        page = open_page(page_of(path))
        assert page.messages() == []
        assert "#11" in page.js("return document.getElementById('tokens').textContent")

    @pytest.mark.parametrize(
        "change",
        [
            {"draft_parents": [0]},
            {"draft_parents": [0, 2]},
            {"accepted": [2]},
            {"accepted": [1, 9]},
            {"emitted": [11, 20, 21, 22]},
            {"emitted": ["x"]},
            {"num_rows": None},
            {"root_position": None},
        ],
    )
    def test_contradictions_are_left_out_and_counted(self, change: dict[str, Any], tmp_path: Path) -> None:
        broken = entry(1, [11, 20], draft_token_ids=[11, 12], accepted=[1]) | change
        path = write(tmp_path / "t.jsonl", header(), step(1, first(0, [9])), step(2, broken), step(3, entry(3, [5])))
        run = page_data(path)["runs"][0]
        assert run["num_unreadable"] == 1
        steps = run["requests"][0]["steps"]
        assert [s["n"] for s in steps] == [1, 3]
        assert steps[1]["gap"] == 2  # two tokens of the answer are missing


class TestInput:
    def test_broken_lines_are_named(self, tmp_path: Path) -> None:
        lines = [header(), "{", step(1, first(0, [9])), step(2, {"phase": "decode"}), '{"type": "step", "run": []}']
        path = write(tmp_path / "t.jsonl", *lines)
        assert read_trace(path).broken_lines == [2, 4, 5]
        assert re.search(r"3 broken lines</b>\s+left out: 2, 4, 5\.", trace_page(path))

    @pytest.mark.parametrize(
        ("lines", "said"),
        [
            ([], "no step"),
            (["hello", "there"], "2 lines, none of a trace"),
            ([header()], "no step"),
            ([header(format=2)], "format 2"),
            ([header(), step(1, {"request_id": 0})], "no step can be read"),
        ],
    )
    def test_what_is_no_trace(self, lines: list[Any], said: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=said):
            trace_page(write(tmp_path / "t.jsonl", *lines))

    def test_choosing(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "t.jsonl",
            *(header(), step(1, first(0, [9], 4), first(0, [9], 5))),
            *(header("r2"), step(1, first(0, [9], 5), run="r2")),
        )
        chosen = page_data(path, request_id=5)["runs"]
        assert [(r["number"], [q["id"] for q in r["requests"]]) for r in chosen] == [(1, [5]), (2, [5])]
        for run in ("2", "r2"):
            assert [r["number"] for r in page_data(path, run)["runs"]] == [2]
        with pytest.raises(InputError, match="no request 7 that can be read; it has 4, 5"):
            page_data(path, request_id=7)
        with pytest.raises(InputError, match=r"no run '3'; it has 1 \(r1\), 2 \(r2\)"):
            page_data(path, "3")

    def test_too_large_says_how_to_choose(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write(tmp_path / "t.jsonl", header(), step(1, first(0, [9], 4), first(0, [9], 5)))
        monkeypatch.setattr(build, "MOST_BYTES", 1000)
        with pytest.raises(InputError, match=r"choose one of its 2 requests with --request \(4 to 5\)"):
            trace_page(path)
        assert "request" in trace_page(path, request_id=4)  # there is no smaller page


class TestTexts:
    def test_marks(self) -> None:
        assert visible(" a\n\u202e\ud800\x00") == "·a⏎⟨U+202E⟩⟨U+D800⟩⟨U+0000⟩"
        assert readable("a b\n\x1b") == "a b\n⟨U+001B⟩"

    def test_json_stays_in_its_element(self) -> None:
        value = [*NASTY.values(), float("nan"), 2**60 + 1]
        text = script_json(value)
        assert text.isascii()
        assert not set("<>&") & set(text)
        assert json.loads(text) == [*NASTY.values(), None, str(2**60 + 1)]

    def test_without_scripts(self, tmp_path: Path) -> None:
        html = trace_page(nasty(tmp_path / "t.jsonl"))
        plain = html[html.index("<noscript>") : html.index("</noscript>")]
        assert "<script" not in plain
        assert "<b id=out>" not in plain
        assert "&lt;!--·&lt;script&gt;”: accepted" in plain
        assert html.count("</noscript>") == 1
        many = [step(n, entry(n - 1, [10])) for n in range(2, 302)]
        long = trace_page(write(tmp_path / "l.jsonl", header(), step(1, first(0, [9])), *many))
        assert "needs JavaScript" in long[: long.index("</noscript>")]

    @pytest.mark.parametrize("shape", ["chain", "comb"])
    def test_a_deep_draft_is_a_page(self, shape: str, tmp_path: Path) -> None:
        count = 600
        parents = list(range(count)) if shape == "chain" else [max(0, i - 1 - i % 2) for i in range(count)]
        deep = entry(1, [11], draft_token_ids=[11] * count, draft_parents=parents, accepted=[1])
        html = trace_page(write(tmp_path / "t.jsonl", header(), step(1, first(0, [9])), step(2, deep)))
        plain = html[html.index("<noscript>") : html.index("</noscript>")]
        assert plain.count("<li>depth ") == count
        assert f"<li>depth {count if shape == 'chain' else count // 2}" in plain
        assert (", after" in plain) == (shape == "comb")

    def test_no_text_breaks_the_page(self, tmp_path: Path, open_page: OpenPage) -> None:
        path = page_of(nasty(tmp_path / "t.jsonl"))
        page = open_page(path)
        for _ in range(4):
            page.js("document.getElementById('next').click()")
        assert page.messages() == []
        assert page.requests() == [path.resolve().as_uri()]  # nothing is loaded
        assert page.js("return document.title") == "specdec trace: t.jsonl"
        assert page.js("return document.querySelectorAll('#page img, #page b, #page script').length") == 0
        shown = page.js("return document.getElementById('tokens').textContent")
        assert "</script><script>document.title" in shown.replace("·", " ")
        for mark in ("⟨U+D800⟩", "⟨U+202E⟩", "⟨U+2028⟩", "⟨empty⟩", "<!--"):
            assert mark in shown
        assert "</noscript>" in page.js("return document.getElementById('prompt-text').textContent")

    def test_a_policy_forbids_everything_else(self, tmp_path: Path, open_page: OpenPage) -> None:
        page = open_page(page_of(nasty(tmp_path / "t.jsonl")))
        page.js(
            "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s);"
            "const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i)"
        )
        assert page.js("return window.ran") is None
        assert any("Content Security Policy" in message for message in page.messages())


class TestReading:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        return write(
            tmp_path / "t.jsonl",
            header(),
            step(1, first(2, [10], 3)),
            step(2, entry(3, [11, 12], 3, draft_token_ids=[11, 13, 14], accepted=[1])),
            step(3, entry(5, [15], 3)),
            step(4, entry(6, [16, 17], 3, draft_token_ids=[16, 17], accepted=[1, 2], finish_reason="length")),
        )

    def says(self, page: Any) -> str:
        text: str = page.js("return document.getElementById('step-says').textContent")
        return text

    def test_a_step_in_words(self, trace: Path, open_page: OpenPage) -> None:
        page = open_page(page_of(trace))
        said = []
        for i in range(4):
            said.append(self.says(page))
            assert page.js("return location.hash") == f"#request-3-step-{i + 1}"
            page.js("document.getElementById('next').click()")
        assert said == [
            "Nothing was drafted; the target put “·t10” (probability 0.25).",
            "3 tokens drafted, 1 accepted; then the target put “·t12” (probability 0.25) instead of “·t13” (0.5).",
            "Nothing was drafted; the target put “·t15” (probability 0.25).",
            "2 tokens drafted, 2 accepted; the target's own token was cut by the limit of length.",
        ]
        assert page.js("return document.getElementById('next').disabled")

    def test_keys(self, trace: Path, open_page: OpenPage) -> None:
        from selenium.webdriver import Keys

        page = open_page(page_of(trace))
        current = "return document.querySelectorAll('#tokens a[tabindex=\"0\"]').length"
        page.js("document.querySelector('#tokens a[tabindex=\"0\"]').focus()")
        for key, expected in ((Keys.ARROW_RIGHT, 2), (Keys.END, 4), (Keys.ARROW_LEFT, 3), (Keys.HOME, 1)):
            page.press(key)
            assert page.js("return location.hash") == f"#request-3-step-{expected}"
            assert page.js("return document.activeElement.getAttribute('aria-current')") == "step"
            assert page.js(current) == 1  # one stop for the tab key
        page.js("document.querySelectorAll('#tokens a')[2].focus()")
        page.press(Keys.ENTER)
        assert page.js("return location.hash") == "#request-3-step-3"

    def test_arrows_turn_the_page_when_the_step_has_the_focus(self, trace: Path, open_page: OpenPage) -> None:
        from selenium.webdriver import Keys

        page = open_page(page_of(trace))
        page.js("document.getElementById('step').focus()")
        page.press(Keys.ARROW_RIGHT)
        assert page.js("return location.hash") == "#request-3-step-2"

    def test_what_scrolls_can_be_reached_with_keys_and_has_a_name(
        self, engine_trace: tuple[Path, list[Any]], open_page: OpenPage
    ) -> None:
        path, _ = engine_trace
        index = next(i for i, s in enumerate(request_of(path)["steps"]) if s.get("parents", [0, 1])[:2] == [0, 0])
        page = open_page(page_of(path))
        page.js("document.querySelectorAll('details').forEach((d) => { d.open = true })")
        for _ in range(index):
            page.js("document.getElementById('next').click()")
        script = """
            const scrolls = (e) => /auto|scroll/.test(getComputedStyle(e).overflow);
            const reached = (e) => e.tabIndex === 0 || e.querySelector('a[tabindex="0"]');
            const id = (e) => e.getAttribute("aria-labelledby");
            const named = (e) => e.getAttribute("aria-label") || document.getElementById(id(e));
            const all = [...document.querySelectorAll('#page *')].filter(scrolls);
            const bad = all.filter((e) => !reached(e) || !named(e));
            return [all, bad].map((some) => some.map((e) => e.id || e.className))"""
        found, bad = page.js(script)
        assert {"prompt-text", "tokens", "step", "scroll", "drawing scroll"} <= set(found)
        assert bad == []
        assert '<pre tabindex="0" role="group" aria-label="Prompt of request' in trace_page(path)

    def test_the_fragment_opens_a_step(self, trace: Path, open_page: OpenPage) -> None:
        page = open_page(page_of(trace))
        page.js("location.hash = '#request-3-step-2'")
        deadline = time.monotonic() + 10
        while "3 tokens drafted" not in self.says(page) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "3 tokens drafted" in self.says(page)
        address = page.js("return location.href")
        page.driver.get("about:blank")
        page.driver.get(address)
        assert "3 tokens drafted" in self.says(page)
        page.js("location.hash = '#request-99-step-1'")  # is not there: nothing changes
        assert "3 tokens drafted" in self.says(page)

    def test_several_runs_have_a_chooser(self, tmp_path: Path, open_page: OpenPage) -> None:
        path = write(
            tmp_path / "t.jsonl",
            *(header(), step(1, first(0, [9], 4), first(0, [9], 5))),
            header("r2", verifiers={"greedy": "typical"}, lossless={"greedy": False}),
            step(1, first(0, [8], 5), run="r2"),
        )
        page = open_page(page_of(path))
        assert page.js("return [...document.querySelectorAll('#request-chooser option')].map((o) => o.value)") == [
            "4",
            "5",
        ]
        assert "LOSSY" not in page.js("return document.getElementById('page').textContent")
        page.js(
            "const s = document.querySelector('#run-chooser select');"
            "s.value = '2'; s.dispatchEvent(new Event('change'))"
        )
        assert page.js("return location.hash") == "#run-2-request-5-step-1"
        assert "LOSSY" in page.js("return document.getElementById('run-figures').textContent")
        assert page.messages() == []

    @pytest.mark.parametrize("dark", [False, True])
    def test_on_a_phone(self, dark: bool, engine_trace: tuple[Path, list[Any]], open_page: OpenPage) -> None:
        page = open_page(page_of(engine_trace[0]), width=PHONE, dark=dark)
        for _ in range(5):
            assert page.overflow() <= 0
            page.js("document.getElementById('next').click()")
        page.js("document.querySelectorAll('details').forEach((d) => { d.open = true })")
        assert page.overflow() <= 0
        ground = page.js("return getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", ground))) < 60) == dark
        assert page.messages() == []

    def test_a_tree_is_nested_and_drawn(self, engine_trace: tuple[Path, list[Any]], open_page: OpenPage) -> None:
        path, _ = engine_trace
        steps = request_of(path)["steps"]
        index = next(i for i, s in enumerate(steps) if s.get("parents", [0, 1])[:2] == [0, 0])
        page = open_page(page_of(path))
        for _ in range(index):
            page.js("document.getElementById('next').click()")
        assert page.js("return document.querySelectorAll('ul.tree ul').length") > 0
        own = int(len(steps[index]["out"]) > len(steps[index]["accepted"]))
        assert page.js("return document.querySelectorAll('ul.tree li').length") == len(steps[index]["ids"]) + own
        assert page.js("return document.querySelectorAll('.drawing .box').length") == 1 + len(steps[index]["ids"]) + own

    def test_two_thousand_steps(self, tmp_path: Path, open_page: OpenPage) -> None:
        drafts = {"draft_token_ids": [11, 12, 13, 14], "accepted": [1, 2]}
        steps = [step(n, entry(3 * n - 5, [11, 12, 15], **drafts)) for n in range(2, 2002)]
        page = open_page(page_of(write(tmp_path / "t.jsonl", header(), step(1, first(0, [9])), *steps)))
        assert page.js("return document.querySelectorAll('#tokens a').length") == 2001
        assert page.js("return document.querySelectorAll('#step .node').length") < 20  # steps are made on demand
        spent_s = page.js("return performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd / 1000")
        assert spent_s < 20  # a page that is quadratic in its steps takes minutes
        page.js("location.hash = '#request-0-step-1500'")
        deadline = time.monotonic() + 20
        while page.js("return document.getElementById('step-title').textContent") != "Step 1500":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert page.messages() == []

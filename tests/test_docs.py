"""What docs/generate.md, docs/footguns.md and docs/add_a_drafter.md say, compared with the code."""

from __future__ import annotations

import inspect
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig

import specdec
from specdec.api import _GENERATE_OPTIONS
from specdec.drafters.static_tree import refuse_trees_on_chains
from specdec.engine_config import DEFAULT_DRAFT_TOKENS, EngineConfig
from specdec.interfaces import DrafterContext, NoiseKey, SamplingParams, Stream
from specdec.models.build import RunnerConfig
from specdec.models.generation import REFUSED
from specdec.registry import DRAFTERS
from specdec.sampling import warn_without_effect
from tests.decoding import add, drain, engine_of, one, prompts, reference
from tests.models.architectures import build, model_of, named
from tests.test_doors import Kept
from tests.tiny_chat_model import save_tiny_chat_model, tiny_tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
if not DOCS.is_dir():
    pytest.skip("not a checkout", allow_module_level=True)
GENERATE, FOOTGUNS, ADD = (
    (DOCS / name).read_text(encoding="utf-8") for name in ("generate.md", "footguns.md", "add_a_drafter.md")
)
PROMPTS = prompts(3, 7, 12)
GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}


def marked(page: str, mark: str) -> str:
    """Return the paragraph or table behind a mark."""
    return re.split(r"\n\n", page.split(f"<!-- {mark} -->", 1)[1].lstrip("\n"), maxsplit=1)[0]


def names(text: str) -> set[str]:
    """Return the option names in code spans, without values."""
    return {span.partition("=")[0] for span in re.findall(r"`([a-z]\w*(?:=[^`]*)?)`", text)}


def first_column(table: str) -> list[str]:
    return [row.split("|")[1].strip() for row in table.splitlines()[2:]]


def fields_of(mark: str) -> set[str]:
    """Return the GenerationConfig fields under a mark; a table's left column where that names them."""
    text = marked(GENERATE, f"fields: {mark}")
    if mark == "drafting":
        text = " ".join(first_column(text))
    return names(text) & set(GenerationConfig().to_dict())


class TestGenerate:
    def test_every_field_of_a_generation_config_has_its_place(self) -> None:
        places = {mark: fields_of(mark) for mark in ("applied", "drafting", "warned", "silent")}
        places["refused"] = set(REFUSED)
        known = {f for f in GenerationConfig().to_dict() if f not in ("transformers_version", "_from_model_config")}
        assert known <= set().union(*places.values())
        for a in places:
            for b in places:
                assert a == b or not places[a] & places[b] - {"use_cache", "prefill_chunk_tokens"}, (a, b)

    def test_what_is_refused(self) -> None:
        rows = [row.split("|")[1:3] for row in marked(GENERATE, "refused").splitlines()[2:]]
        assert {name.strip().strip("`"): reason.strip() for name, reason in rows} == REFUSED

    VALUES: dict[str, Any] = {  # noqa: RUF012
        "use_cache": False,
        "cache_implementation": "static",
        "cache_config": {"a": 1},
        "early_stopping": True,
        "low_memory": True,
        "disable_compile": True,
        "compile_config": CompileConfig(),
        "length_penalty": 2.0,
        "diversity_penalty": 0.5,
    }

    @pytest.mark.parametrize("name", sorted(fields_of("warned") | fields_of("silent")))
    def test_what_has_no_effect(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        model = build(named("llama"))
        value = self.VALUES.get(name, 5)
        warn_without_effect.cache_clear()
        with caplog.at_level(logging.WARNING, "specdec"):
            got = specdec.generate(model, one(PROMPTS[1]), **GREEDY, **{name: value})
        assert got[0, 7:].tolist() == reference(model, PROMPTS[1], 10)
        said = [r.getMessage() for r in caplog.records if r.name == "specdec"]  # transformers may say something, too
        assert any(name in message for message in said) == (name in fields_of("warned"))

    def test_options_of_the_engine(self) -> None:
        rows = [row.split("|")[1:3] for row in marked(GENERATE, "options").splitlines()[2:]]
        told = {name.strip().strip("`"): default.strip().strip("`").strip('"') for name, default in rows}
        assert told == {f.name: str(f.default) for config in (EngineConfig, RunnerConfig) for f in fields(config)}

    def test_options_of_llm(self) -> None:
        text = GENERATE.split("\nOptions: ", 1)[1].split("Of the model's", 1)[0]
        found = {n.partition("(")[0] for n in names(text)} - {"generate", "chat"}
        assert found == _GENERATE_OPTIONS

    def test_options_of_custom_generate(self) -> None:
        text = GENERATE.split("\n## custom_generate", 1)[1].split("\n## ", 1)[0]
        parameters = set(inspect.signature(specdec.custom_generate).parameters)
        from_transformers = {"model", "input_ids", "logits_processor", "stopping_criteria", "generation_config"}
        assert parameters - from_transformers - {"model_kwargs"} <= names(text)


def test_what_custom_generate_loses() -> None:
    """As docs/generate.md tells; when transformers mends one of them, the page changes."""
    model, tokenizer = build(named("llama")), tiny_tokenizer()
    model.generation_config.eos_token_id = None

    def inside(**options: Any) -> Any:
        options = {"custom_generate": specdec.custom_generate, "return_stats": True, **GREEDY, **options}
        return model.generate(one(PROMPTS[1]), **options)

    kept = Kept()
    inside(streamer=kept)
    assert (kept.puts, kept.ended) == ([[PROMPTS[1]]], 0)
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        inside(stop_strings=["x"], tokenizer=tokenizer)
    assert inside(assistant_model=model_of(named("qwen2")))[1][0].num_draft_tokens == 0
    for drafting in ({"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}):
        assert inside(**drafting)[1][0].num_draft_tokens > 0
    assert len(inside(assistant_early_exit=1, num_assistant_tokens=2)[1][0].drafted_at) > 2
    with pytest.raises(ValueError, match="not used by the model"):
        inside(kv_memory_bytes=10**6)
    inside(engine_options={"kv_memory_bytes": 10**6}, tokenizer=tokenizer)


def test_where_num_assistant_tokens_is_read() -> None:
    """Beside transformers' own spellings, from the call, the target's config or the assistant's."""
    model, assistant = build(named("llama")), build(named("llama"))  # equal: everything is accepted
    model.generation_config.eos_token_id = None
    assistant.generation_config.num_assistant_tokens = 2

    def longest(**options: Any) -> int:
        return len(specdec.generate(model, one(PROMPTS[1]), return_stats=True, **GREEDY, **options)[1][0].drafted_at)

    assert longest(assistant_model=assistant) == 2
    assistant.generation_config.num_assistant_tokens = None
    assert longest(assistant_model=assistant) == DEFAULT_DRAFT_TOKENS
    assert longest(assistant_model=assistant, num_assistant_tokens=3) == 3
    assert longest(drafter="oracle", num_assistant_tokens=3) == DEFAULT_DRAFT_TOKENS
    assert longest(drafter="oracle", max_draft_tokens=3) == 3


@pytest.mark.parametrize(
    "page", ["generate.md", "footguns.md", "add_a_drafter.md", "train_a_drafter.md", "scheduling.md"]
)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(
        r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)", (DOCS / page).read_text(encoding="utf-8")
    ):
        linked = DOCS / target if target else DOCS / page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in slugs, anchor


@pytest.mark.parametrize(
    "page", ["generate.md", "footguns.md", "add_a_drafter.md", "train_a_drafter.md", "scheduling.md"]
)
def test_named_files_and_tests_exist(page: str) -> None:
    found = re.findall(r"`((?:tests|specdec|drafters|eval)/[\w/]+\.py)((?:::\w+)*)`", (DOCS / page).read_text("utf-8"))
    assert found
    for path, inside in found:
        if path != "drafters/bigram.py" and not path.startswith("tests/drafters/test_bigram"):
            source = (REPOSITORY / path).read_text(encoding="utf-8")
            for name in filter(None, inside.split("::")):
                assert re.search(rf"^\s*(?:class|def|async def) {name}\b", source, re.MULTILINE), f"{path}: {name}"


def test_every_footgun_says_what_to_do() -> None:
    rows = [
        line for line in FOOTGUNS.splitlines() if line.startswith("| ") and not line.startswith(("| symptom", "|-"))
    ]
    assert len(rows) >= 30
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4, row
        assert all(cells), row


# ------------------------------------------------------------------ docs/add_a_drafter.md, followed word by word


def blocks() -> list[tuple[str, str, str]]:
    """Return (mark, language, text) of every block that is typed."""
    return re.findall(r"^<!-- (.*?) -->\n```(\w+)\n(.*?)^```$", ADD, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    return [
        line for mark, language, text in blocks() if (mark, language) == ("run", "bash") for line in text.splitlines()
    ]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository in which the page's steps were done."""
    copy = tmp_path_factory.mktemp("followed") / "repository"
    ignored = shutil.ignore_patterns(".*", "outputs", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(REPOSITORY, copy, symlinks=True, ignore=ignored)
    for mark, _, text in blocks():
        what, _, where = mark.partition(": ")
        if what == "write":
            assert not (copy / where).exists(), f"{where} is there already; name the page's drafter otherwise"
            (copy / where).write_text(text, encoding="utf-8")
        elif what == "insert":
            path, _, anchor = where.partition(", below ")
            lines = (copy / path).read_text(encoding="utf-8").splitlines(keepends=True)
            at = next(i for i, line in enumerate(lines) if anchor in line)
            (copy / path).write_text("".join([*lines[: at + 1], text, *lines[at + 1 :]]), encoding="utf-8")
    return copy


def run_in(copy: Path, *command: str, **environment: str) -> str:
    """Run a command in the copy, with the copy's own specdec."""
    done = subprocess.run(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_contract_suite_passes(followed: Path) -> None:
    contract, policy = (shlex.split(line)[1:] for line in commands() if "pytest" in line)
    shown = run_in(followed, sys.executable, *contract, "-p", "no:cacheprovider")
    assert int(re.search(r"(\d+) passed", shown)[1]) >= 15, shown  # type: ignore[index]
    run_in(followed, sys.executable, *policy, "-p", "no:cacheprovider")


USING = """
import shlex, sys
from hydra import compose, initialize_config_module
from typer.testing import CliRunner
import specdec
from specdec.cli import app

assert specdec.__file__.startswith(sys.argv[1]), specdec.__file__
exec(compile(sys.argv[3], "add_a_drafter.md", "exec"))
assert done.stats.num_draft_tokens > 0
for line in sys.argv[4:]:
    words = [w.replace("smollm2", sys.argv[2]) for w in shlex.split(line)]
    if words[0] == "specdec":
        result = CliRunner().invoke(app, words[1:] + (["--model", sys.argv[2]] if words[1] == "generate" else []))
        assert result.exit_code == 0, result.output
        assert "bigram" in result.output or words[1] != "list"
    else:
        assert words[:3] == ["python", "-m", "specdec.eval.speedup"], words
        with initialize_config_module("specdec.configs", version_base=None):
            config = compose("speedup", overrides=words[3:])
        assert config.drafter.name == "bigram"
"""


def test_it_can_be_used(followed: Path, tmp_path: Path) -> None:
    tiny = str(save_tiny_chat_model(tmp_path / "tiny"))
    (example,) = (text for mark, language, text in blocks() if mark == "run" and "import specdec" in text)
    lines = [line for line in commands() if "pytest" not in line]
    assert len(lines) == 3
    code = example.replace('"smollm2"', repr(tiny))
    run_in(
        followed, sys.executable, "-c", USING, str(followed), tiny, code, *lines, SPECDEC_CACHE=str(tmp_path / "cache")
    )


def test_the_readme_has_a_row(followed: Path) -> None:
    rows = (followed / "README.md").read_text(encoding="utf-8").splitlines()
    at = next(i for i, row in enumerate(rows) if row.startswith("| `bigram` |"))
    assert rows[at - 1].startswith("| `ngram` |")
    assert rows[at].count("|") == rows[at - 1].count("|")


def class_source(text: str, name: str) -> str:
    """Return the lines of a class up to the next thing at the margin."""
    return re.search(rf"^class {name}\b.*?(?=^\S|\Z)", text, flags=re.DOTALL | re.MULTILINE)[0].rstrip()  # type: ignore[index]


def test_the_example_is_the_pages_drafter() -> None:
    (written,) = (text for mark, _, text in blocks() if mark == "write: drafters/bigram.py")
    example = (DOCS / "examples" / "own_drafter.py").read_text(encoding="utf-8")
    assert class_source(written, "BigramDrafter") == class_source(example, "BigramDrafter")


@pytest.fixture
def entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install, for one test, a package whose entry points are the page's and whose module is the example."""
    (toml,) = (text for mark, _, text in blocks() if mark == "entry point")
    group = tomllib.loads(toml)["project"]["entry-points"]["specdec.drafters"]
    folder = tmp_path / "somebodys-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"{name} = {target}" for name, target in group.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[specdec.drafters]", *lines, ""]), encoding="utf-8")
    shutil.copy(DOCS / "examples" / "own_drafter.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_drafter", None)


@pytest.mark.usefixtures("entry_point")
@pytest.mark.parametrize("name", ["bigram", "own_drafter:BigramDrafter"])
def test_outside_of_the_repository(name: str) -> None:
    assert ("bigram" in DRAFTERS.names()) is True
    model = model_of(named("llama"))
    done = specdec.LLM(model, drafter=name, drafter_options={"longest": 2}).generate(PROMPTS, max_new_tokens=30)
    assert [c.token_ids for c in done] == [reference(model, p, 30) for p in PROMPTS]
    assert sum(c.stats.num_draft_tokens for c in done) > 0


def variant(name: str) -> Any:
    """Return a class of the page, run with the imports that the page names."""
    typed = [text for mark, language, text in blocks() if language == "python" and "class Bigram" in text]
    space: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "NoiseKey": NoiseKey, "Stream": Stream}
    space["refuse_trees_on_chains"] = refuse_trees_on_chains
    for text in typed:
        text = text if "import annotations" in text else "from __future__ import annotations\n" + text
        exec(compile(text, "add_a_drafter.md", "exec"), space)
    return space[name]


@pytest.mark.parametrize("verifier", ["auto", "rejection"])
@pytest.mark.parametrize("name", ["BigramDrafter", "BigramTreeDrafter", "BigramCountsDrafter"])
def test_the_variants_are_right(name: str, verifier: str) -> None:
    model = model_of(named("llama"))
    repeating = [p + p + p[:2] for p in PROMPTS]
    kind = variant(name)
    plain = engine_of(model)
    drafted = engine_of(model, kind.build(DrafterContext(plain.target, 64)), verifier=verifier, max_draft_tokens=6)
    seeded = SamplingParams(temperature=0.5, top_k=3, seed=3)
    for sampling in (SamplingParams(), seeded):
        runs = []
        for engine in (plain, drafted):
            requests = [add(engine, p, 24, sampling=sampling) for p in repeating]
            drain(engine)
            runs.append([r.new_tokens for r in requests])
        assert sum(r.stats.num_draft_tokens for r in requests) > 0
        assert sum(r.stats.num_rejected_drafts for r in requests) == 0
        if sampling.greedy or verifier == "auto":
            assert runs[0] == runs[1]

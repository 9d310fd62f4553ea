"""What docs/scheduling.md shows runs, and the numbers it names are the code's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from specdec.engine_config import EngineConfig
from specdec.eval import serve
from specdec.scheduler import ARRIVALS_PER_PRIORITY
from specdec.serving import metrics
from specdec.serving.engine import MAX_WAITING
from tests.cli.running import run
from tests.tiny_chat_model import save_tiny_chat_model

REPOSITORY = Path(__file__).resolve().parents[2]
PATH = REPOSITORY / "docs" / "scheduling.md"
if not PATH.is_file():
    pytest.skip("not a checkout", allow_module_level=True)
PAGE = PATH.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("page") / "tiny"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))


def test_the_example_runs(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"<!-- run -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code.replace('"smollm2"', repr(tiny)), "scheduling.md", "exec"), names)
    assert len(names["answers"]) == 2  # type: ignore[arg-type]
    assert len(names["colours"]) == 3  # type: ignore[arg-type]
    assert "p50" in capsys.readouterr().out


def test_the_commands_run(tiny: str, tmp_path: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines():
        words = shlex.split(line.partition("   #")[0])[1:]
        short = {"--rate": "200", "--num-requests": "3", "--duration": "0.05", "--drafter": "ngram"}
        short["--plot"] = str(tmp_path / "serve.png")
        words = [short.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        result = run(*words, "--model", tiny, "--max-new-tokens", "4")
        assert result.exit_code == 0, result.output


def test_numbers() -> None:
    config = EngineConfig()
    assert f"less {ARRIVALS_PER_PRIORITY} per point" in PAGE
    assert f"`max_batch_size` ({config.max_batch_size})" in PAGE
    assert f"`prefill_chunk_tokens` rows ({config.prefill_chunk_tokens})" in PAGE
    assert f"`specdec.Engine` has {MAX_WAITING}" in " ".join(PAGE.split())
    assert f"latest {metrics._MOST_KEPT} requests" in " ".join(PAGE.split())


def test_every_measurement_exists_and_composes() -> None:
    assert serve.main  # puts LoadConfig's defaults where the YAML finds them
    modules = set(re.findall(r"python -m specdec\.eval\.(\w+)", PAGE))
    assert modules == {"serve", "chunked_prefill", "batching", "prefix"}
    with initialize_config_module("specdec.configs", version_base="1.3"):
        for name in modules:
            assert (REPOSITORY / "eval" / f"{name}.py").is_file()
            assert compose(name).target.name == "smollm2"

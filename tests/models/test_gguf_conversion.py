"""A conversion that was damaged, interrupted or started twice ends in one whole directory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ModelLoadError
from specdec.models import gguf as converter
from specdec.models.gguf import convert_gguf, converted_dir, find_damage
from tests.models.tiny_gguf import tiny_llama, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama())


class TestDamagedConversion:
    @pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "specdec.json"])
    @pytest.mark.parametrize("how", ["truncated", "missing"])
    def test_is_converted_again(self, file: Path, name: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
        folder = convert_gguf(file)
        if how == "missing":
            (folder / name).unlink()
        else:
            os.truncate(folder / name, (folder / name).stat().st_size // 2)
        assert name in (find_damage(folder) or "")
        assert convert_gguf(file) == folder
        assert find_damage(folder) is None
        assert "is damaged" in caplog.text
        assert [path.name for path in folder.parent.iterdir() if path.suffix != ".lock"] == [folder.name]

    def test_that_cannot_be_converted_again(self, file: Path) -> None:
        folder = convert_gguf(file)
        os.truncate(folder / "model.safetensors", 100)
        key = converted_dir(file)
        os.truncate(file, file.stat().st_size - 5000)  # another file now: the damaged directory is not its own
        assert converted_dir(file) != key
        with pytest.raises(ModelLoadError, match="is truncated"):
            convert_gguf(file)

    def test_read_only_cache_still_serves(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = convert_gguf(file)

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "touch", refuse)
        assert convert_gguf(file) == folder
        (folder / "config.json").unlink()
        with pytest.raises(ModelLoadError, match="set SPECDEC_CACHE to a writable directory"):
            convert_gguf(file)


def test_interrupt_leaves_nothing_and_a_retry_works(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(converter, "convert_tokenizer", interrupt)  # the weights are written by then
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(file)
    final = converted_dir(file)
    assert [path.name for path in final.parent.iterdir() if path.suffix != ".lock"] == []
    monkeypatch.undo()
    monkeypatch.setenv("SPECDEC_CACHE", str(final.parent.parent))
    assert find_damage(convert_gguf(file)) is None


def test_two_threads_convert_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds, results, build = [], [], converter._build

    def counted(*args: Any) -> None:
        builds.append(args)
        build(*args)

    monkeypatch.setattr(converter, "_build", counted)
    threads = [threading.Thread(target=lambda: results.append(convert_gguf(file))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [converted_dir(file)] * 3
    assert len(builds) == 1


def test_two_processes_convert_once(file: Path) -> None:
    code = f"""
import logging
from pathlib import Path
logging.basicConfig(level="INFO")
from specdec.models.gguf import convert_gguf
print(convert_gguf(Path({str(file)!r})))
"""
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    pipes: dict[str, Any] = {"cwd": root, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(converted_dir(file))}
    assert sum("converted tiny.gguf in" in err for _, err in outputs) == 1
    assert find_damage(converted_dir(file)) is None

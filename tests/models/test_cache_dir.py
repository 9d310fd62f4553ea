"""The cache directory: where it is, that it can be written, and that nothing half-written is ever seen."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from specdec.errors import ModelLoadError
from specdec.models.cache_dir import (
    atomic_dir,
    atomic_write_json,
    atomic_write_text,
    cache_dir,
    dir_lock,
    ensure_cache_dir,
)


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_variable_overrides_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "here"))
    assert cache_dir() == tmp_path / "here"
    assert ensure_cache_dir("a", "b") == tmp_path / "here" / "a" / "b"
    assert visible(tmp_path / "here" / "a" / "b") == []
    for unset in ("", "  "):
        monkeypatch.setenv("SPECDEC_CACHE", unset)
        assert cache_dir().name == "specdec"


def test_unwritable_directory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelLoadError, match=r"file/cache cannot be written \(Not a directory\); set SPECDEC_CACHE"):
        ensure_cache_dir()


def test_read_only_directory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(ModelLoadError, match=r"\(Permission denied\); set SPECDEC_CACHE to a writable directory"):
        ensure_cache_dir()


def test_directory_appears_complete(tmp_path: Path) -> None:
    final = tmp_path / "model [1]*"
    with atomic_dir(final) as folder:
        (folder / "a").write_text("1")
        assert not final.exists()
    assert (final / "a").read_text() == "1"
    assert visible(tmp_path) == [final.name]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_interrupted_build_leaves_nothing(tmp_path: Path, interruption: type[BaseException]) -> None:
    final = tmp_path / "model"

    def build() -> None:
        with atomic_dir(final) as folder:
            (folder / "a").write_text("half")
            raise interruption

    with pytest.raises(interruption):
        build()
    assert visible(tmp_path) == []
    with atomic_dir(final) as folder:
        (folder / "a").write_text("whole")
    assert (final / "a").read_text() == "whole"


def test_interrupted_replacement_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "model"
    with atomic_dir(final) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_dir(final) as folder:
        raise KeyboardInterrupt
    assert (final / "a").read_text() == "old"

    rename = Path.rename

    def fail_on_final(self: Path, target: Path) -> Path:
        if target == final and "old" not in self.name:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_on_final)
    with pytest.raises(OSError, match="No space"), atomic_dir(final) as folder:
        (folder / "a").write_text("new")
    monkeypatch.undo()
    assert (final / "a").read_text() == "old"
    with atomic_dir(final) as folder:
        (folder / "a").write_text("new")
    assert (final / "a").read_text() == "new"
    assert visible(tmp_path) == ["model"]


def test_leftovers_of_killed_runs_go(tmp_path: Path) -> None:
    final = tmp_path / "model"
    code = f"""
import os
from pathlib import Path
from specdec.models.cache_dir import atomic_dir
with atomic_dir(Path({str(final)!r})) as folder:
    (folder / "a").write_text("half")
    os.kill(os.getpid(), 9)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    assert result.returncode == -9
    (tmp_path / ".model-2.tmp-1").mkdir()  # belongs to another directory
    assert len(visible(tmp_path)) == 2
    with atomic_dir(final):
        pass
    assert visible(tmp_path) == [".model-2.tmp-1", "model"]


def test_lock_is_exclusive_and_reentrant(tmp_path: Path) -> None:
    final, events = tmp_path / "model", []
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with dir_lock(final):
            events.append("second")

    with dir_lock(final), dir_lock(final):
        thread = threading.Thread(target=second)
        thread.start()
        assert entered.wait(10)
        thread.join(0.3)
        events.append("first")
    thread.join(10)
    assert events == ["first", "second"]


def test_text_and_json_replace_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    atomic_write_json(path, {"b": 1, "a": [2.5]})
    assert json.loads(path.read_text()) == {"a": [2.5], "b": 1}
    assert stat.S_IMODE(path.stat().st_mode) & 0o044 or not _umask_is_open(tmp_path)
    with pytest.raises(TypeError):
        atomic_write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": [2.5], "b": 1}
    atomic_write_text(path, "ä")
    assert path.read_bytes() == "ä".encode()
    assert visible(path.parent) == ["a.json"]


def _umask_is_open(folder: Path) -> bool:
    (folder / "plain").touch()
    return bool(stat.S_IMODE((folder / "plain").stat().st_mode) & 0o044)

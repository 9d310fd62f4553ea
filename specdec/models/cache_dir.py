"""The user's cache directory, and writing into it so that nothing half-written is ever seen."""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout

from specdec.errors import ModelLoadError

logger = logging.getLogger("specdec")

ENVIRONMENT_VARIABLE = "SPECDEC_CACHE"


def cache_dir() -> Path:
    """Return where specdec keeps converted models and measurements; the directory may not exist yet."""
    override = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("specdec"))


def ensure_cache_dir(*parts: str) -> Path:
    """Create the cache directory, or the folder `parts` inside it, and check that it can be written.

    Raises:
        ModelLoadError: the directory cannot be created or written.
    """
    path = cache_dir().joinpath(*parts)
    probe = path / f".probe-{_unique()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ModelLoadError(
            f"the cache directory {path} cannot be written ({error.strerror or error}); "
            f"set {ENVIRONMENT_VARIABLE} to a writable directory"
        ) from error
    return path


@contextlib.contextmanager
def dir_lock(final: Path) -> Iterator[None]:
    """Hold the lock that guards the building of `final` against other threads and processes.

    A thread that holds it may enter again. The lock dies with its process.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    # A singleton is shared by every call that names the same file; that is what lets a thread enter twice.
    lock = FileLock(final.absolute().with_name(f".{final.name}.lock"), is_singleton=True)
    try:
        lock.acquire(timeout=2)
    except Timeout:
        logger.info("waiting for another process that is writing %s", final)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def atomic_dir(final: Path) -> Iterator[Path]:
    """Yield an empty directory beside `final`; rename it to `final` when the block ends without an exception.

    An existing `final` is replaced at that moment and kept if the block fails. Leftovers of killed runs are
    removed first. One builder at a time: see `dir_lock`.

    Raises:
        OSError: a directory cannot be created or renamed.
    """
    with dir_lock(final):
        prefix = f".{final.name}.tmp-"
        for stale in final.parent.glob(f"{glob.escape(prefix)}*"):
            # We hold the lock, so nobody is working in it.
            shutil.rmtree(stale, ignore_errors=True)
        staged = final.with_name(f"{prefix}{_unique()}")
        replaced = final.with_name(f"{prefix}{_unique()}-old")
        try:
            staged.mkdir()
            yield staged
            try:
                if os.path.lexists(final):
                    final.rename(replaced)
                staged.rename(final)
            except BaseException:
                if os.path.lexists(replaced) and not os.path.lexists(final):
                    replaced.rename(final)
                raise
        finally:
            for leftover in (staged, replaced):
                if leftover.is_dir() and not leftover.is_symlink():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 so that a reader sees the old file or the new one, never a part. Makes parent folders.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.tmp-{_unique()}")
    try:
        with staged.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def atomic_write_json(path: Path, data: Any) -> None:
    """Write `data` as indented JSON through `atomic_write_text`.

    Raises:
        OSError: the file cannot be written.
        TypeError: the data has no JSON form.
    """
    atomic_write_text(path, json.dumps(data, indent=2, sort_keys=True) + "\n")


def _unique() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"

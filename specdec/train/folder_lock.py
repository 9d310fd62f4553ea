"""One training run at a time in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from specdec.errors import CheckpointError
from specdec.train.processes import processes


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other runs out of `folder` inside the block. The lock lies beside it and dies with its process.

    Raises:
        CheckpointError: another run is in there, or the folder cannot be written.
    """
    if not processes().is_main_process:  # the others belong to the main one
        yield
        return
    place = folder.absolute()
    lock = FileLock(place.with_name(f".{place.name}.lock"))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise CheckpointError(
            f"another training run is writing into {folder}; wait until it ends, or give another folder with --out"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}; give another folder with --out") from error
    try:
        yield
    finally:
        lock.release()

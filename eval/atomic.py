"""Files that are written whole or not at all, and what a folder that cannot be written says."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.errors import SpecdecError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_text(path: Path, text: str) -> None:
    """Write a text file as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that whoever reads it, also after a kill or on a full disk, finds the old one or the new one."""
    spare = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        spare.write_bytes(content)
        spare.replace(path)
    finally:
        spare.unlink(missing_ok=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the system says of a folder that cannot be written into what a user can do.

    Raises:
        SpecdecError: an OSError was raised.
    """
    try:
        yield
    except OSError as error:
        advice = "make room" if error.errno in _NO_ROOM else "see to that"
        raise SpecdecError(
            f"{folder} cannot be written ({error}); what was measured is kept there: {advice} and run the same command "
            "again, it goes on where it stopped"
        ) from error

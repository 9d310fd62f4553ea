"""Where a result came from: code, versions, machine, command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from specdec.api import cpu_name

_PACKAGES = ("torch-specdec", "torch", "transformers", "accelerate", "datasets")
_PEERS = ("llama_cpp_python", "openvino-genai", "openvino")  # optional: named where they are installed
ARGV = "SPECDEC_ARGV"  # environment variable: as JSON, the command that other processes measure for, if not their own


def provenance() -> dict[str, Any]:
    """Return git SHA and dirty flag (None outside a checkout), versions, CPU or GPU, threads, argv and time."""
    root = Path(__file__).resolve().parent
    dirty = _git(root, "status", "--porcelain")
    return {
        "git_sha": _git(root, "rev-parse", "HEAD"),
        "git_dirty": None if dirty is None else bool(dirty),
        "versions": _versions() | {"python": platform.python_version()},
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "num_threads": torch.get_num_threads(),
        "argv": json.loads(os.environ[ARGV]) if ARGV in os.environ else sys.argv,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str | None]:
    peers = {name: _version(name) for name in _PEERS}
    return {name: _version(name) for name in _PACKAGES} | {name: found for name, found in peers.items() if found}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

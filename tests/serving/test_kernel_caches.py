"""oneDNN's kernel caches are bounded before the first kernel runs, or somebody is told."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import specdec
from tests.models.architectures import model_of, named
from tests.tiny_chat_model import save_tiny_chat_model, tiny_tokenizer

NAMES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")

# Prints what the environment says at the first matrix product, that of building an engine.
FIRST_PRODUCT = """
import json, os, sys
from torch.utils._python_dispatch import TorchDispatchMode

found = []

class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "addmm", "bmm", "linear", "matmul"):
            found.append([os.environ.get(name) for name in sys.argv[2:]])
        return function(*args, **(kwargs or {}))

with Watch():
    import specdec
    specdec.Engine(sys.argv[1])
print(json.dumps(found[0]))
"""


def test_an_engine_that_comes_first_bounds_them_before_the_first_kernel(tmp_path: Path) -> None:
    folder = save_tiny_chat_model(tmp_path / "tiny")
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment |= {"SPECDEC_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", FIRST_PRODUCT, str(folder), *NAMES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["64", "64"]
    assert "kernel caches" not in done.stderr


def test_an_engine_that_comes_too_late_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = specdec.LLM(model_of(named("llama")), tokenizer=tiny_tokenizer())
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING, logger="specdec"):
        for _ in range(2):
            specdec.Engine(llm.model, tokenizer=llm.tokenizer)
    told = [r.getMessage() for r in caplog.records if "kernel caches" in r.getMessage()]
    assert len(told) == 1
    assert "set LRU_CACHE_CAPACITY=64 ONEDNN_PRIMITIVE_CACHE_CAPACITY=64 before" in told[0]


def test_who_has_set_them_hears_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "7")
    llm = specdec.LLM(model_of(named("llama")), tokenizer=tiny_tokenizer())
    with caplog.at_level(logging.WARNING, logger="specdec"):
        specdec.Engine(llm.model, tokenizer=llm.tokenizer)
    assert [os.environ[name] for name in NAMES] == ["7", "7"]
    assert "kernel caches" not in caplog.text

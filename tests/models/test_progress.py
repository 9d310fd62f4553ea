"""What takes long says how far it is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from specdec import LLM
from specdec.models import matmul
from tests.tiny_chat_model import save_tiny_chat_model


def progress_of(caplog: pytest.LogCaptureFixture, message: str) -> list[tuple[int, int]]:
    return [record.progress for record in caplog.records if message in record.getMessage()]  # type: ignore[attr-defined]


def test_int8_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save_tiny_chat_model(tmp_path / "tiny")
    with caplog.at_level(logging.DEBUG, "specdec"):
        LLM(str(model), drafter="self_int8")
    linears = 2 * 7 + 1
    assert progress_of(caplog, "calibrating the int8 copy") == [(0, linears)]
    made = progress_of(caplog, "making the int8 copy")
    assert made == sorted(made)
    assert made[-1] == (linears, linears)


@pytest.mark.skipif(not matmul.can_prepack(torch.zeros(8, 8)), reason="oneDNN has no prepacked product here")
def test_kernel_times(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ROTATE_BYTES", 1)
    with caplog.at_level(logging.DEBUG, "specdec"):
        matmul.measure_table((8, 8), torch.float32)
    total = len(matmul.ROW_BUCKETS)
    assert progress_of(caplog, "timing products with 8 x 8 float32 weights") == [(i, total) for i in range(total + 1)]
    assert [record.levelname for record in caplog.records].count("INFO") == 1


def test_step_times(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    model = save_tiny_chat_model(tmp_path / "tiny")
    with caplog.at_level(logging.DEBUG, "specdec"):
        LLM(str(model), drafter="ngram", draft_length="cost_aware")
    steps = progress_of(caplog, "timing the target's forward")
    assert steps[0] == (0, 1)
    assert steps[-1][0] == steps[-1][1] == len(steps) - 1

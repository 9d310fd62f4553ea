from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_chat_model import save_tiny_chat_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("cli") / "tiny"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))

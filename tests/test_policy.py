"""The house rules that a machine can hold: who imports whom, file sizes, links, guards. See CONTRIBUTING.md.

Every rule is a function from sources (path -> text) to complaints, so that each can also be shown to fail.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
SIBLINGS = ("drafters", "verifiers", "eval", "configs")

Sources = dict[str, str]  # "specdec/drafters/ngram.py" -> its text

ROOT = "__init__"  # specdec itself: `import specdec`, `from specdec import generate`
BASE = {"errors", "interfaces", "interrupts", "registry"}
CORE = BASE | {"sampling", "noise", "tree", "record", "request", "stats", "repetition"}
ROOMS = CORE | {"kv", "models", "heads"}
BELOW_ENGINE = {
    "engine_config",
    "scheduler",
    "residency",
    "acceptance",
    "target_rows",
    "drafting",
    "trace",
    "draft_length",
}
BELOW_API = ROOMS | BELOW_ENGINE | {"engine", "stream", "planner"}
# A room may always import itself. Only `cli` and `configs` import `eval`; `train` is in `cli`'s set alone.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "interrupts": set(),
    "interfaces": {"errors"},
    "registry": {"errors", "interfaces"},
    **dict.fromkeys(("sampling", "noise", "tree", "record", "request", "stats", "repetition"), CORE),
    "kv": CORE,
    "models": CORE | {"kv"},
    "heads": CORE | {"kv", "models"},
    "drafters": ROOMS,
    "verifiers": BASE | {"sampling", "noise", "tree"},
    "scheduler": BASE | {"request", "stats"},
    "drafting": ROOMS | {"scheduler", "acceptance"},
    "trace": CORE | {"scheduler", "target_rows", "acceptance"},
    "draft_length": BASE | {"request", "stats", "scheduler", "acceptance"},
    "residency": CORE | {"kv", "scheduler", "drafting"},
    "engine_config": BASE | {"draft_length"},
    "engine": ROOMS | BELOW_ENGINE,
    "target_rows": CORE,
    "acceptance": CORE | {"scheduler"},
    "stream": CORE,
    "planner": BASE | {"models"},
    "debug": BELOW_API | {"api"},
    "build": BELOW_API,
    "running": BELOW_API,
    "worker": BELOW_API,
    "generation": BELOW_API | {"build", "running"},
    "check": BELOW_API | {"build"},
    "api": BELOW_API | {"build", "check", "running", "worker"},
    "serving": BELOW_API | {"api", "running", "worker"},
    "cli": BELOW_API | {"api", "build", "check", "train", "serving", "eval", ROOT},
    "__main__": {"cli"},
    ROOT: BELOW_API | {"api", "check", "generation", "serving"},
    "provenance": {"api"},
    "train": ROOMS | {"drafters", "api", "build", "provenance", ROOT},
    "eval": CORE | {"planner", "debug", "api", "build", "running", "check", "provenance", "serving", ROOT},
    "configs": {"engine_config", "models", "eval"},  # whose dataclasses say what a YAML file may hold
}
LOOKS_UP_NAMES = {"api", "build", "cli", "eval"}
MAY_USE_HYDRA = {"eval", "cli", "configs"}
MAY_PRINT = {"eval", "cli"}
NO_TORCH = ("specdec/scheduler.py", "specdec/scheduler/", "specdec/draft_length/", "specdec/kv/blocks.py")
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "common.py"}
ALLOWED_LONG: dict[str, str] = {}  # path -> why more than 500 lines
# All that code outside specdec/models may take from transformers: no model, no cache.
TRANSFORMERS_NAMES = re.compile(
    r"\w*Tokenizer\w*|\w*Config|\w*LogitsProcessor\w*|\w*LogitsWarper|\w*StoppingCriteria\w*|\w*Streamer|BatchEncoding"
    r"|logging|set_seed|__version__"
)


def room_of(path: str) -> str:
    """Return the first part of a path below specdec/, without .py."""
    return path.split("/")[1].removesuffix(".py")


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of everything imported anywhere in a file."""
    package = path.split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def imported_rooms(path: str, source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, room, dotted name) of every import from specdec."""
    for line, name in imports(path, source):
        top, _, rest = name.partition(".")
        if top == "specdec":
            room = rest.partition(".")[0]
            yield line, room if room in MAY_IMPORT else ROOT, name


def package_files(sources: Sources) -> Iterator[tuple[str, str]]:
    return ((path, source) for path, source in sources.items() if path.startswith("specdec/"))


def import_direction(sources: Sources) -> Iterator[str]:
    for path, source in package_files(sources):
        room = room_of(path)
        if room not in MAY_IMPORT:
            yield f"{path}: a new room; say in MAY_IMPORT what it may import and who may import it"
            continue
        for line, target, name in imported_rooms(path, source):
            if target != room and target not in MAY_IMPORT[room]:
                yield f"{path}:{line}: {room} must not import {name}"


def methods_stay_apart(sources: Sources) -> Iterator[str]:
    """A registered drafter imports no other one; files that are no method may be shared."""
    methods = set(re.findall(r"\"specdec\.drafters\.(\w+)", sources["specdec/registry.py"]))
    for path, source in package_files(sources):
        if room_of(path) == "drafters":
            own = path.split("/")[2].removesuffix(".py")
            for line, name in imports(path, source):
                parts = name.split(".")
                if parts[:2] == ["specdec", "drafters"] and len(parts) > 2 and parts[2] in methods - {own}:
                    yield f"{path}:{line}: drafter {own} must not import drafter {parts[2]}"


def transformers_models(sources: Sources) -> Iterator[str]:
    for path, source in package_files(sources):
        if room_of(path) == "models":
            continue
        names = [(line, name) for line, name in imports(path, source) if name.split(".")[0] == "transformers"]
        for node in ast.walk(ast.parse(source)) if names else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "transformers":
                names.append((node.lineno, f"transformers.{node.attr}"))
        for line, name in names:
            if name != "transformers" and not TRANSFORMERS_NAMES.fullmatch(name.rpartition(".")[2]):
                yield f"{path}:{line}: only specdec/models touches model and cache classes, not {name}"


def hydra_at_the_edge(sources: Sources) -> Iterator[str]:
    for path, source in package_files(sources):
        for line, name in imports(path, source):
            if name.split(".")[0] in {"hydra", "omegaconf"} and room_of(path) not in MAY_USE_HYDRA:
                yield f"{path}:{line}: {name} belongs to entry points"


def no_torch(sources: Sources) -> Iterator[str]:
    for path, source in sources.items():
        if path.startswith(NO_TORCH):
            for line, name in imports(path, source):
                if name.split(".")[0] == "torch":
                    yield f"{path}:{line}: pure Python, no torch"


def calls(path: str, source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def lookups(sources: Sources) -> Iterator[str]:
    for path, source in package_files(sources):
        for line, name in calls(path, source):
            if re.search(r"\b(DRAFTERS|VERIFIERS)\.load$", name) and room_of(path) not in LOOKS_UP_NAMES:
                yield f"{path}:{line}: {name} is called by api, cli and eval only"


def prints(sources: Sources) -> Iterator[str]:
    for path, source in package_files(sources):
        for line, name in calls(path, source):
            if name == "print" and room_of(path) not in MAY_PRINT:
                yield f"{path}:{line}: the library does not print"


def guards(sources: Sources) -> Iterator[str]:
    for sibling in SIBLINGS:
        path = f"specdec/{sibling}/__init__.py"
        body = ast.parse(sources.get(path, "")).body
        first = next((node for node in body if not isinstance(node, ast.Expr | ast.ImportFrom)), None)
        if not (
            isinstance(first, ast.If)
            and ast.unparse(first.test) == f"__name__ != 'specdec.{sibling}'"
            and ast.unparse(first.body[0]).startswith("raise ImportError(")
        ):
            yield f"{path}: must begin with the guard against being imported as {sibling!r}"


def file_names(sources: Sources) -> Iterator[str]:
    for path in sources:
        if path.rpartition("/")[2] in FORBIDDEN_NAMES:
            yield f"{path}: name the file after what it owns"


def file_lengths(sources: Sources) -> Iterator[str]:
    for path, source in sources.items():
        lines = source.count("\n")
        if lines > 500 and path not in ALLOWED_LONG:
            yield f"{path}: {lines} lines, the limit is 500; split it or give the reason in ALLOWED_LONG"
        elif lines > 300:
            warnings.warn(f"{path}: {lines} lines, about 300 is the aim", stacklevel=2)


RULES: list[Callable[[Sources], Iterator[str]]] = [
    import_direction, methods_stay_apart, transformers_models, hydra_at_the_edge, no_torch, lookups, prints, guards,
    file_names, file_lengths,
]  # fmt: skip
VIOLATIONS = [
    (import_direction, "specdec/errors.py", "from specdec import registry", "errors must not import"),
    (import_direction, "specdec/kv/cache.py", "from specdec.models.runner import ModelRunner", "kv must not import"),
    (import_direction, "specdec/kv/cache.py", "from ..models import runner", "kv must not import"),
    (import_direction, "specdec/models/runner.py", "import specdec.drafters.ngram", "models must not import"),
    (import_direction, "specdec/verifiers/match.py", "from specdec import kv", "verifiers must not import"),
    (import_direction, "specdec/engine.py", "def f():\n  from specdec.drafters import none", "engine must not import"),
    (import_direction, "specdec/api.py", "from specdec.eval import speedup", "api must not import"),
    (import_direction, "specdec/api.py", "from specdec.train import loop", "api must not import"),
    (import_direction, "specdec/drafters/ngram.py", "from specdec import generate", "drafters must not import"),
    (import_direction, "specdec/misc.py", "", "a new room"),
    (methods_stay_apart, "specdec/drafters/ngram.py", "from specdec.drafters.none import X", "drafter none"),
    (methods_stay_apart, "specdec/drafters/ngram.py", "from . import none", "drafter none"),
    (transformers_models, "specdec/api.py", "from transformers import AutoModelForCausalLM", "only specdec/models"),
    (transformers_models, "specdec/kv/cache.py", "from transformers.cache_utils import Cache", "only specdec/models"),
    (
        transformers_models,
        "specdec/eval/a.py",
        "import transformers\ntransformers.DynamicCache()",
        "only specdec/models",
    ),
    (hydra_at_the_edge, "specdec/api.py", "from omegaconf import OmegaConf", "belongs to entry points"),
    (no_torch, "specdec/scheduler.py", "from torch import Tensor", "no torch"),
    (lookups, "specdec/engine.py", "registry.DRAFTERS.load('none')", "DRAFTERS.load is called by"),
    (prints, "specdec/kv/cache.py", "def f():\n  print(1)", "does not print"),
    (guards, "specdec/eval/__init__.py", '"""Doc."""\nimport os', "must begin with the guard"),
    (file_names, "specdec/kv/utils.py", "", "name the file"),
    (file_lengths, "specdec/kv/cache.py", "\n" * 501, "the limit is 500"),
]


@pytest.fixture(scope="module")
def sources() -> Sources:
    folders = {"specdec": "specdec", "tests": "tests"}
    if (
        REPOSITORY / SIBLINGS[0]
    ).is_dir():  # absent in an unpacked source distribution: plain folders in specdec/ there
        folders |= {sibling: f"specdec/{sibling}" for sibling in SIBLINGS}
    found = {}
    for folder, name in folders.items():
        for path in sorted((REPOSITORY / folder).rglob("*.py")):  # rglob does not enter links to folders
            found[f"{name}/{path.relative_to(REPOSITORY / folder).as_posix()}"] = path.read_text(encoding="utf-8")
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_house_rule(rule: Callable[[Sources], Iterator[str]], sources: Sources) -> None:
    complaints = list(rule(sources))
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(("rule", "path", "source", "complaint"), VIOLATIONS)
def test_house_rule_can_fail(
    rule: Callable[[Sources], Iterator[str]], path: str, source: str, complaint: str, sources: Sources
) -> None:
    assert any(complaint in found and path in found for found in rule({**sources, path: source}))


def test_every_rule_has_a_violation() -> None:
    assert {rule for rule, *_ in VIOLATIONS} == set(RULES)


def test_sources_hold_the_linked_folders(sources: Sources) -> None:
    assert {f"specdec/{sibling}/__init__.py" for sibling in SIBLINGS} <= set(sources)


@pytest.mark.parametrize("sibling", SIBLINGS)
def test_link_is_relative_and_intact(sibling: str) -> None:
    link = REPOSITORY / "specdec" / sibling
    if not (REPOSITORY / sibling).is_dir():
        pytest.skip("not a checkout")
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{sibling}"
    assert link.samefile(REPOSITORY / sibling)


def test_every_yaml_parses() -> None:
    for path in (REPOSITORY / "specdec" / "configs").resolve().rglob("*.yaml"):
        yaml.safe_load(path.read_text(encoding="utf-8"))

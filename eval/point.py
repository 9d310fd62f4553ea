"""One point of an evaluation, measured into a folder; a killed one goes on where it stopped. See docs/records.md."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from specdec.api import LLM, matmul_flops_per_s, measure_step_times, read_bandwidth_bytes_per_s, weight_bytes_per_step
from specdec.errors import ConfigError, InputError, SpecdecError
from specdec.eval.atomic import write_text, writing
from specdec.eval.cases import Cases, make_cases
from specdec.eval.comparison import ComparisonConfig
from specdec.eval.records import (
    CONFIG,
    ERROR,
    PROVENANCE,
    RECORDS,
    SUMMARY,
    Header,
    Machine,
    Records,
    RecordWriter,
    read_records,
    whole_bytes,
)
from specdec.eval.runner import Run
from specdec.eval.setting_checks import check_settings
from specdec.eval.sources import digests
from specdec.eval.summary import summarise
from specdec.eval.target import load_target
from specdec.eval.variants import Variants, build_variants
from specdec.provenance import provenance

log = logging.getLogger("specdec")

_LOCK = ".lock"
UNMEASURED = ("hydra", "name", "question", "experiment")  # keys of a config that do not change what is measured
_SAME_CODE = ("git_sha", "versions", "cpu", "gpu", "num_threads")  # of provenance: what makes figures comparable

Progress = Callable[[int, int], None]  # (samples done, of)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in a sweep a point stands, and which files it stands on."""

    name: str
    overrides: dict[str, Any]
    sources: dict[str, str]


def measure_point(
    config: Any,
    folder: Path,
    *,
    name: str = "point",
    overrides: dict[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
) -> Records:
    """Measure what a config describes into a folder and return its records; one that is finished is only read.

    Args:
        config: the groups target, drafter, verifier, engine and prompts, and what comparison.yaml has.
        folder: made if absent; holds this point or nothing.
        name: of the point.
        overrides: dotted keys that the command line set, for whoever compares points.
        progress: told after each sample.

    Raises:
        ConfigError: the folder holds another point, or is in use; a file that the config names has changed; or the
            config is wrong.
        InputError: what is in it is corrupt.
        SpecdecError: the folder cannot be written.
    """
    check_settings(ComparisonConfig, config)
    with _locked(folder):
        earlier = _earlier(folder)
        if earlier is not None:
            _check_settings(folder, earlier.header, config)
        _take(folder, measured_part(config), earlier is None)
        with _noting_errors(folder):
            sources = digests(config)
            if earlier is not None:
                _check_sources(folder, earlier.header, sources)
            _compare_session(folder / PROVENANCE)
            if earlier is None or earlier.end is None:
                _measure(config, folder, earlier, Origin(name, overrides or {}, sources), progress)
            records = read_records(folder / RECORDS)
            if earlier is None or earlier.end is None or not (folder / SUMMARY).exists():
                with writing(folder):
                    write_text(folder / SUMMARY, json.dumps(summarise(records), indent=1))
    return records


def read_summary(folder: Path, records: Records) -> dict[str, Any]:
    """Return the figures of a point that `measure_point` left, as JSON holds them."""
    try:
        found: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    except (OSError, ValueError):
        found = json.loads(json.dumps(summarise(records)))
    return found


def measured_part(config: Any) -> dict[str, Any]:
    """Return what of a config decides on what is measured."""
    resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    return {key: value for key, value in resolved.items() if key not in UNMEASURED}


@contextmanager
def _noting_errors(folder: Path) -> Iterator[None]:
    """Leave what goes wrong in a folder that is taken, in place of what went wrong before."""
    with writing(folder):
        (folder / ERROR).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        _note_error(folder, error)
        raise


def _note_error(folder: Path, error: Exception) -> None:
    what = {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exception(error)}
    try:
        write_text(folder / ERROR, json.dumps(what, indent=1))
    except OSError as second:
        log.error("%s cannot be written either: %s", folder / ERROR, second)


def is_finished(folder: Path) -> bool:
    """Tell whether a folder holds a point that was measured to its end."""
    try:
        return read_records(folder / RECORDS).end is not None
    except SpecdecError:
        return False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise ConfigError(f"{folder} is being measured by another process; give another folder or wait") from error
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error}); give another folder") from error
    try:
        yield
    finally:
        lock.release()


def _take(folder: Path, mine: dict[str, Any], is_new: bool) -> None:
    """Write the config into a new folder; refuse one that holds another point."""
    path = folder / CONFIG
    text = OmegaConf.to_yaml(OmegaConf.create(mine))
    try:
        theirs = yaml.safe_load(path.read_text()) if path.exists() else None
    except (OSError, ValueError, yaml.YAMLError) as error:
        theirs = None
        if not is_new:
            raise InputError(f"{path} cannot be read: {error}") from error
    if is_new and not isinstance(theirs, dict):
        theirs = None  # of a session that was killed before it had begun
    if theirs is None:
        with writing(folder):
            write_text(path, text)
    elif theirs != yaml.safe_load(text):
        names = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
        raise _other_point(folder, names)


def _other_point(folder: Path, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{folder} holds another point: its {', '.join(names)} differs; give another folder, or delete it"
    )


def _earlier(folder: Path) -> Records | None:
    """Return what an earlier session measured, its unfinished last line cut off."""
    path = folder / RECORDS
    try:
        if not path.exists():
            return None
        whole, length = whole_bytes(path), path.stat().st_size
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if whole < length:
        log.warning("%s ends with an unfinished line, which is dropped", path)
        with writing(folder), path.open("r+b") as file:
            file.truncate(whole)
    return read_records(path) if whole else None


def _measure(config: Any, folder: Path, earlier: Records | None, origin: Origin, progress: Progress) -> None:
    begin = time.perf_counter()
    base = load_target(config)
    gave_up = [] if earlier is None else earlier.gave_up
    with build_variants(base, config, gave_up) as variants:
        cases = make_cases(base, config)
        variants.expect([case.num_new_tokens for case in cases.cases])
        header = _header(config, base, variants, cases, origin)
        if earlier is not None:
            _check_same(folder, earlier.header, header)
            log.info("going on after the %d samples of an earlier session", len(earlier.samples))
        run = Run(
            variants.found,
            cases,
            batch_size=config.batch_size,
            max_new_tokens=config.max_new_tokens,
            repeats=config.repeats,
            earlier=() if earlier is None else earlier.samples,
            gave_up=[info.name for info in gave_up],
        )
        run.warm_up()
        machine = None
        if config.step_times and (earlier is None or earlier.machine is None):
            machine = _machine(base, any(info.name == "transformers" for info in variants.infos))
        counted = iter(range(1, run.num_turns + 1))
        with writing(folder):
            _note_session(folder / PROVENANCE)
            writer = RecordWriter(folder / RECORDS)
        with writer:
            if earlier is None:
                writer.write(header)
            if machine is not None:
                writer.write(machine)
            run.measure(writer, time.perf_counter() - begin, lambda: progress(next(counted), run.num_turns))


def _header(config: Any, base: LLM, variants: Variants, cases: Cases, origin: Origin) -> Header:
    return Header(
        name=origin.name,
        **_settings(config),
        dtype=str(base.model.dtype).removeprefix("torch."),
        num_parameters=sum(p.numel() for p in base.model.parameters()),
        kv_bytes_per_token=base.engine.target.cache.bytes_per_token,
        variants=variants.infos,
        cases=cases.cases,
        absent=variants.absent,
        left_out=cases.left_out,
        overrides=origin.overrides,
        question=OmegaConf.select(config, "question"),
        sources=origin.sources,
    )


def _settings(config: Any) -> dict[str, Any]:
    """Return what a header says that a config says too."""
    names = "batch_size", "max_new_tokens", "seed", "repeats"
    own = {name: config[name] for name in names}
    return own | {"target": str(config.target.name), "temperature": float(config.temperature)}


def _check_settings(folder: Path, earlier: Header, config: Any) -> None:
    """Raise ConfigError unless records are of this config, whatever the config.yaml beside them has become."""
    names = [name for name, value in _settings(config).items() if getattr(earlier, name) != value]
    if names:
        raise _other_point(folder, names)


def _check_sources(folder: Path, earlier: Header, sources: dict[str, str]) -> None:
    """Raise ConfigError if a file is another than the one that was measured; of those that are gone nobody can tell."""
    changed = [name for name, mark in sources.items() if earlier.sources.get(name, mark) != mark]
    if changed:
        raise ConfigError(
            f"{folder} was measured with another {', '.join(changed)}, whose content has changed since; delete that "
            "folder to measure again, or give another, hydra.run.dir=FOLDER, of a sweep hydra.sweep.dir=FOLDER"
        )


def _check_same(folder: Path, earlier: Header, header: Header) -> None:
    """Raise ConfigError unless a resumed session would measure what was begun."""
    now = json.loads(json.dumps(asdict(header)))
    then = json.loads(json.dumps(asdict(earlier)))
    for name, what in (("cases", "prompts"), ("variants", "variants"), ("dtype", "number format")):
        if then[name] != now[name]:
            raise ConfigError(
                f"{folder} was begun with other {what} than there are now; delete it to measure again, or give another "
                "folder"
            )


def _compare_session(path: Path) -> None:
    """Warn where what was measured before came from other code or another machine."""
    try:
        then = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    now = provenance()
    other = [key for key in _SAME_CODE if isinstance(then, dict) and then.get(key) != now[key]]
    if other:
        log.warning("%s was measured with another %s than there is now", path.parent, ", ".join(other))


def _note_session(path: Path) -> None:
    now = provenance()
    try:
        first = json.loads(path.read_text())
        now = first | {"resumed": [*first.get("resumed", []), now]}
    except (OSError, ValueError, AttributeError, TypeError):
        pass  # there was none, or a killed session left a part of it
    write_text(path, json.dumps(now, indent=1))


def _machine(base: LLM, with_transformers: bool) -> Machine:
    table = measure_step_times(base.engine.target, base.model if with_transformers else None)
    device = base.model.device
    return Machine(
        table,
        read_bandwidth_bytes_per_s(device),
        matmul_flops_per_s(base.model.dtype, device),
        weight_bytes_per_step(base.model),
    )

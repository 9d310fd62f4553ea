"""One point of an evaluation, measured into a folder; a killed one goes on where it stopped. See docs/records.md."""

from __future__ import annotations

import json
import logging
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from specdec.api import LLM, matmul_flops_per_s, measure_step_times, read_bandwidth_bytes_per_s, weight_bytes_per_step
from specdec.errors import ConfigError, SpecdecError
from specdec.eval.cases import Cases, make_cases
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
from specdec.eval.runner import Key, run_turns
from specdec.eval.summary import summarise
from specdec.eval.target import load_target
from specdec.eval.variants import Variant, build_variants
from specdec.provenance import provenance

log = logging.getLogger("specdec")

_LOCK = ".lock"
_UNMEASURED = ("hydra", "output")  # keys of a config that do not change what is measured
_LEAST = {"repeats": 1, "batch_size": 1, "max_new_tokens": 2}

Progress = Callable[[int, int], None]  # (samples done, of)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in a sweep a point stands."""

    name: str
    overrides: dict[str, Any]


def check_config(config: Any) -> None:
    """Raise ConfigError for what the groups' own checks do not see."""
    for name, least in _LEAST.items():
        value = OmegaConf.select(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}={value!r}; allowed: an integer >= {least}")


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
        config: the groups target, drafter, verifier, engine and prompts, and what speedup.yaml has.
        folder: made if absent; holds this point or nothing.
        name: of the point.
        overrides: dotted keys that the command line set, for whoever compares points.
        progress: told after each sample.

    Raises:
        ConfigError: the folder holds another point, is in use, or the config is wrong.
        InputError: records in it are corrupt.
        SpecdecError: records cannot be written.
    """
    check_config(config)
    resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    kept = {name: value for name, value in resolved.items() if name not in _UNMEASURED}
    with _locked(folder):
        _take(folder, kept)
        try:
            earlier = _earlier(folder / RECORDS)
            if earlier is None or earlier.end is None:
                _measure(config, folder, earlier, Origin(name, overrides or {}), progress)
            records = read_records(folder / RECORDS)
            (folder / SUMMARY).write_text(json.dumps(summarise(records), indent=1))
        except OSError as error:
            raise SpecdecError(
                f"{folder} cannot be written ({error}); what was measured is kept there: make room and run the same "
                "command again, it goes on where it stopped"
            ) from error
        (folder / ERROR).unlink(missing_ok=True)
    return records


def note_error(folder: Path, error: BaseException) -> None:
    """Leave an error in a point's folder, if it can be written."""
    what = {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exception(error)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ERROR).write_text(json.dumps(what, indent=1))
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
        with lock:
            yield
    except Timeout as error:
        raise ConfigError(f"{folder} is being measured by another process; give another folder or wait") from error
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error}") from error


def _take(folder: Path, kept: dict[str, Any]) -> None:
    """Write the config into a new folder; refuse one that holds another point."""
    path = folder / CONFIG
    if path.exists():
        found = OmegaConf.to_container(OmegaConf.load(path))
        if found != kept:
            names = [key for key in kept.keys() | set(found) if found.get(key) != kept.get(key)]
            raise ConfigError(
                f"{folder} holds another point: its {', '.join(sorted(map(str, names)))} differs; give another folder, "
                "or delete it"
            )
    else:
        OmegaConf.save(OmegaConf.create(kept), path)


def _earlier(path: Path) -> Records | None:
    """Return what an earlier session measured, its unfinished last line cut off."""
    if not path.exists():
        return None
    whole = whole_bytes(path)
    if whole < path.stat().st_size:
        log.warning("%s ends with an unfinished line, which is dropped", path)
        with path.open("r+b") as file:
            file.truncate(whole)
    return read_records(path) if whole else None


def _measure(config: Any, folder: Path, earlier: Records | None, origin: Origin, progress: Progress) -> None:
    base = load_target(config)
    cases = make_cases(base, config)
    variants, absent = build_variants(base, config, [case.num_new_tokens for case in cases.cases])
    try:
        header = _header(config, base, variants, cases, absent, origin)
        if earlier is not None:
            _check_same(folder, earlier.header, header)
        _note_session(folder / PROVENANCE)
        done: dict[Key, float] = {}
        if earlier is not None:
            done = {(s.variant, s.batch, s.repeat): s.start_s + s.total_s for s in earlier.samples}
        with RecordWriter(folder / RECORDS) as writer:
            if earlier is None:
                writer.write(header)
            if config.step_times and (earlier is None or earlier.machine is None):
                writer.write(_machine(base, any(v.info.name == "transformers" for v in variants)))
            total = len(variants) * len(cases.batches(config.batch_size)) * config.repeats
            counted = iter(range(1, total + 1))
            run_turns(
                *(variants, cases, config.batch_size, config.max_new_tokens, config.repeats, writer, done),
                lambda: progress(next(counted), total),
            )
    finally:
        for variant in variants:
            variant.close()


def _header(
    config: Any, base: LLM, variants: list[Variant], cases: Cases, absent: list[dict[str, str]], origin: Origin
) -> Header:
    return Header(
        name=origin.name,
        target=str(config.target.name),
        dtype=str(base.model.dtype).removeprefix("torch."),
        num_parameters=sum(p.numel() for p in base.model.parameters()),
        kv_bytes_per_token=base.engine.target.cache.bytes_per_token,
        batch_size=config.batch_size,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=config.seed,
        repeats=config.repeats,
        variants=[variant.info for variant in variants],
        cases=cases.cases,
        absent=absent,
        left_out=cases.left_out,
        overrides=origin.overrides,
        question=OmegaConf.select(config, "question"),
    )


def _check_same(folder: Path, earlier: Header, header: Header) -> None:
    for what, name in (("prompts or their lengths", "cases"), ("variants", "variants")):
        if getattr(earlier, name) != getattr(header, name):
            raise ConfigError(
                f"{folder} was begun with other {what} than there are now; delete it to measure again, or give another "
                "folder"
            )


def _note_session(path: Path) -> None:
    now = provenance()
    if path.exists():
        first = json.loads(path.read_text())
        now = first | {"resumed": [*first.get("resumed", []), now]}
    spare = path.with_suffix(".tmp")
    spare.write_text(json.dumps(now, indent=1))
    shutil.move(spare, path)


def _machine(base: LLM, with_transformers: bool) -> Machine:
    table = measure_step_times(base.engine.target, base.model if with_transformers else None)
    is_cpu = base.model.device.type == "cpu"
    return Machine(
        table,
        read_bandwidth_bytes_per_s() if is_cpu else None,
        matmul_flops_per_s(base.model.dtype) if is_cpu else None,
        weight_bytes_per_step(base.model),
    )

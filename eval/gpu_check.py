"""One script for a CUDA machine, under 4 minutes: is the output exact there, and how fast is everything.

    python -m specdec.eval.gpu_check
    python -m specdec.eval.gpu_check model=random:1b large=null

Without a GPU, `device=cpu` runs the exactness part on a tiny random model, which tries the script itself. Exit code
0 = nothing failed: what is not here (flash-attn, a head for the target, room for the large model) and timings that were
not taken for want of time count as good, the table names them; 1 = something failed, or a check of exactness did not
run for want of time; 2 = bad input or no such device. Whatever goes wrong behind that is a row of the table.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.check import check
from specdec.errors import ConfigError, SpecdecError
from specdec.eval.entry import run_and_write
from specdec.eval.gpu_attention import attention_checks
from specdec.eval.gpu_exactness import float32_checks, half_checks, kv_checks
from specdec.eval.gpu_rig import Rig, parse_half
from specdec.eval.gpu_sections import (
    ABSENT,
    FAILED,
    NOT_RUN,
    NOT_TIMED,
    PASSED,
    Check,
    Clock,
    Finding,
    NotHere,
    Outcome,
    run_section,
    told,
)
from specdec.eval.gpu_timings import timing_checks
from specdec.eval.hydra_main import hydra_main
from specdec.provenance import provenance

console = Console()
_STYLES = {PASSED: "green", FAILED: "red", NOT_RUN: "red", ABSENT: "yellow", NOT_TIMED: "yellow"}
_LARGE_BYTES = {"random:8b": 16.1e9, "random:1b": 2.5e9}  # of their weights in half precision
_ROOM = 1.5  # times the weights, for KV and activations
# Seconds after which no check of a section begins; the last of one may run on.
_BUDGETS_S = {"load": 30, "float32": 60, "half": 45, "attention": 20, "kv": 20, "timings": 50, "large": 30}
_MEASURED_ONLY = {"timings", "large"}


def measure(config: Any) -> dict[str, Any]:
    """Run every check and return what was found.

    Raises:
        ConfigError: there is no such device, or an option is out of range.
        SpecdecError: the target cannot be loaded for a reason that the user can change.
    """
    _refuse(config)
    clock = Clock(config.limit_s)
    device = torch.device(config.device)
    where, machine = provenance(), _machine(device)  # now: a device may be broken by what is checked on it
    torch.set_float32_matmul_precision("highest")  # TF32 would be no float32
    outcomes: list[Outcome] = []
    with console.status("loading") as status:
        rig = _load(config, outcomes)
        for name, checks in () if rig is None else _sections(rig):
            late = NOT_TIMED if name in _MEASURED_ONLY else NOT_RUN
            outcomes += run_section(name, checks, _BUDGETS_S[name], clock, status.update, late)
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": where,
        "machine": machine | {"peak_memory_bytes": _peak_memory_bytes(device)},
        "target": config.model if rig is None else rig.name,
        "notes": [] if rig is None else rig.notes,
        "seconds": clock.limit_s - clock.left_s,
        "outcomes": [asdict(o) for o in outcomes],
    }


def _load(config: Any, outcomes: list[Outcome]) -> Rig | None:
    """Return the target; where the machine and not the user is to blame that there is none, that is an outcome."""
    try:
        return Rig(config)
    except SpecdecError:
        raise
    except Exception as error:  # out of memory, a driver, a build of torch without kernels for this device
        outcomes.append(Outcome("load", "the target", FAILED, told(error), {}, 0.0))
        return None


def _refuse(config: Any) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA device here, so nothing about one can be checked; device=cpu runs the exactness part on "
            "a tiny model, which tries this script and no GPU"
        )
    if config.device not in ("cuda", "cpu"):
        raise ConfigError(f"device={config.device!r}; allowed: cuda, cpu")
    if config.timings not in ("auto", True, False):
        raise ConfigError(f"timings={config.timings!r}; allowed: auto, true, false")
    if config.large is not None and config.large not in _LARGE_BYTES:
        raise ConfigError(f"large={config.large!r}; allowed: {', '.join(_LARGE_BYTES)}, null")
    for name in config.half_dtypes:
        parse_half(name)
    if not config.half_dtypes:
        raise ConfigError("half_dtypes is empty; give float16, bfloat16 or both")
    least = {"max_new_tokens": 6, "context_tokens": 1, "prefill_tokens": 1, "rows": 1, "batch_sizes": 1}
    for name, smallest in least.items():  # with fewer new tokens there is nothing to draft and nobody to preempt
        numbers = config[name] if OmegaConf.is_list(config[name]) else [config[name]]
        if not all(isinstance(n, int) and n >= smallest for n in numbers):
            raise ConfigError(f"{name}={config[name]}; allowed: integers >= {smallest}")


def _sections(rig: Rig) -> Iterator[tuple[str, Iterator[Check]]]:
    config = rig.config
    yield "load", _attention(rig)
    yield "float32", float32_checks(rig)
    yield "half", half_checks(rig)
    yield "attention", attention_checks(rig)
    yield "kv", kv_checks(rig)
    if config.timings is True or (config.timings == "auto" and rig.device.type == "cuda"):
        half = parse_half(config.half_dtypes[-1])
        yield "timings", timing_checks(rig, half)
        if config.large is not None and rig.device.type == "cuda":
            yield from large_sections(config, half)


def _attention(rig: Rig) -> Iterator[Check]:
    """Yield the questions which attention runs in each dtype, and why."""

    def ask(dtype: torch.dtype) -> Finding:
        return Finding(None, check(rig.of(dtype), weights=False).attention or "the model's own code")

    for name, dtype in [("float32", torch.float32), *((name, parse_half(name)) for name in rig.config.half_dtypes)]:
        yield f"attention in {name}", partial(ask, dtype)


def large_sections(config: Any, dtype: torch.dtype) -> Iterator[tuple[str, Iterator[Check]]]:
    """Yield the loading of a large random model, if there is room for it, then its measurements, with a budget each."""
    loaded: list[Rig] = []

    def load() -> Finding:
        needed = _ROOM * _LARGE_BYTES[config.large]
        free, _ = torch.cuda.mem_get_info()
        if free < needed:
            raise NotHere(f"it needs {needed / 1e9:.0f} GB of GPU memory, {free / 1e9:.0f} GB are free")
        other = OmegaConf.merge(config, {"model": config.large, "drafters": ["none", "ngram"]})
        loaded.append(Rig(other, dtype))
        return Finding(None, "loaded")

    yield "large", iter([(config.large, load)])
    for rig in loaded:
        yield "large", timing_checks(rig, dtype)


def _machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"device": str(device), "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "memory_bytes": properties.total_memory,
        }
    return found


def _peak_memory_bytes(device: torch.device) -> int | None:
    try:
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    except RuntimeError:  # after an illegal access every call fails
        return None


def show(result: dict[str, Any]) -> bool:
    """Print the table and the verdict; return whether nothing failed and every check of exactness had its time."""
    machine, versions = result["machine"], result["provenance"]["versions"]
    console.print(
        f"{machine.get('name', machine['device'])}, CUDA {machine['cuda']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}; target {result['target']}; {result['seconds']:.0f} s",
        highlight=False,
    )
    for line in result["notes"]:
        console.print(line, highlight=False, markup=False)
    table = Table(
        *("check", "verdict", "s", "found"),
        caption=f"{ABSENT!r} and {NOT_TIMED!r} (for want of time) do not count against the verdict: of those nothing "
        "is known",
    )
    for o in result["outcomes"]:
        verdict = Text(o["verdict"], style=_STYLES.get(o["verdict"], ""))
        table.add_row(f"{o['section']}: {o['name']}", verdict, f"{o['seconds']:.1f}", Text(o["detail"]))
    console.print(table)
    counts = Counter(o["verdict"] for o in result["outcomes"])
    good = not counts[FAILED] and not counts[NOT_RUN]
    if machine["device"] == "cpu":
        console.print("this ran on the CPU: it tried the script and says nothing of a GPU", highlight=False)
    summed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    console.print(f"verdict: {'good' if good else 'NOT good'} ({summed})", highlight=False)
    return good


@hydra_main("gpu_check")
def main(config: DictConfig) -> None:
    """Check, print, write; the exit code is the verdict."""
    sys.exit(0 if run_and_write(config, "gpu_check", measure, show) else 1)


if __name__ == "__main__":
    main()

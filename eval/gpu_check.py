"""One script for a CUDA machine, under 4 minutes: is the output exact there, and how fast is everything.

    python -m specdec.eval.gpu_check
    python -m specdec.eval.gpu_check model=random:1b large=null

Without a GPU, `device=cpu` runs the exactness part on a tiny random model, which tries the script itself. Exit code
0 = everything passed, 1 = something failed or did not run for want of time, 2 = bad input or no such device.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.check import check
from specdec.errors import ConfigError, SpecdecError
from specdec.eval.entry import run_and_write
from specdec.eval.gpu_exactness import attention_checks, float32_checks, half_checks, kv_checks
from specdec.eval.gpu_rig import Rig, parse_half
from specdec.eval.gpu_sections import FAILED, NOT_RUN, Check, Clock, Finding, NotHere, Outcome, run_section
from specdec.eval.gpu_timings import timing_checks
from specdec.provenance import provenance

console = Console()
_STYLES = {"passed": "green", FAILED: "red", NOT_RUN: "red", "not here": "yellow"}
_LARGE_BYTES = {"random:8b": 16.1e9, "random:1b": 2.5e9}  # of their weights in half precision
_ROOM = 1.5  # times the weights, for KV and activations
# Seconds after which no check of a section begins; the last of one may run on.
_BUDGETS_S = {"float32": 60, "half": 45, "attention": 20, "kv": 20, "timings": 50, "large": 30}


def measure(config: Any) -> dict[str, Any]:
    """Run every check and return what was found.

    Raises:
        ConfigError: there is no such device, or an option is out of range.
    """
    _refuse(config)
    clock = Clock(config.limit_s)
    torch.set_float32_matmul_precision("highest")  # TF32 would be no float32
    with console.status("loading") as status:
        rig = Rig(config)
        attention = {
            name: check(rig.of(dtype), weights=False).attention
            for name, dtype in [("float32", torch.float32), *((n, parse_half(n)) for n in config.half_dtypes)]
        }
        outcomes: list[Outcome] = []
        for name, checks in _sections(rig):
            outcomes += run_section(name, checks, _BUDGETS_S[name], clock, status.update)
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "machine": _machine(rig.device),
        "target": rig.name,
        "attention": attention,
        "notes": rig.notes,
        "seconds": clock.limit_s - clock.left_s,
        "outcomes": [asdict(o) for o in outcomes],
    }


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


def _sections(rig: Rig) -> Iterator[tuple[str, Iterator[Check]]]:
    config = rig.config
    yield "float32", float32_checks(rig)
    yield "half", half_checks(rig)
    yield "attention", attention_checks(rig)
    yield "kv", kv_checks(rig)
    if config.timings is True or (config.timings == "auto" and rig.device.type == "cuda"):
        half = parse_half(config.half_dtypes[-1])
        yield "timings", timing_checks(rig, half)
        if config.large is not None and rig.device.type == "cuda":
            yield "large", _large_checks(config, half)


def _large_checks(config: Any, dtype: torch.dtype) -> Iterator[Check]:
    """Yield the measurements of a large random model, or why there is no room for it."""
    needed = _ROOM * _LARGE_BYTES[config.large]
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        yield _cannot(
            config.large,
            NotHere(f"it needs {needed / 1e9:.0f} GB of GPU memory, {free / 1e9:.0f} GB are free"),
        )
        return
    other = OmegaConf.merge(config, {"model": config.large, "drafters": ["none", "ngram"]})
    try:
        rig = Rig(other, dtype)
    except (SpecdecError, RuntimeError) as error:
        yield _cannot(config.large, error)
        return
    yield from timing_checks(rig, dtype)


def _cannot(name: str, error: Exception) -> Check:
    def fail() -> Finding:
        raise error

    return name, fail


def _machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"device": str(device), "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "memory_bytes": properties.total_memory,
            "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        }
    return found


def show(result: dict[str, Any]) -> bool:
    """Print the table and the verdict; return whether everything ran that could, and passed."""
    machine, versions = result["machine"], result["provenance"]["versions"]
    console.print(
        f"{machine.get('name', machine['device'])}, CUDA {machine['cuda']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}; target {result['target']}; {result['seconds']:.0f} s",
        highlight=False,
    )
    lines = [f"attention in {dtype}: {what}" for dtype, what in result["attention"].items()]
    for line in (*lines, *result["notes"]):
        console.print(line, highlight=False, markup=False)
    table = Table("check", "verdict", "s", "found")
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


@hydra.main(version_base="1.3", config_path="pkg://specdec.configs", config_name="gpu_check")
def main(config: DictConfig) -> None:
    """Check, print, write; the exit code is the verdict."""
    sys.exit(0 if run_and_write(config, "gpu_check", measure, show) else 1)


if __name__ == "__main__":
    main()

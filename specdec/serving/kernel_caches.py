"""How many compiled matrix kernels oneDNN keeps: one per number of rows, and a server meets hundreds of those."""

from __future__ import annotations

import logging
import os

from specdec.models.build import has_runners

log = logging.getLogger("specdec")

# Two caches lie on top of each other, torch's own and oneDNN's, 1024 entries each by default. An entry of the built-in
# model's sizes takes about 0.3 MB, so that a server's memory would creep up by hundreds of megabytes over its first
# hour. A step needs about 10 entries. Load tests with 16 and with 32 of them were not slower than with 1024; 64 leaves
# room for a draft model and other models beside it, which the bound holds for too. For that reason `LLM`, which is also
# used inside of programs with models of their own, leaves both alone.
_CAPACITIES = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}


def bound_kernel_caches() -> bool:
    """Bound both caches where the environment does not say otherwise; return whether that came too late.

    Each is read once, when its first kernel runs. It is too late if a model was prepared in this process before. What
    else has run here, of torch alone, is not known.

    Source: Intel Extension for PyTorch, "Performance Tuning Guide"; oneDNN, "Primitive Cache".
    """
    missing = [name for name in _CAPACITIES if name not in os.environ]
    for name in missing:
        os.environ[name] = _CAPACITIES[name]  # so nobody is told twice
    return bool(missing) and has_runners()


def warn_too_late() -> None:
    """Say what `bound_kernel_caches` found to be too late."""
    settings = " ".join(f"{name}={capacity}" for name, capacity in _CAPACITIES.items())
    log.warning(
        "a model ran in this process before its first specdec.Engine, so oneDNN's kernel caches may have no bound, and "
        "memory may grow by hundreds of MB as batches of new sizes come; build the Engine first, or set %s before "
        "Python starts",
        settings,
    )

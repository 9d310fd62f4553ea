"""How many compiled matrix kernels oneDNN keeps: one per number of rows, and a server meets hundreds of those."""

from __future__ import annotations

import os

# Two caches lie on top of each other, torch's own and oneDNN's, 1024 entries each by default. An entry of the built-in
# model's sizes takes about 0.3 MB, so that a server's memory would creep up by hundreds of megabytes over its first
# hour. A step needs about 10 entries; with 16 and 32 of them a load test was not slower than with 1024.
_CAPACITIES = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}


def bound_kernel_caches() -> None:
    """Bound both caches, where the environment does not say otherwise and no kernel has run in this process yet.

    Source: Intel Extension for PyTorch, "Performance Tuning Guide"; oneDNN, "Primitive Cache".
    """
    for name, capacity in _CAPACITIES.items():
        os.environ.setdefault(name, capacity)

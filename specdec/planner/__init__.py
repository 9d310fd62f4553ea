"""What fits, what bounds each phase, how fast it can be at best, and whether speculation pays: from configs alone.

No weights are loaded, and torch is imported only to measure this machine or for architectures without a formula here.
"""

from __future__ import annotations

from specdec.planner.architecture import Architecture
from specdec.planner.device import DEVICES, Device, custom_device, find_device
from specdec.planner.model import PlannedModel, read_model
from specdec.planner.plan import Plan, Workload, make_plan

__all__ = [
    "DEVICES",
    "Architecture",
    "Device",
    "Plan",
    "PlannedModel",
    "Workload",
    "custom_device",
    "find_device",
    "make_plan",
    "read_model",
]

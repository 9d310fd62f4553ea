"""What docs/planner.md says of devices is the table's, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

from specdec.planner import DEVICES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")


def test_devices() -> None:
    rows = {row.split("`")[1]: row for row in re.findall(r"^\| `[\w-]+` \|.* GB/s .*$", PAGE, flags=re.MULTILINE)}
    assert set(rows) == set(DEVICES)
    for name, device in DEVICES.items():
        rates = [device.flops_per_s.get(dtype) for dtype in ("fp16", "bf16", "fp32")]
        assert [cell.strip() for cell in rows[name].strip("|").split("|")] == [
            f"`{name}`",
            f"{device.memory_bytes / 1e9:g} GB",
            f"{device.bandwidth_bytes_per_s / 1e9:g} GB/s",
            *("-" if rate is None else f"{rate / 1e12:g}" for rate in rates),
            f"{device.balance('fp16'):.0f}",
            device.source,
        ]


def test_every_device_says_where_its_figures_are_from() -> None:
    for name, device in DEVICES.items():
        assert name == "generic-1tb" or re.search(r"\b20\d\d\b", device.source), name


def test_example() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(compile(code, "planner.md", "exec"), names)
    assert names["plan"]

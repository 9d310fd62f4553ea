"""The training curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PICTURE = "curve.png"
_INCHES = (9.0, 9.5)


def plot_curve(
    curve: Sequence[dict[str, Any]], path: Path, title: str, marks: Mapping[int, str] | None = None
) -> Path | None:
    """Draw loss, held-out accuracy per draft position and acceptance length against tokens seen and minutes.

    Args:
        curve: lines of `Loop.curve`.
        path: a .png file, written whole or not at all.
        title: above it.
        marks: tokens seen -> what happens there to the loss; a vertical line with that label.

    Returns:
        The path, or None if there is nothing to draw.
    """
    if not curve:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    loss, accuracy, length = figure.subplots(3, 1, sharex=True)
    _line(loss, curve, "loss", "last batch")
    loss.set_ylabel("loss")
    for at, label in (marks or {}).items():
        loss.axvline(at, color="0.5", linestyle="--", label=f"from here on: {label}")
        loss.legend()
    for step in range(max(len(line.get("held_out_accuracy", ())) for line in curve)):
        points = [(n, at[step]) for n, at in _points(curve, "held_out_accuracy") if step < len(at)]
        accuracy.plot(*zip(*points, strict=True), marker=".", label=f"draft token {step + 1}")
    accuracy.set_ylabel("held-out accuracy")
    if accuracy.lines:
        accuracy.legend()
    _line(length, curve, "acceptance_length", "greedy chains, held-out prompts")
    length.set_ylabel("acceptance length")
    length.set_xlabel("response tokens seen")
    _minutes(loss, curve)
    for axes in (loss, accuracy, length):
        axes.grid(alpha=0.3)
    half = path.with_name(f".{path.name}")
    figure.savefig(half, dpi=110, format="png")
    half.replace(path)
    return path


def _points(curve: Sequence[dict[str, Any]], name: str) -> list[tuple[int, Any]]:
    return [(line["num_tokens"], line[name]) for line in curve if name in line]


def _line(axes: Any, curve: Sequence[dict[str, Any]], name: str, label: str) -> None:
    points = _points(curve, name)
    if points:
        axes.plot(*zip(*points, strict=True), marker=".", label=label)
        axes.legend()


def _minutes(axes: Any, curve: Sequence[dict[str, Any]]) -> None:
    """Write the minutes of training over the tokens seen, at the curve's own points."""
    above = axes.secondary_xaxis("top")
    shown = curve[:: max(len(curve) // 8, 1)]
    above.set_xticks([line["num_tokens"] for line in shown], [f"{line['seconds'] / 60:.3g}" for line in shown])
    above.set_xlabel("minutes of training")

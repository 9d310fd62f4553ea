"""A load test as a picture: who waited how long, and what the engine held meanwhile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.errors import InputError

_INCHES = (11.0, 7.5)


def check_plot_path(path: Path) -> Path:
    """Return the path of a picture that can be written there, before the load has taken its time.

    Raises:
        InputError: it cannot, or does not end in .png.
    """
    if path.suffix.lower() != ".png" or path.is_dir():
        raise InputError(f"plot {str(path)!r} is no file that ends in .png")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"plot {str(path)!r}: {str(path.parent)!r} is no folder that can be written to")
    return path


def plot_serve(result: dict[str, Any], path: Path) -> Path:
    """Draw the distributions of TTFT and ITL and, over time, requests and KV occupancy.

    Args:
        result: of `serve`.
        path: a .png file, written whole or not at all.

    Returns:
        The path.

    Raises:
        InputError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    lossy = "" if result["lossless"] else ", LOSSY verifier"
    figure.suptitle(
        f"{Path(result['model']).name}, drafter {result['drafter']}{lossy}: {result['num_arrived']} requests"
    )
    (ttft, itl), (requests, kv) = figure.subplots(2, 2)
    _distribution(ttft, [r["ttft_s"] for r in result["requests"]], "time to first token, s", result["ttft_s"])
    _limit(ttft, result["load"]["slo_ttft_s"])
    _distribution(itl, [1e3 * gap for gap in result["gaps_s"]], "gap between emissions, ms", _scaled(result["itl_s"]))
    moments = result["timeline"]
    at = [m["at_s"] for m in moments]
    requests.step(at, [m["num_running"] for m in moments], where="post", label="running")
    requests.step(at, [m["num_waiting"] for m in moments], where="post", label="waiting")
    requests.set_ylabel("requests")
    requests.set_ylim(bottom=0)
    size, limit = result["kv"]["block_tokens"], result["kv"]["most_blocks"]
    used = [size * m["kv_used"] for m in moments]
    cached = [size * m["kv_cached"] for m in moments]
    kv.stackplot(at, used, cached, labels=["held by requests", "kept for prefixes"], alpha=0.7, step="post")
    kv.set_ylabel("KV cache, tokens")
    if limit:
        kv.axhline(limit * size, color="tab:red", linewidth=1, label="all there is room for")
    kv.set_ylim(bottom=0)
    for axes in (requests, kv):
        axes.set_xlabel("seconds")
        axes.set_xlim(left=0)
    for axes in (ttft, itl, requests, kv):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    half = path.with_name(f".{path.name}")
    try:
        figure.savefig(half, dpi=110, format="png")
        half.replace(path)
    except OSError as error:
        raise InputError(f"plot {str(path)!r} cannot be written: {error}") from error
    finally:
        half.unlink(missing_ok=True)
    return path


def _distribution(axes: Any, values: Sequence[float | None], what: str, marks: dict[str, float | None]) -> None:
    """Draw what share of the values lies below each, and the percentiles."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    known = sorted(v for v in values if v is not None and v > 0)
    axes.set_xlabel(what)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("share")
    axes.set_ylim(0, 1.02)
    if not known:
        return
    axes.step(known, [(i + 1) / len(known) for i in range(len(known))], where="post")
    for (name, value), style in zip(marks.items(), ("-", "--", ":"), strict=True):
        if value is not None:
            axes.axvline(value, color="grey", linestyle=style, linewidth=1, label=f"{name} {_figure(value)}")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _limit(axes: Any, slo_s: float | None) -> None:
    if slo_s is not None:
        axes.axvline(slo_s, color="tab:red", linewidth=1, label=f"limit {_figure(slo_s)}")


def _scaled(values: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else 1e3 * value for name, value in values.items()}

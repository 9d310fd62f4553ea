"""What verification costs on the machine: t(M), the roofline, and the speedup that they predict."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from specdec.eval.records import BASELINE, CONTROL, Header, Machine
from specdec.eval.report.drawing import Picture, drawing, legend_above, whiskers
from specdec.eval.report.gather import Point
from specdec.eval.report.looks import INK, MUTED, PAGE, Looks, keeps_output, label
from specdec.eval.report.steps import StepCost, machine_of, predicted_speedup, step_cost
from specdec.eval.report.time_figures import log_axis

_CONTEXT_TOKENS = 128  # before the forwards of `Machine.step_times`
_DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def verify_cost(point: Point, looks: Looks) -> Picture | None:
    """Draw t(M) with the forwards of each variant on it."""
    machine = point.records.machine
    if machine is None or not machine.step_times:
        return None
    table = sorted(machine.step_times, key=lambda row: row["rows"])
    ours = [(row["rows"], 1e3 * row["runner_s"]) for row in table]
    theirs = [(row["rows"], 1e3 * row["transformers_s"]) for row in table if row.get("transformers_s")]
    costs = _costs(point)
    with drawing(3.5) as (figure, axes):
        axes.plot(*zip(*ours, strict=True), color=INK, marker=".", linewidth=1.5, label="engine, alone")
        if theirs:
            style = {"color": MUTED, "marker": ".", "linestyle": "--", "linewidth": 1.2}
            axes.plot(*zip(*theirs, strict=True), label="transformers, alone", **style)
        _scatter(axes, point, looks, [(name, cost.num_rows, 1e3 * cost.verify_s) for name, cost in costs.items()])
        log_axis(axes.xaxis, [rows for rows, _ in ours], base=2)
        log_axis(axes.yaxis, [ms for _, ms in [*ours, *theirs]])
        axes.set_xlabel("rows M of a forward")
        axes.set_ylabel("ms")
        legend_above(figure, axes)
    first, last = ours[0], ours[-1]
    falls = [f"t({m1:g}) is below t({m0:g})" for (m0, t0), (m1, t1) in pairwise(ours) if t1 < t0]
    return Picture(
        key="verify-cost",
        title="Cost of verification, t(M)",
        text=("A curve that falls in places" if falls else "A rising curve")
        + f": a forward of {first[0]:g} rows takes {first[1]:.3g} ms, one of {last[0]:g} rows {last[1]:.3g} ms, "
        f"{last[1] / first[1]:.2f} times as long.",
        notes=[
            f"Lines: one forward of M rows after {_CONTEXT_TOKENS} tokens, measured alone. Markers: mean rows of the "
            "forwards of each variant, and their mean time with the verifier, in the run itself.",
        ],
        columns=("what", "rows", "ms"),
        rows=[("engine", *row) for row in ours]
        + [("transformers", *row) for row in theirs]
        + [(name, cost.num_rows, 1e3 * cost.verify_s) for name, cost in costs.items()],
        figure=figure,
        findings=[f"{'; '.join(falls)}: the measurement is noisy there."] if falls else [],
    )


def roofline(point: Point, looks: Looks) -> Picture | None:
    """Draw what the forwards achieve against what the machine can read and compute."""
    header, machine = point.records.header, point.records.machine
    if machine is None or not (machine.read_bandwidth_bytes_per_s and machine.weight_bytes_per_step):
        return None
    alone = [_achieved(header, machine, row["rows"], 1, row["runner_s"]) for row in machine.step_times]
    run = [
        (name, *_achieved(header, machine, c.num_rows, c.num_requests, c.verify_s)) for name, c in _costs(point).items()
    ]
    intensities = [x for x, _ in alone] + [x for _, x, _ in run]
    if not intensities:
        return None
    read, flops = machine.read_bandwidth_bytes_per_s, machine.flops_per_s
    ends = [min(intensities) / 2, max([*intensities, (flops or 0) / read]) * 2]
    roof = [ends[0], flops / read, ends[1]] if flops and ends[0] < flops / read else ends
    with drawing(3.5) as (figure, axes):
        limit = [min(x * read, flops or x * read) / 1e9 for x in roof]
        axes.plot(roof, limit, color=INK, linewidth=1.5, label="roof of the machine")
        if alone:
            xs, ys = zip(*alone, strict=True)
            axes.plot(xs, [y / 1e9 for y in ys], color=MUTED, marker=".", label="forwards alone")
        _scatter(axes, point, looks, [(name, x, y / 1e9) for name, x, y in run])
        axes.set(xscale="log", yscale="log")
        log_axis(axes.xaxis, roof)
        log_axis(axes.yaxis, [*limit, *(y / 1e9 for _, y in alone)])
        axes.set_xlabel("FLOP per byte read")
        axes.set_ylabel("GFLOP/s")
        legend_above(figure, axes)
    shares = [(name, y / min(x * read, flops or x * read)) for name, x, y in run]
    return Picture(
        key="roofline",
        title="Roofline of the target's forward",
        text=f"A roof that rises with {read / 1e9:.3g} GB/s"
        + (f" to {flops / 1e9:.4g} GFLOP/s" if flops else "")
        + ". Share of the roof reached: "
        + "; ".join(f"{name} {share:.0%}" for name, share in shares)
        + ".",
        notes=[
            "A forward of M rows computes 2 x parameters x M floating-point operations, an input embedding of its own "
            f"not counted, and reads the weights once and the KV of {_CONTEXT_TOKENS} tokens for each request that "
            "runs. The roof is the read bandwidth, and the FLOP/s beyond its corner.",
            "Left of the corner a row more costs next to nothing: that is what drafting lives on.",
        ],
        columns=("what", "flop_per_byte", "flop_per_s", "roof_flop_per_s"),
        rows=[
            (name, x, y, min(x * read, flops or x * read)) for name, x, y in [*(("engine", *a) for a in alone), *run]
        ],
        figure=figure,
    )


def predictions(points: Sequence[Point], looks: Looks) -> Picture | None:
    """Draw predicted against measured speedups of all points."""
    rows: list[tuple[Any, ...]] = []
    with drawing(4.0) as (figure, axes):
        for point in points:
            machine = machine_of(point, points)
            for info in point.variants if machine else ():
                measured = point.speedup(info.name)
                if info.name in (BASELINE, CONTROL) or measured is None:
                    continue
                assert machine is not None, "variants are only looked at with one"
                predicted = predicted_speedup(point, info.name, machine)
                if predicted is not None:
                    known = {row[1] for row in rows}
                    style = looks.line(info) | {"linestyle": "none", "capsize": 2, "elinewidth": 1}
                    median, low, high = (measured[key] for key in ("median", "low", "high"))
                    named = {} if label(info) in known else {"label": label(info)}
                    axes.errorbar(predicted, median, whiskers([measured]), **style, **named)
                    rows.append((point.label, label(info), keeps_output(info), predicted, median, low, high))
        if not rows:
            return None
        most = 1.08 * max(1.0, *(max(value for value in row[3:] if value is not None) for row in rows))
        axes.plot([0, most], [0, most], color=MUTED, linewidth=1, linestyle="--", label="as predicted")
        axes.axhline(1.0, color=INK, linewidth=1)
        axes.set(xlim=(0, most), ylim=(0, most), xlabel="predicted speedup", ylabel="measured speedup")
        legend_above(figure, axes)
    worst = max(rows, key=lambda row: abs(row[4] / row[3] - 1))
    where = f" ({worst[0]})" if len(points) > 1 else ""
    errors = [row[4] / row[3] - 1 for row in rows]
    return Picture(
        key="predicted",
        title="Predicted against measured speedup",
        text=f"{len(rows)} markers around the diagonal. Measured over predicted less one: from {min(errors):+.0%} to "
        f"{max(errors):+.0%}.",
        notes=[
            "Predicted, for each batch = (tokens per forward with drafts / tokens per forward without) x mean t(rows) "
            "without / (mean t(rows) with + draft time per forward); the median over batches. A forward is one of all "
            "requests that run at that time, the means are over the forwards that were run, and t(M) goes by straight "
            "lines between the forwards measured alone. Where rows lie outside of the measured t(M), nothing is "
            "predicted.",
            "Beneath the diagonal the run was slower than the model of its cost: time outside of forward and drafter, "
            "longer contexts than those t(M) was measured with, or a machine that does other things.",
        ],
        columns=("point", "variant", "lossless", "predicted", "measured", "low", "high"),
        rows=rows,
        figure=figure,
        findings=[f"Furthest off: {worst[1]}{where}, predicted {worst[3]:.2f}, measured {worst[4]:.2f}."],
    )


def _costs(point: Point) -> dict[str, StepCost]:
    costs = {info.name: step_cost(point.records.of(info.name)) for info in point.variants if info.name != CONTROL}
    return {name: cost for name, cost in costs.items() if cost is not None}


def _scatter(axes: Any, point: Point, looks: Looks, places: Sequence[tuple[str, float, float]]) -> None:
    infos = {info.name: info for info in point.variants}
    for name, x, y in places:
        edge = (PAGE, 0.5) if infos[name].lossless else (looks.colour(name), 1.0)
        style = looks.line(infos[name]) | {"linestyle": "none", "markersize": 8}
        style |= dict(zip(("markeredgecolor", "markeredgewidth"), edge, strict=True))
        axes.plot([x], [y], label=label(infos[name]), **style)


def _achieved(
    header: Header, machine: Machine, num_rows: float, num_requests: float, seconds: float
) -> tuple[float, float]:
    """Return FLOP per byte and FLOP/s of a forward."""
    weights = machine.weight_bytes_per_step or 0
    item = _DTYPE_BYTES.get(header.dtype)
    flop = 2.0 * (weights / item if item else header.num_parameters) * num_rows
    num_bytes = weights + num_requests * _CONTEXT_TOKENS * header.kv_bytes_per_token
    return flop / num_bytes, flop / seconds if seconds else 0.0


def why_no_roofline(points: Sequence[Point]) -> list[str]:
    """Return a sentence where machines were measured and have no roofline."""
    machines = [point.records.machine for point in points if point.records.machine is not None]
    if not machines or any(m.read_bandwidth_bytes_per_s and m.weight_bytes_per_step for m in machines):
        return []
    return ["There is no roofline: the read bandwidth that it needs is measured on CPUs only."]

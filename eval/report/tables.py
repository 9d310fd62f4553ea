"""The tables of a report: text as people read it, and numbers as a file holds them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.eval.records import BASELINE, Header, VariantInfo
from specdec.eval.report.gather import Gathered, Point, listed, text_of
from specdec.eval.report.looks import keeps_output, label
from specdec.eval.report.prompt_set import prompts_needed
from specdec.eval.report.setting_text import in_short

_NONE = "-"
_MOST_CONTROLS = 4  # told one by one


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; the first cell of a row is its heading."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text_columns: int = 1  # at the left; the others are numbers
    headings: dict[int, str] = field(default_factory=dict)  # row -> of the group of rows that begins there


HEADLINE = (
    *(
        "speedup [95\u00a0%]",
        "end to end [95\u00a0%]",
        "acceptance length",
        "acceptance rate",
        "rate of tree nodes",
        "tokens/s",
    ),
    *("TTFT p50, ms", "ITL p50, ms", "ITL p99, ms", "answers equal to none's", "output"),
)


def headline(points: Sequence[Point]) -> Table:
    """Return the figures everybody asks for first: a row for each variant, and a group of rows for each point."""
    headings: dict[int, str] = {}
    rows: list[tuple[str, ...]] = []
    for point in points:
        headings[len(rows)] = _point_name(point)
        rows += [(label(info), *_cells(point, info)) for info in point.variants]
    return Table(
        caption="Every variant against the undrafted engine, none, on the same prompts",
        columns=("variant", *HEADLINE),
        rows=rows,
        headings=headings if len(points) > 1 or not points[0].is_finished else {},
    )


def variants(points: Sequence[Point]) -> Table:
    """Return what each variant is, equal ones of several points once."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for point in points:
        for info in point.variants:
            groups.setdefault(_what_it_is(info), []).append(point.label)
    names = list(dict.fromkeys(cells[0] for cells in groups))
    rows: list[tuple[str, ...]] = [
        (*cells, "all" if len(groups[cells]) == len(points) else listed(groups[cells]))
        for cells in sorted(groups, key=lambda cells: names.index(cells[0]))
    ]
    columns: tuple[str, ...] = ("variant", "draft tokens", "options", "drafter", "verifier", "points")
    if all(row[-1] == "all" for row in rows):
        rows, columns = [row[:-1] for row in rows], columns[:-1]
    return Table("Options are those that none does not have", columns, rows, len(columns))


def _what_it_is(info: VariantInfo) -> tuple[str, ...]:
    options: list[str] = []
    for key, value in info.options.items():
        if key == "drafter_options" and isinstance(value, dict):
            options += in_short(value)
        elif key != "max_draft_tokens":
            options += in_short({key.replace("verifier_options", "verifier"): value})
    return (
        label(info),
        _NONE if info.max_draft_tokens is None else str(info.max_draft_tokens),
        ", ".join(options) or _NONE,
        info.drafter or _NONE,
        _NONE if info.drafter in (None, "none") else info.verifier or _NONE,
    )


def short_headline(point: Point) -> Table:
    """Return the headline of one point in few letters, for a terminal."""
    rows = []
    for info in point.variants:
        speed, _, length, chain, tree, tokens, ttft, itl_p50, itl_p99, same, _ = _cells(point, info)
        rows.append(
            (label(info), speed, length, chain, tree, tokens, ttft, f"{itl_p50}/{itl_p99}", same.replace(" of ", "/"))
        )
    columns = ("", "speedup [95 %]", "length", "rate", "nodes", "tok/s", "TTFT ms", "ITL ms p50/p99", "= none")
    return Table(_point_name(point), columns, rows)


def _point_name(point: Point) -> str:
    return point.label if point.is_finished else f"{point.label} (not finished)"


def can_equal(header: Header, info: VariantInfo) -> bool:
    """Tell whether a variant's answers should be the undrafted engine's: it draws none, or the same."""
    return header.temperature == 0 or (header.seed is not None and info.kind == "engine" and info.verifier == "match")


def _same(point: Point, info: VariantInfo) -> dict[str, Any] | None:
    found: dict[str, Any] | None = point.summary["identity"].get(info.name)
    return found if can_equal(point.records.header, info) else None


def _output(info: VariantInfo) -> str:
    """Return whether the output's distribution is the target's; of peers, the notes say what they are."""
    if info.kind == "peer":
        return "peer" if info.lossless else "LOSSY peer"
    return "lossless" if info.lossless else "LOSSY"


def _cells(point: Point, info: VariantInfo) -> tuple[str, ...]:
    own, same = point.summary["variants"][info.name], _same(point, info)
    rate = number(own["acceptance_rate"], ".3f")
    ratios = ("1", "1") if info.name == BASELINE else [ratio(point.speedup(info.name, k)) for k in ("decode", "e2e")]
    return (
        *ratios,
        number(own["acceptance_length"], ".2f"),
        _NONE if own["tree"] else rate,
        rate if own["tree"] else _NONE,
        number(own["decode_tokens_per_s"], ".1f"),
        *(
            number((own[clock] or {}).get(share), ".1f", 1e3)
            for clock, share in (("ttft_s", "p50"), ("itl_s", "p50"), ("itl_s", "p99"))
        ),
        f"{same['equal']} of {same['of']}" if same else _NONE,
        _output(info),
    )


def number(value: float | None, form: str, times: float = 1.0) -> str:
    """Return a figure as text, or a dash."""
    return _NONE if value is None else format(times * value, form)


def ratio(found: dict[str, Any] | None) -> str:
    """Return a ratio with its interval as text, or a dash."""
    if found is None:
        return _NONE
    has_interval = found.get("low") is not None and found.get("high") is not None
    return f"{found['median']:.2f} " + (f"[{found['low']:.2f}, {found['high']:.2f}]" if has_interval else f"[{_NONE}]")


FIGURES = (
    *("point", "folder", "finished", "batch_size", "temperature"),
    *("variant", "drafter", "verifier", "max_draft_tokens", "lossless", "tree"),
    *("speedup", "speedup_low", "speedup_high", "speedup_e2e", "speedup_e2e_low", "speedup_e2e_high"),
    *("acceptance_length", "acceptance_rate", "decode_tokens_per_s", "tokens_per_s_e2e", "tokens_per_emission"),
    *("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "itl_p50_s", "itl_p90_s", "itl_p99_s"),
    *("num_answers", "num_loops", "num_equal", "num_compared"),
)


def figures(points: Sequence[Point]) -> list[tuple[Any, ...]]:
    """Return the headline of all points as numbers, by `FIGURES`."""
    return [_figures(point, info) for point in points for info in point.variants]


def _figures(point: Point, info: VariantInfo) -> tuple[Any, ...]:
    header, own = point.records.header, point.summary["variants"][info.name]
    same = _same(point, info) or {}
    ratios = [point.speedup(info.name, kind) or {} for kind in ("decode", "e2e")]
    return (
        *(point.label, text_of(point.folder), point.is_finished, header.batch_size, header.temperature),
        *(info.name, info.drafter, info.verifier, info.max_draft_tokens, keeps_output(info), own["tree"]),
        *(found.get(key) for found in ratios for key in ("median", "low", "high")),
        *(own[key] for key in ("acceptance_length", "acceptance_rate", "decode_tokens_per_s", "tokens_per_s_e2e")),
        own["tokens_per_emission"],
        *((own[clock] or {}).get(share) for clock in ("ttft_s", "itl_s") for share in ("p50", "p90", "p99")),
        *(own["num_answers"], own["num_loops"], same.get("equal"), same.get("of")),
    )


def controls(points: Sequence[Point]) -> list[str]:
    """Return what the engine's ratio to itself says of the noise; of many points only where it says something."""
    found = [point.summary["control"] for point in points if point.summary["control"] is not None]
    judged = [own for own in found if own["holds"] is not None]
    said = []
    if len(found) > _MOST_CONTROLS:
        said.append(
            "The undrafted engine against itself: 1.0 is in the 99 % interval of "
            f"{sum(own['holds'] for own in judged)} of {len(judged)} points"
            + (f"; {len(found) - len(judged)} have too few prompts for one." if len(judged) < len(found) else ".")
        )
    for point in points:
        own, header = point.summary["control"], point.records.header
        if own is not None and (own["holds"] is False or len(found) <= _MOST_CONTROLS):
            verdict = _verdict(own, header)
            said.append(f"{point.label}: the undrafted engine against itself {own['median']:.3f}, {verdict}.")
    return said


def _verdict(control: dict[str, Any], header: Header) -> str:
    if control["holds"] is None:
        takes = prompts_needed(header, control["level"])
        return f"too few prompts for an interval, which takes {takes}: it is not clear what noise does"
    verdict = "1.0 is in it" if control["holds"] else "1.0 is NOT in it: trust no difference as small as this"
    return f"{100 * control['level']:g} % interval {control['low']:.3f} to {control['high']:.3f}; {verdict}"


def notes(points: Sequence[Point]) -> list[str]:
    """Return what headers and figures say of variants, absent peers, repetitions and sampling, each once."""
    said = []
    for point in points:
        header = point.records.header
        said += [f"{info.name}: {info.note}" for info in header.variants if info.note]
        said += [f"Absent: {peer['name']} ({peer['reason']})." for peer in header.absent]
        said += [f"{peer.variant} gave up: {peer.reason}." for peer in point.records.dropped]
        loops = [
            f"{name} {own['num_loops']} of {own['num_answers']}"
            for name, own in point.summary["variants"].items()
            if own["num_loops"]
        ]
        said += [f"{point.label}: answers that repeat themselves: {'; '.join(loops)}."] if loops else []
        apart = [info.name for info in point.variants if not can_equal(header, info)]
        if apart:
            how = "without a seed" if header.seed is None else "with draws of their own"
            said.append(f"Sampled {how}, so whether answers equal none's says nothing: {'; '.join(apart)}.")
    return list(dict.fromkeys([*said, *_without_interval(points)]))


def _without_interval(points: Sequence[Point]) -> list[str]:
    """Return how many prompts would give speedups an interval, where there are fewer."""
    groups: dict[str, list[str]] = {}
    for point in points:
        header, found = point.records.header, [point.speedup(info.name) for info in point.variants]
        few = [len(ratio["per_unit"]) for ratio in found if ratio is not None and ratio["low"] is None]
        if few:
            unit, end = ("conversation", "s") if header.batch_size == 1 else ("full batch", "es")
            units = f"{max(few)} {unit}{end if max(few) > 1 else ''}"
            text = f"[-]: a 95 % interval takes {prompts_needed(header)}, {units} gave none"
            groups.setdefault(text, []).append(point.label)
    return [f"{text}: {listed(labels)}." for text, labels in groups.items()]


def unused(found: Gathered) -> Table:
    """Return what was found and not used."""
    rows = [(text_of(entry.folder), entry.reason) for entry in found.unused]
    return Table("Folders that gave no figures, and why", ("folder", "why"), rows, num_text_columns=2)


def left_out(points: Sequence[Point]) -> Table:
    """Return the rows of the prompt sets that were not run."""
    rows = [
        (row.name, row.category, row.reason, _NONE if row.num_tokens is None else str(row.num_tokens))
        for point in points
        for row in point.records.header.left_out
    ]
    columns = ("prompt", "category", "why", "tokens")
    return Table("Prompts that were not run", columns, list(dict.fromkeys(rows)), num_text_columns=3)


def settings(points: Sequence[Point]) -> Table:
    """Return what was measured in each point."""
    return Table(
        caption="The points",
        columns=(
            *("point", "target", "dtype", "set", "prompt set", "state"),
            *("batch size", "conversations", "prompts", "most tokens", "temperature", "repeats"),
        ),
        rows=[
            (
                *(point.label, h.target, h.dtype),
                "; ".join(f"{key}={value}" for key, value in h.overrides.items()) or _NONE,
                f"{own.settings}; digest {own.digest or 'not known'}",
                "finished" if point.is_finished else f"NOT FINISHED, {len(point.records.samples)} samples",
                *(str(number) for number in (h.batch_size, own.num_conversations, own.num_prompts, h.max_new_tokens)),
                *(f"{h.temperature:g}", str(h.repeats)),
            )
            for point in points
            for h, own in [(point.records.header, point.prompts)]
        ],
        num_text_columns=6,
    )


def origins(points: Sequence[Point]) -> Table:
    """Return where, when and with what the points were measured: a row for each session, equal ones once."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for point in points:
        for session in (point.provenance, *point.provenance["resumed"]):
            groups.setdefault(_origin(session), []).append(point.label)
    rows = [("; ".join(dict.fromkeys(names)), *cells) for cells, names in groups.items()]
    columns = ("points", "command", "when", "git SHA", "machine", "threads", "versions")
    return Table("Where the figures come from", columns, rows, num_text_columns=7)


def _origin(session: dict[str, Any]) -> tuple[str, ...]:
    sha, dirty = session.get("git_sha"), session.get("git_dirty")
    state = " with uncommitted changes" if dirty else "" if dirty is False else " (changes not known)"
    return (
        shlex.join(session["argv"]) or "not known",
        str(session.get("time") or "not known"),
        f"{str(sha)[:12]}{state}" if sha else "not known",
        ", ".join(str(session[name]) for name in ("cpu", "gpu") if session.get(name)) or "not known",
        str(session.get("num_threads") or "not known"),
        ", ".join(f"{name} {version}" for name, version in session["versions"].items()) or "not known",
    )


def data(columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str) -> Table:
    """Return a figure's numbers as a table."""
    texts = {column for column in range(len(columns)) if any(isinstance(row[column], str) for row in rows)}
    num_texts = next((column for column in range(len(columns)) if column not in texts), len(columns))
    return Table(caption, columns, [[_plain(value) for value in row] for row in rows], num_texts)


def _plain(value: Any) -> str:
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

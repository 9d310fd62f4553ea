"""What a losslessness report says: its tables, its page and the one line that is the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.eval.entry import markdown_table

console = Console()
Rows = list[list[str]]
_NAMES_SHOWN = 5  # of prompts that were left out
P_VALUES = {name: f"{name}_p_value" for name in ("paths", "tokens", "ranks", "likelihood")}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out, as a word, its grounds and an exit code."""

    word: str  # "lossless", "NOT lossless" or "not shown"
    grounds: str

    @property
    def code(self) -> int:
        return 0 if self.word == "lossless" else 1

    def __str__(self) -> str:
        return f"verdict: {self.word} ({self.grounds})"


def limit_of(sampling: dict[str, Any]) -> float:
    """Return the p-value below which one test fails: the level divided by the number of tests (Bonferroni)."""
    limit: float = sampling["level"] / max(len(P_VALUES) * len(sampling["tests"]), 1)
    return limit


def tells(row: dict[str, Any]) -> bool:
    """Tell whether drafts were both accepted and refused in a row's samples: else they say little of drafting."""
    return row["num_accepted_tokens"] > 0 and row["num_refused_tokens"] > 0


def passes(row: dict[str, Any], limit: float) -> bool:
    """Tell whether a row's rule claims to be lossless and none of its tests speaks against it."""
    return row["claims_lossless"] and row["smallest_p_value"] >= limit


def verdict(result: dict[str, Any]) -> Verdict:
    """Return the verdict of what `measure` returned."""
    checks, sampling = result["checks"], result["sampling"]
    rows = [] if sampling is None else sampling["tests"]
    lossy = dict.fromkeys(rule for check in checks for rule in check["lossy_rules"])
    lossy |= dict.fromkeys(row["verifier"] for row in rows if not row["claims_lossless"])
    idle = idle_drafters(result)
    good = all(check["lossless"] for check in checks) and not lossy
    grounds = list(_greedy_grounds(checks))
    is_shown = bool(checks) and not idle
    if sampling is None:
        grounds.append("sampling: not tested")
    elif not rows:
        grounds.append("sampling: nothing to test, no drafter")
    else:
        limit = limit_of(sampling)
        good = good and all(passes(row, limit) for row in rows)
        tell = any(map(tells, rows))
        is_shown = is_shown and tell
        grounds.append(_sampling_grounds(rows, limit, tell))
    if not checks:
        grounds.append("nothing was compared")
    if lossy:
        grounds.append(f"{', '.join(lossy)} is LOSSY by its own word")
    if idle:
        grounds.append(f"nothing was drafted by {', '.join(idle)}")
    grounds += [f"{name} raised in {count} answers" for name, count in _drafter_errors(result).items()]
    return Verdict(("lossless" if is_shown else "not shown") if good else "NOT lossless", "; ".join(grounds))


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of both kinds."""
    return [*result["checks"], *(result["sampling"] or {"tests": []})["tests"]]


def idle_drafters(result: dict[str, Any]) -> list[str]:
    """Return the drafters that drafted nothing, greedy or sampled: nothing is known of drafting with them.

    `none` is one of them if it is the only one.
    """
    drafted: dict[str, int] = {}
    for row in _rows(result):
        drafted[row["drafter"]] = drafted.get(row["drafter"], 0) + row["num_draft_tokens"]
    return [name for name, count in drafted.items() if count == 0 and (name != "none" or len(drafted) == 1)]


def _drafter_errors(result: dict[str, Any]) -> dict[str, int]:
    """Return in how many answers each drafter raised, of those that did."""
    counts: dict[str, int] = {}
    for row in _rows(result):
        if row["num_drafter_errors"]:
            counts[row["drafter"]] = counts.get(row["drafter"], 0) + row["num_drafter_errors"]
    return counts


def _greedy_grounds(checks: list[dict[str, Any]]) -> Iterator[str]:
    for dtype in dict.fromkeys(check["dtype"] for check in checks):
        own = [check for check in checks if check["dtype"] == dtype]
        parted = [d for check in own for d in check["divergences"]]
        num_ties = sum(d["is_near_tie"] for d in parted)
        text = f"greedy {dtype}: {sum(c['identical'] for c in own)}/{sum(c['num_prompts'] for c in own)} identical"
        if num_ties:
            text += f", {num_ties} part at a near-tie"
        if len(parted) > num_ties:
            text += f", {len(parted) - num_ties} DIFFERENT"
        if any(not u["at_limit"] for check in own for u in check["unequal_lengths"]):
            text += ", answers of other lengths"
        elif len(parted) == num_ties and not all(check["lossless"] for check in own):
            text += ", TOO MANY"
        yield text


def _sampling_grounds(rows: list[dict[str, Any]], limit: float, is_shown: bool) -> str:
    worst = min(rows, key=lambda row: row["smallest_p_value"])
    text = f"sampling: {len(P_VALUES) * len(rows)} tests, smallest p {worst['smallest_p_value']:.2g}"
    if worst["smallest_p_value"] < limit:
        text += f" of {worst['drafter']} with {worst['verifier']}, below {limit:.2g}"
    if not is_shown:
        text += ", but no drafter had drafts both accepted and refused: raise sampling.tokens or sampling.samples"
    return text


def greedy_rows(result: dict[str, Any]) -> Rows:
    """Return the table of greedy answers, head first."""
    rows = [["dtype", "drafter", "batch", "identical", "prompt@token: both top-2 gaps", "verdict"]]
    for check in result["checks"]:
        notes = [
            f"{d['prompt']}@{d['position']}: {d['gap']:.1e}, {d['engine_gap']:.1e}"
            + ("" if d["is_near_tie"] else " DIFFERENT")
            for d in check["divergences"]
        ]
        for u in check["unequal_lengths"]:
            why = "the context limit" if u["at_limit"] else "NO context limit"
            notes.append(f"{u['prompt']}: {u['got']} of {u['expected']} tokens, {why}")
        if check["num_draft_tokens"] == 0 and check["drafter"] != "none":
            notes.append("nothing drafted")
        if check["num_drafter_errors"]:
            notes.append(f"the drafter raised in {check['num_drafter_errors']} answers")
        same = f"{check['identical']}/{check['num_prompts']}"
        word = "DIFFERENT" if not check["lossless"] else "LOSSY" if check["lossy_rules"] else "lossless"
        rows.append([check["dtype"], check["drafter"], str(check["batch_size"]), same, "\n".join(notes) or "-", word])
    return rows


def sampling_rows(sampling: dict[str, Any]) -> Rows:
    """Return the table of the sampling tests, head first."""
    limit = limit_of(sampling)
    rows = [["drafter", "verifier", "drafts", "paths", "tokens", "ranks", "log p", "excess", "verdict"]]
    for row in sampling["tests"]:
        lossy = "" if row["claims_lossless"] else "\n(LOSSY)"
        word = ("passes" if tells(row) else "tells\nlittle") if row["smallest_p_value"] >= limit else "FAILS"
        failed = f"\nraised in {row['num_drafter_errors']}" if row["num_drafter_errors"] else ""
        rows.append(
            [
                row["drafter"] + failed,
                f"{row['verifier']}{lossy}",
                f"{row['num_accepted_tokens']}/{row['num_refused_tokens']}",
                *(_p_value(row[name]) for name in P_VALUES.values()),
                "-inf" if row["excess_log_prob"] is None else f"{row['excess_log_prob']:+.3f}",
                word,
            ]
        )
    return rows


def _p_value(value: float) -> str:
    return "0" if value == 0 else f"{value:.1g}" if math.log10(value) > -300 else "<1e-300"


def _titles(result: dict[str, Any]) -> Iterator[tuple[str, Rows]]:
    yield "greedy, against transformers generate()", greedy_rows(result)
    sampling = result["sampling"]
    if sampling is not None and sampling["tests"]:
        yield (
            f"sampled in {sampling['dtype']}, temperature {sampling['temperature']}, {sampling['num_samples']} answers "
            f"of {sampling['num_tokens']} tokens to each of {sampling['num_prompts']} prompts; drafts taken/refused; "
            f"p-values, a rule fails below {limit_of(sampling):.2g}; excess log p, nats per token",
            sampling_rows(sampling),
        )


def _left_out(result: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each drafter and prompt that was left out."""
    for left in result["left_out"]:
        yield f"left out in {left['dtype']}: {left['drafter']}, {left['reason']}"
    prompts = result["left_out_prompts"]
    if prompts:
        names = ", ".join(row["name"] for row in prompts[:_NAMES_SHOWN]) + ", ..." * (len(prompts) > _NAMES_SHOWN)
        yield f"left out: {len(prompts)} prompts ({names}), the first because of {prompts[0]['reason']}"


def show(result: dict[str, Any]) -> bool:
    """Print the tables and the verdict; return whether everything is lossless."""
    for title, (head, *rows) in _titles(result):
        table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        for column in head:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))  # names may hold what Rich takes for markup
        console.print(table)
    for line in _left_out(result):
        console.print(Text(line), soft_wrap=True)
    found = verdict(result)
    console.print(Text(str(found)), soft_wrap=True)
    return found.code == 0


def page(result: dict[str, Any]) -> str:
    """Return the report as a Markdown page."""
    config, made = result["config"], result["provenance"]
    parts = [f"# Losslessness of drafting with {config['target']['name']}", f"**{verdict(result)}**"]
    for title, rows in _titles(result):
        cells = [[cell.replace("\n", "<br>") for cell in row] for row in rows]
        parts.append(f"{title[0].upper()}{title[1:]}:\n\n{markdown_table(cells)}".rstrip())
    parts += [f"{line[0].upper()}{line[1:]}" for line in _left_out(result)]
    changes = " with changes" if made["git_dirty"] else ""
    code = f"{made['git_sha']}{changes}" if made["git_sha"] else "code that is not known"
    parts.append(f"Made {made['time']} at {code}; the JSON file beside this page holds the rest.")
    return "\n\n".join(parts) + "\n"

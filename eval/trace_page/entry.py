"""One request's part of a traced step, checked: a page is made of lines that anyone may have written or cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.eval.trace_page.visible import LARGEST_INT

_WALKING = frozenset({"match", "rejection", "synthetic"})  # rules that go down from the root, node by node
_WALKING_GREEDY = _WALKING | {"traversal", "typical", "relaxed"}  # all of ours then follow the argmax


@dataclass(frozen=True, slots=True)
class Entry:
    """What a step did for one request. Draft token i is node i + 1 of the tree; node 0 is the root."""

    step: int
    phase: str
    num_rows: int
    num_step_rows: int  # rows of all requests of the step
    num_requests: int  # of the step
    times: tuple[float, float, float]  # draft_s, verify_s, total_s
    root_position: int | None  # None: the step ran a part of the prompt and chose no token
    root: int | None
    drafted: list[int]
    parents: list[int]
    draft_probs: list[float | None]
    target_probs: list[float | None]
    accepted: list[int]
    emitted: list[int]
    emitted_probs: list[float | None]
    tops: list[int]
    gaps: list[float | None]
    emitted_at_s: float | None
    finish_reason: str | None

    @property
    def is_truncated(self) -> bool:
        """Whether a stop or a limit cut the token that the target would have put."""
        return bool(self.emitted) and len(self.emitted) == len(self.accepted)

    @property
    def depth(self) -> int:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)

    def states(self, rule: str, greedy: bool) -> str:
        """Return one letter per draft token: a accepted, r rejected, n not judged, t not taken.

        A rule that walks judges the children of the nodes it comes to; `rejection` and `synthetic` look at no sibling
        behind the accepted one. Of a rule that judges whole paths a trace does not say which nodes it looked at.
        """
        if rule not in (_WALKING_GREEDY if greedy else _WALKING):
            return "".join("a" if node in self.accepted else "t" for node in range(1, len(self.drafted) + 1))
        walked = {0, *self.accepted}
        last = self.accepted[-1] if self.accepted else 0
        in_order = rule == "synthetic" or (rule == "rejection" and not greedy)
        taken: set[int] = set()  # nodes whose accepted child has been met
        found = []
        for node, parent in enumerate(self.parents, 1):
            if node in self.accepted:
                taken.add(parent)
                found.append("a")
            elif parent not in walked or (parent == last and self.is_truncated) or (in_order and parent in taken):
                found.append("n")
            else:
                found.append("r")
        return "".join(found)


def read_entry(step: dict[str, Any], entry: dict[str, Any]) -> Entry | None:
    """Return what `entry` of a step says, None if fields are missing or contradict each other."""
    drafted, parents = _ints(entry.get("draft_token_ids", [])), _ints(entry.get("draft_parents", []))
    accepted, emitted = _ints(entry.get("accepted", [])), _ints(entry.get("emitted", []))
    number, rows = _int(step.get("step")), _int(entry.get("num_rows"))
    times = [number_of(step.get(name)) for name in ("draft_s", "verify_s", "total_s")]
    if drafted is None or parents is None or accepted is None or emitted is None or number is None or rows is None:
        return None
    if None in times or not _is_tree(parents, drafted) or not _is_path(accepted, parents):
        return None
    position = _int(entry.get("root_position"))
    has_answer = bool(emitted) and position is not None
    if has_answer != ("emitted" in entry) or (has_answer and len(emitted) - len(accepted) not in (0, 1)):
        return None
    reason = entry.get("finish_reason")
    return Entry(
        number,
        "prefill" if entry.get("phase") == "prefill" else "decode",
        rows,
        sum(_rows(other) for other in step["requests"]),
        len(step["requests"]),
        (times[0] or 0.0, times[1] or 0.0, times[2] or 0.0),
        position,
        _int(entry.get("root_token_id")),
        drafted,
        parents,
        _numbers(entry.get("draft_probs"), len(drafted)),
        _numbers(entry.get("target_probs"), len(drafted)),
        accepted,
        emitted,
        _numbers(entry.get("emitted_probs"), len(emitted)),
        _ints(entry.get("top_token_ids", [])) or [],
        _numbers(entry.get("top_gaps"), len(emitted)),
        number_of(entry.get("emitted_at_s")),
        reason if isinstance(reason, str) else None,
    )


def number_of(value: Any) -> float | None:
    """Return a finite number with six digits, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(f"{value:.6g}") if -1e300 < value < 1e300 and math.isfinite(value) else None


def _is_tree(parents: Sequence[int], drafted: Sequence[int]) -> bool:
    return len(parents) == len(drafted) and all(0 <= parent < node for node, parent in enumerate(parents, 1))


def _is_path(accepted: Sequence[int], parents: Sequence[int]) -> bool:
    above = [0, *accepted[:-1]]
    return all(
        0 < node <= len(parents) and parents[node - 1] == parent for node, parent in zip(accepted, above, strict=False)
    )


def _rows(entry: dict[str, Any]) -> int:
    drafted = entry.get("draft_token_ids")
    return (_int(entry.get("num_rows")) or 0) + (len(drafted) if isinstance(drafted, list) else 0)


def _int(value: Any) -> int | None:
    ok = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INT
    return value if ok else None


def _ints(values: Any) -> list[int] | None:
    if not isinstance(values, list) or any(_int(value) is None for value in values):
        return None
    return values


def _numbers(values: Any, count: int) -> list[float | None]:
    """Return `count` numbers; all None where the trace has none, as those of earlier releases."""
    if not isinstance(values, list) or len(values) != count:
        return [None] * count
    return [number_of(value) for value in values]

"""What happened in a step, for whoever watches an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.acceptance import Verdict
from specdec.interfaces import TokenTree
from specdec.scheduler import Work
from specdec.target_rows import StepRows


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One step that happened. `tree` and `rows` cover the work items that chose a token, in order."""

    number: int  # steps of this engine so far, this one included
    work: Sequence[Work]  # one per request of the step
    verdicts: Sequence[Verdict]  # one per work item
    tree: TokenTree
    rows: StepRows
    draft_s: float
    verify_s: float
    total_s: float


class Trace(Protocol):
    """Gets every step that happened, after its tokens were committed; must not raise."""

    def record(self, event: StepEvent) -> None: ...

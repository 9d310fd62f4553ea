"""What a run saw when it chose each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specdec.acceptance import Verdict
from specdec.interfaces import SamplingParams
from specdec.request import Request
from specdec.trace import StepEvent, Trace


@dataclass(frozen=True, slots=True)
class Choice:
    """One emitted token, and what it was chosen by. Tensors are on the CPU."""

    token_id: int
    step: int  # of its engine
    draft_token_ids: list[int]  # what was drafted in that step; draft token i is node i + 1
    draft_parents: list[int]  # nodes; 0 is the last token before the step
    from_draft: bool  # drafted and accepted, or the target's own
    logits: Tensor  # [V] float32, the target's
    scores: Tensor  # [V] float32, after processors, temperature and filters; NaN if nobody asked for them


@dataclass(slots=True)
class Watched:
    """One prompt's run. `choices` has those positions of the new tokens that were to be kept."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    choices: dict[int, Choice] = field(default_factory=dict)


class Watch:
    """A trace that keeps every choice of a run, or the first one that another run made differently.

    Args:
        others: traces that go on getting the same steps.
        expected: another run of the same prompts; None keeps all choices, 4 bytes per token and vocabulary entry.
    """

    def __init__(self, others: Sequence[Trace], expected: Sequence[Watched] | None = None) -> None:
        self.others = others
        self._unmatched = None if expected is None else list(expected)
        self._expected: dict[int, Watched] = {}  # by request
        self.runs: dict[int, Watched] = {}  # by request, in the order of the prompts

    def record(self, event: StepEvent) -> None:
        for other in self.others:
            other.record(event)
        row = 0
        for w, verdict in zip(event.work, event.verdicts, strict=True):
            run = self._run(w.request)
            if w.samples:
                self._take(event, row, w.request.request_id, verdict)
                row += 1
            run.finish_reason = w.request.finish_reason

    def _run(self, request: Request) -> Watched:
        key = request.request_id
        if key not in self.runs:
            prompt = request.tokens[: request.num_prompt_tokens]
            self.runs[key] = Watched(prompt, request.sampling, request.seed)
            if self._unmatched is not None:
                same = next(w for w in self._unmatched if w.prompt_token_ids == prompt)
                self._unmatched.remove(same)
                self._expected[key] = same
        return self.runs[key]

    def _take(self, event: StepEvent, row: int, request_id: int, verdict: Verdict) -> None:
        """Append the emitted tokens of request `row` of the step's trees."""
        run, expected = self.runs[request_id], self._expected.get(request_id)
        size = verdict.drafted + 1
        nodes = [0, *([] if verdict.path is None else verdict.path.tolist())]
        for i, token in enumerate(verdict.tokens):
            position = len(run.new_tokens)
            run.new_tokens.append(token)
            if expected is not None and (run.choices or expected.new_tokens[position : position + 1] == [token]):
                continue
            run.choices[position] = Choice(
                token,
                event.number,
                event.tree.token_ids[row, 1:size].tolist(),
                event.tree.parents[row, 1:size].tolist(),
                i < verdict.num_accepted,
                event.rows.logits(row, nodes[i : i + 1])[0].cpu(),
                event.rows.judged_scores(row, nodes[i : i + 1])[0].cpu(),
            )

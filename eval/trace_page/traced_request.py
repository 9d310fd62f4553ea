"""One request of a traced run: its steps, its counters, and the rule it was verified by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.debug.read_trace import TracedRun
from specdec.eval.trace_page.entry import Entry, read_entry
from specdec.registry import VERIFIERS
from specdec.stats import RequestStats, StepClock

_FIGURES = (
    *("num_prompt_tokens", "num_steps", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"),
    *("acceptance_rate", "acceptance_length", "ttft_s", "tpot_s", "decode_tokens_per_s"),
    *("prefill_s", "draft_s", "verify_s", "other_s"),
)


@dataclass(slots=True)
class TracedRequest:
    """A request as its run's steps tell of it; `num_unreadable` entries were left out."""

    request_id: int
    header: dict[str, Any]
    entries: list[Entry] = field(default_factory=list)
    sampling: dict[str, Any] | None = None
    num_prompt_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    num_unreadable: int = 0

    @property
    def greedy(self) -> bool:
        return self.sampling is not None and self.sampling.get("temperature") == 0

    @property
    def rules(self) -> list[str]:
        """Return the names of the acceptance rules it may have had; several only for traces of earlier releases."""
        verifiers = self.header.get("verifiers")
        names = verifiers if isinstance(verifiers, dict) else {}
        return list(dict.fromkeys(str(names[when]) for when in self._cases() if when in names))

    @property
    def lossless(self) -> bool | None:
        """Whether its rule keeps the target's distribution; None if that is not known."""
        said = self.header.get("lossless")
        if isinstance(said, dict):
            return all(bool(said.get(when)) for when in self._cases())
        if not self.rules or not set(self.rules) <= set(VERIFIERS.table):
            return None  # and nothing is imported by a name that a file gives
        return all(VERIFIERS.load(name).lossless for name in self.rules)

    def states(self, entry: Entry) -> str:
        """Return what became of each draft token of an entry, see `Entry.states`."""
        return entry.states(self.rules[-1] if self.rules else "", self.greedy)

    @property
    def stats(self) -> RequestStats:
        """Return its counters, by the definitions that the engine's own have."""
        stats = RequestStats(num_prompt_tokens=self.num_prompt_tokens or 0)
        for e in self.entries:
            clock = StepClock(0.0, e.times[0], e.times[1], e.times[2])
            if e.emitted_at_s is not None:
                stats.emissions.append((e.emitted_at_s, len(e.emitted)))
            if e.phase == "prefill":
                stats.record_prefill(clock, e.num_rows, e.num_step_rows or 1)
            elif e.emitted:
                stats.record_times(clock)
                stats.record_decode(
                    drafted=len(e.drafted), depth=e.depth, accepted=len(e.accepted), emitted=len(e.emitted)
                )
        return stats

    @property
    def figures(self) -> dict[str, float | int | None]:
        """Return what is shown of its counters, under the names of docs/design.md."""
        stats = self.stats
        return {name: getattr(stats, name) for name in _FIGURES}

    def gaps(self) -> list[int]:
        """Return how many tokens of the answer are missing before each entry: lines were lost."""
        expected = None if self.num_prompt_tokens is None else self.num_prompt_tokens - 1
        found = []
        for e in self.entries:
            found.append(0 if e.root_position is None or expected is None else max(0, e.root_position - expected))
            if e.root_position is not None:
                expected = e.root_position + len(e.emitted)
        return found

    def _cases(self) -> list[str]:
        if self.sampling is None:
            return ["greedy", "seeded", "sampled"]
        if self.greedy:
            return ["greedy"]
        if self.sampling.get("seed_given"):
            return ["seeded"]
        if not any(prob is not None for e in self.entries for prob in e.draft_probs):
            return ["seeded"]
        return ["sampled"] if "seed_given" in self.sampling else ["seeded", "sampled"]


def requests_of(run: TracedRun) -> list[TracedRequest]:
    """Return the requests of a run, by id."""
    found: dict[int, TracedRequest] = {}
    for step in run.steps:
        for said in step["requests"]:
            request = found.setdefault(said["request_id"], TracedRequest(said["request_id"], run.header))
            _hear(request, said)
            entry = read_entry(step, said)
            if entry is None:
                request.num_unreadable += 1
            else:
                request.entries.append(entry)
    return [found[key] for key in sorted(found)]


def _hear(request: TracedRequest, said: dict[str, Any]) -> None:
    """Take what is said of a request once."""
    sampling, prompt, text = (said.get(name) for name in ("sampling", "prompt_token_ids", "prompt_text"))
    if isinstance(sampling, dict):
        request.sampling = sampling
    if isinstance(said.get("num_prompt_tokens"), int):
        request.num_prompt_tokens = said["num_prompt_tokens"]
    if isinstance(prompt, list):
        request.prompt_token_ids = [token for token in prompt if isinstance(token, int)]
    if isinstance(text, str):
        request.prompt_text = text

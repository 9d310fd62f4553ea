"""From records to figures: what every table, report and test of a point shows. Definitions: docs/design.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from specdec.debug.near_tie import first_difference
from specdec.eval.order_effects import order_effects
from specdec.eval.ratios import micro_interval, speedup
from specdec.eval.records import BASELINE, CONTROL, Header, Records, RequestRecord, Sample
from specdec.serving.metrics import percentiles
from specdec.stats import RequestStats, total

_CONTROL_LEVEL = 0.99
_LEVEL = 0.95
_FAULTS = {
    "num_drafter_errors": "its drafter FAILED in {} answers, which went on without drafts",
    "num_missed_drafts": "its drafter had no KV MEMORY in {} steps, which went on without drafts",
    "num_rejected_drafts": "its drafter's proposals were INVALID in {} steps, which went on without drafts",
}  # of a variant's figures

TimeOf = Callable[[Sample], float]


def summarise(records: Records) -> dict[str, Any]:
    """Return the figures of a point, finished or not, as JSON holds them; see docs/records.md."""
    header = records.header
    by_variant = {info.name: records.of(info.name) for info in header.variants}
    by_variant = {name: samples for name, samples in by_variant.items() if samples}
    engines = {info.name for info in header.variants if info.kind == "engine"}
    figures = _Figures(header, by_variant)
    summary: dict[str, Any] = {
        "is_complete": records.end is not None,
        "variants": {
            info.name: _variant(header, by_variant[info.name])
            | {"kind": info.kind, "lossless": info.lossless, "drafter": info.drafter, "verifier": info.verifier}
            for info in header.variants
            if info.name in by_variant
        },
        "speedups": [figures.speedup(name) for name in by_variant if name != BASELINE and BASELINE in by_variant],
        "over_peers": [
            figures.over(name, info.name)
            for info in header.variants
            if info.kind == "peer" and info.name in by_variant
            for name in by_variant
            if name in engines and name != CONTROL
        ],
        "control": figures.control(),
        "identity": {name: _identity(by_variant.get(BASELINE, []), samples) for name, samples in by_variant.items()},
        "categories": figures.categories(),
        "order": _order(by_variant),
        "dropped": [asdict(dropped) for dropped in records.dropped],
    }
    if records.end is not None:
        end = records.end
        summary |= {"wall_s": end.wall_s, "outside_s": end.outside_s, "setup_s": end.setup_s}
    return summary


def _variant(header: Header, samples: Sequence[Sample]) -> dict[str, Any]:
    requests = [request for sample in samples for request in sample.requests]
    decoded, decode_s = sum(s.num_decode_tokens for s in samples), sum(s.decode_s for s in samples)
    gaps = [gap for request in requests for gap in request.itl_s]
    summary: dict[str, Any] = {
        "num_samples": len(samples),
        "num_answers": len(requests),
        "num_loops": sum(r.cut is not None for r in requests),
        "num_tokens": sum(s.num_tokens for s in samples),
        **{name: sum(getattr(r, name) for r in requests) for name in _FAULTS},
        "decode_tokens_per_s": decoded / decode_s if decode_s else None,
        "tokens_per_s_e2e": sum(s.num_tokens for s in samples) / sum(s.total_s for s in samples),
        "ttft_s": percentiles(r.ttft_s for r in requests),
        "itl_s": percentiles(gaps),
        "tokens_per_emission": sum(len(r.token_ids) - r.emissions[0][1] for r in requests) / len(gaps)
        if gaps
        else None,
    }
    return summary | acceptance(header, requests)


def drafter_faults(figures: dict[str, Any]) -> list[str]:
    """Return what kept a variant's drafter from drafting, in words; its figures are then not what it can do."""
    return [text.format(figures[name]) for name, text in _FAULTS.items() if figures.get(name)]


def acceptance(header: Header, requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return acceptance and time split of answers, and acceptance up to where each repeats itself, and of the others.

    `cut` counts answers up to their repetition and has a 95 % interval of the acceptance length, by resampling
    conversations: what repeats and turns of one have in common is no news. `no_loops` counts only answers that never
    repeat. Of peers, whose steps are unknown, there is nothing.
    """
    known = [request for request in requests if request.steps is not None]
    whole = total(request.stats() for request in known)
    cut = [request.stats(request.cut) for request in known]
    by_talk: dict[str, list[RequestStats]] = {}
    for request, stats in zip(known, cut, strict=True):
        by_talk.setdefault(header.cases[request.case].name, []).append(stats)
    sums = [total(parts) for parts in by_talk.values()]
    interval = micro_interval([(float(s.num_emitted_tokens), float(s.num_steps)) for s in sums if s.num_steps])
    steps = [step for request in known for step in request.steps or []]
    return _rates(whole) | {
        "tree": any(drafted != depth for drafted, depth, *_ in steps),
        "prefill_s": whole.prefill_s,
        "draft_s": whole.draft_s,
        "verify_s": whole.verify_s,
        "other_s": whole.other_s,
        "cut": _rates(total(cut)) | {"acceptance_length_interval": interval and list(interval)},
        "no_loops": _rates(total(request.stats() for request in known if request.cut is None)),
    }


def _rates(stats: RequestStats) -> dict[str, Any]:
    return {
        "num_steps": stats.num_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_emitted_tokens": stats.num_emitted_tokens,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_at_unconditional": stats.acceptance_at_unconditional,
        "acceptance_at_conditional": stats.acceptance_at_conditional,
    }


def _decode_s(sample: Sample) -> float:
    """Return seconds per token of decoding; 0 where nothing was decoded."""
    return sample.decode_s / sample.num_decode_tokens if sample.num_decode_tokens else 0.0


def _total_s(sample: Sample) -> float:
    return sample.total_s / sample.num_tokens


class _Figures:
    """Ratios of a point's variants.

    A unit, over which medians and intervals are taken, is a conversation, or a batch of several prompts; of these only
    the full ones count. A conversation's ratio is the median over its turns of each one's median over repeats.
    """

    def __init__(self, header: Header, by_variant: dict[str, list[Sample]]) -> None:
        self._header, self._by_variant = header, by_variant
        names = list(dict.fromkeys(case.name for case in header.cases))
        self._talks = {name: i for i, name in enumerate(names)}
        self._full = max((len(s.requests) for samples in by_variant.values() for s in samples), default=0)

    def _unit(self, sample: Sample) -> int:
        if self._full > 1:
            return sample.batch
        return self._talks[self._header.cases[sample.requests[0].case].name]

    def _ratio(
        self,
        baseline: Iterable[Sample],
        variant: Iterable[Sample],
        time_of: TimeOf,
        level: float = _LEVEL,
        *,
        same_length: bool = False,
    ) -> dict[str, Any] | None:
        """Return the ratio of two variants' times over the full batches that both have run; None if there are none."""
        theirs = {(s.batch, s.repeat): s for s in baseline}
        pairs = []
        for sample in variant:
            other = theirs.get((sample.batch, sample.repeat))
            if other is None or len(sample.requests) < self._full:
                continue
            if same_length and [len(r.token_ids) for r in other.requests] != [
                len(r.token_ids) for r in sample.requests
            ]:
                continue
            a, b = time_of(other), time_of(sample)
            if a > 0 and b > 0:
                pairs.append((self._unit(sample), sample.batch, a, b))
        found = speedup(pairs, level)
        return None if found is None else asdict(found)

    def over(self, name: str, baseline: str) -> dict[str, Any]:
        """Return how many times faster a variant is. End to end only where both gave as many tokens.

        Time per token is fair to decode with answers of different lengths; with prefill in it, it is not.
        """
        theirs, samples = self._by_variant[baseline], self._by_variant[name]
        return {
            "variant": name,
            "over": baseline,
            "decode": self._ratio(theirs, samples, _decode_s),
            "e2e": self._ratio(theirs, samples, _total_s, same_length=True),
        }

    def speedup(self, name: str) -> dict[str, Any]:
        """Return how many times faster a variant is than the undrafted engine, also without answers that loop."""
        baseline = self._by_variant[BASELINE]
        looping = {s.batch for s in baseline if any(r.cut is not None for r in s.requests)}
        calm = [sample for sample in self._by_variant[name] if sample.batch not in looping]
        return self.over(name, BASELINE) | {"decode_no_loops": self._ratio(baseline, calm, _decode_s)}

    def control(self) -> dict[str, Any] | None:
        """Return the same engine's ratio to itself: whether 1.0 is in its 99 % interval, None if there are too few."""
        if CONTROL not in self._by_variant or BASELINE not in self._by_variant:
            return None
        pair = self._by_variant[BASELINE], self._by_variant[CONTROL]
        found = self._ratio(*pair, _decode_s, _CONTROL_LEVEL)
        if found is None:
            return None
        return found | {"holds": None if found["low"] is None else found["low"] <= 1.0 <= found["high"]}

    def categories(self) -> dict[str, dict[str, Any]]:
        """Return, by category and variant, acceptance and speed; the latter where no batch mixes categories."""
        found: dict[str, dict[str, Any]] = {}
        for category in dict.fromkeys(case.category for case in self._header.cases):
            own = {name: self._only(samples, category) for name, samples in self._by_variant.items()}
            found[category] = {name: self._part(own, name) for name, (requests, _) in own.items() if requests}
        return found

    def _only(self, samples: Sequence[Sample], category: str) -> tuple[list[RequestRecord], list[Sample]]:
        cases = self._header.cases
        requests = [r for s in samples for r in s.requests if cases[r.case].category == category]
        pure = [s for s in samples if all(cases[r.case].category == category for r in s.requests)]
        return requests, pure

    def _part(self, own: dict[str, tuple[list[RequestRecord], list[Sample]]], name: str) -> dict[str, Any]:
        requests, pure = own[name]
        decode_s = sum(s.decode_s for s in pure)
        counted = acceptance(self._header, requests)
        return {
            "num_answers": len(requests),
            "num_loops": sum(r.cut is not None for r in requests),
            **{key: counted[key] for key in ("acceptance_length", "acceptance_rate", "tree", "cut", "no_loops")},
            "decode_tokens_per_s": sum(s.num_decode_tokens for s in pure) / decode_s if decode_s else None,
            "speedup": self._ratio(own[BASELINE][1], pure, _decode_s) if BASELINE in own else None,
        }


def _identity(baseline: Sequence[Sample], samples: Sequence[Sample]) -> dict[str, Any]:
    """Return how many answers have the baseline's ids, and where the others part."""
    expected = {(s.repeat, r.case): r.token_ids for s in baseline for r in s.requests}
    parted, num_compared = [], 0
    for sample in samples:
        for request in sample.requests:
            ids = expected.get((sample.repeat, request.case))
            if ids is None:
                continue
            num_compared += 1
            if ids != request.token_ids:
                at = first_difference(ids, request.token_ids)
                shorter = min(len(ids), len(request.token_ids))
                parted.append(
                    {"case": request.case, "repeat": sample.repeat, "position": shorter if at is None else at}
                )
    return {"equal": num_compared - len(parted), "of": num_compared, "parted": parted}


def _order(by_variant: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    timed = [(s, _decode_s(s)) for samples in by_variant.values() for s in samples]
    timed = [(s, seconds) for s, seconds in timed if seconds > 0]
    return order_effects(
        [s.variant for s, _ in timed],
        [s.batch for s, _ in timed],
        [s.place for s, _ in timed],
        [s.start_s for s, _ in timed],
        [seconds for _, seconds in timed],
    )

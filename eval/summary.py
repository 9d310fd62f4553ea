"""From records to figures: what every table, report and test of a point shows. Definitions: docs/design.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from specdec.eval.ratios import micro_interval, speedup
from specdec.eval.records import BASELINE, CONTROL, Header, Records, RequestRecord, Sample
from specdec.serving.metrics import percentiles
from specdec.stats import RequestStats, total

_CONTROL_LEVEL = 0.99
_LEVEL = 0.95

TimeOf = Callable[[Sample], float]


def summarise(records: Records) -> dict[str, Any]:
    """Return the figures of a point, finished or not, as JSON holds them; see docs/records.md."""
    header = records.header
    by_variant = {info.name: records.of(info.name) for info in header.variants}
    by_variant = {name: samples for name, samples in by_variant.items() if samples}
    engines = {info.name for info in header.variants if info.kind == "engine"}
    summary: dict[str, Any] = {
        "is_complete": records.end is not None,
        "variants": {
            info.name: _variant(by_variant[info.name])
            | {"kind": info.kind, "lossless": info.lossless, "drafter": info.drafter, "verifier": info.verifier}
            for info in header.variants
            if info.name in by_variant
        },
        "speedups": [_speedup(name, by_variant) for name in by_variant if name != BASELINE and BASELINE in by_variant],
        "over_peers": [
            _over(name, info.name, by_variant)
            for info in header.variants
            if info.kind == "peer" and info.name in by_variant
            for name in by_variant
            if name in engines and name != CONTROL
        ],
        "control": _control(by_variant),
        "identity": {name: _identity(by_variant.get(BASELINE, []), samples) for name, samples in by_variant.items()},
        "categories": _categories(header, by_variant),
        "order": _order(by_variant),
    }
    if records.end is not None:
        summary["wall_s"], summary["outside_s"] = records.end.wall_s, records.end.outside_s
    return summary


def _variant(samples: Sequence[Sample]) -> dict[str, Any]:
    requests = [request for sample in samples for request in sample.requests]
    decoded, decode_s = sum(s.num_decode_tokens for s in samples), sum(s.decode_s for s in samples)
    gaps = [gap for request in requests for gap in request.itl_s]
    summary: dict[str, Any] = {
        "num_samples": len(samples),
        "num_answers": len(requests),
        "num_loops": sum(r.cut is not None for r in requests),
        "num_tokens": sum(s.num_tokens for s in samples),
        "decode_tokens_per_s": decoded / decode_s if decode_s else None,
        "tokens_per_s_e2e": sum(s.num_tokens for s in samples) / sum(s.total_s for s in samples),
        "ttft_s": percentiles(r.ttft_s for r in requests),
        "itl_s": percentiles(gaps),
        "tokens_per_emission": sum(len(r.token_ids) - r.emissions[0][1] for r in requests) / len(gaps)
        if gaps
        else None,
    }
    return summary | acceptance(requests)


def acceptance(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return acceptance and time split of answers, and acceptance up to where each repeats itself, and of the others.

    `cut` counts answers up to their repetition and has a 95 % interval of the acceptance length, by resampling
    answers; `no_loops` counts only answers that never repeat. Of peers, whose steps are unknown, there is nothing.
    """
    known = [request for request in requests if request.steps is not None]
    whole = total(request.stats() for request in known)
    cut = [request.stats(request.cut) for request in known]
    pairs = [(float(s.num_emitted_tokens), float(s.num_steps)) for s in cut if s.num_steps]
    steps = [step for request in known for step in request.steps or []]
    return _rates(whole) | {
        "tree": any(drafted != depth for drafted, depth, *_ in steps),
        "prefill_s": whole.prefill_s,
        "draft_s": whole.draft_s,
        "verify_s": whole.verify_s,
        "other_s": whole.other_s,
        "cut": _rates(total(cut))
        | {"acceptance_length_interval": list(micro_interval(pairs)) if len(pairs) > 1 else None},
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
    """Return seconds per token while all requests decode."""
    return sample.decode_s / sample.num_decode_tokens if sample.num_decode_tokens else 0.0


def _total_s(sample: Sample) -> float:
    return sample.total_s / sample.num_tokens


def _ratio(
    baseline: Sequence[Sample], variant: Sequence[Sample], time_of: TimeOf, level: float = _LEVEL
) -> dict[str, Any] | None:
    """Return the ratio of two variants' times over the batches that both have run; None if there are none."""
    theirs = {(s.batch, s.repeat): time_of(s) for s in baseline}
    pairs = ((s.batch, theirs.get((s.batch, s.repeat), 0.0), time_of(s)) for s in variant)
    found = speedup((pair for pair in pairs if pair[1] and pair[2]), level)
    return None if found is None else asdict(found)


def _over(name: str, baseline: str, by_variant: dict[str, list[Sample]]) -> dict[str, Any]:
    theirs, samples = by_variant[baseline], by_variant[name]
    return {
        "variant": name,
        "over": baseline,
        "decode": _ratio(theirs, samples, _decode_s),
        "e2e": _ratio(theirs, samples, _total_s),
    }


def _speedup(name: str, by_variant: dict[str, list[Sample]]) -> dict[str, Any]:
    baseline = by_variant[BASELINE]
    looping = {s.batch for s in baseline if any(r.cut is not None for r in s.requests)}
    calm = [sample for sample in by_variant[name] if sample.batch not in looping]
    return _over(name, BASELINE, by_variant) | {"decode_no_loops": _ratio(baseline, calm, _decode_s)}


def _control(by_variant: dict[str, list[Sample]]) -> dict[str, Any] | None:
    """Return the same engine's ratio to itself: whether 1.0 is in its 99 % interval."""
    if CONTROL not in by_variant or BASELINE not in by_variant:
        return None
    found = _ratio(by_variant[BASELINE], by_variant[CONTROL], _decode_s, _CONTROL_LEVEL)
    return None if found is None else found | {"holds": found["low"] <= 1.0 <= found["high"]}


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
                both = zip(ids, request.token_ids, strict=False)
                shorter = min(len(ids), len(request.token_ids))
                at = next((i for i, (a, b) in enumerate(both) if a != b), shorter)
                parted.append({"case": request.case, "repeat": sample.repeat, "position": at})
    return {"equal": num_compared - len(parted), "of": num_compared, "parted": parted}


def _categories(header: Header, by_variant: dict[str, list[Sample]]) -> dict[str, dict[str, Any]]:
    """Return, by category and variant, acceptance and speed; the latter where no batch mixes categories."""
    found: dict[str, dict[str, Any]] = {}
    for category in dict.fromkeys(case.category for case in header.cases):
        own = {name: _only(header, samples, category) for name, samples in by_variant.items()}
        found[category] = {name: _part(own, name) for name, (requests, _) in own.items() if requests}
    return found


def _only(header: Header, samples: Sequence[Sample], category: str) -> tuple[list[RequestRecord], list[Sample]]:
    requests = [r for s in samples for r in s.requests if header.cases[r.case].category == category]
    pure = [s for s in samples if all(header.cases[r.case].category == category for r in s.requests)]
    return requests, pure


def _part(own: dict[str, tuple[list[RequestRecord], list[Sample]]], name: str) -> dict[str, Any]:
    requests, pure = own[name]
    decode_s = sum(s.decode_s for s in pure)
    counted = acceptance(requests)
    return {
        "num_answers": len(requests),
        "num_loops": sum(r.cut is not None for r in requests),
        **{key: counted[key] for key in ("acceptance_length", "acceptance_rate", "tree", "cut", "no_loops")},
        "decode_tokens_per_s": sum(s.num_decode_tokens for s in pure) / decode_s if decode_s else None,
        "speedup": _ratio(own[BASELINE][1], pure, _decode_s) if BASELINE in own else None,
    }


def _order(by_variant: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """Return how a place in the rotation changes times: medians of a run's time over that of all its repeats.

    Likewise the thirds of the whole run, which show drift.
    """
    by_place: dict[int, list[float]] = {}
    by_third: dict[int, list[float]] = {}
    last = max((s.start_s for samples in by_variant.values() for s in samples), default=0.0)
    for samples in by_variant.values():
        usual: dict[int, list[float]] = {}
        for sample in samples:
            usual.setdefault(sample.batch, []).append(_decode_s(sample))
        for sample in samples:
            middle = median(usual[sample.batch])
            if middle and len(usual[sample.batch]) > 1:
                by_place.setdefault(sample.place, []).append(_decode_s(sample) / middle)
                third = min(2, int(3 * sample.start_s / last)) if last else 0
                by_third.setdefault(third, []).append(_decode_s(sample) / middle)
    return [
        {"by": by, "number": number, "relative_time": median(values), "num_samples": len(values)}
        for by, groups in (("place", by_place), ("third", by_third))
        for number, values in sorted(groups.items())
    ]

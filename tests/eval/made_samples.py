"""Records made by hand: every time and count of theirs is known."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.eval.records import Case, End, Header, Records, RequestRecord, Sample, VariantInfo

NONE = VariantInfo("none", "engine", "none", "match", max_draft_tokens=0)
CONTROL = VariantInfo("control", "engine", "none", "match", max_draft_tokens=0)


def header(
    cases: Sequence[Case], variants: Sequence[VariantInfo] = (NONE,), batch_size: int = 1, repeats: int = 1
) -> Header:
    return Header(
        name="made",
        target="t",
        dtype="float32",
        num_parameters=1000,
        kv_bytes_per_token=8,
        batch_size=batch_size,
        max_new_tokens=64,
        temperature=0.0,
        seed=None,
        repeats=repeats,
        variants=list(variants),
        cases=list(cases),
    )


def request(
    case: int, first_s: float, gap_s: float, per_step: Sequence[int], *, prefill_s: float | None = None, token: int = 7
) -> RequestRecord:
    """Return an answer: a token at `first_s`, then so many every `gap_s`, all of them drafts but one per step."""
    emissions = [[first_s, 1.0]] + [[first_s + gap_s * (i + 1), float(n)] for i, n in enumerate(per_step)]
    ids = [token + i for i in range(1 + sum(per_step))]  # no answer repeats itself
    steps = [[n - 1, n - 1, n - 1, n] for n in per_step]
    return RequestRecord(
        case, ids, "length", emissions, steps, first_s if prefill_s is None else prefill_s, 0.0, 0.0, 0.0
    )


def sample(
    variant: str, batch: int, repeat: int, requests: Sequence[RequestRecord], place: int = 0, start_s: float = 0.0
) -> Sample:
    return Sample(variant, batch, repeat, place, start_s, list(requests))


def records(head: Header, samples: Sequence[Sample]) -> Records:
    return Records(head, samples=list(samples), end=End(len(samples), 100.0, 2.0, 5.0))

"""Whether what a line of a records.jsonl says can be: types, ranges, and how its parts fit together."""

from __future__ import annotations

import math
import types
from collections.abc import Collection, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from specdec.eval.records import Dropped, Header, Machine, RequestRecord, Sample

_LARGEST = 2**64  # of any number: a seed's; no time, count or rate comes near it
_LONGEST_S = 1e9  # 30 years
_LEEWAY = 1.001  # of rounded sums
_MOST_DRAFTS = 2**16  # of one step
_TIMES = (
    ("runner_s", 0.0),
    ("transformers_s", 1.0),
)  # of a forward, and in place of an absent one: the first must be there


def check_types(kind: type, entry: dict[str, Any]) -> None:
    """Raise ValueError unless `entry` has fields of the dataclass `kind`, of their types and finite."""
    hints = _hints(kind)
    for name, value in entry.items():
        if name not in hints:
            raise ValueError(f"unknown field {name!r} of {kind.__name__.lower()}")
        if not _fits(value, hints[name]):
            raise ValueError(f"{name} of {kind.__name__.lower()} is {_short(value)}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return any(_fits(value, one) for one in inner)
    if hint is Any:
        return _is_plain(value)
    if origin is list:
        return isinstance(value, list) and all(_fits(part, inner[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(part, inner[1]) for part in value.values())
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and _is_number(value)
    return isinstance(value, hint)


def _is_number(value: float) -> bool:
    return not isinstance(value, bool) and math.isfinite(value) and abs(value) <= _LARGEST


def _is_plain(value: Any) -> bool:
    """Tell whether a value of JSON has only numbers that can be."""
    if isinstance(value, dict | list):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | bool) or _is_number(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _require(is_so: bool, what: str) -> None:
    if not is_so:
        raise ValueError(what)


def _require_least(least: float, **values: float | None) -> None:
    for name, value in values.items():
        _require(value is None or value >= least, f"{name} is {value}, less than {least:g}")


def _is_time(value: float) -> bool:
    return 0 <= value <= _LONGEST_S


def _are_unique(values: Iterable[Any]) -> bool:
    listed = list(values)
    return len(set(listed)) == len(listed)


def check_header(header: Header) -> None:
    """Raise ValueError unless a header describes something that can have been compared."""
    _require(bool(header.variants), "it has no variant")
    _require(_are_unique(info.name for info in header.variants), "two variants have one name")
    for info in header.variants:
        _require(info.kind in ("engine", "peer"), f"the kind of {info.name} is {info.kind!r}")
        _require_least(0, max_draft_tokens=info.max_draft_tokens)
    _require_least(0, kv_bytes_per_token=header.kv_bytes_per_token, temperature=header.temperature)
    _require_least(1, num_parameters=header.num_parameters, batch_size=header.batch_size)
    _require_least(1, max_new_tokens=header.max_new_tokens, repeats=header.repeats)
    for case in header.cases:
        _require_least(0, turn=case.turn, num_prompt_tokens=case.num_prompt_tokens, num_new_tokens=case.num_new_tokens)
    for peer in header.absent:
        _require(peer.keys() >= {"name", "reason"}, "an absent peer has no name or no reason")


def check_machine(machine: Machine) -> None:
    """Raise ValueError unless a machine's figures are positive and name each number of rows once."""
    for row in machine.step_times:
        _require(row.get("rows", 0) > 0, "a step time without rows")
        _require(all(0 < row.get(key, default) <= _LONGEST_S for key, default in _TIMES), "a step time of no length")
    _require(_are_unique(row["rows"] for row in machine.step_times), "two step times of one number of rows")
    rates = machine.read_bandwidth_bytes_per_s, machine.flops_per_s, machine.weight_bytes_per_step
    _require(all(rate is None or rate > 0 for rate in rates), "a bandwidth, FLOP/s or weight that is not above 0")


def check_dropped(header: Header, dropped: Dropped, known: Collection[str]) -> None:
    """Raise ValueError unless it is one of the header's peers that was dropped, and none of those `known`."""
    peers = [info.name for info in header.variants if info.kind == "peer"]
    _require(dropped.variant in peers, f"{dropped.variant!r}, which was dropped, is no peer of the header")
    _require(dropped.variant not in known, f"{dropped.variant} was dropped twice")


def check_sample(header: Header, sample: Sample, known: Collection[tuple[str, int, int]]) -> None:
    """Raise ValueError unless a sample is of the header's variants and cases, whole, and none of those `known`."""
    _require(sample.variant in (info.name for info in header.variants), f"unknown variant {sample.variant!r}")
    _require_least(0, batch=sample.batch, repeat=sample.repeat, place=sample.place)
    _require(_is_time(sample.start_s), f"start_s is {sample.start_s}")
    _require(
        (sample.variant, sample.batch, sample.repeat) not in known,
        f"a second sample of {sample.variant}, batch {sample.batch}, repeat {sample.repeat}",
    )
    _require(bool(sample.requests), "a sample without requests")
    _require(_are_unique(request.case for request in sample.requests), "a case twice in one batch")
    for request in sample.requests:
        _require(0 <= request.case < len(header.cases), f"case {request.case} of {len(header.cases)}")
        check_request(request)
    prefill_s = sum(request.prefill_s or 0.0 for request in sample.requests)
    _require(prefill_s <= _LEEWAY * sample.total_s, f"{prefill_s:g} s of prefill in {sample.total_s:g} s")


def check_request(request: RequestRecord) -> None:
    """Raise ValueError unless an answer's times, counts and steps fit each other."""
    num_tokens = len(request.token_ids)
    _require(all(len(pair) == 2 for pair in request.emissions), "an emission that is no pair")
    times, counts = [pair[0] for pair in request.emissions], [pair[1] for pair in request.emissions]
    _require(bool(times), "an answer without emissions")
    _require(all(map(_is_time, times)) and times == sorted(times), "emissions whose times do not rise from 0")
    _require(all(count >= 1 and count == int(count) for count in counts), "an emission of no whole token")
    _require(sum(counts) == num_tokens, f"{num_tokens} tokens, {sum(counts):g} of them emitted")
    for name in ("prefill_s", "draft_s", "verify_s", "other_s"):
        spent = getattr(request, name)
        _require(spent is None or _is_time(spent), f"{name} is {spent}")
    _require(request.cut is None or 0 <= request.cut <= num_tokens, f"cut is {request.cut} of {num_tokens} tokens")
    _require(all(map(_is_step, request.steps or [])), "a step that is no [drafted, depth, accepted, emitted]")
    _require(sum(step[3] for step in request.steps or []) <= num_tokens, "steps that emit more tokens than there are")


def _is_step(step: list[int]) -> bool:
    if len(step) != 4:
        return False
    drafted, depth, accepted, emitted = step
    return 0 <= accepted <= depth <= drafted <= _MOST_DRAFTS and emitted - accepted in (0, 1)

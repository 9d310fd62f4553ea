"""Every figure of a point from samples whose times and counts were made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.eval.records import Case, RequestRecord, VariantInfo
from specdec.eval.summary import summarise
from tests.eval.made_samples import CONTROL, NONE, header, records, request, sample

FAST = VariantInfo("fast", "engine", "fast", "match", max_draft_tokens=1)
PEER = VariantInfo("peer", "peer")
CASES = [Case(str(i), "even" if i % 2 == 0 else "odd", 0, 10) for i in range(8)]


def made(repeats: int = 1) -> dict[str, object]:
    """Eight prompts, twelve tokens after the first: none takes 1 s each, fast 0.8 s for two, peer 2 s each."""
    samples = []
    for repeat in range(repeats):
        for i in range(8):
            slow = 1.0 + 0.1 * repeat  # a machine that slows down is the same for both
            samples += [
                sample("none", i, repeat, [request(i, 3.0, slow, [1] * 12)]),
                sample("control", i, repeat, [request(i, 3.0, slow * (1.02 if i % 2 else 0.98), [1] * 12)]),
                sample("fast", i, repeat, [request(i, 2.0, 0.8 * slow, [2] * 6)]),
                sample("peer", i, repeat, [replace(request(i, 5.0, 2.0, [1] * 12), steps=None, prefill_s=None)]),
            ]
    return summarise(records(header(CASES, [NONE, CONTROL, FAST, PEER], repeats=repeats), samples))


def test_speeds() -> None:
    found = made()
    none, fast = found["variants"]["none"], found["variants"]["fast"]
    assert none["decode_tokens_per_s"] == pytest.approx(1.0)
    assert fast["decode_tokens_per_s"] == pytest.approx(2 / 0.8)
    assert none["tokens_per_s_e2e"] == pytest.approx(13 / 15)
    assert none["ttft_s"]["p50"] == pytest.approx(3.0)
    assert fast["ttft_s"]["p50"] == pytest.approx(2.0)
    assert fast["itl_s"]["p99"] == pytest.approx(0.8)
    assert (none["tokens_per_emission"], fast["tokens_per_emission"]) == (1.0, 2.0)
    assert (none["num_answers"], none["num_tokens"], none["num_loops"]) == (8, 104, 0)
    assert (fast["acceptance_length"], fast["acceptance_rate"]) == (2.0, 1.0)


@pytest.mark.parametrize("repeats", [1, 3])
def test_speedups(repeats: int) -> None:
    found = made(repeats)
    by_name = {s["variant"]: s for s in found["speedups"]}
    assert set(by_name) == {"control", "fast", "peer"}
    assert by_name["fast"]["decode"]["median"] == pytest.approx(2.5)
    assert by_name["fast"]["decode"]["low"] == pytest.approx(2.5)
    assert by_name["peer"]["decode"]["median"] == pytest.approx(0.5 if repeats == 1 else 1.1 / 2)
    if repeats == 1:
        assert by_name["fast"]["e2e"]["median"] == pytest.approx(15 / 6.8)
    over = {(s["variant"], s["over"]): s["decode"]["median"] for s in found["over_peers"]}
    assert set(over) == {("none", "peer"), ("fast", "peer")}
    if repeats == 1:
        assert over["fast", "peer"] == pytest.approx(5.0)
    assert found["identity"]["fast"] == {"equal": 8 * repeats, "of": 8 * repeats, "parted": []}
    assert (found["wall_s"], found["outside_s"], found["setup_s"]) == (100.0, 2.0, 5.0)


def test_the_control_holds_or_not_or_cannot_tell() -> None:
    found = made()["control"]
    assert (found["low"], found["median"], found["high"]) == pytest.approx(
        (1 / 1.02, (1 / 1.02 + 1 / 0.98) / 2, 1 / 0.98)
    )
    assert found["holds"] is True
    slower = [sample("none", i, 0, [request(i, 1.0, 1.0, [1] * 4)]) for i in range(8)]
    slower += [sample("control", i, 0, [request(i, 1.0, 1.1 + 0.01 * i, [1] * 4)]) for i in range(8)]
    head = header(CASES, [NONE, CONTROL])
    assert summarise(records(head, slower))["control"]["holds"] is False
    few = summarise(records(head, [s for s in slower if s.batch < 7]))["control"]
    assert (few["holds"], few["low"]) == (None, None)


def test_categories_and_answers_that_part() -> None:
    samples = [sample("none", i, 0, [request(i, 1.0, 1.0, [1] * 4)]) for i in range(8)]
    samples += [sample("fast", i, 0, [request(i, 1.0, 0.5 if i % 2 else 0.25, [1] * 4)]) for i in range(8)]
    third = samples[10].requests[0]
    wrong = replace(third, token_ids=[*third.token_ids[:2], 999, *third.token_ids[3:]])
    samples[10] = replace(samples[10], requests=[wrong])
    found = summarise(records(header(CASES, [NONE, FAST]), samples))
    assert found["categories"]["even"]["fast"]["speedup"]["median"] == pytest.approx(4.0)
    assert found["categories"]["odd"]["fast"]["speedup"]["median"] == pytest.approx(2.0)
    assert found["categories"]["odd"]["fast"]["decode_tokens_per_s"] == pytest.approx(2.0)
    assert found["identity"]["fast"] == {"equal": 7, "of": 8, "parted": [{"case": 2, "repeat": 0, "position": 2}]}


def test_loops_are_left_out() -> None:
    samples = []
    for i in range(8):
        slow, fast = request(i, 1.0, 1.0, [1] * 4), request(i, 1.0, 0.1 if i < 4 else 0.5, [1] * 4)
        looping = {"cut": 2} if i < 4 else {}
        samples += [sample("none", i, 0, [replace(slow, **looping)]), sample("fast", i, 0, [replace(fast, **looping)])]
    (found,) = summarise(records(header(CASES, [NONE, FAST]), samples))["speedups"]
    assert found["decode"]["median"] == pytest.approx(6.0)
    assert found["decode_no_loops"]["median"] == pytest.approx(2.0)


def test_lengths_that_differ_are_compared_per_token_and_not_end_to_end() -> None:
    samples = [sample("none", i, 0, [request(i, 1.0, 1.0, [1] * 10)]) for i in range(8)]
    samples += [sample("fast", i, 0, [request(i, 1.0, 0.5, [1] * (10 if i == 0 else 5))]) for i in range(8)]
    (found,) = summarise(records(header(CASES, [NONE, FAST]), samples))["speedups"]
    assert found["decode"]["median"] == pytest.approx(2.0)
    assert found["e2e"]["per_unit"] == {0: pytest.approx(11 / 6)}


def batch(
    cases: list[int], first_s: list[float], gap_s: float, per_step: list[int], prefill_s: float
) -> list[RequestRecord]:
    return [request(c, at, gap_s, per_step, prefill_s=prefill_s) for c, at in zip(cases, first_s, strict=True)]


def test_a_batch_counts_all_of_its_decoding() -> None:
    # Prompts are computed in two chunks: the first request has its token at 1 s and decodes while the second waits.
    both = batch([0, 1], [1.0, 2.0], 1.0, [1] * 4, prefill_s=0.75)
    own = sample("none", 0, 0, both)
    assert (own.total_s, own.decode_s, own.num_decode_tokens) == (6.0, 4.5, 8)
    peers = sample("peer", 0, 0, [of_peer(r) for r in both])
    assert (peers.decode_s, peers.num_decode_tokens) == (4.0, 7)  # after both have their first token
    alone = sample("none", 0, 0, both[:1])
    assert (alone.decode_s, alone.num_decode_tokens) == (4.0, 4)


def of_peer(own: RequestRecord, first: int = 1) -> RequestRecord:
    """Return an answer of a peer, of whose tokens `first` came at once."""
    emissions = [[own.ttft_s, float(first)], *own.emissions[1:]]
    ids = [7 + i for i in range(len(own.token_ids) - 1 + first)]
    return replace(own, token_ids=ids, emissions=emissions, steps=None, prefill_s=None)


def test_what_a_peer_drafts_before_its_first_forward_is_not_decoded() -> None:
    own = sample("peer", 0, 0, [of_peer(request(0, 2.0, 1.0, [1, 3]), first=4)])
    assert (own.num_tokens, own.decode_s, own.num_decode_tokens) == (8, 2.0, 4)
    head = header(CASES, [NONE, PEER])
    found = summarise(records(head, [own, sample("none", 0, 0, [request(0, 2.0, 1.0, [1] * 7)])]))
    assert found["variants"]["peer"]["decode_tokens_per_s"] == pytest.approx(2.0)
    assert found["speedups"][0]["decode"]["median"] == pytest.approx(2.0)
    assert found["speedups"][0]["e2e"]["median"] == pytest.approx(9 / 4)


def test_a_peers_batch_decodes_from_when_all_have_begun() -> None:
    # The first emits at 1, 2, 3 and 4 s; the second gets three tokens at 2.5 s, and two at 3.5 s.
    both = [of_peer(request(0, 1.0, 1.0, [1] * 3)), of_peer(request(1, 2.5, 1.0, [2]), first=3)]
    own = sample("peer", 0, 0, both)
    assert (own.num_tokens, own.decode_s, own.num_decode_tokens) == (9, 1.5, 4)
    assert sample("peer", 0, 0, both[::-1]).num_decode_tokens == 4


def test_an_answer_in_one_emission_is_in_no_rate() -> None:
    at_once = sample("peer", 0, 0, [of_peer(request(0, 2.0, 1.0, []), first=6)])
    assert (at_once.decode_s, at_once.num_decode_tokens) == (0.0, 0)
    none = [sample("none", i, 0, [request(i, 1.0, 1.0, [1] * 5)]) for i in range(2)]
    head = header(CASES, [NONE, PEER])
    alone = summarise(records(head, [none[0], at_once]))
    assert alone["variants"]["peer"]["decode_tokens_per_s"] is None
    assert alone["speedups"][0]["decode"] is None
    other = sample("peer", 1, 0, [of_peer(request(1, 2.0, 0.5, [1] * 5))])
    found = summarise(records(head, [*none, at_once, other]))
    assert found["variants"]["peer"]["decode_tokens_per_s"] == pytest.approx(2.0)
    assert found["speedups"][0]["decode"]["per_unit"] == {1: pytest.approx(2.0)}


def test_only_full_batches_are_timed_and_mixed_ones_have_no_category() -> None:
    samples = []
    for name, gap in (("none", 1.0), ("fast", 0.5)):
        for number, members in enumerate([[0, 1], [2, 3], [4, 6], [5]]):
            first = [1.0] * len(members)
            samples.append(sample(name, number, 0, batch(members, first, gap if number < 3 else 9.0, [1] * 4, 0.5)))
    found = summarise(records(header(CASES, [NONE, FAST], batch_size=2), samples))
    (own,) = found["speedups"]
    assert set(own["decode"]["per_unit"]) == {0, 1, 2}
    assert own["decode"]["low"] is None  # three batches
    assert set(found["categories"]["even"]["fast"]["speedup"]["per_unit"]) == {2}
    assert found["categories"]["odd"]["fast"]["speedup"] is None
    assert found["categories"]["odd"]["fast"]["num_answers"] == 3


def test_a_conversation_is_one_unit() -> None:
    cases = [Case(str(i // 2), "a", i % 2, 10) for i in range(8)]
    samples = [sample("none", i, 0, [request(i, 1.0, 1.0, [1] * 4)]) for i in range(8)]
    samples += [sample("fast", i, 0, [request(i, 1.0, 0.5 if i % 2 else 0.25, [1] * 4)]) for i in range(8)]
    (found,) = summarise(records(header(cases, [NONE, FAST]), samples))["speedups"]
    assert found["decode"]["per_unit"] == {i: pytest.approx(3.0) for i in range(4)}
    assert found["decode"]["low"] is None


def test_a_conversations_turns_count_alike_however_often_they_were_repeated() -> None:
    cases = [Case("talk", "a", turn, 10) for turn in range(2)]
    gaps = {(0, 0): 0.5, (0, 1): 0.5, (0, 2): 0.5, (1, 0): 0.25}  # the second turn was run once: the run was killed
    samples = []
    for (turn, repeat), gap in gaps.items():
        samples.append(sample("none", turn, repeat, [request(turn, 1.0, 1.0, [1] * 4)]))
        samples.append(sample("fast", turn, repeat, [request(turn, 1.0, gap, [1] * 4)]))
    (found,) = summarise(records(header(cases, [NONE, FAST], repeats=3), samples))["speedups"]
    assert found["decode"]["per_unit"] == {0: pytest.approx((2.0 + 4.0) / 2)}


def test_failing_drafters_are_counted() -> None:
    broken = replace(request(0, 1.0, 1.0, [1] * 4), num_drafter_errors=3)
    found = summarise(records(header(CASES[:1], [NONE, FAST]), [sample("fast", 0, 0, [broken])]))
    assert found["variants"]["fast"]["num_drafter_errors"] == 3

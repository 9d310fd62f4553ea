"""Fault 27: scripted runs whose every number is known by hand."""

from __future__ import annotations

import pytest

from specdec.stats import RequestStats, total
from tests.decoding import add, drain, engine_of, prompts, reference
from tests.models.architectures import model_of, named

PROMPTS = prompts(3, 7, 12)


def test_fault_27_a_chain() -> None:
    model = model_of(named("llama"))
    engine = engine_of(model, "scripted", {"accept_counts": [0, 2, 4]}, max_draft_tokens=4)
    request = add(engine, PROMPTS[1], 16)
    drain(engine)
    s = request.stats
    # 1 by prefill; then 1, 3, 5, 1, 3 tokens, and 2 left: one draft, accepted, and its next token.
    assert [n for _, n in s.emissions] == [1, 1, 3, 5, 1, 3, 2]
    assert (s.num_prompt_tokens, s.num_steps, s.num_emitted_tokens, s.num_truncated) == (7, 6, 15, 0)
    assert (s.num_draft_tokens, s.num_accepted_tokens) == (4 * 5 + 1, 0 + 2 + 4 + 0 + 2 + 1)
    assert s.acceptance_rate == 9 / 21
    assert s.acceptance_length == 15 / 6
    assert s.drafted_at == [6, 5, 5, 5]
    assert s.accepted_at == [4, 3, 1, 1]
    assert s.acceptance_at_unconditional == [4 / 6, 3 / 6, 1 / 6, 1 / 6]
    # Of the four steps that accepted at depth 1 the last one drafted no deeper.
    assert s.reached_at == [6, 3, 3, 1]
    assert s.acceptance_at_conditional == [4 / 6, 3 / 3, 1 / 3, 1 / 1]
    assert len(s.itl_s) == 6
    assert s.ttft_s is not None
    assert s.tpot_s is not None
    assert s.ttft_s > 0
    assert s.tpot_s == pytest.approx(sum(s.itl_s) / 15)
    assert min(s.prefill_s, s.draft_s, s.verify_s, s.other_s) > 0


def test_the_last_step_shortens_the_drafts() -> None:
    engine = engine_of(model_of(named("llama")), "oracle", max_draft_tokens=4)
    request = add(engine, PROMPTS[0], 9)
    drain(engine)
    # 1 by prefill, then 5, then 3 with two drafts.
    assert [n for _, n in request.stats.emissions] == [1, 5, 3]
    assert request.stats.num_draft_tokens == request.stats.num_accepted_tokens == 6
    assert request.stats.drafted_at == request.stats.accepted_at == [2, 2, 1, 1]


def test_an_eos_inside_a_block_is_truncation() -> None:
    model = model_of(named("llama"))
    answer = reference(model, PROMPTS[0], 9)
    place = next(i for i in range(2, 5) if answer[i] not in answer[:i])
    engine = engine_of(model, "oracle", max_draft_tokens=4)
    request = add(engine, PROMPTS[0], 9, eos_token_ids=frozenset({answer[place]}))
    drain(engine)
    s = request.stats
    assert [n for _, n in s.emissions] == [1, place]
    assert (s.num_steps, s.num_draft_tokens, s.num_accepted_tokens, s.num_truncated) == (1, 4, place, 1)
    assert s.num_emitted_tokens == place == s.num_accepted_tokens + s.num_steps - s.num_truncated
    assert s.acceptance_length == place


def test_an_eos_as_next_token_is_no_truncation() -> None:
    model = model_of(named("llama"))
    answer = reference(model, PROMPTS[0], 9)
    assert answer[3] not in answer[:3]
    engine = engine_of(model, "oracle", max_draft_tokens=2)
    request = add(engine, PROMPTS[0], 9, eos_token_ids=frozenset({answer[3]}))
    drain(engine)
    assert [n for _, n in request.stats.emissions] == [1, 3]
    assert (request.stats.num_accepted_tokens, request.stats.num_truncated) == (2, 0)


def test_a_tree_counts_nodes_and_depth_apart() -> None:
    engine = engine_of(model_of(named("llama")), "scripted", {"accept_counts": [2, 0], "width": 3}, max_draft_tokens=6)
    request = add(engine, PROMPTS[0], 20)
    engine.step()
    for _ in range(4):
        engine.step()
    s = request.stats
    assert (s.num_steps, s.num_draft_tokens, s.num_accepted_tokens, s.num_emitted_tokens) == (4, 24, 4, 8)
    assert s.drafted_at == [4, 4]
    assert s.accepted_at == [2, 2]


def test_outputs_say_what_was_drafted() -> None:
    engine = engine_of(model_of(named("llama")), "scripted", {"accept_counts": [0, 3]}, max_draft_tokens=3)
    add(engine, PROMPTS[0], 10)
    assert [[(len(o.token_ids), o.num_accepted) for o in engine.step()] for _ in range(5)] == [
        [(1, 0)], [(1, 0)], [(4, 3)], [(1, 0)], [(3, 2)],
    ]  # fmt: skip


def test_the_engines_own_counters() -> None:
    engine = engine_of(model_of(named("llama")), "oracle", prefill_chunk_tokens=5)
    requests = [add(engine, prompt, 6) for prompt in PROMPTS]
    steps = drain(engine)
    assert engine.stats.num_steps == steps
    assert engine.stats.num_prefill_tokens == sum(map(len, PROMPTS))
    assert engine.stats.num_decode_tokens == 3 * 5
    summed = total(r.stats for r in requests)
    assert summed.num_emitted_tokens == 15
    assert summed.num_steps == sum(r.stats.num_steps for r in requests)
    assert summed.accepted_at == [sum(c) for c in zip(*(r.stats.accepted_at for r in requests), strict=True)]


def steps(*depths_and_accepted: tuple[int, int]) -> RequestStats:
    """Return the counters of chains of these depths, of which so many were accepted."""
    stats = RequestStats()
    for depth, accepted in depths_and_accepted:
        stats.record_decode(drafted=depth, depth=depth, accepted=accepted, emitted=accepted + 1)
    return stats


def test_conditional_acceptance_of_drafts_of_varying_depth() -> None:
    s = steps((3, 3), (1, 1), (0, 0), (2, 0), (1, 0), (4, 2), (3, 1))
    assert s.drafted_at == [6, 4, 3, 1]
    assert s.accepted_at == [4, 2, 1, 0]
    # Depth 2: of the four steps that accepted at depth 1, one drafted no deeper. Depth 3: (3, 3) and (4, 2).
    assert s.reached_at == [6, 3, 2, 0]
    assert s.acceptance_at_conditional == [4 / 6, 2 / 3, 1 / 2, None]
    assert s.acceptance_at_unconditional == [4 / 7, 2 / 7, 1 / 7, 0.0]


def test_steps_that_drafted_but_were_never_reached_do_not_dilute() -> None:
    """One step in ten accepts its one draft; the nine long ones, rejected at once, say nothing about depth 2."""
    s = steps((1, 1), *[(4, 0)] * 9, (2, 2))
    assert s.drafted_at == [11, 10, 9, 9]
    assert s.reached_at == [11, 1, 0, 0]
    assert s.acceptance_at_conditional == [2 / 11, 1.0, None, None]


def test_conditional_rates_multiply_to_the_unconditional_when_all_draft_as_deep() -> None:
    s = steps((3, 3), (3, 1), (3, 0), (3, 2), (3, 3))
    product = 1.0
    for conditional, unconditional in zip(s.acceptance_at_conditional, s.acceptance_at_unconditional, strict=True):
        assert conditional is not None
        product *= conditional
        assert product == pytest.approx(unconditional)


def test_total_sums_counters_of_different_depths() -> None:
    parts = [steps((1, 1), (1, 0)), steps((3, 2)), RequestStats()]
    whole = total(parts)
    assert whole.drafted_at == [3, 1, 1]
    assert whole.reached_at == [3, 1, 1]
    assert whole.accepted_at == [2, 1, 0]
    assert whole.acceptance_at_conditional == [2 / 3, 1.0, 0.0]
    assert (whole.num_steps, whole.num_draft_tokens, whole.num_accepted_tokens, whole.num_emitted_tokens) == (
        3,
        5,
        3,
        6,
    )
    assert parts[0].drafted_at == [2]


def test_nothing_drafted_and_nothing_run() -> None:
    assert steps((0, 0), (0, 0)).acceptance_at_conditional == []
    assert steps((0, 0)).acceptance_rate is None
    assert RequestStats().acceptance_at_unconditional == []
    assert RequestStats().acceptance_length is None


def test_a_copy_is_independent_but_for_the_emissions() -> None:
    s = steps((2, 1))
    s.emissions.append((1.0, 2))
    saved, length = s.copy(), len(s.emissions)
    s.record_decode(drafted=3, depth=3, accepted=3, emitted=4)
    s.emissions.append((2.0, 4))
    assert saved.emissions is s.emissions
    del saved.emissions[length:]
    expected = steps((2, 1))
    expected.emissions.append((1.0, 2))
    assert saved == expected

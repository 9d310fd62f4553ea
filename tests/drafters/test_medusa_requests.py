"""Medusa in an engine: its guesses stay aligned with the text, and the output is the target's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.engine import Engine
from specdec.interfaces import SamplingParams
from specdec.models.build import runner_for
from specdec.request import Request
from specdec.sampling import probabilities
from tests.decoding import add, drain, engine_of, private_runner, reference
from tests.drafters.looping import following, looping_model
from tests.drafters.medusa_heads import RAGGED, answers, final_hidden, fitted, knowing_heads
from tests.faults.test_alignment import Corruption
from tests.heads.tiny_heads import tiny_medusa
from tests.models.architectures import build, model_of, named
from tests.odd_drafters import Wrapped
from tests.verifiers.enumeration import chi_square_p


def run(engine: Engine, rows: Sequence[list[int]], new_tokens: int = 16, **options: Any) -> list[Request]:
    requests = [add(engine, row, new_tokens, **options) for row in rows]
    drain(engine)
    return requests


class TestAlignment:
    """Fault 8: guesses belong to the places they are drafted for, whatever was rejected before."""

    def test_heads_that_know_the_loop_are_accepted_whole(self) -> None:
        head = knowing_heads()
        engine = engine_of(looping_model(), "medusa", {"model": head, "tree": "chain"}, max_draft_tokens=3)
        requests = [add(engine, prompt, 41) for prompt in ([3], [9, 10, 11], [62, 63])]
        drain(engine)
        for request in requests:
            assert request.stats.num_steps == 10  # prefill gives one token, every step four
            assert request.stats.acceptance_rate == 1.0
            assert all(b == following(a) for a, b in itertools.pairwise(request.tokens[-42:]))

    @pytest.mark.parametrize("shift", [-1, 1])
    def test_heads_one_place_off_are_not(self, shift: int) -> None:
        head = knowing_heads(5)
        for i, rows in enumerate(list(head.module.lm_heads)[1:4]):
            target = head.module.lm_heads[i + 1 + shift].weight.clone()
            rows.weight = torch.nn.Parameter(target, requires_grad=False)
        engine = engine_of(looping_model(), "medusa", {"model": head, "tree": "chain"}, max_draft_tokens=3)
        request = add(engine, [3], 20)
        drain(engine)
        assert request.stats.acceptance_length is not None
        assert request.stats.acceptance_length <= 2.0

    @pytest.mark.parametrize("depths", [[1], [0, 2, 1, 0, 3, 3, 0]], ids=str)
    def test_after_any_rejection_all_is_accepted_up_to_the_next_error(self, depths: list[int]) -> None:
        engine = engine_of(looping_model(), "medusa", {"model": knowing_heads(), "tree": "chain"}, max_draft_tokens=3)
        corruption = Corruption(depths)
        engine.drafting.drafter = Wrapped(engine.drafter, corruption)
        requests = [add(engine, prompt, 30) for prompt in ([3], [9, 10, 11], [62, 63, 56, 57])]
        while engine.has_unfinished:
            corruption.expected.clear()
            for output in engine.step():
                assert output.num_accepted == corruption.expected.get(output.request_id, 0)
        assert all(b == following(a) for r in requests for a, b in itertools.pairwise(r.tokens))

    @pytest.mark.parametrize("tree", ["chain", "best", [3, 2, 1]], ids=str)
    def test_the_hidden_state_is_that_of_the_place_before_the_root(self, tree: Any) -> None:
        """Through chunked prefill, ragged batches, steps without drafts, acceptances and rejections."""
        model = model_of(named("llama"))
        texts = [prompt + answer for prompt, answer in zip(RAGGED, answers("llama"), strict=True)]
        runner = private_runner(model)
        options = {"model": fitted("llama"), "tree": tree}
        engine = engine_of(model, "medusa", options, runner=runner, max_draft_tokens=9, prefill_chunk_tokens=8)
        requests = [add(engine, prompt, 16) for prompt in RAGGED]
        drafter: Any = engine.drafter
        step = 0
        while engine.has_unfinished:
            engine._scheduler.max_draft_tokens = 0 if step % 7 == 5 else 9
            engine.step()
            step += 1
            for r, text in zip(requests, texts, strict=True):
                if r.finish_reason is None and r.num_computed:
                    position, hidden = drafter._last[r.request_id]
                    assert position == r.num_computed
                    torch.testing.assert_close(hidden, final_hidden(model, text[:position])[-1], rtol=1e-6, atol=1e-8)
        assert [r.tokens for r in requests] == texts
        accepted, drafted = (
            sum(getattr(r.stats, f"num_{kind}_tokens") for r in requests) for kind in ("accepted", "draft")
        )
        assert 20 < accepted < drafted

    def test_a_step_that_failed_costs_one_step_of_drafts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = engine_of(looping_model(), "medusa", {"model": knowing_heads(), "tree": "chain"}, max_draft_tokens=3)
        request = add(engine, [3], 30)
        engine.step()
        engine.step()
        before = list(request.tokens)

        def fail(*_: Any) -> None:
            raise RuntimeError("after the drafter has heard of it")

        with monkeypatch.context() as patch:
            patch.setattr(engine, "_count", fail)
            with pytest.raises(RuntimeError):
                engine.step()
        assert request.tokens == before
        emitted = [len(output.token_ids) for _ in range(3) for output in engine.step()]
        assert emitted == [1, 4, 4]
        drain(engine)
        assert all(b == following(a) for a, b in itertools.pairwise(request.tokens))


class TestIdentity:
    """The output is the target's."""

    TREES: tuple[Any, ...] = ("chain", "best", "medusa", [[1], [0], [1, 0], [0, 2], [0, 2, 1]])

    @pytest.mark.parametrize("most", [1, 7, 64])
    @pytest.mark.parametrize("tree", TREES, ids=str)
    def test_greedy_in_a_ragged_batch(self, tree: Any, most: int) -> None:
        model = model_of(named("qwen3"))
        expected, head = answers("qwen3"), fitted("qwen3", 4)
        requests = run(engine_of(model, "medusa", {"model": head, "tree": tree}, max_draft_tokens=most), RAGGED)
        assert [r.new_tokens for r in requests] == expected
        assert sum(r.stats.num_rejected_drafts for r in requests) == 0
        assert sum(r.stats.num_accepted_tokens for r in requests) >= 5

    @pytest.mark.parametrize("name", ["gemma2", "gpt2", "mpt"])
    def test_other_targets(self, name: str) -> None:
        """Soft caps, learned positions, chains only; a draft vocabulary of half the tokens."""
        model = model_of(named(name))
        expected = [reference(model, prompt, 12) for prompt in RAGGED[:4]]
        head = tiny_medusa(runner_for(model), drafted=range(0, 64, 2))
        requests = run(engine_of(model, "medusa", {"model": head}, max_draft_tokens=12), RAGGED[:4], 12)
        assert [r.new_tokens for r in requests] == expected
        assert sum(r.stats.num_draft_tokens for r in requests) > 0

    def test_typical_acceptance_is_exact_when_greedy(self) -> None:
        model = model_of(named("llama"))
        expected, head = answers("llama")[:4], fitted("llama")
        engine = engine_of(model, "medusa", {"model": head}, verifier="typical", max_draft_tokens=20)
        assert [r.new_tokens for r in run(engine, RAGGED[:4])] == expected

    def test_a_seed_gives_the_undrafted_tokens(self) -> None:
        model = model_of(named("llama"))
        sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=3)
        head = tiny_medusa(runner_for(model))
        plain, drafted = (
            run(engine_of(model, name, options, max_draft_tokens=20), RAGGED[:4], 16, sampling=sampling)
            for name, options in (("none", {}), ("medusa", {"model": head, "tree": "best"}))
        )
        assert [r.new_tokens for r in drafted] == [r.new_tokens for r in plain]

    def test_the_law_of_sampled_tokens(self) -> None:
        """Three tokens from one step, or from several: as many as the tree brings."""
        num_samples, vocab, prompt = 600, 4, [1, 3, 2]
        model = build(named("llama"), torch.float32, vocab_size=vocab)
        model.lm_head.weight.mul_(0.5)
        sampling = SamplingParams(temperature=0.8)
        options = {"model": tiny_medusa(runner_for(model)), "tree": "best"}
        engine = engine_of(
            model, "medusa", options, verifier="rejection", max_draft_tokens=6, max_batch_size=num_samples,
            prefill_chunk_tokens=4096,
        )  # fmt: skip
        torch.manual_seed(17)
        requests = [add(engine, prompt, 12, sampling=sampling) for _ in range(num_samples)]
        while any(len(r.new_tokens) < 3 for r in requests):
            engine.step()
            for r in requests:
                if r.finish_reason is None and len(r.new_tokens) >= 3:
                    engine.abort(r.request_id)
        digits = torch.tensor([r.new_tokens[:3] for r in requests])
        counts = torch.bincount((digits * torch.tensor([16, 4, 1])).sum(dim=1), minlength=vocab**3)
        every = torch.tensor([[*prompt, *s] for s in itertools.product(range(vocab), repeat=3)])
        logits = model(input_ids=every).logits
        mass = torch.full((len(every),), float(num_samples), dtype=torch.float64)
        for i in range(3):
            probs = probabilities(logits[:, 2 + i], [sampling] * len(every)).double()
            mass *= probs.gather(1, every[:, 3 + i, None])[:, 0]
        assert chi_square_p(counts, mass) > 1e-4
        assert sum(r.stats.num_accepted_tokens for r in requests) > num_samples / 2

    def test_fault_18_the_order_of_siblings_does_not_matter(self) -> None:
        """The same nodes, listed the other way round: the same tokens accepted in every step."""
        model = model_of(named("llama"))
        paths = [list(p) for depth in (1, 2) for p in itertools.product(range(3), repeat=depth)]
        other = sorted(paths, key=lambda path: (len(path), [-rank for rank in path]))

        def steps(tree: Any) -> list[list[list[int]]]:
            options = {"model": fitted("llama"), "tree": tree}
            engine = engine_of(model, "medusa", options, max_draft_tokens=12)
            requests = [add(engine, prompt, 30) for prompt in RAGGED[:4]]
            found = [[output.token_ids for output in engine.step()] for _ in range(6)]  # there is room for all nodes
            for request, answer in zip(requests, answers("llama"), strict=False):
                known = min(len(request.new_tokens), len(answer))
                assert request.new_tokens[:known] == answer[:known]
            return found

        one = steps(paths)
        assert one == steps(other)
        assert max(len(tokens) for step in one for tokens in step) == 3

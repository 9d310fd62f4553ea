"""Fault 26: what a head says in training is what its drafter computes on the same ids and hidden states."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.heads.eagle import EagleHead
from specdec.heads.medusa import MedusaHeads
from specdec.heads.target import HeadTarget
from specdec.models.build import runner_for
from specdec.models.small_copy import small_copy
from specdec.train.batches import Batch, collate
from specdec.train.draft_model_step import DraftModelStep
from specdec.train.eagle_step import EagleStep, EagleTraining
from specdec.train.losses import StepLoss, walk
from specdec.train.medusa_step import MedusaStep
from specdec.train.store import Example
from tests.decoding import add, drain, engine_of
from tests.heads.plain_forward import said_after
from tests.heads.tiny_heads import tiny_eagle, tiny_medusa
from tests.train.toy import SPEC, VOCAB_SIZE, WIDTH, toy_examples, toy_model, toy_target, vocabulary_of

DRAFTED = sorted({*range(0, VOCAB_SIZE, 2), *range(0, VOCAB_SIZE, 7)})
STEPS = 3


def eagle_of(model: Any, **options: Any) -> Any:
    return tiny_eagle(runner_for(model), feature_layers=SPEC.layers, **options)


def eagle_step(model: Any, loaded: Any, *, scaled: bool) -> EagleStep:
    target: HeadTarget = toy_target(model)
    head = loaded.module
    assert isinstance(head, EagleHead)
    rows = target.output_rows(loaded.vocabulary.target_ids)
    step = EagleStep(head, loaded.vocabulary, rows, EagleTraining(steps=STEPS))
    if scaled:
        torch.manual_seed(1)
        step.feature_scale.copy_(torch.rand_like(step.feature_scale) + 0.5)
    return step.eval()


def raw(example: Example) -> Tensor:
    return example.features[:, : len(SPEC.layers) * WIDTH].to(torch.float32)


def grid_of(step: Any, batch: Batch) -> Tensor:
    out: StepLoss = step(batch)
    return out.hits


def base_rows(example: Example, batch: Batch, step: int) -> list[tuple[int, int]]:
    """Return (row of the text, column in the block) of the guesses of a step, by the definition.

    Row t guesses token t + 2 + step, behind a root t + 1 that is the target's.
    """
    columns = min(batch.response_columns + 1, batch.token_ids.shape[1])
    length = len(example.token_ids)
    shift = columns - length  # the text ends in the last column
    return [(t, t + shift) for t in range(example.num_prompt_tokens - 1, length - 2 - step)]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"norm_output": True}, {"drafted": DRAFTED}], ids=str)
def test_fault_26_the_training_time_test_is_the_drafters_own_forward(options: dict[str, Any]) -> None:
    """Every guess of every row and step, in one ragged batch, against plain forwards of one text each.

    These take features as they come, with the scale folded into the head.
    """
    model, examples = toy_model(), toy_examples()
    loaded = eagle_of(model, **options)
    step = eagle_step(model, loaded, scaled=True)
    said: list[Tensor] = []  # by the head, [B, rows, H] per step
    step.head.register_forward_hook(lambda module, args, out: said.append(out))
    batch = collate(examples)
    assert bool((~batch.is_token).any()), "ragged"
    hits = grid_of(step, batch)
    folded = dataclasses.replace(loaded, module=step.trained_head())
    columns = hits.shape[2]
    asked = torch.zeros_like(hits, dtype=torch.bool)
    for number, example in enumerate(examples):
        ids = example.token_ids.tolist()
        for base, column in base_rows(example, batch, 0):
            drafts = [t for t in ids[base + 2 : base + 1 + STEPS] if base + 2 < len(ids)]
            plain = said_after(folded, raw(example)[: base + 1], ids[1 : base + 2], drafts)
            chosen = loaded.vocabulary.target_ids[folded.module.logits(plain).argmax(dim=-1)].tolist()
            for j in range(STEPS):
                if base + 2 + j >= len(ids):
                    continue
                asked[j, number, column] = True
                torch.testing.assert_close(said[j][number, -columns:][column], plain[j], rtol=2e-4, atol=2e-4)
                assert hits[j, number, column] == (chosen[j] == ids[base + 2 + j]), (number, base, j)
    assert torch.equal(asked, hits >= 0)
    assert 0 < int((hits == 1).sum()) < int(asked.sum())


def test_the_loss_is_the_sum_of_cross_entropies_of_what_the_plain_forwards_say() -> None:
    model, examples = toy_model(), toy_examples()
    loaded = eagle_of(model, drafted=DRAFTED)
    step = eagle_step(model, loaded, scaled=False)
    batch = collate(examples)
    total, rows = 0.0, 0
    keep = loaded.vocabulary.target_ids
    for example in examples:
        ids = example.token_ids.tolist()
        target = model.lm_head(example.features[:, -WIDTH:].to(torch.float32))[:, keep].softmax(dim=-1)
        for base, _ in base_rows(example, batch, 0):
            rows += 1
            drafts = ids[base + 2 : base + 1 + STEPS]
            plain = said_after(loaded, raw(example)[: base + 1], ids[1 : base + 2], drafts)
            logs = loaded.module.logits(plain).log_softmax(dim=-1)
            for j in range(min(STEPS, len(ids) - base - 2)):
                if ids[base + 2 + j] in DRAFTED:
                    total -= 0.8**j * float(target[base + 1 + j] @ logs[j])
    assert float(step(batch).loss) == pytest.approx(total / rows, rel=1e-4)


def test_columns_before_the_responses_and_padding_change_nothing() -> None:
    """A sequence alone gives what it gives in a batch of longer ones."""
    model, examples = toy_model(), toy_examples()
    step = eagle_step(model, eagle_of(model), scaled=True)
    together = grid_of(step, collate(examples))
    for number, example in enumerate(examples):
        alone = grid_of(step, collate([example]))[:, 0]
        assert torch.equal(alone, together[:, number, -alone.shape[1] :])


@pytest.mark.parametrize("options", [{}, {"drafted": DRAFTED}, {"num_layers": 2}, {"own_heads": True}], ids=str)
def test_fault_26_medusa_hits_are_what_the_heads_say(options: dict[str, Any]) -> None:
    model, examples = toy_model(), toy_examples()
    loaded = tiny_medusa(runner_for(model), **options)
    assert isinstance(loaded.module, MedusaHeads)
    if loaded.module.config.own_heads:
        loaded.module.lm_heads.requires_grad_(True)
    step = MedusaStep(loaded.module, loaded.vocabulary, toy_target(model).output_rows(loaded.vocabulary.target_ids))
    batch = collate(examples)
    hits = grid_of(step, batch)
    asked = torch.zeros_like(hits, dtype=torch.bool)
    for number, example in enumerate(examples):
        final = example.features[:, -WIDTH:].to(torch.float32)
        chosen = loaded.vocabulary.target_ids[loaded.module.logits(final).argmax(dim=-1)]
        for head in range(hits.shape[0]):
            for base, column in base_rows(example, batch, head):
                asked[head, number, column] = True
                right = chosen[base, head] == example.token_ids[base + 2 + head]
                assert bool(hits[head, number, column] == 1) == bool(right), (number, base, head)
    assert torch.equal(asked, hits >= 0)
    assert 0 < int((hits == 1).sum()) < int(asked.sum())


@pytest.mark.parametrize("drafted", [None, DRAFTED], ids=["whole", "some"])
def test_fault_26_draft_model_hits_are_what_a_plain_forward_says(drafted: list[int] | None) -> None:
    model, examples = toy_model(), toy_examples()
    vocabulary = vocabulary_of(drafted)
    small = small_copy(model, [0, 2, 3, 4, 5])
    step = DraftModelStep(small, vocabulary, toy_target(model).output_rows(vocabulary.target_ids), 3)
    batch = collate(examples)
    out = step(batch)
    assert bool(torch.isfinite(out.loss))
    out.loss.backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in small.parameters() if p.grad is not None)
    right = 0
    for number, example in enumerate(examples):
        with torch.no_grad():
            logits = small(input_ids=example.token_ids[None]).logits[0][:, vocabulary.target_ids]
        chosen = vocabulary.target_ids[logits.argmax(dim=-1)]
        for k in range(3):
            for base, column in base_rows(example, batch, k):
                hit = bool(chosen[base + 1 + k] == example.token_ids[base + 2 + k])
                right += hit
                assert int(out.hits[k, number, column]) == hit, (number, base, k)
            assert int((out.hits[k, number] >= 0).sum()) == len(base_rows(example, batch, k))
    assert right


def test_the_walk_is_what_the_engine_measures() -> None:
    """Tokens and target forwards read off the hits are those of real greedy decoding, for three drafters."""
    model, examples = toy_model(), toy_examples()
    eagle, medusa = eagle_of(model), tiny_medusa(runner_for(model))
    rows = toy_target(model).output_rows(eagle.vocabulary.target_ids)
    jobs = [
        ("eagle3", eagle, eagle_step(model, eagle, scaled=False)),
        ("medusa", medusa, MedusaStep(medusa.module, medusa.vocabulary, rows)),  # type: ignore[arg-type]
    ]
    for name, loaded, step in jobs:
        engine = engine_of(model, name, {"model": loaded, "tree": "chain"}, max_draft_tokens=STEPS)
        emitted = forwards = 0
        for example in examples:
            ids = example.token_ids.tolist()
            request = add_greedy(engine, ids, example)
            emitted += request.stats.num_emitted_tokens
            forwards += request.stats.num_steps
        assert walk([grid_of(step, collate(examples))]) == (emitted, forwards), name
        assert forwards < emitted, name


def add_greedy(engine: Any, ids: list[int], example: Example) -> Any:
    request = add(engine, ids[: example.num_prompt_tokens], example.num_response_tokens)
    drain(engine)
    assert request.new_tokens == ids[example.num_prompt_tokens :]
    return request

"""Known mistakes, each of which the machinery of test_exact and test_statistics must detect.

`LoopVerifier` is recursive rejection sampling written a second time, one node and one child after the other, with a
switch for each mistake. Without a mistake it is an independent check of the vectorised rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from specdec.interfaces import Noise, NoiseKey, Stream, TargetRows, TokenTree, Verifier, VerifyResult
from specdec.noise import KeyedNoise
from specdec.tree import chain
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.traversal import TraversalVerifier
from tests.verifiers.enumeration import (
    Draft,
    Drawing,
    Law,
    Model,
    Row,
    TableTarget,
    as_tensor,
    blocks,
    drafts,
    joint_law,
    most_likely,
    random_model,
    sample_tokens,
    sequences_p_value,
    step_law,
    target_law,
    to_batch,
    total_variation,
    with_replacement,
    without_replacement,
)


@dataclass(frozen=True)
class LoopVerifier:
    """Recursive rejection sampling over one row at a time."""

    residual_is_target: bool = False
    renormalises_draft: bool = True
    ratio_inverted: bool = False

    name = "loop"
    lossless = True
    needs_all_rows = False
    couples_draft = False

    def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult:
        walks = [self._walk(tree, row, target, noise) for row in range(tree.num_nodes.shape[0])]
        width = max(len(path) for path, _ in walks)
        return VerifyResult(
            path=torch.tensor([path + [-1] * (width - len(path)) for path, _ in walks]).reshape(len(walks), width),
            num_accepted=torch.tensor([len(path) for path, _ in walks]),
            next_token_ids=torch.tensor([token for _, token in walks]),
        )

    def _walk(self, tree: TokenTree, row: int, target: TargetRows, noise: Noise) -> tuple[list[int], int]:
        parents = tree.parents[row, : int(tree.num_nodes[row])].tolist()
        path, node = [], 0
        while True:
            p = target.probs(torch.tensor([row]), torch.tensor([node]))[0].double()
            children = [child for child, parent in enumerate(parents) if parent == node]
            offset = len(path) + 1
            child, p = self._try(tree, row, node, children, p, noise, offset)
            if child is None:
                stream = Stream.RESIDUAL if children else Stream.TOKEN
                return path, int(noise.choose(p[None], NoiseKey(torch.tensor([row]), offset, stream)))
            path.append(child)
            node = child

    def _try(
        self, tree: TokenTree, row: int, node: int, children: list[int], p: Tensor, noise: Noise, offset: int
    ) -> tuple[int | None, Tensor]:
        source = -1 if tree.draft_row is None else int(tree.draft_row[row, node])
        q = None if source < 0 else tree.draft_probs[source].double()
        for ordinal, child in enumerate(children):
            x = int(tree.token_ids[row, child])
            now = torch.nn.functional.one_hot(torch.tensor(x), p.shape[0]).double() if q is None else q
            total = now.sum() if self.renormalises_draft else torch.ones(()).double()
            num, den = p[x] * total, now[x] * p.sum()
            if self.ratio_inverted:
                num, den = den, num
            key = NoiseKey(torch.tensor([row]), offset, Stream.ACCEPT, ordinal)
            if now[x] > 0 and bool(noise.accept(num[None], den[None], key)):
                return child, p
            left = p if self.residual_is_target else (p * total - now * p.sum()).clamp_min(0)
            p = left if now[x] > 0 and left.sum() > 0 else p
            if q is not None and not tree.with_replacement:
                q = q.clone()
                q[x] = 0
        return None, p


@dataclass(frozen=True)
class Setting:
    """A verifier with what it is told about drafts that were drawn in some way."""

    verifier: Verifier
    shape: list[int]
    drawing: Drawing
    says_replacement: bool
    draft: Callable[[Model], list[list[Fraction]]] = lambda model: model.draft
    edit: Callable[[Model, Draft], Draft] = lambda model, tree: tree

    def law(self, model: Model, steps: int = 3) -> tuple[Law, Law]:
        """Return the law of the first tokens of three steps and the target's."""
        length = (steps - 1) * (len(self.shape) + 1) + 1

        def step(context: int) -> Law:
            trees = drafts(model, context, self.shape, self.drawing, draft=self.draft(model))
            trees = [self.edit(model, tree) for tree in trees]
            return step_law(self.verifier, model, trees, self.says_replacement).blocks

        return joint_law(model, step, 0, length), target_law(model, 0, length)


def is_detected(setting: Setting, model: Model) -> bool:
    law, expected = setting.law(model)
    assert sum(law.values()) == 1
    return law != expected and total_variation(law, expected) > Fraction(1, 1000)


def top_two(model: Model) -> list[list[Fraction]]:
    """Return the draft rows cut to their two largest entries: what a warped draft is drawn from."""
    return [_top_two(row) for row in model.draft]


def _top_two(row: Row) -> list[Fraction]:
    kept = sorted(range(len(row)), key=lambda token: (-row[token], token))[:2]
    total = sum(row[token] for token in kept)
    return [row[token] / total if token in kept else Fraction(0) for token in range(len(row))]


def cut(tree: Draft, length: int) -> Draft:
    """Keep the first `length` nodes of a chain."""
    return replace(
        tree,
        token_ids=tree.token_ids[:length],
        parents=tree.parents[:length],
        contexts=tree.contexts[:length],
        sampled=tree.sampled[:length],
    )


def first_unlikely(model: Model, tree: Draft) -> int:
    """Return the first node whose token had a draft probability below 1/4; the number of nodes if there is none."""
    for node in range(1, len(tree.token_ids)):
        if model.draft[tree.contexts[node - 1]][tree.token_ids[node]] < Fraction(1, 4):
            return node
    return len(tree.token_ids)


def drop_unlikely_token(model: Model, tree: Draft) -> Draft:
    return cut(tree, first_unlikely(model, tree))


def stop_after_unlikely_token(model: Model, tree: Draft) -> Draft:
    return cut(tree, first_unlikely(model, tree) + 1)


RIGHT, TRAVERSAL = RejectionVerifier(), TraversalVerifier()
MISTAKES = {
    "residual is p": Setting(LoopVerifier(residual_is_target=True), [1, 1], with_replacement, False),
    "q without the warping it was drawn with": Setting(RIGHT, [1, 1], with_replacement, False, draft=top_two),
    "ratio on top-k children": Setting(RIGHT, [2], most_likely, False),
    "ratio on top-k children, two deep": Setting(RIGHT, [2, 1], most_likely, True),
    "q not renormalised": Setting(LoopVerifier(renormalises_draft=False), [2], without_replacement, False),
    "rule with replacement on children without": Setting(RIGHT, [2], without_replacement, True),
    "fault 5: ratio inverted": Setting(LoopVerifier(ratio_inverted=True), [1], with_replacement, False),
    "unlikely last token dropped": Setting(RIGHT, [1, 1], with_replacement, False, edit=drop_unlikely_token),
    "traversal of top-k children": Setting(TRAVERSAL, [2], most_likely, False),
    "traversal of top-k children, two deep": Setting(TRAVERSAL, [2, 1], most_likely, True),
    "traversal with replacement of children without": Setting(TRAVERSAL, [2, 1], without_replacement, True),
    "traversal of a warped draft": Setting(TRAVERSAL, [1, 1], with_replacement, False, draft=top_two),
    "traversal, unlikely token dropped": Setting(TRAVERSAL, [1, 1], with_replacement, False, edit=drop_unlikely_token),
}
RIGHT_ONES = {
    "loop chain": Setting(LoopVerifier(), [1, 1], with_replacement, False),
    "loop with replacement": Setting(LoopVerifier(), [2, 1], with_replacement, True),
    "loop without replacement": Setting(LoopVerifier(), [2, 1], without_replacement, False),
    # Repeats are passed over, and an i.i.d. sample without its repeats is one without replacement.
    "rule without replacement on children with": Setting(RIGHT, [3], with_replacement, False),
    "unlikely token kept, then a stop": Setting(RIGHT, [1, 1], with_replacement, False, edit=stop_after_unlikely_token),
    "traversal without replacement of children with": Setting(TRAVERSAL, [3], with_replacement, False),
    "traversal, a stop": Setting(TRAVERSAL, [1, 1, 1], with_replacement, False, edit=stop_after_unlikely_token),
}


@pytest.fixture(scope="module")
def model() -> Model:
    """A target and a draft that overlap but differ everywhere, without zeros."""
    eighths = {"target": [(1, 2, 5), (4, 3, 1), (2, 4, 2)], "draft": [(5, 2, 1), (1, 4, 3), (1, 1, 6)]}
    return Model(**{name: [[Fraction(n, 8) for n in row] for row in rows] for name, rows in eighths.items()})


@pytest.mark.parametrize("name", MISTAKES)
def test_fault_02_and_05_mistakes_are_detected(model: Model, name: str) -> None:
    assert is_detected(MISTAKES[name], model)


@pytest.mark.parametrize("name", RIGHT_ONES)
def test_their_right_counterparts_are_not(model: Model, name: str) -> None:
    law, expected = RIGHT_ONES[name].law(model)
    assert law == expected


@pytest.mark.parametrize("drawing", [with_replacement, without_replacement])
def test_both_implementations_agree_draw_by_draw(drawing: Drawing) -> None:
    """Same keyed noise, same path and token: the vectorised rule asks for what the loop asks for."""
    for seed in range(4):
        model = random_model(seed, vocab_size=4)
        trees = drafts(model, seed, [2, 2], drawing)[::11]
        batch, contexts = to_batch(trees, as_tensor(model.draft), drawing is with_replacement)
        rows = torch.arange(len(trees))
        noise = KeyedNoise(rows, rows, torch.zeros_like(rows, dtype=torch.bool))
        target = TableTarget(as_tensor(model.target), contexts)
        first, second = (verifier.verify(batch, target, noise) for verifier in (RIGHT, LoopVerifier()))
        for name in ("path", "num_accepted", "next_token_ids"):
            assert torch.equal(getattr(first, name), getattr(second, name))


class SharedStreams:
    """KeyedNoise with some streams mapped to others: what a single random stream per position does."""

    def __init__(self, noise: KeyedNoise, streams: dict[Stream, Stream]) -> None:
        self.noise, self.streams = noise, streams

    def accept(self, num: Tensor, den: Tensor, key: NoiseKey) -> Tensor:
        return self.noise.accept(num, den, self._map(key))

    def choose(self, weights: Tensor, key: NoiseKey) -> Tensor:
        return self.noise.choose(weights, self._map(key))

    def _map(self, key: NoiseKey) -> NoiseKey:
        return replace(key, stream=self.streams.get(key.stream, key.stream))


def three_steps_p_value(model: Model, coupled: bool, streams: dict[Stream, Stream]) -> float:
    """Return the chi-square p-value of the first three tokens of 2e5 requests under rejection sampling."""
    target, draft = as_tensor(model.target), as_tensor(model.draft)
    run = sample_tokens(RIGHT, target, draft, coupled=coupled, wrap=lambda noise: SharedStreams(noise, streams))
    return sequences_p_value(run.tokens, target)


@pytest.mark.parametrize("shared", [Stream.ACCEPT, Stream.RESIDUAL])
def test_fault_05_rejection_with_a_draw_that_shares_the_drafts_noise(model: Model, shared: Stream) -> None:
    """Coupled to the target's TOKEN noise, the draft correlates with any other draw that reads it."""
    assert three_steps_p_value(model, coupled=True, streams={shared: Stream.TOKEN}) < 1e-12


@pytest.mark.parametrize("coupled", [False, True])
def test_rejection_keeps_its_streams_apart(model: Model, coupled: bool) -> None:
    """With ACCEPT and RESIDUAL streams of its own, rejection stays exact even when drafts read TOKEN noise."""
    assert three_steps_p_value(model, coupled, streams={}) > 1e-4


def test_blocks_rejects_a_path_that_is_none() -> None:
    tree = chain(torch.tensor([0]), torch.tensor([[1, 2]]), torch.tensor([2]))
    with pytest.raises(AssertionError):
        list(blocks(tree, torch.tensor([[2]]), torch.tensor([1]), torch.tensor([0])))


def test_scripted_noise_needs_every_draw_to_have_its_own_key(model: Model) -> None:
    """A rule that reads one key twice is found even where its law happens to be right."""

    class ReadsTwice(RejectionVerifier):
        def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult:
            super().verify(tree, target, noise)
            return super().verify(tree, target, noise)

    trees: Sequence[Draft] = drafts(model, 0, [1], with_replacement)
    with pytest.raises(AssertionError, match="drawn twice"):
        step_law(ReadsTwice(), model, trees, replacement=False)

"""The joint law of the first tokens over at least three consecutive steps is the target's, exactly."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
import torch

from specdec.interfaces import NoiseKey, Stream, Verifier
from specdec.noise import KeyedNoise
from specdec.tree import chain, stack_trees
from specdec.verifiers.match import MatchVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.traversal import TraversalVerifier
from tests.verifiers.enumeration import (
    Drawing,
    Law,
    Model,
    ScriptedNoise,
    TableTarget,
    as_tensor,
    blocks,
    drafts,
    joint_law,
    most_likely,
    random_model,
    step_law,
    target_law,
    to_batch,
    total_variation,
    twice_the_same,
    uniform_ends,
    with_replacement,
    without_replacement,
)

VERIFIERS = [MatchVerifier(), RejectionVerifier(), TraversalVerifier()]
ids = [verifier.name for verifier in VERIFIERS]
by_ratio = pytest.mark.parametrize("verifier", VERIFIERS[1:], ids=ids[1:])
DRAWINGS = [with_replacement, without_replacement, most_likely]


def speculative_law(
    verifier: Verifier, model: Model, shape: list[int], drawing: Drawing, context: int = 0, steps: int = 3
) -> Law:
    """Return the law of so many tokens that even steps that accept everything are at least `steps`."""
    is_sampled = drawing in (with_replacement, without_replacement)

    def step(context: int) -> Law:
        trees = drafts(model, context, shape, drawing, lambda depth: is_sampled)
        replacement = drawing is with_replacement
        return step_law(verifier, model, trees, replacement, point_masses=not is_sampled).blocks

    return joint_law(model, step, context, num_tokens(shape, steps))


def num_tokens(shape: list[int], steps: int = 3) -> int:
    return (steps - 1) * (len(shape) + 1) + 1


def assert_exact(verifier: Verifier, model: Model, shape: list[int], drawing: Drawing, context: int = 0) -> None:
    law = speculative_law(verifier, model, shape, drawing, context)
    assert sum(law.values()) == 1
    assert law == target_law(model, context, num_tokens(shape))


@pytest.mark.parametrize("verifier", VERIFIERS, ids=ids)
@pytest.mark.parametrize(("vocab_size", "order", "length"), [(4, 1, 1), (3, 2, 1), (3, 2, 2), (3, 1, 3)])
def test_chain(verifier: Verifier, vocab_size: int, order: int, length: int) -> None:
    model = random_model(seed=17 * length + order, vocab_size=vocab_size, order=order)
    assert_exact(verifier, model, [1] * length, with_replacement)


@pytest.mark.parametrize("verifier", VERIFIERS, ids=ids)
@pytest.mark.parametrize("drawing", DRAWINGS)
@pytest.mark.parametrize("shape", [[2], [3], [2, 1], [2, 2], [1, 2]], ids=str)
def test_tree(verifier: Verifier, drawing: Drawing, shape: list[int]) -> None:
    model = random_model(seed=sum(shape) + len(shape), vocab_size=3)
    assert_exact(verifier, model, shape, drawing, context=1)


@pytest.mark.parametrize("verifier", VERIFIERS, ids=ids)
@pytest.mark.parametrize("drawing", DRAWINGS)
def test_four_tokens_and_three_siblings(verifier: Verifier, drawing: Drawing) -> None:
    assert_exact(verifier, random_model(seed=2, vocab_size=4), [3], drawing)


@pytest.mark.parametrize("verifier", VERIFIERS, ids=ids)
def test_fault_18_duplicate_siblings_of_point_masses(verifier: Verifier) -> None:
    for shape in ([2], [3], [2, 2]):
        assert_exact(verifier, random_model(seed=4, vocab_size=3), shape, twice_the_same)


@pytest.mark.parametrize("verifier", VERIFIERS, ids=ids)
@pytest.mark.parametrize("sampled_depth", [0, 1])
def test_sampled_and_point_mass_children_in_one_tree(verifier: Verifier, sampled_depth: int) -> None:
    model, shape = random_model(seed=6, vocab_size=3), [2, 2]

    def step(context: int) -> Law:
        trees = drafts(model, context, shape, without_replacement, lambda depth: depth == sampled_depth)
        return step_law(verifier, model, trees, replacement=False).blocks

    assert joint_law(model, step, 0, num_tokens(shape)) == target_law(model, 0, num_tokens(shape))


HALVES = [Fraction(1, 2), Fraction(1, 2), Fraction(0), Fraction(0)]
OTHER_HALVES = HALVES[::-1]
SKEWED = [Fraction(5, 8), Fraction(1, 8), Fraction(1, 4), Fraction(0)]


def one_hot(token: int) -> list[Fraction]:
    return [Fraction(int(i == token)) for i in range(4)]


EDGES = {
    "disjoint supports": Model([HALVES] * 4, [OTHER_HALVES] * 4),
    "equal": Model([SKEWED] * 4, [SKEWED] * 4),
    "target one-hot": Model([one_hot(2)] * 4, [SKEWED] * 4),
    "draft one-hot": Model([SKEWED] * 4, [one_hot(1)] * 4),
    "draft one-hot outside": Model([SKEWED] * 4, [one_hot(3)] * 4),
    "equal one-hots": Model([one_hot(2)] * 4, [one_hot(2)] * 4),
    "different one-hots": Model([one_hot(2)] * 4, [one_hot(0)] * 4),
}


@pytest.mark.parametrize("verifier", VERIFIERS, ids=ids)
@pytest.mark.parametrize("name", EDGES)
def test_fault_03_degenerate_distributions(verifier: Verifier, name: str) -> None:
    for shape, drawing in itertools.product(([1, 1], [2, 1]), DRAWINGS):
        assert_exact(verifier, EDGES[name], shape, drawing)


@by_ratio
@pytest.mark.parametrize("low", [True, False], ids=["u = 0", "u just below 1"])
def test_fault_03_uniforms_at_both_ends(verifier: Verifier, low: bool) -> None:
    """Nothing the target cannot say is accepted or emitted, and an equal draft is accepted, at either end."""
    noise = uniform_ends(low)
    cases = itertools.product(EDGES.items(), ([1, 1, 1], [2, 2]), (False, True))
    for (name, model), shape, point_masses in cases:
        claimed = None if point_masses else as_tensor(model.draft)
        tree, contexts = to_batch(drafts(model, 0, shape, with_replacement), claimed, replacement=True)
        result = verifier.verify(tree, TableTarget(as_tensor(model.target), contexts), noise)
        for block in blocks(tree, result.path, result.num_accepted, result.next_token_ids):
            assert all(model.target[0][token] > 0 for token in block)
            if name.startswith("equal") and not point_masses:
                assert len(block) == len(shape) + 1
            if name == "disjoint supports":
                assert len(block) == 1


@by_ratio
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fault_03_half_precision_rows(verifier: Verifier, dtype: torch.dtype) -> None:
    """Rows that do not sum to one, with entries that underflow when multiplied: still a token the target can say."""
    generator = torch.Generator().manual_seed(0)
    batch, vocab_size = 2000, 16
    scale = torch.linspace(1, 24, batch)[:, None]
    target = (torch.randn(batch, vocab_size, generator=generator) * scale).softmax(-1).to(dtype)
    draft = (torch.randn(batch, vocab_size, generator=generator) * scale).softmax(-1).to(dtype)
    noise = KeyedNoise(torch.arange(batch), torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.bool))
    rows = torch.arange(batch)
    drawn = noise.choose(draft, NoiseKey(rows, 1, Stream.DRAFT))
    tree = chain(rows, drawn[:, None], torch.ones_like(rows), draft_probs=draft)
    contexts = rows[:, None].expand(-1, 2)
    result = verifier.verify(tree, TableTarget(target, contexts), noise)
    kept = torch.where(result.num_accepted == 1, drawn, result.next_token_ids)
    assert bool((target.gather(1, kept[:, None]) > 0).all())
    assert bool((target.gather(1, result.next_token_ids[:, None]) > 0).all())


@by_ratio
def test_fault_03_residual_lost_to_rounding(verifier: Verifier) -> None:
    """Target and draft equal up to a factor that rounds: a refusal by one ulp must still find a token."""
    generator = torch.Generator().manual_seed(1)
    batch, vocab_size = 4000, 5
    draft = torch.rand(batch, vocab_size, generator=generator, dtype=torch.float64)
    draft[:, 0] = 0.0
    target = draft * (1 + torch.rand(batch, 1, generator=generator, dtype=torch.float64))
    rows = torch.arange(batch)
    tree = chain(rows, torch.full((batch, 1), 3), torch.ones_like(rows), draft_probs=draft)
    noise = uniform_ends(low=False)
    result = verifier.verify(tree, TableTarget(target, rows[:, None].expand(-1, 2)), noise)
    assert 0 < int(result.num_accepted.sum()) < batch  # the case is really met
    assert bool((result.next_token_ids > 0).all())


@by_ratio
def test_fault_03_many_siblings_do_not_underflow(verifier: Verifier) -> None:
    """Without replacement the draft's mass falls to 2**-75 after the first of twenty refused siblings."""
    num_siblings, tiny = 20, Fraction(1, 2**80)
    target = [Fraction(1, 2), Fraction(1, 2)] + [Fraction(0)] * num_siblings
    draft = [tiny / 64, Fraction(0), Fraction(1)] + [tiny] * (num_siblings - 1)
    siblings = range(2, 2 + num_siblings)
    tree = stack_trees([([0, *siblings], [-1] + [0] * num_siblings)], as_tensor([draft]), [[0] + [-1] * num_siblings])
    noise = ScriptedNoise([()])
    result = verifier.verify(tree, TableTarget(as_tensor([target]), torch.zeros_like(tree.token_ids)), noise)
    for token in siblings:
        left = [max(Fraction(0), p / sum(target) - q / sum(draft)) for p, q in zip(target, draft, strict=True)]
        target, draft = left, [Fraction(0) if i == token else q for i, q in enumerate(draft)]
    assert result.num_accepted.tolist() == [0]
    assert result.next_token_ids.tolist() == [0]
    assert float(noise.probs[0]) == pytest.approx(float(target[0] / sum(target)), rel=1e-9)


@by_ratio
def test_a_child_the_draft_cannot_draw_is_passed_over(verifier: Verifier) -> None:
    """It says nothing about the draft, so it is refused and leaves the target's distribution as it is."""
    draft = [Fraction(1, 2), Fraction(1, 2), Fraction(0), Fraction(0)]
    model = Model([SKEWED] * 4, [draft] * 4)
    for token in (2, 3):  # the target can say 2
        trees = drafts(model, 0, [1], lambda row, n, token=token: [((token,), Fraction(1))])
        assert step_law(verifier, model, trees, replacement=False).blocks == {
            (token,): prob for token, prob in enumerate(SKEWED) if prob
        }


def test_fault_05_acceptance_is_the_overlap_of_both_distributions() -> None:
    for seed in range(20):
        model = random_model(seed, vocab_size=4)
        trees = drafts(model, 0, [1], with_replacement)
        accepted = {}
        for verifier in VERIFIERS:
            law = step_law(verifier, model, trees, replacement=False)
            accepted[verifier.name] = sum((p for block, p in law.blocks.items() if len(block) == 2), Fraction(0))
        pairs = list(zip(model.target[0], model.draft[0], strict=True))
        overlap = sum(map(min, pairs))
        assert accepted == {"rejection": overlap, "traversal": overlap, "match": sum(p * q for p, q in pairs)}


def test_fault_05_a_chain_accepts_what_the_formula_says() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3) and two draft tokens accept 10/9 tokens; here with quarters."""
    target, draft = [Fraction(1, 4), Fraction(3, 4)], [Fraction(3, 4), Fraction(1, 4)]
    model = Model([target] * 2, [draft] * 2)
    law = step_law(RejectionVerifier(), model, drafts(model, 0, [1, 1], with_replacement), replacement=False)
    mean = sum((p * (len(block) - 1) for block, p in law.blocks.items()), Fraction(0))
    overlap = Fraction(1, 2)
    assert mean == overlap + overlap**2


def test_fault_05_a_shared_prefix_is_tried_once() -> None:
    """Each child of a visited node is one acceptance draw, however many paths lead through it."""
    model = random_model(seed=3, vocab_size=3)
    for tree in drafts(model, 0, [2, 2], without_replacement):
        noise = ScriptedNoise([()])
        batch, contexts = to_batch([tree], as_tensor(model.draft), replacement=False)
        RejectionVerifier().verify(batch, TableTarget(as_tensor(model.target), contexts), noise)
        assert noise.num_accept_calls <= 4


@pytest.mark.parametrize("verifier", VERIFIERS, ids=ids)
def test_fault_18_sibling_order_of_point_masses_does_not_matter(verifier: Verifier) -> None:
    """Random trees with every sibling order: the same law of emitted tokens, non-leftmost paths included."""
    model = random_model(seed=9, vocab_size=3, unit=16)
    for shape in ([2], [3], [2, 2]):
        laws = []
        for order in itertools.permutations(range(shape[0])):
            trees = drafts(model, 0, shape, lambda row, n, order=order: [(order, Fraction(1))])
            laws.append(step_law(verifier, model, trees, replacement=False, point_masses=True).blocks)
        assert all(law == laws[0] for law in laws[1:]), shape


def test_fault_18_random_trees_match_whatever_the_order_of_siblings() -> None:
    """With real noise: shuffling siblings and renumbering nodes changes no emitted token."""
    generator = random.Random(0)
    vocab_size = 5
    table = torch.rand(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0))
    for case in range(100):
        size = generator.randint(1, 12)
        parents = [-1] + [generator.randrange(node) for node in range(1, size)]
        tokens = [generator.randrange(vocab_size) for _ in range(size)]
        noise = KeyedNoise(torch.tensor([case] * 2), torch.tensor([5, 5]), torch.tensor([False, False]))
        tree = stack_trees([(tokens, parents), _shuffled(tokens, parents, generator)])
        result = MatchVerifier().verify(tree, TableTarget(table, tree.token_ids), noise)
        first, second = blocks(tree, result.path, result.num_accepted, result.next_token_ids)
        if len({(parent, token) for parent, token in zip(parents, tokens, strict=True)}) == size:  # no duplicates
            assert first == second
        else:  # whichever duplicate is walked, one block begins with the other
            assert first[: len(second)] == second[: len(first)]


def _shuffled(tokens: list[int], parents: list[int], generator: random.Random) -> tuple[list[int], list[int]]:
    """Renumber the nodes at random, parents before children."""
    order = [0]
    waiting = [node for node, parent in enumerate(parents) if parent == 0]
    while waiting:
        node = waiting.pop(generator.randrange(len(waiting)))
        order.append(node)
        waiting += [child for child, parent in enumerate(parents) if parent == node]
    place = {node: i for i, node in enumerate(order)}
    return [tokens[node] for node in order], [-1 if parents[node] < 0 else place[parents[node]] for node in order]


def test_fault_18_a_path_that_is_not_the_leftmost_one() -> None:
    # 0 -> 1 (7), 2 (8); 1 -> 3 (5); 2 -> 4 (5), 5 (6); 5 -> 6 (1)
    tree = stack_trees([([9, 7, 8, 5, 5, 6, 1], [-1, 0, 0, 1, 2, 2, 5])])
    table = torch.zeros(10, 10)
    for after, token in ((9, 8), (8, 6), (6, 1), (1, 3), (7, 0), (5, 0)):
        table[after, token] = 1.0
    for verifier in VERIFIERS:
        result = verifier.verify(tree, TableTarget(table, tree.token_ids), uniform_ends(low=True))
        assert result.path.tolist() == [[2, 5, 6]]
        assert result.num_accepted.tolist() == [3]
        assert result.next_token_ids.tolist() == [3]


@pytest.mark.parametrize("verifier", VERIFIERS, ids=ids)
def test_rows_of_a_ragged_batch_do_not_touch_each_other(verifier: Verifier) -> None:
    """Every row of a mixed batch keeps the path it keeps alone."""
    model = random_model(seed=12, vocab_size=3)
    trees = [t for shape in ([], [1], [2, 1], [1, 1, 1]) for t in drafts(model, 1, shape, without_replacement)][::7]
    seeds = torch.arange(len(trees))
    batch, contexts = to_batch(trees, as_tensor(model.draft), replacement=False)

    def noise(rows: torch.Tensor) -> KeyedNoise:
        return KeyedNoise(seeds[rows], seeds[rows] * 3, torch.zeros_like(rows, dtype=torch.bool))

    target = as_tensor(model.target)
    together = verifier.verify(batch, TableTarget(target, contexts), noise(seeds))
    block_of_row = list(blocks(batch, together.path, together.num_accepted, together.next_token_ids))
    assert {len(block) for block in block_of_row} >= {1, 2}
    for row, tree in enumerate(trees):
        alone, alone_contexts = to_batch([tree], as_tensor(model.draft), replacement=False)
        result = verifier.verify(alone, TableTarget(target, alone_contexts), noise(seeds[row : row + 1]))
        assert next(blocks(alone, result.path, result.num_accepted, result.next_token_ids)) == block_of_row[row]


@pytest.mark.parametrize("verifier", VERIFIERS, ids=ids)
def test_no_draft_is_plain_decoding(verifier: Verifier) -> None:
    model = random_model(seed=20, vocab_size=4)
    assert speculative_law(verifier, model, [], with_replacement) == target_law(model, 0, 3)
    noise = KeyedNoise(torch.arange(50), torch.arange(50), torch.zeros(50, dtype=torch.bool))
    tree, contexts = to_batch(drafts(model, 0, [], with_replacement) * 50, None, replacement=False)
    result = verifier.verify(tree, TableTarget(as_tensor(model.target), contexts), noise)
    plain = noise.choose(as_tensor(model.target)[[0] * 50], NoiseKey(torch.arange(50), 1, Stream.TOKEN))
    assert torch.equal(result.next_token_ids, plain)
    assert result.path.shape == (50, 0)


def test_greedy_match_asks_only_for_the_argmax() -> None:
    model = random_model(seed=21, vocab_size=4)
    trees = drafts(model, 0, [2, 2], most_likely)
    batch, contexts = to_batch(trees, None, replacement=False)
    result = MatchVerifier().verify(batch, TableTarget(as_tensor(model.target), contexts, greedy=True), _NoNoise())
    best = {context: max(range(4), key=lambda t: (model.target[context][t], -t)) for context in range(4)}
    expected, context = [], 0
    block = next(blocks(batch, result.path, result.num_accepted, result.next_token_ids))
    for _ in block:
        expected.append(best[context])
        context = expected[-1]
    assert list(block) == expected


class _NoNoise:
    def accept(self, num: torch.Tensor, den: torch.Tensor, key: NoiseKey) -> torch.Tensor:
        raise AssertionError("greedy matching needs no noise")

    choose = accept


def test_the_enumeration_sees_a_small_bias() -> None:
    """The comparison has power: a target that differs by 1/64 in one context has another law."""
    model = random_model(seed=1, vocab_size=3, unit=64)
    rows = [list(row) for row in model.target]
    i, j = sorted(range(3), key=lambda token: -rows[2][token])[:2]
    rows[2][i] -= Fraction(1, 64)
    rows[2][j] += Fraction(1, 64)
    other = Model(rows, model.draft)
    assert 0 < total_variation(target_law(model, 0, 5), target_law(other, 0, 5)) < Fraction(1, 10)

"""Exact laws of speculative decoding: every draft, every acceptance and every draw is a branch with a Fraction weight.

A verifier meets randomness only through `Noise.accept` and `Noise.choose`, so a noise that follows a script replays
it along one branch, and the calls beyond the script say which branches there are. Inputs are dyadic, which float64
products and sums hold exactly, so the weights are exact and laws are compared with `==`.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from specdec.interfaces import Noise, NoiseKey, Stream, TokenTree, Verifier
from specdec.noise import KeyedNoise
from specdec.tree import select, stack_trees

Law = dict[tuple[int, ...], Fraction]
Row = Sequence[Fraction]
Drawing = Callable[[Row, int], list[tuple[tuple[int, ...], Fraction]]]


@dataclass(frozen=True)
class Model:
    """Target and draft distributions after the last `order` tokens; a context is those tokens as a base-V number."""

    target: list[list[Fraction]]
    draft: list[list[Fraction]]
    order: int = 1

    @property
    def vocab_size(self) -> int:
        return len(self.target[0])

    def following(self, context: int, token: int) -> int:
        return (context * self.vocab_size + token) % self.vocab_size**self.order


def as_tensor(rows: list[list[Fraction]]) -> Tensor:
    """Return [C, V] float32 and make sure that it is exact."""
    values = torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float32)
    assert [[Fraction(x) for x in row] for row in values.tolist()] == rows, "not dyadic"
    return values


def random_row(generator: random.Random, size: int, unit: int) -> list[Fraction]:
    """Return `size` multiples of 1 / unit that sum to 1; zeros are common."""
    cuts = sorted(generator.randint(0, unit) for _ in range(size - 1))
    return [Fraction(b - a, unit) for a, b in itertools.pairwise([0, *cuts, unit])]


def random_model(seed: int, vocab_size: int, order: int = 1, unit: int = 8) -> Model:
    generator = random.Random(seed)
    contexts = range(vocab_size**order)

    def rows() -> list[list[Fraction]]:
        return [random_row(generator, vocab_size, unit) for _ in contexts]

    return Model(rows(), rows(), order)


# Drafting: how n siblings are drawn from a row, with the probability of every outcome.


def with_replacement(row: Row, n: int) -> list[tuple[tuple[int, ...], Fraction]]:
    support = [token for token, weight in enumerate(row) if weight]
    drawn = itertools.product(support, repeat=n)
    return [(tokens, _product(row[token] for token in tokens)) for tokens in drawn]


def without_replacement(row: Row, n: int) -> list[tuple[tuple[int, ...], Fraction]]:
    """Draw until n tokens or the whole support is drawn."""
    total = sum(row)
    if n == 0 or total == 0:
        return [((), Fraction(1))]
    outcomes = []
    for token, weight in enumerate(row):
        if weight:
            rest = [Fraction(0) if other == token else w for other, w in enumerate(row)]
            outcomes += [((token, *more), weight / total * p) for more, p in without_replacement(rest, n - 1)]
    return outcomes


def most_likely(row: Row, n: int) -> list[tuple[tuple[int, ...], Fraction]]:
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    return [(tuple(order[:n]), Fraction(1))]


def twice_the_same(row: Row, n: int) -> list[tuple[tuple[int, ...], Fraction]]:
    """Deterministic siblings of which every second repeats the first."""
    best, second = most_likely(row, 2)[0][0]
    return [((*(best if i % 2 == 0 else second for i in range(n - 1)), best), Fraction(1))]


@dataclass(frozen=True)
class Draft:
    """One possible draft tree of one request."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    contexts: tuple[int, ...]
    sampled: tuple[bool, ...]  # whether the node's children were drawn from its context's draft row
    prob: Fraction


def drafts(
    model: Model,
    context: int,
    shape: Sequence[int],
    drawing: Drawing,
    is_sampled: Callable[[int], bool] = lambda depth: True,
    draft: list[list[Fraction]] | None = None,
) -> list[Draft]:
    """Enumerate the drafts of one step.

    Args:
        model: the distributions.
        context: of the root.
        shape: number of children of every node at depth 0, 1, ...; a chain of K is [1] * K.
        drawing: how the siblings of nodes with `is_sampled(depth)` are drawn; others get their most likely tokens.
        is_sampled: whether the children of nodes at that depth carry draft probabilities.
        draft: the rows drawn from, if they are not the model's.
    """
    rows = model.draft if draft is None else draft
    result = [Draft((context % model.vocab_size,), (-1,), (context,), (False,), Fraction(1))]
    for depth, width in enumerate(shape):
        draw = drawing if is_sampled(depth) else most_likely
        grown = []
        for tree in result:
            level = [node for node in range(len(tree.parents)) if _depth(tree, node) == depth]
            options = [draw(rows[tree.contexts[node]], width) for node in level]
            for choice in itertools.product(*options):
                grown.append(_grow(model, tree, level, choice, is_sampled(depth)))
        result = grown
    return result


def _depth(tree: Draft, node: int) -> int:
    return 0 if node == 0 else 1 + _depth(tree, tree.parents[node])


def _grow(
    model: Model, tree: Draft, level: list[int], choice: Iterable[tuple[tuple[int, ...], Fraction]], sampled: bool
) -> Draft:
    for node, (tokens, prob) in zip(level, choice, strict=True):
        tree = replace(
            tree,
            token_ids=tree.token_ids + tokens,
            parents=tree.parents + (node,) * len(tokens),
            contexts=tree.contexts + tuple(model.following(tree.contexts[node], token) for token in tokens),
            sampled=tuple(sampled if i == node else s for i, s in enumerate(tree.sampled)) + (False,) * len(tokens),
            prob=tree.prob * prob,
        )
    return tree


def _product(values: Iterable[Fraction]) -> Fraction:
    result = Fraction(1)
    for value in values:
        result *= value
    return result


class ScriptedNoise:
    """One branch per row: the outcomes in `scripts` first, then the first possible one; the others become `forks`."""

    def __init__(self, scripts: Sequence[tuple[int, ...]]) -> None:
        self.taken: list[tuple[int, ...]] = [() for _ in scripts]
        self.probs = [Fraction(1) for _ in scripts]
        self.forks: list[tuple[int, tuple[int, ...]]] = []
        self.last_offset = [0 for _ in scripts]
        self.num_accept_calls = 0
        self._scripts = scripts
        self._keys: list[set[tuple[int, int, int]]] = [set() for _ in scripts]

    def accept(self, num: Tensor, den: Tensor, key: NoiseKey) -> Tensor:
        assert num.dtype == den.dtype == torch.float64
        self.num_accept_calls += num.shape[0]
        result = [
            self._branch(row, [(True, p), (False, 1 - p)])
            for row, p in zip(self._rows(key), map(_accept_prob, num.tolist(), den.tolist()), strict=True)
        ]
        return torch.tensor(result, dtype=torch.bool)

    def choose(self, weights: Tensor, key: NoiseKey) -> Tensor:
        result = []
        for row, values in zip(self._rows(key), weights.tolist(), strict=True):
            exact = [Fraction(value) for value in values]
            total = sum(exact)
            assert total > 0
            result.append(self._branch(row, [(token, weight / total) for token, weight in enumerate(exact)]))
        return torch.tensor(result, dtype=torch.int64)

    def _branch(self, row: int, outcomes: list[tuple[Any, Fraction]]) -> Any:
        possible = [(value, prob) for value, prob in outcomes if prob]
        script, taken = self._scripts[row], self.taken[row]
        if len(taken) < len(script):
            index = script[len(taken)]
        else:
            index = 0
            self.forks += [(row, (*taken, other)) for other in range(1, len(possible))]
        self.taken[row] = (*taken, index)
        value, prob = possible[index]
        self.probs[row] *= prob
        return value

    def _rows(self, key: NoiseKey) -> list[int]:
        """Return the rows and make sure that no row asks for one draw twice."""
        rows = key.rows.tolist()
        offsets, indices = ([v] * len(rows) if isinstance(v, int) else v.tolist() for v in (key.offset, key.index))
        for row, offset, index in zip(rows, offsets, indices, strict=True):
            name = (offset, int(key.stream), index)
            assert name not in self._keys[row], f"drawn twice: {name}"
            self._keys[row].add(name)
            self.last_offset[row] = max(self.last_offset[row], offset)
        return rows


def _accept_prob(num: float, den: float) -> Fraction:
    """Return the probability of u * den < num."""
    if den == 0:
        return Fraction(int(num > 0))
    return min(Fraction(1), max(Fraction(0), Fraction(num) / Fraction(den)))


class TableTarget:
    """TargetRows over a table [C, V] and the context [B, M] of every node."""

    def __init__(self, table: Tensor, contexts: Tensor, greedy: bool = False) -> None:
        self.table, self.contexts, self.greedy = table, contexts, greedy

    def probs(self, rows: Tensor, nodes: Tensor) -> Tensor:
        return self.table[self.contexts[rows, nodes]]

    def top(self, rows: Tensor, nodes: Tensor) -> Tensor | None:
        return self.probs(rows, nodes).argmax(dim=-1) if self.greedy else None


def to_batch(trees: Sequence[Draft], claimed: Tensor | None, replacement: bool) -> tuple[TokenTree, Tensor]:
    """Return one TokenTree with a row per draft, and the context [B, M] of every node."""
    rows = [[c if s else -1 for c, s in zip(t.contexts, t.sampled, strict=True)] for t in trees]
    tree = stack_trees(
        [(t.token_ids, t.parents) for t in trees],
        draft_probs=claimed,
        draft_rows=None if claimed is None else rows,
        with_replacement=replacement,
    )
    contexts = torch.zeros_like(tree.token_ids)
    for row, t in enumerate(trees):
        contexts[row, : len(t.contexts)] = torch.tensor(t.contexts)
    return tree, contexts


@dataclass
class StepLaw:
    """The law of the tokens one step emits, from one context."""

    blocks: Law = field(default_factory=lambda: defaultdict(Fraction))
    num_branches: int = 0
    num_accept_calls: int = 0


def step_law(
    verifier: Verifier,
    model: Model,
    trees: Sequence[Draft],
    replacement: bool,
    claimed: list[list[Fraction]] | None = None,
    point_masses: bool = False,
) -> StepLaw:
    """Run a verifier over every branch of every draft.

    Args:
        verifier: the rule under test.
        model: the distributions; all `trees` have the same root context.
        trees: every draft of the step, weights summing to 1.
        replacement: what the tree says about its siblings.
        claimed: the draft distributions the tree carries, if they are not the model's.
        point_masses: the tree carries no draft distributions.
    """
    table = None if point_masses else as_tensor(model.draft if claimed is None else claimed)
    everything, contexts = to_batch(trees, table, replacement)
    target = as_tensor(model.target)
    law = StepLaw()
    frontier: list[tuple[int, tuple[int, ...]]] = [(row, ()) for row in range(len(trees))]
    while frontier:
        rows = [row for row, _ in frontier]
        noise = ScriptedNoise([script for _, script in frontier])
        tree = select(everything, rows)
        result = verifier.verify(tree, TableTarget(target, contexts[rows]), noise)
        for i, block in enumerate(blocks(tree, result.path, result.num_accepted, result.next_token_ids)):
            # Draws at or before the last emitted token belong to this step alone, so steps are independent.
            assert noise.last_offset[i] <= len(block)
            law.blocks[block] += trees[rows[i]].prob * noise.probs[i]
        law.num_branches += len(frontier)
        law.num_accept_calls += noise.num_accept_calls
        frontier = [(rows[i], script) for i, script in noise.forks]
    return law


def blocks(tree: TokenTree, path: Tensor, num_accepted: Tensor, next_ids: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield the tokens each row emits, and make sure that each path is a root path."""
    for i, (row, count, last) in enumerate(zip(path.tolist(), num_accepted.tolist(), next_ids.tolist(), strict=True)):
        nodes, padding = row[:count], row[count:]
        assert all(node == -1 for node in padding)
        assert [int(tree.parents[i, node]) for node in nodes] == [0, *nodes][:count]
        assert all(0 < node < int(tree.num_nodes[i]) for node in nodes)
        yield (*(int(tree.token_ids[i, node]) for node in nodes), last)


def joint_law(model: Model, step: Callable[[int], Law], context: int, length: int) -> Law:
    """Return the law of the first `length` tokens over as many steps as they take.

    Args:
        model: says which context follows which.
        step: the law of one step's tokens from a context.
        context: of the root of the first step.
        length: number of tokens; one step emits at most depth + 1 of them.
    """
    known: dict[tuple[int, int], Law] = {}
    steps: dict[int, Law] = {}

    def law(context: int, length: int) -> Law:
        if length <= 0:
            return {(): Fraction(1)}
        if (context, length) not in known:
            result: Law = defaultdict(Fraction)
            if context not in steps:
                steps[context] = step(context)
            for block, prob in steps[context].items():
                after = context
                for token in block:
                    after = model.following(after, token)
                for more, more_prob in law(after, length - len(block)).items():
                    result[(block + more)[:length]] += prob * more_prob
            known[context, length] = result
        return known[context, length]

    return _nonzero(law(context, length))


def target_law(model: Model, context: int, length: int) -> Law:
    """Return the law of the first `length` tokens of plain decoding."""
    return joint_law(model, lambda at: {(t,): p for t, p in enumerate(model.target[at]) if p}, context, length)


def total_variation(law: Law, other: Law) -> Fraction:
    return sum((abs(law.get(k, Fraction(0)) - other.get(k, Fraction(0))) for k in {*law, *other}), Fraction(0)) / 2


def _nonzero(law: Law) -> Law:
    return {tokens: prob for tokens, prob in law.items() if prob}


def chi_square_p(observed: Tensor, expected: Tensor) -> float:
    """Return the p-value of counts [n] against expected counts [n]; cells below 5 are pooled.

    An observation where nothing is expected has p-value 0.
    """
    observed, expected = observed.double(), expected.double()
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    large = expected >= 5
    observed = torch.cat([observed[large], observed[~large].sum().reshape(1)])
    expected = torch.cat([expected[large], expected[~large].sum().reshape(1)])
    observed, expected = observed[expected > 0], expected[expected > 0]
    if expected.numel() < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((expected.numel() - 1) / 2).double(), statistic / 2))


@dataclass
class Run:
    """The first tokens of a batch of requests, and how many draft tokens were accepted in their first step."""

    tokens: Tensor  # [B, length]
    first_accepted: Tensor  # [B]


def sample_tokens(
    verifier: Verifier,
    target: Tensor,
    draft: Tensor,
    shape: Sequence[int] = (1, 1),
    coupled: bool = False,
    batch: int = 200_000,
    length: int = 3,
    wrap: Callable[[KeyedNoise], Noise] = lambda noise: noise,
    claimed: Tensor | None = None,
) -> Run:
    """Generate with the real noise, `batch` requests at once, seeds 0, 1, ..., every one from root token 0.

    Args:
        verifier: the rule.
        target: [V, V] distribution after each token.
        draft: [V, V] the distributions drafts are drawn from, siblings without replacement.
        shape: children per node at each depth.
        coupled: whether drafts read the target's noise.
        batch: number of requests.
        length: number of tokens of each.
        wrap: replaces the noise of a step.
        claimed: the draft distributions the tree carries, if they are not `draft`.
    """
    depth = len(shape)
    tokens = torch.zeros(batch, length + depth + 1, dtype=torch.int64)
    count = torch.zeros(batch, dtype=torch.int64)
    first_accepted = None
    while bool((count < length).any()):
        live = (count < length).nonzero()[:, 0]
        root = torch.where(count[live] > 0, tokens[live, count[live] - 1], 0)
        noise = wrap(KeyedNoise(live, count[live], torch.full_like(live, coupled, dtype=torch.bool)))
        tree = draw_tree(noise, root, draft, shape, draft if claimed is None else claimed)
        result = verifier.verify(tree, TableTarget(target, tree.token_ids), noise)
        emitted = tree.token_ids.gather(1, result.path.clamp_min(0))
        emitted = torch.cat([emitted, emitted[:, :1] * 0], dim=1) if emitted.shape[1] else root[:, None] * 0
        emitted.scatter_(1, result.num_accepted[:, None], result.next_token_ids[:, None])
        columns = torch.arange(emitted.shape[1])
        kept = columns <= result.num_accepted[:, None]
        where = (count[live][:, None] + columns)[kept]
        tokens[live[:, None].expand_as(kept)[kept], where] = emitted[kept]
        count[live] += result.num_accepted + 1
        first_accepted = result.num_accepted if first_accepted is None else first_accepted
    assert first_accepted is not None
    return Run(tokens[:, :length], first_accepted)


def draw_tree(noise: Noise, root: Tensor, draft: Tensor, shape: Sequence[int], claimed: Tensor) -> TokenTree:
    """Draw one tree of the given shape per row as a drafter does; a node's draft row is its own token."""
    rows = torch.arange(root.shape[0])
    tokens, parents, level = [root], [-1], [0]
    for depth, width in enumerate(shape):
        next_level = []
        for place, node in enumerate(level):
            weights = draft[tokens[node]].clone()
            for ordinal in range(width):
                key = NoiseKey(rows, depth + 1, Stream.DRAFT, place * width + ordinal)
                tokens.append(noise.choose(weights, key))
                parents.append(node)
                next_level.append(len(parents) - 1)
                weights.scatter_(1, tokens[-1][:, None], 0.0)
        level = next_level
    token_ids = torch.stack(tokens, dim=1)
    return TokenTree(
        token_ids=token_ids,
        parents=torch.tensor(parents).expand_as(token_ids),
        num_nodes=torch.full_like(root, len(parents)),
        draft_probs=claimed,
        draft_row=token_ids,
    )


def sequences_p_value(tokens: Tensor, target: Tensor) -> float:
    """Return the chi-square p-value of [B, n] tokens against plain decoding from token 0 with [V, V] `target`."""
    vocab_size = target.shape[0]
    target = target.double() / target.double().sum(dim=1, keepdim=True)
    cells = torch.zeros_like(tokens[:, 0])
    expected = torch.full((1,), float(tokens.shape[0]), dtype=torch.float64)
    last = torch.zeros(1, dtype=torch.int64)
    for column in range(tokens.shape[1]):
        cells = cells * vocab_size + tokens[:, column]
        expected = (expected[:, None] * target[last]).reshape(-1)
        last = torch.arange(vocab_size).repeat(last.shape[0])
    return chi_square_p(torch.bincount(cells, minlength=expected.shape[0]), expected)


def uniform_ends(low: bool) -> Noise:
    """Return a noise whose every uniform is the smallest or the largest one in [0, 1)."""
    return _EndNoise(0.0 if low else 1.0 - 2.0**-53)


class _EndNoise:
    def __init__(self, uniform: float) -> None:
        self.uniform = uniform

    def accept(self, num: Tensor, den: Tensor, key: NoiseKey) -> Tensor:
        return self.uniform * den < num

    def choose(self, weights: Tensor, key: NoiseKey) -> Tensor:
        """Choose the first positive weight for the low end, the last one for the high end."""
        positive = weights > 0
        assert bool(positive.any(dim=1).all())
        ids = torch.arange(weights.shape[1])
        if self.uniform == 0.0:
            return torch.where(positive, ids, weights.shape[1]).amin(dim=1)
        return torch.where(positive, ids, -1).amax(dim=1)

"""A comparison of a program with the unmodified model, before anything is generated.

Two sizes. `SHORT` runs on the real weights whenever a runner is built: its 11 tokens cross no real sliding window and
half precision hides small faults, so it only shows that these weights run and that nothing is grossly wrong. `LONG`
runs on a shrunk float32 instance of the architecture (`models/probe.py`), whose windows it crosses in prefill, in a
tree and after it; that is what shows that the architecture is run exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.interfaces import FeatureSpec, Segment
from specdec.kv.cache import KVCache
from specdec.models.runner import Program

# Largest allowed |difference| of logits over the largest |logit|. Models compute norms and softmax in float32
# whatever their dtype, so float64 is not held tighter than that; half precision rounds every layer.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float16: 0.05}
# A program of our own must come closer in half precision than the model's own code over another attention kernel
# may: what the unmodified model's rounding makes of one unit in the last place.
LEAN_TOLERANCE = {**TOLERANCE, torch.bfloat16: 0.03, torch.float16: 0.005}


@dataclass(frozen=True, slots=True)
class Trial:
    """What is run: a prefix in two chunks and a tree for one request, a ragged second request beside both."""

    prefix: int  # committed tokens of the first request
    chunk: int  # how many of them the first prefill chunk holds
    other: int  # tokens of the second request that are prefilled beside the second chunk
    beside: int  # further ones that run beside the tree
    parents: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]  # root paths to all leaves, of one length; the last one is committed

    @property
    def num_positions(self) -> int:
        """Positions the first request takes: prefix, the committed path and one more token."""
        return self.prefix + len(self.paths[-1]) + 1

    @property
    def depth(self) -> int:
        return len(self.paths[-1])


# A tree of a root, two children and one child each.
SHORT = Trial(7, 4, 5, 0, (-1, 0, 0, 1, 2), ((0, 1, 3), (0, 2, 4)))
# One more leaf; the second request is shorter than the first and longer than a window of 8.
LONG = Trial(21, 13, 10, 3, (-1, 0, 0, 1, 2, 2), ((0, 1, 3), (0, 2, 4), (0, 2, 5)))


@dataclass(frozen=True, slots=True)
class Reference:
    """What the unmodified model says about the tokens of a trial; n = `trial.num_positions`, P paths."""

    trial: Trial
    prefix: Tensor  # [trial.prefix]
    nodes: Tensor  # [len(trial.parents)]
    last: Tensor  # [1]
    other: Tensor  # [trial.other + trial.beside]
    logits: Tensor  # [P, n, V] along prefix, path, last
    other_logits: Tensor  # [len(other), V]

    @property
    def vocab_size(self) -> int:
        return int(self.logits.shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        return self.logits.dtype

    def is_broken(self) -> bool:
        """Tell whether the model itself gives NaN or +inf; -inf may stand at padding ids."""
        both = (self.logits, self.other_logits)
        return any(bool((t.isnan() | t.isposinf()).any()) for t in both)

    def node_logits(self) -> Tensor:
        """Return [len(nodes), V]: each tree node's logits, read along a path that holds it."""
        rows = []
        for node in range(len(self.trial.parents)):
            path, at = next((p, r.index(node)) for p, r in enumerate(self.trial.paths) if node in r)
            rows.append(self.logits[path, self.trial.prefix + at])
        return torch.stack(rows)


def take_reference(
    forward: Callable[[Tensor], Tensor], vocab_size: int, device: torch.device, trial: Trial = SHORT, seed: int = 0
) -> Reference:
    """Run the unmodified model's `forward` ([B, n] ids -> [B, n, V] logits) on fixed pseudo-random tokens."""
    sizes = [trial.prefix, len(trial.parents), 1, trial.other + trial.beside]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (sum(sizes),), generator=generator).to(device)
    prefix, nodes, last, other = ids.split(sizes)
    logits = forward(torch.stack([torch.cat([prefix, nodes[list(path)], last]) for path in trial.paths]))
    return Reference(trial, prefix, nodes, last, other, logits, forward(other[None])[0])


def compare(program: Program, reference: Reference, *, trees: bool = True) -> float:
    """Return the largest |difference| over the largest |logit| between a program and the reference.

    Runs chunked prefill, a ragged packed forward, a tree (or its last path as a chain) beside another request's
    rows, the commit of a path that is not leftmost, and one more token.
    """
    trial, cache = reference.trial, KVCache()
    committed = reference.logits[-1]
    got, want = [], []

    def run(expected: Tensor, *rows: tuple[int, Tensor, tuple[int, ...] | None]) -> None:
        for request_id, ids, _ in rows:
            cache.reserve(request_id, len(ids))
        segments = [
            Segment(i, ids, None if parents is None else torch.tensor(parents), torch.arange(len(ids)))
            for i, ids, parents in rows
        ]
        plan = cache.plan(segments, reference.prefix.device)
        with torch.inference_mode():
            got.append(program(cache, plan, torch.cat([ids for _, ids, _ in rows]), None, FeatureSpec())[0])
        want.append(expected)

    def keep(request_id: int, rows: tuple[int, ...] | range) -> None:
        cache.commit(request_id, torch.tensor(list(rows)))

    for request_id, n in ((0, trial.num_positions + len(trial.parents)), (1, len(reference.other))):
        cache.open(request_id, n)
    head, tail = reference.prefix[: trial.chunk], reference.prefix[trial.chunk :]
    other, beside = reference.other[: trial.other], reference.other[trial.other :]
    run(committed[: trial.chunk], (0, head, None))
    keep(0, range(trial.chunk))
    run(
        torch.cat([committed[trial.chunk : trial.prefix], reference.other_logits[: trial.other]]),
        (0, tail, None),
        (1, other, None),
    )
    keep(0, range(len(tail)))
    keep(1, range(len(other)))
    path = trial.paths[-1]
    rows: tuple[int, Tensor, tuple[int, ...] | None] = (0, reference.nodes[list(path)], None)
    expected = committed[trial.prefix : trial.prefix + trial.depth]
    if trees:
        rows = (0, reference.nodes, trial.parents)
        expected = reference.node_logits()
    second = ((1, beside, None),) if trial.beside else ()
    run(torch.cat([expected, reference.other_logits[trial.other :]]), rows, *second)
    keep(0, path if trees else range(trial.depth))
    run(committed[-1:], (0, reference.last, None))
    return _distance(torch.cat(got), torch.cat(want))


def _distance(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.double(), theirs.double()
    difference = torch.where(ours == theirs, 0.0, ours - theirs).abs().max()  # -inf may stand at padding ids
    scale = theirs.masked_fill(theirs.isinf(), 0.0).abs().max().clamp_min(1e-6)
    return float(difference / scale)


def conforms(program: Program, reference: Reference, *, trees: bool = True) -> bool:
    """Tell whether `compare` stays within the tolerance of the model's dtype; NaN does not."""
    return compare(program, reference, trees=trees) <= TOLERANCE[reference.dtype]

"""A short comparison of a program with the unmodified model, on the real weights, before anything is generated."""

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

# A committed prefix of 7 tokens, then a tree: root, two children, one child each; then one more token.
PREFIX = 7
PARENTS = (-1, 0, 0, 1, 2)
LEFT, RIGHT = (0, 1, 3), (0, 2, 4)
PROBE_TOKENS = PREFIX + len(LEFT) + 1


@dataclass(frozen=True, slots=True)
class Reference:
    """What the unmodified model says about the probe tokens."""

    prefix: Tensor  # [7]
    nodes: Tensor  # [5]
    last: Tensor  # [1]
    other: Tensor  # [5], a second, shorter request
    left: Tensor  # [7 + 3 + 1, V] logits along prefix, LEFT path, last
    right: Tensor  # the same along RIGHT
    other_logits: Tensor  # [5, V]

    @property
    def vocab_size(self) -> int:
        return int(self.left.shape[-1])


def take_reference(forward: Callable[[Tensor], Tensor], vocab_size: int, device: torch.device) -> Reference:
    """Run the unmodified model's `forward` ([B, n] ids -> [B, n, V] logits) on fixed pseudo-random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (PREFIX + len(PARENTS) + 6,), generator=generator).to(device)
    prefix, nodes, last, other = ids.split([PREFIX, len(PARENTS), 1, 5])
    paths = torch.stack([torch.cat([prefix, nodes[list(p)], last]) for p in (LEFT, RIGHT)])
    left, right = forward(paths).unbind(0)
    return Reference(prefix, nodes, last, other, left, right, forward(other[None])[0])


def _rows(n: int) -> Tensor:
    return torch.arange(n)


def compare(program: Program, reference: Reference, *, trees: bool = True) -> float:
    """Return the largest |difference| over the largest |logit| between a program and the reference.

    Runs chunked prefill, a ragged packed forward, a tree (or its right path as a chain), the commit of a path
    that is not leftmost, and one more token.
    """
    cache = KVCache()
    device = reference.prefix.device
    spec = FeatureSpec()

    def run(*segments: Segment) -> Tensor:
        plan = cache.plan(segments, device)
        ids = torch.cat([s.token_ids for s in segments])
        with torch.inference_mode():
            return program(cache, plan, ids, None, spec)[0]

    for request_id, n in ((0, 16), (1, 8)):
        cache.open(request_id, n)
    cache.reserve(0, 4)
    got = [run(Segment(0, reference.prefix[:4], None, _rows(4)))]
    cache.commit(0, _rows(4))
    cache.reserve(0, 3)
    cache.reserve(1, 5)
    packed = run(Segment(0, reference.prefix[4:], None, _rows(3)), Segment(1, reference.other, None, _rows(5)))
    cache.commit(0, _rows(3))
    got += [packed[:3], packed[3:]]
    want = [reference.right[:4], reference.right[4:PREFIX], reference.other_logits]
    cache.reserve(0, len(PARENTS))
    if trees:
        got.append(run(Segment(0, reference.nodes, torch.tensor(PARENTS), _rows(len(PARENTS)))))
        depth = [PREFIX, PREFIX + 1, PREFIX + 1, PREFIX + 2, PREFIX + 2]
        source = [reference.left if i in LEFT else reference.right for i in range(len(PARENTS))]
        want.append(torch.stack([s[d] for s, d in zip(source, depth, strict=True)]))
        cache.commit(0, torch.tensor(RIGHT))
    else:
        got.append(run(Segment(0, reference.nodes[list(RIGHT)], None, _rows(3))))
        want.append(reference.right[PREFIX : PREFIX + 3])
        cache.commit(0, _rows(3))
    cache.reserve(0, 1)
    got.append(run(Segment(0, reference.last, None, _rows(1))))
    want.append(reference.right[-1:])
    ours, theirs = torch.cat(got).double(), torch.cat(want).double()
    difference = torch.where(ours == theirs, 0.0, ours - theirs).abs().max()  # -inf may stand at padding ids
    scale = theirs.masked_fill(theirs.isinf(), 0.0).abs().max().clamp_min(1e-6)
    return float(difference / scale)


def conforms(program: Program, reference: Reference, *, trees: bool = True) -> bool:
    """Tell whether `compare` stays within the tolerance of the model's dtype; NaN does not."""
    return compare(program, reference, trees=trees) <= TOLERANCE[reference.left.dtype]

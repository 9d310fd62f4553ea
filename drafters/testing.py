"""Drafters for tests and measurements: of a chosen acceptance, always wrong, scripted, random.

The first three learn what the target will say by running it, over its own KV cache, so they work for any prompt
and cost at least as much as they save.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.drafters.autoregression import draw
from specdec.errors import ConfigError
from specdec.interfaces import (
    DrafterContext,
    DraftRequest,
    FeatureSpec,
    Noise,
    NoiseKey,
    Observation,
    Segment,
    Stream,
    TokenTree,
)
from specdec.tree import stack_trees

# Apart from the sibling ordinals that verifiers use in the same stream.
_COIN, _PLACE = 1 << 30, 1 << 31


class _TargetDrafter:
    """A chain (or a comb of siblings) around the tokens that the target itself will choose."""

    features = FeatureSpec()
    max_position: int | None = None
    shares_target_kv = True
    samples = False

    def __init__(self, context: DrafterContext, width: int = 1) -> None:
        if not isinstance(width, int) or width < 1:
            raise ConfigError(f"width={width}; allowed: at least 1 sibling per depth")
        self._runner, self._vocab_size, self._width = context.runner, context.vocab_size, width
        self.target_cache = context.runner.cache

    def _num_right(self, request: DraftRequest, row: int, depth: int, noise: Noise) -> int:
        """Return how many of `depth` drafted tokens should be accepted: here, all."""
        return depth

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        trees = [self._draft_one(request, row, requests, noise) for row, request in enumerate(requests)]
        return stack_trees(trees)

    def _draft_one(
        self, request: DraftRequest, row: int, requests: Sequence[DraftRequest], noise: Noise
    ) -> tuple[list[int], list[int]]:
        depth = request.max_draft_tokens // self._width
        right = min(self._num_right(request, row, depth, noise), depth)
        token_ids, parents, parent = [request.root_token_id], [-1], 0
        last = request.root_token_id
        for level in range(depth):
            if level <= right:
                true, wrong = self._truth(request, row, requests, noise, last, level)
            level_ids = [(wrong + i) % self._vocab_size for i in range(self._width)]
            level_ids = [t if t != true else (wrong + self._width) % self._vocab_size for t in level_ids]
            place = self._place(row, level, noise)
            if level < right:
                level_ids[place] = true
            first = len(token_ids)
            token_ids += level_ids
            parents += [parent] * self._width
            parent = first + place
            last = level_ids[place]
        return token_ids, parents

    def _truth(
        self, request: DraftRequest, row: int, requests: Sequence[DraftRequest], noise: Noise, last: int, level: int
    ) -> tuple[int, int]:
        """Return the target's own next token and its least likely one, after one more token of the true path."""
        segment = Segment(request.request_id, torch.tensor([last]), None, torch.tensor([0]))
        logits = self._runner.forward([segment]).logits
        tokens, _ = draw(logits, requests, [row], level, noise)
        return int(tokens[0]), int(logits[0].argmin())

    def _place(self, row: int, level: int, noise: Noise) -> int:
        if self._width == 1:
            return 0
        key = NoiseKey(torch.tensor([row]), level + 1, Stream.ACCEPT, _PLACE)
        return int(noise.choose(torch.ones(1, self._width), key)[0])

    def observe(self, seen: Sequence[Observation]) -> None: ...

    def release(self, request_id: int) -> None: ...

    def reset(self) -> None: ...


class OracleDrafter(_TargetDrafter):
    """Each draft token is the target's own with probability `accept_rate`; `width` siblings per depth."""

    name = "oracle"

    def __init__(self, context: DrafterContext, accept_rate: float = 1.0, width: int = 1) -> None:
        super().__init__(context, width)
        if not 0.0 <= accept_rate <= 1.0:
            raise ConfigError(f"accept_rate={accept_rate}; allowed: 0 to 1")
        self.accept_rate = accept_rate

    @classmethod
    def build(cls, context: DrafterContext, accept_rate: float = 1.0, width: int = 1) -> OracleDrafter:
        return cls(context, accept_rate, width)

    def _num_right(self, request: DraftRequest, row: int, depth: int, noise: Noise) -> int:
        rate = torch.tensor([self.accept_rate], dtype=torch.float64)
        for level in range(depth):
            key = NoiseKey(torch.tensor([row]), level + 1, Stream.ACCEPT, _COIN)
            if not bool(noise.accept(rate, torch.ones_like(rate), key)[0]):
                return level
        return depth


class AdversaryDrafter(_TargetDrafter):
    """Always wrong: the target's least likely token first."""

    name = "adversary"

    @classmethod
    def build(cls, context: DrafterContext, width: int = 1) -> AdversaryDrafter:
        return cls(context, width)

    def _num_right(self, request: DraftRequest, row: int, depth: int, noise: Noise) -> int:
        return 0


class ScriptedDrafter(_TargetDrafter):
    """Step s of each request accepts `accept_counts[s % len]` tokens, as far as it may draft."""

    name = "scripted"

    def __init__(self, context: DrafterContext, accept_counts: Sequence[int], width: int = 1) -> None:
        super().__init__(context, width)
        if not accept_counts or any(count < 0 for count in accept_counts):
            raise ConfigError(f"accept_counts={list(accept_counts)}; allowed: at least one number >= 0")
        self.accept_counts = tuple(accept_counts)
        self._steps: dict[int, int] = {}  # steps that came to an end, by request
        self._drafted: set[int] = set()  # requests whose last draft has not been heard of yet

    @classmethod
    def build(cls, context: DrafterContext, accept_counts: Sequence[int], width: int = 1) -> ScriptedDrafter:
        return cls(context, accept_counts, width)

    def _num_right(self, request: DraftRequest, row: int, depth: int, noise: Noise) -> int:
        self._drafted.add(request.request_id)
        return self.accept_counts[self._steps.get(request.request_id, 0) % len(self.accept_counts)]

    def observe(self, seen: Sequence[Observation]) -> None:
        # Here and not when drafting: a step that failed is drafted again and is the same line of the script.
        for request_id in {o.request_id for o in seen} & self._drafted:
            self._drafted.remove(request_id)
            self._steps[request_id] = self._steps.get(request_id, 0) + 1

    def release(self, request_id: int) -> None:
        self._steps.pop(request_id, None)
        self._drafted.discard(request_id)

    def reset(self) -> None:
        self._steps.clear()
        self._drafted.clear()


class RandomDrafter:
    """Uniformly random tokens: a chain, or a tree with `branching` children at each depth.

    With `with_probs` sampled requests carry the true uniform draft_probs; siblings are then drawn with or without
    replacement, as `with_replacement` says.
    """

    name = "random"
    features = FeatureSpec()
    max_position: int | None = None
    shares_target_kv = False

    def __init__(
        self,
        context: DrafterContext,
        branching: int | Sequence[int] | None = None,
        with_probs: bool = True,
        with_replacement: bool = False,
    ) -> None:
        numbers = [branching] if isinstance(branching, int) else branching or []
        if any(not isinstance(b, int) or not 1 <= b <= context.vocab_size for b in numbers):
            raise ConfigError(f"branching={branching!r}; allowed: numbers of children from 1 to the vocabulary size")
        self._vocab_size, self._branching = context.vocab_size, numbers
        self.samples, self._with_replacement = with_probs, with_replacement

    @classmethod
    def build(
        cls,
        context: DrafterContext,
        branching: int | Sequence[int] | None = None,
        with_probs: bool = True,
        with_replacement: bool = False,
    ) -> RandomDrafter:
        return cls(context, branching, with_probs, with_replacement)

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        trees = [self._draft_one(request, row, noise) for row, request in enumerate(requests)]
        if not self.samples:
            return stack_trees(trees)
        uniform = torch.full((1, self._vocab_size), 1.0 / self._vocab_size)
        rows = [[0 if not r.sampling.greedy else -1] * len(t[0]) for r, t in zip(requests, trees, strict=True)]
        return stack_trees(trees, uniform, rows, self._with_replacement)

    def _draft_one(self, request: DraftRequest, row: int, noise: Noise) -> tuple[list[int], list[int]]:
        token_ids, parents = [request.root_token_id], [-1]
        level = [0]
        branching = self._branching or (1,) * request.max_draft_tokens
        for depth, width in enumerate(branching):
            below: list[int] = []
            for parent in level:
                if len(token_ids) + width > request.max_draft_tokens + 1:
                    break
                for token in self._children(row, depth, parent, width, noise):
                    below.append(len(token_ids))
                    token_ids.append(token)
                    parents.append(parent)
            level = below
        return token_ids, parents

    def _children(self, row: int, depth: int, parent: int, width: int, noise: Noise) -> list[int]:
        weights = torch.ones(1, self._vocab_size)
        drawn: list[int] = []
        for ordinal in range(width):
            # The first chain token uses index 0, as every drafter's does; more draws at a position count on.
            key = NoiseKey(torch.tensor([row]), depth + 1, Stream.DRAFT, parent * width + ordinal if width > 1 else 0)
            drawn.append(int(noise.choose(weights, key)[0]))
            if not self._with_replacement:
                weights[0, drawn[-1]] = 0.0
        return drawn

    def observe(self, seen: Sequence[Observation]) -> None: ...

    def release(self, request_id: int) -> None: ...

    def reset(self) -> None: ...

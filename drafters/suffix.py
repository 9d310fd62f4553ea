"""Suffix decoding: what followed earlier occurrences of the current suffix, weighted by how often."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.drafters.history import TokenHistory
from specdec.drafters.suffix_cache import Cursor, Ended, SuffixCache
from specdec.drafters.suffix_tree import Continuation, Locus, SuffixTree
from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.interfaces import DrafterContext, DraftRequest, FeatureSpec, Noise, Observation, TokenTree
from specdec.tree import stack_trees

MAX_CACHED_TOKENS = 100_000


@dataclass(slots=True)
class _Draft:
    """Token ids and parents below a root; the score is how many of them are expected to be right."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0

    def add(self, token_id: int, parent: int, probability: float) -> int:
        """Add a node and return its number; the root is 0."""
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.score += probability
        return len(self.token_ids)


class SuffixDrafter:
    """Drafts from a suffix tree of the request's own text and, with `share`, of what finished requests said.

    Each suffix that occurred before is followed along its most frequent continuations, for at most
    `factor` * its length + `offset` tokens and while the product of their empirical probabilities stays above
    `min_token_prob`. The draft with the largest sum of these products is proposed. With `tree` the likeliest nodes
    are taken first, wherever they hang. Costs per token do not depend on the context length.

    Source: Oliaro et al. 2024, SuffixDecoding, arXiv 2411.04975; the limits' defaults are those of
    snowflakedb/ArcticInference.
    """

    name = "suffix"
    features = FeatureSpec()
    max_position: int | None = None
    shares_target_kv = False
    samples = False

    def __init__(
        self,
        *,
        max_depth: int = 64,
        factor: float = 1.0,
        offset: float = 0.0,
        min_token_prob: float = 0.1,
        tree: bool = False,
        share: bool = False,
        max_cached_tokens: int | None = None,
    ) -> None:
        _check("max_depth", max_depth, isinstance(max_depth, int) and max_depth >= 2, "an integer >= 2")
        _check("factor", factor, _is_number(factor) and factor >= 0, "a number >= 0")
        _check("offset", offset, _is_number(offset), "a number")
        _check("min_token_prob", min_token_prob, _is_number(min_token_prob) and 0 <= min_token_prob <= 1, "0 to 1")
        _check("tree", tree, isinstance(tree, bool), "True, False")
        _check("share", share, isinstance(share, bool), "True, False")
        self.max_depth, self.factor, self.offset = max_depth, factor, offset
        self.min_token_prob, self.tree = min_token_prob, tree
        self._history = TokenHistory()
        self._own: dict[int, SuffixTree] = {}
        self._num_prompt: dict[int, int] = {}  # request -> prompt tokens, once the first new token is known
        self._cursors: dict[int, Cursor] = {}
        self.remembers = share
        self._cache = _build_cache(max_depth, share, max_cached_tokens)

    @classmethod
    def build(
        cls,
        context: DrafterContext,
        max_depth: int = 64,
        factor: float = 1.0,
        offset: float = 0.0,
        min_token_prob: float = 0.1,
        tree: bool = False,
        share: bool = False,
        max_cached_tokens: int | None = None,
    ) -> SuffixDrafter:
        """Build; see the class.

        Args:
            context: of the target.
            max_depth: longest suffix and draft together, in tokens.
            factor: draft tokens per matched token.
            offset: draft tokens beyond that.
            min_token_prob: smallest product of empirical probabilities that is drafted.
            tree: draft trees instead of chains; worth more `max_draft_tokens` than the engine's default.
            share: learn from the outputs of finished requests, for all later ones.
            max_cached_tokens: bound on what `share` remembers, about 0.6 kB each; the oldest outputs go first. Default
                100 000.

        Raises:
            ConfigError: a value is out of range or without effect.
            IncompatibleDrafterError: trees for a target that runs chains only.
        """
        if tree is True and not context.runner.supports_trees:
            raise IncompatibleDrafterError(
                "drafter 'suffix': tree=True, but this target's attention runs chains only; leave tree out"
            )
        return cls(
            max_depth=max_depth,
            factor=factor,
            offset=offset,
            min_token_prob=min_token_prob,
            tree=tree,
            share=share,
            max_cached_tokens=max_cached_tokens,
        )

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        trees: list[tuple[list[int], list[int]]] = []
        for request in requests:
            draft = self._draft(request)
            trees.append(([request.root_token_id, *draft.token_ids], [-1, *draft.parents]))
        return stack_trees(trees)

    def _draft(self, request: DraftRequest) -> _Draft:
        """Return the best-scoring draft; of equal ones that after the longest suffix, of the own text first."""
        text = self._history.of(request.request_id)
        own = self._own.setdefault(request.request_id, SuffixTree(self.max_depth))
        for token_id in text[own.num_tokens :]:
            own.append(token_id)
        best = self._best(own, own.suffixes(), request, _Draft())
        if self._cache is not None:
            cursor = self._cursors.setdefault(request.request_id, Cursor())
            best = self._best(self._cache.tree, cursor.suffixes(self._cache, text), request, best)
        return best

    def _best(self, tree: SuffixTree, loci: Sequence[Locus], request: DraftRequest, best: _Draft) -> _Draft:
        expand = self._expand_tree if self.tree else self._expand_chain
        for locus in loci:
            budget = min(request.max_draft_tokens, int(locus.depth * self.factor + self.offset))
            if budget <= best.score:  # a draft scores at most 1 per token, and shorter suffixes get no more tokens
                break
            draft = expand(tree, locus, budget, request.min_confidence)
            if draft.score > best.score:
                best = draft
        return best

    def _expand_chain(self, tree: SuffixTree, locus: Locus, budget: int, min_confidence: float) -> _Draft:
        draft, product, found = _Draft(), 1.0, tree.continuations(locus, 1)
        while found and len(draft.token_ids) < budget:
            token_id, probability, locus = found[0]
            product *= probability
            if product < self.min_token_prob:
                break
            draft.add(token_id, len(draft.token_ids), product)
            if probability < min_confidence:
                break
            found = tree.continuations(locus, 1)
        return draft

    def _expand_tree(self, tree: SuffixTree, locus: Locus, budget: int, min_confidence: float) -> _Draft:
        """Take the likeliest node next, wherever it hangs, until the budget is spent; of equals the first seen."""
        draft = _Draft()
        waiting: list[tuple[float, int, int, Continuation]] = []  # minus the product, order, parent
        parent, product, at, order = 0, 1.0, locus, 0
        while len(draft.token_ids) < budget:
            for found in tree.continuations(at):
                order += 1
                if product * found.probability >= self.min_token_prob:
                    heapq.heappush(waiting, (-product * found.probability, order, parent, found))
            if not waiting:
                break
            negative, _, above, found = heapq.heappop(waiting)
            product, at = -negative, found.locus
            parent = draft.add(found.token_id, above, product)
        return draft

    def observe(self, seen: Sequence[Observation]) -> None:
        if self._cache is not None:
            for back in self._cache.settle({o.request_id for o in seen}):
                self._num_prompt[back.request_id] = back.num_prompt_tokens
        for o in seen:
            known = self._history.of(o.request_id)[o.start :]
            if known and known != o.token_ids.tolist():
                # Told otherwise after a failed step: what was counted may not have happened.
                self._own.pop(o.request_id, None)
                self._cursors.pop(o.request_id, None)
            self._history.observe([o])
            if o.path is not None and self._cache is not None:
                # The first step that chose a token chose the one behind the prompt.
                self._num_prompt.setdefault(o.request_id, len(self._history.of(o.request_id)) - 1)

    def release(self, request_id: int) -> None:
        num_prompt = self._num_prompt.pop(request_id, None)
        if self._cache is not None and num_prompt is not None:
            self._cache.end(Ended(request_id, self._history.of(request_id), num_prompt))
        self._history.release(request_id)
        self._own.pop(request_id, None)
        self._cursors.pop(request_id, None)

    def reset(self) -> None:
        if self._cache is not None:
            self._cache.clear()


def _build_cache(max_depth: int, share: bool, max_tokens: int | None) -> SuffixCache | None:
    if max_tokens is not None:
        good = isinstance(max_tokens, int) and not isinstance(max_tokens, bool) and max_tokens >= 1
        _check("max_cached_tokens", max_tokens, good, "an integer >= 1, or None")
        if not share:
            raise ConfigError(f"suffix drafter: max_cached_tokens={max_tokens} has no effect without share=True")
    return SuffixCache(max_depth, MAX_CACHED_TOKENS if max_tokens is None else max_tokens) if share else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ConfigError(f"suffix drafter: {name}={value!r}; allowed: {allowed}")

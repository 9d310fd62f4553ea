"""A small decoder over the target's hidden states drafts the next tokens, on a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.drafters.advised_shape import advised_shape
from specdec.drafters.autoregression import draw_chain
from specdec.drafters.feature_rows import FeatureRows
from specdec.drafters.given_head import given_head
from specdec.drafters.static_tree import refuse_trees_on_chains
from specdec.drafters.tree_option import Shape, grow_shape, num_rows, tree_option
from specdec.errors import OutOfCacheError
from specdec.heads.eagle import EagleHead
from specdec.heads.loaded import LoadedHead
from specdec.interfaces import (
    DrafterContext,
    DraftRequest,
    Noise,
    Observation,
    Segment,
    TokenTree,
    empty_tree,
)
from specdec.kv.cache import KVCache
from specdec.models.machine import weight_bytes_beside

_CHUNK_ROWS = 512  # run at once; so many rows may wait, each with the hidden states of a target's position
_FIRST_RUN_ROWS = 256
_NO_ROWS = torch.zeros(0, dtype=torch.int64)


class EagleDrafter:
    """Drafts with an EAGLE-1 or EAGLE-2 checkpoint; these differ in the trees, not in the weights.

    Row t of the head's cache is the hidden state of position t with the embedding of token t + 1. Rows of confirmed
    tokens are computed from the target's own hidden states, when the next draft begins or when many are waiting, and
    are committed. Rows of drafts are computed from what the head said one row earlier, and are forgotten with the
    draft: their hidden states were guesses.

    Chains are drawn from the head's own distribution, which is handed on as draft_probs. Trees hold its likeliest
    tokens; those of a static shape may be drawn instead, siblings without replacement.

    Source: Li et al. 2024, arXiv 2401.15077 (EAGLE); Li et al. 2024, arXiv 2406.16858 (EAGLE-2).
    """

    name = "eagle"
    shares_target_kv = False

    def __init__(
        self, head: LoadedHead, cache: KVCache, vocab_size: int, shape: Shape | None = None, sampled: bool = False
    ) -> None:
        assert isinstance(head.module, EagleHead), "an EAGLE drafter runs an EAGLE head"
        self._module, self._cache, self._vocab_size = head.module, cache, vocab_size
        self._device = next(head.module.parameters()).device
        self._draft_ids = None if head.vocabulary.is_whole else head.vocabulary.target_ids.to(self._device)
        self._shape, self._sampled = shape, sampled
        self.features = head.module.config.features
        self.max_position: int | None = head.module.config.max_positions
        self.samples = shape is None or sampled
        self.draft_depth = None if shape is None else shape.depth
        self.advised_draft_tokens: int | None = None
        self.weight_bytes = 0  # beside the target's
        self._texts: dict[int, FeatureRows] = {}
        # What the head said after the newest row that was run: (rows up to and including it, [1, H]).
        self._newest: dict[int, tuple[int, Tensor]] = {}

    @classmethod
    def build(cls, context: DrafterContext, model: Any = None, tree: Any = None, sampled: bool = False) -> EagleDrafter:
        """Build.

        Args:
            context: of the target.
            model: a directory, a hub id, the name of a head that is shipped with specdec, or a LoadedHead; None = the
                head that is shipped for this target.
            tree: "chain"; "dynamic", or a dict with depth, top_k and total_tokens, for EAGLE-2's trees, which grow
                where the draft is sure; a preset's name, numbers of children per depth, or paths: see `static_tree`.
                At most `max_draft_tokens` nodes are drafted, so raise that number for trees. None = what the
                checkpoint advises, with its number of draft tokens unless another one is given; or chains.
            sampled: draw the nodes of a static tree instead of taking the likeliest.

        Raises:
            ConfigError: there is no head for this target, or a value is unknown.
            CheckpointError: the head's files cannot be read.
            IncompatibleDrafterError: the head is for another target or drafter, or the target runs chains only.
        """
        head = given_head(cls.name, context, model)
        tree, draft_tokens = advised_shape(head.settings, context, tree)
        shape = tree_option(tree, sampled)
        if shape is not None:
            refuse_trees_on_chains(cls.name, context, "leave tree out")
        cache = KVCache(max_bytes=context.runner.cache.max_bytes)
        drafter = cls(head, cache, context.vocab_size, shape, sampled)
        drafter.advised_draft_tokens = draft_tokens
        drafter.weight_bytes = weight_bytes_beside(context.runner.model, head.tensors)
        return drafter

    # ------------------------------------------------------------------ drafting

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        requests = [r if self._can_draft(r) else replace(r, max_draft_tokens=0) for r in requests]
        drafting = [r for r in requests if r.max_draft_tokens > 0]
        self._catch_up([r.request_id for r in drafting])
        if not drafting:
            return empty_tree(requests)
        tree = self._chains(requests, noise) if self._shape is None else self._trees(self._shape, requests, noise)
        for r in drafting:
            self._cache.rewind(r.request_id)
        return tree

    def _can_draft(self, request: DraftRequest) -> bool:
        """Tell whether the row before the root is known, and what stands there is the root."""
        text = self._texts.get(request.request_id)
        if text is None or text.end != request.root_position or text.token_ids[text.end :] != [request.root_token_id]:
            return False
        rows_run, _ = self._newest.get(request.request_id, (-1, None))
        return self._num_done(request.request_id) < text.end or rows_run == text.end

    def _chains(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        drafting = [r for r in requests if r.max_draft_tokens > 0]
        self._reserve([(r.request_id, r.max_draft_tokens - 1) for r in drafting])
        running: list[int] = []
        hidden = self._said([r.request_id for r in drafting])

        def advance(rows: list[int], last: Tensor) -> Tensor:
            nonlocal running, hidden
            if not running:  # the roots' own rows have been run
                running = rows
                return self._logits(hidden)
            if rows != running:
                hidden = hidden[torch.tensor([running.index(i) for i in rows], device=self._device)]
                running = rows
            segments = [Segment(requests[i].request_id, last[j : j + 1], None, _NO_ROWS) for j, i in enumerate(rows)]
            hidden = self._forward(segments, hidden)
            return self._logits(hidden)

        return draw_chain(requests, noise, advance, self._vocab_size, self._draft_ids)

    def _trees(self, shape: Shape, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        self._reserve([(r.request_id, num_rows(shape, r.max_draft_tokens) - 1) for r in requests if r.max_draft_tokens])
        said: dict[int, Tensor] = {}  # request -> what the head said after each row of its tree, [n, H]

        def expand(rows: list[int], token_ids: list[Tensor], parents: list[Tensor]) -> Tensor:
            ids = [requests[i].request_id for i in rows]
            if not said:  # all roots come first, and alone; their rows have been run
                hidden = self._said(ids)
                said.update(zip(rows, hidden.split(1), strict=True))
                return self._logits(hidden)
            # The root's row is committed: in the reservation rows count from its children on.
            segments = [Segment(i, t, p - 1, _NO_ROWS) for i, t, p in zip(ids, token_ids, parents, strict=True)]
            above = torch.cat([said[i][p.to(self._device)] for i, p in zip(rows, parents, strict=True)])
            hidden = self._forward(segments, above)
            for i, new in zip(rows, hidden.split([len(p) for p in parents]), strict=True):
                said[i] = torch.cat([said[i], new])
            return self._logits(hidden)

        drawn = noise if self._sampled else None
        return grow_shape(requests, shape, expand, self._vocab_size, drawn, self._draft_ids).tree

    # ------------------------------------------------------------------ the head on its cache

    def _num_done(self, request_id: int) -> int:
        """Return the number of the row behind the last one in the cache."""
        rows = self._cache.context_len(request_id) if self._cache.is_open(request_id) else 0
        return self._texts[request_id].first + rows

    def _said(self, request_ids: Sequence[int]) -> Tensor:
        """Return [n, H] what the head said after each request's newest row, that of its root."""
        return torch.cat([self._newest[i][1] for i in request_ids])

    def _catch_up(self, request_ids: Sequence[int]) -> None:
        """Run every waiting row of these requests, in pieces."""
        while True:
            behind = [i for i in request_ids if self._num_done(i) < self._texts[i].end]
            if not behind:
                return
            begins = [self._num_done(i) for i in behind]
            taken = [self._texts[i].take(begin, _CHUNK_ROWS) for i, begin in zip(behind, begins, strict=True)]
            sizes = [len(tokens) for _, tokens in taken]
            self._reserve(list(zip(behind, sizes, strict=True)))
            segments = [Segment(i, tokens, None, _NO_ROWS) for i, (_, tokens) in zip(behind, taken, strict=True)]
            features = torch.cat([f for f, _ in taken]) if len(taken) > 1 else taken[0][0]
            hidden = self._forward(segments, features, are_features=True)
            for i, begin, said in zip(behind, begins, hidden.split(sizes), strict=True):
                self._cache.commit(i, torch.arange(len(said)))
                self._newest[i] = (begin + len(said), said[-1:].clone())
                self._texts[i].drop(begin + len(said))

    def _reserve(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Open a reservation of so many rows for each request."""
        for request_id, count in wanted:
            if not self._cache.is_open(request_id):
                self._cache.open(request_id, max(count, _FIRST_RUN_ROWS))
            elif self._cache.room(request_id) < count:
                self._cache.extend(request_id, 2 * (self._cache.context_len(request_id) + count))
            self._cache.reserve(request_id, count)

    def _forward(self, segments: Sequence[Segment], hidden: Tensor, are_features: bool = False) -> Tensor:
        """Append rows to open reservations.

        Args:
            segments: T rows; the tokens of the positions behind.
            hidden: [T, H] what the head said one row earlier, or with `are_features` [T, F] the target's states.

        Returns:
            [T, H] what the head says.
        """
        with torch.inference_mode():
            plan = self._cache.plan(segments, self._device)
            firsts = [self._texts[s.request_id].first for s in segments]
            positions = plan.positions
            if any(firsts):
                counts = torch.tensor([s.num_rows for s in plan.segments])
                positions = positions + torch.tensor(firsts).repeat_interleave(counts).to(self._device)
            furthest = max(p.kv_len + first for p, first in zip(plan.segments, firsts, strict=True))
            ids = segments[0].token_ids if len(segments) == 1 else torch.cat([s.token_ids for s in segments])
            embedded = self._module.embed_tokens(ids.to(self._device)).to(self._device)
            hidden = self._module.fuse(hidden.to(self._device)) if are_features else hidden

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return self._cache.attend(plan, layer, q, k, v)

            said: Tensor = self._module(hidden, embedded, positions, attend, furthest)
            return said

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return [n, Vd] logits."""
        with torch.inference_mode():
            return self._module.logits(hidden)

    # ------------------------------------------------------------------ hearing

    def observe(self, seen: Sequence[Observation]) -> None:
        for observation in seen:
            request_id = observation.request_id
            text = self._texts.setdefault(request_id, FeatureRows())
            if not text.observe(observation):
                self._forget_rows(request_id)
            if self.max_position is not None and text.end > self.max_position:
                self._forget_rows(request_id)
                text.begin_at(text.end)
        many = [i for i in {o.request_id for o in seen} if self._texts[i].end - self._num_done(i) >= _CHUNK_ROWS]
        try:
            self._catch_up(many)
        except OutOfCacheError:  # rows that cannot be kept; they begin anew where there is memory again
            for request_id in many:
                self._forget_rows(request_id)
                self._texts[request_id].begin_at(self._texts[request_id].end)

    def _forget_rows(self, request_id: int) -> None:
        self._cache.release(request_id)
        self._newest.pop(request_id, None)

    def release(self, request_id: int) -> None:
        self._forget_rows(request_id)
        self._texts.pop(request_id, None)

    def reset(self) -> None: ...


class Eagle3Drafter(EagleDrafter):
    """Drafts with an EAGLE-3 checkpoint: hidden states of several of the target's blocks, and often fewer tokens.

    Source: Li et al. 2025, arXiv 2503.01840.
    """

    name = "eagle3"

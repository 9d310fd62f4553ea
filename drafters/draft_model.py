"""A smaller causal LM on its own KV cache, with the target's vocabulary or another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec.drafters.advised_shape import advised_shape
from specdec.drafters.autoregression import draw_chain
from specdec.drafters.given_small_model import given_small_model
from specdec.drafters.respelled_history import RespelledHistory
from specdec.drafters.static_tree import refuse_trees_on_chains
from specdec.drafters.tree_option import Shape, grow_shape, num_rows, tree_option
from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.interfaces import (
    DrafterContext,
    DraftRequest,
    FeatureSpec,
    Noise,
    Observation,
    Segment,
    TokenTree,
    empty_tree,
)
from specdec.models.build import RunnerConfig, runner_for
from specdec.models.machine import weight_bytes_beside
from specdec.models.runner import ModelRunner
from specdec.models.vocabulary import (
    SharedTokens,
    SomeTokens,
    Vocabulary,
    match_vocabularies,
    report_intersection,
    summary,
)

_CHUNK_TOKENS = 512
_FIRST_RUN_TOKENS = 256
_FIRST = torch.zeros(1, dtype=torch.int64)


@dataclass(slots=True)
class _Reservation:
    """What stands in a request's open reservation, until the target has spoken."""

    pending: int  # confirmed rows at its head, the root's last
    written: int = 0
    rows: list[int] | None = None  # node -> its row behind the pending ones, the root's 0, -1 = not run; None = a chain

    def kept(self, path: list[int]) -> list[int]:
        """Return the rows that stay: the pending ones and those of the accepted nodes; the last may not have run."""
        rows = path if self.rows is None else [self.rows[node] for node in path if self.rows[node] >= 0]
        return [row for row in (*range(self.pending), *(self.pending - 1 + row for row in rows)) if row < self.written]


class DraftModelDrafter:
    """Draws a chain from the draft model's own distributions, which it hands on as draft_probs; or grows a tree.

    Trees hold the likeliest tokens; those of a static shape may be drawn instead, siblings without replacement. What
    the target has confirmed since the last draft is computed when the next draft begins; of the drafts, the accepted
    path keeps its KV. The draft model reads its own spelling of the text, whose length and positions may differ from
    the target's; what it drafts is one token of both.

    Source: Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
    """

    name = "draft_model"
    features = FeatureSpec()
    shares_target_kv = False

    def __init__(
        self,
        runner: ModelRunner,
        vocab_size: int,
        vocabulary: Vocabulary,
        shape: Shape | None = None,
        sampled: bool = False,
    ) -> None:
        self._runner, self._vocab_size, self._vocabulary = runner, vocab_size, vocabulary
        self.own_cache = runner.cache  # shares the target's memory limit
        self._draft_ids = None if vocabulary.target_ids is None else vocabulary.target_ids.to(runner.device)
        self.weight_bytes = 0  # beside the target's
        self.max_position: int | None = runner.max_positions
        self._history = RespelledHistory(vocabulary.spell)
        self._shape, self._sampled = shape, sampled
        self.samples = shape is None or sampled
        self.draft_depth = None if shape is None else shape.depth
        self._open: dict[int, _Reservation] = {}
        self.advised_draft_tokens: int | None = None
        self.model: Any = None  # the transformers model that drafts

    @property
    def target_ids(self) -> Tensor | None:
        """What the columns of the draft model's logits stand for, [Vd] int64; None = the target's ids in order."""
        return self._vocabulary.target_ids

    @property
    def reads_target_ids(self) -> bool:
        """False where it has other tokens, and reads its own spelling of the text."""
        return not isinstance(self._vocabulary, SharedTokens)

    @classmethod
    def build(
        cls,
        context: DrafterContext,
        model: Any = None,
        tokenizer: Any = None,
        dtype: Any = None,
        vocabulary: str = "auto",
        tree: Any = None,
        sampled: bool = False,
    ) -> DraftModelDrafter:
        """Build.

        Args:
            context: of the target.
            model: a model object; a name or path that is loaded, in `dtype` or else the target's; or the folder of a
                model that was distilled for this target. None = the one that ships for it.
            tokenizer: the draft model's; default: the one that is loaded with it.
            dtype: of the weights that are loaded.
            vocabulary: "same": its ids must be the target's. "intersection": only tokens that both have are drafted,
                and mapped. "auto": the first where it is so, else the second, which is logged.
            tree: "chain"; "dynamic", or a dict with depth, top_k and total_tokens, for trees that grow where the draft
                is sure; a preset's name, numbers of children per depth, or paths: see `static_tree`. At most
                `max_draft_tokens` nodes are drafted, so raise that number for trees. None = what a distilled model
                advises, with its number of draft tokens unless another one is given; or chains.
            sampled: draw the nodes of a static tree instead of taking the likeliest.

        Raises:
            ConfigError: there is no model, `dtype` is given for one that is loaded already, or a value is unknown.
            IncompatibleDrafterError: its vocabulary does not fit the target's, or one of the two runs chains only.
        """
        distilled = given_small_model(context, model)
        tree, draft_tokens = advised_shape({} if distilled is None else distilled.settings, context, tree)
        shape = tree_option(tree, sampled)
        if shape is not None:
            refuse_trees_on_chains(cls.name, context, "leave tree out")
        if distilled is not None:
            _refuse_unused(tokenizer=tokenizer, dtype=dtype, vocabulary=None if vocabulary == "auto" else vocabulary)
            runner = _own_runner(distilled.model, context)
            tokens = distilled.vocabulary
            fitting: Vocabulary = SomeTokens(None if tokens.is_whole else tokens.target_ids)
            drafter = cls(runner, context.vocab_size, fitting, shape, sampled)
            drafter.advised_draft_tokens, drafter.model = draft_tokens, distilled.model
            drafter.weight_bytes = weight_bytes_beside(context.runner.model, runner.model.parameters())
            return drafter
        if hasattr(model, "forward"):
            if dtype is not None:
                raise ConfigError(f"drafter 'draft_model': dtype={dtype!r} has no effect on a model that is loaded")
        elif context.load_model is None:
            raise ConfigError(f"drafter 'draft_model': model={model!r} must be a model object here")
        else:
            model, loaded = context.load_model(model, dtype=context.runner.dtype if dtype is None else dtype)
            tokenizer = tokenizer or loaded
        runner = _own_runner(model, context)
        if shape is not None and not runner.supports_trees:
            raise IncompatibleDrafterError(
                "drafter 'draft_model' was asked for trees, but this draft model's attention runs chains only; leave "
                "tree out"
            )
        fitting = match_vocabularies(
            runner.vocab_size, tokenizer, context.vocab_size, context.tokenizer, how=vocabulary
        )
        if isinstance(fitting, SharedTokens) and vocabulary == "auto":
            report_intersection(summary(fitting))
        drafter = cls(runner, context.vocab_size, fitting, shape, sampled)
        drafter.model = model
        drafter.weight_bytes = weight_bytes_beside(context.runner.model, runner.model.parameters())
        return drafter

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        requests = [self._within_reach(r) for r in requests]
        if not any(r.max_draft_tokens for r in requests):
            return empty_tree(requests)
        return self._chains(requests, noise) if self._shape is None else self._trees(self._shape, requests, noise)

    def _chains(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        drafting = [r for r in requests if r.max_draft_tokens > 0]
        # K drafts take the pending tokens and K - 1 of the drafts through the model.
        self._reserve(drafting, [r.max_draft_tokens - 1 for r in drafting])
        first = [self._catch_up(drafting)]

        def advance(rows: list[int], last: Tensor) -> Tensor:
            if first:
                return first.pop()
            ids = self._vocabulary.to_draft(last)
            chains = [Segment(requests[i].request_id, ids[j : j + 1], None, _FIRST) for j, i in enumerate(rows)]
            return self._logits(chains)

        return draw_chain(requests, noise, advance, self._vocab_size, self._draft_ids)

    def _trees(self, shape: Shape, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        drafting = [r for r in requests if r.max_draft_tokens > 0]
        self._reserve(drafting, [num_rows(shape, r.max_draft_tokens) - 1 for r in drafting])

        def expand(rows: list[int], token_ids: list[Tensor], parents: list[Tensor]) -> Tensor:
            running = [requests[i] for i in rows]
            if not self._open[running[0].request_id].written:  # all roots come first, and alone
                return self._catch_up(running)
            return self._logits([self._branches(*one) for one in zip(running, token_ids, parents, strict=True)])

        drawn = noise if self._sampled else None
        grown = grow_shape(requests, shape, expand, self._vocab_size, drawn, self._draft_ids)
        for request, rows in zip(requests, grown.rows, strict=True):
            if request.max_draft_tokens > 0:
                self._open[request.request_id].rows = rows
        return grown.tree

    def _branches(self, request: DraftRequest, token_ids: Tensor, parents: Tensor) -> Segment:
        """Return the segment of tree nodes whose parents are rows counted from the root."""
        root = self._open[request.request_id].pending - 1
        ids = self._vocabulary.to_draft(token_ids)
        return Segment(request.request_id, ids, root + parents, torch.arange(len(ids)))

    def _within_reach(self, request: DraftRequest) -> DraftRequest:
        """Return the request with no drafts past the draft model's positions, where its text is longer."""
        if self.max_position is None:
            return request
        room = max(0, self.max_position - len(self._history.of(request.request_id)) + 1)
        if self.draft_depth is not None and self.draft_depth <= room:
            return request
        return request if request.max_draft_tokens <= room else replace(request, max_draft_tokens=room)

    def _reserve(self, requests: Sequence[DraftRequest], num_rows: Sequence[int]) -> None:
        """Open reservations for the pending tokens and that many rows behind them."""
        for r, more in zip(requests, num_rows, strict=True):
            cache, known = self._runner.cache, self._history.of(r.request_id)
            if not cache.is_open(r.request_id):
                # The same draft model over the same tokens has the same KV, whoever asked for it first.
                cache.open(r.request_id, max(len(known) + more, _FIRST_RUN_TOKENS), known)
            pending = len(known) - cache.context_len(r.request_id)
            cache.reserve(r.request_id, pending + more)
            self._open[r.request_id] = _Reservation(pending)

    def _catch_up(self, requests: Sequence[DraftRequest]) -> Tensor:
        """Run every request's unknown tokens, the root last; return logits [B, Vd] after the roots."""
        tails = {r.request_id: self._tail(r.request_id) for r in requests}
        while any(len(tail) > _CHUNK_TOKENS for tail in tails.values()):
            heads = {k: tail[:_CHUNK_TOKENS] for k, tail in tails.items() if len(tail) > _CHUNK_TOKENS}
            self._forward([Segment(k, head, None, _FIRST[:0]) for k, head in heads.items()])
            tails = {k: tail[_CHUNK_TOKENS:] if k in heads else tail for k, tail in tails.items()}
        return self._logits([Segment(k, tail, None, _FIRST + len(tail) - 1) for k, tail in tails.items()])

    def _tail(self, request_id: int) -> Tensor:
        ids = self._history.of(request_id)
        return torch.tensor(ids[self._runner.cache.context_len(request_id) :], dtype=torch.int64)

    def _logits(self, segments: Sequence[Segment]) -> Tensor:
        """Run rows; return the wanted logits of what can be drafted, see `Vocabulary.fit`."""
        return self._vocabulary.fit(self._forward(segments))

    def _forward(self, segments: Sequence[Segment]) -> Tensor:
        """Append rows to open reservations; return the wanted logits [R, Vd]."""
        result = self._runner.forward(segments).logits
        for segment in segments:  # only now: rows of a forward that failed hold no KV in its later layers
            self._open[segment.request_id].written += len(segment.token_ids)
        return result

    def observe(self, seen: Sequence[Observation]) -> None:
        for observation in seen:
            reservation = self._open.pop(observation.request_id, None)
            if reservation is not None and observation.path is not None:
                kept = reservation.kept(observation.path.tolist())
                self._runner.cache.commit(observation.request_id, torch.tensor(kept, dtype=torch.int64))
        self._history.observe(seen)
        for observation in seen:
            if self._runner.cache.is_open(observation.request_id):
                self._runner.cache.publish(observation.request_id, self._history.of(observation.request_id))

    def release(self, request_id: int) -> None:
        self._history.release(request_id)
        self._runner.cache.release(request_id)
        self._open.pop(request_id, None)

    def reset(self) -> None: ...


def _own_runner(model: Any, context: DrafterContext) -> ModelRunner:
    """Return a runner with a cache of its own, which shares what begins alike if the target's does."""
    runner = runner_for(model, RunnerConfig()).with_own_cache()
    runner.cache.prefix_caching = context.runner.cache.prefix_caching
    return runner


def _refuse_unused(**options: Any) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigError(
                f"drafter 'draft_model': {option}={value!r} has no effect on a draft model that was distilled for its "
                "target and takes all of that from there"
            )

"""A smaller causal LM with the target's vocabulary, on its own KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.drafters.autoregression import draw_chain
from specdec.drafters.history import TokenHistory
from specdec.errors import ConfigError
from specdec.interfaces import DrafterContext, DraftRequest, FeatureSpec, Noise, Observation, Segment, TokenTree
from specdec.models.build import RunnerConfig, runner_for
from specdec.models.runner import ModelRunner
from specdec.models.vocabulary import check_same_vocabulary

_CHUNK_TOKENS = 512
_FIRST_RUN_TOKENS = 256


class DraftModelDrafter:
    """Draws a chain from the draft model's own distributions, which it hands on as draft_probs.

    What the target has confirmed since the last draft is computed when the next draft begins; of the drafts, the
    accepted path keeps its KV.

    Source: Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
    """

    name = "draft_model"
    features = FeatureSpec()
    shares_target_kv = False
    samples = True

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner, self._vocab_size = runner, vocab_size
        self.weight_bytes = sum(p.numel() * p.element_size() for p in runner.model.parameters())
        self.max_position: int | None = runner.max_positions
        self._history = TokenHistory()
        self._pending: dict[int, int] = {}  # request -> confirmed rows at the head of its open reservation
        self._rows: dict[int, int] = {}  # request -> rows written into it

    @classmethod
    def build(cls, context: DrafterContext, model: Any = None, tokenizer: Any = None, dtype: Any = None) -> Any:
        """Build from a model object, or a name or path that is loaded, in `dtype` or else the target's.

        Raises:
            ConfigError: there is no model, or `dtype` is given for one that is loaded already.
            IncompatibleDrafterError: its vocabulary is not the target's.
        """
        if model is None:
            raise ConfigError(
                "drafter 'draft_model' needs model=: a model object, a hub id, a local directory or a .gguf file"
            )
        if hasattr(model, "forward"):
            if dtype is not None:
                raise ConfigError(f"drafter 'draft_model': dtype={dtype!r} has no effect on a model that is loaded")
        elif context.load_model is None:
            raise ConfigError(f"drafter 'draft_model': model={model!r} must be a model object here")
        else:
            model, loaded = context.load_model(model, dtype=context.runner.dtype if dtype is None else dtype)
            tokenizer = tokenizer or loaded
        runner = runner_for(model, RunnerConfig()).with_own_cache()
        check_same_vocabulary(runner.vocab_size, tokenizer, context.vocab_size, context.tokenizer)
        return cls(runner, context.vocab_size)

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        cache = self._runner.cache
        for r in requests:
            pending = len(self._history.of(r.request_id)) - self._context_len(r.request_id)
            # K drafts take the pending tokens and K - 1 of the drafts through the model.
            self._make_room(r.request_id, pending + r.max_draft_tokens - 1)
            cache.reserve(r.request_id, pending + r.max_draft_tokens - 1)
            self._pending[r.request_id], self._rows[r.request_id] = pending, 0
        first = self._catch_up(requests)

        def advance(rows: list[int], last: Tensor) -> Tensor:
            if first:
                return first.pop()
            return self._forward([(requests[i].request_id, last[j : j + 1]) for j, i in enumerate(rows)])

        return draw_chain(requests, noise, advance, self._vocab_size)

    def _context_len(self, request_id: int) -> int:
        return self._runner.cache.context_len(request_id) if self._runner.cache.is_open(request_id) else 0

    def _make_room(self, request_id: int, rows: int) -> None:
        cache = self._runner.cache
        if not cache.is_open(request_id):
            cache.open(request_id, max(rows, _FIRST_RUN_TOKENS))
        elif cache.room(request_id) < rows:
            cache.extend(request_id, 2 * (cache.context_len(request_id) + rows))

    def _catch_up(self, requests: Sequence[DraftRequest]) -> list[Tensor]:
        """Run every request's unknown tokens, the root last; return [logits after the roots] ([B, V])."""
        tails = {r.request_id: self._tail(r.request_id) for r in requests}
        while any(len(tail) > _CHUNK_TOKENS for tail in tails.values()):
            heads = {k: tail[:_CHUNK_TOKENS] for k, tail in tails.items() if len(tail) > _CHUNK_TOKENS}
            self._forward(list(heads.items()), logits=False)
            tails = {k: tail[_CHUNK_TOKENS:] if k in heads else tail for k, tail in tails.items()}
        return [self._forward(list(tails.items()))]

    def _tail(self, request_id: int) -> Tensor:
        tokens = self._history.of(request_id)
        ids = torch.tensor(tokens[self._context_len(request_id) :], dtype=torch.int64)
        # A target with a wider head may emit ids the draft model has no embedding for; any guess behind one will do.
        return ids.clamp_max(self._runner.vocab_size - 1)

    def _forward(self, rows: Sequence[tuple[int, Tensor]], logits: bool = True) -> Tensor:
        """Append tokens to open reservations; return the logits after each request's last one."""
        segments = []
        for request_id, ids in rows:
            wanted = torch.tensor([len(ids) - 1] if logits else [], dtype=torch.int64)
            segments.append(Segment(request_id, ids, None, wanted))
        result = self._runner.forward(segments).logits
        for request_id, ids in rows:  # only now: rows of a forward that failed hold no KV in its later layers
            self._rows[request_id] += len(ids)
        return result

    def observe(self, seen: Sequence[Observation]) -> None:
        for observation in seen:
            request_id = observation.request_id
            pending = self._pending.pop(request_id, None)
            if pending is not None and observation.path is not None:
                # Node i of the chain stands in row pending - 1 + i; the last draft was never run.
                last = self._rows.pop(request_id)
                kept = [*range(pending), *(pending - 1 + node for node in observation.path.tolist())]
                self._runner.cache.commit(request_id, torch.tensor([row for row in kept if row < last]))
        self._history.observe(seen)

    def release(self, request_id: int) -> None:
        self._history.release(request_id)
        self._runner.cache.release(request_id)
        self._pending.pop(request_id, None)
        self._rows.pop(request_id, None)

    def reset(self) -> None: ...

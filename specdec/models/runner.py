"""One model on one cache: packed ragged forwards. Everything that runs a model goes through here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.errors import WrongThreadError
from specdec.interfaces import FeatureSpec, Forward, Segment
from specdec.kv.cache import KVCache
from specdec.kv.plan import StepPlan
from specdec.models.compatibility import max_positions


class Program(Protocol):
    """A model's forward over our cache."""

    num_layers: int

    def __call__(
        self, cache: KVCache, plan: StepPlan, token_ids: Tensor, logit_rows: Tensor | None, spec: FeatureSpec
    ) -> tuple[Tensor, Tensor | None]: ...


class ModelRunner:
    """Runs segments of several requests in one packed forward and appends them to their reservations."""

    def __init__(
        self,
        program: Program,
        cache: KVCache,
        *,
        config: Any,
        device: torch.device,
        vocab_size: int,
        dtype: torch.dtype,
        supports_trees: bool = True,
        extra_weight_bytes: int = 0,
        model: Any = None,
    ) -> None:
        self.program, self.cache, self.config, self.device = program, cache, config, device
        self.vocab_size, self.dtype = vocab_size, dtype
        self.supports_trees = supports_trees
        self.extra_weight_bytes = extra_weight_bytes
        self.loaded: dict[Any, Any] = {}  # models that drafters named, kept for the next engine over this program
        self.owner: int | None = None  # thread that first used it
        self.model = model  # the clone, for copies of it that share this cache

    def claim(self) -> None:
        """Make the calling thread the owner, or raise WrongThreadError if another one is."""
        me = threading.get_ident()
        if self.owner is None:
            self.owner = me
        if self.owner != me:
            raise WrongThreadError(
                f"this engine belongs to thread {self.owner} and was used from thread {me}; build one in each thread "
                "(the model object may be shared)"
            )

    def may_use(self) -> bool:
        """Tell whether the calling thread is the owner, or could become it."""
        return self.owner in (None, threading.get_ident())

    def disown(self) -> None:
        """Let the next thread that uses it become the owner, if the calling one is; else nothing happens."""
        if self.owner == threading.get_ident():
            self.owner = None

    @property
    def max_positions(self) -> int | None:
        """Return how many positions the model was built for, or None if its config names no limit."""
        return max_positions(self.config)

    def size_features(self, spec: FeatureSpec) -> None:
        """Run one token, so that the cache knows the bytes of the hidden states it is to keep before it hands out room.

        Were they counted from the first that are stored on, the memory limit would hold fewer blocks all at once.
        """
        self.cache.open(-1, 1)
        try:
            self.cache.reserve(-1, 1)
            segment = Segment(-1, torch.zeros(1, dtype=torch.int64), None, torch.empty(0, dtype=torch.int64))
            features = self.forward([segment], spec).features
            assert features is not None, "hidden states were asked for"
            self.cache.commit(-1, torch.arange(1))
            self.cache.store_features(-1, 0, features)
        finally:
            self.cache.release(-1)

    def forward(self, segments: Sequence[Segment], features: FeatureSpec = FeatureSpec()) -> Forward:
        """Run the rows of all segments at once.

        Args:
            segments: at least one; each needs an open reservation with room for its rows.
            features: hidden states to return.

        Returns:
            Logits [R, V] of the wanted rows in segment order, and features [T, F] of all rows.
        """
        with torch.inference_mode():
            plan = self.cache.plan(segments, self.device)
            if len(segments) == 1:
                token_ids = segments[0].token_ids
                rows = segments[0].logit_rows
            else:
                token_ids = torch.cat([s.token_ids.to(self.device) for s in segments])
                rows = torch.cat([s.logit_rows + p.first_row for s, p in zip(segments, plan.segments, strict=True)])
            wanted = None if rows.shape[0] == token_ids.shape[0] else rows.to(self.device)
            logits, taken = self.program(self.cache, plan, token_ids.to(self.device), wanted, features)
            return Forward(logits, taken)

    def sharing_cache(self, program: Program, extra_weight_bytes: int = 0) -> ModelRunner:
        """Return a runner of another program (an int8 copy, the first layers) over this runner's cache."""
        return self._other(program, self.cache, extra_weight_bytes)

    def with_own_cache(self) -> ModelRunner:
        """Return a runner of the same program over a new, empty cache."""
        of = self.cache
        cache = KVCache(
            max_bytes=of.max_bytes,
            bytes_per_token=of.bytes_per_token,
            block_tokens=of.block_tokens,
            codec=of.codec,
            prefix_caching=of.prefix_caching,
            backend=of.backend,
        )
        return self.with_cache(cache)

    def with_cache(self, cache: KVCache) -> ModelRunner:
        """Return a runner of the same program over a given cache, empty and of nobody else."""
        other = self._other(self.program, cache, self.extra_weight_bytes)
        other.loaded = self.loaded
        return other

    def _other(self, program: Program, cache: KVCache, extra_weight_bytes: int = 0) -> ModelRunner:
        return ModelRunner(
            program,
            cache,
            config=self.config,
            device=self.device,
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            supports_trees=self.supports_trees,
            extra_weight_bytes=extra_weight_bytes,
            model=self.model,
        )

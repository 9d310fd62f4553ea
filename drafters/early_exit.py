"""The target's own first layers draft on its KV cache; verification overwrites what they wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.drafters.autoregression import draw_chain
from specdec.drafters.static_growth import grow_static
from specdec.drafters.static_tree import StaticTree, refuse_trees_on_chains, static_tree
from specdec.interfaces import DrafterContext, DraftRequest, FeatureSpec, Noise, Observation, Segment, TokenTree
from specdec.models.early_exit import first_layers
from specdec.models.runner import ModelRunner


class EarlyExitDrafter:
    """Drafts with the target's first layers and its own head, over its KV cache; for targets trained for early exits.

    Chains are drawn from the resulting distribution, which is handed on as draft_probs. Trees are static and hold its
    likeliest tokens. Models trained for early exits are drafted for well; others need most of their layers.

    Source: Zhang et al. 2023, Draft & Verify, arXiv 2309.08168; Elhoushi et al. 2024, LayerSkip, arXiv 2404.16710.
    """

    name = "early_exit"
    features = FeatureSpec()
    shares_target_kv = True

    def __init__(self, runner: ModelRunner, vocab_size: int, tree: StaticTree | None = None) -> None:
        self._runner, self._vocab_size, self._tree = runner, vocab_size, tree
        self.target_cache = runner.cache
        self.max_position: int | None = runner.max_positions
        self.samples = tree is None
        self.draft_depth = None if tree is None else tree.depth

    @classmethod
    def build(cls, context: DrafterContext, num_layers: int | None = None, tree: Any = None) -> EarlyExitDrafter:
        """Build.

        Args:
            context: of the target.
            num_layers: how many layers draft; None = a quarter of the target's.
            tree: None = chains; a preset's name, numbers of children per depth, or paths: see `static_tree`. Only its
                first `max_draft_tokens` nodes are drafted, so raise that number for trees.

        Raises:
            ConfigError: the target has no such number of layers, or `tree` is none.
            IncompatibleDrafterError: the target's layers cannot be cut, or it runs chains only and `tree` is given.
        """
        if num_layers is None:
            num_layers = max(1, context.runner.program.num_layers // 4)
        shape = None if tree is None else static_tree(tree)
        if shape is not None:
            refuse_trees_on_chains(cls.name, context, "leave tree out")
        return cls(first_layers(context.runner, num_layers), context.vocab_size, shape)

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        if self._tree is not None:
            return self._propose_trees(self._tree, requests)
        row = torch.zeros(1, dtype=torch.int64)

        def advance(rows: list[int], last: Tensor) -> Tensor:
            segments = [Segment(requests[i].request_id, last[j : j + 1], None, row) for j, i in enumerate(rows)]
            return self._runner.forward(segments).logits

        return draw_chain(requests, noise, advance, self._vocab_size)

    def _propose_trees(self, tree: StaticTree, requests: Sequence[DraftRequest]) -> TokenTree:
        """Run the nodes that have children, depth by depth, and take the likeliest tokens for those."""

        def expand(rows: list[int], token_ids: list[Tensor], parents: list[Tensor]) -> Tensor:
            segments = [
                Segment(requests[i].request_id, ids, above, torch.arange(len(ids)))
                for i, ids, above in zip(rows, token_ids, parents, strict=True)
            ]
            return self._runner.forward(segments).logits

        return grow_static(requests, tree, expand, self._vocab_size).tree

    def observe(self, seen: Sequence[Observation]) -> None: ...

    def release(self, request_id: int) -> None: ...

    def reset(self) -> None: ...

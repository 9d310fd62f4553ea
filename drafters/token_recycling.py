"""Token recycling: what the target found likely after a token before is drafted after it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.drafters.static_tree import StaticTree, chain_of, refuse_trees_on_chains, static_tree
from specdec.errors import ConfigError
from specdec.interfaces import DrafterContext, DraftRequest, FeatureSpec, Noise, Observation, TokenTree
from specdec.tree import stack_trees

_LONGEST_CHAIN = 64


class TokenRecyclingDrafter:
    """Drafts what the target found likely after the same tokens before; wants max_draft_tokens of 16 or more.

    Keeps the target's last `top_k` candidates after each token, and reads a static tree off that table.

    The table [V, top_k] is learned from every row the target computes, rejected drafts included, and serves all
    requests, present and future; `reset` forgets it. A token the target has not gone through yet has no children.

    Source: Luo et al. 2024, Token Recycling, arXiv 2408.08696.
    """

    name = "token_recycling"
    max_position: int | None = None
    shares_target_kv = False
    samples = False
    remembers = True

    def __init__(self, vocab_size: int, tree: StaticTree | None, top_k: int = 8) -> None:
        self.features = FeatureSpec(top_k=top_k)
        self._vocab_size, self._top_k = vocab_size, top_k
        self.draft_depth = None if tree is None else tree.depth
        self._tree, self._levels = tree, [] if tree is None else _level_tensors(tree)
        self._after: Tensor | None = None  # [V, top_k] int32, -1 = not known; made when there is something to learn

    @classmethod
    def build(cls, context: DrafterContext, tree: Any = "auto", top_k: int = 8) -> TokenRecyclingDrafter:
        """Build.

        Args:
            context: of the target.
            tree: "recycling", the paper's of 80 nodes; another name, numbers of children per depth, or paths (see
                `static_tree`); None = chains; "auto" = the paper's where the target takes trees, else chains. Only
                its first `max_draft_tokens` nodes are drafted, so raise that number for trees.
            top_k: candidates kept per token.

        Raises:
            ConfigError: a value is out of range, or the tree is wider than `top_k`.
            IncompatibleDrafterError: trees for a target that runs chains only.
        """
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= context.vocab_size:
            raise ConfigError(
                f"token_recycling drafter: top_k={top_k!r}; allowed: an integer from 1 to the vocabulary's "
                f"{context.vocab_size}"
            )
        if isinstance(tree, str) and tree == "auto":
            if not context.runner.supports_trees:
                return cls(context.vocab_size, None, top_k)
            narrow = (path for path in static_tree("recycling").paths if max(path) < top_k)
            return cls(context.vocab_size, StaticTree(narrow), top_k)
        if tree is None:
            return cls(context.vocab_size, None, top_k)
        shape = static_tree(tree)
        if shape.width > top_k:
            raise ConfigError(
                f"token_recycling drafter: the tree has {shape.width} children at a node and top_k={top_k} are kept; "
                "raise top_k or take a narrower tree"
            )
        refuse_trees_on_chains(cls.name, context, "use tree=None")
        return cls(context.vocab_size, shape, top_k)

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        if self._after is None:
            return stack_trees([([r.root_token_id], [-1]) for r in requests])
        tree, levels = self._tree, self._levels
        if tree is None:
            tree = chain_of(min(_LONGEST_CHAIN, max(r.max_draft_tokens for r in requests)))
            levels = _level_tensors(tree)
        found = self._expand(self._after, levels, [r.root_token_id for r in requests], len(tree) + 1).tolist()
        return stack_trees(
            [_compact(tokens, tree.parents, r.max_draft_tokens) for tokens, r in zip(found, requests, strict=True)]
        )

    @staticmethod
    def _expand(after: Tensor, levels: list[tuple[Tensor, Tensor, Tensor]], roots: list[int], num_nodes: int) -> Tensor:
        """Return [B, nodes] int64: the token at each node of the whole tree, -1 where nothing is known."""
        tokens = torch.full((len(roots), num_nodes), -1, dtype=torch.int64)
        tokens[:, 0] = torch.tensor(roots)
        for nodes, parents, ranks in levels:
            above = tokens[:, parents]
            tokens[:, nodes] = torch.where(above >= 0, after[above.clamp_min(0), ranks].to(torch.int64), -1)
        return tokens

    def observe(self, seen: Sequence[Observation]) -> None:
        rows: dict[int, Tensor] = {}  # the last row of a token wins
        for o in seen:
            if o.scored_token_ids is not None and o.top_token_ids is not None:
                rows.update(zip(o.scored_token_ids.tolist(), o.top_token_ids.cpu(), strict=True))
        if not rows:
            return
        if self._after is None:
            self._after = torch.full((self._vocab_size, self._top_k), -1, dtype=torch.int32)
        self._after[list(rows)] = torch.stack(list(rows.values())).to(torch.int32)

    def release(self, request_id: int) -> None: ...

    def reset(self) -> None:
        self._after = None


def _level_tensors(tree: StaticTree) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return (nodes, their parents, their ranks) of each depth below the root."""
    return [
        (
            torch.tensor(nodes),
            torch.tensor([tree.parents[node] for node in nodes]),
            torch.tensor([tree.ranks[node] for node in nodes]),
        )
        for nodes in tree.levels()[1:]
    ]


def _compact(tokens: list[int], parents: list[int], max_draft_tokens: int) -> tuple[list[int], list[int]]:
    """Return the first nodes that have a token, as many as allowed: what is unknown leaves its room to others."""
    place = {0: 0}
    token_ids, above = [tokens[0]], [-1]
    for node in range(1, len(tokens)):
        if len(token_ids) > max_draft_tokens:
            break
        if tokens[node] >= 0:
            place[node] = len(token_ids)
            token_ids.append(tokens[node])
            above.append(place[parents[node]])
    return token_ids, above

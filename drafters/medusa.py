"""Medusa: heads on the target's last hidden state guess the next tokens all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.drafters.advised_shape import advised_shape
from specdec.drafters.given_head import given_head
from specdec.drafters.growing_trees import likeliest
from specdec.drafters.rank_trees import FixedTree, Nodes, ProductTree
from specdec.drafters.static_tree import StaticTree, chain_of, refuse_trees_on_chains, static_tree
from specdec.drafters.tree_option import named_shape
from specdec.errors import ConfigError
from specdec.heads.loaded import LoadedHead
from specdec.heads.medusa import MedusaHeads
from specdec.interfaces import DrafterContext, DraftRequest, FeatureSpec, Noise, Observation, TokenTree, empty_tree
from specdec.models.machine import weight_bytes_beside


class MedusaDrafter:
    """Drafts trees of what trained heads guess for each of the next places; wants max_draft_tokens of 16 or more.

    Head i guesses the token i + 1 places behind the root, whatever stands between: a tree combines the guesses. All of
    them come from one pass over the hidden state that the root was predicted from.

    Nothing is drawn, so the output is the target's; with the lossy verifier `typical` this is Medusa as published.

    Source: Cai et al. 2024, Medusa, arXiv 2401.10774.
    """

    name = "medusa"
    max_position: int | None = None
    shares_target_kv = False
    samples = False

    def __init__(self, head: LoadedHead, vocab_size: int, shape: FixedTree | ProductTree) -> None:
        assert isinstance(head.module, MedusaHeads), "Medusa heads draft here"
        self._module, self._vocab_size, self._shape = head.module, vocab_size, shape
        self._draft_ids = None if head.vocabulary.is_whole else head.vocabulary.target_ids
        self._num_heads, self._draft_size = head.module.config.num_heads, head.vocabulary.size
        self.weight_bytes = 0  # beside the target's
        self._device = head.tensors[0].device  # the target's last block may lie elsewhere
        self.features: FeatureSpec = head.module.config.features
        # By request: the position of its last token, and the hidden state [H] that token was predicted from.
        self._last: dict[int, tuple[int, Tensor]] = {}
        self.draft_depth = head.module.config.num_heads  # no tree is deeper
        self.advised_draft_tokens: int | None = None

    @classmethod
    def build(cls, context: DrafterContext, model: Any = None, tree: Any = None) -> MedusaDrafter:
        """Build.

        Args:
            context: of the target.
            model: a folder, a hub id, the name of shipped heads, or a `LoadedHead`; None = those that ship for this
                target.
            tree: "chain" = the likeliest guess of each head; "best", or a dict with top_k and total_tokens = the
                likeliest paths by the heads' own probabilities, anew in each step; a preset's name, numbers of
                children per depth, or paths: see `static_tree`. None = what the checkpoint advises, else "medusa".
                At most `max_draft_tokens` nodes are drafted, so raise that number for trees.

        Raises:
            CheckpointError: the heads cannot be read.
            ConfigError: `model` or `tree` is none of these, or the tree is larger than what the heads guess.
            IncompatibleDrafterError: these are no Medusa heads or another target's, none ship for this target, or
                trees were asked for and it runs chains only.
        """
        head = given_head(cls.name, context, model)
        tree, draft_tokens = advised_shape(head.settings, context, tree, default=None)
        drafter = cls(head, context.vocab_size, _shape(context, head, tree))
        drafter.advised_draft_tokens = draft_tokens
        drafter.weight_bytes = weight_bytes_beside(context.runner.model, head.tensors)
        return drafter

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        drafting = [i for i, r in enumerate(requests) if r.max_draft_tokens > 0 and self._hidden(r) is not None]
        if not drafting:
            return empty_tree(requests)
        num_nodes = max(requests[i].max_draft_tokens for i in drafting)
        num_heads, width = self._shape.extent(num_nodes)
        num_heads, width = min(num_heads, self._num_heads), min(width, self._draft_size)
        log_probs, ids = self._guess([requests[i] for i in drafting], num_heads, width)
        # The other requests have guesses of no chance, and so no nodes.
        all_probs = log_probs.new_full((len(requests), num_heads, width), -torch.inf)
        all_ids = ids.new_zeros(all_probs.shape)
        all_probs[drafting], all_ids[drafting] = log_probs, ids
        return _trees(requests, self._shape.nodes(all_probs, num_nodes), all_probs, all_ids)

    def _hidden(self, request: DraftRequest) -> Tensor | None:
        """Return the hidden state [H] that the request's root was predicted from, if it is known."""
        position, hidden = self._last.get(request.request_id, (-1, None))
        return hidden if position == request.root_position else None

    def _guess(self, requests: Sequence[DraftRequest], num_heads: int, width: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities, float64, and token ids of the likeliest guesses, [B, heads, width] on the CPU."""
        hidden = torch.stack([self._last[r.request_id][1] for r in requests]).to(self._device)
        with torch.inference_mode():
            logits = self._module.logits(hidden, num_heads).flatten(0, 1)
            values, ids = likeliest(logits, width, self._vocab_size, self._draft_ids)
        return values.unflatten(0, (-1, num_heads)), ids.unflatten(0, (-1, num_heads))

    def observe(self, seen: Sequence[Observation]) -> None:
        for o in seen:
            if o.features is None:  # told anew after a failed step; the next forward brings a hidden state again
                self._last.pop(o.request_id, None)
            else:  # a copy, which does not keep the whole forward's
                self._last[o.request_id] = (o.start + len(o.token_ids) - 1, o.features[-1].clone())

    def release(self, request_id: int) -> None:
        self._last.pop(request_id, None)

    def reset(self) -> None: ...


def _trees(requests: Sequence[DraftRequest], nodes: Nodes, log_probs: Tensor, ids: Tensor) -> TokenTree:
    """Return the first nodes of each tree, as many as its request allows and the heads have guesses for.

    Args:
        requests: B requests.
        nodes: of B trees.
        log_probs: [B, heads, ranks] of the guesses; -inf = there is none.
        ids: [B, heads, ranks] their tokens.
    """
    index = nodes.heads * ids.shape[2] + nodes.ranks
    own = log_probs.flatten(1).gather(1, index)[:, 1:]
    goes_on = own > -torch.inf  # no node comes before its parent, so what is behind a missing one is left out
    least = torch.tensor([r.min_confidence for r in requests], dtype=torch.float64)
    if bool((least > 0).any()):
        is_chain = (nodes.parents == torch.arange(-1, nodes.parents.shape[1] - 1)).all(dim=1, keepdim=True)
        unsure = own.exp() < least[:, None]
        goes_on[:, 1:] &= ~(unsure & is_chain)[:, :-1]
    most = torch.tensor([r.max_draft_tokens for r in requests])
    num_draft = torch.minimum(goes_on.long().cumprod(dim=1).sum(dim=1), most)
    used = int(num_draft.max()) + 1
    token_ids = ids.flatten(1).gather(1, index[:, :used])
    token_ids[:, 0] = torch.tensor([r.root_token_id for r in requests])
    return TokenTree(token_ids, nodes.parents[:, :used], num_draft + 1)


def _shape(context: DrafterContext, head: LoadedHead, tree: Any) -> FixedTree | ProductTree:
    """Return the shape that `tree` names for these heads on this target; None = what they reach of "medusa"."""
    assert isinstance(head.module, MedusaHeads)
    num_heads, draft_size = head.module.config.num_heads, head.vocabulary.size
    if tree is None:
        fits = (path for path in static_tree("medusa").paths if len(path) <= num_heads and max(path) < draft_size)
        return FixedTree(StaticTree(fits))
    shape = named_shape(tree, "best", ProductTree)
    if shape is None:
        return FixedTree(chain_of(num_heads))
    refuse_trees_on_chains(MedusaDrafter.name, context, "use tree='chain'")
    if isinstance(shape, ProductTree):
        return shape
    if shape.depth > num_heads or shape.width > draft_size:
        raise ConfigError(
            f"medusa drafter: the tree is {shape.depth} deep and takes the {shape.width} likeliest tokens; "
            f"{head.source} has {num_heads} heads for {draft_size} tokens. Take a smaller tree, or leave tree out"
        )
    return FixedTree(shape)

"""Drafters that only tests need: wrappers, known answers, and proposals no verifier may see."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.interfaces import DraftRequest, FeatureSpec, Noise, Observation, TokenTree
from specdec.tree import stack_trees


class Wrapped:
    """Another drafter, called through `change`, which gets its tree and may return any other."""

    def __init__(
        self, inner: Any, change: Callable[[TokenTree, Sequence[DraftRequest]], TokenTree] | None = None
    ) -> None:
        self.inner, self.change = inner, change
        self.name, self.features, self.max_position = inner.name, inner.features, inner.max_position
        self.shares_target_kv, self.samples = inner.shares_target_kv, inner.samples
        self.num_proposals = 0

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        self.num_proposals += 1
        tree = self.inner.propose(requests, noise)
        return tree if self.change is None else self.change(tree, requests)

    def observe(self, seen: Sequence[Observation]) -> None:
        self.inner.observe(seen)

    def release(self, request_id: int) -> None:
        self.inner.release(request_id)

    def reset(self) -> None:
        self.inner.reset()


class Plain:
    """The parts of a drafter that most test drafters share."""

    name = "plain"
    features = FeatureSpec()
    max_position: int | None = None
    shares_target_kv = False
    samples = False

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        raise NotImplementedError

    def observe(self, seen: Sequence[Observation]) -> None: ...

    def release(self, request_id: int) -> None: ...

    def reset(self) -> None: ...


class KnownTrees(Plain):
    """Random trees around the known answers, with the true tokens anywhere among their siblings.

    Args:
        texts: prompt + answer of each request; a request's tokens are found by its position and root.
        seed: of the shapes.
        duplicates: let siblings repeat, the true token included.
        reverse: list siblings the other way round; the trees are the same otherwise.
    """

    def __init__(self, texts: Sequence[Sequence[int]], seed: int, *, duplicates: bool = False, reverse: bool = False):
        self.texts, self.seed, self.duplicates, self.reverse = texts, seed, duplicates, reverse
        self.request_texts: dict[int, Sequence[int]] = {}

    def observe(self, seen: Sequence[Observation]) -> None:
        for o in seen:
            if o.start == 0:
                start = o.token_ids.tolist()
                self.request_texts[o.request_id] = next(t for t in self.texts if list(t[: len(start)]) == start)

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        return stack_trees([self._tree(r) for r in requests])

    def _tree(self, request: DraftRequest) -> tuple[list[int], list[int]]:
        text = self.request_texts[request.request_id]
        dice = random.Random(f"{self.seed} {request.root_position}")
        children: dict[tuple[int, ...], list[int]] = {}  # path -> tokens below it, breadth first
        open_paths: list[tuple[int, ...]] = [()]
        room = request.max_draft_tokens
        for depth in range(1, 5):
            true = text[request.root_position + depth] if request.root_position + depth < len(text) else 1
            below: list[tuple[int, ...]] = []
            for path in open_paths:
                tokens = (
                    dice.choices(range(1, 64), k=dice.randint(0, 2))
                    if self.duplicates
                    else dice.sample([t for t in range(1, 64) if t != true], dice.randint(0, 2))
                )
                on_truth = list(path) == list(text[request.root_position + 1 : request.root_position + depth])
                if on_truth and dice.random() < 0.9:
                    tokens.insert(dice.randint(0, len(tokens)), true)
                    if self.duplicates and dice.random() < 0.5:
                        tokens.insert(dice.randint(0, len(tokens)), true)
                tokens = tokens[:room]
                room -= len(tokens)
                children[path] = tokens
                below += [(*path, t) for t in dict.fromkeys(tokens)]
            open_paths = below
        return self._spell(request.root_token_id, children)

    def _spell(self, root: int, children: dict[tuple[int, ...], list[int]]) -> tuple[list[int], list[int]]:
        token_ids, parents = [root], [-1]
        level: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        while level:
            below = []
            for node, path in level:
                tokens = children.pop(path, [])  # of equal siblings the first one goes on
                for token in reversed(tokens) if self.reverse else tokens:
                    below.append((len(token_ids), (*path, token)))
                    token_ids.append(token)
                    parents.append(node)
            level = below
        return token_ids, parents


def spoil(tree: TokenTree, requests: Sequence[DraftRequest], kind: str, rows: Sequence[int]) -> TokenTree:
    """Return `tree` made invalid for requests `rows` of the step in the named way."""
    token_ids, parents, num_nodes = tree.token_ids.clone(), tree.parents.clone(), tree.num_nodes.clone()
    index = torch.tensor(rows, dtype=torch.int64)
    if kind == "id_too_large":
        token_ids[index, 1] = 64
    elif kind == "id_negative":
        token_ids[index, 1] = -1
    elif kind == "wrong_root":
        token_ids[index, 0] = (token_ids[index, 0] + 1) % 64
    elif kind == "root_has_parent":
        parents[index, 0] = 0
    elif kind == "parent_after_child":
        parents[index, 1] = 1
    elif kind == "parent_missing":
        parents[index, 1] = -1
    elif kind == "no_nodes":
        num_nodes[index] = 0
    elif kind == "too_many_nodes":
        num_nodes[index] = token_ids.shape[1] + 1
    elif kind == "too_many_drafts":
        extra = max(r.max_draft_tokens for r in requests) + 2 - token_ids.shape[1]
        token_ids = torch.nn.functional.pad(token_ids, (0, extra), value=1)
        parents = torch.arange(-1, token_ids.shape[1] - 1).repeat(token_ids.shape[0], 1)
        num_nodes[index] = token_ids.shape[1]
    return replace(tree, token_ids=token_ids, parents=parents, num_nodes=num_nodes)


def spoil_probs(tree: TokenTree, kind: str) -> TokenTree:
    """Return `tree` with draft_probs that mean nothing."""
    assert tree.draft_probs is not None
    assert tree.draft_row is not None
    probs: Tensor = tree.draft_probs.clone()
    rows = tree.draft_row.clone()
    if kind == "nan":
        probs[:] = torch.nan
    elif kind == "infinite":
        probs[:, 0] = torch.inf
    elif kind == "negative":
        probs[:, 0] -= 2.0
    elif kind == "sum_of_two":
        probs *= 2.0
    elif kind == "row_outside":
        rows[:] = probs.shape[0]
    elif kind == "never_drawn":
        probs[:] = 0.0
        probs[:, 0] = 1.0
    return replace(tree, draft_probs=probs, draft_row=rows)


WRONG_SHAPES: dict[str, Callable[[TokenTree], Any]] = {
    "no_tree": lambda tree: None,
    "a_list": lambda tree: tree.token_ids.tolist(),
    "one_dimension": lambda tree: replace(tree, token_ids=tree.token_ids[0]),
    "other_batch": lambda tree: replace(tree, token_ids=tree.token_ids.repeat(2, 1)),
    "no_columns": lambda tree: replace(tree, token_ids=tree.token_ids[:, :0], parents=tree.parents[:, :0]),
    "parents_narrower": lambda tree: replace(tree, parents=tree.parents[:, :1]),
    "counts_2d": lambda tree: replace(tree, num_nodes=tree.num_nodes[:, None]),
    "int32": lambda tree: replace(tree, token_ids=tree.token_ids.int()),
    "float_parents": lambda tree: replace(tree, parents=tree.parents.float()),
    "probs_without_rows": lambda tree: replace(tree, draft_probs=torch.full((1, 64), 1 / 64)),
    "narrow_probs": lambda tree: replace(
        tree, draft_probs=torch.full((1, 8), 1 / 8), draft_row=torch.zeros_like(tree.parents)
    ),
}

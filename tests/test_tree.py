"""Trees: structure against a slow reading of the same parents, and every way a drafter can get one wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.interfaces import DraftRequest, SamplingParams, TokenTree
from specdec.tree import (
    ancestor_mask,
    chain,
    check_tree,
    children_table,
    depths,
    drop_drafts,
    is_chain,
    pad_tree,
    path_to,
    paths_to,
    select,
    stack_trees,
)


@st.composite
def parents_lists(draw: Any, max_size: int = 12) -> list[int]:
    size = draw(st.integers(1, max_size))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]


def slow_path(parents: list[int], node: int) -> list[int]:
    return [] if node == 0 else [*slow_path(parents, parents[node]), node]


@given(parents_lists())
def test_reading_a_tree(parents: list[int]) -> None:
    tensor, nodes = torch.tensor(parents), range(len(parents))
    assert depths(tensor).tolist() == [len(slow_path(parents, node)) for node in nodes]
    assert [path_to(tensor, node).tolist() for node in nodes] == [slow_path(parents, node) for node in nodes]
    seen = [[0, *slow_path(parents, node)] for node in nodes]
    assert ancestor_mask(tensor).tolist() == [[j in seen[i] for j in nodes] for i in nodes]
    assert is_chain(tensor) == (parents == list(range(-1, len(parents) - 1)))


@given(st.lists(parents_lists(), min_size=1, max_size=5))
def test_reading_a_ragged_batch(many: list[list[int]]) -> None:
    tree = stack_trees([(list(range(len(parents))), parents) for parents in many])
    table = children_table(tree)
    for row, parents in enumerate(many):
        for node in range(tree.parents.shape[1]):
            children = [child for child, parent in enumerate(parents) if parent == node]
            assert table[row, node].tolist() == children + [-1] * (table.shape[2] - len(children))
    last = torch.tensor([len(parents) - 1 for parents in many])
    path, depth = paths_to(tree.parents, last)
    for row, parents in enumerate(many):
        expected = slow_path(parents, len(parents) - 1)
        assert int(depth[row]) == len(expected)
        assert path[row].tolist() == expected + [-1] * (path.shape[1] - len(expected))
    assert path.shape[1] == int(depth.max())


def test_the_mask_in_the_docstring() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert ancestor_mask(torch.tensor([-1, 0, 0, 1])).int().tolist() == expected


def test_depths_of_a_batch() -> None:
    assert depths(torch.tensor([[-1, 0, 1], [-1, 0, 0]])).tolist() == [[0, 1, 2], [0, 1, 1]]


def test_a_chain() -> None:
    probs = torch.rand(4, 5)
    tree = chain(torch.tensor([7, 8]), torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 1]), probs)
    assert tree.token_ids.tolist() == [[7, 1, 2], [8, 3, 4]]
    assert tree.parents.tolist() == [[-1, 0, 1]] * 2
    assert tree.num_nodes.tolist() == [3, 2]
    assert tree.draft_row is not None
    assert tree.draft_row.tolist() == [[0, 1, -1], [2, -1, -1]]
    assert is_chain(tree.parents)
    assert children_table(tree).tolist() == [[[1], [2], [-1]], [[1], [-1], [-1]]]
    assert not tree.with_replacement


def test_a_chain_of_point_masses_and_an_empty_one() -> None:
    tree = chain(torch.tensor([7, 8]), torch.empty(2, 0, dtype=torch.int64), torch.tensor([0, 0]))
    assert tree.token_ids.tolist() == [[7], [8]]
    assert tree.draft_row is None
    assert children_table(tree).shape == (2, 1, 0)
    rows = torch.tensor([[3, -1]])
    assert chain(torch.tensor([7]), torch.tensor([[1]]), torch.tensor([1]), torch.rand(4, 5), rows).draft_row is rows


def test_stacking_takes_tensors_and_draft_rows() -> None:
    probs = torch.rand(2, 9)
    trees = [(torch.tensor([5]), torch.tensor([-1])), (torch.tensor([6, 7, 8]), torch.tensor([-1, 0, 0]))]
    tree = stack_trees(trees, probs, [[-1], [1, -1, -1]], with_replacement=True)
    assert tree.token_ids.tolist() == [[5, 0, 0], [6, 7, 8]]
    assert tree.parents.tolist() == [[-1, -1, -1], [-1, 0, 0]]
    assert tree.num_nodes.tolist() == [1, 3]
    assert tree.draft_row is not None
    assert tree.draft_row.tolist() == [[-1, -1, -1], [1, -1, -1]]
    assert tree.draft_probs is probs
    assert tree.with_replacement


def test_selecting_dropping_and_padding() -> None:
    probs = torch.rand(4, 5)
    tree = chain(torch.tensor([7, 8, 9]), torch.tensor([[1], [2], [3]]), torch.tensor([1, 1, 0]), probs)
    part = select(tree, [2, 0])
    assert part.token_ids.tolist() == [[9, 3], [7, 1]]
    assert part.num_nodes.tolist() == [1, 2]
    assert part.draft_row is not None
    assert part.draft_row.tolist() == [[-1, -1], [0, -1]]
    assert part.draft_probs is probs
    assert drop_drafts(tree, torch.tensor([0])).num_nodes.tolist() == [1, 2, 1]
    assert drop_drafts(tree, []).num_nodes.tolist() == tree.num_nodes.tolist() == [2, 2, 1]
    wide = pad_tree(tree, 4)
    assert wide.token_ids.shape == wide.parents.shape == (3, 4)
    assert children_table(wide)[:, :2].tolist() == children_table(tree).tolist()
    assert pad_tree(tree, 2) is tree


V = 6


def requests_for(tree: TokenTree, max_draft_tokens: int = 4) -> list[DraftRequest]:
    roots = tree.token_ids[:, 0].tolist()
    return [DraftRequest(i, root, 10, max_draft_tokens, SamplingParams()) for i, root in enumerate(roots)]


def good_tree() -> TokenTree:
    """Three requests: a sampled tree, a sampled chain, nothing drafted."""
    probs = torch.tensor([[0.5, 0.25, 0.25, 0, 0, 0], [0, 0, 0, 1, 0, 0], [1 / 6] * 6])
    trees = [([5, 0, 1, 3], [-1, 0, 0, 1]), ([4, 3, 2], [-1, 0, 1]), ([3], [-1])]
    return stack_trees(trees, probs, [[0, 1, -1, -1], [1, 2, -1], [-1]])


def edit(values: Tensor | None, place: tuple[int, ...], value: float) -> Tensor:
    assert values is not None
    values = values.clone()
    values[place] = value
    return values


def test_a_good_tree_has_no_fault() -> None:
    tree = good_tree()
    assert check_tree(tree, requests_for(tree), V) == [None, None, None]
    without = replace(tree, draft_probs=None, draft_row=None)
    assert check_tree(without, requests_for(tree), V) == [None, None, None]
    assert check_tree(select(tree, []), [], V) == []


# Each breaks request 0 only.
FAULTS: dict[str, Callable[[TokenTree], TokenTree]] = {
    "last pending token": lambda t: replace(t, token_ids=edit(t.token_ids, (0, 0), 2)),
    "root has a parent": lambda t: replace(t, parents=edit(t.parents, (0, 0), 0)),
    "a parent does not come before its child": lambda t: replace(t, parents=edit(t.parents, (0, 2), 2)),
    "a parent does not come": lambda t: replace(t, parents=edit(t.parents, (0, 2), -1)),
    "a parent does": lambda t: replace(t, parents=edit(t.parents, (0, 3), 99)),
    "outside the target's vocabulary": lambda t: replace(t, token_ids=edit(t.token_ids, (0, 3), V)),
    "outside the target's": lambda t: replace(t, token_ids=edit(t.token_ids, (0, 3), -1)),
    "num_nodes is outside": lambda t: replace(t, num_nodes=edit(t.num_nodes, (0,), 5)),
    "num_nodes is": lambda t: replace(t, num_nodes=edit(t.num_nodes, (0,), 0)),
    "draft_row is outside": lambda t: replace(t, draft_row=edit(t.draft_row, (0, 1), 3)),
    "draft_row is": lambda t: replace(t, draft_row=edit(t.draft_row, (0, 1), -2)),
    "probability 0": lambda t: replace(t, token_ids=edit(t.token_ids, (0, 2), 4)),
    "a sum other than 1": lambda t: replace(t, draft_probs=edit(t.draft_probs, (0, 0), 0.51)),
    "NaN, a negative": lambda t: replace(t, draft_probs=edit(t.draft_probs, (0, 0), math.nan)),
    "a negative entry": lambda t: replace(t, draft_probs=edit(edit(t.draft_probs, (0, 3), -0.25), (0, 0), 0.75)),
    "NaN": lambda t: replace(t, draft_probs=edit(t.draft_probs, (0, 0), math.inf)),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_fault_23_a_bad_tree_is_named_and_its_neighbours_are_kept(reason: str) -> None:
    tree = good_tree()
    found = check_tree(FAULTS[reason](tree), requests_for(tree), V)
    assert found[0] is not None
    assert reason in found[0]
    assert found[1:] == [None, None]


def test_fault_23_too_many_draft_tokens() -> None:
    tree = good_tree()
    found = check_tree(tree, requests_for(tree, max_draft_tokens=2), V)
    assert [reason is not None and "max_draft_tokens" in reason for reason in found] == [True, False, False]


SHAPE_FAULTS: dict[str, Callable[[TokenTree], TokenTree]] = {
    "token_ids has shape": lambda t: replace(t, token_ids=t.token_ids[:2]),
    "token_ids has": lambda t: replace(t, token_ids=t.token_ids[0]),
    "parents has shape": lambda t: replace(t, parents=t.parents[:, :2]),
    "num_nodes has shape": lambda t: replace(t, num_nodes=t.num_nodes[:2]),
    "draft_row has shape": lambda t: replace(t, draft_row=t.draft_row[:, :1] if t.draft_row is not None else None),
    "token_ids has dtype": lambda t: replace(t, token_ids=t.token_ids.float()),
    "draft_row has dtype": lambda t: replace(t, draft_row=t.draft_row.int() if t.draft_row is not None else None),
    "draft_probs has shape": lambda t: replace(t, draft_probs=torch.rand(3, V + 1)),
    "draft_probs has dtype": lambda t: replace(t, draft_probs=torch.ones(3, V, dtype=torch.int64)),
    "only together": lambda t: replace(t, draft_probs=None),
    "given only together": lambda t: replace(t, draft_row=None),
}


@pytest.mark.parametrize("reason", SHAPE_FAULTS)
def test_fault_23_a_wrong_shape_spoils_every_request(reason: str) -> None:
    tree = good_tree()
    found = check_tree(SHAPE_FAULTS[reason](tree), requests_for(tree), V)
    assert len(found) == 3
    assert all(text is not None and reason in text for text in found)


def test_fault_23_no_rows_of_draft_probs() -> None:
    tree = replace(good_tree(), draft_probs=torch.empty(0, V))
    found = check_tree(tree, requests_for(tree), V)
    assert [reason is None for reason in found] == [False, False, True]
    points = replace(tree, draft_row=torch.full_like(tree.parents, -1))
    assert check_tree(points, requests_for(tree), V) == [None, None, None]


@given(st.data())
def test_fault_23_rubbish_never_raises(data: st.DataObject) -> None:
    """Whatever integers a tree holds, the check answers; what it passes can be read."""
    wild = st.integers(-3, 9)
    matrix = st.lists(st.lists(wild, min_size=4, max_size=4), min_size=2, max_size=2)
    tree = TokenTree(
        *(torch.tensor(data.draw(matrix)) for _ in range(2)),
        num_nodes=torch.tensor(data.draw(st.lists(wild, min_size=2, max_size=2))),
        draft_probs=torch.rand(2, V),
        draft_row=torch.tensor(data.draw(matrix)),
    )
    reasons = check_tree(tree, requests_for(tree), V)
    good = [row for row, reason in enumerate(reasons) if reason is None]
    children_table(select(tree, good))

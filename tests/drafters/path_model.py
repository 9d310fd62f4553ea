"""A draft model that looks at the whole path: a tree grown with a wrong parent anywhere gets other tokens."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.interfaces import DraftRequest, SamplingParams, TokenTree

GREEDY = SamplingParams()
Path = tuple[int, ...]  # token ids from the root on


def request(most: int, root: int = 0, sampling: SamplingParams = GREEDY) -> DraftRequest:
    return DraftRequest(root, root, 5, most, sampling)


def random_logits(size: int, spread: float = 2.0) -> Callable[[Path], Tensor]:
    def logits(path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(repr(path).encode()))
        return torch.randn(size, generator=generator) * spread

    return logits


class PathModel:
    """What `Expand` describes, over a function from paths to [Vd] logits; keeps what was run."""

    def __init__(
        self, requests: Sequence[DraftRequest], logits: Callable[[Path], Tensor], as_list: bool = True
    ) -> None:
        self.paths: list[list[Path]] = [[] for _ in requests]  # per request, of the row of that number
        self.calls: list[list[int]] = []
        self._logits, self._as_list = logits, as_list

    def __call__(self, rows: list[int], token_ids: list[Tensor], parents: list[Tensor]) -> list[Tensor] | Tensor:
        assert len(rows) == len(token_ids) == len(parents)
        assert rows == sorted(set(rows))
        self.calls.append(rows)
        return self._joined([self._run(*args) for args in zip(rows, token_ids, parents, strict=True)])

    def _run(self, row: int, token_ids: Tensor, parents: Tensor) -> Tensor:
        known = list(self.paths[row])
        assert len(token_ids)
        assert token_ids.dtype == parents.dtype == torch.int64
        for token, parent in zip(token_ids.tolist(), parents.tolist(), strict=True):
            assert (parent == -1) == (not known)
            self.paths[row].append(((*known[parent], token)) if known else (token,))
        new = self.paths[row][len(known) :]
        return torch.stack([self._logits(path) for path in new])

    def _joined(self, found: list[Tensor]) -> list[Tensor] | Tensor:
        return found if self._as_list else torch.cat(found)


def tree_paths(tree: TokenTree, row: int) -> list[Path]:
    """Return the tokens from the root to each node of one request."""
    found: list[Path] = []
    for node in range(int(tree.num_nodes[row])):
        parent, token = int(tree.parents[row, node]), int(tree.token_ids[row, node])
        assert parent < node
        found.append(((*found[parent], token)) if parent >= 0 else (token,))
    return found


def assert_rows(rows: list[list[int]], tree: TokenTree, model: PathModel) -> None:
    """Assert that every node names the row it was run in, and that it was run only if it says so."""
    for b, of_nodes in enumerate(rows):
        paths = tree_paths(tree, b)
        run = {path: row for row, path in enumerate(model.paths[b])}
        assert len(run) == len(model.paths[b])  # nothing runs twice
        assert of_nodes == [run.get(path, -1) for path in paths]

"""The target's distributions at the nodes of a step's trees, as verifiers ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.errors import ModelOutputError
from specdec.interfaces import TokenTree
from specdec.request import Request
from specdec.sampling import apply_processors, filtered_scores, probabilities
from specdec.tree import path_to


class StepRows:
    """Logits of every node of every request, with the requests' own sampling applied when asked.

    Args:
        logits: [R, V]; node i of request b is row first_row[b] + i.
        first_row: [B] int64.
        requests: B requests.
        tree: their trees, for the token paths that processors see.
    """

    def __init__(self, logits: Tensor, first_row: Tensor, requests: Sequence[Request], tree: TokenTree) -> None:
        self._logits, self._first, self._requests, self._tree = logits, first_row, requests, tree
        self._ids: dict[int, Tensor] = {}
        self._seen: dict[tuple[int, int], Tensor] = {}  # (request id, node) -> [V] after its processors
        self._best: tuple[Tensor, Tensor] | None = None  # largest logit and its token, all rows

    def select(self, rows: Tensor, tree: TokenTree) -> StepRows:
        """Return the view of a sub-batch `rows` [L] with its sub-tree."""
        chosen = StepRows(self._logits, self._first[rows], [self._requests[i] for i in rows.tolist()], tree)
        chosen._best, chosen._seen = self._best, self._seen
        return chosen

    def logits(self, row: int, nodes: Sequence[int]) -> Tensor:
        """Return [n, V] float32, the target's own logits after `nodes` of request `row`."""
        return self._logits[self._first[row] + torch.tensor(nodes, device=self._first.device)].to(torch.float32)

    def scores(self, row: int, nodes: Sequence[int]) -> Tensor:
        """Return [n, V] float32, the logits after processors, temperature and filters (-inf where filtered out).

        At nodes that a verifier has asked about, processors are not run again.
        """
        rows = torch.full((len(nodes),), row, device=self._first.device)
        processed = self._processed(rows, torch.tensor(nodes, device=self._first.device))
        return filtered_scores(processed, self._requests[row].sampling)

    def judged_scores(self, row: int, nodes: Sequence[int]) -> Tensor:
        """Return [n, V] float32 like `scores`, but run no processor: NaN at nodes where one would have to.

        For watchers, who look when the step's tokens are committed and processors would see the wrong ones.
        """
        sampling, request_id = self._requests[row].sampling, self._requests[row].request_id
        processed = self.logits(row, nodes)
        if not sampling.processors:
            return filtered_scores(processed, sampling)
        result = torch.full_like(processed, torch.nan)
        for i, node in enumerate(nodes):
            if (request_id, node) in self._seen:
                result[i] = filtered_scores(self._seen[request_id, node][None], sampling)[0]
        return result

    def probs(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return [L, V] float32; see `TargetRows`."""
        logits = self._processed(rows, nodes)
        largest = logits.amax(dim=-1)
        self._refuse_unusable(largest, largest.isposinf(), rows)
        return probabilities(logits, [self._requests[i].sampling for i in rows.tolist()])

    def top(self, rows: Tensor, nodes: Tensor) -> Tensor | None:
        """Return [L] int64 argmax tokens if all are greedy; see `TargetRows`."""
        sampling = [self._requests[i].sampling for i in rows.tolist()]
        if not all(s.greedy for s in sampling):
            return None
        if any(s.processors for s in sampling):
            values, tokens = self._processed(rows, nodes).max(dim=-1)
        else:
            if self._best is None:
                # float32, as transformers casts before its argmax: ties must fall the same way.
                self._best = tuple(self._logits.to(torch.float32).max(dim=-1))  # type: ignore[assignment]
            index = self._first[rows] + nodes
            values, tokens = self._best[0][index], self._best[1][index]  # type: ignore[index]
        self._refuse_unusable(values, None, rows)
        return tokens

    def _processed(self, rows: Tensor, nodes: Tensor) -> Tensor:
        logits = self._logits[self._first[rows] + nodes]
        if not any(self._requests[i].sampling.processors for i in rows.tolist()):
            return logits
        result = logits.to(torch.float32)
        for i, (row, node) in enumerate(zip(rows.tolist(), nodes.tolist(), strict=True)):
            request = self._requests[row]
            if not request.sampling.processors:
                continue
            key = (request.request_id, node)
            if key not in self._seen:
                self._seen[key] = self._process(request, row, node, logits[i : i + 1])
            result[i] = self._seen[key]
        return result

    def _process(self, request: Request, row: int, node: int, logits: Tensor) -> Tensor:
        """Return [V] float32, logits [1, V] after the processors of a request, at a node's own token path."""
        path = self._tree.token_ids[row, path_to(self._tree.parents[row], node)]
        if request.first_stop(path.tolist()) is not None:
            # Never emitted: plain decoding asks nothing behind a stop, and a grammar may have no answer there.
            return logits[0].to(torch.float32)
        ids = torch.cat([self._tokens(row), path[None]], dim=1)
        with request.blamed():
            return apply_processors(logits, ids, request.sampling.processors)[0]

    def _tokens(self, row: int) -> Tensor:
        """Return [1, n] int64, the tokens of a request up to its root; made once per step."""
        request = self._requests[row]
        if request.request_id not in self._ids:
            ids = torch.tensor([request.tokens], dtype=torch.int64, device=self._logits.device)
            self._ids[request.request_id] = ids
        return self._ids[request.request_id]

    def _refuse_unusable(self, largest: Tensor, overflown: Tensor | None, rows: Tensor) -> None:
        """Raise ModelOutputError where the largest logit [L] is NaN or -inf, or `overflown` [L] is set."""
        if bool(largest.isfinite().all()):
            return
        bad = largest.isnan() | largest.isneginf()
        if overflown is not None:
            bad |= overflown
        if bool(bad.any()):
            first = int(bad.nonzero()[0, 0])
            index, value = int(rows[first]), float(largest[first])
            what = "NaN" if value != value else "-inf for every token" if value < 0 else "+inf for some tokens"
            request = self._requests[index]
            with request.blamed():
                raise ModelOutputError(
                    f"request {request.request_id}: the target's logits are {what} after {len(request.tokens)} tokens, "
                    "so no token can be chosen; check the weights, the dtype (float16 overflows in some models) and "
                    "the logits processors"
                )

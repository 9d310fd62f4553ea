"""The engine's side of the border with a drafter: ask it, check what it proposes, tell it what happened."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.acceptance import Verdict
from specdec.errors import ConfigError, IncompatibleDrafterError, OutOfCacheError
from specdec.interfaces import Drafter, DraftRequest, FeatureSpec, Forward, Noise, Observation, TokenTree, empty_tree
from specdec.models.runner import ModelRunner
from specdec.request import Request
from specdec.scheduler import Work
from specdec.tree import check_tree, drop_drafts, is_chain, move, pad_tree

log = logging.getLogger("specdec")
NoiseOf = Callable[[Sequence[Request]], Noise]


class Drafting:
    """One drafter at work for one target. A faulty proposal costs speed, never output."""

    def __init__(self, drafter: Drafter, target: ModelRunner, warn_once: Callable[[str, str], None]) -> None:
        _check_attributes(drafter)
        bad = [layer for layer in drafter.features.layers if not 0 <= layer < target.program.num_layers]
        if bad:
            raise IncompatibleDrafterError(
                f"drafter {drafter.name!r} wants the hidden states of layers {bad}; the target has layers 0 to "
                f"{target.program.num_layers - 1}"
            )
        shared = getattr(drafter, "target_cache", None)
        if shared is not None and shared is not target.cache:
            raise IncompatibleDrafterError(
                f"drafter {drafter.name!r} was built for another target, or for other runner options of this one, and "
                "works on that one's KV cache; build one for this target, or pass its name"
            )
        self.drafter, self._target, self._warn_once = drafter, target, warn_once
        self.num_errors = 0

    def trees(self, work: Sequence[Work], noise_of: NoiseOf, min_confidence: float) -> tuple[TokenTree, bool]:
        """Return the trees of the B requests that choose a token in this step, and whether the drafter was asked."""
        owners = [w.request for w in work if w.samples]
        asked = [self._draft_request(w, min_confidence) for w in work if w.samples]
        drafting = [i for i, r in enumerate(asked) if r.max_draft_tokens > 0]
        tree = empty_tree(asked, self._target.device)
        if drafting:
            noise = noise_of([owners[i] for i in drafting])
            drafted = self._propose([asked[i] for i in drafting], [owners[i] for i in drafting], noise)
            if drafted is not None:
                tree = _scatter(drafted, drafting, tree)
        return tree, bool(drafting)

    def _draft_request(self, work: Work, min_confidence: float) -> DraftRequest:
        request = work.request
        most = work.max_draft_tokens
        position = len(request.tokens) - 1
        if self.drafter.max_position is not None:
            # Draft positions past the drafter's limit are not drafted; the target goes on alone.
            room, depth = max(0, self.drafter.max_position - position), getattr(self.drafter, "draft_depth", None)
            most = most if depth is not None and depth <= room else min(most, room)
        return DraftRequest(request.request_id, request.tokens[-1], position, most, request.sampling, min_confidence)

    def _propose(self, requests: Sequence[DraftRequest], owners: Sequence[Request], noise: Noise) -> TokenTree | None:
        """Return the drafter's trees with invalid ones emptied, or None."""
        try:
            proposed = self.drafter.propose(requests, noise)
        except OutOfCacheError as error:
            self._warn_once("memory", f"drafter {self.drafter.name!r} has no KV memory left, going on without: {error}")
            for owner in owners:
                owner.stats.num_missed_drafts += 1
            return None
        except Exception as error:  # whatever a drafter raises costs its drafts, never a request
            self._give_up(owners, error, "propose")
            return None
        finally:
            if self.drafter.shares_target_kv:
                for r in requests:
                    self._target.cache.rewind(r.request_id)
        tree = move(proposed, self._target.device) if isinstance(proposed, TokenTree) else proposed
        reasons = check_tree(tree, requests, self._target.vocab_size)
        if not self._target.supports_trees:
            reasons = [reason or _tree_fault(tree, i) for i, reason in enumerate(reasons)]
        bad = [i for i, reason in enumerate(reasons) if reason is not None]
        if not bad:
            return tree
        for i in bad:
            owners[i].stats.num_rejected_drafts += 1
        self._warn_once(
            "tree", f"drafter {self.drafter.name!r} proposed an invalid tree, which was dropped: {reasons[bad[0]]}"
        )
        if len(bad) == len(requests):
            return None
        tree = drop_drafts(tree, bad)
        # The root of an invalid tree may be invalid itself.
        roots = torch.tensor([[r.root_token_id] for r in requests], dtype=torch.int64, device=self._target.device)
        return replace(tree, token_ids=torch.cat([roots, tree.token_ids[:, 1:]], dim=1))

    def _give_up(self, requests: Sequence[Request], error: Exception, where: str) -> None:
        """Go on without drafts for requests over which the drafter raised."""
        self._warn_once(
            "error",
            f"drafter {self.drafter.name!r} raised {type(error).__name__} in {where}(): {error}; the requests it was "
            "called for go on without drafts",
        )
        log.debug("drafter %r raised in %s()", self.drafter.name, where, exc_info=error)
        for request in requests:
            if request.draft:
                request.draft = False
                request.stats.num_drafter_errors += 1
                self.num_errors += 1
                self.release(request)

    def observe(
        self, work: Sequence[Work], verdicts: Sequence[Verdict], tree: TokenTree, forward: Forward
    ) -> list[Observation]:
        """Tell the drafter every token that became known, with the hidden states and candidates it asked for.

        Returns:
            One observation per work item; the drafter hears only of requests that it drafts for.
        """
        seen: list[Observation] = []
        row, scored, b = 0, 0, 0
        for w, verdict in zip(work, verdicts, strict=True):
            request = w.request
            num_kept = len(verdict.kept)
            # After a forward at positions s .. s + c - 1 the tokens at s + 1 .. s + c are known, and token 0 at first.
            before = request.num_computed - num_kept
            start = before + 1 if before else 0
            ids = torch.tensor(request.tokens[start : request.num_computed + 1], dtype=torch.int64)
            features = None
            if forward.features is not None:
                features = forward.features[row + verdict.kept.to(forward.features.device)]
            row += w.num_rows + verdict.drafted
            scored_ids = top = None
            if w.samples:
                n = 1 + verdict.drafted
                scored_ids, top = self._candidates(tree.token_ids[b, :n], forward.logits[scored : scored + n])
                scored, b = scored + n, b + 1
            seen.append(Observation(request.request_id, start, ids, features, verdict.path, scored_ids, top))
        heard = [(w.request, o) for w, o in zip(work, seen, strict=True) if w.request.draft]
        try:
            if heard:
                self.drafter.observe([o for _, o in heard])
        except Exception as error:  # as in propose(): the tokens are the target's
            self._give_up([request for request, _ in heard], error, "observe")
        return seen

    def _candidates(self, token_ids: Tensor, logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the tokens of scored rows and the likeliest next tokens after each, if the drafter wants them."""
        k = min(self.drafter.features.top_k, logits.shape[-1])
        if not k:
            return None, None
        return token_ids, logits.topk(k, dim=-1).indices

    def release(self, request: Request) -> None:
        """Let the drafter forget a request; a fault of its own must not keep back other requests' tokens."""
        try:
            self.drafter.release(request.request_id)
        except Exception:  # whatever a drafter raises is in the log; the request is over all the same
            log.exception("drafter %r could not release request %s", self.drafter.name, request.request_id)
            own = getattr(self.drafter, "own_cache", None)
            if own is not None and own.is_open(request.request_id):  # its memory is shared with the target
                own.release(request.request_id)

    def tell_anew(self, request: Request, features: Tensor | None = None) -> None:
        """Give the drafter the computed tokens of a request as if it had never heard of it.

        Args:
            request: of which `num_computed` tokens are computed.
            features: [num_computed, F] hidden states of their rows, where those are still known.
        """
        if not request.draft:
            return
        known = torch.tensor(request.tokens[: request.num_computed + 1], dtype=torch.int64)
        try:
            self.drafter.release(request.request_id)
            if request.num_computed:
                self.drafter.observe([Observation(request.request_id, 0, known, features)])
        except Exception:  # the step's own error goes on to the caller; the other requests must still be told
            log.exception("drafter %r could not take request %s back", self.drafter.name, request.request_id)


def _check_attributes(drafter: Any) -> None:
    """Raise ConfigError unless a drafter says about itself what `Drafter` asks."""
    limit = getattr(drafter, "max_position", "missing")
    spec = getattr(drafter, "features", None)
    faults = {
        "name": not isinstance(getattr(drafter, "name", None), str),
        "features": not isinstance(spec, FeatureSpec) or not isinstance(spec.top_k, int) or spec.top_k < 0,
        "max_position": limit is not None and not isinstance(limit, int),
        "shares_target_kv": not isinstance(getattr(drafter, "shares_target_kv", None), bool),
        "samples": not isinstance(getattr(drafter, "samples", None), bool),
    }
    faults |= {name: True for name in ("propose", "observe", "release") if not callable(getattr(drafter, name, None))}
    wrong = [name for name, is_wrong in faults.items() if is_wrong]
    if wrong:
        raise ConfigError(
            f"drafter {type(drafter).__name__} has no proper {', '.join(wrong)}; see Drafter in specdec/interfaces.py"
        )


def _scatter(drafted: TokenTree, rows: Sequence[int], roots: TokenTree) -> TokenTree:
    """Return trees for all requests of `roots`: `drafted` for `rows`, the bare root for the others."""
    batch = roots.token_ids.shape[0]
    if len(rows) == batch:
        return drafted
    width = drafted.token_ids.shape[1]
    wide = pad_tree(roots, width)
    index = torch.tensor(rows, dtype=torch.int64, device=roots.token_ids.device)
    draft_row = None
    if drafted.draft_row is not None:
        draft_row = torch.full_like(wide.token_ids, -1)
        draft_row[index] = drafted.draft_row
    token_ids, parents, num_nodes = wide.token_ids.clone(), wide.parents.clone(), wide.num_nodes.clone()
    token_ids[index], parents[index], num_nodes[index] = drafted.token_ids, drafted.parents, drafted.num_nodes
    return TokenTree(token_ids, parents, num_nodes, drafted.draft_probs, draft_row, drafted.with_replacement)


def _tree_fault(tree: TokenTree, row: int) -> str | None:
    """Return what is wrong with a tree for a target that runs chains only, or None."""
    chained = is_chain(tree.parents[row, : int(tree.num_nodes[row])])
    return None if chained else "this target's attention runs chains only, not trees"

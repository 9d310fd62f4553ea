"""From acceptance rules to what each request keeps: which rule applies, and where its answer is cropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.interfaces import SamplingParams, TokenTree, Verifier, VerifyResult
from specdec.request import Request
from specdec.scheduler import Work

Paths = list[tuple[list[int], int]]  # (accepted node ids, next token) per request


@dataclass(frozen=True, slots=True)
class VerifierChoice:
    """Which acceptance rule a request gets.

    `auto` is `match` when greedy, when a seed is given or when the drafter has no probabilities, else `rejection`;
    a rule chosen by name stands in all three places.
    """

    greedy: Verifier
    seeded: Verifier
    sampled: Verifier

    def of(self, sampling: SamplingParams, drafter_samples: bool) -> Verifier:
        """Return the rule for one request; `drafter_samples` tells whether the drafts carry draft_probs."""
        if sampling.greedy:
            return self.greedy
        return self.seeded if sampling.seed is not None or not drafter_samples else self.sampled

    def is_lossless(self, sampling: SamplingParams, drafter_samples: bool) -> bool:
        """Tell whether that rule keeps the target's distribution: some change it above temperature 0 only."""
        rule = self.of(sampling, drafter_samples)
        return rule.lossless or (sampling.greedy and bool(getattr(rule, "lossless_if_greedy", False)))

    def groups(self, sampling: Sequence[SamplingParams], drafter_samples: bool) -> list[tuple[Verifier, list[int]]]:
        """Return each rule that applies to some of the requests, with their indices."""
        found: dict[int, tuple[Verifier, list[int]]] = {}
        for i, params in enumerate(sampling):
            verifier = self.of(params, drafter_samples)
            found.setdefault(id(verifier), (verifier, []))[1].append(i)
        return list(found.values())


@dataclass(slots=True)
class Verdict:
    """What the step gives one request."""

    kept: Tensor  # offsets of its rows whose KV stays
    tokens: list[int]
    finish_reason: str | None = None
    path: Tensor | None = None
    num_accepted: int = 0
    drafted: int = 0
    depth: int = 0


def accepted_paths(result: VerifyResult, verifier: Verifier, tree: TokenTree, vocab_size: int) -> Paths:
    """Return (accepted node ids, next token) per request.

    Raises:
        ConfigError: a verifier's answer is none: of another form, or with nodes or tokens that do not exist.
    """
    try:
        counts, next_tokens = result.num_accepted.tolist(), result.next_token_ids.tolist()
        paths = [path[:count] for path, count in zip(result.path.tolist(), counts, strict=True)]
        sound = len(paths) == len(next_tokens) == tree.token_ids.shape[0]
        sound = sound and all(0 <= count == len(path) for count, path in zip(counts, paths, strict=True))
        sound = sound and all(0 <= token < vocab_size for token in next_tokens)
        for path, parents, n in zip(paths, tree.parents.tolist(), tree.num_nodes.tolist(), strict=True):
            above = [0, *path[:-1]]
            sound = sound and all(0 < node < n and parents[node] == a for node, a in zip(path, above, strict=False))
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"verifier {verifier.name!r} returned no VerifyResult of this step: {error}") from error
    if not sound:
        raise ConfigError(
            f"verifier {verifier.name!r} returned {result}; allowed: paths down from the root of each tree, and token "
            f"ids from 0 to {vocab_size - 1}"
        )
    return list(zip(paths, next_tokens, strict=True))


def judge(work: Sequence[Work], paths: Sequence[tuple[list[int], int]], tree: TokenTree) -> list[Verdict]:
    """Return one verdict per work item; `paths` and `tree` cover the items that choose a token, in order."""
    rows = zip(paths, tree.token_ids.tolist(), tree.parents.tolist(), tree.num_nodes.tolist(), strict=True)
    verdicts: list[Verdict] = []
    for w in work:
        if w.samples:
            (path, token), ids, parents, n = next(rows)
            verdicts.append(_judge_one(w.num_rows, w.request, path, token, ids[:n], parents[:n]))
        else:
            verdicts.append(Verdict(torch.arange(w.num_rows), []))
    return verdicts


def _judge_one(
    pending: int, request: Request, path: list[int], token: int, token_ids: list[int], parents: list[int]
) -> Verdict:
    """Crop a request's accepted path and next token to its first stop, and say which rows stay."""
    tokens, reason = request.crop([*(token_ids[node] for node in path), token])
    num_accepted = min(len(path), len(tokens))
    # P + e - 1 rows: the pending tokens and every emitted token but the last, which becomes pending.
    kept = [*range(pending), *(pending - 1 + node for node in path[: len(tokens) - 1])]
    depth = [0] * len(parents)
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
    return Verdict(
        torch.tensor(kept, dtype=torch.int64),
        tokens,
        reason,
        torch.tensor(path[:num_accepted], dtype=torch.int64),
        num_accepted,
        len(parents) - 1,
        max(depth),
    )

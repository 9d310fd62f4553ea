"""The target's own probabilities of short continuations of a prompt, by transformers' generate()."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.eval.goodness_of_fit import log_moments
from specdec.eval.next_scores import next_scores

Path = tuple[int, ...]  # tokens after the prompt
NUM_GROUPS = 64  # of the vocabulary, by token id modulo this
_LEAST_EXPECTED = 5.0  # draws of a path that is a cell of its own
_BATCH = 64


@dataclass(slots=True)
class NextToken:
    """What the target says of the token after one path."""

    mean: float  # of log p over the distribution
    moments: Tensor  # `log_moments` of the distribution
    groups: Tensor  # [NUM_GROUPS] float64: mass of each group of tokens
    drawn: dict[int, tuple[float, float]] = field(default_factory=dict)  # token -> (p, mass of all likelier tokens)


@dataclass(slots=True)
class TargetLaw:
    """The law of the first tokens after one prompt, as far as it was asked for.

    A path is split into its children that are expected often enough in the draws; everything else after it is one
    cell, its rest.
    """

    num_tokens: int
    after: dict[Path, NextToken] = field(default_factory=dict)
    mass: dict[Path, float] = field(default_factory=lambda: {(): 1.0})  # of the paths that are expected often enough
    children: dict[Path, dict[int, float]] = field(default_factory=dict)  # of each split path: token -> mass

    def cells(self) -> dict[tuple[Path, bool], float]:
        """Return the mass of each cell: a path of full length, or (path, True), the rest of one that was split."""
        found = {(path, False): mass for path, mass in self.mass.items() if len(path) == self.num_tokens}
        for path, children in self.children.items():
            found[path, True] = max(self.mass[path] - sum(children.values()), 0.0)
        return found

    def cell_of(self, path: Path) -> tuple[Path, bool]:
        """Return the cell that a path of full length falls into."""
        for depth in range(self.num_tokens):
            if path[depth] not in self.children[path[:depth]]:
                return path[:depth], True
        return path, False


def target_law(model: Any, prompt: list[int], drawn: Iterable[Path], num_samples: int, temperature: float) -> TargetLaw:
    """Return the law of the tokens after a prompt: of every path that was drawn, and of those expected often.

    Args:
        model: a transformers model.
        prompt: token ids.
        drawn: paths of one length.
        num_samples: of one test, which decides on its cells.
        temperature: above 0.
    """
    tokens_after: dict[Path, set[int]] = {}
    num_tokens = 0
    for path in drawn:
        num_tokens = len(path)
        for depth in range(num_tokens):
            tokens_after.setdefault(path[:depth], set()).add(path[depth])
    law = TargetLaw(num_tokens)
    scorer = _Scorer(model, prompt)
    for depth in range(num_tokens):
        asked = {p for p in tokens_after if len(p) == depth} | {p for p in law.mass if len(p) == depth}
        ordered = sorted(asked)
        for start in range(0, len(ordered), _BATCH):
            paths = ordered[start : start + _BATCH]
            _read(law, paths, scorer.scores(paths) / temperature, tokens_after, num_samples)
    return law


def _read(
    law: TargetLaw, paths: list[Path], scores: Tensor, drawn: Mapping[Path, Collection[int]], num_samples: int
) -> None:
    """Take from scores [n, V] float64 what is wanted of the distribution after each path."""
    logs = scores.log_softmax(dim=-1)
    probs = logs.exp()
    finite = logs.clamp_min(torch.finfo(logs.dtype).min)  # a forbidden token has probability 0 and adds nothing
    means, moments = (probs * finite).sum(dim=-1), log_moments(logs)
    group_of = torch.arange(probs.shape[1]) % NUM_GROUPS
    groups = probs.new_zeros(len(paths), NUM_GROUPS).index_add_(1, group_of, probs)
    for i, path in enumerate(paths):
        found = law.after[path] = NextToken(float(means[i]), moments[i], groups[i])
        for token in drawn.get(path, ()):
            p = probs[i, token]
            likelier = probs[i] > p
            likelier[:token] |= probs[i, :token] == p  # of equally likely ones, the first ids
            found.drawn[token] = float(p), float(probs[i][likelier].sum())
        mass = law.mass.get(path)
        if mass is not None:
            often = (probs[i] * (mass * num_samples) >= _LEAST_EXPECTED).nonzero()[:, 0].tolist()
            law.children[path] = {token: mass * float(probs[i, token]) for token in often}
            law.mass |= {(*path, token): own for token, own in law.children[path].items()}


class _Scorer:
    """Scores after many continuations of one prompt, whose KV is computed once and copied."""

    def __init__(self, model: Any, prompt: list[int]) -> None:
        self._model, self._prompt, self._kv = model, prompt, None
        if len(prompt) > 1:  # without the last token: generate() must have one to run
            ids = torch.tensor([prompt[:-1]] * _BATCH, device=model.device)
            with torch.inference_mode():
                self._kv = getattr(model(ids, use_cache=True), "past_key_values", None)

    def scores(self, paths: list[Path]) -> Tensor:
        """Return [n, V] float64 on the CPU: the logits generate() chooses by after each path, processors applied."""
        padded = paths + [paths[-1]] * (_BATCH - len(paths))  # the copied KV is that of a whole batch
        ids = torch.tensor([[*self._prompt, *path] for path in padded], device=self._model.device)
        known = {} if self._kv is None else {"past_key_values": copy.deepcopy(self._kv)}
        return next_scores(self._model, ids, **known)[: len(paths)].cpu()

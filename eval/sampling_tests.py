"""Is what an LLM draws the target's own distribution: four tests of drawn paths against exact probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from specdec.api import LLM
from specdec.errors import InputError
from specdec.eval.goodness_of_fit import (
    counts_evidence,
    evidence_p_value,
    groups_evidence,
    tilts_evidence,
    uniform_p_value,
)
from specdec.eval.target_law import NUM_GROUPS, Path, TargetLaw
from specdec.stats import total

_PER_CALL = 256


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one drafter and rule drew after each prompt, and what became of the drafts."""

    paths: list[list[Path]]  # by prompt
    num_draft_tokens: int
    num_accepted_tokens: int
    num_refused_tokens: int  # drafts that were judged and not taken; those behind them were never judged
    num_drafter_errors: int  # answers that went on without drafts because the drafter raised


@dataclass(frozen=True, slots=True)
class SamplingTest:
    """How far what was drawn is from the target's law. p-values are those of a lossless rule."""

    paths_p_value: float  # whole paths: does each that is expected often enough come as often as it should
    tokens_p_value: float  # tokens after the first: does each group of token ids come as often as it should
    ranks_p_value: float  # tokens after the first: is each as likely a rank as it should be
    likelihood_p_value: float  # tokens after the first: would a sharper or flatter law explain them better
    excess_log_prob: float  # mean of log p minus its expectation, nats per token; above 0: too likely tokens

    @property
    def p_values(self) -> tuple[float, ...]:
        return self.paths_p_value, self.tokens_p_value, self.ranks_p_value, self.likelihood_p_value


def draw(
    llm: LLM,
    prompts: Sequence[list[int]],
    num_samples: int,
    num_tokens: int,
    temperature: float,
    seed: int,
    advance: Callable[[int], None] = lambda _: None,
) -> Drawn:
    """Draw `num_samples` answers of `num_tokens` tokens to each prompt.

    Args:
        llm: with drafter and verifier.
        prompts: token ids.
        num_samples: of each prompt.
        num_tokens: of each sample.
        temperature: above 0.
        seed: of torch's generator, from which every request draws its own; the generator is left as it was.
        advance: told how many samples came.
    """
    options: dict[str, Any] = {"temperature": temperature, "ignore_eos": True, "max_new_tokens": num_tokens}
    paths: list[list[Path]] = []
    stats = []
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for prompt in prompts:
            llm.generate(prompt, max_new_tokens=1)  # its KV is then in the prefix cache, if there is one
            own: list[Path] = []
            while len(own) < num_samples:
                done = llm.generate([prompt] * min(_PER_CALL, num_samples - len(own)), **options)
                own += [tuple(completion.token_ids) for completion in done]
                stats += [completion.stats for completion in done]
                advance(len(done))
            short = next((path for path in own if len(path) < num_tokens), None)
            if short is not None:
                raise InputError(f"an answer ended after {len(short)} of {num_tokens} tokens; shorten the prompts")
            paths.append(own)
    whole = total(stats)
    refused = sum(whole.reached_at) - sum(whole.accepted_at)
    return Drawn(paths, whole.num_draft_tokens, whole.num_accepted_tokens, refused, whole.num_drafter_errors)


def compare(drawn: Sequence[Sequence[Path]], laws: Sequence[TargetLaw], seed: int = 0) -> SamplingTest:
    """Return four tests of drawn paths against the target's law.

    - paths: how often each whole path came, over all prompts.
    - tokens: how often each group of token ids came, with each token's own probabilities after the tokens before it.
      A rule that favours what was drafted is found here where whole paths are too many to count.
    - ranks: for a token whose likelier ones have mass F, F + v p with v uniform is uniform, and independent of those
      of other tokens; Kolmogorov-Smirnov. Tokens that are too likely too often give too many small values.
    - likelihood: how much better the target at another temperature explains the tokens.

    The first token of a path is prefill's, before any draft; the last three tests leave it out.

    Args:
        drawn: paths, by prompt.
        laws: of the same prompts, which know every path.
        seed: of v.

    Source: Rosenblatt 1952, "Remarks on a multivariate transformation"; for discrete variables Brockwell 2007,
    "Universal residuals: a multivariate transformation". Of the others: goodness_of_fit.py.
    """
    by_paths = []
    before, own, means, groups, shares, moments = [], [], [], [], [], []
    for paths, law in zip(drawn, laws, strict=True):
        cells = law.cells()
        counts = Counter(law.cell_of(path) for path in paths)
        by_paths.append(counts_evidence(_float64([counts[c] for c in cells]), _float64(list(cells.values()))))
        for path in paths:
            for depth in range(1, law.num_tokens):
                after = law.after[path[:depth]]
                p, likelier = after.drawn[path[depth]]
                before.append(likelier)
                own.append(p)
                means.append(after.mean)
                groups.append(path[depth] % NUM_GROUPS)
                shares.append(after.groups)
                moments.append(after.moments)
    probs = _float64(own)
    noise = torch.rand(len(own), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return SamplingTest(
        evidence_p_value(torch.stack(by_paths).sum(dim=0)),
        evidence_p_value(groups_evidence(torch.tensor(groups), torch.stack(shares))),
        uniform_p_value(_float64(before) + noise * probs),
        evidence_p_value(tilts_evidence(probs.log(), torch.stack(moments))),
        float((probs.log() - _float64(means)).mean()),
    )


def _float64(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def as_row(drafter: str, verifier: str, claims_lossless: bool, drawn: Drawn, test: SamplingTest) -> dict[str, Any]:
    """Return what a report holds of one drafter and rule, as JSON can: infinite figures are null."""
    figures = {name: value if math.isfinite(value) else None for name, value in asdict(test).items()}
    return {
        "drafter": drafter,
        "verifier": verifier,
        "claims_lossless": claims_lossless,
        "num_samples": sum(len(paths) for paths in drawn.paths),
        "num_draft_tokens": drawn.num_draft_tokens,
        "num_accepted_tokens": drawn.num_accepted_tokens,
        "num_refused_tokens": drawn.num_refused_tokens,
        "num_drafter_errors": drawn.num_drafter_errors,
        **figures,
        "smallest_p_value": min(test.p_values),
    }

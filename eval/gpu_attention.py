"""Are flash-attn's logits as good as those of torch's attention: prompts, chunks, plain decoding, verified chains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.api import LLM
from specdec.eval.gpu_rig import CHUNK_TOKENS, NO_FLASH, Rig, parse_half
from specdec.eval.gpu_sections import Check, Finding, NotHere
from specdec.interfaces import DraftRequest, FeatureSpec, Noise, Observation, TokenTree
from specdec.tree import stack_trees

# How much further from float32 the kernel may be than torch's attention, as flash-attn's own tests allow.
_TIMES, _SHARE = 2.0, 1e-3
_NUM_TOKENS = 12  # of each answer: prefill's, two full chains and a short one

Path = tuple[int, ...]


def attention_checks(rig: Rig) -> Iterator[Check]:
    """Yield the comparisons of flash-attn's logits with those of torch's attention."""
    for name in rig.config.half_dtypes:
        yield f"flash-attn in {name}", partial(_flash, rig, parse_half(name))


class Scores:
    """A logits processor that changes nothing and keeps the logits [V] after each token path."""

    def __init__(self) -> None:
        self.after: dict[Path, Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.after[tuple(input_ids[0].tolist())] = scores[0].double().cpu()
        return scores


class KnownAnswers:
    """A drafter of chains that was told the answers, so that there are chains whatever the model says.

    Args:
        answers: to prompts, both as token ids.
    """

    name = "known_answers"
    features = FeatureSpec()
    max_position: int | None = None
    shares_target_kv = False
    samples = False

    def __init__(self, answers: dict[Path, list[int]]) -> None:
        self._answers = answers
        self._texts: dict[int, list[int]] = {}

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        chains = []
        for r in requests:
            ids = [r.root_token_id, *self._known(r)[: r.max_draft_tokens]]
            chains.append((ids, list(range(-1, len(ids) - 1))))
        return stack_trees(chains)

    def _known(self, request: DraftRequest) -> list[int]:
        """Return what comes behind the root in the answer to the request's prompt."""
        text = self._texts[request.request_id]
        prompt = max((p for p in self._answers if list(p) == text[: len(p)]), key=len)
        return self._answers[prompt][request.root_position + 1 - len(prompt) :]

    def observe(self, seen: Sequence[Observation]) -> None:
        for o in seen:
            self._texts.setdefault(o.request_id, [])[o.start :] = o.token_ids.tolist()

    def release(self, request_id: int) -> None:
        self._texts.pop(request_id, None)

    def reset(self) -> None:
        self._texts.clear()


def scores_of(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[Path, Tensor]:
    """Return the logits [V] behind every token path that `num_tokens` tokens of answers to the prompts come by."""
    kept = Scores()
    llm.generate([list(p) for p in prompts], max_new_tokens=num_tokens, ignore_eos=True, logits_processor=[kept])
    return kept.after


class _Run:
    """One LLM's answers: the logits on their way, and what ran for them."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]]) -> None:
        backend, kept = llm.engine.target.cache.backend, Scores()
        assert backend is not None, "torch's attention has no calls to count"
        calls, steps = backend.num_calls, llm.engine.stats.num_steps
        done = llm.generate(list(prompts), max_new_tokens=_NUM_TOKENS, ignore_eos=True, logits_processor=[kept])
        self.scores = kept.after
        self.answers = {tuple(p): completion.token_ids for p, completion in zip(prompts, done, strict=True)}
        self.num_drafted = sum(c.stats.num_draft_tokens for c in done)
        self.num_accepted = sum(c.stats.num_accepted_tokens for c in done)
        self.num_calls = backend.num_calls - calls
        self.calls_per_step = self.num_calls / (llm.engine.stats.num_steps - steps)


def _flash(rig: Rig, dtype: torch.dtype) -> Finding:
    """Compare the logits of undrafted answers, and apart from them those of chains, with SDPA's; all with float32's.

    SDPA and float32 compute each path as a prompt, so that there is something to compare every row with.
    """
    flash = rig.llm(dtype, prefill_chunk_tokens=CHUNK_TOKENS)
    if flash.engine.target.cache.backend is None:
        raise NotHere(NO_FLASH)
    plain = _Run(flash, rig.prompts)
    chains = _Run(rig.llm(dtype, KnownAnswers(plain.answers), prefill_chunk_tokens=CHUNK_TOKENS), rig.prompts)
    paths = [list(path) for path in plain.scores | chains.scores]
    theirs = scores_of(rig.llm(dtype, prefill_chunk_tokens=CHUNK_TOKENS, attention="sdpa"), paths, 1)
    exact = scores_of(rig.exact(dtype), paths, 1)
    values: dict[str, Any] = {"num_drafted": chains.num_drafted, "num_accepted": chains.num_accepted}
    faults, details = [], []
    for name, run in (("undrafted", plain), ("chains", chains)):
        rows = [p for p in run.scores if run is plain or p not in run.answers]  # no prompts, which are no chains
        largest = max(float(exact[p].abs().max()) for p in rows)
        ours, limit = (
            max(float((scores[p] - exact[p]).abs().max()) for p in rows) / largest for scores in (run.scores, theirs)
        )
        values[name] = {"flash-attn": ours, "SDPA": limit, "num_rows": len(rows), "num_calls": run.num_calls}
        details.append(
            f"{name}: {len(rows)} rows off from float32 by {ours:.2e} of the largest logit, SDPA by {limit:.2e}"
        )
        if not ours <= _TIMES * limit + _SHARE:  # NaN is a fault
            faults.append(f"{name} too far off")
    if not plain.num_calls:
        faults.append("the kernel did not run")
    if not chains.num_drafted:
        faults.append("no chain was verified")
    elif chains.calls_per_step < plain.calls_per_step:
        faults.append("not every step with chains ran the kernel")
    details.append(f"{chains.num_accepted} of {chains.num_drafted} drafts accepted")
    return Finding(not faults, "; ".join([*faults, *details]), values)

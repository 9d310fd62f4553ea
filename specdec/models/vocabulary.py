"""Two models' token ids: which of the draft model's mean what in the target's vocabulary."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.models.token_text import TokenTexts

log = logging.getLogger("specdec")

VOCABULARIES = ("auto", "same", "intersection")
# Of the smaller vocabulary. Texts of one script share far more; below it nearly every draft would be wrong.
_LEAST_SHARE = 0.25


class SameVocabulary:
    """Equal ids mean equal tokens; heads may be padded to different sizes."""

    target_ids: Tensor | None = None  # what the columns of `fit` stand for; None = the target's ids in order

    def __init__(self, draft_size: int, num_ids: int | None = None) -> None:
        """`num_ids`: ids from there on are padding, nobody's tokens; None = unknown."""
        self._draft_size, self._num_ids = draft_size, num_ids

    def fit(self, logits: Tensor) -> Tensor:
        """Return the columns of draft logits [n, Vd] that are tokens; column j is the target's id j."""
        return logits if self._num_ids is None else logits[:, : self._num_ids]

    def to_draft(self, token_ids: Tensor) -> Tensor:
        """Return the draft model's id for each drafted token [n] int64."""
        # A target with a wider head may emit ids the draft model has no embedding for; any guess behind one will do.
        return token_ids.clamp_max(self._draft_size - 1)

    def spell(self, token_id: int) -> list[int]:
        """Return what the draft model reads for one of the target's tokens: at least one id of its own."""
        return [min(token_id, self._draft_size - 1)]


class SharedTokens:
    """Token-level intersection: the draft model proposes only tokens that both vocabularies have.

    Tokens are the same when their bytes are, however a tokenizer writes spaces; special tokens when their names or
    their roles (bos, eos) are. Its distribution is renormalised over them, and is what tokens are drawn from, so any
    verifier is as exact as ever. A token of the target that it lacks is read as the tokens that spell it.

    Source: Timor et al. 2025, arXiv 2502.05202, algorithm 4 (token-level intersection).
    """

    def __init__(self, draft: TokenTexts, target: TokenTexts, target_size: int) -> None:
        pairs = _pairs(draft, target)
        self._draft, self._target = draft, target
        self._draft_ids = torch.tensor(sorted(pairs), dtype=torch.int64)
        self.target_ids = torch.tensor([pairs[i] for i in sorted(pairs)], dtype=torch.int64)
        self._filler = next((i for i in map(draft.role, ("unk", "eos")) if i is not None), 0)
        self._to_draft = torch.full((target_size,), self._filler, dtype=torch.int64)
        self._to_draft[self.target_ids] = self._draft_ids
        self._spelled: list[list[int] | None] = [None] * target_size
        for draft_id, target_id in pairs.items():
            self._spelled[target_id] = [draft_id]

    def __len__(self) -> int:
        return len(self._draft_ids)

    @property
    def share(self) -> float:
        """Share of the target's tokens that may be drafted."""
        return len(self) / max(1, len(self._target))

    @property
    def enough(self) -> bool:
        """Whether drafting is worth trying."""
        return len(self) >= _LEAST_SHARE * max(1, min(len(self._draft), len(self._target)))

    def fit(self, logits: Tensor) -> Tensor:
        """Return the columns of draft logits [n, Vd] that are shared tokens; column j is `target_ids[j]`."""
        if self._draft_ids.device != logits.device:
            self._draft_ids = self._draft_ids.to(logits.device)
        return logits[:, self._draft_ids]

    def to_draft(self, token_ids: Tensor) -> Tensor:
        """Return the draft model's id for each drafted token [n] int64."""
        return self._to_draft[token_ids]

    def spell(self, token_id: int) -> list[int]:
        """Return what the draft model reads for one of the target's tokens: at least one id of its own."""
        known = self._spelled[token_id]
        if known is None:
            known = self._spelled[token_id] = self._spell(self._target.meaning(token_id) or b"")
        return known

    def _spell(self, meaning: bytes | str) -> list[int]:
        same = self._draft.owners.get(meaning)  # a second id of the target for a shared token
        if same is not None:
            return [same]
        text = meaning if isinstance(meaning, bytes) else meaning.encode()
        return self._draft.spell(text) or [self._filler]


class SomeTokens:
    """The target's own ids, with an output head that has rows for some of them only.

    Args:
        target_ids: [Vd] int64 that the head's columns stand for; None = all of the target's, in order.
    """

    def __init__(self, target_ids: Tensor | None) -> None:
        self.target_ids = target_ids

    def fit(self, logits: Tensor) -> Tensor:
        """Return the draft logits [n, Vd]; column j is `target_ids[j]`."""
        return logits

    def to_draft(self, token_ids: Tensor) -> Tensor:
        """Return the draft model's id for each drafted token [n] int64: the same."""
        return token_ids

    def spell(self, token_id: int) -> list[int]:
        """Return what the draft model reads for one of the target's tokens: the token."""
        return [token_id]


Vocabulary = SameVocabulary | SharedTokens | SomeTokens


def match_vocabularies(
    draft_size: int, draft_tokenizer: Any, target_size: int, target_tokenizer: Any, how: str = "auto"
) -> Vocabulary:
    """Return how the draft model's ids stand for the target's; never a guess.

    Args:
        draft_size: ids of the draft model's head.
        draft_tokenizer: its tokenizer, or None if it is unknown.
        target_size: ids of the target's head.
        target_tokenizer: its tokenizer, or None.
        how: "same": equal ids must mean equal tokens. "intersection": tokens are mapped by what they mean. "auto":
            the first where it is so, else the second, unless they share too little to be worth it.

    Raises:
        ConfigError: `how` is none of these.
        IncompatibleDrafterError: the vocabularies cannot be matched that way; the message names the first difference.
    """
    if how not in VOCABULARIES:
        raise ConfigError(f"vocabulary={how!r}; allowed: {', '.join(map(repr, VOCABULARIES))}")
    if how != "intersection":
        difference = _difference(draft_size, draft_tokenizer, target_size, target_tokenizer)
        if difference is None:
            return SameVocabulary(draft_size, _num_ids(draft_tokenizer, target_tokenizer))
        if how == "same" or draft_tokenizer is None or target_tokenizer is None:
            raise IncompatibleDrafterError(difference + "; " + _advice(how, draft_tokenizer, target_tokenizer))
    elif draft_tokenizer is None or target_tokenizer is None:
        raise IncompatibleDrafterError(
            "vocabulary='intersection' compares tokens by what they mean, which takes both tokenizers; the "
            f"{'draft model' if draft_tokenizer is None else 'target'}'s is unknown; pass tokenizer="
        )
    shared = SharedTokens(
        TokenTexts(draft_tokenizer, draft_size), TokenTexts(target_tokenizer, target_size), target_size
    )
    if not len(shared) or (how == "auto" and not shared.enough):
        raise IncompatibleDrafterError(
            f"{_difference(draft_size, draft_tokenizer, target_size, target_tokenizer)}, and {summary(shared)}; use a "
            "draft model with the target's tokenizer, or drafter='ngram'"
            + ("; vocabulary='intersection' drafts with it all the same" if len(shared) else "")
        )
    return shared


def summary(shared: SharedTokens) -> str:
    """Return in words how much two vocabularies have in common."""
    return f"they share {len(shared)} tokens, {shared.share:.1%} of the target's"


@cache
def report_intersection(said: str) -> None:
    """Log, once per process for each pair, that a draft model is limited to shared tokens."""
    log.warning("the draft model has another vocabulary than the target: %s; only these are drafted", said)


def _pairs(draft: TokenTexts, target: TokenTexts) -> dict[int, int]:
    """Return draft id -> target id, one to one."""
    pairs = {i: target.owners[meaning] for meaning, i in draft.owners.items() if meaning in target.owners}
    taken = set(pairs.values())
    for name in ("eos", "bos"):
        ours, theirs = draft.role(name), target.role(name)
        if ours is not None and theirs is not None and ours not in pairs and theirs not in taken:
            pairs[ours] = theirs
            taken.add(theirs)
    return pairs


def _num_ids(draft_tokenizer: Any, target_tokenizer: Any) -> int | None:
    if draft_tokenizer is None or target_tokenizer is None:
        return None
    return 1 + max(draft_tokenizer.get_vocab().values(), default=-1)


def _advice(how: str, draft_tokenizer: Any, target_tokenizer: Any) -> str:
    if draft_tokenizer is None or target_tokenizer is None:
        return "pass tokenizer= or another draft model"
    return "use a draft model with the target's tokenizer, vocabulary='auto', or drafter='ngram'"


def _difference(draft_size: int, draft_tokenizer: Any, target_size: int, target_tokenizer: Any) -> str | None:
    """Return why equal ids do not mean equal tokens, or None if they do.

    With both tokenizers at hand their contents decide; without them only equal sizes can be trusted.
    """
    if draft_tokenizer is None or target_tokenizer is None:
        if draft_size == target_size:
            return None
        return (
            f"the draft model has {draft_size} token ids and the target {target_size}, and without both tokenizers it "
            "is unknown whether equal ids mean equal tokens"
        )
    draft = {i: t for t, i in draft_tokenizer.get_vocab().items()}
    target = {i: t for t, i in target_tokenizer.get_vocab().items()}
    if draft == target:
        return None
    first = min(i for i in draft.keys() | target.keys() if draft.get(i) != target.get(i))
    return (
        f"the draft model's vocabulary is not the target's: token id {first} is {draft.get(first)!r} for the draft "
        f"model and {target.get(first)!r} for the target"
    )

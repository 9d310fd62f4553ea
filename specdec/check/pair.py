"""`check_pair`: whether a draft model fits a target."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.check.model import known_before_weights
from specdec.check.trained import UNSURE, is_target, sizes_of_target, trained_config
from specdec.errors import IncompatibleDrafterError
from specdec.heads.shipped_heads import kind_of_config
from specdec.models.compatibility import max_positions
from specdec.models.described import Described, describe
from specdec.models.vocabulary import SharedTokens, Vocabulary, match_vocabularies, summary


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """Whether a draft model fits a target."""

    target: str
    draft: str
    fits: bool
    drafter: str | None = None  # "eagle3", ...: it is no language model but was trained as a drafter, of this name
    reason: str | None = None  # why not
    target_vocab_size: int | None
    draft_vocab_size: int | None
    target_max_positions: int | None = None
    draft_max_positions: int | None = None
    vocabulary: str | None = None  # "same", or "intersection": only the shared tokens are drafted
    num_shared_tokens: int | None = None  # of an intersection
    shared_token_share: float | None = None  # of the target's tokens
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_pair(
    target: Any,
    draft: Any,
    *,
    target_tokenizer: Any | None = None,
    draft_tokenizer: Any | None = None,
    trust_remote_code: bool = False,
) -> PairReport:
    """Tell whether a draft model may draft for a target: which tokens they share, and how far it reaches.

    Args:
        target: as in `check`.
        draft: as in `check`; or a trained drafter in specdec's own layout, by folder or shipped name.
        target_tokenizer: the target's; default: the one that comes with it.
        draft_tokenizer: the draft model's.
        trust_remote_code: run Python code that comes with the checkpoints.

    Raises:
        ModelLoadError: a model cannot be found or read.
    """
    trained = trained_config(draft)
    if trained is not None:
        return _trained_pair(describe(target, trust_remote_code), str(draft), trained)
    ends = [describe(end, trust_remote_code) for end in (target, draft)]
    tokenizers = [
        tokenizer if tokenizer is not None else end.tokenizer(trust_remote_code)
        for end, tokenizer in zip(ends, (target_tokenizer, draft_tokenizer), strict=True)
    ]
    vocab, positions = [_vocab_size(end) for end in ends], [_positions(end) for end in ends]
    found = _match(ends, vocab, tokenizers)
    shared = found if isinstance(found, SharedTokens) else None
    return PairReport(
        target=ends[0].name,
        draft=ends[1].name,
        fits=not isinstance(found, str),
        reason=found if isinstance(found, str) else None,
        target_vocab_size=vocab[0],
        draft_vocab_size=vocab[1],
        target_max_positions=positions[0],
        draft_max_positions=positions[1],
        vocabulary=None if isinstance(found, str) else "same" if shared is None else "intersection",
        num_shared_tokens=None if shared is None else len(shared),
        shared_token_share=None if shared is None else shared.share,
        warnings=_pair_warnings(vocab, positions, tokenizers, shared),
    )


def _trained_pair(target: Described, draft: str, config: dict[str, Any]) -> PairReport:
    """Tell whether a trained drafter is this target's."""
    trained_for, kind = config["target"], kind_of_config(config)
    hidden_size, vocab_size = (None, None) if target.config is None else sizes_of_target(target)
    fits = target.config is not None and is_target(target, trained_for)
    reason = None
    if fits is False:
        reason = (
            f"it was trained for {trained_for['name']} (hidden size {trained_for['hidden_size']}, "
            f"{trained_for['vocab_size']} tokens), and {target.name} (hidden size {hidden_size}, {vocab_size} tokens) "
            "is another model"
        )
    warnings = [f"it is a trained {kind} drafter, no language model: give it as the drafter itself, --drafter {draft}"]
    if fits is None:
        warnings.append("it " + UNSURE.format(trained_for["name"]))
    return PairReport(
        target=target.name,
        draft=draft,
        fits=fits is not False,
        drafter=kind,
        reason=reason,
        target_vocab_size=vocab_size,
        draft_vocab_size=trained_for["vocab_size"],
        warnings=warnings,
    )


def _vocab_size(end: Described) -> int | None:
    return None if end.config is None else end.config.get_text_config().vocab_size


def _positions(end: Described) -> int | None:
    return None if end.config is None else max_positions(end.config)


def _match(ends: list[Described], vocab: list[int | None], tokenizers: list[Any]) -> Vocabulary | str:
    """Return how the draft model's tokens stand for the target's, or why they do not go together."""
    for role, end in zip(("target", "draft model"), ends, strict=True):
        known = known_before_weights(end)
        if known.verdict == "refused":
            return f"the {role} cannot run: {known.feature}; {known.advice}"
    try:
        return match_vocabularies(vocab[1] or 0, tokenizers[1], vocab[0] or 0, tokenizers[0])
    except IncompatibleDrafterError as error:
        return str(error)


def _pair_warnings(
    vocab: list[int | None], positions: list[int | None], tokenizers: list[Any], shared: SharedTokens | None
) -> list[str]:
    said = []
    (target, draft), (far, near) = vocab, positions
    if any(t is None for t in tokenizers):
        said.append("without both tokenizers only the sizes of the vocabularies could be compared")
    if shared is not None:
        said.append(f"the draft model has another vocabulary: {summary(shared)}; only these are drafted")
    elif target is not None and draft is not None and target != draft:
        more = "larger: its further ids are never drafted" if draft > target else "smaller: ids past it are not drafted"
        said.append(f"the draft model's head has {draft} ids and the target's {target}; it is {more}")
    if far is not None and near is not None and near < far:
        said.append(
            f"the draft model has {near} positions and the target {far}: past {near} tokens the target goes on alone"
        )
    return said

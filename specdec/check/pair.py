"""`check_pair`: whether a draft model fits a target."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.check.model import known_before_weights
from specdec.errors import IncompatibleDrafterError
from specdec.models.compatibility import max_positions
from specdec.models.described import Described, describe
from specdec.models.vocabulary import check_same_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """Whether a draft model fits a target."""

    target: str
    draft: str
    fits: bool
    reason: str | None = None  # why not
    target_vocab_size: int | None
    draft_vocab_size: int | None
    target_max_positions: int | None
    draft_max_positions: int | None
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
    """Tell whether a draft model may draft for a target: same tokens by the same ids, and how far it reaches.

    Args:
        target: as in `check`.
        draft: as in `check`.
        target_tokenizer: the target's; default: the one that comes with it.
        draft_tokenizer: the draft model's.
        trust_remote_code: run Python code that comes with the checkpoints.

    Raises:
        ModelLoadError: a model cannot be found or read.
    """
    ends = [describe(end, trust_remote_code) for end in (target, draft)]
    tokenizers = [
        tokenizer if tokenizer is not None else end.tokenizer(trust_remote_code)
        for end, tokenizer in zip(ends, (target_tokenizer, draft_tokenizer), strict=True)
    ]
    vocab, positions = [_vocab_size(end) for end in ends], [_positions(end) for end in ends]
    return PairReport(
        target=ends[0].name,
        draft=ends[1].name,
        fits=(reason := _misfit(ends, vocab, tokenizers)) is None,
        reason=reason,
        target_vocab_size=vocab[0],
        draft_vocab_size=vocab[1],
        target_max_positions=positions[0],
        draft_max_positions=positions[1],
        warnings=_pair_warnings(vocab, positions, tokenizers),
    )


def _vocab_size(end: Described) -> int | None:
    return None if end.config is None else end.config.get_text_config().vocab_size


def _positions(end: Described) -> int | None:
    return None if end.config is None else max_positions(end.config)


def _misfit(ends: list[Described], vocab: list[int | None], tokenizers: list[Any]) -> str | None:
    for role, end in zip(("target", "draft model"), ends, strict=True):
        known = known_before_weights(end)
        if known.verdict == "refused":
            return f"the {role} cannot run: {known.feature}; {known.advice}"
    try:
        check_same_vocabulary(vocab[1] or 0, tokenizers[1], vocab[0] or 0, tokenizers[0])
    except IncompatibleDrafterError as error:
        return str(error)
    return None


def _pair_warnings(vocab: list[int | None], positions: list[int | None], tokenizers: list[Any]) -> list[str]:
    said = []
    (target, draft), (far, near) = vocab, positions
    if any(t is None for t in tokenizers):
        said.append("without both tokenizers only the sizes of the vocabularies could be compared")
    if target is not None and draft is not None and target != draft:
        more = "larger: its further ids are never drafted" if draft > target else "smaller: ids past it are not drafted"
        said.append(f"the draft model's head has {draft} ids and the target's {target}; it is {more}")
    if far is not None and near is not None and near < far:
        said.append(
            f"the draft model has {near} positions and the target {far}: past {near} tokens the target goes on alone"
        )
    return said

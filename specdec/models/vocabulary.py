"""Whether two models mean the same tokens by the same ids."""

from __future__ import annotations

from typing import Any

from specdec.errors import IncompatibleDrafterError


def check_same_vocabulary(draft_size: int, draft_tokenizer: Any, target_size: int, target_tokenizer: Any) -> None:
    """Raise IncompatibleDrafterError unless equal token ids mean equal tokens.

    With both tokenizers at hand their contents decide, and heads padded to different sizes are fine; without them
    only equal sizes can be trusted.
    """
    if draft_tokenizer is None or target_tokenizer is None:
        if draft_size != target_size:
            raise IncompatibleDrafterError(
                f"the draft model has {draft_size} token ids and the target {target_size}, and without both tokenizers "
                "it is unknown whether equal ids mean equal tokens; pass tokenizer= or another draft model"
            )
        return
    draft = {i: t for t, i in draft_tokenizer.get_vocab().items()}
    target = {i: t for t, i in target_tokenizer.get_vocab().items()}
    for token_id in sorted(draft.keys() | target.keys()):
        if draft.get(token_id) != target.get(token_id):
            raise IncompatibleDrafterError(
                f"the draft model's vocabulary is not the target's: token id {token_id} is {draft.get(token_id)!r} "
                f"for the draft model and {target.get(token_id)!r} for the target; use a draft model with the "
                "target's tokenizer, or drafter='ngram'"
            )

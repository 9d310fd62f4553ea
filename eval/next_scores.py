"""One step of transformers' generate(): the logits that it chooses the next token by."""

from __future__ import annotations

from typing import Any

from torch import Tensor, ones_like


def next_scores(model: Any, ids: Tensor, **more: Any) -> Tensor:
    """Return the logits [n, V] float64 after each row of ids [n, m], the generation config's processors applied.

    Args:
        model: the unmodified transformers model.
        ids: token ids on its device, without padding.
        more: further arguments of generate(), such as past_key_values.
    """
    out = model.generate(
        ids,
        attention_mask=ones_like(ids),
        max_new_tokens=1,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    scores: Tensor = out.scores[0]
    return scores.double()

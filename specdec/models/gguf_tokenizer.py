"""The tokenizer inside a GGUF file, with the pre-tokenizer its vocabulary was trained with."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

from specdec.models.gguf_header import GgufHeader
from specdec.models.pretrained import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Names of `tokenizer.ggml.pre` that stand for GPT-2's splitting, which transformers uses when it knows no name.
_GPT2_SPLIT = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais"})
# The same after cutting numbers into single digits; transformers misses these: "\n\t1" comes out wrong.
# Source: llama.cpp, the table of pre-tokenizer regular expressions in llama-vocab.cpp.
_SINGLE_DIGITS_SPLIT = frozenset({"smollm", "starcoder", "refact", "command-r"})
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}


def convert_tokenizer(header: GgufHeader) -> PreTrainedTokenizerBase | None:
    """Return the file's tokenizer, or None if there is no vocabulary in it.

    Warns:
        UserWarning: the file names a pre-tokenizer that neither transformers nor specdec knows.

    Raises:
        Exception: whatever transformers raises for a tokenizer it cannot build.
    """
    num_tokens = header.metadata.get("tokenizer.ggml.tokens")
    if num_tokens is None:
        return None
    tokenizer = load_tokenizer(str(header.path.parent), gguf_file=header.path.name)
    _drop_invented_tokens(tokenizer, num_tokens)
    _fix_special_tokens(tokenizer, header, num_tokens)
    if header.metadata.get("tokenizer.ggml.model") == "gpt2":  # byte-level BPE; the others need no pre-tokenizer
        tokenizer.clean_up_tokenization_spaces = False
        _fix_pre_tokenizer(tokenizer, header)
    context_length = header.metadata.get(f"{header.architecture}.context_length")
    if isinstance(context_length, int):
        tokenizer.model_max_length = context_length
    return tokenizer


def _drop_invented_tokens(tokenizer: Any, num_tokens: int) -> None:
    """Remove tokens that transformers adds behind the file's vocabulary; the model has no row for their ids."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = [token for token in state["added_tokens"] if token["id"] < num_tokens]
    if len(kept) == len(state["added_tokens"]):
        return
    invented = {token["content"] for token in state["added_tokens"]} - {token["content"] for token in kept}
    for name, token in tokenizer.special_tokens_map.items():
        if token in invented:
            setattr(tokenizer, name, None)
    state["added_tokens"] = kept
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))


def _fix_special_tokens(tokenizer: Any, header: GgufHeader, num_tokens: int) -> None:
    """Take the special tokens from the file: some versions of transformers make the BOS token the EOS token."""
    for name, key in _SPECIAL_TOKENS.items():
        token_id = header.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(token_id, int) and token_id < num_tokens and getattr(tokenizer, f"{name}_id") != token_id:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))


def _fix_pre_tokenizer(tokenizer: Any, header: GgufHeader) -> None:
    from tokenizers import pre_tokenizers

    name = header.metadata.get("tokenizer.ggml.pre", "default")
    if name in _SINGLE_DIGITS_SPLIT:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif name not in _GPT2_SPLIT and name not in _known_to_transformers():
        warnings.warn(
            f"{header.path} names the pre-tokenizer {name!r}, which transformers does not know; text is split as "
            "for GPT-2, so some texts may get other tokens than the model was trained on. Prefer the tokenizer of "
            "the original checkpoint",
            stacklevel=2,
        )


def _known_to_transformers() -> frozenset[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return frozenset()
    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)

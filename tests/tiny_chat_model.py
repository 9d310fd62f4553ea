"""A tiny random llama with a byte-level tokenizer and a chat template, as a directory that every loader can read."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging as transformers_logging

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|end|>", "<|start|>"]


def save_tiny_chat_model(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write config, weights and tokenizer to `folder`, which is made if absent. It never generates an EOS token."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *bytes_to_unicode().values()])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|start|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return folder


def tiny_tokenizer(size: int = 64) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of `size` tokens: a special one, letters, pairs, a space, halves of characters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    halves = [bytes_to_unicode()[b] for b in "é".encode()]
    pairs = [a + b for a, b in zip(letters, letters[::-1], strict=True)]
    tokens = ["<pad>", *letters, *halves, "Ġ", *pairs, *("Ġ" + c for c in letters)]
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens[:size])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", clean_up_tokenization_spaces=False)

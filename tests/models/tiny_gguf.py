"""A tiny random llama as a GGUF file, written with gguf-py the way llama.cpp's converter does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SPECIAL = ["<|end|>", "<|start|>"]


def vocabulary() -> list[str]:
    return [*SPECIAL, *bytes_to_unicode().values(), "he", "ll", "hell", "Ġhe"]


def tiny_llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order q and k rows for llama.cpp, which rotates neighbouring pairs instead of halves."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    pre: str | None = "smollm",
    kind: Type = Type.F32,
    without: str = "",
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if pre is not None:
        tokens = vocabulary()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
        writer.add_token_merges(["h e", "l l", "he ll", "Ġ he"])
        writer.add_eos_token_id(0)
        writer.add_bos_token_id(1)
    if extra is not None:
        extra(writer)
    for name, tensor in model.state_dict().items():
        data = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            data = permute(data, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        gguf_name = name.replace("model.layers.", "blk.")
        for ours, theirs in _NAMES.items():
            gguf_name = gguf_name.replace(ours, theirs)
        if gguf_name == without:
            continue
        if data.ndim == 1 or kind == Type.F32:
            writer.add_tensor(gguf_name, np.ascontiguousarray(data))
        else:
            writer.add_tensor(gguf_name, gguf.quants.quantize(np.ascontiguousarray(data), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

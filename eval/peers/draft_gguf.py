"""A draft model that was distilled for its target as a GGUF file, for engines that read those."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch

from specdec.eval.peers.hf import find_draft_model
from specdec.eval.peers.interface import PeerAbsent, PeerSettings

_ARCHITECTURE = "llama"
_NAMES = {  # transformers' name of a block's tensor -> GGUF's
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@contextmanager
def draft_gguf(settings: PeerSettings, target: Path) -> Iterator[Path]:
    """Give a draft model's GGUF file, in a folder for as long as it is used; or a folder of OpenVINO's.

    Args:
        settings: whose `draft_model` may name a .gguf file or a folder of OpenVINO's; else it is what the drafter
            "draft_model" takes as its model, the one that ships or another that was distilled for the target.
        target: its GGUF file, whose tokenizer, embedding and output rows such a model borrows.

    Raises:
        PeerAbsent: there is none, or it cannot be written as GGUF.
    """
    named = None if settings.draft_model is None else Path(settings.draft_model).expanduser()
    if named is not None and (named / "openvino_model.xml").is_file():
        yield named
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "draft.gguf"
        if named is not None and named.suffix == ".gguf":
            path.symlink_to(named.absolute())
        else:
            draft = find_draft_model(settings, whole_head=True)
            own, targets = (m.get_input_embeddings().weight.data_ptr() for m in (draft, settings.llm.model))
            if own != targets:
                raise PeerAbsent(
                    f"the draft model {settings.draft_model} has an embedding of its own, what is written as GGUF has "
                    "the target's; name a .gguf file or a folder of OpenVINO's instead, in "
                    "peer_options.openvino_draft_model.draft_model"
                )
            write_draft_gguf(draft, target, path)
        yield path


def write_draft_gguf(model: Any, target: Path, path: Path) -> None:
    """Write a llama draft model that borrows its target's embedding and output rows; its own matrices become Q8_0.

    Raises:
        PeerAbsent: it is of another architecture, or its blocks hold something else.
    """
    reader = gguf.GGUFReader(str(target))
    architecture = reader.fields["general.architecture"].contents()
    blocks, config = _blocks_of(model), model.config
    if architecture != _ARCHITECTURE or blocks is None:
        raise PeerAbsent(f"draft models of architecture {architecture!r} cannot be written as GGUF, only llama ones")
    writer = gguf.GGUFWriter(str(path), _ARCHITECTURE)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        value = len(blocks) if field.name == f"{_ARCHITECTURE}.block_count" else field.contents()
        writer.add_key_value(field.name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        if tensor.name in ("token_embd.weight", "output.weight", "rope_freqs.weight"):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _add(writer, "output_norm.weight", model.get_decoder().norm.weight)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for i, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            short, _, kind = name.rpartition(".")
            if short not in _NAMES or kind != "weight":
                raise PeerAbsent(f"the draft model's {name} has no place in a llama GGUF file")
            _add(writer, f"blk.{i}.{_NAMES[short]}.weight", _turned(parameter, heads.get(_NAMES[short])))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks_of(model: Any) -> Any:
    return getattr(model.get_decoder(), "layers", None) if model.config.model_type == _ARCHITECTURE else None


def _turned(matrix: torch.Tensor, num_heads: int | None) -> torch.Tensor:
    """Return a matrix with its heads' rows in GGUF's order: rotary pairs side by side, not half a head apart."""
    if num_heads is None:
        return matrix
    pairs = matrix.unflatten(0, (num_heads, 2, -1))  # [heads, 2, pairs, in]
    return pairs.swapaxes(1, 2).flatten(0, 2)


def _add(writer: Any, name: str, tensor: torch.Tensor) -> None:
    data = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    if data.ndim == 2:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, data)

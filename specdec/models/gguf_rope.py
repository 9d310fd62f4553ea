"""RoPE scaling in GGUF files. transformers drops it without a word, which moves every logit."""

from __future__ import annotations

from typing import Any

from specdec.errors import ModelLoadError
from specdec.models.gguf_header import GgufHeader

_FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_KEPT_BY_LOADER = ("gpt-oss", "gpt_oss")
_NO_SCALING = ("", "none")
_NO_FACTOR = (0.0, 1.0)


def lost_scaling(header: GgufHeader) -> list[str]:
    """Return the names of the keys and tensors that hold RoPE scaling and that transformers' loader drops."""
    if header.architecture in _KEPT_BY_LOADER:
        return []
    return [t.name for t in header.tensors if t.name.endswith(_FACTOR_TENSORS)] + _scaling_keys(header)


def check_rope(header: GgufHeader) -> None:
    """Refuse a file whose RoPE scaling would be lost.

    Raises:
        ModelLoadError: the message names the keys and tensors that hold the scaling.
    """
    found = lost_scaling(header)
    if found:
        raise ModelLoadError(
            f"{header.path} uses RoPE scaling ({', '.join(found)}), as Llama 3.1 and later and long-context models "
            "do; transformers' GGUF loader drops it, so the model would compute wrong logits. Load the original "
            "(safetensors) checkpoint of this model instead"
        )


def check_rope_kept(header: GgufHeader, config: Any) -> None:
    """Check that the scaling type in the file arrived in the loaded model's config.

    Raises:
        ModelLoadError: it did not.
    """
    if header.architecture not in _KEPT_BY_LOADER:
        return  # `check_rope` found nothing that could be lost
    wanted = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    found = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if wanted not in _NO_SCALING and found != wanted:
        raise ModelLoadError(
            f"{header.path} uses RoPE scaling of type {wanted!r}, but it was loaded as {found!r}. Load the original "
            "(safetensors) checkpoint of this model instead"
        )


def _scaling_keys(header: GgufHeader) -> list[str]:
    """Return the metadata keys that change positions; a factor of one changes none."""
    prefix = f"{header.architecture}.rope."
    found = []
    for short in ("scaling.factor", "scaling.attn_factor", "scale_linear"):
        value = header.metadata.get(prefix + short)
        if value is not None and value not in _NO_FACTOR:
            found.append(prefix + short)
    kind = header.metadata.get(prefix + "scaling.type")
    # Linear scaling by one is no scaling; the other types change something at any factor.
    if kind is not None and kind not in (*_NO_SCALING, "linear"):
        found.insert(0, prefix + "scaling.type")
    return found

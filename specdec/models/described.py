"""What a user names as a model, without its weights: config, class, end-of-sequence ids."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import ModelLoadError, SpecdecError
from specdec.models.compatibility import Refusal
from specdec.models.gguf import check_supported, converted_dir, find_damage
from specdec.models.gguf_header import GgufHeader, read_header
from specdec.models.gguf_rope import lost_scaling
from specdec.models.gguf_tokenizer import convert_tokenizer
from specdec.models.loading import Source, find_source, find_tokenizer, load_error
from specdec.models.pretrained import quiet
from specdec.models.wrapped import unwrapped


@dataclass(frozen=True, slots=True)
class Described:
    """A model as far as it is known before its weights are read. Without a config there is a refusal."""

    name: str
    architecture: str  # class name, or what the file calls it
    config: Any = None
    model_class: Any = None  # None = transformers has no class for the config
    model: Any = None  # the object, if one was given
    generation_config: Any = None
    source: Source | None = None  # where weights may be; None = an object was given
    header: GgufHeader | None = None
    refusal: Refusal | None = None

    def tokenizer(self, trust_remote_code: bool = False) -> Any | None:
        """Return the tokenizer that belongs to it, or None. Loads no weights."""
        source = self.source
        if self.model is not None:
            name = getattr(self.model, "name_or_path", "") or ""
            source = Source(name, name, Path(name)) if name and Path(name).is_dir() else None
        if self.header is not None:
            return convert_tokenizer(self.header)
        return None if source is None else find_tokenizer(source, trust_remote_code)


def describe(target: Any, trust_remote_code: bool = False) -> Described:
    """Return what is known of a built-in name, hub id, directory, .gguf file, config or model object.

    Raises:
        ModelLoadError: it cannot be found or read, or is none of these.
    """
    if isinstance(target, str | os.PathLike):
        return _named(find_source(target), trust_remote_code)
    from transformers import PretrainedConfig

    if isinstance(target, PretrainedConfig):
        found = _class_of(target, trust_remote_code)
        return Described(target.model_type, _class_name(target, found), target, found)
    model = unwrapped(target)
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise ModelLoadError(
            f"a {type(target).__module__}.{type(target).__name__} cannot be checked; give a built-in name, a path, a "
            "hub id, a transformers config or a transformers model"
        )
    return Described(
        name=getattr(model, "name_or_path", "") or type(model).__name__,
        architecture=type(model).__name__,
        config=config,
        model_class=type(model),
        model=model,
        generation_config=getattr(model, "generation_config", None),
    )


def _named(source: Source, trust_remote_code: bool) -> Described:
    header = None
    if source.gguf is not None:
        header = read_header(source.gguf, *([source.advice] if source.advice else []))
        lost = lost_scaling(header)
        if lost:
            refusal = Refusal(
                "RoPE scaling dropped by GGUF loading",
                f"transformers' loader ignores {', '.join(lost)}",
                "load the original (safetensors) checkpoint of this model instead",
            )
            return Described(source.name, header.architecture, source=source, header=header, refusal=refusal)
        check_supported(header)
    try:
        config = _read_config(source, trust_remote_code)
        found = _class_of(config, trust_remote_code)
    except SpecdecError:
        raise
    except Exception as error:  # transformers and the hub raise their own kinds
        raise load_error(source, error) from error
    return Described(
        name=source.name,
        architecture=_class_name(config, found),
        config=config,
        model_class=found,
        generation_config=_generation_config(source, trust_remote_code),
        source=source,
        header=header,
    )


def _read_config(source: Source, trust_remote_code: bool) -> Any:
    """Return the config, of a GGUF file from where it was converted to if it was; reading one takes seconds."""
    from transformers import AutoConfig

    if source.gguf is None:
        return AutoConfig.from_pretrained(source.pretrained, trust_remote_code=trust_remote_code)
    folder = converted_dir(source.gguf)
    if find_damage(folder) is None:
        return AutoConfig.from_pretrained(str(folder))
    with quiet():
        return AutoConfig.from_pretrained(str(source.gguf.parent), gguf_file=source.gguf.name)


def _generation_config(source: Source, trust_remote_code: bool) -> Any | None:
    from transformers import GenerationConfig

    if source.gguf is not None:
        return None  # the file has none: the config's ids are the model's
    try:
        return GenerationConfig.from_pretrained(source.pretrained, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError):
        return None  # absent or damaged; the config's ids are what is left


def _class_of(config: Any, trust_remote_code: bool) -> Any | None:
    """Return the class that would be loaded, or None if transformers knows no causal LM for the config."""
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    remote = (getattr(config, "auto_map", None) or {}).get(AutoModelForCausalLM.__name__)
    if remote and trust_remote_code:
        return get_class_from_dynamic_module(remote, config._name_or_path)
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and hasattr(named, "can_generate"):
            return named
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def _class_name(config: Any, found: Any | None) -> str:
    return str(found.__name__) if found is not None else f"{type(config).__name__} without a causal language model"

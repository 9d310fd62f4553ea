"""From what a user names as a model to a model and its tokenizer."""

from __future__ import annotations

import difflib
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec.errors import ConfigError, ModelLoadError, SpecdecError
from specdec.models.builtin import BUILTIN_MODELS, builtin_file
from specdec.models.checkpoint import check_weights, read_json
from specdec.models.dtypes import default_dtype, parse_device, parse_dtype
from specdec.models.gguf import convert_gguf
from specdec.models.pretrained import load_causal_lm, load_tokenizer
from specdec.models.wrapped import unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("specdec")

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_REASON_CHARS = 800


@dataclass(frozen=True, slots=True)
class Source:
    """What a user's name stands for, and what from_pretrained is given."""

    name: str
    pretrained: str
    folder: Path | None  # None = the hub, or a GGUF file
    gguf: Path | None = None
    advice: str = ""  # what to do about a damaged GGUF file

    def converted(self) -> Source:
        """Return the directory that a GGUF file is converted into, which is done if need be; others as they are."""
        if self.gguf is None:
            return self
        folder = convert_gguf(self.gguf, *([self.advice] if self.advice else []))
        return Source(self.name, str(folder), folder)


def load_model(
    target: str | os.PathLike[str] | PreTrainedModel,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a causal LM and its tokenizer, or take the model the caller already has.

    A model loaded here is in evaluation mode with gradients off. A model object is returned untouched.

    Args:
        target: a built-in name ("smollm2"), a .gguf file, a model directory, a hub id, or a model object.
        dtype: weight type, such as "float32" or "bf16"; "auto" is the checkpoint's own. Default: float32 on the
            CPU, else "auto".
        device: where the whole model goes; default CPU.
        device_map: placement by Accelerate, as in from_pretrained; excludes `device`.
        trust_remote_code: run Python code that comes with the checkpoint.

    Returns:
        The model, and its tokenizer or None if none was found.

    Raises:
        ModelLoadError: the target cannot be found, read or used as a causal LM.
        ConfigError: an option has no valid value.
    """
    if not isinstance(target, str | os.PathLike):
        given = {"dtype": dtype, "device": device, "device_map": device_map, "trust_remote_code": trust_remote_code}
        return _take_object(target, [name for name, value in given.items() if value])
    if device is not None and device_map is not None:
        raise ConfigError(f"device={device!r} and device_map={device_map!r} exclude each other; give one of them")
    place = None if device is None else parse_device(device)
    weights = parse_dtype(dtype) if dtype is not None else default_dtype(place, device_map)
    source = find_source(target).converted()
    try:
        _check_config(source, trust_remote_code)
        if source.folder is not None:
            check_weights(source.folder)
        model = load_causal_lm(
            source.pretrained, dtype=weights, device_map=device_map, trust_remote_code=trust_remote_code
        )
        if place is not None:
            model.to(place)
    except SpecdecError:
        raise
    except Exception as error:  # transformers, the hub, safetensors and torch all raise their own kinds
        raise load_error(source, error) from error
    return model, find_tokenizer(source, trust_remote_code)


def _take_object(model: Any, options: list[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    from transformers import PreTrainedModel

    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        raise ModelLoadError(
            f"a {type(model).__module__}.{type(model).__name__} cannot be used as a model; give a built-in name "
            f"({', '.join(BUILTIN_MODELS)}), a path, a hub id or a transformers PreTrainedModel"
        )
    if options:
        warnings.warn(f"{', '.join(options)} have no effect on a model object; it is used as it is", stacklevel=3)
    name = getattr(model, "name_or_path", "") or ""
    if not name or not Path(name).is_dir():
        return model, None
    return model, find_tokenizer(Source(name, name, Path(name)), "trust_remote_code" in options)


def find_source(target: str | os.PathLike[str]) -> Source:
    """Decide what `target` names. Nothing is loaded or converted.

    Raises:
        ModelLoadError: it names a path that does not exist or holds no model.
    """
    name = os.fspath(target)
    if isinstance(target, str) and target in BUILTIN_MODELS:
        builtin = BUILTIN_MODELS[target]
        return Source(name, name, None, builtin_file(builtin), f"run `{builtin.reinstall}`")
    if not name.strip():
        raise ModelLoadError("the model's name is empty; " + _choices())
    path = Path(name).expanduser()
    if path.is_file():
        if not _is_gguf(path):
            raise ModelLoadError(f"{name} is no .gguf file; of other formats give the directory that holds config.json")
        return Source(name, name, None, path.absolute())
    if path.is_dir():
        _check_folder(path)
        return Source(name, str(path), path)
    if not isinstance(target, str) or _looks_like_path(target):
        raise ModelLoadError(f"there is no file or directory {name}; {_choices()}")
    close = _closest(name, cutoff=0.8)
    if close and "/" not in name:  # offline, asking the hub about a typo takes 20 s of retries
        raise ModelLoadError(f"unknown model {name!r}; did you mean {close!r}? {_choices()}")
    return Source(name, name, None)


def gguf_path(target: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file that `target` names, or None where it is no file of that kind or not there."""
    try:
        return find_source(target).gguf
    except ModelLoadError:
        return None


def load_tokenizer_of(target: str | os.PathLike[str]) -> PreTrainedTokenizerBase | None:
    """Return a target's tokenizer without its weights, or None if it has none.

    Raises:
        ModelLoadError: the target cannot be found or converted.
    """
    return find_tokenizer(find_source(target).converted(), trust_remote_code=False)


def _is_gguf(path: Path) -> bool:
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or name.endswith(".gguf")


def _closest(name: str, cutoff: float = 0.6) -> str | None:
    return next(iter(difflib.get_close_matches(name.lower(), BUILTIN_MODELS, n=1, cutoff=cutoff)), None)


def _choices() -> str:
    return f"built-in models: {', '.join(BUILTIN_MODELS)}; or give a .gguf file, a model directory or a hub id"


def _check_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        read_json(folder / "config.json")
        return
    message = f"{folder} is no model directory: there is no config.json in it"
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        message += f"; it holds {ggufs[0].name}: give the path of that file"
    elif (folder / "adapter_config.json").is_file():
        message += "; it holds a PEFT adapter: merge it into its base model and save the result, or pass the object "
        message += "that peft.AutoPeftModelForCausalLM.from_pretrained() gives"
    raise ModelLoadError(message)


def _check_config(source: Source, trust_remote_code: bool) -> None:
    """Refuse checkpoints that hold something else than a decoder-only language model.

    Raises:
        ModelLoadError: the message names what the checkpoint holds.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as MULTIMODAL

    config = AutoConfig.from_pretrained(source.pretrained, trust_remote_code=trust_remote_code)
    kind = getattr(config, "model_type", "") or type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(
            f"{source.name} is an encoder-decoder model ({kind}); only decoder-only (causal) language models are "
            "supported"
        )
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    names = list(getattr(config, "architectures", None) or [])
    causal = any(n in CAUSAL.values() or n.endswith(("ForCausalLM", "LMHeadModel")) for n in names)
    if kind not in CAUSAL or (names and not causal):
        advice = "only decoder-only (causal) language models are supported"
        if kind in MULTIMODAL:
            advice = "for text prompts pass the object that AutoModelForImageTextToText.from_pretrained() gives"
        raise ModelLoadError(
            f"{source.name} holds {' / '.join(names) or kind}, which is no causal language model (model type {kind}); "
            + advice
        )


def load_error(source: Source, error: Exception) -> ModelLoadError:
    """Return what a failure of transformers or the hub means for the user."""
    reason = _reason(error)
    if source.folder is not None:
        return ModelLoadError(f"{source.name} cannot be loaded ({type(error).__name__}): {reason}")
    close = _closest(source.name)
    hint = f"; did you mean {close!r}?" if close else ""
    return ModelLoadError(
        f"{source.name!r} is no built-in model ({', '.join(BUILTIN_MODELS)}) and no local path, and it cannot be "
        f"loaded from the Hugging Face Hub: {reason}{hint}"
    )


def _reason(error: Exception) -> str:
    """Return an exception's text on one line, not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _REASON_CHARS else text[:_REASON_CHARS] + " ..."


def find_tokenizer(source: Source, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer, or None: a model can be used with token ids alone."""
    if source.folder is not None and not any((source.folder / name).is_file() for name in _TOKENIZER_FILES):
        logger.info("%s holds no tokenizer", source.name)
        return None
    try:
        return load_tokenizer(source.pretrained, trust_remote_code=trust_remote_code)
    except Exception as error:  # anything from a missing package to a damaged file
        logger.warning(
            "the tokenizer of %s cannot be loaded (%s): %s", source.name, type(error).__name__, _reason(error)
        )
        return None

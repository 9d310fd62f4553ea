"""Converting a GGUF file, once, into a directory that transformers loads in a fraction of a second."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import time
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import ModelLoadError
from specdec.models.cache_dir import atomic_dir, atomic_write_json, cache_dir, dir_lock, ensure_cache_dir
from specdec.models.checkpoint import check_safetensors, read_json
from specdec.models.gguf_header import GgufHeader, read_header
from specdec.models.gguf_rope import check_rope, check_rope_kept
from specdec.models.gguf_tokenizer import convert_tokenizer
from specdec.models.pretrained import load_causal_lm, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("specdec")

CONVERTER_VERSION = 1  # raise it when the same file must be converted again
_FOLDER = "models"
_MANIFEST = "specdec.json"  # written last; lists every other file with its size
_SAMPLE_BYTES = 1 << 20
_TOKENS_PER_S, _ELEMENTS_PER_S = 5e3, 7e6  # measured on two CPU cores, generous
_DOWNLOAD_AGAIN = "download the file again"


def convert_gguf(path: Path, advice: str = _DOWNLOAD_AGAIN) -> Path:
    """Return the directory holding the converted model; convert first if it is missing or damaged.

    Quantised weights become bfloat16; a file of plain floats keeps their type.

    Args:
        path: the .gguf file.
        advice: what the user can do about a damaged file.

    Raises:
        ModelLoadError: the file is damaged, cannot be represented faithfully, or cannot be converted; or the
            cache directory cannot be written.
    """
    final = converted_dir(path)
    damage = find_damage(final)
    if damage is None:
        return final
    header = read_header(path, advice)
    check_supported(header)
    ensure_cache_dir(_FOLDER)
    with dir_lock(final):
        damage = find_damage(final)  # another process may have been faster
        if damage is None:
            return final
        if final.exists():
            logger.warning("the converted model %s is damaged (%s); converting again", final, damage)
        _build(header, final)
        damage = find_damage(final)
        if damage is not None:
            raise ModelLoadError(f"the model converted from {path} was written, but {damage}: check the disk")
    return final


def converted_dir(path: Path) -> Path:
    """Return where the converted form of a GGUF file belongs.

    The name holds a hash of the file's size and its first and last megabyte, so that a changed file is converted
    anew and a moved one is not; and the version of transformers, whose releases read tokenizers differently.

    Raises:
        ModelLoadError: the file cannot be read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.sha256(size.to_bytes(8, "little") + file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem)[:80]
    return cache_dir() / _FOLDER / f"{stem}-{digest.hexdigest()[:16]}-v{CONVERTER_VERSION}-{_reader()}"


def _reader() -> str:
    return "transformers" + ".".join(version("transformers").split(".")[:2])


def find_damage(folder: Path) -> str | None:
    """Return what is wrong with a converted directory, or None. Reads headers and sizes only."""
    try:
        sizes = read_json(folder / _MANIFEST).get("files")
        if not isinstance(sizes, dict) or "config.json" not in sizes:
            return f"{folder / _MANIFEST} lists no files"
        for name, size in sizes.items():
            file = folder / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                return f"{file} is {'missing' if found is None else f'{found} bytes long instead of {size}'}"
            if file.suffix == ".safetensors":
                check_safetensors(file)
        read_json(folder / "config.json")
    except (ModelLoadError, OSError) as error:
        return str(error)
    return None


def check_supported(header: GgufHeader) -> None:
    """Refuse files that the loader would change silently.

    Raises:
        ModelLoadError: the message names the feature.
    """
    if not header.architecture or not header.tensors:
        raise ModelLoadError(f"{header.path} holds no model: no architecture or no tensors in its header")
    if int(header.metadata.get("split.count", 0)) > 1:
        raise ModelLoadError(
            f"{header.path} is one part of a split model: merge the parts with `llama-gguf-split --merge` first"
        )
    check_rope(header)


def _build(header: GgufHeader, final: Path) -> None:
    started = time.perf_counter()
    _check_space(header, final.parent)
    # A warning, because without logging set up nothing below that level is shown, and the wait needs a reason.
    num_tokens = header.metadata.get("tokenizer.ggml.tokens", 0)
    seconds = 1 + num_tokens / _TOKENS_PER_S + header.num_elements / _ELEMENTS_PER_S
    logger.warning("converting %s once, about %.0f s; the result is kept in %s", header.path, seconds, final)
    try:
        with atomic_dir(final) as folder:
            _write(header, folder)
    except ModelLoadError:
        raise
    except ImportError as error:
        raise ModelLoadError(
            f"{header.path} cannot be converted: {error}; run `pip install gguf accelerate`"
        ) from error
    except Exception as error:  # transformers raises many kinds for files it does not know
        raise ModelLoadError(f"{header.path} cannot be converted: {type(error).__name__}: {error}") from error
    logger.info("converted %s in %.1f s", header.path.name, time.perf_counter() - started)


def _write(header: GgufHeader, folder: Path) -> None:
    logger.info("reading %s", header.path.name)
    model = _load(header)
    check_rope_kept(header, model.config)
    model.config._name_or_path = ""
    logger.info("writing the converted model")
    with quiet():
        model.save_pretrained(folder)
    tokenizer = convert_tokenizer(header)
    if tokenizer is None:
        logger.warning("%s holds no tokenizer; text cannot be encoded for it", header.path)
    else:
        tokenizer.save_pretrained(folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    _make_readable(files, folder)
    manifest = {
        "source": header.path.name,
        "converter_version": CONVERTER_VERSION,
        "transformers": version("transformers"),
        "files": {file.relative_to(folder).as_posix(): file.stat().st_size for file in files},
    }
    atomic_write_json(folder / _MANIFEST, manifest)


def _load(header: GgufHeader) -> PreTrainedModel:
    """Load the file through transformers, every weight unpacked.

    Packed weights would mark the model as quantised, which forbids saving it.
    """
    import torch
    from transformers import GgufConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_causal_lm(
            str(header.path.parent),
            gguf_file=header.path.name,
            dtype=getattr(torch, header.float_dtype or "bfloat16"),
            quantization_config=GgufConfig(dequantize=True),
        )


def _make_readable(files: Sequence[Path], folder: Path) -> None:
    """Give every file the permissions an ordinary new file has here; safetensors are written for the owner only."""
    mode = folder.stat().st_mode & 0o666
    for file in files:
        file.chmod(mode)


def _check_space(header: GgufHeader, folder: Path) -> None:
    item_bytes = 4 if header.float_dtype == "float32" else 2
    needed = header.num_elements * item_bytes + _SAMPLE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelLoadError(
            f"converting {header.path} needs {needed / 1e6:.0f} MB in {folder}, {free / 1e6:.0f} MB are free; "
            "make room or set SPECDEC_CACHE to another disk"
        )

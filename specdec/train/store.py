"""Sequences with the target's hidden states, on disk: shards that appear whole, are resumed and read as views."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.heads.target import same_probe
from specdec.train.target_weights import same_weights

log = logging.getLogger("specdec")

_ABOUT = "store.json"
_SHARD = ("keys", "num_tokens", "num_features", "num_prompt_tokens", "temperatures")  # lists in its metadata


@dataclass(frozen=True, slots=True)
class StoreAbout:
    """What the features of a store are features of. `layers` as in `FeatureSpec`; the final norm's output is last."""

    target: str
    hidden_size: int  # of the target
    vocab_size: int
    layers: tuple[int, ...]
    # Empty in stores of older versions: unknown.
    probe: tuple[float, ...] = ()  # of the target's embedding, see `HeadTarget.probe`
    weights: tuple[float, ...] = ()  # of its last block, see `sampled_weights`
    capture: Mapping[str, Any] = field(default_factory=dict)  # how the first responses were drawn

    @property
    def width(self) -> int:
        return (len(self.layers) + 1) * self.hidden_size

    def refuse_other(self, other: StoreAbout, folder: Path) -> None:
        """Raise CheckpointError unless the features in `folder`, which are of `other`, are what this describes."""
        names = ("target", "hidden_size", "vocab_size", "layers")
        apart = [f"{n}={getattr(other, n)!r}, not {getattr(self, n)!r}" for n in names if self._differs(other, n)]
        if apart:
            raise CheckpointError(f"{folder} holds features of {'; '.join(apart)}; give another folder")
        same = not self.probe or not other.probe or same_probe(list(self.probe), list(other.probe))
        if not same or not same_weights(self.weights, other.weights):
            raise CheckpointError(
                f"{folder} holds features of other weights than {self.target} has now; give another folder, or delete "
                "this one if those weights are gone"
            )

    def warn_of_other_drawing(self, other: StoreAbout, folder: Path) -> None:
        """Say what is not known about the features in `folder`, and how its responses were drawn otherwise."""
        if not other.probe and self.probe:
            log.warning(
                "%s was begun by an older specdec and does not say which weights of %s its features are of; if they "
                "have changed since, give another folder",
                folder,
                self.target,
            )
        apart = [f"{k}={v!r}, not {self.capture[k]!r}" for k, v in other.capture.items() if self.capture.get(k, v) != v]
        if apart:
            log.warning(
                "responses in %s were drawn with %s; they are used as they are, another --features draws anew",
                folder,
                ", ".join(apart),
            )

    def _differs(self, other: StoreAbout, name: str) -> bool:
        return bool(getattr(self, name) != getattr(other, name))


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt and its response. Row j of `features` was computed by the forward over `token_ids[j]`."""

    key: str
    token_ids: Tensor  # [n] int64
    features: Tensor  # [n - 1 or n, F] bfloat16
    num_prompt_tokens: int
    temperature: float  # the response was drawn at; 0 = greedy

    @property
    def num_response_tokens(self) -> int:
        return int(self.token_ids.shape[0]) - self.num_prompt_tokens


class FeatureStore:
    """A folder of shards, each a safetensors file with the examples of one moment.

    A shard is written beside its place and moved there, so a killed process leaves none that is half written, and
    several processes may write into one folder.

    Raises:
        CheckpointError: the folder holds features of something else, or cannot be made.
    """

    def __init__(self, folder: Path | str, about: StoreAbout | None = None) -> None:
        self.folder = Path(folder)
        path = self.folder / _ABOUT
        found = _read_about(path) if path.is_file() else None
        if about is None and found is None:
            raise CheckpointError(f"{self.folder} holds no features: {_ABOUT} is missing; capture some first")
        if about is not None and found is not None:
            about.refuse_other(found, self.folder)
            about.warn_of_other_drawing(found, self.folder)
        self.about: StoreAbout = about or found  # type: ignore[assignment]  # one of them is there
        if found is None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                _write_whole(path, json.dumps(asdict(self.about), indent=1).encode())
            except OSError as error:
                raise CheckpointError(f"{self.folder} cannot hold features: {error}; give another folder") from error

    def write(self, examples: Sequence[Example]) -> None:
        """Write one shard.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written; earlier shards are whole.
        """
        tensors = {
            "token_ids": torch.cat([e.token_ids for e in examples]).to(torch.int32),
            "features": torch.cat([e.features for e in examples]),
        }
        meta = {
            "keys": json.dumps([e.key for e in examples]),
            "num_tokens": json.dumps([len(e.token_ids) for e in examples]),
            "num_features": json.dumps([len(e.features) for e in examples]),
            "num_prompt_tokens": json.dumps([e.num_prompt_tokens for e in examples]),
            "temperatures": json.dumps([e.temperature for e in examples]),
        }
        name = f"shard-{uuid.uuid4().hex[:12]}.safetensors"
        half = self.folder / f".{name}.part"
        try:
            save_file(tensors, half, meta)
            half.replace(self.folder / name)
        except (OSError, SafetensorError) as error:
            half.unlink(missing_ok=True)
            raise CheckpointError(
                f"features cannot be written to {self.folder}: {error}; {len(self.shards())} earlier shards are whole "
                "and are taken up again by the same command"
            ) from error

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*.safetensors"))

    def keys(self) -> set[str]:
        """Return the keys of all examples that are stored."""
        return {key for path in self.shards() for key in _metadata(path)[0]}

    def examples(self) -> Iterator[Example]:
        """Yield all examples, ordered by key; their tensors are views of memory-mapped files."""
        found = [example for path in self.shards() for example in _read_shard(path, self.about.width)]
        yield from sorted(found, key=lambda e: e.key)

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.shards())


def _metadata(path: Path) -> list[list[Any]]:
    """Return the lists of `_SHARD`, of equal lengths.

    Raises:
        CheckpointError: the file is damaged, or no shard.
    """
    try:
        with safe_open(path, "pt") as file:
            meta = dict(file.metadata() or {})
        lists = [json.loads(meta[name]) for name in _SHARD]
        if len({len(values) for values in lists}) > 1:
            raise ValueError("lists of its metadata differ in length")
        return lists
    except KeyError as error:
        raise CheckpointError(
            f"{path} is no shard of features: it has no {error} in its metadata; remove it"
        ) from error
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete it, and its prompts are run again") from error


def _read_shard(path: Path, width: int) -> Iterator[Example]:
    lists = _metadata(path)
    try:
        with safe_open(path, "pt") as file:
            token_ids, features = file.get_tensor("token_ids").to(torch.int64), file.get_tensor("features")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete it, and its prompts are run again") from error
    if features.shape[1:] != (width,):
        raise CheckpointError(f"{path} has features of width {features.shape[1:]}, {_ABOUT} says {width}; delete it")
    row = start = 0
    for key, n, m, prompt, temperature in zip(*lists, strict=True):
        yield Example(key, token_ids[start : start + n], features[row : row + m], prompt, temperature)
        start, row = start + n, row + m


def _read_about(path: Path) -> StoreAbout:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name in ("layers", "probe", "weights"):
            values[name] = tuple(values.get(name, ()))
        return StoreAbout(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; delete the folder {path.parent}") from error


def _write_whole(path: Path, data: bytes) -> None:
    half = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    half.write_bytes(data)
    half.replace(path)

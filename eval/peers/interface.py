"""What a peer is: another library's engine that answers the same prompts with the same number of tokens."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specdec.api import LLM
from specdec.errors import SpecdecError
from specdec.eval.records import VariantInfo


class PeerAbsent(SpecdecError):
    """A peer's package is not installed, or it cannot run this target."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One prompt's answer."""

    token_ids: list[int]
    emissions: list[list[float]]  # [seconds since run() began, tokens] of each time that some came, prefill's first


class Peer(Protocol):
    """Another library's engine."""

    info: VariantInfo
    max_batch: int  # prompts that one run takes

    def run(self, prompts: Sequence[list[int]], num_new_tokens: Sequence[int]) -> list[PeerAnswer]:
        """Return one answer per prompt, each of exactly so many tokens, past EOS; nothing is kept from earlier runs."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What a peer is built from."""

    llm: LLM  # of the target
    source: str  # what names the target: "smollm2", a path, a hub id
    temperature: float
    seed: int | None
    num_draft_tokens: int | None  # None = the peer's own default
    draft_model: str | None = None  # None = the one that ships for the target


def import_peer(module: str, requirement: str) -> Any:
    """Return a module of an optional package.

    Raises:
        PeerAbsent: it is not installed, or does not load here.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # a missing shared library raises OSError or RuntimeError
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(
            f"{error.name}."
        ):  # a package, or one it is in
            raise PeerAbsent(f"{requirement} is not installed; pip install 'torch-specdec[peers]'") from error
        raise PeerAbsent(f"{requirement} cannot be imported ({type(error).__name__}): {error}") from error


def wait_for(device: torch.device) -> None:
    """Wait for what an accelerator still has to do, so that a clock read next includes it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def cut_to(emissions: Sequence[Sequence[float]], count: int) -> list[list[float]]:
    """Return the emissions of the first `count` tokens."""
    kept: list[list[float]] = []
    for at, tokens in emissions:
        tokens = min(tokens, count)
        if tokens:
            kept.append([at, tokens])
        count -= int(tokens)
    return kept

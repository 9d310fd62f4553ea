"""Other libraries' engines, by name, loaded when one is asked for. See docs/peers.md."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from specdec.api import LLM
from specdec.errors import ConfigError
from specdec.eval.peers.interface import Peer, PeerAbsent, PeerAnswer, PeerSettings

__all__ = ["OPTIONS", "PEERS", "Peer", "PeerAbsent", "PeerAnswer", "build_peer"]

PEERS: dict[str, str] = {
    "transformers": "specdec.eval.peers.hf:build_plain",
    "transformers_assisted": "specdec.eval.peers.hf:build_assisted",
    "transformers_prompt_lookup": "specdec.eval.peers.hf:build_prompt_lookup",
    "transformers_generate_batch": "specdec.eval.peers.hf_batch:build_generate_batch",
    "llama_cpp": "specdec.eval.peers.llamacpp:build_plain",
    "llama_cpp_prompt_lookup": "specdec.eval.peers.llamacpp:build_prompt_lookup",
    "openvino": "specdec.eval.peers.genai:build_plain",
    "openvino_prompt_lookup": "specdec.eval.peers.genai:build_prompt_lookup",
    "openvino_draft_model": "specdec.eval.peers.genai:build_draft_model",
}
_TAKE_BATCHES = ("transformers", "transformers_generate_batch")  # the others take one prompt at once
_LOOKUP, _DRAFT_MODEL = ("num_draft_tokens",), ("num_draft_tokens", "draft_model")
OPTIONS: dict[str, tuple[str, ...]] = {  # of the setting `peer_options`; the other peers have none
    "transformers_assisted": _DRAFT_MODEL,
    "transformers_prompt_lookup": _LOOKUP,
    "llama_cpp_prompt_lookup": _LOOKUP,
    "openvino_prompt_lookup": _LOOKUP,
    "openvino_draft_model": _DRAFT_MODEL,
}


def build_peer(
    name: str,
    llm: LLM,
    *,
    source: str,
    temperature: float,
    seed: int | None,
    num_draft_tokens: int | None,
    draft_model: str | None = None,
    batch_size: int = 1,
) -> Peer:
    """Return a peer, loaded.

    Args:
        name: one of `PEERS`.
        llm: of the target; peers of transformers run its model object.
        source: what names the target, for peers that load it themselves.
        temperature: 0 is greedy.
        seed: of the sampling; each library draws in its own way.
        num_draft_tokens: per step; None = the peer's own default.
        draft_model: for peers with one, as the option `model` of the drafter "draft_model"; OpenVINO's also takes a
            .gguf file, or a folder with an openvino_model.xml. None = the one that ships for the target.
        batch_size: most prompts of one run; a peer that takes fewer is not loaded.

    Raises:
        PeerAbsent: its package is not installed, or it cannot run this target or so many prompts at once.
        ConfigError: there is no such peer.
    """
    if name not in PEERS:
        close = difflib.get_close_matches(name, PEERS, n=1)
        hint = f" did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"unknown peer {name!r};{hint} available: {', '.join(PEERS)}")
    if batch_size > 1 and name not in _TAKE_BATCHES:
        raise PeerAbsent(f"takes one prompt at once, batch_size is {batch_size}")
    module, _, attribute = PEERS[name].partition(":")
    build: Any = getattr(importlib.import_module(module), attribute)
    built: Peer = build(name, PeerSettings(llm, source, temperature, seed, num_draft_tokens, draft_model))
    return built

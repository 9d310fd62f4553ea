"""llama.cpp through llama-cpp-python, on the target's own GGUF file: plain and with its prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from specdec.api import gguf_path
from specdec.eval.peers.interface import PeerAbsent, PeerAnswer, PeerSettings, import_peer
from specdec.eval.records import VariantInfo

_PACKAGE = "llama-cpp-python"
_LOOKUP_TOKENS = 10  # the default of its LlamaPromptLookupDecoding
NOTE = "computes with the GGUF file's own quantised weights: other arithmetic, now and then other tokens"


class LlamaCppPeer:
    """`Llama.generate`, token by token from token ids."""

    max_batch = 1

    def __init__(
        self, info: VariantInfo, llama: Any, temperature: float, seed: int | None, draft: _Lookup | None = None
    ) -> None:
        self.info = info
        self._llama, self._seed, self._draft = llama, seed, draft
        # Nothing that changes the distribution but the temperature.
        self._options = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}

    def run(self, prompts: Sequence[list[int]], num_new_tokens: Sequence[int]) -> list[PeerAnswer]:
        (prompt,), (count,) = prompts, num_new_tokens
        ids: list[int] = []
        times: list[float] = []
        ends: list[int] = []  # how many tokens there were when each forward began
        self._llama.reset()  # else it keeps the KV of a prefix that the last prompt had too
        if self._seed is not None:
            self._llama.set_seed(self._seed)
        if self._draft is not None:
            self._draft.on_step = lambda: ends.append(len(ids))
        start = time.perf_counter()
        tokens = self._llama.generate(list(prompt), **self._options)
        try:
            while len(ids) < count:
                ids.append(int(next(tokens)))
                times.append(time.perf_counter() - start)
        finally:
            tokens.close()
        ends = [*range(1, count)] if self._draft is None else [end for end in ends if end]
        return [PeerAnswer(ids, _grouped(times, [*ends, count]))]

    def close(self) -> None:
        self._llama.close()


class _Lookup:
    """A draft model that tells when it is asked, which is once before each forward with drafts."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.on_step: Any = lambda: None

    def __call__(self, input_ids: Any, **options: Any) -> Any:
        self.on_step()
        return self._inner(input_ids, **options)


def _grouped(times: Sequence[float], ends: Sequence[int]) -> list[list[float]]:
    """Return emissions: the tokens between two of `ends` came with the last of them."""
    begins = [0, *ends]
    return [[times[end - 1], end - begin] for begin, end in zip(begins, ends, strict=False) if end > begin]


def build_plain(name: str, settings: PeerSettings) -> LlamaCppPeer:
    """Return llama.cpp without drafts."""
    llama = _load(settings)
    return LlamaCppPeer(VariantInfo(name, "peer", note=NOTE), llama, settings.temperature, settings.seed)


def build_prompt_lookup(name: str, settings: PeerSettings) -> LlamaCppPeer:
    """Return llama.cpp with the prompt lookup of its Python binding, n-grams of at most two tokens."""
    speculative = import_peer("llama_cpp.llama_speculative", _PACKAGE)
    count = _LOOKUP_TOKENS if settings.num_draft_tokens is None else settings.num_draft_tokens
    draft = _Lookup(speculative.LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=count))
    info = VariantInfo(
        name,
        "peer",
        max_draft_tokens=count,
        options={"max_ngram_size": 2, "num_pred_tokens": count},
        note=f"{NOTE}; with a draft model it computes the logits of every prompt token",
    )
    return LlamaCppPeer(info, _load(settings, draft_model=draft), settings.temperature, settings.seed, draft)


def _load(settings: PeerSettings, **options: Any) -> Any:
    """Return the target in llama.cpp, with as many threads as torch has.

    Raises:
        PeerAbsent: the package is not installed, or there is no GGUF file it can read.
    """
    llama_cpp = import_peer("llama_cpp", _PACKAGE)
    path = needed_gguf(settings.source)
    threads = torch.get_num_threads()
    try:
        return llama_cpp.Llama(
            str(path), n_ctx=0, n_threads=threads, n_threads_batch=threads, verbose=False, **options
        )  # n_ctx=0: as many as the model was built for
    except Exception as error:  # ValueError for a file it does not know, and kinds of its own
        raise PeerAbsent(f"llama.cpp cannot load {path} ({type(error).__name__}): {error}") from error


def needed_gguf(source: str) -> Any:
    """Return the GGUF file of a target.

    Raises:
        PeerAbsent: it has none.
    """
    path = gguf_path(source)
    if path is None:
        raise PeerAbsent(f"it runs GGUF files, and the target {source} is none")
    return path

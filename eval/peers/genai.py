"""OpenVINO GenAI on the target's own GGUF file: plain, with prompt lookup, with a draft model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from specdec.eval.peers.draft_gguf import draft_gguf
from specdec.eval.peers.interface import PeerAbsent, PeerAnswer, PeerSettings, cut_to, import_peer
from specdec.eval.peers.llamacpp import needed_gguf
from specdec.eval.records import VariantInfo

_PACKAGE = "openvino-genai"
_DRAFT_TOKENS = 5  # its own default
_NGRAM_TOKENS = 3  # likewise, of prompt lookup
NOTE = "reads Q4_1 weights of GGUF files inexactly and computes in its own precision: other tokens after a while"


class GenAIPeer:
    """`LLMPipeline.generate` from token ids, with a streamer that notes when tokens come."""

    max_batch = 1

    def __init__(self, info: VariantInfo, pipeline: Any, settings: PeerSettings, options: dict[str, Any]) -> None:
        """`options`: of its GenerationConfig."""
        self.info = info
        self._pipeline = pipeline
        self._genai = import_peer("openvino_genai", _PACKAGE)
        self._tensor = import_peer("openvino", _PACKAGE).Tensor
        sampling: dict[str, Any] = {"do_sample": settings.temperature > 0}
        if settings.temperature:
            sampling |= {"temperature": settings.temperature, "top_p": 1.0}
            sampling |= {} if settings.seed is None else {"rng_seed": settings.seed}
        self._options = {"ignore_eos": True, **sampling, **options}
        self._streamer = _streamer_class(self._genai)

    def run(self, prompts: Sequence[list[int]], num_new_tokens: Sequence[int]) -> list[PeerAnswer]:
        (prompt,), (count,) = prompts, num_new_tokens
        ids = numpy.array([prompt], dtype=numpy.int64)
        inputs = self._genai.TokenizedInputs(self._tensor(ids), self._tensor(numpy.ones_like(ids)))
        config = self._genai.GenerationConfig(max_new_tokens=count, **self._options)
        clock = self._streamer()
        start = time.perf_counter()
        done = self._pipeline.generate(inputs, config, clock)
        emissions = [[at - start, tokens] for at, tokens in clock.emissions]
        return [PeerAnswer([int(token) for token in done.tokens[0]][:count], cut_to(emissions, count))]

    def close(self) -> None:
        self._pipeline = None


def _streamer_class(genai: Any) -> Any:
    """Return a class of streamer: what it inherits from is there only where the package is."""

    class Clock(genai.StreamerBase):
        """Notes when tokens come, and how many."""

        def __init__(self) -> None:
            super().__init__()
            self.emissions: list[tuple[float, int]] = []

        def write(self, token: Any) -> Any:
            self.emissions.append((time.perf_counter(), 1 if isinstance(token, int) else len(token)))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None: ...

    return Clock


def build_plain(name: str, settings: PeerSettings) -> GenAIPeer:
    """Return OpenVINO without drafts."""
    return GenAIPeer(VariantInfo(name, "peer", note=NOTE), _load(settings), settings, {})


def build_prompt_lookup(name: str, settings: PeerSettings) -> GenAIPeer:
    """Return OpenVINO with prompt lookup."""
    options = {"num_assistant_tokens": _num_draft_tokens(settings), "max_ngram_size": _NGRAM_TOKENS}
    return GenAIPeer(_drafting(name, settings, options), _load(settings, prompt_lookup=True), settings, options)


def build_draft_model(name: str, settings: PeerSettings) -> GenAIPeer:
    """Return OpenVINO with a draft model: a .gguf file or OpenVINO folder that is named, or the one that ships.

    Raises:
        PeerAbsent: there is none for the target.
    """
    genai = import_peer("openvino_genai", _PACKAGE)
    target = needed_gguf(settings.source)
    options = {"num_assistant_tokens": _num_draft_tokens(settings)}
    with draft_gguf(settings, target) as path:
        try:
            if path.is_file():  # it takes GGUF files for targets only, and writes its own format beside them if asked
                genai.LLMPipeline(str(path), "CPU", enable_save_ov_model=True)
                path = path.parent
            draft = genai.draft_model(str(path), "CPU", **_properties())
        except Exception as error:
            raise PeerAbsent(f"OpenVINO cannot load the draft model ({type(error).__name__}): {error}") from error
        pipeline = _load(settings, draft_model=draft)
    named = (
        settings.draft_model
        or "the one that ships for the target, its blocks as Q8_0, with the target's whole output head"
    )
    info = _drafting(name, settings, {**options, "draft_model": named})
    return GenAIPeer(info, pipeline, settings, options)


def _num_draft_tokens(settings: PeerSettings) -> int:
    return _DRAFT_TOKENS if settings.num_draft_tokens is None else settings.num_draft_tokens


def _drafting(name: str, settings: PeerSettings, options: dict[str, Any]) -> VariantInfo:
    note = NOTE
    if settings.temperature:
        note += "; its acceptance of sampled tokens is not that of speculative sampling"
    count = options["num_assistant_tokens"]
    return VariantInfo(
        name, "peer", lossless=not settings.temperature, max_draft_tokens=count, options=dict(options), note=note
    )


def _properties() -> dict[str, Any]:
    return {"INFERENCE_NUM_THREADS": torch.get_num_threads()}


def _load(settings: PeerSettings, **options: Any) -> Any:
    """Return the target's pipeline, with as many threads as torch has.

    Raises:
        PeerAbsent: the package is not installed, or there is no GGUF file it can read.
    """
    genai = import_peer("openvino_genai", _PACKAGE)
    path = needed_gguf(settings.source)
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # the same prompt comes again with every repeat
    try:
        return genai.LLMPipeline(str(path), "CPU", scheduler_config=scheduler, **_properties(), **options)
    except Exception as error:  # RuntimeError for whatever it does not know
        raise PeerAbsent(f"OpenVINO cannot load {path} ({type(error).__name__}): {error}") from error

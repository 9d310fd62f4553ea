"""Responses of the target and its hidden states in one pass: the engine decodes, a drafter without drafts listens.

Training on what the target itself says is what makes a drafter's guesses its own (Li et al. 2025, arXiv 2503.01840,
and the recipes of the public training repositories).
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.api import LLM
from specdec.errors import ConfigError
from specdec.heads.target import head_target
from specdec.interfaces import DraftRequest, FeatureSpec, Noise, Observation, SamplingParams, TokenTree, empty_tree
from specdec.models.generation import eos_token_ids
from specdec.models.runner import ModelRunner
from specdec.repetition import RepeatWatch
from specdec.request import Request, StopRules
from specdec.train.store import Example, FeatureStore, StoreAbout
from specdec.train.target_weights import sampled_weights

log = logging.getLogger("specdec")

_DRAWING = ("max_new_tokens", "seed", "stop_at_repetition")  # beside the temperature, which each example has


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """How responses are drawn and how often they are written."""

    max_new_tokens: int = 160
    min_new_tokens: int = 4  # shorter responses teach nothing
    max_batch_size: int = 64
    temperatures: tuple[float, ...] = (0.0,)  # taken in turn over the samples of a prompt
    seed: int = 0
    stop_at_repetition: bool = True  # small models loop under greedy decoding; loops teach nothing
    shard_tokens: int = 30_000  # written at once: what a killed run loses at most

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "max_batch_size", "shard_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"capture.{name}={getattr(self, name)!r}; allowed: an integer >= 1")
        if not self.temperatures or not all(0 <= t < math.inf for t in self.temperatures):
            raise ConfigError(f"capture.temperatures={list(self.temperatures)}; allowed: at least one, each >= 0")


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as the target's token ids. With `response_ids` the response is given, not drawn."""

    key: str
    token_ids: tuple[int, ...]
    temperature: float = 0.0
    response_ids: tuple[int, ...] = ()


class _Recorder:
    """Keeps every hidden state it hears of until the request is over."""

    name = "feature_recorder"
    max_position: int | None = None
    shares_target_kv = False
    samples = False

    def __init__(self, features: FeatureSpec) -> None:
        self.features = features
        self._rows: dict[int, list[Tensor]] = {}

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        return empty_tree(requests)

    def observe(self, seen: Sequence[Observation]) -> None:
        for o in seen:
            if o.features is not None:
                self._rows.setdefault(o.request_id, []).append(o.features.to("cpu", torch.bfloat16))

    def take(self, request_id: int) -> Tensor:
        """Return the rows of a request, [m, F], cloned: a tensor of inference mode cannot be trained on."""
        with torch.inference_mode(False):
            return torch.cat([row.clone() for row in self._rows.pop(request_id)])

    def release(self, request_id: int) -> None: ...  # the engine releases first; `take` comes after

    def reset(self) -> None:
        self._rows.clear()


def fused_layers(num_layers: int) -> tuple[int, ...]:
    """Return the low, middle and high block whose outputs EAGLE-3 fuses.

    Source: Li et al. 2025, arXiv 2503.01840; the public code captures the inputs of blocks 2, n // 2 and n - 3.
    Shallower models get the nearest blocks they have.
    """
    last = num_layers - 1
    return tuple(min(max(layer, 0), last) for layer in (1, num_layers // 2 - 1, num_layers - 4))


def about_of(runner: ModelRunner, target: str, capture: CaptureConfig | None = None) -> StoreAbout:
    """Return what the features of this target are, and how its responses are drawn."""
    num_layers = runner.program.num_layers
    return StoreAbout(
        target,
        runner.config.get_text_config().hidden_size,
        runner.vocab_size,
        fused_layers(num_layers),
        probe=tuple(head_target(runner).probe()),
        weights=sampled_weights(runner.model, num_layers),
        capture={} if capture is None else {name: getattr(capture, name) for name in _DRAWING},
    )


class Capture:
    """One pass over prompts into a store. Prompts that are stored already are not run again."""

    def __init__(self, model: object, tokenizer: object, store: FeatureStore, config: CaptureConfig) -> None:
        self._config, self._store = config, store
        self._recorder = _Recorder(FeatureSpec(store.about.layers, final_norm=True))
        self._llm = LLM(
            model,
            drafter=self._recorder,
            tokenizer=tokenizer,
            max_draft_tokens=0,
            max_batch_size=config.max_batch_size,
        )
        self._eos = eos_token_ids(self._llm.model)
        self._open: dict[int, tuple[str, float, Request]] = {}
        self._done: list[Example] = []

    def run(self, prompts: Iterable[TokenPrompt], report: Callable[[int, int], None] | None = None) -> int:
        """Run all prompts; return the number of response tokens written.

        Args:
            prompts: each with a key of its own.
            report: called with (prompts done, response tokens so far) now and then.

        Raises:
            CheckpointError: a shard cannot be written.
        """
        known = self._store.keys()
        waiting = iter([p for p in prompts if p.key not in known])
        written = done = 0
        last = time.monotonic()
        try:
            # A few more than a batch are queued, so that the batch stays full.
            while self._fill(waiting) or self._llm.engine.has_unfinished:
                for output in self._llm.engine.step():
                    if output.finish_reason is not None:
                        written += self._finish(output.request_id)
                        done += 1
                if report is not None and time.monotonic() - last > 1.0:
                    last = time.monotonic()
                    report(done, written)
        except KeyboardInterrupt:  # what is whole is kept
            self._flush()
            if report is not None:
                report(done, written)
            raise
        self._flush()
        if report is not None:
            report(done, written)
        return written

    def _fill(self, waiting: Iterable[TokenPrompt]) -> bool:
        """Queue prompts up to a batch and a half; return whether one was queued."""
        queued = False
        while len(self._open) < self._config.max_batch_size * 3 // 2:
            prompt = next(waiting, None)  # type: ignore[call-overload]  # an iterator
            if prompt is None:
                break
            self._add(prompt)
            queued = True
        return queued

    def _add(self, prompt: TokenPrompt) -> None:
        config = self._config
        # By the key, not by the order: a resumed run draws what the killed one would have drawn.
        number = int.from_bytes(hashlib.sha256(prompt.key.encode()).digest()[:8], "big")
        token_ids = [*prompt.token_ids, *prompt.response_ids]
        criteria = (RepeatWatch(len(token_ids)),) if config.stop_at_repetition else ()
        stop = StopRules(
            max_new_tokens=1 if prompt.response_ids else config.max_new_tokens,
            eos_token_ids=frozenset(self._eos),
            criteria=criteria,
        )
        sampling = SamplingParams(temperature=prompt.temperature, seed=(config.seed + number) % 2**31)
        request = self._llm.engine.add_request(token_ids, sampling, stop)
        self._open[request.request_id] = (prompt.key, prompt.temperature, request)
        if prompt.response_ids:
            request.stats.num_prompt_tokens = len(prompt.token_ids)

    def _finish(self, request_id: int) -> int:
        """Keep what a finished request gave; return its number of response tokens."""
        key, temperature, request = self._open.pop(request_id)
        features = self._recorder.take(request_id)
        num_prompt = request.stats.num_prompt_tokens
        given = num_prompt < request.num_prompt_tokens
        token_ids = torch.tensor(request.tokens[:-1] if given else request.tokens, dtype=torch.int64)
        self._llm.engine.forget(request_id)
        example = Example(key, token_ids, features, num_prompt, temperature)
        if example.num_response_tokens >= self._config.min_new_tokens:
            self._done.append(example)
        if sum(len(e.token_ids) for e in self._done) >= self._config.shard_tokens:
            self._flush()
        return max(example.num_response_tokens, 0)

    def _flush(self) -> None:
        if self._done:
            done, self._done = self._done, []
            self._store.write(done)

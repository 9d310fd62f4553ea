"""transformers' continuous batching, as generate_batch() runs it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from specdec.eval.peers.hf import sampling_options
from specdec.eval.peers.interface import PeerAbsent, PeerAnswer, PeerSettings, wait_for
from specdec.eval.records import VariantInfo

# The fastest of those tried on two CPU cores; no prefix sharing, as the engine.
_CONFIG: dict[str, Any] = {"page_size": 32, "max_batch_tokens": 2048, "allow_block_sharing": False}
_LEAST_BLOCKS = 256
_PROBE = ([[1, 2, 3]], [2])
# Fields of a generation config whose logits processors, beside them, read nothing but the scores. All others are given
# one token of each answer here, or left out.
_OF_SCORES = {
    "suppress_tokens": "SuppressTokensLogitsProcessor",
    "remove_invalid_values": "InfNanRemoveLogitsProcessor",
    "renormalize_logits": "LogitNormalization",
}


class GenerateBatchPeer:
    """The loop of generate_batch(), which itself gives all prompts one length.

    Its cache and manager are made once and kept, so that only generating is timed.
    """

    def __init__(self, info: VariantInfo, settings: PeerSettings) -> None:
        self.info, self.max_batch = info, sys.maxsize
        self._model: Any = settings.llm.model
        self._generation = _generation_config(settings)
        self._num_blocks = 0
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

    def run(self, prompts: Sequence[list[int]], num_new_tokens: Sequence[int]) -> list[PeerAnswer]:
        """Return the answers.

        Raises:
            RuntimeError: transformers gave up on one.
        """
        self._make_room(prompts, num_new_tokens)
        wait_for(self._model.device)
        start = time.perf_counter()
        with self._session() as manager:
            names = [
                manager.add_request(list(prompt), max_new_tokens=count, record_timestamps=True, eos_token_id=-1)
                for prompt, count in zip(prompts, num_new_tokens, strict=True)
            ]
            found: dict[str, Any] = {}
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("transformers' continuous batching has ended before its requests")
                elif result.is_finished():
                    found[result.request_id] = result
        return [_answer(found[name], start) for name in names]

    def _make_room(self, prompts: Sequence[list[int]], num_new_tokens: Sequence[int]) -> None:
        """Have a manager whose cache holds these requests at once, and one more block each."""
        page = _CONFIG["page_size"]
        need = sum((len(p) + n) // page + 2 for p, n in zip(prompts, num_new_tokens, strict=True))
        if need > self._num_blocks:
            self.close()
            self._num_blocks = max(need, 2 * self._num_blocks, _LEAST_BLOCKS)
            with self._session():
                pass

    def _session(self) -> Any:
        from transformers import ContinuousBatchingConfig

        return self._model.continuous_batching_context_manager(
            generation_config=self._generation,
            continuous_batching_config=ContinuousBatchingConfig(**_CONFIG, num_blocks=self._num_blocks),
            persistent_manager=True,
            timeout=5,
        )

    def close(self) -> None:
        self._model.destroy_cached_continuous_batching_manager()


def _generation_config(settings: PeerSettings) -> GenerationConfig:
    """Return a config with the logits processors that the target's own asks for and the engine applies, past EOS.

    Raises:
        PeerAbsent: there is one that continuous batching does not apply.
    """
    (prompt,), (count,) = _PROBE
    job, _ = settings.llm.job("eval", prompt, 0, True, {"max_new_tokens": count})
    others = {type(p).__name__ for p in job.sampling.processors} - set(_OF_SCORES.values())
    if others:
        raise PeerAbsent(
            "transformers' continuous batching does not apply what the target's generation config asks for: "
            f"{', '.join(sorted(others))}"
        )
    own = {name: getattr(settings.llm.model.generation_config, name, None) for name in _OF_SCORES}
    return GenerationConfig(
        eos_token_id=-1, pad_token_id=0, max_new_tokens=1, **own, **sampling_options(settings.temperature)
    )


def _answer(result: Any, start: float) -> PeerAnswer:
    ids = list(result.generated_tokens)
    if result.error is not None:
        raise RuntimeError(f"transformers' continuous batching: {result.error}")
    return PeerAnswer(ids, [[at - start, 1] for at in result.timestamps])


def build_generate_batch(name: str, settings: PeerSettings) -> GenerateBatchPeer:
    """Return continuous batching without drafts: transformers has none with them.

    Raises:
        PeerAbsent: it does not run this model here, or not as its generation config says.
    """
    note = "token times are transformers' own; starting its loop is in the time to the first token, as there"
    peer = GenerateBatchPeer(VariantInfo(name, "peer", note=note), settings)
    try:
        peer.run(*_PROBE)
    except Exception as error:  # not every machine and model can
        peer.close()
        raise PeerAbsent(f"{name} does not run this target ({type(error).__name__}): {error}") from error
    return peer

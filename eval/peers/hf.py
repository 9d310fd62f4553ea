"""transformers' own generate() on the target's model object: plain, with an assistant model, with prompt lookup."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from specdec.api import LLM
from specdec.errors import SpecdecError
from specdec.eval.peers.interface import PeerAbsent, PeerAnswer, PeerSettings, cut_to, wait_for
from specdec.eval.records import VariantInfo

ASSISTANT_TOKENS = 20  # generate()'s own default
LOOKUP_TOKENS = 10  # what transformers' documentation gives prompt lookup; it has no default
_CUTS = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")  # of the distribution; None is off
_PAD = 0
_PROBE = ([1, 2, 3], 3)  # prompt, new tokens


class TransformersPeer:
    """`model.generate` with a streamer that notes when tokens come.

    What the model's generation config says of logits (a repetition penalty, suppressed tokens) applies, as in the
    engine's variants; its top-k, top-p and the like do not, as there.
    """

    def __init__(
        self,
        info: VariantInfo,
        model: Any,
        temperature: float,
        seed: int | None,
        own: dict[str, Any] | None = None,
        max_batch: int = sys.maxsize,
    ) -> None:
        """`own`: keyword arguments of generate()."""
        self.info, self.max_batch = info, max_batch
        self._model, self._seed = model, seed
        self._options: dict[str, Any] = {**sampling_options(temperature), **(own or {})}

    def run(self, prompts: Sequence[list[int]], num_new_tokens: Sequence[int]) -> list[PeerAnswer]:
        """Return the answers; the rows of a batch are padded on the left and all run to the longest answer's end."""
        device = self._model.device
        width = max(map(len, prompts))
        ids = torch.tensor([[_PAD] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        clock = _Clock(len(prompts))
        with torch.random.fork_rng(enabled=self._seed is not None):
            if self._seed is not None:
                torch.manual_seed(self._seed)
            wait_for(device)
            start = time.perf_counter()
            out = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(num_new_tokens),
                eos_token_id=-1,  # never met: past EOS, as the engine's variants
                pad_token_id=_PAD,
                streamer=clock,
                **self._options,
            )
            wait_for(device)
        emissions = [[at - start, tokens] for at, tokens in clock.emissions]
        return [
            PeerAnswer(out[i, width : width + count].tolist(), cut_to(emissions, count))
            for i, count in enumerate(num_new_tokens)
        ]

    def close(self) -> None: ...


def transformers_answer(model: Any, prompt: Sequence[int], num_new_tokens: int) -> list[int]:
    """Return transformers' own greedy answer to a prompt, past EOS."""
    peer = TransformersPeer(VariantInfo("transformers", "peer"), model, 0.0, None)
    return peer.run([list(prompt)], [num_new_tokens])[0].token_ids


class _Clock(BaseStreamer):
    """Notes when transformers hands out tokens, and how many per row."""

    def __init__(self, batch_size: int) -> None:
        self.emissions: list[tuple[float, int]] = []
        self._batch_size, self._has_prompt = batch_size, False

    def put(self, value: Any) -> None:
        if self._has_prompt:  # which is put first
            self.emissions.append((time.perf_counter(), value.numel() // self._batch_size))
        self._has_prompt = True

    def end(self) -> None: ...


def sampling_options(temperature: float) -> dict[str, Any]:
    """Return transformers' options for a temperature and nothing that cuts the distribution, where a model's would."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, **dict.fromkeys(_CUTS)}


def build_plain(name: str, settings: PeerSettings) -> TransformersPeer:
    """Return plain generate()."""
    note = "a batch is padded on the left, and all its rows run to the end of its longest answer"
    return _probed(name, settings, VariantInfo(name, "peer", note=note), {}, sys.maxsize)


def build_prompt_lookup(name: str, settings: PeerSettings) -> TransformersPeer:
    """Return generate() with prompt lookup, its n-grams of at most two tokens."""
    count = LOOKUP_TOKENS if settings.num_draft_tokens is None else settings.num_draft_tokens
    own = {"prompt_lookup_num_tokens": count}
    return _probed(name, settings, VariantInfo(name, "peer", max_draft_tokens=count, options=dict(own)), own, 1)


def build_assisted(name: str, settings: PeerSettings) -> TransformersPeer:
    """Return generate() with an assistant model.

    Raises:
        PeerAbsent: there is no draft model for the target, or it has other tokens.
    """
    draft = find_draft_model(settings)
    config = draft.generation_config
    count = ASSISTANT_TOKENS if settings.num_draft_tokens is None else settings.num_draft_tokens
    # Only here: generate() takes it from the assistant's own config.
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = count, "constant"
    named = settings.draft_model or "the one that ships for the target"
    info = VariantInfo(
        name,
        "peer",
        max_draft_tokens=count,
        options={"assistant_model": named},
        note=f"draft model: {named}; drafts end early where it is unsure (assistant_confidence_threshold: "
        f"{_threshold()})",
    )
    return _probed(name, settings, info, {"assistant_model": draft}, 1)


def _threshold() -> str:
    """Return in words what generate() does with its threshold, which depends on what is installed."""
    return "0.4 at first, then adapted with scikit-learn" if find_spec("sklearn") else "0.4, without scikit-learn"


def find_draft_model(settings: PeerSettings, whole_head: bool = False) -> Any:
    """Return the transformers model that the drafter "draft_model" would load for the target, as a copy of its own.

    Args:
        settings: of the peer; its `draft_model` is that drafter's option `model`.
        whole_head: give a draft model that drafts some of the target's tokens the target's own output head.

    Raises:
        PeerAbsent: there is none, it does not fit, or it has other tokens than the target.
    """
    options = {} if settings.draft_model is None else {"model": settings.draft_model}
    target = settings.llm
    try:
        own = LLM(target.model, tokenizer=target.tokenizer, drafter="draft_model", drafter_options=options)
    except SpecdecError as error:
        raise PeerAbsent(f"no draft model for {settings.source}: {error}") from error
    drafter: Any = own.engine.drafter
    if not drafter.reads_target_ids:
        raise PeerAbsent("the draft model has other tokens than the target")
    model = copy.copy(drafter.model)  # its config is changed here, and perhaps its head
    model._modules = dict(model._modules)
    model.generation_config = copy.deepcopy(model.generation_config)
    if drafter.target_ids is not None:
        head = target.model.get_output_embeddings()
        model.set_output_embeddings(head if whole_head else _SomeColumns(model.get_output_embeddings(), drafter, head))
    return model


class _SomeColumns(torch.nn.Module):
    """An output head for some of the tokens: the others get the lowest logit there is."""

    def __init__(self, rows: Any, drafter: Any, whole: Any) -> None:
        super().__init__()
        self.rows, self.weight = rows, rows.weight
        self.register_buffer("ids", drafter.target_ids.to(rows.weight.device), persistent=False)
        self._num_tokens = whole.weight.shape[0]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] for hidden states [..., H]."""
        some = self.rows(hidden)
        logits = some.new_full((*some.shape[:-1], self._num_tokens), torch.finfo(some.dtype).min)
        logits[..., self.ids] = some
        return logits


def _probed(
    name: str, settings: PeerSettings, info: VariantInfo, own: dict[str, Any], max_batch: int
) -> TransformersPeer:
    """Return a peer that has answered once.

    Raises:
        PeerAbsent: it has not.
    """
    peer = TransformersPeer(info, settings.llm.model, settings.temperature, settings.seed, own, max_batch)
    prompt, count = _PROBE
    try:
        peer.run([prompt], [count])
    except Exception as error:  # whatever a model's class makes of it
        raise PeerAbsent(f"{name} does not run this target ({type(error).__name__}): {error}") from error
    return peer

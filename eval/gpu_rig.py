"""The models, prompts and engines that the checks of a GPU share."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from specdec.api import LLM, random_model
from specdec.errors import ConfigError, IncompatibleDrafterError, ModelLoadError
from specdec.eval.gpu_sections import NotHere
from specdec.eval.peers.hf import transformers_answer
from specdec.eval.prompts import encode, load_texts
from specdec.interfaces import Drafter

RANDOM = "random:"
NO_FLASH = "flash-attn does not run here; the checks 'load: attention' say why"
CHUNK_TOKENS = 128  # of the checks of exactness: prompts of more are prefilled in chunks
_NUM_PROMPTS = 4
_LONG_TOKENS = 300  # crosses a page of 256


def token_ids(num_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Return random token ids; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


class Rig:
    """One target on one device, in several dtypes.

    Attributes:
        name: of the target.
        prompts: token ids of unequal lengths, one of them longer than a page.
        texts: the first of them, of which trained drafters know something.
    """

    def __init__(self, config: Any, dtype: torch.dtype = torch.float32) -> None:
        """`config`: see gpu_check.yaml; `dtype`: in which the target is loaded, and copied to others from."""
        self.config, self.device, self.dtype = config, torch.device(config.device), dtype
        self.notes: list[str] = []
        self.name = config.model or (f"{RANDOM}tiny" if self.device.type == "cpu" else "smollm2")
        self.model, self.tokenizer = self._load()
        self._models = {dtype: self.model}
        self._expected: dict[torch.dtype, list[list[int]]] = {}
        vocab_size = self.model.config.get_text_config().vocab_size
        if self.tokenizer is None:
            self.texts = [token_ids(n, vocab_size, n) for n in (3, 17, 29, 8)]
        else:
            texts, _ = load_texts(config.prompts)
            self.texts = encode(self.llm(dtype), texts[:_NUM_PROMPTS], config.prompts.chat)
        self.prompts = [*self.texts, token_ids(_LONG_TOKENS, vocab_size)]

    def _load(self) -> tuple[Any, Any]:
        if not self.name.startswith(RANDOM):
            try:
                llm = LLM(self.name, dtype=self.dtype, device=self.device)
            except ModelLoadError as error:
                if self.config.model:
                    raise
                self.notes.append(f"a random model stands in for {self.name}: {error}")
                self.name = f"{RANDOM}1b"
            else:
                return llm.model, llm.tokenizer
        return random_model(self.name.removeprefix(RANDOM), dtype=self.dtype, device=self.device), None

    def of(self, dtype: torch.dtype) -> Any:
        """Return the target in another dtype, as loading it in that dtype would."""
        if dtype not in self._models:
            self._models[dtype] = _cast(self.model, dtype)
        return self._models[dtype]

    def exact(self, dtype: torch.dtype) -> LLM:
        """Return an LLM that computes in float32 with the weights as `dtype` has rounded them."""
        return LLM(_cast(self.of(dtype), torch.float32), tokenizer=self.tokenizer)

    def llm(self, dtype: torch.dtype, drafter: str | Drafter = "none", **options: Any) -> LLM:
        """Return an LLM over the target.

        Raises:
            NotHere: the drafter is none for this target.
        """
        try:
            return LLM(self.of(dtype), tokenizer=self.tokenizer, drafter=drafter, **options)
        except IncompatibleDrafterError as error:
            raise NotHere(str(error).partition(". ")[0]) from error  # the rest is advice

    def expected(self, dtype: torch.dtype) -> list[list[int]]:
        """Return transformers' greedy answers to the prompts."""
        if dtype not in self._expected:
            model, count = self.of(dtype), self.config.max_new_tokens
            self._expected[dtype] = [transformers_answer(model, prompt, count) for prompt in self.prompts]
        return self._expected[dtype]

    @property
    def rules(self) -> SimpleNamespace:
        """Return what `lossless.check_drafter` is told; one prompt may part at a near-tie in float32."""
        return SimpleNamespace(
            max_new_tokens=self.config.max_new_tokens, near_tie=None, near_ties_per_prompt=1 / len(self.prompts)
        )


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a model in `dtype`, but for the buffers that no checkpoint holds.

    Those are computed in float32 in every dtype, rotary frequencies above all: `Module.to` would round them too.
    """
    cast = copy.deepcopy(model)
    kept = [
        (module, name, module._buffers[name])
        for module in cast.modules()
        for name in module._non_persistent_buffers_set
    ]
    cast.to(dtype)
    for module, name, buffer in kept:
        module._buffers[name] = buffer
    return cast


def parse_half(name: str) -> torch.dtype:
    """Return the half-precision type of a name.

    Raises:
        ConfigError: it is none.
    """
    found = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(name)
    if found is None:
        raise ConfigError(f"half_dtypes holds {name!r}; allowed: float16, bfloat16")
    return found

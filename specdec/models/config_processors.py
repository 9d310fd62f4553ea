"""The logits processors that a model's own generation config asks for, for one request after the other."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig

from specdec.errors import ConfigError
from specdec.models.generation import prepare
from specdec.models.rows import processor_for_row


class ConfigProcessors:
    """Builds them for each prompt from a config that is completed once, and anew when the model's own has changed.

    Completing it copies it twice, which takes several times as long as all else that is done to add a request.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: object = None  # what the completed config follows from
        self._completed: Any = None

    def of(self, prompt: list[int], max_new_tokens: int) -> list[Any]:
        """Return one prompt's processors; temperature and the like are left out.

        Raises:
            ConfigError: transformers refuses what the config says.
        """
        if self._model.generation_config is None:
            return []
        config = copy.copy(self._complete())
        config.max_new_tokens = max_new_tokens
        call = prepare(self._model, torch.tensor([prompt]), config, set())
        return [processor_for_row(p, 0, 1) for p in call.processors]

    def _complete(self) -> GenerationConfig:
        own = vars(self._model.generation_config)
        # transformers refuses a model into whose own config somebody has written such settings.
        misplaced = {name: value for name, value in vars(self._model.config).items() if name in own}
        now = (own, misplaced)
        try:
            is_current = bool(now == self._seen)
        except RuntimeError:  # tensors among them, which are not simply equal or not
            is_current = False
        if not is_current:
            try:
                self._completed, _ = self._model._prepare_generation_config(None, do_sample=False)
            except ValueError as error:
                raise ConfigError(f"the model's generation settings are refused by transformers: {error}") from error
            self._seen = copy.deepcopy(now)
        return self._completed

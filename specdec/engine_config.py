"""How an engine schedules: the knobs of `Engine`, checked. One default per knob, here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.draft_length import check_draft_length
from specdec.errors import ConfigError
from specdec.interfaces import Drafter

DEFAULT_DRAFT_TOKENS = 4
_LEAST = {
    "max_draft_tokens": 0,
    "max_batch_size": 1,
    "prefill_chunk_tokens": 1,
    "max_step_tokens": 1,
    "max_waiting": 0,
}
_OPTIONAL = ("max_draft_tokens", "max_step_tokens", "max_waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine schedules. One default per knob, here."""

    max_draft_tokens: int | None = None  # what the drafter advises (its `advised_draft_tokens`), else 4
    max_batch_size: int = 64
    prefill_chunk_tokens: int = 512  # rows per step for prompts: small is smooth for others, large soon done
    max_step_tokens: int | None = None  # bound on the rows of a step, drafts and prompts included; None = none
    max_waiting: int | None = None  # requests that may wait beside those with a place; None = any number
    prefix_caching: bool = False  # keep the KV of what was computed and use it for prompts that begin alike
    draft_length: str = "static"  # or "confidence", "cost_aware": see docs/draft_length.md
    confidence_threshold: float = 0.4  # of "confidence": a chain ends after a token drafted with less

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if name in _OPTIONAL and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r}; allowed: an integer >= {least}")
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError(f"prefix_caching={self.prefix_caching!r}; allowed: True or False")
        check_draft_length(self.draft_length, self.confidence_threshold)

    def for_drafter(self, drafter: Drafter) -> EngineConfig:
        """Return the config with `max_draft_tokens` as given, else as the drafter advises, else the default."""
        if self.max_draft_tokens is not None:
            return self
        advised = getattr(drafter, "advised_draft_tokens", None)
        return replace(self, max_draft_tokens=DEFAULT_DRAFT_TOKENS if advised is None else advised)

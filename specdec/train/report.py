"""What a training run tells whoever watches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Report:
    """Does nothing by itself; of several processes only the main one reports."""

    def stage(self, name: str, about: str, total: int = 0) -> None:
        """Begin "capture", "train" or "measure"; `total` is what its number goes up to."""

    def captured(self, num_prompts: int, num_tokens: int) -> None:
        """Say how many prompts of this sitting were answered, and with how many tokens."""

    def trained(self, num_tokens: int, figures: dict[str, Any]) -> None:
        """Say how many tokens were seen in all sittings, and the last batch's figures."""

    def measured(self, num_prompts: int) -> None:
        """Say how many prompts were decoded by the engine."""

    def finished(self, curve: Sequence[dict[str, Any]], acceptance: Sequence[dict[str, Any]]) -> None:
        """Give the whole curve, and what the engine measured: one row per way of drafting."""

    def wants_to_stop(self) -> bool:
        """Tell whether training is to save a checkpoint and end; asked after every batch."""
        return False

"""The settings of the quality measurement, checked. See quality.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.errors import ConfigError
from specdec.eval.setting_checks import check_amount, check_flag, check_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    """How answers are made. One default per knob, here."""

    batch_size: int = 8  # prompts per call
    max_new_tokens: int = 256  # answers that have not ended by then are counted
    temperature: float = 0.7  # at 0 typical and relaxed are exact matching, and there is nothing to lose
    seed: int | None = 0  # needed above temperature 0
    control: bool = True  # above temperature 0: undrafted with the next seed, which shows what sampling alone does
    output: str | None = None  # a JSON file; None: quality.json in the run's folder

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, 1)
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        check_amount("temperature", self.temperature)
        check_integer("seed", self.seed, 0, optional=True)
        check_flag("control", self.control)
        if self.temperature and self.seed is None:
            raise ConfigError(
                f"temperature={self.temperature} without a seed: answers could not be compared; give one, such as "
                "seed=0"
            )

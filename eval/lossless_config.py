"""The settings of the losslessness report, checked. See lossless.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.errors import ConfigError
from specdec.eval.setting_checks import check_amount, check_integer, check_list

LEAST_TOKENS = 3  # of a sample: the first is prefill's, the last is never drafted


@dataclass(kw_only=True)  # not frozen: OmegaConf must be able to write to what is within another one
class SamplingTestsConfig:
    """The tests of what is sampled."""

    samples: int = 1000  # of each prompt; 0 leaves the tests out
    tokens: int = 4  # of each sample; the first is prefill's and the last is never drafted
    num_prompts: int = 2  # the first ones of the set
    # Of the default drafters; of chosen ones all but none.
    default_drafters: list[str] = field(default_factory=lambda: ["self_int8", "eagle3", "medusa", "draft_model"])
    level: float = 1e-3  # chance of a false alarm, over all tests together
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("samples", 0), ("tokens", LEAST_TOKENS), ("num_prompts", 1), ("seed", 0)):
            check_integer(f"sampling.{name}", getattr(self, name), least)
        check_list("sampling.default_drafters", self.default_drafters, str, "self_int8")
        check_amount("sampling.level", self.level)
        if not 0 < self.level < 1:
            raise ConfigError(f"sampling.level={self.level!r}; allowed: above 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessConfig:
    """What is compared with the target's own output. One default per knob, here."""

    drafters: list[str] | None = None  # None: the default ones that fit the target
    default_drafters: list[str] = field(
        default_factory=lambda: [
            *("none", "ngram", "self_int8", "eagle3", "medusa"),
            *("draft_model", "oracle", "adversary", "random"),
        ]
    )
    drafter_options: dict[str, Any] = field(default_factory=lambda: {"oracle": {"accept_rate": 0.7}})  # by drafter
    dtypes: list[str] | None = None  # None: target.dtype; the first one is that of the sampling tests
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8])  # of the greedy comparison
    max_new_tokens: int = 128  # likewise
    near_tie: float | None = None  # largest difference of two logits that is a tie; by dtype (float32: 2e-4)
    near_ties_per_prompt: float = 0.05  # in float32 one prompt in twenty may part at a near-tie, of fewer prompts one
    temperature: float = 1.0  # of the sampling tests
    sampling: SamplingTestsConfig = field(default_factory=SamplingTestsConfig)
    output: str | None = None  # a JSON file; None: lossless.json in the run's folder

    def __post_init__(self) -> None:
        if isinstance(self.sampling, dict):
            object.__setattr__(self, "sampling", SamplingTestsConfig(**self.sampling))
        check_list("drafters", self.drafters, str, "ngram", optional=True)
        check_list("default_drafters", self.default_drafters, str, "none,ngram")
        check_list("dtypes", self.dtypes, str, "float32", optional=True)
        check_list("batch_sizes", self.batch_sizes, int, "1,8")
        for size in self.batch_sizes:
            check_integer("batch_sizes", size, 1)
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        check_amount("near_tie", self.near_tie, optional=True)
        check_amount("near_ties_per_prompt", self.near_ties_per_prompt)
        check_amount("temperature", self.temperature)
        if self.sampling.samples and not self.temperature > 0:
            raise ConfigError(
                f"temperature={self.temperature!r}; allowed for the sampling tests: above 0. "
                "sampling.samples=0 leaves them out"
            )

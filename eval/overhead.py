"""What a decode step costs beside the target's forward.

python -m specdec.eval.overhead
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from specdec.api import LLM
from specdec.errors import ConfigError
from specdec.eval.entry import run_and_write
from specdec.eval.hydra_main import hydra_main
from specdec.eval.llm_options import llm_options
from specdec.eval.prompts import encode, load_texts
from specdec.interfaces import FeatureSpec, Forward, Segment
from specdec.provenance import provenance

console = Console()
_STAGES = ("forward", "schedule and verify", "draft", "rest of the step", "between steps")


class _Watch:
    """Collects the stages of decode steps: an engine's trace and a clock around its forward."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[dict[str, float]] = []
        self._forward_s, self._last = 0.0, 0.0
        engine = llm.engine
        self._run = engine.target.forward
        engine.target.forward = self._forward  # type: ignore[method-assign]
        engine.trace = self

    def _forward(self, segments: Sequence[Segment], features: FeatureSpec = FeatureSpec()) -> Forward:
        start = time.perf_counter()
        result = self._run(segments, features)
        self._forward_s = time.perf_counter() - start
        return result

    def record(self, event: Any) -> None:
        now = time.perf_counter()
        if not any(w.is_prefill for w in event.work):
            self.steps.append(
                {
                    "forward": self._forward_s,
                    "schedule and verify": event.verify_s - self._forward_s,
                    "draft": event.draft_s,
                    "rest of the step": event.total_s - event.verify_s - event.draft_s,
                    "between steps": now - self._last - event.total_s if self._last else 0.0,
                }
            )
        self._last = now


def measure(config: Any) -> dict[str, Any]:
    """Run the prompts and return the shares of each stage of their decode steps."""
    if config.max_new_tokens < 2:
        raise ConfigError(f"max_new_tokens={config.max_new_tokens}; allowed: at least 2, the first is prefill's")
    llm = LLM(config.target.name, **llm_options(config))
    texts, _ = load_texts(config.prompts)
    prompts = encode(llm, texts, config.prompts.chat)
    how: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "ignore_eos": True}
    llm.generate(prompts[0], **how)
    watch = _Watch(llm)
    for _ in range(config.repeats):
        for prompt in prompts:
            watch._last = 0.0
            # As a user does it: with text coming out.
            for _piece in llm.stream(prompt, **how):
                pass
    total = sum(sum(step.values()) for step in watch.steps)
    stages = {
        name: {
            "median_s": median(step[name] for step in watch.steps),
            "share": sum(step[name] for step in watch.steps) / total,
        }
        for name in _STAGES
    }
    outside = [1 - step["forward"] / sum(step.values()) for step in watch.steps]
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "num_steps": len(watch.steps),
        "stages": stages,
        "share_outside_forward": 1 - stages["forward"]["share"],
        "share_outside_forward_median": median(outside),
    }


def show(result: dict[str, Any]) -> None:
    """Print the table of a result."""
    table = Table(title=f"{result['num_steps']} decode steps, drafter {result['config']['drafter']['name']}")
    for column in ("stage", "median us", "share of decode time"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, stage in result["stages"].items():
        table.add_row(name, f"{1e6 * stage['median_s']:.0f}", f"{stage['share']:.1%}")
    console.print(table)
    console.print(
        f"outside the target's forward: {result['share_outside_forward']:.2%} of decode time, "
        f"{result['share_outside_forward_median']:.2%} of the median step",
        highlight=False,
    )


@hydra_main("overhead")
def main(config: DictConfig) -> None:
    """Measure, print and write."""
    run_and_write(config, "overhead", measure, show)


if __name__ == "__main__":
    main()

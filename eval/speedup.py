"""How much faster: drafters, the same engine without drafting, and other libraries, in one interleaved run.

    python -m specdec.eval.speedup drafter=self_int8 prompts=jsonl prompts.path=FILE

Exit code 0 = measured, 2 = bad input.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from specdec.eval.hydra_main import hydra_main
from specdec.eval.point_run import run_point
from specdec.eval.point_view import show_point, show_step_times

console = Console()


def measure(config: Any) -> None:
    """Measure a point into the run's folder and print it."""
    records, summary = run_point(config, console)
    show_point(records, summary, console)
    show_step_times(records, console)


@hydra_main("speedup")
def main(config: DictConfig) -> None:
    """Measure, print and write."""
    measure(config)


if __name__ == "__main__":
    main()

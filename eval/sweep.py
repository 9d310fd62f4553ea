"""A grid of points over anything in configs/, resumable: a finished point is never run again.

    python -m specdec.eval.sweep experiment=draft_length
    python -m specdec.eval.sweep -m drafter=ngram,suffix,self_int8 engine.max_draft_tokens=2,4,8 name=mine
    python -m specdec.eval.sweep experiment=draft_length hydra/launcher=ray

Exit code 0 = every point is measured, 1 = some failed, or all that compete; 2 = bad input, 130 = interrupted.
"""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from specdec.eval import halving
from specdec.eval.hydra_main import hydra_main
from specdec.eval.sweep_point import run_sweep_point
from specdec.eval.sweep_watch import SweepWatch

halving.register()


@hydra_main("sweep")
def _sweep(config: DictConfig) -> float | str:
    return run_sweep_point(config)


def main() -> None:
    """Run the points and end with what became of them."""
    _sweep()
    sys.exit(1 if SweepWatch.failed else 0)


if __name__ == "__main__":
    main()

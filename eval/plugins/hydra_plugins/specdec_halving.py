"""Hydra's door to `specdec.eval.halving`: it takes sweepers from packages of this name, and no others."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.errors import ConfigError, SpecdecError
from specdec.eval.entry import print_error
from specdec.eval.halving import Job, Outcome, check_rounds, ranking, survivors
from specdec.eval.sweep_watch import SweepWatch
from specdec.eval.winner import command_of

log = logging.getLogger("specdec")

_LIMIT = "prompts.limit"  # what grows from round to round


class SuccessiveHalving(Sweeper):
    """Runs all settings on few prompts, keeps the faster ones, and repeats with more prompts."""

    def __init__(self, grids: Sequence[str], params: dict[str, str], rungs: Sequence[int], keep: float) -> None:
        check_rounds(rungs, keep)
        self._grids, self._params, self._rungs, self._keep = list(grids), dict(params), list(rungs), keep

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the rounds and print the command that uses what won.

        What the user can change ends the process with status 2; settings of which none can be ranked make it end with
        1, after the watch has shown what became of each.
        """
        try:
            return self._rounds(arguments)
        except ConfigError as error:  # else Hydra prints it with a traceback
            print_error(error)
            sys.exit(2)
        except SpecdecError as error:
            print_error(error)
            SweepWatch.failed = True
            return None

    def _rounds(self, arguments: list[str]) -> list[Any]:
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        jobs = self.jobs(arguments)
        common = set.intersection(*map(set, jobs))
        outcomes: dict[Job, Outcome] = {}
        number, returns = 0, []
        for round_, limit in enumerate(self._rungs):
            if round_:
                jobs = survivors(outcomes, self._keep)
            log.info("round %s of %s: %s settings on %s prompts", round_ + 1, len(self._rungs), len(jobs), limit)
            batch = [[*job, f"{_LIMIT}={limit}"] for job in jobs]
            self.validate_batch_is_legal(batch)
            done = self._launcher.launch(batch, initial_job_idx=number)
            number += len(batch)
            returns.append(done)
            outcomes = {job: one.return_value for job, one in zip(jobs, done, strict=True)}
        self._show(outcomes, common)
        return returns

    def jobs(self, arguments: Sequence[str]) -> list[Job]:
        """Return all settings: every grid's, each with the arguments of the command line.

        Raises:
            ConfigError: there is nothing to choose from, or something says how many prompts to run, as the rounds do.
        """
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        grids = [shlex.split(grid) for grid in self._grids]
        if self._params or not grids:
            grids.append([f"{key}={value}" for key, value in self._params.items()])
        found: list[Job] = []
        for words in grids:
            overrides = parser.parse_overrides([*words, *arguments])
            for override in overrides:
                if override.key_or_group == _LIMIT:
                    raise ConfigError(
                        f"{override.input_line} would be without effect: hydra.sweeper.rungs={self._rungs} says how "
                        "many prompts each round runs; give it other numbers"
                    )
            found += map(tuple, BasicSweeper.split_arguments(overrides, None)[0])
        found = list(dict.fromkeys(found))
        if len(found) < 2:
            raise ConfigError("there is one setting only: give hydra.sweeper.grids, or several values to a key")
        return found

    def _show(self, outcomes: Mapping[Job, Outcome], common: Collection[str]) -> None:
        """Print the last round and the command that uses the fastest setting, or raise SpecdecError if none is."""
        console = Console()
        ranked = ranking(outcomes)
        table = Table(title="the last round", box=None, pad_edge=False)
        for column in ("settings", "speedup"):
            table.add_column(column, overflow="fold")
        for job, speedup in ranked.items():
            table.add_row(_text(job, common), f"{speedup:.2f}x")
        for job, outcome in outcomes.items():
            if job not in ranked:
                table.add_row(_text(job, common), Text(str(outcome)))
        console.print(table)
        best, speedup = next(iter(ranked.items()))
        if speedup <= 1.0:
            console.print("nothing is faster than no drafting here: use drafter none", highlight=False)
            return
        config = self.hydra_context.config_loader.load_sweep_config(self.config, list(best))
        console.print("the fastest here:", highlight=False)
        console.print(Text(command_of(config, best)), soft_wrap=True)


def _text(job: Job, common: Collection[str]) -> Text:
    """Return what a job has of its own."""
    return Text(" ".join(word for word in job if word not in common))

"""How far a training run is: bars with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from specdec.cli.answering import Interrupts
from specdec.cli.console import messages, plain, say
from specdec.train.report import Report

_SECONDS_BETWEEN_LINES = 30.0


class TrainView(Report):
    """Shows a run, and lets Ctrl-C end it where a checkpoint can be written; a second one ends it at once."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or messages()
        self._progress: Progress | None = None
        self._stage, self._total, self._done = "", 0, 0
        self._begun: float | None = None
        self._first, self._last_line = 0, -_SECONDS_BETWEEN_LINES
        self._num_steps = 0  # draft tokens that the loss is of
        self._interrupts = Interrupts()
        self.curve: Sequence[dict[str, Any]] = ()
        self.acceptance: Sequence[dict[str, Any]] = ()
        self.has_finished = False  # not in the other processes of `accelerate launch`

    def __enter__(self) -> TrainView:
        self._interrupts.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._interrupts.__exit__(kind, error, at)
        self._end_bar()
        if kind is KeyboardInterrupt:
            say(f"stopped{self._where()}; the same command goes on from there", style="yellow", console=self._console)

    def _where(self) -> str:
        if not self._stage:
            return ""
        if self._stage == "capture":
            return f" in the stage 'capture': {self._done:,} of {self._total:,} prompts are answered and stored"
        return f" in the stage {self._stage!r}, at {self._done:,} of {self._total:,}"

    def wants_to_stop(self) -> bool:
        return self._interrupts.seen

    def stage(self, name: str, about: str, total: int = 0) -> None:
        self._end_bar()
        say(f"{name}: {about}", style="", console=self._console)
        self._stage, self._total, self._done = name, total, 0
        self._begun, self._last_line = None, -_SECONDS_BETWEEN_LINES
        self._interrupts.is_patient = name == "train"

    def captured(self, num_prompts: int, num_tokens: int) -> None:
        self._advance(num_prompts, "prompts", f"{num_tokens:,} tokens")

    def trained(self, num_tokens: int, figures: dict[str, Any]) -> None:
        accuracy = figures.get("accuracy") or [0.0]
        first = accuracy[0]
        if 0 < self._num_steps < len(accuracy):
            about = f"from here on {len(accuracy)} draft tokens per position are learned, so the loss jumps: it is"
            say(f"train: {about} their sum, and was that of {self._num_steps}", console=self._console)
        self._num_steps = len(accuracy)
        self._advance(num_tokens, "tokens", f"loss {figures.get('loss', 0.0):.3f}, first token right {first:.1%}")

    def measured(self, num_prompts: int) -> None:
        self._advance(num_prompts, "prompts", "")

    def finished(self, curve: Sequence[dict[str, Any]], acceptance: Sequence[dict[str, Any]]) -> None:
        self._end_bar()
        self.curve, self.acceptance, self.has_finished = curve, acceptance, True

    def _advance(self, done: int, unit: str, figures: str) -> None:
        now = time.monotonic()
        if self._begun is None:
            self._begun, self._first = now, done  # a resumed run begins somewhere: its speed is this sitting's
        self._done = done
        if self._console.is_terminal:
            self._draw(unit, figures)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES or done >= self._total:
            self._last_line = now
            left = "" if done >= self._total else f", {_left(self._begun, now, self._first, done, self._total)}"
            say(f"{self._stage}: {_of(done, self._total, unit, figures)}{left}", console=self._console)

    def _draw(self, unit: str, figures: str) -> None:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.fields[stage]}", markup=False),
                BarColumn(bar_width=20),
                TextColumn("{task.percentage:>3.0f}%"),
                _Left(compact=True),
                TimeElapsedColumn(),
                TextColumn("{task.description}", style="dim", markup=False),
                console=self._console,
                refresh_per_second=2,
                speed_estimate_period=120,
                redirect_stdout=False,
            )
            self._progress.add_task("", total=self._total, completed=self._done, stage=self._stage)
            self._progress.start()
        self._progress.update(
            self._progress.task_ids[0],
            completed=self._done,
            description=plain(_of(self._done, self._total, unit, figures)),
        )

    def _end_bar(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _Left(TimeRemainingColumn):
    """The time that is left, named as that."""

    def render(self, task: Task) -> Text:
        return Text("ETA ").append_text(super().render(task))


def _of(done: int, total: int, unit: str, figures: str) -> str:
    return f"{done:,} of {total:,} {unit}{', ' * bool(figures)}{figures}"


def _left(begun: float, now: float, first: int, done: int, total: int) -> str:
    if done <= first or now <= begun:
        return "time left unknown"
    seconds = (total - done) * (now - begun) / (done - first)
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"ETA {hours} h {minutes:02} min" if hours else f"ETA {minutes} min" if minutes else "ETA under a minute"

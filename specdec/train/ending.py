"""The end of a training run: the engine's own measurement, the curve as a picture, and the card."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import CheckpointError
from specdec.heads.writing import CARD
from specdec.models.build import runner_for
from specdec.provenance import provenance
from specdec.train.card import CardFacts, card
from specdec.train.jobs import steps_join_at
from specdec.train.measuring import measure, ways
from specdec.train.plot import PICTURE, plot_curve
from specdec.train.processes import processes
from specdec.train.report import Report

if TYPE_CHECKING:
    from specdec.train.run import RunConfig

log = logging.getLogger("specdec")


@dataclass(frozen=True, slots=True)
class Trained:
    """What training left."""

    folder: Path  # with the drafter
    curve: Sequence[dict[str, Any]]
    num_examples: int
    num_tokens: int  # distinct response tokens
    held_out: Sequence[list[int]]  # prompts
    num_weights: int
    coverage: float | None  # of held-out responses by the draft vocabulary


def end(config: RunConfig, trained: Trained, model: Any, tokenizer: Any, report: Report) -> None:
    """Measure a trained drafter and write its picture and card beside it.

    Raises:
        CheckpointError: they cannot be written; the drafter itself is whole.
    """
    prompts = trained.held_out[: config.measure.num_prompts]
    acceptance: list[dict[str, Any]] = []
    if prompts:
        about = f"{len(prompts)} held-out prompts, greedy, {config.measure.max_new_tokens} tokens, with and without"
        num_ways = len(ways(config.method, config.settings, config.measure, runner_for(model).supports_trees))
        report.stage("measure", about, len(prompts) * num_ways)
        acceptance = measure(
            config.method,
            trained.folder,
            model,
            tokenizer,
            prompts,
            config.measure,
            config.settings,
            report.measured,
        )
    facts = CardFacts(
        method=config.method,
        target=config.target,
        config=_told(config),
        curve=trained.curve,
        acceptance=acceptance,
        num_examples=trained.num_examples,
        num_tokens=trained.num_tokens,
        num_held_out=len(trained.held_out),
        num_weights=trained.num_weights,
        coverage=trained.coverage,
        num_processes=processes().num_processes,
        provenance=provenance(),
    )
    try:
        title = f"{config.method} for {config.target}"
        marks = steps_join_at(config.method, config.options, config.loop.num_tokens)
        plot_curve(trained.curve, trained.folder / PICTURE, title, marks)
        half = trained.folder / f".{CARD}"
        half.write_text(card(facts), encoding="utf-8")
        half.replace(trained.folder / CARD)
    except OSError as error:
        raise CheckpointError(
            f"the card in {trained.folder} cannot be written: {error}; the drafter itself is whole, and the same "
            "command measures it again"
        ) from error
    report.finished(trained.curve, acceptance)


def _told(config: RunConfig) -> dict[str, Any]:
    """Return the settings that a card tells: all but where things lay."""
    return {k: v for k, v in asdict(config).items() if k not in ("out", "features")}

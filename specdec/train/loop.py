"""One training loop for every head, on Accelerate: CPU, one GPU, or several under `accelerate launch`."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import set_seed
from torch import nn

from specdec.errors import CheckpointError, ConfigError
from specdec.train.batches import Batch, collate, plan_batches
from specdec.train.losses import StepLoss, accuracy, walk
from specdec.train.processes import accelerator, main_says, send_trained_only
from specdec.train.store import Example

CHECKPOINTS = "checkpoints"  # the folder of them inside of a run's
LATEST = "latest.json"
CURVE = "curve.jsonl"


# Setting -> its least and its largest value.
_RANGES: dict[str, tuple[float, float]] = {
    "learning_rate": (1e-12, 1e3),
    "warmup_share": (0, 0.99),
    "final_share": (0, 1),
    "weight_decay": (0, 1e3),
    "clip_norm": (1e-12, math.inf),
    "checkpoint_minutes": (0, math.inf),
    "seed": (0, 2**31 - 1),
}


class TrainingStep(Protocol):
    """A module that knows what a batch teaches its head."""

    progress: float  # 0 to 1, set before each batch

    def __call__(self, batch: Batch) -> StepLoss: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """How a head is trained. `num_tokens` counts response tokens, seen once or many times."""

    num_tokens: int = 2_000_000
    batch_tokens: int = 512
    optimizer: str = "adamw"  # or "muon": matrices by Muon, the rest by AdamW
    learning_rate: float = 2e-3
    warmup_share: float = 0.03
    final_share: float = 0.02  # of the learning rate, at the end of the cosine
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    precision: str = "bf16"  # of the products; parameters and sums stay float32. Or "no"
    seed: int = 0
    checkpoint_minutes: float = 5.0  # what a killed run loses at most
    evaluate_tokens: int = 200_000

    def __post_init__(self) -> None:
        for name in ("num_tokens", "batch_tokens", "evaluate_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}; allowed: an integer >= 1")
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not _is_number(value) or not least <= value <= most:
                raise ConfigError(f"{name}={value!r}; allowed: a number from {least} to {most}")
        if len(self.betas) != 2 or not all(_is_number(b) and 0 <= b < 1 for b in self.betas):
            raise ConfigError(f"betas={list(self.betas)!r}; allowed: two numbers from 0 to below 1")
        for name, allowed in (("precision", ("bf16", "no")), ("optimizer", ("adamw", "muon"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}; allowed: {', '.join(map(repr, allowed))}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(slots=True)
class Progress:
    """Where a run is."""

    num_batches: int = 0
    num_tokens: int = 0
    seconds: float = 0.0  # of training, over all its sittings


class Loop:
    """Trains one module on stored examples, with checkpoints that the next call goes on from.

    Args:
        step: the module; its parameters that require gradients are trained.
        examples: to train on.
        held_out: never trained on; those decoded greedily give the acceptance length.
        folder: of the run: checkpoints and the curve.
        config: how.
    """

    def __init__(
        self, step: Any, examples: Sequence[Example], held_out: Sequence[Example], folder: Path, config: LoopConfig
    ) -> None:
        if not examples:
            raise ConfigError("there is nothing to train on: no example has a response")
        self._config, self._examples, self._held_out = config, examples, held_out
        self.folder = folder
        self.accelerator = accelerator(config.precision)
        set_seed(config.seed)
        self._plain = step
        send_trained_only(step)
        self._step, *self._optimizers = self.accelerator.prepare(step, *build_optimizers(step, config))
        self.progress = Progress()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot hold checkpoints: {error}; give another folder") from error

    # ------------------------------------------------------------------ the loop

    def run(
        self,
        report: Callable[[Progress, dict[str, Any]], None] | None = None,
        wants_to_stop: Callable[[], bool] = lambda: False,
    ) -> list[dict[str, Any]]:
        """Train to the end, from the last checkpoint if there is one; return the curve.

        Args:
            report: called after every batch with where the run is and its last figures.
            wants_to_stop: asked after every batch, in the main process; if so, a checkpoint is written first.

        Raises:
            CheckpointError: a checkpoint cannot be read or written.
            KeyboardInterrupt: it was to stop.
        """
        self._resume()
        self._forget_what_is_ahead()
        config, progress = self._config, self.progress
        if progress.num_tokens >= config.num_tokens:
            if not any(line["num_tokens"] == progress.num_tokens for line in self.curve()):
                self._note({})  # killed between the last checkpoint and this line
            return self.curve()
        last_save = time.monotonic()
        last_lap = time.monotonic()
        next_evaluation = (progress.num_tokens // config.evaluate_tokens + 1) * config.evaluate_tokens
        figures: dict[str, Any] = {}
        self._step.train()
        for batch, num_tokens in self._batches():
            figures = self._train_on(batch)
            progress.num_batches += 1
            progress.num_tokens += num_tokens
            now = time.monotonic()
            progress.seconds, last_lap = progress.seconds + now - last_lap, now
            if report is not None:
                report(progress, figures)
            done = progress.num_tokens >= config.num_tokens
            if progress.num_tokens >= next_evaluation and not done:
                next_evaluation += config.evaluate_tokens
                self._note(figures)
            stops = main_says(wants_to_stop()) and not done
            if done or stops or main_says(time.monotonic() - last_save > 60 * config.checkpoint_minutes):
                self._save()
                last_save = time.monotonic()
            if stops:
                raise KeyboardInterrupt
            last_lap = time.monotonic()  # evaluating and saving is no training
            if done:
                self._note(figures)
                break
        return self.curve()

    def _train_on(self, batch: Batch) -> dict[str, Any]:
        config = self._config
        done = min(self.progress.num_tokens / config.num_tokens, 1.0)
        rate = learning_rate(config, done)
        for group in (g for optimizer in self._optimizers for g in optimizer.param_groups):
            group["lr"] = rate
        self._plain.progress = done
        with self.accelerator.autocast():
            out: StepLoss = self._step(batch.to(self.accelerator.device))
        self.accelerator.backward(out.loss)
        self.accelerator.clip_grad_norm_(self._step.parameters(), config.clip_norm)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss = float(out.loss.detach())
        if not math.isfinite(loss):
            raise CheckpointError(
                f"the loss is {loss} after {self.progress.num_tokens} tokens; lower the learning rate "
                f"({config.learning_rate}) or use precision='no'; the last checkpoint in {self.folder} is from before"
            )
        return {"loss": round(loss, 4), "accuracy": accuracy(out.hits.cpu()), "learning_rate": rate}

    def _batches(self) -> Iterator[tuple[Batch, int]]:
        """Yield (this process's batch, response tokens of all processes' batches), from where the run is."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        number, epoch = 0, 0
        while True:
            plan = plan_batches(self._examples, self._config.batch_tokens, self._config.seed + epoch)
            count = -(-len(plan) // world)  # the last group is filled up with the first batches
            for i in range(count):
                if number >= self.progress.num_batches:
                    group = [plan[(i * world + r) % len(plan)] for r in range(world)]
                    tokens = sum(self._examples[j].num_response_tokens for members in group for j in members)
                    yield collate([self._examples[j] for j in group[rank]]), tokens
                number += 1
            epoch += 1

    # ------------------------------------------------------------------ looking at it

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Return accuracy per draft position and the acceptance length of greedy chains, on held-out prompts."""
        self._plain.eval()
        greedy, everything = [], []
        for members in plan_batches(self._held_out, 4 * self._config.batch_tokens, 0):
            batch = collate([self._held_out[i] for i in members]).to(self.accelerator.device)
            with self.accelerator.autocast():
                hits = self._plain(batch).hits.cpu()
            everything.append(hits)
            drawn = [i for i, member in enumerate(members) if self._held_out[member].temperature == 0]
            if drawn:
                greedy.append(hits[:, drawn])
        self._plain.train()
        if not everything:
            return {}
        flat = [hits.flatten(1) for hits in everything]
        emitted, forwards = walk(greedy)
        found: dict[str, Any] = {"held_out_accuracy": accuracy(torch.cat(flat, dim=1)[:, None])}
        if forwards:
            found["acceptance_length"] = round(emitted / forwards, 4)
        return found

    def _note(self, figures: dict[str, Any]) -> None:
        """Append a line to the curve."""
        line = {**asdict(self.progress), **figures, **self.evaluate()}
        if self.accelerator.is_main_process:
            path = self.folder / CURVE
            # A killed process may have left half a line.
            try:
                begin = "\n" if path.is_file() and not path.read_bytes().endswith(b"\n") else ""
                with path.open("a", encoding="utf-8") as file:
                    file.write(begin + json.dumps(line) + "\n")
            except OSError as error:
                raise CheckpointError(f"{path} cannot be written: {error}; the checkpoints are whole") from error

    def curve(self) -> list[dict[str, Any]]:
        """Return the figures noted so far, of all sittings."""
        path = self.folder / CURVE
        if not path.is_file():
            return []
        by_tokens: dict[int, dict[str, Any]] = {}
        for text in path.read_text(encoding="utf-8").splitlines():
            if text.startswith("{") and text.endswith("}"):
                line = json.loads(text)
                by_tokens[line["num_tokens"]] = line
        return [by_tokens[n] for n in sorted(by_tokens)]

    def _forget_what_is_ahead(self) -> None:
        """Drop the points of a killed run that lie beyond its last checkpoint: they come again."""
        path = self.folder / CURVE
        if not self.accelerator.is_main_process or not path.is_file():
            return
        kept = [line for line in self.curve() if line["num_tokens"] <= self.progress.num_tokens]
        half = self.folder / f".{CURVE}"
        half.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        half.replace(path)

    # ------------------------------------------------------------------ checkpoints

    def _save(self) -> None:
        """Write a checkpoint beside the last one, then name it the latest: there is always a whole one."""
        name = f"checkpoint-{self.progress.num_batches}"
        folder = self.folder / name
        try:
            with _quiet_about_ties():
                self.accelerator.save_state(str(folder))
            self.accelerator.wait_for_everyone()
            if not self.accelerator.is_main_process:
                return
            state = {"name": name, "progress": asdict(self.progress), "config": asdict(self._config)}
            half = self.folder / f".{LATEST}"
            half.write_text(json.dumps(state), encoding="utf-8")
            half.replace(self.folder / LATEST)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint {folder} cannot be written: {error}; the one before it is whole and the same command "
                "goes on from there"
            ) from error
        for old in self.folder.glob("checkpoint-*"):
            if old.name != name:
                shutil.rmtree(old, ignore_errors=True)

    def _resume(self) -> None:
        path = self.folder / LATEST
        if not path.is_file():
            return
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            changed = changed_settings(state, self._config)
            if changed:
                raise CheckpointError(
                    f"{self.folder} holds a run with other values of {', '.join(changed)}; give another folder, or "
                    "those values, to go on with it"
                )
            self.accelerator.load_state(str(self.folder / state["name"]))
            self.progress = Progress(**state["progress"])
        except CheckpointError:
            raise
        except Exception as error:  # whatever a damaged file makes of json, torch and safetensors
            raise CheckpointError(
                f"the checkpoint that {path} names cannot be read: {error}; delete {self.folder} to begin anew"
            ) from error

    @property
    def module(self) -> nn.Module:
        """The step itself, not what Accelerate wrapped around it."""
        module: nn.Module = self._plain
        return module


def changed_settings(state: dict[str, Any], config: LoopConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which a run differs from the one that wrote latest.json: name -> (then, now)."""
    before, now = state["config"], json.loads(json.dumps(asdict(config)))
    return {k: (before.get(k), now[k]) for k in sorted(now) if before.get(k) != now[k]}


@contextmanager
def _quiet_about_ties() -> Iterator[None]:
    """Keep Accelerate from warning of tensors that are stored once: tied weights, which are tied again when loaded."""
    log = logging.getLogger("accelerate.utils.other")

    def keeps(record: logging.LogRecord) -> bool:
        return "Removed shared tensor" not in record.getMessage()

    log.addFilter(keeps)
    try:
        yield
    finally:
        log.removeFilter(keeps)


def build_optimizers(module: nn.Module, config: LoopConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers of what is trained: one for all of it, or Muon for the matrices and one for the rest.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/ (Muon); Liu et al. 2025, arXiv 2502.16982
    (steps of AdamW's size, so that one learning rate serves both).

    Raises:
        ConfigError: this torch has no Muon.
    """
    trained = [p for p in module.parameters() if p.requires_grad]

    def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )

    if config.optimizer == "adamw":
        return [adamw(trained)]
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"optimizer='muon' needs torch 2.9 or newer, this is {torch.__version__}; use 'adamw'")
    muon = torch.optim.Muon(
        [p for p in trained if p.dim() == 2],
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, adamw([p for p in trained if p.dim() != 2])]


def learning_rate(config: LoopConfig, done: float) -> float:
    """Return the rate at `done` (0 to 1): a linear warm-up, then a cosine down to `final_share` of it."""
    if done < config.warmup_share:
        # The first batch has a rate too: at 0 it would be wasted.
        return config.learning_rate * max(done / config.warmup_share, 0.01)
    through = (done - config.warmup_share) / (1 - config.warmup_share)
    low = config.final_share
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(through, 1.0))))

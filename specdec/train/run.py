"""A training run from prompts to a drafter that can be used: respond, capture, train, save, measure."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specdec.errors import CheckpointError, ConfigError, InputError
from specdec.heads.target import head_target
from specdec.heads.writing import CONFIG
from specdec.models.build import runner_for
from specdec.models.generation import eos_token_ids
from specdec.models.loading import load_model
from specdec.train.advice import check_advice
from specdec.train.capture import Capture, CaptureConfig, TokenPrompt, about_of
from specdec.train.data import DataConfig, is_held_out, token_prompts
from specdec.train.ending import Trained, end
from specdec.train.folder_lock import alone_in
from specdec.train.jobs import METHODS, Ingredients, Job, begun_vocabulary, build_job, check_options
from specdec.train.loop import CHECKPOINTS, LATEST, Loop, LoopConfig, changed_settings
from specdec.train.measuring import MeasureConfig
from specdec.train.plain_logits import refuse_shaped_logits
from specdec.train.processes import load_device, processes, share_of
from specdec.train.prompts import read_prompts
from specdec.train.report import Report
from specdec.train.store import Example, FeatureStore, StoreAbout
from specdec.train.vocabulary_choice import choose_vocabulary, count_tokens, coverage

log = logging.getLogger("specdec")

DRAFTER = "drafter"  # the folder of it inside of a run's
_RUN = "run.json"
# What a run may change when it goes on. The loop's own settings are compared by the loop.
_FREE = ("out", "features", "loop", "measure", "settings", "capture_dtype", "trust_remote_code")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run."""

    method: str
    target: str
    out: Path
    features: Path | None = None  # where hidden states are kept; None = inside of out. Runs of one target may share it
    data: DataConfig = field(default_factory=DataConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    draft_vocab_size: int | None = None  # at most; None = all of the target's tokens
    init: str | None = None  # a trained drafter of the same kind to go on from; its draft vocabulary is kept
    options: dict[str, Any] = field(default_factory=dict)  # of the method
    settings: dict[str, Any] = field(default_factory=dict)  # advised options of the drafter
    capture_dtype: str | None = None  # None = bfloat16 where the machine multiplies it faster, else float32
    trust_remote_code: bool = False  # run Python code that comes with the target

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method={self.method!r}; allowed: {', '.join(METHODS)}")
        check_options(self.method, self.options)
        size = self.draft_vocab_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ConfigError(f"draft_vocab_size={size!r}; allowed: an integer >= 1, or null for all tokens")
        check_advice(self.method, self.settings, self.options, size)

    @property
    def features_folder(self) -> Path:
        return self.features or self.out / "features"


@dataclass(frozen=True, slots=True)
class Data:
    """The stored examples of a run, split by prompt."""

    train: list[Example]
    held_out: list[Example]

    @property
    def num_tokens(self) -> int:
        """Response tokens to train on."""
        return sum(e.num_response_tokens for e in self.train)


def run(config: RunConfig, report: Report | None = None) -> Path:
    """Run or go on with a training run; return the folder of the trained drafter, `out / DRAFTER`.

    Raises:
        InputError: there are no prompts.
        CheckpointError: something on disk is damaged, or belongs to another run, or the disk is full.
        ConfigError: an option is unknown or out of range.
    """
    report = report if report is not None and processes().is_main_process else Report()
    next(read_prompts(config.data.prompts), None)  # a source that cannot be read is refused before a model is loaded
    with alone_in(config.out):
        return _run(config, report)


def _run(config: RunConfig, report: Report) -> Path:
    _keep_to(config)
    model, tokenizer = load_model(config.target, device=load_device(), trust_remote_code=config.trust_remote_code)
    target = replace(head_target(runner_for(model)), name=config.target)  # not the folder it was converted into
    refuse_shaped_logits(runner_for(model), target)
    data = capture_features(config, tokenizer, about_of(runner_for(model), config.target, config.capture), report)
    if config.init is None:
        size = None if config.draft_vocab_size is None else min(config.draft_vocab_size, target.vocab_size)
        vocabulary = choose_vocabulary(count_tokens(data.train, target.vocab_size), size, eos_token_ids(model))
    else:
        vocabulary = begun_vocabulary(config.method, config.init, model, target)
    covered = coverage(count_tokens(data.held_out, target.vocab_size), vocabulary) if data.held_out else None
    dtype = torch.bfloat16 if config.loop.precision == "bf16" else torch.float32
    options = {**config.options, "seed": config.loop.seed}
    job = build_job(config.method, Ingredients(model, target, vocabulary, data.train, dtype, options, config.init))
    report.stage("train", _about_training(config, job, data, covered), config.loop.num_tokens)
    loop = Loop(job.step, data.train, data.held_out, config.out / CHECKPOINTS, config.loop)
    curve = loop.run(lambda now, figures: report.trained(now.num_tokens, figures), report.wants_to_stop)
    folder = config.out / DRAFTER
    if processes().is_main_process:  # the others have nothing left to do
        job.save(folder, dict(config.settings), None)
        prompts = [e.token_ids[: e.num_prompt_tokens].tolist() for e in data.held_out]
        trained = Trained(folder, curve, len(data.train), data.num_tokens, prompts, _num_weights(job), covered)
        end(config, trained, model, tokenizer, report)
    return folder


def _keep_to(config: RunConfig) -> None:
    """Refuse other data, another head or another loop in the folder of a run that has begun.

    Raises:
        CheckpointError: something that decides what is trained has changed, or what was noted cannot be read.
    """
    path, latest = config.out / _RUN, config.out / CHECKPOINTS / LATEST
    try:
        if path.is_file():
            now = flat(_decisive(config))
            before = flat(_noted(path, or_else=_decisive(config)))
            changed = sorted(k for k in now.keys() | before.keys() if now.get(k) != before.get(k))
            if changed:
                was = ", ".join(f"{k}={before.get(k)!r}" for k in changed)
                raise CheckpointError(
                    f"{config.out} holds a run that was begun with other values: {was}; give those to go on with it, "
                    f"or another folder; --features {config.features_folder} takes its answers along"
                )
        if latest.is_file():
            _refuse_another_loop(config, changed_settings(json.loads(latest.read_text(encoding="utf-8")), config.loop))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{config.out} cannot be gone on with: {error}; give another folder") from error


def _noted(path: Path, or_else: dict[str, Any]) -> dict[str, Any]:
    """Return what was written down of a run; `or_else`, to be written again, where the file is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except (ValueError, RecursionError):
        pass
    log.warning("%s is damaged and is written anew: whether the run was begun with these values is not known", path)
    if processes().is_main_process:
        path.unlink(missing_ok=True)
    return or_else


def _refuse_another_loop(config: RunConfig, changed: dict[str, tuple[Any, Any]]) -> None:
    if not changed:
        return
    drafter = config.out / DRAFTER
    is_there = (drafter / CONFIG).is_file()
    raise CheckpointError(
        f"{config.out} holds a run with other values of {', '.join(changed)}: "
        + ", ".join(f"loop.{name}={then!r}, not {now!r}" for name, (then, now) in changed.items())
        + "; give those to go on with it. "
        + ("To train its drafter on" if is_there else "When it has ended, to train its drafter on")
        + f", begin with it in another folder: init={drafter} --features {config.features_folder} --out OTHER, where "
        "loop.num_tokens counts from there"
    )


def _note_begun(config: RunConfig) -> None:
    """Write down what decides about the run: from here on its folder is not for another one.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    path = config.out / _RUN
    if path.is_file() or not processes().is_main_process:
        return
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{_RUN}")
        half.write_text(json.dumps(_decisive(config), indent=1), encoding="utf-8")
        half.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}; give another folder") from error


def _decisive(config: RunConfig) -> dict[str, Any]:
    return {k: v for k, v in as_json(config).items() if k not in _FREE}


def as_json(config: RunConfig) -> dict[str, Any]:
    """Return the run as JSON holds it."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return found


def flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return dotted names and what stands there."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def capture_features(config: RunConfig, tokenizer: Any, about: StoreAbout, report: Report) -> Data:
    """Respond to all prompts and keep what the target's hidden states were; what is stored already is not run again."""
    wanted = token_prompts(config.data, config.capture, tokenizer)
    if not wanted:
        raise InputError(
            f"prompts={config.data.prompts!r}: none has at most {config.data.max_prompt_tokens} tokens after the chat "
            "template; raise data.max_prompt_tokens"
        )
    store = FeatureStore(config.features_folder, about)
    stored = store.keys()
    missing = [p for p in wanted if p.key not in stored]
    if missing:
        announce_size(missing, config, about, report)
    _note_begun(config)
    if missing:
        dtype = config.capture_dtype or ("bfloat16" if config.loop.precision == "bf16" else None)
        model, _ = load_model(
            config.target, dtype=dtype, device=load_device(), trust_remote_code=config.trust_remote_code
        )
        Capture(model, tokenizer, store, config.capture).run(share_of(missing), report.captured)
    processes().wait_for_everyone()
    return _split(store, {p.key: p for p in wanted}, config)


def _split(store: FeatureStore, wanted: dict[str, TokenPrompt], config: RunConfig) -> Data:
    train: list[Example] = []
    held: list[Example] = []
    others = 0
    # By key: runs that answer the same prompts at the same time leave two answers.
    for example in {e.key: e for e in store.examples()}.values():
        if example.key in wanted:
            (held if is_held_out(example.key, config.data) else train).append(example)
            others += example.temperature != wanted[example.key].temperature
    if others:
        log.warning(
            "%d responses in %s were drawn at other temperatures than capture.temperatures says; they are used as they "
            "are, another --features draws anew",
            others,
            store.folder,
        )
    if not held:
        log.warning("no prompt is held out, so acceptance is not measured; more prompts or data.held_out_share help")
    if not train:
        raise InputError(
            f"no response of the {len(wanted)} prompts has {config.capture.min_new_tokens} tokens or more to train on"
        )
    return Data(train, held)


def announce_size(prompts: Sequence[TokenPrompt], config: RunConfig, about: StoreAbout, report: Report) -> None:
    """Say how much will be written, before anything is, and refuse what the disk cannot hold.

    Raises:
        CheckpointError: the disk has less room than the features need.
    """
    tokens = sum(len(p.token_ids) + (len(p.response_ids) or config.capture.max_new_tokens) for p in prompts)
    num_bytes = 2 * about.width * tokens
    folder = config.features_folder
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    report.stage(
        "capture",
        f"{len(prompts)} prompts, at most {tokens} tokens of {2 * about.width} bytes: up to "
        f"{num_bytes / 2**30:.2f} GiB in {folder}, {free / 2**30:.1f} GiB are free",
        len(share_of(prompts)),
    )
    if num_bytes > free:
        raise CheckpointError(
            f"the features need up to {num_bytes / 2**30:.2f} GiB and {folder} has {free / 2**30:.2f} GiB; lower "
            "data.max_examples or capture.max_new_tokens, or give another folder with features="
        )


def _about_training(config: RunConfig, job: Job, data: Data, covered: float | None) -> str:
    share = "" if covered is None else f", the draft vocabulary covers {covered:.1%} of held-out responses"
    return (
        f"{config.method}: {_num_weights(job) / 1e6:.2f} M weights, {data.num_tokens} response tokens of "
        f"{len(data.train)} examples, {config.loop.num_tokens} to be seen, {len(data.held_out)} held out{share}"
    )


def _num_weights(job: Job) -> int:
    return sum(p.numel() for p in job.step.parameters() if p.requires_grad)

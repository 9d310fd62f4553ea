"""A training run from prompts to a drafter that can be used: respond, capture, train, save, measure."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdec.api import LLM
from specdec.errors import CheckpointError, ConfigError, InputError
from specdec.heads.target import head_target
from specdec.models.build import runner_for
from specdec.models.generation import eos_token_ids
from specdec.models.loading import load_model
from specdec.train.capture import Capture, CaptureConfig, TokenPrompt, about_of
from specdec.train.jobs import METHODS, Ingredients, Job, build_job
from specdec.train.loop import Loop, LoopConfig
from specdec.train.prompts import Prompt, held_out, read_prompts
from specdec.train.store import Example, FeatureStore, StoreAbout
from specdec.train.vocabulary_choice import choose_vocabulary, count_tokens, coverage

log = logging.getLogger("specdec")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which prompts, and what is made of them."""

    prompts: str = "sharegpt"
    max_examples: int | None = None  # of the target's own responses
    max_prompt_tokens: int = 224
    ascii_share: float = 0.0  # of a prompt's letters, at least; 0 takes every script
    held_out_share: float = 0.04  # by prompt, never trained on
    max_held_out: int = 128
    samples_per_prompt: int = 1  # sample i is drawn at temperatures[i % n]
    max_given: int | None = 0  # of the answers that the source holds, which the target only reads; None = all
    max_given_tokens: int = 280


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
    draft_vocab_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the method
    settings: dict[str, Any] = field(default_factory=dict)  # advised options of the drafter
    capture_dtype: str | None = None  # None = bfloat16 where the machine multiplies it faster, else float32

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method={self.method!r}; allowed: {', '.join(METHODS)}")

    @property
    def features_folder(self) -> Path:
        return self.features or self.out / "features"


class Report:
    """What a run tells whoever watches it; does nothing by itself."""

    def stage(self, name: str, about: str) -> None: ...
    def captured(self, num_prompts: int, num_tokens: int) -> None: ...
    def trained(self, num_tokens: int, figures: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Data:
    """The stored examples of a run, split by prompt."""

    train: list[Example]
    held_out: list[Example]


def run(config: RunConfig, report: Report | None = None) -> Path:
    """Run or go on with a training run; return the folder of the trained drafter, `out / "drafter"`.

    Raises:
        InputError: there are no prompts.
        CheckpointError: something on disk is damaged, or belongs to another run, or the disk is full.
        ConfigError: an option is unknown or out of range.
    """
    report = report or Report()
    model, tokenizer = load_model(config.target)
    target = head_target(runner_for(model))
    data = capture_features(config, tokenizer, about_of(runner_for(model), config.target), report)
    counts = count_tokens(data.train, target.vocab_size)
    vocabulary = choose_vocabulary(counts, config.draft_vocab_size, eos_token_ids(model))
    covered = coverage(count_tokens(data.held_out, target.vocab_size), vocabulary) if data.held_out else None
    dtype = torch.bfloat16 if config.loop.precision == "bf16" else torch.float32
    options = {**config.options, "seed": config.loop.seed}
    job = build_job(config.method, Ingredients(model, target, vocabulary, data.train, dtype, options))
    report.stage("train", _about_training(config, job, data, covered))
    loop = Loop(job.step, data.train, data.held_out, config.out / "checkpoints", config.loop)
    curve = loop.run(lambda progress, figures: report.trained(progress.num_tokens, figures))
    folder = job.save(config.out / "drafter", dict(config.settings), None)
    log.info("trained %s for %s: %s", config.method, config.target, curve[-1] if curve else {})
    return folder


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
        dtype = config.capture_dtype or ("bfloat16" if config.loop.precision == "bf16" else None)
        model, _ = load_model(config.target, dtype=dtype)
        Capture(model, tokenizer, store, config.capture).run(missing, report.captured)
    keys = {p.key for p in wanted}
    train: list[Example] = []
    held: list[Example] = []
    for example in store.examples():
        if example.key in keys:
            (held if _is_held_out(example.key, config.data) else train).append(example)
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
    )
    if num_bytes > free:
        raise CheckpointError(
            f"the features need up to {num_bytes / 2**30:.2f} GiB and {folder} has {free / 2**30:.2f} GiB; lower "
            "data.max_examples or capture.max_new_tokens, or give another folder with features="
        )


def token_prompts(data: DataConfig, capture: CaptureConfig, tokenizer: Any) -> list[TokenPrompt]:
    """Return the prompts of a run as ids, in an order that depends on nothing but them."""
    own: list[TokenPrompt] = []
    given: list[TokenPrompt] = []
    kept_back: list[TokenPrompt] = []
    for prompt in read_prompts(data.prompts):
        token_ids = _token_ids(prompt, data, tokenizer)
        if token_ids is None:
            continue
        samples = [
            TokenPrompt(f"{prompt.key}.{i}", token_ids, capture.temperatures[i % len(capture.temperatures)])
            for i in range(data.samples_per_prompt)
        ]
        if held_out(prompt, data.held_out_share):
            kept_back.append(samples[0])
            continue
        own += samples
        response_ids = _given(prompt, data, tokenizer)
        if response_ids:
            given.append(TokenPrompt(f"{prompt.key}.g", token_ids, 1.0, response_ids))
    return [
        *_mixed(kept_back)[: data.max_held_out],
        *_mixed(own)[: data.max_examples],
        *_mixed(given)[: data.max_given],
    ]


def _mixed(prompts: list[TokenPrompt]) -> list[TokenPrompt]:
    """Return the prompts in an order without order: any beginning of it is a mixture of everything."""
    return sorted(prompts, key=lambda p: hashlib.sha256(p.key.encode()).hexdigest())


def _token_ids(prompt: Prompt, data: DataConfig, tokenizer: Any) -> tuple[int, ...] | None:
    if _ascii_share(prompt.text) < data.ascii_share or len(prompt.text) > 16 * data.max_prompt_tokens:
        return None
    if getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    else:
        encoded = tokenizer(prompt.text).input_ids
    return tuple(encoded) if 0 < len(encoded) <= data.max_prompt_tokens else None


def _given(prompt: Prompt, data: DataConfig, tokenizer: Any) -> tuple[int, ...]:
    if data.max_given == 0 or not prompt.response or _ascii_share(prompt.response) < data.ascii_share:
        return ()
    text = prompt.response[: 8 * data.max_given_tokens]
    return tuple(tokenizer(text, add_special_tokens=False).input_ids[: data.max_given_tokens])


def _ascii_share(text: str) -> float:
    return sum(map(str.isascii, text)) / max(len(text), 1)


def _is_held_out(key: str, data: DataConfig) -> bool:
    return held_out(Prompt(key.partition(".")[0], ()), data.held_out_share)


def _about_training(config: RunConfig, job: Job, data: Data, covered: float | None) -> str:
    trained = sum(p.numel() for p in job.step.parameters() if p.requires_grad)
    known = sum(e.num_response_tokens for e in data.train)
    share = "" if covered is None else f", the draft vocabulary covers {covered:.1%} of held-out responses"
    return (
        f"{config.method}: {trained / 1e6:.2f} M weights, {known} response tokens of {len(data.train)} examples, "
        f"{config.loop.num_tokens} to be seen, {len(data.held_out)} examples held out{share}"
    )


def measure(llm: LLM, prompts: Iterable[TokenPrompt], max_new_tokens: int) -> float:
    """Return the acceptance length of a drafter on prompts, decoded greedily by the engine itself."""
    done = llm.generate([list(p.token_ids) for p in prompts], max_new_tokens=max_new_tokens)
    emitted = sum(c.stats.num_emitted_tokens for c in done)
    return emitted / max(sum(c.stats.num_steps for c in done), 1)

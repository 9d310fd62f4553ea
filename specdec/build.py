"""Names to objects: drafters, acceptance rules and engines from what a caller writes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from specdec.acceptance import VerifierChoice
from specdec.draft_length import build_draft_length
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError
from specdec.heads.loading import kind_of, names_head
from specdec.interfaces import Drafter, DrafterContext, Verifier
from specdec.kv.cache import KVCache
from specdec.models.build import RunnerConfig
from specdec.models.loading import load_model
from specdec.models.runner import ModelRunner
from specdec.models.step_times import step_times
from specdec.registry import DRAFTERS, VERIFIERS, check_options, refuse_unknown
from specdec.trace import trace_from_environment

OWN_FIELDS = frozenset(f.name for config in (EngineConfig, RunnerConfig) for f in fields(config)) | {"kv_memory"}


def split_options(options: dict[str, Any]) -> tuple[EngineConfig, RunnerConfig]:
    """Return the engine's and the runner's configs from keyword arguments; unknown ones are refused."""
    engine = {f.name for f in fields(EngineConfig)}
    if "kv_memory" in options:  # as users say it
        if "kv_memory_bytes" in options:
            raise ConfigError("kv_memory and kv_memory_bytes are one option; give one of them")
        options = {"kv_memory_bytes" if name == "kv_memory" else name: value for name, value in options.items()}
    refuse_unknown("specdec", options, OWN_FIELDS)
    return (
        EngineConfig(**{k: v for k, v in options.items() if k in engine}),
        RunnerConfig(**{k: v for k, v in options.items() if k not in engine}),
    )


def build_verifiers(verifier: str | Verifier, options: dict[str, Any] | None = None) -> VerifierChoice:
    """Return the acceptance rules of an engine: "auto", a registered name with its options, or an instance.

    Raises:
        ConfigError: it is none of these, or an option is unknown or out of range.
    """
    if options and (verifier == "auto" or not isinstance(verifier, str)):
        what = "'auto'" if verifier == "auto" else "an object"
        raise ConfigError(f"verifier_options={options!r} go with a verifier given by name; this one is {what}")
    if verifier == "auto":
        match, rejection = VERIFIERS.load("match")(), VERIFIERS.load("rejection")()
        return VerifierChoice(greedy=match, seeded=match, sampled=rejection)
    rule: Any = VERIFIERS.load(verifier) if isinstance(verifier, str) else verifier
    if isinstance(verifier, str) and isinstance(rule, type):
        check_options(f"verifier {verifier!r}", rule, options or {})
        rule = rule(**(options or {}))
    if isinstance(rule, type) or not hasattr(rule, "verify"):
        raise ConfigError(f"verifier={verifier!r}; allowed: 'auto', a name ({', '.join(VERIFIERS.names())}), an object")
    return VerifierChoice(greedy=rule, seeded=rule, sampled=rule)


def named_drafter(drafter: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a registered name and its options; a head's folder, hub id or shipped name becomes the option `model`.

    Raises:
        ConfigError: the name is unknown, or a head is named twice.
        CheckpointError: the head cannot be read, or its layout is not known.
    """
    if drafter in DRAFTERS.table or not names_head(drafter) or drafter in DRAFTERS.names():
        DRAFTERS.load(drafter)
        return drafter, options
    if "model" in options:
        raise ConfigError(f"drafter={drafter!r} names a head and drafter_options['model']={options['model']!r} another")
    return kind_of(drafter), {**options, "model": drafter}


def build_drafter(
    drafter: str | Drafter, runner: ModelRunner, tokenizer: Any | None, options: dict[str, Any] | None = None
) -> Drafter:
    """Return a drafter for a target: a registered name or a head's source with options, or an instance as it is.

    Raises:
        CheckpointError: a head cannot be read.
        ConfigError: the name or an option is unknown.
        IncompatibleDrafterError: it does not fit the target.
    """
    if not isinstance(drafter, str):
        if isinstance(drafter, type) or not hasattr(drafter, "propose"):
            raise ConfigError(f"drafter={drafter!r}; allowed: a name ({', '.join(DRAFTERS.names())}) or a Drafter")
        if options:
            raise ConfigError(f"drafter_options={options!r} go with a drafter's name; this one is built already")
        return drafter
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise ConfigError(f"drafter_options={options!r}; allowed: a dict of the drafter's options")
    drafter, options = named_drafter(drafter, options)
    kind = DRAFTERS.load(drafter)
    if not callable(getattr(kind, "build", None)):
        raise ConfigError(f"drafter={drafter!r} names {kind!r}, which has no build(context, **options)")
    check_options(f"drafter {drafter!r}", kind.build, options, reserved=1)

    def load(name: Any, dtype: Any = None) -> tuple[Any, Any]:
        key = (str(name), str(dtype))
        if key not in runner.loaded:
            device = None if runner.device.type == "cpu" else runner.device
            runner.loaded[key] = load_model(name, dtype=dtype, device=device)
        found: tuple[Any, Any] = runner.loaded[key]
        return found

    built: Drafter = kind.build(DrafterContext(runner, runner.vocab_size, tokenizer, load), **options)
    return built


def build_engine(
    runner: ModelRunner,
    drafter: str | Drafter,
    verifiers: VerifierChoice,
    config: EngineConfig,
    *,
    tokenizer: Any | None = None,
    drafter_options: dict[str, Any] | None = None,
) -> Engine:
    """Return an engine over a runner whose cache is its own; the variable SPECDEC_TRACE gives it a trace.

    Raises:
        ConfigError: a name or an option is unknown, or the trace's file cannot be written.
        IncompatibleDrafterError: the drafter does not fit the target.
    """
    runner.cache.prefix_caching = config.prefix_caching  # before the drafter, whose own cache does the same
    built = build_drafter(drafter, runner, tokenizer, drafter_options)
    _share_memory(runner.cache, getattr(built, "own_cache", None))
    config = config.for_drafter(built)
    length = build_draft_length(
        config.draft_length,
        step_times=lambda: step_times(runner),
        confidence_threshold=config.confidence_threshold,
    )
    trace = trace_from_environment(runner, built, verifiers, config, tokenizer)
    return Engine(runner, built, verifiers, config, length, trace)


def _share_memory(target: KVCache, drafter: KVCache | None) -> None:
    """Divide the memory limit between a target's cache and its drafter's own, so that both hold as many tokens."""
    if target.max_bytes is None or drafter is None:
        return
    both = target.bytes_per_token + drafter.bytes_per_token
    if both:
        drafter.max_bytes = target.max_bytes * drafter.bytes_per_token // both
        target.max_bytes -= drafter.max_bytes

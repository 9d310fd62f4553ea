"""From a transformers model to a ModelRunner: refuse, clone, choose the program, check it, keep it."""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import nn

from specdec.errors import ConfigError, ModelOutputError, UnsupportedModelError
from specdec.interfaces import Segment
from specdec.kv.cache import BLOCK_TOKENS, KVCache
from specdec.kv.codecs import codec_of
from specdec.kv.flash import PAGE_TOKENS, choose_attention
from specdec.kv.storage import is_out_of_memory
from specdec.models import lean
from specdec.models.byte_size import num_bytes_of
from specdec.models.clone import clone_sharing_parameters, device_of, fingerprint
from specdec.models.compatibility import max_positions, refuse_unsupported
from specdec.models.conformance import LEAN_TOLERANCE, SHORT, Reference, compare, conforms, take_reference
from specdec.models.hosted import base_forward
from specdec.models.hosted_mask import MaskedProgram
from specdec.models.hosting import host, refuse_difference
from specdec.models.int8_copy import Calibration, calibration_of
from specdec.models.kv_smoothing import kv_codec
from specdec.models.matmul import FusedLinear, KernelFactory, KernelTables, is_plain_linear
from specdec.models.probe import Compatibility
from specdec.models.runner import ModelRunner, Program
from specdec.models.shrink import windows
from specdec.models.verdicts import verdict_of
from specdec.models.wrapped import adapter_parts, unwrapped

log = logging.getLogger("specdec")

# Below this size a model's products fit the cache and no kernel choice is worth a copy of the weights.
SMALL_MODEL_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How a target or draft model is run."""

    kernels: str = "auto"  # "auto": measured per row count on CPU; "off": torch's default everywhere
    lean: bool = True  # allow the hand-written forward for Llama-like models on CPU
    prepack_limit_bytes: int | None = None  # extra memory for reordered weights; None = a quarter of the RAM if free
    kv_memory_bytes: int | str | None = None  # bound on the KV cache, "2GiB" or bytes; None = as much as is asked for
    kv_dtype: str | None = None  # "int8" or "int4": how keys and values are stored; None = as the model computes them
    kv_block_tokens: int | None = None  # slots per block of the KV cache; None = 16, or 256 where flash-attn runs
    attention: str = "auto"  # "auto": flash-attn where it can run, see docs/gpu.md; "sdpa": torch's everywhere

    def __post_init__(self) -> None:
        if self.kernels not in ("auto", "off"):
            raise ConfigError(f"kernels={self.kernels!r}; allowed: 'auto', 'off'")
        for name in ("prepack_limit_bytes", "kv_memory_bytes"):
            object.__setattr__(self, name, num_bytes_of(name, getattr(self, name)))
        codec_of(self.kv_dtype)  # an unknown name is refused before anything is loaded
        size = self.kv_block_tokens
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ConfigError(f"kv_block_tokens={size!r}; allowed: an integer >= 1 or None")
        if self.attention not in ("auto", "sdpa"):
            raise ConfigError(f"attention={self.attention!r}; allowed: 'auto', 'sdpa'")
        if not isinstance(self.lean, bool):
            raise ConfigError(f"lean={self.lean!r}; allowed: True, False")


_Kept = dict[tuple[RunnerConfig, Calibration | None], tuple[tuple[object, ...], ModelRunner]]
_RUNNERS: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()
_BUILDING = threading.Lock()
# What code of a model raises when it meets inputs or dtypes it was not written for; our own errors are ValueErrors.
_MODEL_ERRORS = (RuntimeError, TypeError, AttributeError, IndexError, KeyError)


def runner_for(model: Any, config: RunnerConfig = RunnerConfig(), tokenizer: Any | None = None) -> ModelRunner:
    """Return the runner of a model, built once per model object and rebuilt when the model changes.

    It holds the program, clone and reordered weights, which threads may share; an engine works on a runner
    `with_own_cache` of it. What differs in the KV cache only shares them.

    Args:
        model: a transformers model.
        config: how it is run.
        tokenizer: lets a quantised KV cache calibrate on text.

    Raises:
        UnsupportedModelError: the model has a feature the engine cannot run exactly.
    """
    model = unwrapped(model)
    with _BUILDING:
        now = fingerprint(model)
        kept = {c: (seen, r) for c, (seen, r) in _RUNNERS.get(model, {}).items() if seen == now}
        plain = replace(config, kv_memory_bytes=None, kv_dtype=None, kv_block_tokens=None, attention="sdpa")
        if (plain, None) not in kept:
            kept[plain, None] = (now, build_runner(model, plain))
        base = kept[plain, None][1]
        key = (config, None if config.kv_dtype is None else calibration_of(base, tokenizer))
        if key not in kept:
            kept[key] = (now, _with_cache(base, config, tokenizer))
        _RUNNERS[model] = kept
        return kept[key][1]


def has_runners() -> bool:
    """Tell whether a model that still lives was prepared in this process, and so has run."""
    return bool(_RUNNERS)


def is_current(model: Any, runner: ModelRunner) -> bool:
    """Tell whether a runner, from `runner_for`, is that of the model as it is now."""
    model = unwrapped(model)
    now = fingerprint(model)
    kept = _RUNNERS.get(model, {})  # replaced as a whole, so nobody waits here for a model that is being built
    return any(r is runner and seen == now for seen, r in kept.values())


def build_runner(model: Any, config: RunnerConfig = RunnerConfig()) -> ModelRunner:
    """Build a runner: see `runner_for`."""
    refuse_unsupported(model)
    clone: Any = clone_sharing_parameters(model)
    device = device_of(clone)
    vocab_size = clone.config.get_text_config().vocab_size
    limit, needed = max_positions(clone.config), SHORT.num_positions
    if limit and limit < needed:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {limit} positions; the comparison before use needs {needed}"
        )
    name = type(model).__name__
    try:
        reference = take_reference(lambda ids: base_forward(clone, ids), vocab_size, device)
    except _MODEL_ERRORS as error:
        raise UnsupportedModelError(f"{name}'s own forward fails on a probe of {needed} tokens: {error}") from error
    if reference.is_broken():
        raise ModelOutputError(
            f"{name}'s own forward gives NaN or infinite logits on a probe of random tokens; check the "
            "weights and the dtype (float16 overflows in some models)"
        )
    known = _strict_verdict(clone, reference.dtype)
    try:
        program, trees, extra = _choose_program(clone, reference, config, known)
    except _MODEL_ERRORS as error:
        raise UnsupportedModelError(f"{name} does not run over specdec's KV cache: {error}") from error
    runner = ModelRunner(
        program,
        KVCache(),
        config=clone.config,
        device=device,
        vocab_size=reference.vocab_size,
        dtype=reference.dtype,
        supports_trees=trees and known.verdict != "chains",
        extra_weight_bytes=extra,
        model=clone,
    )
    return _with_cache(runner, config, None)


def _with_cache(runner: ModelRunner, config: RunnerConfig, tokenizer: Any | None) -> ModelRunner:
    """Return a runner of the same program over the KV cache that a config describes."""
    assert not isinstance(config.kv_memory_bytes, str), "texts became numbers"
    codec = None if config.kv_dtype is None else kv_codec(config.kv_dtype, runner, tokenizer)
    choice = None
    if codec is None and not isinstance(runner.program, MaskedProgram):  # which attends by itself
        choice = choose_attention(runner.device, runner.dtype, config.attention, config.kv_block_tokens)
    backend = None if choice is None else choice.backend
    usual = BLOCK_TOKENS if backend is None else PAGE_TOKENS
    cache = KVCache(
        max_bytes=config.kv_memory_bytes,
        block_tokens=config.kv_block_tokens or usual,
        codec=codec,
        backend=backend,
    )
    other = runner.with_cache(cache)
    try:
        _size_cache(other)
    except RuntimeError as error:  # what the kernel does not do for this model, above all
        if backend is None or is_out_of_memory(error):
            raise
        log.warning("attention: SDPA; flash-attn %s fails for this model: %s", backend.version, error)
        return _with_cache(runner, replace(config, attention="sdpa"), tokenizer)
    if choice is not None and config.attention != "sdpa":  # not before it is known to run
        log.log(logging.WARNING if choice.failed else logging.INFO, "attention: %s", choice)
    return other


def _size_cache(runner: ModelRunner) -> None:
    """Run one token, so that the cache knows its bytes per token before the first request asks for room."""
    runner.cache.open(-1, 1)
    runner.cache.reserve(-1, 1)
    runner.forward([Segment(-1, torch.zeros(1, dtype=torch.int64), None, torch.arange(1))])
    runner.cache.release(-1)


def _strict_verdict(model: Any, dtype: torch.dtype) -> Compatibility:
    """Return the shrunk probe's verdict where the comparison on the real weights is too loose or too short.

    Raises:
        UnsupportedModelError: the architecture does not conform in float32.
    """
    crossed = all(size < SHORT.num_positions for size in windows(model.config))
    if crossed and dtype in (torch.float32, torch.float64):
        return Compatibility("unknown")
    known = verdict_of(model.config, type(model))
    if known.verdict == "refused":
        raise UnsupportedModelError(
            f"a small float32 {type(model).__name__} over specdec's KV cache does not compute what transformers does, "
            f"so neither may this one: {known.feature}; {known.advice}"
        )
    return known


def _choose_program(
    clone: Any, reference: Reference, config: RunnerConfig, known: Compatibility
) -> tuple[Program, bool, int]:
    """Return the fastest program that conforms, whether it takes trees, and the extra weight bytes it holds."""
    factory = _kernel_factory(clone, config)
    if config.lean and known.lean is not False and lean.applies_to(clone):
        program = _lean_program(clone, reference, factory)
        if program is not None:
            return program, True, factory.extra_bytes if factory else 0
        factory = _kernel_factory(clone, config)
    attention = getattr(clone.config, "_attn_implementation", None)
    hosting = host(clone, reference)
    refuse_difference(hosting, type(clone).__name__, attention)
    if factory is not None:
        _replace_linears(hosting.clone, factory)
        if not conforms(hosting.program, reference, trees=hosting.trees):
            raise UnsupportedModelError(
                f"{type(clone).__name__} does not bear replaced Linear layers; load it with kernels='off'"
            )
    return hosting.program, hosting.trees, factory.extra_bytes if factory else 0


def _lean_program(clone: Any, reference: Reference, factory: KernelFactory | None) -> Program | None:
    """Return the lean program if it can be built and says what the unmodified model says, else None."""
    name = type(clone).__name__
    try:
        program = lean.LeanProgram(clone, _fuse_for(factory))
        difference = compare(program, reference)
    except (AttributeError, RuntimeError, TypeError) as error:  # built of other parts than its model_type says
        log.info("the lean forward does not fit %s (%s); not used", name, error)
        return None
    if not difference <= LEAN_TOLERANCE[reference.dtype]:  # NaN included
        log.info("the lean forward differs from %s by %.2g; not used", name, difference)
        return None
    return program


def _kernel_factory(clone: nn.Module, config: RunnerConfig) -> KernelFactory | None:
    linears = [m for m in clone.modules() if is_plain_linear(m)]
    num_bytes = sum(m.weight.numel() * m.weight.element_size() for m in linears)
    on_cpu = all(m.weight.device.type == "cpu" for m in linears)
    if config.kernels == "off" or not on_cpu or num_bytes < SMALL_MODEL_BYTES:
        return None
    memory = psutil.virtual_memory()
    limit = config.prepack_limit_bytes
    return KernelFactory(KernelTables(), min(memory.total // 4, memory.available // 2) if limit is None else limit)


def _fuse_for(factory: KernelFactory | None) -> lean.Fuse:
    if factory is None:
        return lambda role, linears: FusedLinear(linears, None)
    return lambda role, linears: factory(linears)


def _replace_linears(clone: nn.Module, factory: KernelFactory) -> None:
    """Swap every Linear of the clone for a `FusedLinear` where prepacking pays; adapters' small ones stay."""
    adapters = adapter_parts(clone)
    for parent in list(clone.modules()):
        for name, child in list(parent.named_children()):
            if is_plain_linear(child) and child not in adapters:
                fused = factory([child])
                if fused.extra_bytes:
                    setattr(parent, name, fused)

"""`check`: whether and how a model runs, mostly from its config."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from specdec.build import build_drafter
from specdec.check.trained import SHIPPED_KINDS, shipped_drafter
from specdec.errors import ModelOutputError, SpecdecError, UnsupportedModelError
from specdec.kv.flash import choose_attention
from specdec.models.build import RunnerConfig, build_runner, runner_for
from specdec.models.clone import device_of
from specdec.models.compatibility import Refusal, find_refusal, max_positions, refuse_unsupported
from specdec.models.conformance import SHORT, TOLERANCE, compare, take_reference
from specdec.models.described import Described, describe
from specdec.models.dtypes import default_dtype, parse_dtype
from specdec.models.generation import eos_token_ids
from specdec.models.hosted import base_forward
from specdec.models.int8_copy import LEAST_LINEAR_SHARE
from specdec.models.lean import LeanProgram
from specdec.models.loading import load_model
from specdec.models.probe import Compatibility, Verdict, refused, small_instance
from specdec.models.shrink import shrink, windows
from specdec.models.sizes import WeightSizes, kv_values_per_token, layer_patterns, sizes_of, weight_sizes
from specdec.models.verdicts import class_to_try, verdict_of
from specdec.registry import DRAFTERS


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """One short comparison of the real weights with transformers' own forward, in their own dtype."""

    dtype: str
    error: float  # largest |difference| over the largest |logit|
    tolerance: float
    lean: bool  # the hand-written forward runs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """What `check` found. None stands for what is unknown without weights, or for this architecture."""

    name: str
    architecture: str
    verdict: Verdict  # "trees", "chains", "refused", or "unknown": nothing known against it, but it was not tried
    feature: str | None = None  # what keeps it from running, or from trees
    advice: str = ""
    level: str | None = None  # "attention": through AttentionInterface; "mask": its own attention, a prepared mask
    model_type: str | None = None
    num_layers: int | None = None
    layers: dict[str, int] = field(default_factory=dict)  # how many attend in which way
    windows: list[int] = field(default_factory=list)
    dtype: str | None = None  # of the weights
    vocab_size: int | None = None
    max_positions: int | None = None
    kv_bytes_per_token: int | None = None
    num_parameters: int | None = None
    weight_bytes: int | None = None
    lean: bool = False  # a hand-written forward stands in on CPUs
    attention: str | None = None  # what attends on this machine and why; None: the model's own code
    eos_token_ids: list[int] = field(default_factory=list)
    drafters: dict[str, str | None] = field(default_factory=dict)  # name -> why it cannot run here, or None
    shipped: dict[str, str] = field(default_factory=dict)  # drafter -> the trained one that ships for this model
    probe: dict[str, Any] = field(default_factory=dict)  # what the comparison on a small instance found
    weights: WeightCheck | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return self.verdict in ("trees", "chains")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "runs": self.runs}


def check(
    model: Any, *, weights: bool | None = None, dtype: str | torch.dtype = "auto", trust_remote_code: bool = False
) -> ModelReport:
    """Tell whether and how a model runs: static gate, a small random instance, then its weights if wanted.

    Args:
        model: a built-in name, hub id, directory (a config.json is enough), .gguf file, config or model object.
        weights: also run the real weights once, loading them if need be. Default: only those of a model object.
        dtype: weight type the sizes are given for and the weights are loaded in; "auto" is the checkpoint's own.
        trust_remote_code: run Python code that comes with the checkpoint.

    Raises:
        ModelLoadError: the model cannot be found or read.
        ConfigError: `dtype` is none.
    """
    wanted = parse_dtype(dtype)
    found = describe(model, trust_remote_code)
    if found.config is None:
        assert found.refusal is not None, "a model without a config is refused"
        return _verdict_only(found, refused(found.refusal))
    known = known_before_weights(found)
    report = _described(found, known, wanted)
    if weights or (weights is None and found.model is not None):
        return _with_weights(report, found, dtype, trust_remote_code)
    return report


def known_before_weights(found: Described) -> Compatibility:
    """Return the verdict before any weights are run."""
    if found.refusal is not None:
        return refused(found.refusal)
    if found.model is not None:
        try:
            refuse_unsupported(found.model)
        except UnsupportedModelError as error:
            refusal = find_refusal(found.config, found.model)
            return refused(refusal or Refusal(str(error), advice="pass the model as transformers loads it"))
    return verdict_of(found.config, found.model_class)


def _verdict_only(found: Described, known: Compatibility) -> ModelReport:
    return ModelReport(
        name=found.name,
        architecture=found.architecture,
        verdict=known.verdict,
        feature=known.feature,
        advice=known.advice,
    )


def _described(found: Described, known: Compatibility, wanted: torch.dtype | str) -> ModelReport:
    config, text, notes = found.config, found.config.get_text_config(), list[str]()
    dtype = _dtype_of(found, wanted)
    sizes = _sizes(found, dtype, notes)
    usual = default_dtype(None, None)
    if found.model is None and not isinstance(wanted, torch.dtype) and dtype != usual:
        notes.append(
            f"the sizes are those of {str(dtype)[6:]}; on this machine it is loaded in {str(usual)[6:]} by default"
        )
    values = _kv_values(config, known)
    if text is not config:
        notes.append("it has parts for more than text; specdec runs text prompts")
    return replace(
        _verdict_only(found, known),
        level=known.level,
        model_type=text.model_type,
        num_layers=getattr(text, "num_hidden_layers", None),
        layers=layer_patterns(config) if hasattr(text, "num_hidden_layers") else {},
        windows=sorted(set(windows(config))),
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=getattr(text, "vocab_size", None),
        max_positions=max_positions(config),
        kv_bytes_per_token=None if values is None else values * dtype.itemsize,
        num_parameters=None if sizes is None else sizes.num_parameters,
        weight_bytes=None if sizes is None else sizes.num_bytes,
        lean=known.lean is True,
        attention=_attention(known.level, _device_of(found), dtype),
        eos_token_ids=sorted(eos_token_ids(found)),
        **_drafters(found, known, sizes, notes),
        probe=known.to_dict() if known.level is not None else {},
        notes=notes,
    )


def _attention(level: str | None, device: torch.device, dtype: torch.dtype) -> str | None:
    return str(choose_attention(device, dtype)) if level == "attention" else None


def _device_of(found: Described) -> torch.device:
    """Return where a model is, or where it would best go on this machine."""
    if found.model is not None:
        return device_of(found.model)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype_of(found: Described, wanted: torch.dtype | str) -> torch.dtype:
    if found.model is not None:
        own: torch.dtype = found.model.dtype
        return own
    if isinstance(wanted, torch.dtype):
        return wanted
    declared = getattr(found.config, "dtype", None) or getattr(found.config.get_text_config(), "dtype", None)
    return declared if isinstance(declared, torch.dtype) else torch.float32


def _sizes(found: Described, dtype: torch.dtype, notes: list[str]) -> WeightSizes | None:
    try:
        if found.model is not None:
            return sizes_of(found.model)
        if getattr(found.config, "quantization_config", None) is not None:
            notes.append("its weights are quantised, so that their size is not known from the config")
            return None
        return weight_sizes(found.config, found.model_class, dtype)
    except Exception as error:  # the model's own code, on a device that holds nothing
        notes.append(f"its size is unknown: it cannot be built without weights ({type(error).__name__}: {error})")
        return None


def _kv_values(config: Any, known: Compatibility) -> int | None:
    """Return the numbers that a token's keys and values are, if a formula gives them for the small instance too."""
    try:
        return kv_values_per_token(config, shrink(config), known.kv_values_per_token)
    except Exception:  # configs of unfamiliar fields
        return None


def _drafters(found: Described, known: Compatibility, sizes: WeightSizes | None, notes: list[str]) -> dict[str, Any]:
    """Return why each drafter cannot run, or None, and which trained ones ship.

    Tried on the small instance with their default options, but for those whose condition shrinking changes.
    """
    names = [name for name in DRAFTERS.names() if ".testing:" not in DRAFTERS.table.get(name, "")]
    if known.verdict not in ("trees", "chains"):
        return {}
    shipped = {name: shipped_drafter(name, found) for name in (*SHIPPED_KINDS, "draft_model")}
    notes += [note for ship in shipped.values() if (note := ship.note)]
    small = small_instance(shrink(found.config), class_to_try(found.config, found.model_class))
    runner = build_runner(small, RunnerConfig(kernels="off"))
    reasons = {
        name: shipped[name].reason if name in SHIPPED_KINDS else _why_not(name, runner.with_own_cache(), sizes)
        for name in names
    }
    return {"drafters": reasons, "shipped": {name: ship.name for name, ship in shipped.items() if ship.name}}


def _why_not(name: str, runner: Any, sizes: WeightSizes | None) -> str | None:
    if name == "self_int8":  # its condition is a share of the weights, which shrinking changes
        if sizes is not None and sizes.linear_share < LEAST_LINEAR_SHARE:
            return f"{sizes.linear_share:.1%} of the decoded weights are Linear layers, {LEAST_LINEAR_SHARE:.0%} needed"
        return None
    if name == "draft_model":
        return None  # any model of the same vocabulary: see `check_pair`
    try:
        build_drafter(name, runner, None, {})
    except SpecdecError as error:
        return str(error)
    return None


def _with_weights(
    report: ModelReport, found: Described, dtype: str | torch.dtype, trust_remote_code: bool
) -> ModelReport:
    """Add what the real weights show. A refusal stands."""
    if report.verdict == "refused":
        return report
    if found.model is None and found.source is None:
        return replace(report, notes=[*report.notes, "a config has no weights to run"])
    model = found.model
    if model is None:
        assert found.source is not None, "a model is an object or has a source"
        folder = found.source.folder
        if folder is not None and not any(f.suffix in _WEIGHT_FILES for f in folder.iterdir()):
            return replace(report, notes=[*report.notes, f"there are no weights in {folder}"])
        model, _ = load_model(found.source.name, dtype=dtype, trust_remote_code=trust_remote_code)
    try:
        runner = runner_for(model).with_own_cache()
        reference = take_reference(lambda ids: base_forward(runner.model, ids), runner.vocab_size, device_of(model))
        error = compare(runner.program, reference, trees=runner.supports_trees)
    except (UnsupportedModelError, ModelOutputError) as failure:
        return replace(report, verdict="refused", feature=f"its weights: {failure}", advice=_LOAD_OTHERWISE)
    checked = WeightCheck(
        dtype=str(runner.dtype).removeprefix("torch."),
        error=error,
        tolerance=TOLERANCE[runner.dtype],
        lean=isinstance(runner.program, LeanProgram),
    )
    sizes = sizes_of(model)
    return replace(
        report,
        verdict="trees" if runner.supports_trees else "chains",
        feature=None if runner.supports_trees else report.feature,
        advice="" if runner.supports_trees else report.advice,
        dtype=checked.dtype,
        num_parameters=sizes.num_parameters,
        weight_bytes=sizes.num_bytes,
        kv_bytes_per_token=runner_for(model).cache.bytes_per_token,
        lean=checked.lean,
        attention=_attention(report.level, runner.device, runner.dtype),
        weights=checked,
    )


_WEIGHT_FILES = (".safetensors", ".bin")
_LOAD_OTHERWISE = f"load it in float32 or bfloat16, or check the weights; {SHORT.num_positions} random tokens were run"

"""A model, a device and a load in; memory, floors and the economics of drafting out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from specdec.errors import ConfigError
from specdec.planner.device import Device
from specdec.planner.drafter import Beside, DrafterCost, drafter_cost
from specdec.planner.kv import LAYOUTS, KvStorage
from specdec.planner.memory import MemoryNeeds
from specdec.planner.model import PlannedModel
from specdec.planner.names import KV_BYTES, WEIGHT_BYTES, choose
from specdec.planner.roofline import Phase, Rates
from specdec.planner.speculation import MOST_BATCH, Choice, Speculation
from specdec.planner.work import ModelWork

DEFAULT_ACCEPTANCE = 0.7
_MOST = 10**9  # of requests and tokens: more is a slip of the keyboard


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to run. One default per knob, here."""

    batch: int = 1  # requests that decode at once
    context: int = 4096  # tokens of each, prompt and answer
    prompt_tokens: int | None = None  # that prefill computes; None = the whole context
    dtype: str = "auto"  # of the weights, and of the arithmetic
    kv_dtype: str = "auto"  # as the weights
    kv_layout: str = "full"
    prefill_chunk_tokens: int = 512
    drafter: str = "none"
    drafter_options: dict[str, Any] = field(default_factory=dict)
    acceptance: float | None = None  # probability per draft token, those before it accepted; None = 0.7, a guess
    cost_ratio: float | None = None  # measured, of one draft token over a target step; None = computed
    memory_fraction: float = 0.9  # of the device's memory; the rest is for its driver, kernels and fragments

    def __post_init__(self) -> None:
        for name in ("batch", "context", "prompt_tokens", "prefill_chunk_tokens"):
            value = getattr(self, name)
            if name == "prompt_tokens" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
                raise ConfigError(f"{name}={value!r}; allowed: a whole number from 1 to {_MOST:,}")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise ConfigError(f"acceptance={self.acceptance!r}; allowed: 0 to 1, the share of draft tokens accepted")
        if self.cost_ratio is not None and not (self.cost_ratio >= 0 and isfinite(self.cost_ratio)):
            raise ConfigError(
                f"cost_ratio={self.cost_ratio!r}; allowed: a number from 0, the cost of a draft token in target steps"
            )
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction={self.memory_fraction!r}; allowed: above 0, at most 1")
        if (self.prompt_tokens or 0) > self.context:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens} are more than context={self.context}, which counts the prompt too"
            )
        choose("kv_layout", self.kv_layout, LAYOUTS)
        choose("kv_dtype", self.kv_dtype, ("auto", *KV_BYTES))
        choose("dtype", self.dtype, ("auto", *WEIGHT_BYTES), _NO_WEIGHTS)


_NO_WEIGHTS = dict.fromkeys(
    ("int8", "int4", "fp8"), "weights in fewer bits are not planned for; for keys and values, kv_dtype;"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything found. Seconds are floors: the device at the rates it is sold with, and nothing else taking time."""

    model: PlannedModel
    device: Device
    workload: Workload
    dtype: str
    kv_dtype: str
    memory: dict[str, Any]
    work: ModelWork
    rates: Rates
    drafter: DrafterCost
    speculation: Speculation
    warnings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return self.workload.prompt_tokens or self.workload.context

    @property
    def prefill(self) -> Phase:
        """Return the prefill of one prompt."""
        return self._prefill(self.work)

    @property
    def decode(self) -> Phase:
        """Return a step of the whole batch, without drafting."""
        return self.work.decode(self.workload.batch, self.workload.context)

    @property
    def ttft_floor_s(self) -> float:
        """Return the least seconds from a request that waits for nobody to its first token."""
        return self.prefill.seconds

    @property
    def last_ttft_floor_s(self) -> float:
        """Return the least seconds to its first token for the last of a batch that comes together."""
        return self._prefill(self.work, self.workload.batch).seconds

    @property
    def tpot_floor_s(self) -> float:
        """Return the least seconds between two tokens of a request, without drafting."""
        return self.decode.seconds

    @property
    def best(self) -> Choice:
        return self.speculation.best(self.workload.batch)

    def _prefill(self, work: ModelWork, batch: int = 1) -> Phase:
        return work.prefill(self.prompt_tokens, self.workload.prefill_chunk_tokens, batch)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON can hold it. Seconds, bytes, FLOPs and FLOP/s, no prefixes.

        `*_even_experts_s` are estimates, of rows that choose experts evenly and independently; None without experts.
        """
        load, spread = self.workload, self.work.expected() if self.model.shape.experts else None
        return {
            "model": self._model(),
            "device": {**asdict(self.device), "flops_per_byte_balance": self.rates.balance},
            "workload": {
                **asdict(load),
                "dtype": self.dtype,
                "kv_dtype": self.kv_dtype,
                "prompt_tokens": self.prompt_tokens,
                "acceptance": self.speculation.acceptance,
            },
            "memory": self.memory,
            "prefill": {
                **self.prefill.to_dict(),
                "ttft_floor_s": self.ttft_floor_s,
                "last_ttft_floor_s": self.last_ttft_floor_s,
                "ttft_even_experts_s": self._prefill(spread).seconds if spread else None,
                "tokens_per_s_at_most": load.batch * self.prompt_tokens / self.last_ttft_floor_s,
            },
            "decode": {
                **self.decode.to_dict(),
                "tpot_floor_s": self.tpot_floor_s,
                "tpot_even_experts_s": spread.decode(load.batch, load.context).seconds if spread else None,
                "tokens_per_s_at_most": load.batch / self.tpot_floor_s,
            },
            "speculation": self._speculation() if self.drafter.name != "none" else None,
            "warnings": list(self.warnings),
            "assumptions": list(self.assumptions),
        }

    def _model(self) -> dict[str, Any]:
        model, shape = self.model, self.model.shape
        return {
            "name": model.name,
            "model_type": shape.model_type,
            "attention": shape.attention,
            "num_layers": shape.num_layers,
            "num_parameters": model.weights.total,
            "num_active_parameters": model.num_active,
            "counted_by": model.weights.source,
            "quantised_bits": model.weights.packed.bits(),
            "stored_bytes": None if model.stored is None else model.stored.num_bytes,
            "checkpoint_dtype": model.dtype,
            "max_positions": shape.max_positions,
            "windows": {str(window): count for window, count in shape.window_counts.items() if window is not None},
            "num_experts": None if shape.experts is None else shape.experts.num,
            "num_experts_per_token": None if shape.experts is None else shape.experts.chosen,
        }

    def _speculation(self) -> dict[str, Any]:
        batch, spec = self.workload.batch, self.speculation
        one = spec.at(batch, 1)
        # Where nothing fits at all, the answer is for a device that holds it, as the times are.
        most = min(MOST_BATCH, self.memory["max_batch"] or MOST_BATCH)
        return {
            "drafter": self.drafter.name,
            "acceptance": spec.acceptance,
            "cost_ratio": one.draft_s / spec.at(batch, 0).verify_s,
            "pays": spec.pays(batch),
            "best": self.best.to_dict(),
            "break_even_acceptance": spec.break_even(batch),
            "pays_at_batches": [list(ends) for ends in spec.paying_batches(most, also=(batch,))],
            "tried_up_to_batch": most,
            "curve": [choice.to_dict() for choice in spec.curve(batch)],
        }


def choose_dtype(wanted: str, model: PlannedModel, device: Device | None) -> str:
    """Return the number format: as wanted, else the checkpoint's if the device computes in it, else fp16 or fp32.

    Args:
        wanted: a format, or "auto".
        model: whose checkpoint may say one.
        device: None = this machine's CPU, where models are loaded in fp32 unless told otherwise.
    """
    found = choose("dtype", wanted, ("auto", *WEIGHT_BYTES), _NO_WEIGHTS)
    if found != "auto":
        return found
    if device is None:
        return "fp32"
    for name in (model.dtype or "fp16", "fp16", "fp32"):
        if name in device.flops_per_s:
            return name
    return next(iter(device.flops_per_s))


def make_plan(model: PlannedModel, device: Device, workload: Workload = Workload()) -> Plan:
    """Return what fits, the floors of both phases, and what drafting gives.

    Args:
        model: from `read_model`.
        device: from `find_device`, `custom_device` or `this_device`.
        workload: the load.

    Raises:
        ConfigError: the device does not compute in the dtype, or the drafter or one of its options is unknown.
        ModelLoadError: a draft model cannot be read.
    """
    dtype = choose_dtype(workload.dtype, model, device)
    wanted_kv = choose("kv_dtype", workload.kv_dtype, ("auto", *KV_BYTES))
    kv_dtype = dtype if wanted_kv == "auto" else wanted_kv
    rates = Rates(device.rate(dtype), device.bandwidth_bytes_per_s)
    weight_bytes = WEIGHT_BYTES[dtype]
    work = ModelWork(model, weight_bytes, KvStorage(model.shape, kv_dtype, workload.kv_layout), rates)
    expected = work.expected()  # rows of a draft wake experts of their own: what drafting gives is no floor's ratio
    drafter = drafter_cost(
        workload.drafter, Beside(expected, dtype, workload.context), workload.drafter_options, workload.cost_ratio
    )
    speculation = Speculation(
        DEFAULT_ACCEPTANCE if workload.acceptance is None else workload.acceptance,
        verify=lambda batch, k: expected.decode(batch, workload.context, k + 1).seconds,
        draft=drafter.seconds,
        most=drafter.most,
    )
    needs = MemoryNeeds(
        model=model,
        weight_bytes=model.weights.num_bytes(weight_bytes),
        kv=work.kv,
        value_bytes=weight_bytes,
        chunk_tokens=workload.prefill_chunk_tokens,
        rows_per_request=speculation.best(workload.batch).num_draft_tokens + 1,
        drafter_bytes=drafter.weight_bytes,
        drafter_kv=drafter.kv,
    )
    memory = needs.to_dict(
        workload.memory_fraction * device.memory_bytes, device.memory_bytes, workload.batch, workload.context
    )
    assumptions = _assumptions(model, device, workload, speculation.acceptance)
    if not memory["fits"]:
        assumptions.append("times are those of such a device with enough memory")
    return Plan(
        model=model,
        device=device,
        workload=workload,
        dtype=dtype,
        kv_dtype=kv_dtype,
        memory=memory,
        work=work,
        rates=rates,
        drafter=drafter,
        speculation=speculation,
        warnings=tuple(_warnings(model, device, workload, dtype)),
        assumptions=(*assumptions, *drafter.assumptions),
    )


def _warnings(model: PlannedModel, device: Device, load: Workload, dtype: str) -> list[str]:
    found = list(model.notes)
    limit = model.shape.max_positions
    if limit is not None and load.context > limit:
        found.append(f"context {load.context:,} is beyond the {limit:,} positions that the model was made for")
    if load.dtype == "auto" and model.dtype not in (None, dtype):
        found.append(f"the checkpoint is {model.dtype}; this plan is for {dtype}, give --dtype for another")
    idle = [name for name in ("acceptance", "cost_ratio") if getattr(load, name) is not None]
    if load.drafter == "none" and idle:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in idle)
        found.append(f"{names} {'has' if len(idle) == 1 else 'have'} no effect without a drafter; give --drafter")
    if load.drafter == "self_int8" and not device.is_cpu:
        found.append("specdec runs self_int8 on CPUs only; this plan shows what an int8 copy would be worth there")
    if load.drafter != "none" and device.is_cpu:
        found.append(
            "on CPUs a forward of a few rows costs more than these times say, so that drafting gives less and may "
            "lose where they let it win (docs/planner.md has measurements); draft_length='cost_aware' goes by "
            "measured times"
        )
    return found


def _assumptions(model: PlannedModel, device: Device, load: Workload, acceptance: float) -> list[str]:
    rates = "rates as measured here" if device.measured else "the vendor's peak rates"
    rates = "the rates as given" if device.name == "custom" else rates
    found = [
        f"floors: {rates}, all arithmetic beside all traffic, and no time for launches, scheduling or a network",
    ]
    if device.measured:
        found.append("prepacked copies of weights, which the engine may hold on CPUs, are not in the memory")
    if load.kv_layout == "full" and (model.shape.latent or any(model.shape.windows)):
        found.append("KV memory as specdec stores it: every position of every layer, latent attention expanded")
    if model.shape.experts is not None:
        found.append(
            "floors: all rows of a forward choose the same experts; the times for even choice and all times of "
            "drafting: each row chooses evenly and independently of the others, where real routers lie between"
        )
    if load.drafter != "none":
        guess = ", a guess: measure it with python -m specdec.eval.acceptance" if load.acceptance is None else ""
        found.append(
            f"each draft token is accepted with probability {acceptance:g}, given that those before it were{guess}"
        )
    return found

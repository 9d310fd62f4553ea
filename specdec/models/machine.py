"""What this machine and a runner do per second: read bandwidth, and t(M), the time of a forward of M rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.interfaces import Segment
from specdec.models.matmul import can_prepack, prepack, prepacked_linear
from specdec.models.runner import ModelRunner

_BYTES = 512 * 2**20  # far beyond any last-level cache
_REQUEST_ID = -2
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Timed:
    """What is timed, and what puts its cache back and is not."""

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


def _wait(device: torch.device) -> None:
    """Wait for what an accelerator still has to do, so that a clock read next includes it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _best_s(call: Callable[[], object], repeats: int = 7, device: torch.device = _CPU) -> float:
    """Return the shortest of several timings: what a machine can do is hidden by noise, never exceeded by it."""
    call()
    times = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def read_bandwidth_bytes_per_s(device: torch.device = _CPU) -> float:
    """Return the fastest of three ways to read 512 MiB once: a sum, an integer sum and, on CPUs, a one-row product."""
    # A generator of its own: what a caller samples must not depend on a measurement.
    values = torch.randn(_BYTES // 4, generator=torch.Generator().manual_seed(0)).to(device)
    calls: list[Callable[[], object]] = [
        values.sum,
        lambda: values.view(torch.int32).sum(dtype=torch.int32),
    ]
    with torch.inference_mode():
        if can_prepack(values):
            packed = [prepack(part.view(-1, 1024)) for part in values.chunk(8)]
            row = values[:1024].view(1, 1024)
            calls.append(lambda: [prepacked_linear(row, p, None) for p in packed])
        return _BYTES / min(_best_s(call, device=device) for call in calls)


def matmul_flops_per_s(dtype: torch.dtype, device: torch.device = _CPU) -> float:
    """Return the best FLOP/s of square products, and on CPUs of the prepacked ones that a runner uses.

    Raises:
        RuntimeError: the device has no products in `dtype`.
    """
    size = 1024 if device.type == "cpu" else 8192
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    calls: list[Callable[[], object]] = [lambda: left @ right]
    with torch.inference_mode():
        if can_prepack(right):
            packed = prepack(right)
            calls.append(lambda: prepacked_linear(left, packed, None))
        return 2 * size**3 / min(_best_s(call, device=device) for call in calls)


def weight_bytes_per_step(model: Any) -> int:
    """Return the weight bytes one decode step reads; of an untied embedding it reads one row, counted as none."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    parameters = {id(p): p for p in model.parameters() if tied or p is not embedding}
    return sum(p.numel() * p.element_size() for p in parameters.values())


def weight_bytes_beside(model: Any, tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors that are not a model's own, each storage once: what a drafter adds to it."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters() if not p.is_meta}
    added = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not tensor.is_meta and storage.data_ptr() not in known:
            added[storage.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(added.values())


def measure_step_times(
    runner: ModelRunner,
    model: Any = None,
    *,
    rows: Sequence[int] = (1, 2, 4, 8, 16, 32),
    context: int = 128,
) -> list[dict[str, float]]:
    """Return t(M): median seconds of a forward of M rows after `context` tokens, for each M.

    Timed is the forward, which appends to a cache; making room for its rows and dropping them again is not.

    Args:
        runner: whose forward is timed.
        model: a transformers model whose own forward with its own cache is timed in turn with it, if given.
        rows: the Ms.
        context: committed tokens before the forward.

    Returns:
        One {"rows", "runner_s", "transformers_s"} per M.
    """
    table = []
    with _after_context(runner, context, max(rows)) as ids:
        for m in rows:
            calls = {"runner_s": _our_call(runner, ids[context : context + m])}
            if model is not None:
                calls["transformers_s"] = _transformers_call(model, ids.to(model.device), context, m)
            table.append({"rows": float(m), **_median_in_turn(calls, runner.device)})
    return table


def step_seconds(runner: ModelRunner, rows: Sequence[int], *, context: int, repeats: int) -> list[float]:
    """Return t(M) in the order of `rows`: median seconds as in `measure_step_times`, all Ms timed in turn.

    In turn, so that whatever else the machine does meanwhile falls on all of them alike.
    """
    with _after_context(runner, context, max(rows)) as ids:
        calls = {str(m): _our_call(runner, ids[context : context + m]) for m in rows}
        return list(_median_in_turn(calls, runner.device, repeats).values())


@contextmanager
def _after_context(runner: ModelRunner, context: int, most_rows: int) -> Iterator[torch.Tensor]:
    """Yield [context + most_rows] token ids, the first `context` of which a request of the runner's cache holds."""
    ids = torch.arange(context + most_rows, device=runner.device) % runner.vocab_size
    cache = runner.cache
    cache.open(_REQUEST_ID, context + most_rows)
    try:
        cache.reserve(_REQUEST_ID, context)
        runner.forward([Segment(_REQUEST_ID, ids[:context], None, torch.arange(1))])
        cache.commit(_REQUEST_ID, torch.arange(context))
        yield ids
    finally:
        cache.release(_REQUEST_ID)


def _our_call(runner: ModelRunner, ids: torch.Tensor) -> _Timed:
    segment = Segment(_REQUEST_ID, ids, None, torch.arange(len(ids)))
    return _Timed(lambda: runner.forward([segment]), before=lambda: runner.cache.reserve(_REQUEST_ID, len(ids)))


def _transformers_call(model: Any, ids: torch.Tensor, context: int, m: int) -> _Timed:
    from transformers import DynamicCache

    past = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids[None, :context], past_key_values=past, use_cache=True)

    def call() -> None:
        with torch.inference_mode():
            model(input_ids=ids[None, context : context + m], past_key_values=past, use_cache=True)

    return _Timed(call, after=lambda: past.crop(-m))


def _median_in_turn(calls: dict[str, _Timed], device: torch.device, repeats: int = 11) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, timed in calls.items():
            timed.before()
            _wait(device)
            start = time.perf_counter()
            timed.call()
            _wait(device)
            seconds = time.perf_counter() - start
            timed.after()
            if repeat >= 2:
                times[name].append(seconds)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}

"""Smoothing factors are constants of a model and of what it is calibrated on; nobody who asked before changes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kv.codecs import QuantisedKV
from specdec.models import int8_copy as copying
from specdec.models.build import RunnerConfig, build_runner, runner_for
from specdec.models.int8_copy import Calibration, calibration_of, int8_copy
from specdec.models.kv_smoothing import kv_codec
from specdec.models.runner import ModelRunner
from tests.models.architectures import build, model_of, named


def tokenizer(text: str, **options: Any) -> Any:
    """A token per character."""
    return SimpleNamespace(input_ids=torch.tensor([[ord(c) % 64 for c in text]]))


def shifted(text: str, **options: Any) -> Any:
    """Another one."""
    return SimpleNamespace(input_ids=(tokenizer(text).input_ids + 1) % 64)


def same(a: Mapping[int, Tensor], b: Mapping[int, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[i], b[i]) for i in a)


def factors_of(runner: ModelRunner, *order: Any) -> dict[Any, Mapping[int, Tensor]]:
    return {chosen: kv_codec("int8", runner, chosen).smoothing for chosen in order}


def test_the_order_in_which_they_are_asked_for_changes_nothing() -> None:
    fresh = [build_runner(build(named("llama"))) for _ in range(3)]  # the same weights, and programs of their own
    first = factors_of(fresh[0], None, tokenizer, shifted)
    second = factors_of(fresh[1], shifted, tokenizer, None)
    third = factors_of(fresh[2], tokenizer)
    assert all(same(first[chosen], second[chosen]) for chosen in first)
    assert same(first[tokenizer], third[tokenizer])
    assert not same(first[tokenizer], first[None])
    assert not same(first[tokenizer], first[shifted])


@pytest.mark.parametrize("before", [(), (None,), (shifted,)], ids=["first", "after samples", "after another text"])
def test_nor_does_it_for_a_runner(before: tuple[Any, ...]) -> None:
    model = build(named("llama"))
    config = RunnerConfig(kv_dtype="int4")
    for chosen in before:
        runner_for(model, config, chosen)
    codec = runner_for(model, config, tokenizer).cache.codec
    assert isinstance(codec, QuantisedKV)
    assert same(codec.smoothing, kv_codec("int8", build_runner(build(named("llama"))), tokenizer).smoothing)
    assert runner_for(model, config, tokenizer) is runner_for(model, config, tokenizer)
    assert runner_for(model, RunnerConfig(), tokenizer) is runner_for(model), "exact KV is calibrated on nothing"


def test_calibrated_once_per_text(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = build_runner(build(named("llama")))
    calls: list[int] = []
    real = Calibration.ids

    def counted(self: Calibration, runner: ModelRunner) -> Tensor:
        calls.append(1)
        return real(self, runner)

    monkeypatch.setattr(Calibration, "ids", counted)
    for name in ("int8", "int4", "int8"):
        for chosen in (None, tokenizer):
            kv_codec(name, runner, chosen)
    assert len(calls) == 2


def test_another_models_tokenizer_is_not_used() -> None:
    runner = runner_for(model_of(named("llama")))
    assert calibration_of(runner, tokenizer).text_ids is not None
    wide = lambda text, **options: SimpleNamespace(input_ids=torch.tensor([[1, runner.vocab_size]]))  # noqa: E731
    none = lambda text, **options: SimpleNamespace(input_ids=torch.zeros(1, 0, dtype=torch.int64))  # noqa: E731
    assert calibration_of(runner, wide) == calibration_of(runner, none) == Calibration(None)


def test_an_int8_copy_is_of_its_own_text_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "LEAST_LINEAR_SHARE", 0.5)
    runner = build_runner(build(named("llama")))
    of_samples, of_text = int8_copy(runner, None).program, int8_copy(runner, tokenizer).program
    assert of_samples is not of_text
    assert int8_copy(runner, tokenizer).program is of_text
    assert int8_copy(runner, None).program is of_samples


class Remote(torch.Tensor):
    """Probabilities on another device, for which a generator of the CPU cannot draw."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.multinomial:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) if function is torch.Tensor.cpu else result


def test_samples_are_drawn_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = build_runner(build(named("llama")))
    want = Calibration(None).ids(runner)
    real = copying.base_forward
    monkeypatch.setattr(copying, "base_forward", lambda model, ids: real(model, ids).clone().as_subclass(Remote))
    assert torch.equal(Calibration(None).ids(runner), want)

"""The target's own int8 copy, as a program over the same KV cache. Calibrates itself."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import IncompatibleDrafterError
from specdec.models import lean
from specdec.models.clone import clone_sharing_parameters
from specdec.models.hosted import base_forward
from specdec.models.hosting import same_kind
from specdec.models.int8 import Int8Linear, activation_maxima
from specdec.models.matmul import is_plain_linear
from specdec.models.progress import report
from specdec.models.quantised import quantisation_of
from specdec.models.runner import ModelRunner, Program
from specdec.models.wrapped import adapter_parts

log = logging.getLogger("specdec")

# Of the weight bytes a decode step reads, this share must be in Linear layers for an int8 copy to be much faster.
LEAST_LINEAR_SHARE = 0.9
CALIBRATION_TEXT = """\
The harbour was quiet when Maria opened the bakery at five in the morning. She weighed 1,250 grams of
flour, added 18 g of salt, and wrote the date - 3 March 2021 - on the board. "Two rye, one plain," she said. Why does
bread rise? Yeast turns sugar into carbon dioxide, which the gluten holds.

def mean(values: list[float]) -> float:
    total = sum(values)
    return total / len(values) if values else 0.0

1. Preheat the oven to 220 degrees. 2. Let the dough rest for 40 minutes. 3. Bake until golden brown.
Question: A train travels 180 km in 2.5 hours. What is its speed? Answer: 180 / 2.5 = 72 km/h.
Dear Mr. Okafor, thank you for your letter of 12 June; please find the signed contract attached. Kind regards.
"""

_PROGRAMS: weakref.WeakKeyDictionary[Any, dict[Calibration, Program]] = weakref.WeakKeyDictionary()
_PROGRAM_BYTES: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def int8_copy(runner: ModelRunner, tokenizer: Any | None) -> ModelRunner:
    """Return a runner of the target's int8 copy that shares its KV cache; built once per target program and text.

    Raises:
        IncompatibleDrafterError: the target is on CUDA, or too little of it is Linear layers.
    """
    known = _PROGRAMS.setdefault(runner.program, {})
    calibration = calibration_of(runner, tokenizer)
    program = known.get(calibration)
    if program is None:
        refuse_unsuited(runner)
        program, num_bytes = _build(runner, calibration.ids(runner))
        _PROGRAM_BYTES[program] = num_bytes
        known[calibration] = program  # last: who finds it finds the other
    return runner.sharing_cache(program, extra_weight_bytes=_PROGRAM_BYTES[program])


def refuse_unsuited(runner: ModelRunner) -> None:
    """Raise IncompatibleDrafterError where an int8 copy cannot pay."""
    name = type(runner.model).__name__
    if runner.device.type != "cpu":
        raise IncompatibleDrafterError(
            f"drafter 'self_int8' runs on CPUs; on {runner.device.type} it has not been measured to be faster. "
            "Use drafter='ngram' or 'draft_model'"
        )
    if any(p.device.type == "meta" for p in runner.model.parameters()):
        raise IncompatibleDrafterError(
            f"drafter 'self_int8' copies the weights and those of {name} are offloaded; use drafter='ngram'"
        )
    method = quantisation_of(runner.model)
    if method is not None:
        raise IncompatibleDrafterError(
            f"drafter 'self_int8' makes an int8 copy of full-precision weights and those of {name} are quantised "
            f"already ({method}); use drafter='ngram' or 'draft_model'"
        )
    share = linear_share(runner.model)
    if share < LEAST_LINEAR_SHARE:
        raise IncompatibleDrafterError(
            f"drafter 'self_int8' needs {LEAST_LINEAR_SHARE:.0%} of the decoded weight bytes in Linear layers and "
            f"{name} has {share:.1%} there; use drafter='ngram' or 'draft_model'"
        )


def linear_share(model: Any) -> float:
    """Return the share of Linear layers in the weight bytes that one decode step reads (embedding rows are not)."""
    linear = {id(m.weight): m.weight for m in model.modules() if is_plain_linear(m)}
    embedding = model.get_input_embeddings().weight
    read = {id(p): p for p in model.parameters() if p is not embedding or id(p) in linear}

    def num_bytes(tensors: dict[int, Tensor]) -> int:
        return sum(t.numel() * t.element_size() for t in tensors.values())

    return num_bytes(linear) / max(1, num_bytes(read))


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a model is calibrated on: a text in its tokens, or None = its own samples.

    What is calibrated is kept by it: the first who asks does not decide for those after him.
    """

    text_ids: tuple[int, ...] | None

    def ids(self, runner: ModelRunner) -> Tensor:
        """Return [n, length] token ids on the runner's device, each row a text of its own."""
        if self.text_ids is None:
            return _own_samples(runner)
        return torch.tensor([self.text_ids], device=runner.device)


def calibration_of(runner: ModelRunner, tokenizer: Any | None) -> Calibration:
    """Return what a model is calibrated on: the built-in text where its tokenizer is given."""
    if tokenizer is None:
        return Calibration(None)
    ids = tokenizer(CALIBRATION_TEXT, return_tensors="pt").input_ids[0].tolist()
    if not ids or max(ids) >= runner.vocab_size:  # it is another model's tokenizer
        return Calibration(None)
    return Calibration(tuple(ids[: runner.max_positions or len(ids)]))


def _own_samples(runner: ModelRunner) -> Tensor:
    """Return [n, length] token ids that the model itself says, the same ones each time."""
    num, length = 8, min(24, runner.max_positions or 24)
    ids = torch.linspace(0, runner.vocab_size - 1, num).long()[:, None].to(runner.device)
    generator = torch.Generator().manual_seed(0)  # of the CPU, so the draws are made there
    while ids.shape[1] < length:
        probs = torch.softmax(base_forward(runner.model, ids)[:, -1].float(), dim=-1).cpu()
        ids = torch.cat([ids, torch.multinomial(probs, 1, generator=generator).to(ids.device)], dim=1)
    return ids


def _build(runner: ModelRunner, ids: Tensor) -> tuple[Program, int]:
    """Return the int8 program and the bytes of its weights."""
    model = runner.model
    name, num_linears, num_fused = type(model).__name__, sum(is_plain_linear(m) for m in model.modules()), 0
    report(f"calibrating the int8 copy of {name}", 0, num_linears)
    maxima = activation_maxima(model, lambda: base_forward(model, ids))

    made: list[Int8Linear] = []

    def fuse(role: str, linears: Sequence[nn.Linear]) -> Int8Linear:
        nonlocal num_fused
        made.append(Int8Linear(linears, maxima[linears[0]]))
        num_fused += len(linears)
        report(f"making the int8 copy of {name}", min(num_fused, num_linears), num_linears)
        return made[-1]

    if isinstance(runner.program, lean.LeanProgram):
        program: Program = lean.LeanProgram(model, fuse)
        return program, sum(layer.num_bytes for layer in made)
    clone = clone_sharing_parameters(model)
    originals = dict(model.named_modules())
    adapters = adapter_parts(clone)  # they stay in full precision, around int8 layers
    for name, parent in list(clone.named_modules()):
        for child_name, child in list(parent.named_children()):
            original = originals[f"{name}.{child_name}" if name else child_name]
            # A Linear the calibration never reached (an expert nobody chose) stays as it is.
            if is_plain_linear(child) and child not in adapters and original in maxima:
                setattr(parent, child_name, fuse(child_name, [original]))
    try:
        base_forward(clone, ids[:, :2])
    except (AttributeError, RuntimeError, TypeError) as error:
        raise IncompatibleDrafterError(
            f"drafter 'self_int8': {type(model).__name__} does not run with int8 layers ({error}); if it has adapters, "
            "merge them into the weights first (merge_and_unload()), or use drafter='ngram'"
        ) from error
    return same_kind(runner.program, clone), sum(layer.num_bytes for layer in made)

"""Trying an architecture on a small random instance of it in float32, from its config alone.

The real weights are too large to try everything on, and in half precision they hide small faults: a lost window moves
bfloat16 logits of an 11-token prompt not at all. A shrunk instance (`models/shrink.py`) has every kind of layer,
windows of 8 positions and prompts that cross them, and float32 logits that must agree to 2e-5.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specdec.errors import UnsupportedModelError
from specdec.interfaces import FeatureSpec, Segment
from specdec.kv.cache import KVCache
from specdec.models import lean
from specdec.models.compatibility import Refusal, why_chains_only
from specdec.models.conformance import LONG, TOLERANCE, Reference, compare, take_reference
from specdec.models.hosted import base_forward
from specdec.models.hosting import Hosting, Level, host
from specdec.models.matmul import FusedLinear
from specdec.models.pretrained import quiet

Verdict = Literal["trees", "chains", "refused", "unknown"]

_MAX_PARAMETERS = 5_000_000
# A second draw of weights decides before an architecture is refused: two experts may tie by chance, a lost window not.
_SEEDS = (0, 1)


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Whether and how an architecture runs. "unknown": nothing speaks against it, but it could not be tried."""

    verdict: Verdict
    feature: str | None = None  # what keeps it from running, or from trees
    advice: str = ""
    level: Level | None = None
    tree_error: float | None = None  # largest |difference| over the largest |logit| on the shrunk instance
    chain_error: float | None = None
    lean: bool | None = None  # the lean forward conforms too; None = it does not apply
    kv_values_per_token: int | None = None  # of the shrunk instance, keys and values of all layers

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def refused(refusal: Refusal) -> Compatibility:
    """Return the verdict that a named refusal means."""
    return Compatibility("refused", refusal.reason, refusal.advice)


def probe_small(small: Any, model_class: Any) -> Compatibility:
    """Return the verdict of the comparison, for a config that `shrink` made.

    The static gate (`compatibility.find_refusal`) comes before; `verdicts.verdict_of` does both.
    """
    found = not_shrunk(None)
    for seed in _SEEDS:
        try:
            model = small_instance(small, model_class, seed)
            forward = partial(base_forward, model)
            reference = take_reference(forward, model.config.vocab_size, torch.device("cpu"), LONG, seed)
        except Exception as error:  # the model's own code
            return not_shrunk(error)
        if reference.is_broken():
            return not_shrunk(ArithmeticError("the random instance gives NaN or infinite logits"))
        found = _compared(model, reference)
        if found.verdict != "refused":
            break
    return found


def not_shrunk(error: Exception | None) -> Compatibility:
    """Return the verdict on an architecture that no small instance could be made of."""
    reason = "" if error is None else f" ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return Compatibility(
        "unknown",
        f"no small random instance of it could be built and run{reason}",
        "load the model: its own weights are compared with transformers before the first token",
    )


def _compared(model: Any, reference: Reference) -> Compatibility:
    name = type(model).__name__
    try:
        hosting = host(model, reference)
    except UnsupportedModelError as error:
        return refused(Refusal("attention of its own", str(error)))
    except Exception as error:  # the model's own code on our inputs
        return refused(
            Refusal("code of its own", f"{name} over specdec's cache raises {type(error).__name__}: {error}")
        )
    if not hosting.chains:
        detail = f"{name} over specdec's cache is off by {hosting.chain_error:.2g} of the largest logit"
        return refused(Refusal(_suspect(model.config), detail))
    return Compatibility(
        "trees" if hosting.trees else "chains",
        None if hosting.trees else why_chains_only(model.config),
        "" if hosting.trees else "it runs with drafters of chains; drafted trees are dropped",
        level=hosting.level,
        tree_error=hosting.tree_error,
        chain_error=hosting.chain_error,
        lean=_lean_conforms(model, reference),
        kv_values_per_token=_kv_values(hosting, reference),
    )


def _suspect(config: Any) -> str:
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    return f"attention masks ({', '.join(kinds)})" if kinds else "attention of its own"


def _lean_conforms(model: Any, reference: Reference) -> bool | None:
    if not lean.applies_to(model):
        return None
    try:
        program = lean.LeanProgram(model, lambda role, linears: FusedLinear(linears, None))
        return compare(program, reference) <= TOLERANCE[reference.dtype]
    except (AttributeError, RuntimeError, TypeError):
        return False


def _kv_values(hosting: Hosting, reference: Reference) -> int:
    cache = KVCache()
    cache.open(0, 1)
    cache.reserve(0, 1)
    segment = Segment(0, reference.last, None, torch.arange(1))
    with torch.inference_mode():
        hosting.program(cache, cache.plan([segment]), reference.last, None, FeatureSpec())
    return cache.bytes_per_token // reference.dtype.itemsize


def small_instance(small: Any, model_class: Any, seed: int = 0) -> Any:
    """Return a random float32 model of a shrunk config, in eval mode, whose output depends on far tokens."""
    with quiet(), _own_randomness(seed):
        with torch.device("meta"):
            count = sum(p.numel() for p in _instance(small, model_class).parameters())
        if count > _MAX_PARAMETERS:
            raise ValueError(f"the shrunk config still has {count} parameters")
        model = _instance(small, model_class).eval().requires_grad_(False)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            parameter.copy_(_random(name, parameter, module, module is head, generator))
    return model


def _instance(small: Any, model_class: Any) -> Any:
    # "eager" is the definition of what a model computes; faster kernels leave out score caps in some releases.
    return model_class._from_config(small, dtype=torch.float32, attn_implementation="eager")


@contextlib.contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _random(name: str, parameter: Tensor, module: nn.Module, is_head: bool, generator: torch.Generator) -> Tensor:
    """Return weights that keep activations near 1, let the context decide, and make logits large and different."""
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() < 2:
        return noise * 0.1 + (1.0 if name.endswith("weight") else 0.0)
    if isinstance(module, nn.Embedding):
        return noise * 0.5
    # Attention scores of about 2, and outputs that outweigh the residual stream.
    return noise * (3.0 if is_head else 1.8) / math.sqrt(parameter.shape[-1])

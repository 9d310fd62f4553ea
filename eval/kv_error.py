"""What a quantised KV cache costs in accuracy: the model's distributions over it against those over the exact one.

    python -m specdec.eval.kv_error target=smollm2 kv_dtype=int8

Exit code 0 = the mean KL divergence is within `most_kl`, or no such bound is given; 1 = it is not, 2 = bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor

from specdec.api import LLM
from specdec.errors import ConfigError
from specdec.eval.entry import run_and_write
from specdec.eval.hydra_main import hydra_main
from specdec.eval.llm_options import engine_options
from specdec.eval.prompts import encode, load_texts
from specdec.interfaces import Segment
from specdec.provenance import provenance

console = Console()
_REQUEST_ID = -4
_FIGURES = ("kl", "max_logit_difference", "top1")


def measure(config: Any) -> dict[str, Any]:
    """Return mean and largest divergence over prompts and the exact model's own answers to them."""
    if not isinstance(config.max_new_tokens, int) or config.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={config.max_new_tokens!r}; allowed: an integer >= 1")
    if config.kv_dtype is None:
        raise ConfigError("kv_dtype=null is exact KV, which would be compared with itself; give int8 or int4")
    engine = engine_options(config)
    if "kv_dtype" in engine:
        raise ConfigError("engine.kv_dtype goes to both sides of the comparison; give kv_dtype alone")
    exact = LLM(config.target.name, dtype=config.target.dtype, **engine)
    rough = LLM(exact.model, tokenizer=exact.tokenizer, kv_dtype=config.kv_dtype, **engine)
    texts, _ = load_texts(config.prompts)
    prompts = encode(exact, texts, config.prompts.chat)
    answers = exact.generate(prompts, max_new_tokens=config.max_new_tokens, temperature=0.0)
    found: dict[str, list[Tensor]] = {name: [] for name in _FIGURES}
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [*prompt, *answer.token_ids]
        for name, values in _compare(logits_of(exact, ids), logits_of(rough, ids)).items():
            found[name].append(values)
    figures = {name: torch.cat(parts) for name, parts in found.items()}
    bytes_per_token = [llm.engine.target.cache.bytes_per_token for llm in (exact, rough)]
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "num_tokens": len(figures["kl"]),
        "mean_kl": float(figures["kl"].mean()),
        "max_kl": float(figures["kl"].max()),
        "max_logit_difference": float(figures["max_logit_difference"].max()),
        "top1_agreement": float(figures["top1"].mean()),
        "bytes_per_token": bytes_per_token[1],
        "exact_bytes_per_token": bytes_per_token[0],
        "share_of_bytes": bytes_per_token[1] / bytes_per_token[0],
    }


def logits_of(llm: LLM, token_ids: Sequence[int], chunk: int = 64) -> Tensor:
    """Return the target's logits [n, V] after every token, in chunks as a long prompt is prefilled."""
    runner = llm.engine.target
    runner.cache.open(_REQUEST_ID, len(token_ids))
    parts = []
    try:
        for ids in torch.tensor(list(token_ids)).split(chunk):
            runner.cache.reserve(_REQUEST_ID, len(ids))
            parts.append(runner.forward([Segment(_REQUEST_ID, ids, None, torch.arange(len(ids)))]).logits)
            runner.cache.commit(_REQUEST_ID, torch.arange(len(ids)))
    finally:
        runner.cache.release(_REQUEST_ID)
    return torch.cat(parts)


def _compare(exact: Tensor, rough: Tensor) -> dict[str, Tensor]:
    """Return [n] figures of logits [n, V]: KL(exact || rough) in nats, largest |difference|, 1 if the argmax agrees."""
    left, right = exact.double().log_softmax(-1), rough.double().log_softmax(-1)
    return {
        "kl": (left.exp() * (left - right)).sum(-1),
        "max_logit_difference": (exact - rough).abs().amax(-1),
        "top1": (exact.argmax(-1) == rough.argmax(-1)).double(),
    }


def show(result: dict[str, Any]) -> bool:
    """Print the figures and the verdict; return whether the mean divergence is within its bound, if there is one."""
    config = result["config"]
    table = Table(title=f"{config['kv_dtype']} KV against exact KV, {result['num_tokens']} tokens", show_header=False)
    for name, value in (
        ("mean KL, nats", f"{result['mean_kl']:.2e}"),
        ("largest KL", f"{result['max_kl']:.2e}"),
        ("largest logit difference", f"{result['max_logit_difference']:.2f}"),
        ("top-1 agreement", f"{result['top1_agreement']:.2%}"),
        ("bytes per token", f"{result['bytes_per_token']} of {result['exact_bytes_per_token']}"),
        ("share of bytes", f"{result['share_of_bytes']:.3f}"),
    ):
        table.add_row(name, value)
    console.print(table)
    most = config["most_kl"]
    if most is None:
        return True
    good = bool(result["mean_kl"] <= most)  # NaN is not
    console.print(f"verdict: mean KL is {'' if good else 'NOT '}within {most:g}", highlight=False)
    return good


@hydra_main("kv_error")
def main(config: DictConfig) -> None:
    """Measure, print, write; the exit code says whether the bound holds."""
    sys.exit(0 if run_and_write(config, "kv_error", measure, show) else 1)


if __name__ == "__main__":
    main()

"""How much faster: a drafter, the same engine without drafting, and transformers' generate(), in one run.

python -m specdec.eval.speedup drafter=self_int8 prompts=jsonl prompts.path=FILE
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdec.api import LLM, measure_step_times, read_bandwidth_bytes_per_s, weight_bytes_per_step
from specdec.errors import ConfigError
from specdec.eval.entry import run_and_write
from specdec.eval.llm_options import llm_options
from specdec.eval.prompts import encode, load_texts
from specdec.eval.ratios import speedup
from specdec.eval.timing import Sample, engine_variant, run_rotated, transformers_variant
from specdec.provenance import provenance
from specdec.stats import total

console = Console()


def measure(config: Any) -> dict[str, Any]:
    """Run the comparison a config describes and return everything that was measured."""
    if config.repeats < 1 or config.max_new_tokens < 2:
        raise ConfigError(
            f"repeats={config.repeats}, max_new_tokens={config.max_new_tokens}; allowed: repeats >= 1 and at least 2 "
            "tokens, the first of which is prefill's"
        )
    engine: dict[str, Any] = OmegaConf.to_container(config.engine, resolve=True) or {}
    base = LLM(config.target.name, dtype=config.target.dtype, drafter="none", **engine)
    drafting = _drafting(config, base)
    texts, num_left_out = load_texts(config.prompts)
    prompts = encode(base, texts, config.prompts.chat)
    how = (config.max_new_tokens, config.temperature, config.seed)
    variants = {"none": engine_variant(base, *how)}
    if config.drafter.name != "none":
        variants[config.drafter.name] = engine_variant(drafting, *how)
    for name, settings in config.beside.items():
        if name in variants:
            raise ConfigError(f"beside.{name}: this run measures {name} already")
        variants[name] = engine_variant(
            _drafting(config, base, drafter=name, drafter_options={}, **(settings or {})), *how
        )
    if config.transformers:
        variants["transformers"] = transformers_variant(base.model, *how)
    with Progress(console=console, transient=True) as progress:
        samples = run_rotated(variants, prompts, config.repeats, progress)
    lossless = drafting.engine.verifiers.sampled.lossless
    result = {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "num_prompts": len(prompts),
        "num_prompts_left_out": num_left_out,
        "lossless": lossless,
        "variants": {name: _summary(values) for name, values in samples.items()},
        "speedups": _speedups(samples),
        "identity": _identity(samples),
        "extra_weight_bytes": base.engine.target.extra_weight_bytes,
        "kv_bytes_per_token": base.engine.target.cache.bytes_per_token,
        "samples": {
            name: [{k: v for k, v in asdict(s).items() if k not in ("token_ids", "stats")} for s in values]
            for name, values in samples.items()
        },
    }
    if config.step_times:
        result["step_times"] = measure_step_times(base.engine.target, base.model if config.transformers else None)
        if base.model.device.type == "cpu":  # whose read bandwidth is measured
            result["read_bandwidth_bytes_per_s"] = read_bandwidth_bytes_per_s()
            result["weight_bytes_per_step"] = weight_bytes_per_step(base.model)
    return result


def _drafting(config: Any, base: LLM, **own: Any) -> LLM:
    """Return the same target with the config's drafter, or another one; `own` options go before the config's."""
    return LLM(base.model, tokenizer=base.tokenizer, **{**llm_options(config), "dtype": None, **own})


def _summary(samples: list[Sample]) -> dict[str, Any]:
    decoded = sum(s.num_tokens - 1 for s in samples)
    summary: dict[str, Any] = {
        "decode_tokens_per_s": decoded / sum(s.decode_s for s in samples),
        "tokens_per_s_e2e": sum(s.num_tokens for s in samples) / sum(s.total_s for s in samples),
        "ttft_s": sorted(s.ttft_s for s in samples)[len(samples) // 2],
    }
    stats = [s.stats for s in samples if s.stats is not None]
    if stats:
        whole = total(stats)
        summary |= {
            "acceptance_rate": whole.acceptance_rate,
            "acceptance_length": whole.acceptance_length,
            "acceptance_at_unconditional": whole.acceptance_at_unconditional,
            "acceptance_at_conditional": whole.acceptance_at_conditional,
            "prefill_tokens_per_s": whole.prefill_tokens_per_s,
            "draft_s": whole.draft_s,
            "verify_s": whole.verify_s,
            "other_s": whole.other_s,
        }
    return summary


def _speedups(samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    found = []
    for baseline in ("none", "transformers"):
        for name, values in samples.items():
            if baseline in samples and name not in (baseline, "transformers"):
                decode = speedup(samples[baseline], values, lambda s: s.decode_s)
                e2e = speedup(samples[baseline], values, lambda s: s.total_s)
                found.append({"variant": name, "over": baseline, "decode": asdict(decode), "e2e": asdict(e2e)})
    return found


def _identity(samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Return, per variant, how many runs gave the tokens of "none", and where the first others parted."""
    report: dict[str, Any] = {}
    for name, values in samples.items():
        parted = []
        for ours, theirs in zip(samples["none"], values, strict=True):
            pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if first is not None:
                parted.append({"prompt": ours.prompt, "repeat": ours.repeat, "position": first})
        report[name] = {"equal": len(values) - len(parted), "of": len(values), "parted": parted}
    return report


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)


def show(result: dict[str, Any]) -> None:
    """Print the tables of a result."""
    floor = None
    if "read_bandwidth_bytes_per_s" in result:
        floor = result["read_bandwidth_bytes_per_s"] / result["weight_bytes_per_step"]
    lossy = "" if result["lossless"] else " (LOSSY verifier)"
    table = Table(title=f"{result['num_prompts']} prompts, {result['config']['repeats']} repeats{lossy}")
    for column in ("", "decode/s", "floor", "e2e/s", "TTFT ms", "length", "rate", "= none"):
        table.add_column(column, justify="right" if column else "left")
    for name, v in result["variants"].items():
        same = result["identity"][name]
        share = "-"
        if floor is not None:
            # Per target forward: what drafting saves is forwards, not bytes per forward.
            share = f"{v['decode_tokens_per_s'] / (v.get('acceptance_length') or 1.0) / floor:.0%}"
        table.add_row(
            name,
            _number(v["decode_tokens_per_s"]),
            share,
            _number(v["tokens_per_s_e2e"]),
            _number(1e3 * v["ttft_s"]),
            _number(v.get("acceptance_length"), ".2f"),
            _number(v.get("acceptance_rate"), ".3f"),
            f"{same['equal']}/{same['of']}",
        )
    console.print(table)
    console.print(
        "decode/s, e2e/s: tokens per second; floor: share of the CPU's read bandwidth that target forwards reach; "
        "length, rate: acceptance; = none: runs with the ids of the undrafted run"
    )
    for s in result["speedups"]:
        d, e = s["decode"], s["e2e"]
        console.print(
            f"{s['variant']} over {s['over']}: decode {d['median']:.2f}x [{d['low']:.2f}, {d['high']:.2f}], "
            f"end to end {e['median']:.2f}x [{e['low']:.2f}, {e['high']:.2f}]",
            highlight=False,
        )
    if "step_times" in result:
        _show_step_times(result)


def _show_step_times(result: dict[str, Any]) -> None:
    table = Table(title="t(M): one forward of M rows after 128 tokens")
    for column in ("M", "engine ms", "transformers ms", "ratio"):
        table.add_column(column, justify="right")
    for row in result["step_times"]:
        ours, theirs = row["runner_s"], row.get("transformers_s")
        ratio = None if theirs is None else ours / theirs
        table.add_row(
            str(int(row["rows"])),
            _number(1e3 * ours),
            _number(None if theirs is None else 1e3 * theirs),
            _number(ratio, ".2f"),
        )
    console.print(table)
    memory = (
        f"{result['extra_weight_bytes'] / 1e6:.0f} MB of reordered weights, {result['kv_bytes_per_token']} bytes of KV "
        "per token"
    )
    if "read_bandwidth_bytes_per_s" in result:
        bandwidth, weights = result["read_bandwidth_bytes_per_s"], result["weight_bytes_per_step"]
        memory = (
            f"read bandwidth {bandwidth / 1e9:.1f} GB/s, {weights / 1e6:.0f} MB of weights per step: "
            f"floor {1e3 * weights / bandwidth:.1f} ms per forward; {memory}"
        )
    console.print(memory, highlight=False)


@hydra.main(version_base="1.3", config_path="pkg://specdec.configs", config_name="speedup")
def main(config: DictConfig) -> None:
    """Measure, print and write."""
    run_and_write(config, "speedup", measure, show)


if __name__ == "__main__":
    main()

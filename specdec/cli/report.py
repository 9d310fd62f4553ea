"""What a generation took: one dictionary, and the table made of it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from specdec.cli.console import plain
from specdec.cli.loading import SAMPLING

if TYPE_CHECKING:
    from specdec.api import LLM, Completion
    from specdec.interfaces import SamplingParams
    from specdec.record import TokenRecord

_STATS = (
    *("num_prompt_tokens", "prefill_s", "prefill_tokens_per_s", "ttft_s"),
    *("num_emitted_tokens", "decode_s", "decode_tokens_per_s", "tpot_s", "itl_s"),
    *("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_truncated", "num_rejected_drafts"),
    *("acceptance_rate", "acceptance_length", "acceptance_at_unconditional", "acceptance_at_conditional"),
    *("draft_s", "verify_s", "other_s"),
)
_TABLE = {  # group -> rows
    "prefill": ("num_prompt_tokens", "prefill_tokens_per_s", "ttft_s"),
    "decode": ("num_emitted_tokens", "decode_tokens_per_s", "tpot_s"),
    "drafts": ("acceptance_rate", "acceptance_length"),
    "time": ("draft_s", "verify_s", "other_s"),
}


def report(
    llm: LLM, model: str, sampling: SamplingParams, prompt: str, done: Completion, stop: list[str] | None = None
) -> dict[str, Any]:
    """Return everything the table and --json say, under the names of `specdec.stats`."""
    import torch

    engine, target = llm.engine, llm.engine.target
    rule = engine.verifiers.of(sampling, engine.drafter.samples)
    result = {
        "model": model,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "num_threads": torch.get_num_threads(),
        "drafter": engine.drafter.name,
        "max_draft_tokens": engine.config.max_draft_tokens,
        "draft_length": engine.config.draft_length,
        "verifier": rule.name,
        "lossless": rule.lossless,
        "sampling": {name: getattr(sampling, name) for name in SAMPLING},
        "stop": stop or [],
        "prompt": prompt,
        "text": done.text,
        "finish_reason": done.finish_reason,
        "prompt_token_ids": done.prompt_token_ids,
        "token_ids": done.token_ids,
        "from_draft": done.from_draft,
        "stats": {name: getattr(done.stats, name) for name in _STATS},
        "memory": _memory(llm),
    }
    if done.logprobs is not None:
        result["logprobs"] = [_logprobs(record) for record in done.logprobs]
    return result


def _memory(llm: LLM) -> dict[str, int]:
    import torch

    target = llm.engine.target
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = {
        "weight_bytes": sum(p.numel() * p.element_size() for p in llm.model.parameters()),
        "extra_weight_bytes": target.extra_weight_bytes,
        "drafter_weight_bytes": getattr(llm.engine.drafter, "weight_bytes", 0),
        "kv_cache_bytes": target.cache.num_bytes,
        "kv_bytes_per_token": target.cache.bytes_per_token,
        "peak_rss_bytes": peak if sys.platform == "darwin" else 1024 * peak,
    }
    if target.device.type == "cuda":
        memory["device_peak_bytes"] = torch.cuda.max_memory_allocated(target.device)
    return memory


def _logprobs(record: TokenRecord) -> dict[str, Any]:
    return {
        "token_id": record.token_id,
        "raw_logprob": record.raw_logprob,
        "logprob": record.logprob,
        "top": [{"token_id": token, "raw_logprob": value} for token, value in record.top],
    }


def stats_table(result: dict[str, Any]) -> Table:
    """Return the table that ends `specdec generate`: prefill, decode, drafts, time and memory."""
    values = {**result["stats"], **result["memory"]}
    notes = _notes(result, values)
    table = Table(title=Text(plain(_title(result))), title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="cyan", justify="right")
    table.add_column(style="dim")
    for group, names in {**_TABLE, "memory": tuple(result["memory"])}.items():
        for name in names:
            heading = group if name == names[0] else ""
            table.add_row(heading, name, shown(name, values[name]), notes.get(name, ""), end_section=name == names[-1])
    return table


def _title(result: dict[str, Any]) -> str:
    verifier = result["verifier"] if result["lossless"] else f"{result['verifier']} (NOT LOSSLESS)"
    place = f"{result['dtype']}, {result['device']}, {result['num_threads']} threads"
    name = Path(result["model"]).name if Path(result["model"]).expanduser().exists() else result["model"]
    length = "" if result["draft_length"] == "static" else f", draft length {result['draft_length']}"
    return f"{name} ({place}), drafter {result['drafter']}{length}, verifier {verifier}"


def _notes(result: dict[str, Any], values: dict[str, Any]) -> dict[str, str]:
    prompts = result.get("num_prompts", 1)
    ended = f", ended by {result['finish_reason']}" if "finish_reason" in result else ""
    notes = {
        "num_prompt_tokens": f"of {prompts} prompts" if prompts > 1 else "",
        "ttft_s": "request in to first token out" if prompts == 1 else "",
        "num_emitted_tokens": f"{values['num_steps']:,} steps{ended}",
        "tpot_s": "after the first emission" if prompts == 1 else "",
        "acceptance_rate": f"{values['num_accepted_tokens']:,} of {values['num_draft_tokens']:,} draft tokens",
        "acceptance_length": "tokens per target forward",
        "extra_weight_bytes": "prepacked copies of weights",
        "drafter_weight_bytes": "the drafter's own weights",
        "kv_cache_bytes": "allocated",
        "peak_rss_bytes": "whole process",
    }
    for part in _TABLE["time"] if values["decode_s"] else ():
        notes[part] = f"{values[part] / values['decode_s']:.0%} of decode"
    return notes


def shown(name: str, value: float | None) -> str:
    """Return a value as tables show it; the name tells its unit."""
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    if isinstance(value, int):
        return f"{value:,}"
    if name.endswith("per_s"):
        return f"{value:,.1f}"
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def total_of(results: list[dict[str, Any]], completions: list[Completion]) -> dict[str, Any]:
    """Return one report for several prompts of one run; what belongs to a single prompt is left out."""
    from specdec.stats import total

    stats = total(done.stats for done in completions)
    single = ("prompt", "text", "finish_reason", "prompt_token_ids", "token_ids", "from_draft", "logprobs")
    kept = {name: value for name, value in results[-1].items() if name not in single}
    return {**kept, "num_prompts": len(results), "stats": {name: getattr(stats, name) for name in _STATS}}

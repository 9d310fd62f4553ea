"""Does the cost-aware draft length ever lose, and does it take what there is: sweeps over acceptance, cost and batch.

python -m specdec.eval.draft_length
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress

from specdec.api import LLM, Completion
from specdec.errors import ConfigError
from specdec.eval.batch_run import BatchRun, over
from specdec.eval.draft_length_tables import markdown, show
from specdec.eval.entry import run_and_write
from specdec.eval.hydra_main import hydra_main
from specdec.eval.prompts import encode, load_texts
from specdec.eval.schedule import turns
from specdec.interfaces import SamplingParams
from specdec.provenance import provenance
from specdec.registry import VERIFIERS
from specdec.request import Request, StopRules

console = Console()


class _Bench:
    """The target, its prompts and the LLMs that share its weights."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.none = LLM(config.target.name, dtype=config.target.dtype, drafter="none")
        texts, _ = load_texts(config.prompts)
        self.prompts = encode(self.none, texts, config.prompts.chat)

    def llm(self, drafter: str, policy: str, verifier: Any = "auto") -> LLM:
        """Return an LLM over the same model whose policy knows nothing yet."""
        return LLM(
            self.none.model,
            tokenizer=self.none.tokenizer,
            drafter=drafter,
            verifier=verifier,
            draft_length=policy,
            max_draft_tokens=self.config.static_tokens if policy == "static" else self.config.most_tokens,
        )

    def batches(self, size: int) -> list[list[list[int]]]:
        """Return the prompts in batches of `size`, from the first one again where they run out."""
        doubled = self.prompts * (1 + size // len(self.prompts))
        return [doubled[i : i + size] for i in range(0, max(1, len(self.prompts) - size + 1), size)]


def _run(llm: LLM, prompts: Sequence[list[int]], max_new_tokens: int, seed: int) -> list[Request]:
    """Run greedy requests past EOS, each with a seed of its own, for what `synthetic` accepts, and return them."""
    engine = llm.engine
    stop = StopRules(max_new_tokens=max_new_tokens)
    requests = [engine.add_request(p, SamplingParams(seed=seed + i), stop) for i, p in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
    for request in requests:
        engine.forget(request.request_id)
    return requests


def _sample(llm: LLM, batch: Sequence[list[int]], max_new_tokens: int, number: int) -> BatchRun:
    """Return one run of a batch; its decode time ends with the last request's last token."""
    return BatchRun.of(number, [r.stats for r in _run(llm, batch, max_new_tokens, seed=1000 * number)])


def sweep(bench: _Bench, progress: Progress) -> list[dict[str, Any]]:
    """Return the ratios to no drafting for every drafter, batch size and acceptance."""
    config = bench.config
    cells = [(d, b, r) for d in config.drafters for b in config.batch_sizes for r in config.rates]
    bar = progress.add_task("sweep", total=len(cells))
    found = []
    for drafter, size, rate in cells:
        found.append(_cell(bench, drafter, size, rate))
        progress.advance(bar)
    return found


def _cell(bench: _Bench, drafter: str, size: int, rate: float) -> dict[str, Any]:
    config, batches = bench.config, bench.batches(size)
    rule = VERIFIERS.load("synthetic")(rate)

    aware, static = bench.llm(drafter, "cost_aware", rule), bench.llm(drafter, "static", rule)

    def run(llm: LLM, number: int) -> BatchRun:
        return _sample(llm, batches[number % len(batches)], config.max_new_tokens, number)

    first = run(aware, 0)  # of a policy that knows nothing
    # "none" twice: what the machine makes of two equal runs is the noise.
    variants = {"none": bench.none, "cost_aware": aware, "none again": bench.none}
    samples: dict[str, list[BatchRun]] = {name: [] for name in variants}
    for number in range(config.rounds):
        for name in [*list(variants)[number % 3 :], *list(variants)[: number % 3]]:
            samples[name].append(run(variants[name], number))
    plain = samples["none"][:1]
    return {
        "drafter": drafter,
        "batch_size": size,
        "rate": rate,
        "cost_aware": over(samples["none"] + samples["none again"], samples["cost_aware"] * 2),
        "first": over(plain, [first])["median"],
        "static": over(plain, [run(static, 0)])["median"],
        "noise": over(samples["none"], samples["none again"]),
        "none_s": statistics.median(s.decode_s for s in samples["none"]),
    }


def hopeless(bench: _Bench, progress: Progress) -> list[dict[str, Any]]:
    """Return when drafters that are always wrong were switched off, and what it cost, in a first request."""
    config = bench.config
    bar = progress.add_task("hopeless", total=len(config.hopeless) * config.hopeless_repeats)
    rows = []
    for drafter in config.hopeless:
        runs, plain = [], []
        for repeat in range(config.hopeless_repeats):
            prompt = bench.prompts[repeat % len(bench.prompts)]
            before = _stepwise(bench.none, prompt, config.hopeless_tokens)
            runs.append(_stepwise(bench.llm(drafter, "cost_aware"), prompt, config.hopeless_tokens))
            after = _stepwise(bench.none, prompt, config.hopeless_tokens)
            plain.append((before["decode_s"] + after["decode_s"]) / 2)
            progress.advance(bar)
        rows.append(
            {
                "drafter": drafter,
                "last_drafted_at": max(max((at for at in r["drafted_at"] if at < 64), default=0) for r in runs),
                "num_draft_tokens": max(r["num_draft_tokens"] for r in runs),
                "num_accepted": max(r["num_accepted"] for r in runs),
                "ratio": statistics.median(p / r["decode_s"] for p, r in zip(plain, runs, strict=True)),
                "runs": runs,
            }
        )
    return rows


def _stepwise(llm: LLM, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
    """Run one request step by step and note after how many tokens it was drafted for."""
    engine = llm.engine
    request = engine.add_request(prompt, SamplingParams(), StopRules(max_new_tokens=max_new_tokens))
    drafted_at = []
    while engine.has_unfinished:
        before, had = request.stats.num_draft_tokens, len(request.new_tokens)
        engine.step()
        if request.stats.num_draft_tokens > before:
            drafted_at.append(had)
    stats = request.stats
    engine.forget(request.request_id)
    return {
        "drafted_at": drafted_at,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted": stats.num_accepted_tokens,
        "decode_s": stats.emissions[-1][0] - stats.emissions[0][0],
    }


def real(bench: _Bench, progress: Progress) -> list[dict[str, Any]]:
    """Return the ratios to no drafting of real drafters under the lossless rule, and whether the ids are the same."""
    config = bench.config
    llms = {(d, p): bench.llm(d, p) for d in config.real for p in ("static", "cost_aware")}
    variants = {"none": bench.none} | {f"{d} {p}": llm for (d, p), llm in llms.items()}
    prompts = bench.prompts[: config.real_prompts]
    order = list(turns(list(variants), [[str(i)] for i in range(len(prompts))], config.real_repeats))
    bar = progress.add_task("real", total=len(order))
    done: dict[str, dict[int, Completion]] = {name: {} for name in variants}
    for llm in variants.values():  # a warm-up
        llm.generate(prompts[0], max_new_tokens=config.real_tokens, ignore_eos=True)
    for turn in order:
        number = turn.repeat * len(prompts) + turn.batch
        answer = variants[turn.variant].generate(
            prompts[turn.batch], max_new_tokens=config.real_tokens, ignore_eos=True
        )
        done[turn.variant][number] = answer[0]
        progress.advance(bar)
    rows = []
    for drafter, policy in llms:
        ours = done[f"{drafter} {policy}"]
        stats = [completion.stats for completion in ours.values()]
        drafted, steps = sum(s.num_draft_tokens for s in stats), sum(s.num_steps for s in stats)
        none, runs = (
            [BatchRun.of(number % len(prompts), [c.stats]) for number, c in sorted(of.items())]
            for of in (done["none"], ours)
        )
        rows.append(
            {
                "drafter": drafter,
                "policy": policy,
                "ratio": over(none, runs),
                "draft_tokens_per_step": drafted / steps,
                "acceptance_rate": sum(s.num_accepted_tokens for s in stats) / drafted if drafted else None,
                "identical": sum(done["none"][number].token_ids == c.token_ids for number, c in ours.items()),
                "of": len(ours),
            }
        )
    return rows


def measure(config: Any) -> dict[str, Any]:
    """Run everything a config describes and return what was measured."""
    if config.rounds < 1 or config.max_new_tokens < 2:
        raise ConfigError(
            f"rounds={config.rounds}, max_new_tokens={config.max_new_tokens}; allowed: at least 1 round and 2 tokens, "
            "the first of which is prefill's"
        )
    bench = _Bench(config)
    times = getattr(bench.llm("none", "cost_aware").engine.draft_length, "step_times", None)
    with Progress(console=console, transient=True) as progress:
        result = {
            "config": OmegaConf.to_container(config, resolve=True),
            "provenance": provenance(),
            "step_times": None if times is None else asdict(times),
            "sweep": sweep(bench, progress),
            "hopeless": hopeless(bench, progress),
            "real": real(bench, progress),
        }
    return result


@hydra_main("draft_length")
def main(config: DictConfig) -> None:
    """Measure, print and write."""
    run_and_write(config, "draft_length", measure, lambda result: show(result, console), markdown)


if __name__ == "__main__":
    main()

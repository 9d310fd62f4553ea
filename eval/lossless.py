"""Is the output the target's own: greedy ids against transformers' generate(), sampled ones against exact laws.

    python -m specdec.eval.lossless target=smollm2 drafter=eagle3 prompts=jsonl prompts.path=FILE
    python -m specdec.eval.lossless drafters=[ngram,self_int8] dtypes=[float32,bfloat16]

Exit code 0 = lossless, 1 = not, or not shown, 2 = bad input. See docs/lossless.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress

from specdec.api import LLM
from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.eval.entry import run_and_write
from specdec.eval.greedy_identity import (
    Divergence,
    check_drafter,
    compare_answers,
    first_divergence,
    next_logits,
    num_near_ties,
    only_near_ties,
)
from specdec.eval.hydra_main import hydra_main
from specdec.eval.llm_options import engine_options
from specdec.eval.lossless_config import LosslessConfig
from specdec.eval.lossless_report import page, show, verdict
from specdec.eval.peers.hf import transformers_answer
from specdec.eval.prompt_fit import LEAST_NEW_TOKENS
from specdec.eval.questions import load_questions
from specdec.eval.records import LeftOut
from specdec.eval.sampling_tests import Drawn, as_row, compare, draw
from specdec.eval.setting_checks import check_settings
from specdec.eval.target_law import target_law
from specdec.interfaces import Verifier
from specdec.provenance import provenance

__all__ = [
    "Divergence",
    "check_drafter",
    "compare_answers",
    "first_divergence",
    "measure",
    "next_logits",
    "num_near_ties",
    "only_near_ties",
    "page",
    "show",
]

console = Console()
Options = dict[str, Any]
_SAMPLED_RULES = ("rejection", "match", "traversal")  # that `auto` stands for where drafts carry probabilities


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which drafters are compared."""

    drafters: dict[str, Options]
    sampled: list[str]  # those of the sampling tests
    is_chosen: bool  # by the user: one that does not fit is then an error


def measure(config: Any) -> dict[str, Any]:
    """Compare every drafter, dtype and batch size with transformers, then what is drawn with the target's law."""
    check_settings(LosslessConfig, config)
    wanted = _wanted(config)
    checks: list[dict[str, Any]] = []
    sampling, left_out, too_long = None, list[dict[str, str]](), list[LeftOut]()
    dtypes = [config.target.dtype] if config.dtypes is None else list(config.dtypes)
    for number, dtype in enumerate(dtypes):
        base = LLM(config.target.name, dtype=dtype, **engine_options(config))
        questions, too_long = load_questions(base, config.prompts, LEAST_NEW_TOKENS)
        prompts = [question.token_ids for question in questions]
        refused = _refused(base, wanted, config)
        left_out += [{"drafter": name, "dtype": _dtype(base), "reason": reason} for name, reason in refused.items()]
        fitting = [name for name in wanted.drafters if name not in refused]
        with Progress(console=console, transient=True) as progress:
            checks += _greedy(base, prompts, {name: wanted.drafters[name] for name in fitting}, config, progress)
            if number == 0 and config.sampling.samples:
                sampled = {name: wanted.drafters[name] for name in wanted.sampled if name in fitting}
                sampling = _sampling(base, prompts, sampled, config, progress)
    result = {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "left_out": left_out,
        "left_out_prompts": [asdict(row) for row in too_long],
        "checks": checks,
        "sampling": sampling,
    }
    found = verdict(result)
    return {**result, "verdict": {"word": found.word, "grounds": found.grounds}}


def _plain(options: Any) -> Options:
    """Return a part of the config as a dict."""
    return OmegaConf.to_container(options, resolve=True) or {}


def _dtype(base: LLM) -> str:
    return str(base.model.dtype).removeprefix("torch.")


def _wanted(config: Any) -> _Wanted:
    """Return the drafters a config names, by `drafter=`, by `drafters=` or by default.

    Raises:
        ConfigError: two of these, or none.
    """
    one = config.get("drafter")
    if one is not None and config.drafters is not None:
        raise ConfigError(f"drafter={one.name} and drafters={list(config.drafters)}; give one of them")
    is_chosen = one is not None or config.drafters is not None
    if one is not None:
        names = [one.name]
    else:
        names = list(config.default_drafters if config.drafters is None else config.drafters)
    options = {name: _plain(config.drafter_options.get(name) or OmegaConf.create({})) for name in names}
    if one is not None:
        options[one.name] |= _plain(one.options)
    by_default = names if is_chosen else list(config.sampling.default_drafters)
    return _Wanted(options, [name for name in names if name in by_default and name != "none"], is_chosen)


def _drafting(base: LLM, name: str, options: Options, config: Any, verifier: str | None = None, **more: Any) -> LLM:
    """Return an LLM over the target of `base`; a verifier given here is taken without options."""
    return LLM(
        base.model,
        tokenizer=base.tokenizer,
        drafter=name,
        drafter_options=options,
        verifier=verifier or config.verifier.name,
        verifier_options={} if verifier else _plain(config.verifier.options),
        **(engine_options(config) | more),
    )


def _refused(base: LLM, wanted: _Wanted, config: Any) -> dict[str, str]:
    """Return which of the default drafters are none for this target in its dtype, and why."""
    found = {}
    for name, options in wanted.drafters.items():
        try:
            _drafting(base, name, options, config)
        except IncompatibleDrafterError as error:
            if wanted.is_chosen:
                raise
            found[name] = str(error).partition(". ")[0]  # the rest is advice
    return found


def _greedy(
    base: LLM, prompts: list[list[int]], drafters: dict[str, Options], config: Any, progress: Progress
) -> Iterator[dict[str, Any]]:
    """Yield one row per drafter and batch size."""
    bar = progress.add_task("transformers", total=len(prompts))
    expected = []
    for prompt in prompts:
        expected.append(transformers_answer(base.model, prompt, config.max_new_tokens))
        progress.advance(bar)
    bar = progress.add_task("drafters", total=len(drafters) * len(config.batch_sizes))
    for name, options in drafters.items():
        llm = _drafting(base, name, options, config)
        for size in config.batch_sizes:
            yield check_drafter(llm, name, size, prompts, expected, config)
            progress.advance(bar)


def _sampling(
    base: LLM, prompts: list[list[int]], drafters: dict[str, Options], config: Any, progress: Progress
) -> dict[str, Any]:
    """Draw with every drafter and rule first: their paths are then looked up in the target's law together."""
    settings = config.sampling
    chosen = _short_enough(base, prompts, settings)
    rows: list[tuple[str, Verifier, Drawn]] = []  # without the LLMs, which keep KV for prompts that begin alike
    for name, options in drafters.items():
        for rule in _rules(_drafting(base, name, options, config), config.verifier.name):
            llm = _drafting(base, name, options, config, rule, prefix_caching=True)  # a prompt is prefilled once
            bar = progress.add_task(f"sampled, {name}", total=settings.samples * len(chosen))
            seed = settings.seed + len(rows)
            shape = settings.samples, settings.tokens, config.temperature
            drawn = draw(llm, chosen, *shape, seed, partial(progress.advance, bar))
            rows.append((name, llm.engine.verifiers.sampled, drawn))
    bar = progress.add_task("the target's law", total=len(chosen))
    laws = []
    for i, prompt in enumerate(chosen if rows else []):
        drawn_there = [path for _, _, drawn in rows for path in drawn.paths[i]]
        laws.append(target_law(base.model, prompt, drawn_there, settings.samples, config.temperature))
        progress.advance(bar)
    tests = []
    for name, used, drawn in rows:
        tests.append(as_row(name, used.name, used.lossless, drawn, compare(drawn.paths, laws, settings.seed)))
    return {
        "dtype": _dtype(base),
        "temperature": config.temperature,
        "num_samples": settings.samples,
        "num_tokens": settings.tokens,
        "num_prompts": len(chosen),
        "level": settings.level,
        "tests": tests,
    }


def _rules(llm: LLM, verifier: str) -> list[str | None]:
    """Return the rules that a drafter is tested with: what was named (None), or all that `auto` may stand for."""
    if verifier != "auto":
        return [None]
    return list(_SAMPLED_RULES) if llm.engine.drafter.samples else ["match"]


def _short_enough(base: LLM, prompts: list[list[int]], settings: Any) -> list[list[int]]:
    """Return the first prompts after which there is room for the answers.

    Raises:
        ConfigError: there are none.
    """
    most = base.engine.target.max_positions
    found = [prompt for prompt in prompts if most is None or len(prompt) + settings.tokens <= most]
    if not found:
        raise ConfigError(f"no prompt leaves room for {settings.tokens} tokens; lower sampling.tokens")
    return found[: settings.num_prompts]


@hydra_main("lossless")
def main(config: DictConfig) -> None:
    """Measure, print, write; the exit code is the verdict."""
    sys.exit(0 if run_and_write(config, "lossless", measure, show, page) else 1)


if __name__ == "__main__":
    main()

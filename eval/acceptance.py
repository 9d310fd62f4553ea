"""How many tokens a target forward yields with a drafter: acceptance by category, looping answers reported apart.

    python -m specdec.eval.acceptance target=smollm2 drafter=ngram prompts=jsonl prompts.path=FILE

Exit code 0 = measured, and greedy ids are the undrafted run's but for near-ties (a lossy verifier's may be any), 1 =
they are not, 2 = bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdec.api import LLM
from specdec.debug.near_tie import near_tie_limit
from specdec.errors import ConfigError
from specdec.eval.answers import Answer, answer, summarise
from specdec.eval.entry import run_and_write
from specdec.eval.llm_options import llm_options
from specdec.eval.lossless import compare_answers, only_near_ties
from specdec.eval.prompts import Prompt, encode, load_prompts, stratify
from specdec.interfaces import SamplingParams
from specdec.provenance import provenance

console = Console()
_NAMES_SHOWN = 8  # of prompts left out; the file has all

Encoded = tuple[Prompt, list[int]]


def measure(config: Any) -> dict[str, Any]:
    """Run the drafter over the prompts a config describes and return everything that was counted."""
    for name, least in (("batch_size", 1), ("max_new_tokens", 2), ("prompts.max_prompt_tokens", 1)):
        value = OmegaConf.select(config, name)
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value!r}; allowed: an integer >= {least}")
    llm = LLM(config.target.name, **llm_options(config))
    chosen, left_out = _choose(llm, config)
    prompts = [ids for _, ids in chosen]
    options = {"max_new_tokens": config.max_new_tokens, "temperature": config.temperature, "seed": config.seed}
    sampling = SamplingParams(temperature=config.temperature, seed=config.seed)
    verifier = llm.engine.verifiers.of(sampling, llm.engine.drafter.samples)
    is_checked = config.check and sampling.greedy
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("prompts", total=len(prompts) * (1 + is_checked))
        advance = partial(progress.advance, bar)
        answers = _run(llm, prompts, config.batch_size, options, advance)
        check = None
        if is_checked:
            engine: dict[str, Any] = OmegaConf.to_container(config.engine, resolve=True)
            plain = LLM(llm.model, tokenizer=llm.tokenizer, **engine)
            expected = _run(plain, prompts, config.batch_size, options, advance)
            undrafted, drafted = ([answer.token_ids for answer in of] for of in (expected, answers))
            near_tie = near_tie_limit(llm.model.dtype, config.near_tie)
            check = compare_answers(llm, prompts, undrafted, drafted, near_tie)
    categories = dict.fromkeys(p.category for p, _ in chosen)
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "drafter": llm.engine.drafter.name,
        "verifier": verifier.name,
        "lossless": verifier.lossless,
        "max_draft_tokens": llm.engine.config.max_draft_tokens,
        "left_out": left_out,
        "categories": {
            name: summarise(a for a in answers if chosen[a.prompt][0].category == name) for name in categories
        },
        "total": summarise(answers),
        "check": check,
        "answers": [
            {
                "name": chosen[a.prompt][0].name,
                "category": chosen[a.prompt][0].category,
                "num_prompt_tokens": len(prompts[a.prompt]),
                "num_tokens": len(a.token_ids),
                "cut": a.cut,
                "finish_reason": a.finish_reason,
                "steps": [asdict(step) for step in a.steps],
            }
            for a in answers
        ],
    }


def _choose(llm: LLM, config: Any) -> tuple[list[Encoded], list[dict[str, Any]]]:
    """Return the prompts to run, their categories grouped, and what was too long."""
    group_of = {category: group for group, members in config.groups.items() for category in members}
    rows = load_prompts(config.prompts)
    rows = [Prompt(p.text, p.name, group_of.get(p.category, p.category)) for p in rows]
    most, most_words = config.prompts.max_prompt_tokens, config.prompts.max_words
    context = llm.engine.target.max_positions
    if context is not None:
        most = min(most, context - 1)
    short: list[Encoded] = []
    left_out = []
    for prompt, ids in zip(rows, encode(llm, [p.text for p in rows], config.prompts.chat), strict=True):
        words = len(prompt.text.split())
        if len(ids) > most or (most_words is not None and words > most_words):
            row = {"name": prompt.name, "category": prompt.category, "num_tokens": len(ids), "num_words": words}
            left_out.append(row)
        else:
            short.append((prompt, ids))
    if not short:
        words_allowed = "" if most_words is None else f" and {most_words} words"
        raise ConfigError(
            f"{config.prompts.path or 'prompts.texts'} has no prompt of at most {most} tokens{words_allowed} in "
            f"{len(rows)} rows; raise prompts.max_prompt_tokens"
        )
    return [short[i] for i in stratify([p.category for p, _ in short], config.prompts.limit)], left_out


def _run(
    llm: LLM, prompts: Sequence[list[int]], size: int, options: dict[str, Any], advance: Callable[[int], None]
) -> list[Answer]:
    answers: list[Answer] = []
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        answers += answer(llm, start, batch, **options)
        advance(len(batch))
    return answers


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def _interval(view: dict[str, Any]) -> str:
    found = view["acceptance_length_interval"]
    return "-" if found is None else f"{found[0]:.2f}-{found[1]:.2f}"


def show(result: dict[str, Any]) -> bool:
    """Print the tables; return whether the check found nothing that a lossless rule may not do."""
    config = result["config"]
    how = "greedy" if config["temperature"] == 0 else f"temperature {config['temperature']}"
    lossy = "" if result["lossless"] else " (LOSSY verifier)"
    table = Table(
        title=f"{result['drafter']}, {result['max_draft_tokens']} draft tokens, {how}, {result['verifier']}{lossy}"
    )
    for column in ("", "loops", "cut", "95 %", "all", "no loops", "rate"):
        table.add_column(column, justify="right" if column else "left")
    for name, part in [*result["categories"].items(), ("total", result["total"])]:
        table.add_row(
            name,
            f"{part['num_loops']} of {part['num_prompts']}",
            _number(part["cut"]["acceptance_length"]),
            _interval(part["cut"]),
            _number(part["all"]["acceptance_length"]),
            _number(part["no_loops"]["acceptance_length"]),
            _number(part["cut"]["acceptance_rate"]),
        )
    console.print(table)
    console.print(
        "tokens per target decode forward; cut: up to where an answer repeats eight tokens in a row, with its 95 % "
        "interval over prompts; no loops: answers that never do; rate: accepted per draft token up to the cut (of "
        "trees: per node)"
    )
    _show_positions(result["total"])
    _show_left_out(result["left_out"])
    return _show_check(result)


def _show_positions(part: dict[str, Any]) -> None:
    table = Table(title="accepted at depth, of all steps / of those that came so far")
    table.add_column("")
    views = {name: part[name] for name in ("cut", "all", "no_loops")}
    for depth in range(len(part["all"]["acceptance_at_unconditional"])):
        table.add_column(str(depth + 1), justify="right")
    for name, view in views.items():
        pairs = zip(view["acceptance_at_unconditional"], view["acceptance_at_conditional"], strict=True)
        table.add_row(name.replace("_", " "), *(f"{_number(u)} / {_number(c)}" for u, c in pairs))
    console.print(table)


def _show_left_out(left_out: list[dict[str, Any]]) -> None:
    by_category: dict[str, list[str]] = {}
    for row in left_out:
        by_category.setdefault(row["category"], []).append(row["name"])
    for category, names in by_category.items():
        more = ", ..." if len(names) > _NAMES_SHOWN else ""
        shown = ", ".join(names[:_NAMES_SHOWN]) + more
        console.print(f"left out for their length: {len(names)} of {category} ({shown})", highlight=False)


def _show_check(result: dict[str, Any]) -> bool:
    check = result["check"]
    if check is None:
        return True
    console.print(f"{check['equal']} of {check['of']} answers have the undrafted run's ids", highlight=False)
    for d in check["parted"]:
        kind = "a near-tie" if d["is_near_tie"] else "DIFFERENT"
        name = result["answers"][d["prompt"]]["name"]
        console.print(
            f"prompt {name} at token {d['position']}: {kind}, gap {_number(d['gap'], '.1e')}", highlight=False
        )
    return not result["lossless"] or only_near_ties(check)


@hydra.main(version_base="1.3", config_path="pkg://specdec.configs", config_name="acceptance")
def main(config: DictConfig) -> None:
    """Measure, print, write; the exit code is the check's verdict."""
    sys.exit(0 if run_and_write(config, "acceptance", measure, show) else 1)


if __name__ == "__main__":
    main()

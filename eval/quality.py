"""What a lossy rule does to answers: against the undrafted target on the same prompts, see docs/metrics.md.

    python -m specdec.eval.quality target=smollm2 drafter=self_int8 verifier=typical prompts=gsm8k prompts.path=FILE

Exit code 0 = measured, 2 = bad input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from specdec.api import LLM, Completion
from specdec.eval.entry import run_and_write
from specdec.eval.final_answer import FinalAnswers, final_number, grade
from specdec.eval.hydra_main import hydra_main
from specdec.eval.llm_options import llm_options
from specdec.eval.metrics.agreement import Answers, agreements, exact_match_rate, leading_share, median_divergence
from specdec.eval.metrics.columns import with_interval
from specdec.eval.perplexity import Score, perplexity, score
from specdec.eval.point_view import number, show_left_out
from specdec.eval.quality_config import QualityConfig
from specdec.eval.questions import Question, load_questions
from specdec.eval.records import LeftOut
from specdec.eval.setting_checks import check_settings
from specdec.eval.target import load_target
from specdec.interfaces import SamplingParams
from specdec.provenance import provenance
from specdec.repetition import first_repeat
from specdec.stats import total

console = Console()
LOSSLESS, SUBJECT, CONTROL = "lossless", "subject", "control"  # the undrafted target; the rule; another seed
_GRAM = 3  # tokens; of distinct n-grams
_LEVEL = 0.95


def measure(config: Any) -> dict[str, Any]:
    """Answer the prompts with the rule and without drafts, and return how the answers differ."""
    check_settings(QualityConfig, config)
    base = load_target(config)
    options: dict[str, Any] = llm_options(config) | {"dtype": None}
    llm = LLM(base.model, tokenizer=base.tokenizer, **options)
    sampling = SamplingParams(temperature=config.temperature, seed=config.seed if config.temperature else None)
    rule = llm.engine.verifiers.of(sampling, llm.engine.drafter.samples)
    questions, left_out = load_questions(base, config.prompts, config.max_new_tokens)
    seeds = {LOSSLESS: sampling.seed, SUBJECT: sampling.seed}
    if config.control and sampling.seed is not None:
        seeds[CONTROL] = sampling.seed + 1
    answers, scores = {}, {}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("prompts", total=len(questions) * len(seeds))
        for name, seed in seeds.items():
            whose = llm if name == SUBJECT else base
            answers[name] = _answer(whose, questions, config, seed, partial(progress.advance, bar))
            ids = [answer.token_ids for answer in answers[name]]
            scores[name] = score(base.model, [question.token_ids for question in questions], ids)
    stats = total(answer.stats for answer in answers[SUBJECT])
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": provenance(),
        "drafter": llm.engine.drafter.name,
        "verifier": rule.name,
        "lossless": rule.lossless,
        "note": _note(rule, sampling),
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_length": stats.acceptance_length,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_drafter_errors": stats.num_drafter_errors,
        "left_out": [asdict(row) for row in left_out],
        "texts": {name: _view(answers[name], scores[name]) for name in seeds},
        "agreement": {n: _agreement(answers[n], answers[LOSSLESS]) for n in seeds if n != LOSSLESS},
        "final_answers": {n: _final_answers(answers[n], answers[LOSSLESS], questions) for n in seeds if n != LOSSLESS},
        "answers": [_row(i, question, answers, scores) for i, question in enumerate(questions)],
    }


def _answer(
    llm: LLM, questions: Sequence[Question], config: Any, seed: int | None, advance: Callable[[int], None]
) -> list[Completion]:
    found: list[Completion] = []
    for start in range(0, len(questions), config.batch_size):
        batch = [question.token_ids for question in questions[start : start + config.batch_size]]
        found += llm.generate(batch, max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=seed)
        advance(len(batch))
    return found


def _note(rule: Any, sampling: SamplingParams) -> str | None:
    """Return what a reader must know of a rule that is lossless."""
    if not rule.lossless:
        return None
    if sampling.greedy or rule.name == "match":
        return (
            f"{rule.name} is lossless: this run is a control, and answers part only where rounding decides between two "
            "tokens; specdec.eval.lossless tells whether they are near-ties"
        )
    return (
        f"{rule.name} is lossless: this run is a control. It draws other tokens than the undrafted target, of the same "
        "distribution, so agreement need be no better than that of another seed"
    )


def _view(answers: Sequence[Completion], scores: Sequence[Score]) -> dict[str, Any]:
    texts = [answer.token_ids for answer in answers]
    return {
        "num_answers": len(answers),
        "num_tokens": sum(len(ids) for ids in texts),
        "num_unfinished": sum(answer.finish_reason == "length" for answer in answers),
        "num_loops": sum(first_repeat(ids) is not None for ids in texts),
        "distinct_3": distinct_share(texts),
        **perplexity(scores),
    }


def distinct_share(answers: Answers, n: int = _GRAM) -> float | None:
    """Return the distinct n-grams of each answer over all of it, summed over answers; None if none is so long.

    Source: Li et al. 2016, arXiv 1510.03055 (distinct-n), here within answers: their number then decides nothing.
    """
    counts = [Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)) for ids in answers]
    whole = sum(count.total() for count in counts)
    return sum(len(count) for count in counts) / whole if whole else None


def _agreement(answers: Sequence[Completion], lossless: Sequence[Completion]) -> dict[str, Any]:
    found = agreements([a.token_ids for a in answers], [a.token_ids for a in lossless])
    leading = [(float(a.leading), float(a.longer)) for a in found]
    return {
        **exact_match_rate(found, _LEVEL),
        **with_interval("leading_share", leading_share(found), leading, _LEVEL),
        "first_divergence_median": median_divergence(found),
        "num_diverged": sum(a.parted_at is not None for a in found),
    }


def _final_answers(
    answers: Sequence[Completion], lossless: Sequence[Completion], questions: Sequence[Question]
) -> dict[str, Any] | None:
    """Return accuracies where references have a final number, or None if no one does."""
    numbers = [question.number for question in questions]
    graded = FinalAnswers(*(grade([a.text for a in of], numbers) for of in (answers, lossless)))
    return graded.summary() if graded.subject else None


def _row(
    i: int, question: Question, answers: dict[str, list[Completion]], scores: dict[str, list[Score]]
) -> dict[str, Any]:
    return {
        "name": question.name,
        "category": question.category,
        "number": None if question.number is None else str(question.number),
        "answers": {
            name: {
                "text": of[i].text,
                "token_ids": of[i].token_ids,
                "finish_reason": of[i].finish_reason,
                "nll": scores[name][i].nll,
                "number": None if (found := final_number(of[i].text)) is None else str(found),
            }
            for name, of in answers.items()
        },
    }


def show(result: dict[str, Any]) -> None:
    """Print the table: one column per set of answers."""
    config, texts = result["config"], result["texts"]
    lossy = "lossless" if result["lossless"] else "LOSSY"
    how = "greedy" if config["temperature"] == 0 else f"temperature {config['temperature']}, seed {config['seed']}"
    title = f"{result['drafter']}, {result['verifier']} ({lossy}), {config['target']['name']}, {how}"
    table = Table(title=Text(title))  # names may hold what Rich takes for markup
    heads = {LOSSLESS: "undrafted", SUBJECT: result["verifier"], CONTROL: "undrafted, next seed"}
    table.add_column("")
    for name in texts:
        table.add_column(Text(heads[name]), justify="right")
    for label, cell in _ROWS:
        table.add_row(label, *(cell(result, name) for name in texts))
    console.print(table)
    console.print(
        "brackets: 95 % intervals over prompts; = undrafted: answers with its ids; equal leading: tokens before the "
        "first difference; perplexity: under the target at temperature 1; loops: eight tokens in a row repeated",
        highlight=False,
    )
    console.print(
        f"acceptance rate {number(result['acceptance_rate'], '.3f')}, length "
        f"{number(result['acceptance_length'], '.2f')}",
        highlight=False,
    )
    for note in _notes(result):
        console.print(Text(f"note: {note}"))
    show_left_out([LeftOut(**row) for row in result["left_out"]], console)


def _notes(result: dict[str, Any]) -> list[str]:
    notes = [] if result["note"] is None else [result["note"]]
    if result["num_drafter_errors"]:
        notes.append(
            f"{result['drafter']} raised in {result['num_drafter_errors']} answers, which went on without drafts"
        )
    if not result["num_draft_tokens"]:
        notes.append(f"{result['drafter']} drafted nothing: these are answers of the target alone")
    return notes


def _with_ends(found: dict[str, Any] | None, key: str, form: str = ".3f") -> str:
    if found is None:
        return "-"
    low, high = found.get(f"{key}_low"), found.get(f"{key}_high")
    if f"{key}_interval" in found:
        low, high = found[f"{key}_interval"] or (None, None)
    ends = "" if low is None else f" [{low:{form}}, {high:{form}}]"
    return number(found[key], form) + ends


def _text_cell(key: str, form: str) -> Callable[[dict[str, Any], str], str]:
    return lambda result, name: number(result["texts"][name][key], form)


def _agreement_cell(key: str) -> Callable[[dict[str, Any], str], str]:
    return lambda result, name: _with_ends(result["agreement"].get(name), key)


def _accuracy(result: dict[str, Any], name: str) -> str:
    found = result["final_answers"][SUBJECT if name == LOSSLESS else name]
    return "-" if found is None else number(found["accuracy_lossless" if name == LOSSLESS else "accuracy"], ".3f")


def _divergence(result: dict[str, Any], name: str) -> str:
    return number(result["agreement"].get(name, {}).get("first_divergence_median"), ".1f")


def _mcnemar(result: dict[str, Any], name: str) -> str:
    found = result["final_answers"].get(name)
    return "-" if found is None else number(found["p_value"], ".3f")


_ROWS: list[tuple[str, Callable[[dict[str, Any], str], str]]] = [
    ("answers", _text_cell("num_answers", ".0f")),
    ("tokens", _text_cell("num_tokens", ".0f")),
    ("unfinished", _text_cell("num_unfinished", ".0f")),
    ("loops", _text_cell("num_loops", ".0f")),
    ("distinct 3-grams", _text_cell("distinct_3", ".3f")),
    ("perplexity", lambda result, name: _with_ends(result["texts"][name], "perplexity", ".2f")),
    ("= undrafted", _agreement_cell("exact_match_rate")),
    ("equal leading", _agreement_cell("leading_share")),
    ("first difference, median", _divergence),
    ("final answers right", _accuracy),
    ("  minus undrafted", lambda result, name: _with_ends(result["final_answers"].get(name), "difference")),
    ("  McNemar p", _mcnemar),
]


@hydra_main("quality")
def main(config: DictConfig) -> None:
    """Measure, print, write."""
    run_and_write(config, "quality", measure, show)


if __name__ == "__main__":
    main()

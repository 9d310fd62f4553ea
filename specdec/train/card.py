"""The README of a trained drafter: how it was made, what of, what it is worth, and what it is not."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.train.plot import PICTURE

_KINDS = {
    "eagle3": "EAGLE-3 head (Li et al. 2025, arXiv 2503.01840)",
    "medusa": "Medusa heads (Cai et al. 2024, arXiv 2401.10774)",
    "draft_model": "distilled draft model (Zhou et al. 2023, arXiv 2310.08461)",
}
_SHAREGPT = (
    "The prompts are users' turns of ShareGPT conversations (ShareGPT_V3_unfiltered_cleaned_split), which people "
    "published with no licence of their own; the package that carries them states none."
)


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Everything a card says."""

    method: str
    target: str
    config: Mapping[str, Any]  # nested, what JSON can hold
    curve: Sequence[Mapping[str, Any]]
    acceptance: Sequence[Mapping[str, Any]]  # rows of `measure`
    num_examples: int
    num_tokens: int  # distinct response tokens
    num_held_out: int
    num_weights: int  # trained
    coverage: float | None  # of held-out response tokens by the draft vocabulary
    num_processes: int
    provenance: Mapping[str, Any]


def card(facts: CardFacts) -> str:
    """Return the card in Markdown."""
    parts = [
        f"# {facts.method} drafter for {facts.target}",
        f"{_KINDS[facts.method]}, trained with specdec. It changes how fast tokens come, never which: the target "
        "decides about every one of them.",
        _usage(facts),
        _training(facts),
        _acceptance(facts),
        _curve(facts),
        _limits(facts),
        _licence(facts),
        "## Settings of the run\n\n```json\n" + json.dumps(facts.config, indent=1) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _usage(facts: CardFacts) -> str:
    return (
        f'```python\nspecdec.LLM("{facts.target}", drafter="{facts.method}", drafter_options={{"model": FOLDER}})\n```'
    )


def _training(facts: CardFacts) -> str:
    of, last = facts.provenance, facts.curve[-1] if facts.curve else {}
    versions = ", ".join(f"{name} {version}" for name, version in of["versions"].items() if version)
    machine = f"{of['gpu'] or of['cpu']}, {facts.num_processes} process(es), {of['num_threads']} threads each"
    seen, seconds = last.get("num_tokens", 0), last.get("seconds", 0.0)
    epochs = seen / max(facts.num_tokens, 1)
    revision = f"{of['git_sha']}{' with local changes' if of['git_dirty'] else ''}" if of["git_sha"] else "no checkout"
    data = facts.config["data"]
    whose = "the target's" if data["max_given"] == 0 else "the target's, and some of the source's that it read"
    return "\n".join(
        [
            "## How it was trained",
            "",
            "| | |",
            "|---|---|",
            f"| command | `{shlex.join(['specdec', *of['argv'][1:]])}` |",
            f"| prompts | {data['prompts']} |",
            f"| examples | {facts.num_examples:,} responses with {facts.num_tokens:,} tokens, {whose}; "
            f"{facts.num_held_out:,} more held out by prompt |",
            f"| seen | {seen:,} response tokens ({epochs:.2f} times each), {last.get('num_batches', 0):,} batches |",
            f"| time | {seconds / 60:.1f} minutes of training, without answering the prompts |",
            f"| trained weights | {facts.num_weights:,} |",
            f"| seeds | responses {facts.config['capture']['seed']}, training {facts.config['loop']['seed']} |",
            f"| machine | {machine} |",
            f"| versions | {versions} |",
            f"| revision | {revision} |",
            f"| finished | {of['time']} |",
        ]
    )


def _acceptance(facts: CardFacts) -> str:
    lines = ["## Held-out acceptance, measured by the engine", ""]
    if not facts.acceptance:
        return "\n".join([*lines, "Not measured: no prompts were held out, or `measure.num_prompts` was 0."])
    first = facts.acceptance[0]
    how = facts.config["measure"]
    lines += [
        f"{first['num_prompts']} held-out prompts, greedy, {how['max_new_tokens']} new tokens, one at a time. "
        "Acceptance length is tokens per target forward; answers that begin to repeat eight tokens in a row count up "
        "to there (`uncut` counts them to their end). `same ids` counts answers that are the undrafted run's.",
        "",
        "| drafter | acceptance length | uncut | loops | tokens/s | same ids |",
        "|---|---|---|---|---|---|",
    ]
    for row in facts.acceptance:
        of = f"of {row['num_prompts']}"
        lines.append(
            f"| {row['name']} | {row['acceptance_length']:.3f} | {row['acceptance_length_all']:.3f} | "
            f"{row['num_loops']} {of} | {row['decode_tokens_per_s']:.1f} | {row['num_equal']} {of} |"
        )
    if facts.coverage is not None:
        lines += ["", f"Its draft vocabulary covers {facts.coverage:.1%} of the held-out response tokens."]
    return "\n".join(lines)


def _curve(facts: CardFacts) -> str:
    lines = [
        "## Training curve",
        "",
        f"![training curve]({PICTURE})",
        "",
        "| tokens seen | minutes | loss | held-out accuracy by draft token | acceptance length of chains |",
        "|---|---|---|---|---|",
    ]
    for line in facts.curve:
        accuracy = " ".join(f"{a:.3f}" for a in line.get("held_out_accuracy", ())) or "-"
        lines.append(
            f"| {line['num_tokens']:,} | {line['seconds'] / 60:.1f} | {line.get('loss', '-')} | {accuracy} | "
            f"{line.get('acceptance_length', '-')} |"
        )
    return "\n".join(lines)


def _limits(facts: CardFacts) -> str:
    data, capture = facts.config["data"], facts.config["capture"]
    return (
        "## Limits\n\n"
        f"- It drafts for {facts.target} alone; specdec refuses it for a target with another embedding.\n"
        f"- It has learned from prompts of at most {data['max_prompt_tokens']} tokens and responses of at most "
        f"{capture['max_new_tokens']}, drawn at temperature {', '.join(str(t) for t in capture['temperatures'])}. "
        "Other lengths, languages and kinds of text are accepted less.\n"
        "- Acceptance on prompts like those above says little about yours: measure it with "
        "`python -m specdec.eval.acceptance`."
    )


def _licence(facts: CardFacts) -> str:
    source = facts.config["data"]["prompts"]
    prompts = _SHAREGPT if source == "sharegpt" else f"The prompts came from `{source}`; their licence is its own."
    given = facts.config["data"]["max_given"]
    answers = (
        " No answers of the source were read: the target wrote all responses."
        if given == 0
        else " Answers of the source were read by the target as well."
    )
    return (
        f"## Data and licences\n\n{prompts}{answers} The drafter was made from {facts.target} and its texts, so that "
        "model's licence bears on it."
    )

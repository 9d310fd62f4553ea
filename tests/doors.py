"""The doors of the package as one interface: a question goes in, token ids come out, whatever the door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrefixConstrainedLogitsProcessor, StopStringCriteria
from typer.testing import CliRunner

import specdec
from specdec.cli import app
from specdec.interfaces import DrafterContext, DraftRequest, Noise, TokenTree
from specdec.tree import stack_trees
from tests.decoding import padded
from tests.models.architectures import Architecture, build
from tests.odd_drafters import Plain
from tests.tiny_chat_model import tiny_tokenizer


class OutOfRangeDrafter(Plain):
    """Proposes a token that does not exist."""

    name = "out_of_range"

    @classmethod
    def build(cls, context: DrafterContext) -> OutOfRangeDrafter:
        return cls()

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        return stack_trees([([r.root_token_id, 10**6], [-1, 0]) for r in requests])


@dataclass(frozen=True)
class Question:
    """What every door can be asked. `model` is a directory with float64 weights and `tiny_tokenizer`."""

    model: Path
    prompts: tuple[str, ...] = ("ab", "the fox jumped", "hello é world")
    max_new_tokens: int = 14
    drafter: str = "none"
    drafter_options: dict[str, Any] = field(default_factory=dict)
    verifier: str = "auto"
    temperature: float = 0.0
    seed: int | None = None
    stop: str | None = None
    max_draft_tokens: int = 4
    allowed: Callable[[list[int]], list[int]] | None = None  # prefix constraint, from all tokens of a row

    @property
    def common(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter,
            "drafter_options": self.drafter_options,
            "verifier": self.verifier,
            "max_draft_tokens": self.max_draft_tokens,
        }


@dataclass
class Answer:
    """One prompt's new tokens and the log-probabilities of each, raw and processed."""

    token_ids: list[int]
    raw_logprobs: list[float]
    logprobs: list[float]


def save_model(folder: Path, architecture: Architecture, **generation_config: Any) -> Path:
    """Write a tiny model in float64, its tokenizer and its generation config."""
    model = build(architecture)
    for name, value in generation_config.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), AutoTokenizer.from_pretrained(folder)


def _batch(question: Question) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    model, tokenizer = load(question.model)
    ids, mask = padded([tokenizer(p).input_ids for p in question.prompts])
    options: dict[str, Any] = {
        "max_new_tokens": question.max_new_tokens,
        "do_sample": question.temperature > 0,
        "return_dict_in_generate": True,
        "output_logprobs": True,
        **question.common,
    }
    if question.temperature:
        options |= {"temperature": question.temperature, "top_k": 0, "seed": question.seed}
    if question.allowed is not None:
        allowed = question.allowed
        options["prefix_allowed_tokens_fn"] = lambda _, tokens: allowed(tokens.tolist())
    return model, tokenizer, ids, mask, options


def _answers(output: Any, width: int, lengths: list[int]) -> list[Answer]:
    rows = output.sequences[:, width:].tolist()
    return [
        Answer(row[:n], raw[:n], processed[:n])
        for row, n, raw, processed in zip(
            rows, lengths, output.raw_logprobs.tolist(), output.logprobs.tolist(), strict=True
        )
    ]


def _lengths(output: Any) -> list[int]:
    """Return how many tokens each row emitted, prefill's included."""
    return [sum(n for _, n in stats.emissions) for stats in output.stats]


def by_generate(question: Question) -> list[Answer]:
    model, tokenizer, ids, mask, options = _batch(question)
    if question.stop is not None:
        options["stop_strings"] = question.stop
    output = specdec.generate(model, ids, mask, tokenizer=tokenizer, **options)
    return _answers(output, ids.shape[1], _lengths(output))


def by_custom_generate(question: Question) -> list[Answer]:
    model, tokenizer, ids, mask, options = _batch(question)
    if question.stop is not None:
        options["stopping_criteria"] = [StopStringCriteria(tokenizer, [question.stop])]
    options |= {"custom_generate": specdec.custom_generate, "spec_tokenizer": tokenizer}
    output = model.generate(ids, attention_mask=mask, **options)
    return _answers(output, ids.shape[1], _lengths(output))


def _llm(question: Question) -> tuple[specdec.LLM, dict[str, Any]]:
    llm = specdec.LLM(str(question.model), dtype="float64", **question.common)
    options: dict[str, Any] = {"max_new_tokens": question.max_new_tokens, "logprobs": 0, "stop": question.stop}
    if question.temperature:
        options |= {"temperature": question.temperature, "seed": question.seed}
    if question.allowed is not None:
        allowed = question.allowed
        processor = PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed(tokens.tolist()), 1)
        options["logits_processor"] = [processor]
    return llm, options


def _of_completion(done: specdec.Completion) -> Answer:
    assert done.logprobs is not None
    return Answer(done.token_ids, [r.raw_logprob for r in done.logprobs], [r.logprob for r in done.logprobs])  # type: ignore[misc]


def by_llm(question: Question) -> list[Answer]:
    llm, options = _llm(question)
    return [_of_completion(done) for done in llm.generate(list(question.prompts), **options)]


def by_stream(question: Question) -> list[Answer]:
    llm, options = _llm(question)
    ids: list[list[int]] = [[] for _ in question.prompts]
    answers: list[Any] = [None] * len(ids)
    for piece in llm.stream(list(question.prompts), **options):
        ids[piece.index] += piece.token_ids
        if piece.completion is not None:
            answers[piece.index] = _of_completion(piece.completion)
    assert [a.token_ids for a in answers] == ids
    return answers


def by_agenerate(question: Question) -> list[Answer]:
    llm, options = _llm(question)
    return [_of_completion(done) for done in asyncio.run(llm.agenerate(list(question.prompts), **options))]


def by_cli(question: Question) -> list[Answer]:
    """The command, once per prompt. It has no processors of the caller's."""
    assert question.allowed is None
    return [_command(replace(question, prompts=(prompt,))) for prompt in question.prompts]


def _command(question: Question) -> Answer:
    arguments = ["generate", "--model", str(question.model), "--dtype", "float64", "--raw", "--json", "--logprobs", "0"]
    arguments += ["--prompt", question.prompts[0], "--max-new-tokens", str(question.max_new_tokens)]
    arguments += ["--drafter", question.drafter, "--verifier", question.verifier]
    arguments += ["--max-draft-tokens", str(question.max_draft_tokens)]
    for name, value in question.drafter_options.items():
        arguments += ["--drafter-option", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    if question.temperature:
        arguments += ["--temperature", str(question.temperature), "--seed", str(question.seed)]
    if question.stop is not None:
        arguments += ["--stop", question.stop]
    result = CliRunner().invoke(app, arguments)
    if result.exit_code:
        assert result.exit_code == 2, result.exception
        raise specdec.SpecdecError(result.stderr)
    answer = json.loads(result.stdout)
    raw, processed = ([r[name] for r in answer["logprobs"]] for name in ("raw_logprob", "logprob"))
    return Answer(answer["token_ids"], raw, processed)


DOORS: dict[str, Callable[[Question], list[Answer]]] = {
    "generate": by_generate,
    "custom_generate": by_custom_generate,
    "llm": by_llm,
    "stream": by_stream,
    "agenerate": by_agenerate,
    "cli": by_cli,
}

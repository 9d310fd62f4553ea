"""Every kind of fault that a caller can provoke, through every door."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.errors import SpecdecError
from tests.decoding import one
from tests.doors import DOORS, Question, load, save_model
from tests.models.architectures import REFUSED, named
from tests.tiny_chat_model import tiny_tokenizer

each_door = pytest.mark.parametrize("door", DOORS)
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "suffix": {},
    "oracle": {"accept_rate": 0.7},
    "adversary": {"width": 2},
    "random": {"branching": [2, 2]},
    "early_exit": {"num_layers": 1},
    "token_recycling": {"tree": "eagle"},
}
each_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama") / "model", named("llama"))


def wanted(question: Question, **options: Any) -> list[list[int]]:
    """Return transformers' own greedy answers, each prompt alone."""
    model, tokenizer = load(question.model)
    answers = []
    for prompt in question.prompts:
        ids = one(tokenizer(prompt).input_ids)
        out = model.generate(ids, max_new_tokens=question.max_new_tokens, do_sample=False, **options)
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def ids_of(door: str, question: Question) -> list[list[int]]:
    return [answer.token_ids for answer in DOORS[door](question)]


@each_door
@each_drafter
def test_fault_01_06_07_greedy_in_a_ragged_batch(door: str, drafter: str, llama: Path) -> None:
    question = Question(llama, drafter=drafter, drafter_options=DRAFTERS[drafter], max_draft_tokens=6)
    assert ids_of(door, question) == wanted(question)


@each_door
def test_fault_02_03_the_target_drafts_for_itself(door: str, llama: Path) -> None:
    """Draft and target distributions are equal: no residual is ever needed, and the draws do not stop for one."""
    question = Question(llama, drafter="draft_model", drafter_options={"model": str(llama)}, temperature=1.0, seed=3)
    undrafted = ids_of(door, replace(question, drafter="none", drafter_options={}))
    assert ids_of(door, question) == undrafted
    assert all(len(ids) == question.max_new_tokens for ids in ids_of(door, replace(question, verifier="rejection")))


@each_door
def test_fault_04_seeds(door: str, llama: Path) -> None:
    question = Question(llama, temperature=1.0, seed=5)
    first = ids_of("llm", question)
    assert ids_of(door, question) == first
    assert ids_of(door, replace(question, prompts=question.prompts[1:2])) == first[1:2], "alone and in a batch"
    assert ids_of(door, replace(question, drafter="oracle")) == first
    assert ids_of(door, replace(question, seed=6)) != first


@each_door
def test_fault_09_refused_by_name(door: str, tmp_path: Path) -> None:
    bloom = next(a for a in REFUSED if a.name == "bloom")
    question = Question(save_model(tmp_path / "bloom", bloom))
    with pytest.raises(SpecdecError, match="ALiBi"):
        ids_of(door, question)


@each_door
@pytest.mark.parametrize("drafter", ["oracle", "adversary"])
def test_fault_10_eos_at_every_place(door: str, drafter: str, llama: Path, tmp_path: Path) -> None:
    free = wanted(Question(llama, prompts=("ab",)))[0]
    places = range(len(free)) if door != "cli" else (1, 4)
    for i in places:
        folder = save_model(tmp_path / str(i), named("llama"), eos_token_id=free[i])
        question = Question(folder, prompts=("ab", "the fox jumped"), drafter=drafter)
        want = wanted(question)
        assert want[0][-1] == free[i]
        assert ids_of(door, question) == want


@each_door
@pytest.mark.parametrize("drafter", ["oracle", "adversary"])
def test_fault_11_stop_strings(door: str, drafter: str, llama: Path) -> None:
    tokenizer = tiny_tokenizer()
    free = wanted(Question(llama, prompts=("ab",)))[0]
    for start, length in ((1, 2), (3, 3), (6, 2)):
        stop = tokenizer.decode(free[start : start + length])
        for most in (14, start + length, start + 1):
            question = Question(llama, prompts=("ab",), drafter=drafter, stop=stop, max_new_tokens=most)
            assert ids_of(door, question) == wanted(question, stop_strings=[stop], tokenizer=tokenizer)


@each_door
@pytest.mark.parametrize("most", [1, 4, 5])
def test_fault_12_lengths(door: str, most: int, llama: Path) -> None:
    question = Question(llama, max_new_tokens=most, drafter="oracle")
    assert ids_of(door, question) == wanted(question)


@each_door
def test_fault_12_the_context_limit(door: str, tmp_path: Path) -> None:
    """Where transformers only warns, generation ends at the limit."""
    folder = save_model(tmp_path / "short", named("llama"))
    model, _ = load(folder)
    model.config.max_position_embeddings = 20
    model.save_pretrained(folder)
    question = Question(folder, prompts=("a" * 17,), drafter="oracle", max_new_tokens=10)
    assert ids_of(door, question) == [wanted(question)[0][:3]]
    with pytest.raises(SpecdecError, match="20 tokens and the context limit is 20"):
        ids_of(door, replace(question, prompts=("a" * 20,)))


@each_door
def test_fault_13_a_draft_model_with_a_shorter_context(door: str, llama: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "draft", named("llama"))
    model, _ = load(folder)
    model.config.max_position_embeddings = 16
    model.save_pretrained(folder)
    question = Question(llama, drafter="draft_model", drafter_options={"model": str(folder)})
    assert ids_of(door, question) == wanted(question)


@each_door
@each_drafter
def test_fault_14_penalties_see_every_token(door: str, drafter: str, tmp_path: Path) -> None:
    settings = {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2, "min_new_tokens": 3}
    folder = save_model(tmp_path / "model", named("llama"), **settings)
    question = Question(folder, drafter=drafter, drafter_options=DRAFTERS[drafter], max_draft_tokens=6)
    want = wanted(question)
    assert ids_of(door, question) == want
    assert all(len(set(pairwise(ids))) == len(ids) - 1 for ids in want), "the rule was at work"


@pytest.mark.parametrize("door", [d for d in DOORS if d != "cli"])
@each_drafter
def test_fault_15_a_grammar(door: str, drafter: str, llama: Path) -> None:
    """Letters in alphabetical order, then the end; nothing behind it."""

    def allowed(tokens: list[int]) -> list[int]:
        last = tokens[-1]
        return [t for t in (last % 26 + 1, (last + 7) % 26 + 1) if t > last % 26] or [9]

    question = Question(llama, drafter=drafter, drafter_options=DRAFTERS[drafter], allowed=allowed)
    want = wanted(question, prefix_allowed_tokens_fn=lambda _, tokens: allowed(tokens.tolist()))
    assert ids_of(door, question) == want


@each_door
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_fault_16_logprobs(door: str, temperature: float, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", named("llama"), repetition_penalty=1.5)
    question = Question(folder, drafter="oracle", drafter_options={"accept_rate": 0.6}, temperature=temperature, seed=1)
    model, tokenizer = load(folder)
    for prompt in question.prompts:
        # Each alone: before 5.2x transformers' repetition penalty takes padding for tokens, and so do the batch doors.
        (answer,) = DOORS[door](replace(question, prompts=(prompt,)))
        ids = [*tokenizer(prompt).input_ids, *answer.token_ids]
        n = len(answer.token_ids)
        assert len(answer.logprobs) == len(answer.raw_logprobs) == n
        with torch.no_grad():
            logits = model(input_ids=one(ids)).logits[0, -n - 1 : -1].float()
        raw = logits.log_softmax(-1)
        for i, token in enumerate(answer.token_ids):
            seen = torch.tensor(sorted(set(ids[: len(ids) - n + i])))
            row = logits[i].clone()
            row[seen] = torch.where(row[seen] < 0, row[seen] * 1.5, row[seen] / 1.5)
            row = row / (temperature or 1.0)
            assert answer.raw_logprobs[i] == pytest.approx(float(raw[i, token]), abs=1e-4)
            assert answer.logprobs[i] == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-4)


@each_door
def test_fault_20_another_vocabulary(door: str, llama: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "draft", named("llama"))
    _, tokenizer = load(folder)
    swapped = tokenizer.backend_tokenizer.to_str().replace('"a":1', '"a":2').replace('"b":2', '"b":1')
    (folder / "tokenizer.json").write_text(swapped)
    question = Question(llama, drafter="draft_model", drafter_options={"model": str(folder)})
    assert ids_of(door, question) == wanted(question)  # "b" is drafted as the target's "b"
    question.drafter_options["vocabulary"] = "same"
    with pytest.raises(SpecdecError, match="token id 1 is 'b' for the draft model and 'a' for the target"):
        ids_of(door, question)


@each_door
def test_fault_22_unknown_names_are_refused(door: str, llama: Path) -> None:
    with pytest.raises(SpecdecError, match="did you mean 'ngram'"):
        ids_of(door, Question(llama, drafter="ngrams"))
    with pytest.raises(SpecdecError, match="did you mean 'max_ngram'"):
        ids_of(door, Question(llama, drafter="ngram", drafter_options={"max_ngrams": 2}))
    with pytest.raises(SpecdecError, match="did you mean 'rejection'"):
        ids_of(door, Question(llama, verifier="rejections"))


@each_door
def test_fault_23_invalid_drafts_cost_speed_only(door: str, llama: Path) -> None:
    question = Question(llama, drafter="tests.doors:OutOfRangeDrafter")
    assert ids_of(door, question) == wanted(question)

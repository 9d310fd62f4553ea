"""Fault 20: a draft model's ids are the target's, or are mapped by what they mean; padding ids are nobody's tokens."""

from __future__ import annotations

import logging
import string
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import specdec
from specdec.build import build_verifiers
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.interfaces import DrafterContext, SamplingParams
from specdec.models.vocabulary import report_intersection
from tests.decoding import add, assert_fresh_kv, drain, engine_of, one, prompts, reference
from tests.faults.test_sampling_end_to_end import FILTERS, LENGTH, NUM_SAMPLES, THRESHOLD, VOCAB, law, pair
from tests.faults.test_sampling_end_to_end import PROMPT as SHORT
from tests.models.architectures import build, model_of, named
from tests.verifiers.enumeration import chi_square_p

PROMPT = prompts(6)[0]
RAGGED = prompts(1, 3, 12, 2, 7, 5, 9, 4)
SEEDED = SamplingParams(temperature=1.0, seed=5)


class Words:
    """As much of a tokenizer as comparing vocabularies takes."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


def tokenizer_of(words: list[str], **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(Words(words).get_vocab())), **special)


WORDS = [f"w{i}" for i in range(60)]
# 64 tokens, of which a draft model that has only the letters must read the last 12 as two of its own.
LETTERS = list(string.ascii_letters)
TARGET = [*LETTERS, *(a + b for a, b in zip(LETTERS[:12], LETTERS[20:32], strict=True))]


def draft_with(target_words: Any, draft_words: Any, draft_size: int = 64, **options: Any) -> torch.Tensor:
    target, draft = model_of(named("llama")), other(draft_size)
    return specdec.generate(
        target, one(PROMPT), max_new_tokens=12, do_sample=False, drafter="draft_model", tokenizer=target_words,
        drafter_options={"model": draft, "tokenizer": draft_words, **options},
    )  # fmt: skip


@cache
def other(size: int) -> Any:
    """Return a draft model of `size` ids that agrees with the target at times only."""
    return build(named("qwen2"), seed=3, vocab_size=size)


@cache
def renamed(words: tuple[str, ...]) -> Any:
    """Return the target itself with its ids renamed: id i is its token `words[i]`."""
    draft = build(named("llama"))
    rows = torch.tensor([TARGET.index(word) if word in TARGET else 0 for word in words])
    for weight in (draft.model.embed_tokens.weight, draft.lm_head.weight):
        weight.copy_(weight[rows])
    return draft


@cache
def answers() -> list[list[int]]:
    return [reference(model_of(named("llama")), row, 12) for row in RAGGED]


def rolled(words: list[str], shift: int = 21) -> list[str]:
    return [words[(i - shift) % len(words)] for i in range(len(words))]


def engine_with(draft: Any, draft_words: list[str], verifier: str = "auto", **options: Any) -> Engine:
    """Return an engine for the shared target and TARGET, with a draft model of another vocabulary."""
    runner = engine_of(model_of(named("llama"))).target.with_own_cache()
    context = DrafterContext(runner, runner.vocab_size, tokenizer_of(TARGET))
    drafter = DraftModelDrafter.build(context, draft, tokenizer_of(draft_words), **options)
    return Engine(runner, drafter, build_verifiers(verifier), EngineConfig(max_draft_tokens=5))


def run(engine: Engine, sampling: SamplingParams | None = None) -> list[Any]:
    requests = [add(engine, row, 12, sampling=sampling or SamplingParams()) for row in RAGGED]
    drain(engine)
    assert sum(r.stats.num_rejected_drafts for r in requests) == 0
    return requests


# Draft vocabularies: other ids, other tokens, a wider head, and ids that the head has no row for.
DRAFTS = {
    "permuted": (64, rolled(TARGET)),
    "letters": (64, [*reversed(LETTERS), *(f"<{i}>" for i in range(12))]),
    "padded": (80, [*rolled(LETTERS, 5), "xyz"]),
    "few": (64, [*LETTERS[10:40], *(f"<{i}>" for i in range(20))]),
    "narrow": (40, rolled(LETTERS, 9)),
}


@pytest.mark.parametrize("index", [0, 17, 59])
def test_fault_20_the_first_differing_token_is_named(index: int) -> None:
    other = list(WORDS)
    other[index] = "odd"
    if index < 59:
        other[-1] = "odder"
    with pytest.raises(IncompatibleDrafterError, match=f"token id {index} is 'odd' .*'w{index}' for the target"):
        draft_with(Words(WORDS), Words(other), vocabulary="same")


def test_fault_20_a_longer_vocabulary_differs_where_the_shorter_ends() -> None:
    with pytest.raises(IncompatibleDrafterError, match=r"token id 58 is None .*'w58' for the target"):
        draft_with(Words(WORDS), Words(WORDS[:58]), vocabulary="same")


def test_fault_20_too_little_in_common_is_refused() -> None:
    others = [f"v{i}" for i in range(50)]
    with pytest.raises(
        IncompatibleDrafterError, match=r"id 1 is 'v0' .*share 10 tokens, 16.7% .*'intersection' drafts"
    ):
        draft_with(Words(WORDS), Words([WORDS[0], *others, *WORDS[1:10]]))
    with pytest.raises(IncompatibleDrafterError, match=r"id 0 is 'v0' .*they share 0 tokens.*'ngram'$"):
        draft_with(Words(WORDS), Words(others), vocabulary="intersection")
    got = draft_with(Words(WORDS), Words([*WORDS[:10], *others]), vocabulary="intersection")
    assert got[0, len(PROMPT) :].tolist() == reference(model_of(named("llama")), PROMPT, 12)


@pytest.mark.parametrize("draft_size", [60, 64, 72])
def test_fault_20_padded_heads_are_fine(draft_size: int) -> None:
    got = draft_with(Words(WORDS), Words(WORDS), draft_size, vocabulary="same")
    assert got[0, len(PROMPT) :].tolist() == reference(model_of(named("llama")), PROMPT, 12)


@pytest.mark.parametrize("how", ["auto", "same"])
@pytest.mark.parametrize("draft_size", [60, 72])
@pytest.mark.parametrize("known", [(None, None), (Words(WORDS), None), (None, Words(WORDS))], ids=["none", "a", "b"])
def test_fault_20_without_tokenizers_sizes_must_agree(known: tuple[Any, Any], draft_size: int, how: str) -> None:
    with pytest.raises(IncompatibleDrafterError, match=f"has {draft_size} token ids and the target 64"):
        draft_with(*known, draft_size, vocabulary=how)


def test_fault_20_an_intersection_takes_both_tokenizers() -> None:
    with pytest.raises(IncompatibleDrafterError, match=r"the draft model's is unknown; pass tokenizer="):
        draft_with(Words(WORDS), None, vocabulary="intersection")
    with pytest.raises(ConfigError, match=r"vocabulary='union'; allowed: 'auto', 'same', 'intersection'"):
        draft_with(Words(WORDS), Words(WORDS), vocabulary="union")


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("draft_size", [60, 72])
def test_fault_20_padding_ids_are_never_drawn(draft_size: int, verifier: str) -> None:
    """A wider head that is sure of a padding id, and a narrower one that lacks the target's last ids."""
    target, draft = model_of(named("llama")), build(named("llama"), seed=1, vocab_size=draft_size)
    if draft_size == 72:
        draft.lm_head.weight[60:] *= 50.0
    same = {"model": draft, "tokenizer": Words(WORDS)}
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=1)):
        llm = specdec.LLM(
            target, tokenizer=Words(WORDS), drafter="draft_model", drafter_options=same, verifier=verifier
        )
        drafted = proposals(llm.engine)
        request = add(llm.engine, PROMPT, 40, sampling=sampling)
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert request.stats.num_rejected_drafts == 0
        assert request.stats.num_draft_tokens > 0
        assert max(request.tokens) < 64
        assert max(drafted) < 60
        if sampling.greedy or verifier == "match":
            plain = engine_of(target)
            alone = add(plain, PROMPT, 40, sampling=sampling)
            while plain.has_unfinished:
                plain.step()
            assert alone.tokens == request.tokens


def proposals(engine: Engine) -> list[int]:
    """Return a list that every drafted token is put into."""
    drafted: list[int] = []
    inner = engine.drafter.propose

    def propose(requests: Any, noise: Any) -> Any:
        tree = inner(requests, noise)
        for row, n in zip(tree.token_ids.tolist(), tree.num_nodes.tolist(), strict=True):
            drafted.extend(row[1:n])
        return tree

    engine.drafter.propose = propose  # type: ignore[method-assign]
    return drafted


@pytest.mark.parametrize("name", DRAFTS)
def test_fault_20_greedy_identity_with_another_vocabulary(name: str) -> None:
    size, words = DRAFTS[name]
    engine = engine_with(other(size), words)
    drafted = proposals(engine)
    assert [r.new_tokens for r in run(engine)] == answers()
    shared = {i for i, word in enumerate(TARGET) if word in words[:size]}
    assert len(set(drafted)) > 5
    assert set(drafted) <= shared


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SEEDED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("how", ["auto", "intersection"])
def test_fault_20_the_target_under_other_ids_is_always_right(how: str, sampling: SamplingParams, verifier: str) -> None:
    requests = run(engine_with(renamed(tuple(rolled(TARGET))), rolled(TARGET), verifier, vocabulary=how), sampling)
    for r in requests:
        assert r.stats.num_accepted_tokens == r.stats.num_draft_tokens > 0
    if verifier == "match" and not sampling.greedy:
        plain = engine_of(model_of(named("llama")))
        assert [r.new_tokens for r in run(plain, sampling)] == [r.new_tokens for r in requests]


def test_fault_20_taken_for_the_same_it_would_be_mostly_wrong() -> None:
    """The test above can fail: ids are not mapped where nobody says that they differ."""
    requests = run(engine_with(renamed(tuple(rolled(TARGET))), TARGET))
    accepted, drafted = (sum(getattr(r.stats, f"num_{k}_tokens") for r in requests) for k in ("accepted", "draft"))
    assert accepted < drafted / 4


@pytest.mark.parametrize("options", [{}, {"tree": [2, 2]}, {"tree": {"depth": 3, "top_k": 2, "total_tokens": 6}}])
def test_fault_20_the_draft_models_own_kv_holds_its_own_spelling(options: dict[str, Any]) -> None:
    """After rejections its cache is that of a fresh run over the text in its own tokens, which is longer."""
    words = DRAFTS["letters"][1]
    engine = engine_with(renamed(tuple(words)), words, "rejection", **options)
    drafter: Any = engine.drafter
    requests = [add(engine, row, 30, sampling=SEEDED) for row in RAGGED]
    longer = 0
    for step in range(7):
        engine.step()
        for r in requests[step % 2 :: 2]:
            if r.finish_reason is None:
                own = [words.index(c) for t in r.tokens for c in TARGET[t]]
                assert drafter._history.of(r.request_id) == own
                if drafter._runner.cache.is_open(r.request_id):
                    assert_fresh_kv(drafter._runner, r.request_id, own)
                    longer += drafter._runner.cache.context_len(r.request_id) > len(r.tokens)
    assert longer > 8
    assert 0 < sum(r.stats.num_accepted_tokens for r in requests) < sum(r.stats.num_draft_tokens for r in requests)


def test_fault_20_the_draft_models_positions_are_its_own() -> None:
    """Its text may reach the last position before the target's does; from there on the target goes on alone."""
    draft = build(named("qwen2"), seed=3, max_position_embeddings=24)
    engine = engine_with(draft, DRAFTS["letters"][1])
    pairs = [52, 53, 54, 55, 56, 57, 58, 59, 60, 61]  # 20 of the draft model's tokens
    request = add(engine, pairs, 16)
    drain(engine)
    assert request.new_tokens == reference(model_of(named("llama")), pairs, 16)
    assert request.stats.num_rejected_drafts == 0
    assert 0 < request.stats.num_draft_tokens < 12


@pytest.mark.parametrize("options", [{}, {"tree": [2, 1], "sampled": True}], ids=["chain", "sampled_tree"])
def test_fault_20_the_law_of_three_tokens(options: dict[str, Any]) -> None:
    target, draft = pair()
    words = list("abcdef")
    torch.manual_seed(17)
    out = specdec.generate(
        target, one(SHORT), do_sample=True, max_new_tokens=LENGTH, num_return_sequences=NUM_SAMPLES // 2,
        drafter="draft_model", verifier="rejection", tokenizer=tokenizer_of(words), max_batch_size=512,
        drafter_options={"model": draft, "tokenizer": tokenizer_of(["e", "x", "c", "a", "y", "d"]), **options},
        prefill_chunk_tokens=4096, max_draft_tokens=3, **FILTERS["cold"],
    )  # fmt: skip
    index = (out[:, len(SHORT) :] * torch.tensor([VOCAB**2, VOCAB, 1])).sum(dim=1)
    assert chi_square_p(torch.bincount(index, minlength=VOCAB**LENGTH), law(FILTERS["cold"]) / 2) > THRESHOLD


def test_fault_20_what_is_shared_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    report_intersection.cache_clear()
    with caplog.at_level(logging.WARNING, "specdec"):
        for _ in range(2):
            engine_with(other(64), DRAFTS["letters"][1])
    said = [r.getMessage() for r in caplog.records if "vocabulary" in r.getMessage()]
    assert said == [
        "the draft model has another vocabulary than the target: they share 52 tokens, 81.2% of the target's; "
        "only these are drafted"
    ]

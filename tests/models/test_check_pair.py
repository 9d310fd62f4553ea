"""`specdec.check_pair`: whether a draft model means the same tokens as the target, and how far it reaches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

import specdec
from specdec.check import PairReport, check_pair
from specdec.errors import IncompatibleDrafterError, ModelLoadError
from specdec.models import loading
from tests.models.architectures import build, model_of, named
from tests.models.tiny_gguf import tiny_llama, write_gguf

WORDS = [f"w{i}" for i in range(64)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))


def tokenizer_of(words: list[str]) -> PreTrainedTokenizerFast:
    vocab = {word: i for i, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token=words[0])))


def saved(folder: Path, words: list[str] | None = WORDS, name: str = "llama", **options: Any) -> Path:
    """Write a model directory without weights."""
    architecture = named(name)
    AutoConfig.for_model(architecture.model_type, **{**architecture.options, **options}).save_pretrained(folder)
    if words is not None:
        tokenizer_of(words).save_pretrained(folder)
    return folder


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loading, "load_causal_lm", lambda *args, **options: pytest.fail("weights were loaded"))
    return saved(tmp_path / "target")


def pair(target: Any, draft: Any, **options: Any) -> PairReport:
    report = check_pair(target, draft, **options)
    json.dumps(report.to_dict())
    return report


def test_a_pair_that_fits(target: Path, tmp_path: Path) -> None:
    report = pair(target, saved(tmp_path / "draft", num_hidden_layers=1))
    assert report.fits
    assert (report.reason, report.warnings) == (None, [])
    assert (report.vocabulary, report.num_shared_tokens) == ("same", None)
    assert (report.target_vocab_size, report.draft_vocab_size) == (64, 64)
    assert (report.target_max_positions, report.draft_max_positions) == (256, 256)


def test_what_two_vocabularies_share(target: Path, tmp_path: Path) -> None:
    words = list(WORDS)
    words[40], words[50] = "other", "another"
    report = pair(target, saved(tmp_path / "draft", words))
    assert report.fits
    assert (report.vocabulary, report.num_shared_tokens, report.shared_token_share) == ("intersection", 62, 62 / 64)
    said = "the draft model has another vocabulary: they share 62 tokens, 96.9% of the target's; only these are drafted"
    assert report.warnings == [said]


def test_the_first_token_that_differs_is_named(target: Path, tmp_path: Path) -> None:
    report = pair(target, saved(tmp_path / "draft", [*WORDS[:5], *(f"v{i}" for i in range(59))]))
    assert not report.fits
    assert (report.vocabulary, report.num_shared_tokens) == (None, None)
    assert "token id 5 is 'v0' for the draft model and 'w5' for the target" in str(report.reason)
    assert "share 5 tokens, 7.8% of the target's" in str(report.reason)


def test_tokens_that_one_side_lacks(target: Path, tmp_path: Path) -> None:
    report = pair(target, saved(tmp_path / "draft", WORDS[:60]))
    assert (report.fits, report.num_shared_tokens) == (True, 60)


@pytest.mark.parametrize(("size", "word"), [(128, "larger"), (62, "smaller")])
def test_padded_vocabularies_fit(size: int, word: str, tmp_path: Path, target: Path) -> None:
    words = WORDS[:60]
    ours = saved(tmp_path / "ours", words)
    report = pair(ours, saved(tmp_path / "draft", words, vocab_size=size))
    assert report.fits
    assert f"the draft model's head has {size} ids and the target's 64; it is {word}" in report.warnings[0]


def test_a_draft_model_that_ends_earlier(target: Path, tmp_path: Path) -> None:
    report = pair(target, saved(tmp_path / "draft", max_position_embeddings=100))
    assert report.fits
    assert "the draft model has 100 positions and the target 256: past 100 tokens" in report.warnings[0]
    assert pair(saved(tmp_path / "draft", max_position_embeddings=100), target).warnings == []


def test_without_tokenizers_only_sizes_are_known(target: Path, tmp_path: Path) -> None:
    report = pair(target, saved(tmp_path / "draft", None))
    assert report.fits
    assert "without both tokenizers" in report.warnings[0]
    report = pair(target, saved(tmp_path / "other", None, vocab_size=100))
    assert not report.fits
    assert "100 token ids and the target 64" in str(report.reason)


def test_tokenizers_may_be_given() -> None:
    big, small = model_of(named("llama")), model_of(named("gemma"))
    assert pair(big, small, target_tokenizer=tokenizer_of(WORDS), draft_tokenizer=tokenizer_of(WORDS)).fits
    other = tokenizer_of([f"v{i}" for i in range(64)])
    assert not pair(big, small, target_tokenizer=tokenizer_of(WORDS), draft_tokenizer=other).fits


def test_a_draft_model_that_cannot_run(target: Path) -> None:
    report = pair(target, AutoConfig.for_model("mamba", vocab_size=64))
    assert not report.fits
    assert str(report.reason).startswith("the draft model cannot run: recurrent state")
    report = pair(AutoConfig.for_model("mamba", vocab_size=64), target)
    assert str(report.reason).startswith("the target cannot run: recurrent state")


def test_gguf_files(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    assert pair(file, file).fits
    assert not (tmp_path / "cache" / "models").exists()
    scaled = write_gguf(
        tmp_path / "scaled.gguf", tiny_llama(), extra=lambda w: w.add_float32("llama.rope.scaling.factor", 4.0)
    )
    assert "RoPE scaling dropped by GGUF loading" in str(pair(file, scaled).reason)


def test_what_is_not_there(target: Path) -> None:
    with pytest.raises(ModelLoadError, match="no file or directory"):
        check_pair(target, "/no/such/dir")


def test_it_says_what_building_says(tmp_path: Path) -> None:
    words = [f"v{i}" for i in range(64)]
    model = build(named("llama"))
    model.save_pretrained(tmp_path / "draft")
    tokenizer_of(words).save_pretrained(tmp_path / "draft")
    report = pair(model, tmp_path / "draft", target_tokenizer=tokenizer_of(WORDS))
    options = {"model": str(tmp_path / "draft")}
    with pytest.raises(IncompatibleDrafterError) as caught:
        specdec.LLM(model, tokenizer=tokenizer_of(WORDS), drafter="draft_model", drafter_options=options)
    assert str(caught.value) == report.reason

"""What the variants of a point are: which of them keep the target's distribution, and what peers are asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from specdec.eval import variants
from specdec.eval.peers import PeerAbsent
from specdec.eval.point import measure_point
from specdec.eval.summary import summarise
from specdec.eval.sweep_point import score_of
from specdec.eval.target import load_target
from specdec.eval.variants import build_variants
from specdec.sampling import warn_without_effect
from tests.eval.known_model import config_for, save_known_model
from tests.tiny_chat_model import save_tiny_chat_model


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_known_model(tmp_path_factory.mktemp("known"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a draft model's folder."""
    return save_tiny_chat_model(tmp_path_factory.mktemp("small"))


def lossless(known: Path, *overrides: str) -> dict[str, bool]:
    config = config_for("acceptance", known, *overrides)
    with build_variants(load_target(config), config) as found:
        return {info.name: info.lossless for info in found.infos}


def test_other_keys_and_values_than_the_baselines_are_lossy(known: Path) -> None:
    beside = ["+beside.int4={drafter: none, kv_dtype: int4}", "+beside.ngram={kv_dtype: int8}", "+beside.oracle={}"]
    expected = {"none": True, "scripted": True, "int4": False, "ngram": False, "oracle": True}
    assert lossless(known, *beside) == expected


def test_a_lossy_rule_is_lossy_over_any_keys_and_values(known: Path) -> None:
    beside = ["+beside.ngram={verifier: typical}", "+beside.oracle={verifier: typical, kv_dtype: int8}"]
    expected = {"none": True, "scripted": True, "ngram": False, "oracle": False}
    assert lossless(known, *beside, "temperature=1.0") == expected


def test_where_the_baseline_has_them_quantised_too_nothing_differs(known: Path) -> None:
    beside = ["+beside.ngram={}", "+beside.oracle={kv_dtype: int8}", "+beside.random={kv_dtype: null}"]
    expected = {"none": True, "scripted": True, "ngram": True, "oracle": True, "random": False}
    assert lossless(known, "engine.kv_dtype=int8", *beside) == expected


def test_a_variant_over_other_keys_and_values_does_not_win(known: Path, tmp_path: Path) -> None:
    settings = ["max_new_tokens=6", "drafter=none", "batch_size=1", "+beside.ngram={kv_dtype: int8}"]
    summary = summarise(measure_point(config_for("acceptance", known, *settings), tmp_path))
    assert summary["variants"]["ngram"]["lossless"] is False
    assert not isinstance(score_of(summary), float)


Asked = dict[str, tuple[int | None, str | None]]


def asked(known: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Asked:
    """Return with which number of draft tokens, and which draft model, each of two peers is built."""
    seen: Asked = {}

    def build(name: str, base: Any, **options: Any) -> None:
        seen[name] = options["num_draft_tokens"], options["draft_model"]
        raise PeerAbsent("not here")

    monkeypatch.setattr(variants, "build_peer", build)
    peers = "peers=[transformers_assisted,transformers_prompt_lookup]"
    config = config_for("acceptance", known, peers, *overrides)
    with build_variants(load_target(config), config) as found:
        assert [entry["name"] for entry in found.absent] == list(seen)
    return seen


def test_settings_of_the_engine_do_not_reach_peers(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in (["engine.max_draft_tokens=1"], ["+beside.ngram={max_draft_tokens: 59}"]):
        found = asked(known, monkeypatch, *settings)
        assert found == {"transformers_assisted": (None, None), "transformers_prompt_lookup": (None, None)}


def test_each_peer_has_settings_of_its_own(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["peer_options.transformers_assisted={num_draft_tokens: 3, draft_model: other}"]
    own += ["peer_options.transformers_prompt_lookup.num_draft_tokens=7"]
    found = asked(known, monkeypatch, *own)
    assert found == {"transformers_assisted": (3, "other"), "transformers_prompt_lookup": (7, None)}


@pytest.mark.parametrize("where", ["main", "beside", "both"])
def test_the_draft_model_is_that_of_the_variant_with_one(
    known: Path, small: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    settings = ["drafter=draft_model", f"drafter.options.model={small}"] if where != "beside" else []
    if where != "main":
        model = small if where == "beside" else known  # the first counts
        settings += [f"+beside.second={{drafter: draft_model, drafter_options: {{model: {model}}}}}"]
    assert asked(known, monkeypatch, *settings)["transformers_assisted"] == (None, str(small))
    other = "peer_options.transformers_assisted.draft_model"
    assert asked(known, monkeypatch, *settings, f"{other}=x")["transformers_assisted"] == (None, "x")
    assert asked(known, monkeypatch, *settings, f"{other}=null")["transformers_assisted"] == (None, None)


def test_options_of_a_peer_that_does_not_run_are_warned_of(
    known: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_without_effect.cache_clear()
    with caplog.at_level(logging.WARNING):
        asked(known, monkeypatch, "peer_options.openvino_draft_model.draft_model=x")
    assert "peer_options.openvino_draft_model: no effect where peers=" in caplog.text


def test_the_assisted_peer_says_which_model_it_runs(known: Path, small: Path, tmp_path: Path) -> None:
    settings = ["max_new_tokens=3", "batch_size=1", "peers=[transformers_assisted]", "prompts.limit=1"]
    model = f"+beside.draft_model={{drafter_options: {{model: {small}}}}}"
    records = measure_point(config_for("acceptance", known, *settings, model), tmp_path)
    (peer,) = [info for info in records.header.variants if info.kind == "peer"]
    assert peer.options == {"assistant_model": str(small)}
    assert peer.max_draft_tokens == 20
    assert peer.note.startswith(f"draft model: {small}; drafts end early")

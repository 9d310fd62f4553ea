"""What is stored of a response is what the target computed over it, and nothing of it is lost or done twice."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec.errors import CheckpointError
from specdec.models.build import runner_for
from specdec.train import store as store_module
from specdec.train.capture import Capture, CaptureConfig, TokenPrompt, about_of, fused_layers
from specdec.train.store import Example, FeatureStore
from tests.decoding import prompts, reference
from tests.heads.plain_forward import features_of
from tests.train.toy import NUM_LAYERS, SPEC, VOCAB_SIZE, WIDTH, toy_examples, toy_model

ROWS = prompts(3, 21, 8, 13, 1, vocab_size=VOCAB_SIZE)
CONFIG = CaptureConfig(max_new_tokens=10, max_batch_size=3, stop_at_repetition=False)


def store_in(folder: Path) -> FeatureStore:
    return FeatureStore(folder, about_of(runner_for(toy_model()), "toy"))


def capture(store: FeatureStore, given: Sequence[TokenPrompt], chunk: int = 512, **changes: Any) -> int:
    capturing = Capture(toy_model(), None, store, replace(CONFIG, **changes))
    capturing._llm.engine._scheduler.prefill_chunk_tokens = chunk
    return capturing.run(given)


def own(temperature: float = 0.0) -> list[TokenPrompt]:
    return [TokenPrompt(f"{i:016x}.0", tuple(row), temperature) for i, row in enumerate(ROWS)]


def assert_plain(example: Example) -> None:
    """Assert that the features are those of one transformers forward, position by position."""
    plain = features_of(toy_model(), example.token_ids.tolist(), SPEC)[: len(example.features)]
    assert example.features.dtype == torch.bfloat16
    assert len(example.features) >= len(example.token_ids) - 1
    assert plain.shape == example.features.shape == (len(plain), (len(SPEC.layers) + 1) * WIDTH)
    torch.testing.assert_close(example.features.to(torch.float32), plain, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("chunk", [4, 512])
def test_features_are_those_of_a_plain_forward(chunk: int, tmp_path: Path) -> None:
    """For drawn, greedy and given responses; prompts shorter and longer than what is run at once."""
    given = [
        TokenPrompt(f"{i:016x}.g", tuple(row), 1.0, tuple(ROWS[i - 1]))
        for i, row in enumerate(ROWS)
        if len(ROWS[i - 1]) > 3
    ]
    drawn = [replace(p, key=p.key[:-1] + "1") for p in own(1.0)]
    store = store_in(tmp_path)
    assert capture(store, [*own(), *given, *drawn], chunk) == 10 * 10 + sum(len(p.response_ids) for p in given)
    found = {e.key: e for e in store.examples()}
    assert len(found) == 10 + len(given)
    for prompt in [*own(), *given, *drawn]:
        example = found[prompt.key]
        assert_plain(example)
        assert example.num_prompt_tokens == len(prompt.token_ids) and example.temperature == prompt.temperature
        assert example.token_ids[: len(prompt.token_ids)].tolist() == list(prompt.token_ids)
        answer = example.token_ids[len(prompt.token_ids) :].tolist()
        if prompt.response_ids:
            assert answer == list(prompt.response_ids)
        elif prompt.temperature == 0:
            assert answer == reference(toy_model(), list(prompt.token_ids), 10)


def test_features_can_be_trained_on(tmp_path: Path) -> None:
    """They are no tensors of inference mode, neither in memory nor from the disk."""
    store = store_in(tmp_path)
    kept: list[Example] = []
    write = store.write
    store.write = lambda examples: (kept.extend(examples), write(examples))[1]  # type: ignore[method-assign]
    capture(store, own())
    for example in [*kept, *store.examples()]:
        assert not example.features.is_inference()
        weight = torch.ones(example.features.shape[1], requires_grad=True)
        (example.features.to(torch.float32) @ weight).sum().backward()
        assert weight.grad is not None


def test_a_killed_capture_keeps_whole_shards_and_goes_on(tmp_path: Path) -> None:
    whole = store_in(tmp_path / "whole")
    capture(whole, own(1.0))
    store = store_in(tmp_path / "killed")

    class Killed(Exception): ...

    capturing = Capture(toy_model(), None, store, replace(CONFIG, shard_tokens=1))
    finish = capturing._finish
    count = 0

    def counted(request_id: int) -> int:
        nonlocal count
        count += 1
        if count == 3:
            raise Killed
        return finish(request_id)

    capturing._finish = counted  # type: ignore[method-assign]
    with pytest.raises(Killed):
        capturing.run(own(1.0))
    kept = store.keys()
    assert len(kept) == 2
    (tmp_path / "killed" / ".shard-half.safetensors.part").write_bytes(b"half")
    before = {path: path.read_bytes() for path in store.shards()}
    assert capture(store_in(tmp_path / "killed"), own(1.0)) == 10 * (len(ROWS) - 2)
    assert all(path.read_bytes() == data for path, data in before.items())
    assert capture(store_in(tmp_path / "killed"), own(1.0)) == 0
    # what is drawn depends on the prompt, not on when it is run
    for left, right in zip(store.examples(), whole.examples(), strict=True):
        assert left.key == right.key and torch.equal(left.token_ids, right.token_ids)
        torch.testing.assert_close(left.features, right.features, rtol=2e-2, atol=2e-2)


def test_features_of_other_weights_are_refused(tmp_path: Path) -> None:
    model = copy.deepcopy(toy_model())
    FeatureStore(tmp_path, about_of(runner_for(model), "toy"))
    FeatureStore(tmp_path, about_of(runner_for(copy.deepcopy(model).to(torch.bfloat16)), "toy"))
    for name in ("model.embed_tokens.weight", "model.layers.5.mlp.up_proj.weight", "model.norm.weight"):
        other = copy.deepcopy(model)
        other.get_parameter(name).data.mul_(1.05)
        with pytest.raises(CheckpointError, match="features of other weights than toy has now; give another folder"):
            FeatureStore(tmp_path, about_of(runner_for(other), "toy"))


def test_what_a_store_says_of_its_responses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    about = about_of(runner_for(toy_model()), "toy", CONFIG)
    FeatureStore(tmp_path / "new", about)
    old = {k: v for k, v in asdict(about).items() if k not in ("probe", "weights", "capture")}
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "store.json").write_text(json.dumps(old))
    FeatureStore(tmp_path / "new", about)
    assert not caplog.records
    FeatureStore(tmp_path / "new", about_of(runner_for(toy_model()), "toy", replace(CONFIG, max_new_tokens=3, seed=4)))
    assert "drawn with max_new_tokens=10, not 3, seed=0, not 4; they are used as they are" in caplog.text
    FeatureStore(tmp_path / "old", about)
    assert "does not say which weights of toy its features are of" in caplog.text


def test_what_is_no_store_is_named(tmp_path: Path) -> None:
    about = about_of(runner_for(toy_model()), "toy")
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"cannot hold features: .*give another folder"):
            FeatureStore(folder, about)
    store = FeatureStore(tmp_path / "store", about)
    save_file({"x": torch.zeros(3)}, store.folder / "shard-foreign.safetensors")
    for read in (store.keys, lambda: list(store.examples())):
        with pytest.raises(CheckpointError, match=r"shard-foreign.* is no shard of features: it has no 'keys'"):
            read()


def test_prompts_that_differ_draw_differently(tmp_path: Path) -> None:
    """Keys that end alike do not share their noise."""
    store = store_in(tmp_path)
    capture(store, [TokenPrompt(f"{i:012x}00ab.0", tuple(ROWS[0]), 2.0) for i in range(4)])
    assert len({tuple(e.token_ids.tolist()) for e in store.examples()}) == 4


def test_a_full_disk_is_said_and_what_was_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path)
    store.write(toy_examples()[:2])
    before = store.keys()

    def full(tensors: Any, path: Path, meta: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "save_file", full)
    with pytest.raises(CheckpointError, match=r"cannot be written.*No space left.*1 earlier shards are whole"):
        capture(store, own())
    assert store.keys() == before and not list(tmp_path.glob(".*.part"))
    monkeypatch.undo()
    capture(store, own())
    assert store.keys() == before | {p.key for p in own()}


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.write(toy_examples()[:2])
    (shard,) = store.shards()
    shard.write_bytes(shard.read_bytes()[:-40])
    for read in (store.keys, lambda: list(store.examples())):
        with pytest.raises(CheckpointError, match=rf"{shard.name} is damaged .*delete it"):
            read()


def test_stored_examples_come_back_as_they_were(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.write(toy_examples()[3:])
    store.write(toy_examples()[:3])
    for left, right in zip(store_in(tmp_path).examples(), toy_examples(), strict=True):
        assert torch.equal(left.token_ids, right.token_ids) and torch.equal(left.features, right.features)
        assert (left.key, left.num_prompt_tokens, left.temperature) == (right.key, right.num_prompt_tokens, 0.0)


def test_features_of_something_else_are_refused(tmp_path: Path) -> None:
    about = store_in(tmp_path).about
    with pytest.raises(CheckpointError, match=r"holds features of .*toy.*give another folder"):
        FeatureStore(tmp_path, replace(about, target="another"))
    with pytest.raises(CheckpointError, match="holds no features"):
        FeatureStore(tmp_path / "none")


def test_short_answers_and_repetitions_are_cut(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    capture(store, own(), max_new_tokens=3)
    assert store.keys() == set()
    capture(store, own(), max_new_tokens=120, stop_at_repetition=True)
    assert min(e.num_response_tokens for e in store.examples()) < 120


def test_fused_layers_follow_the_published_rule() -> None:
    assert fused_layers(28) == (1, 13, 24) and fused_layers(30) == (1, 14, 26) and fused_layers(32) == (1, 15, 28)
    assert fused_layers(NUM_LAYERS) == (1, 2, 2)
    assert all(0 <= layer < n for n in range(1, 6) for layer in fused_layers(n))

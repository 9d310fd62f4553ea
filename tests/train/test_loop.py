"""Runs that are stopped, go on and break off."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.errors import CheckpointError, ConfigError
from specdec.train.batches import collate, plan_batches
from specdec.train.jobs import Ingredients, build_job
from specdec.train.loop import Loop, LoopConfig, learning_rate
from tests.train.toy import toy_examples, toy_model, toy_target, vocabulary_of

CONFIG = LoopConfig(num_tokens=400, batch_tokens=24, learning_rate=1e-2, precision="no", evaluate_tokens=150)


def step_of(method: str = "medusa", **options: Any) -> Any:
    model = toy_model()
    made = Ingredients(model, toy_target(model), vocabulary_of(), toy_examples(), torch.float32, {**options, "seed": 3})
    return build_job(method, made).step


def loop_in(folder: Path, config: LoopConfig = CONFIG, step: Any = None, held_out: Sequence[Any] = ()) -> Loop:
    return Loop(step or step_of(), toy_examples(), held_out, folder, config)


def weights(loop: Loop) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in loop.module.state_dict().items()}


def stopped_after(loop: Loop, batches: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        loop.run(wants_to_stop=lambda: loop.progress.num_batches >= batches)


@pytest.mark.parametrize(("method", "optimizer"), [("eagle3", "muon"), ("medusa", "adamw"), ("draft_model", "adamw")])
def test_a_run_that_was_stopped_ends_with_the_same_weights(method: str, optimizer: str, tmp_path: Path) -> None:
    config = replace(CONFIG, optimizer=optimizer)
    held = toy_examples(4, seed=9)
    whole = loop_in(tmp_path / "whole", config, step_of(method), held)
    begun = weights(whole)
    curve = whole.run()
    for stop in (3, 9):
        stopped_after(loop_in(tmp_path / "parts", config, step_of(method), held), stop)
    last = loop_in(tmp_path / "parts", config, step_of(method), held)
    again = last.run()
    ours, theirs = weights(last), weights(whole)
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert any(not torch.equal(begun[k], theirs[k]) for k in theirs)
    drop = {"seconds"}
    assert [{k: v for k, v in line.items() if k not in drop} for line in again] == [
        {k: v for k, v in line.items() if k not in drop} for line in curve
    ]
    assert len(curve) >= 3 and curve[-1]["acceptance_length"] >= 1.0
    # a run that is over stays as it is
    over = loop_in(tmp_path / "parts", config, step_of(method), held)
    over.run()
    assert all(torch.equal(v, theirs[k]) for k, v in weights(over).items())


def test_points_beyond_the_last_checkpoint_are_dropped(tmp_path: Path) -> None:
    stopped_after(loop_in(tmp_path), 3)
    path = tmp_path / "curve.jsonl"
    reached = json.loads((tmp_path / "latest.json").read_text())["progress"]["num_tokens"]
    lines = [json.dumps({"num_batches": i, "num_tokens": n, "seconds": 1.0}) for i, n in ((1, 20), (3, reached))]
    path.write_text("".join(line + "\n" for line in (*lines, json.dumps({"num_tokens": reached + 1}), '{"num_')))
    stopped_after(loop_in(tmp_path), 4)
    assert path.read_text().splitlines()[:2] == lines
    assert not [n for n in map(json.loads, path.read_text().splitlines()[2:]) if n["num_tokens"] == reached + 1]
    (tmp_path / "latest.json").unlink()
    stopped_after(loop_in(tmp_path), 1)
    assert path.read_text() == "", "a run that begins anew has no points"


def test_tied_weights_are_saved_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = toy_model(tied=True)
    made = Ingredients(model, toy_target(model), vocabulary_of(), toy_examples(), torch.float32, {"seed": 3})
    stopped_after(loop_in(tmp_path, step=build_job("draft_model", made).step), 1)
    assert "shared tensor" not in caplog.text


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    stopped_after(loop_in(tmp_path), 2)
    other = loop_in(tmp_path, replace(CONFIG, learning_rate=1e-3, seed=1))
    with pytest.raises(CheckpointError, match="other values of learning_rate, seed"):
        other.run()


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    stopped_after(loop_in(tmp_path), 2)
    for path in tmp_path.glob("checkpoint-*/*.safetensors"):
        path.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"cannot be read: .*to begin anew"):
        loop_in(tmp_path).run()


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_after(loop_in(tmp_path), 2)
    loop = loop_in(tmp_path)

    def full(folder: str) -> None:
        Path(folder).mkdir()
        raise RuntimeError("PytorchStreamWriter failed writing file: No space left")

    monkeypatch.setattr(loop.accelerator, "save_state", full)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left.*the one before it is whole"):
        loop.run()
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    loop_in(tmp_path).run()


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"cannot hold checkpoints: .*give another folder"):
        loop_in(tmp_path / "file" / "checkpoints")


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    step = step_of()
    next(p for p in step.parameters() if p.requires_grad).data.fill_(math.nan)
    with pytest.raises(CheckpointError, match=r"the loss is nan after 0 tokens; lower the learning rate \(0.01\)"):
        loop_in(tmp_path, step=step).run()


@pytest.mark.parametrize("world", [1, 2, 3, 50])
def test_processes_share_every_batch_of_an_epoch(world: int, tmp_path: Path) -> None:
    loop = loop_in(tmp_path)
    plan = plan_batches(toy_examples(), CONFIG.batch_tokens, CONFIG.seed)
    rounds = math.ceil(len(plan) / world)
    seen: list[list[int]] = []
    tokens = []
    for rank in range(world):
        loop.accelerator = SimpleNamespace(num_processes=world, process_index=rank)
        batches = loop._batches()
        mine = [next(batches) for _ in range(rounds)]
        tokens.append([n for _, n in mine])
        seen += [batch.token_ids.tolist() for batch, _ in mine]
    assert all(row == tokens[0] for row in tokens), "all processes count alike"
    for members in plan:
        assert collate([toy_examples()[i] for i in members]).token_ids.tolist() in seen
    assert len(plan) >= 3


def test_the_plan_holds_every_example_once_and_changes_with_the_seed() -> None:
    examples = toy_examples(15, 4)
    first, second = plan_batches(examples, 8, 0), plan_batches(examples, 8, 1)
    assert sorted(i for members in first for i in members) == list(range(15))
    assert first == plan_batches(examples, 8, 0) != second


def test_the_learning_rate_warms_up_and_falls() -> None:
    config = LoopConfig(learning_rate=1.0, warmup_share=0.1, final_share=0.02)
    rates = [learning_rate(config, i / 100) for i in range(101)]
    assert rates[0] == pytest.approx(0.01) and rates[5] == pytest.approx(0.5) and rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.51) and rates[100] == pytest.approx(0.02)
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(LoopConfig(warmup_share=0.0), 0.0) == LoopConfig().learning_rate


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": math.nan},
        {"checkpoint_minutes": -1.0},
        {"warmup_share": 1.0},
        {"betas": (0.9, 1.0)},
        {"clip_norm": 0.0},
        {"seed": -1},
        {"num_tokens": 0},
        {"batch_tokens": True},
        {"precision": "fp8"},
        {"optimizer": "sgd"},
    ],
    ids=str,
)
def test_wrong_values_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.*allowed"):
        LoopConfig(**wrong)
    with pytest.raises(ConfigError, match="nothing to train on"):
        Loop(None, [], [], Path(), CONFIG)

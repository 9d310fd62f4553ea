"""Heads on disk: what is written, what is the target's and is not, and that a failed write changes nothing."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec.errors import CheckpointError
from specdec.heads import writing
from specdec.heads.loading import load_head
from specdec.heads.saving import save_head
from tests.heads.small_heads import VOCAB_SIZE, WIDTH, small_eagle, small_medusa, small_target


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_eagle_is_written_without_what_its_target_has(tmp_path: Path) -> None:
    target = small_target()
    head = small_eagle(target)
    folder = save_head(tmp_path / "new" / "head", head.module, head.vocabulary, target, settings={"tree": "2.1"})
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == set(head.module.state_dict()) | {"draft_ids"}
    assert not [name for name in tensors if name.startswith(("lm_head", "embed_tokens"))]
    assert torch.equal(tensors["draft_ids"], head.vocabulary.target_ids.to(torch.int32))
    for name, tensor in head.module.state_dict().items():
        assert torch.equal(tensors[name], tensor.half()), name
    config = json.loads((folder / "config.json").read_text())
    assert (config["format"], config["format_version"], config["kind"]) == ("specdec-head", 1, "eagle")
    assert config["settings"] == {"tree": "2.1"}
    assert config["head"]["feature_layers"] == [1, 2, 4]
    assert type(head.module.config)(**config["head"] | {"feature_layers": (1, 2, 4)}) == head.module.config
    assert config["target"] == {
        "name": "a/target", "hidden_size": WIDTH, "vocab_size": VOCAB_SIZE, "probe": target.probe(),
    }  # fmt: skip
    assert target.name in (folder / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.joinpath("new").iterdir()) == ["head"]


def test_own_rows_are_written_and_a_whole_vocabulary_is_not(tmp_path: Path) -> None:
    target = small_target()
    head = small_eagle(target, drafted=VOCAB_SIZE, own_rows=True)
    folder = save_head(tmp_path / "head", head.module, head.vocabulary, target, dtype=torch.float32, card="# Mine")
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], head.module.lm_head.weight)
    assert "draft_ids" not in tensors
    assert (folder / "README.md").read_text() == "# Mine\n"


def test_who_may_read_a_head_is_what_the_umask_says(tmp_path: Path) -> None:
    target = small_target()
    head = small_medusa(target)
    before = os.umask(0o027)
    try:
        for _ in range(2):  # a new folder, and one that is there
            save_head(tmp_path / "head", head.module, head.vocabulary, target)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "head").iterdir()} == {0o640}
    assert (tmp_path / "head").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("own_heads", [False, True])
def test_medusa_is_written(tmp_path: Path, own_heads: bool) -> None:
    target = small_target()
    head = small_medusa(target, own_heads=own_heads)
    head.module.lm_head = torch.nn.Linear(WIDTH, VOCAB_SIZE)  # as training may hold the target's: never written
    tensors = load_file(save_head(tmp_path / "head", head.module, head.vocabulary, target) / "model.safetensors")
    assert {name.split(".")[0] for name in tensors} == ({"blocks", "lm_heads"} if own_heads else {"blocks"})
    assert json.loads((tmp_path / "head" / "config.json").read_text())["kind"] == "medusa"


def test_a_head_that_stands_there_is_replaced_and_other_files_are_left(tmp_path: Path) -> None:
    target = small_target()
    head = small_eagle(target)
    folder = save_head(tmp_path / "run", head.module, head.vocabulary, target)
    (folder / "loss.csv").write_text("1,2\n")
    save_head(folder, head.module, head.vocabulary, target, settings={"tree": "3"})
    assert json.loads((folder / "config.json").read_text())["settings"] == {"tree": "3"}
    assert sorted(contents(folder)) == ["README.md", "config.json", "loss.csv", "model.safetensors"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_file_too_large_for_the_disk_changes_nothing(tmp_path: Path, exists: bool) -> None:
    target = small_target()
    head = small_eagle(target)
    if exists:
        save_head(tmp_path / "head", head.module, head.vocabulary, target)
    before = contents(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written.*nothing was changed"):
            save_head(tmp_path / "head", head.module, head.vocabulary, target, dtype=torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"] * exists


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_an_error_of_the_system_changes_nothing(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_target()
    head = small_eagle(target)

    def fails(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(code, "no room")

    monkeypatch.setattr(writing, "save_file", fails)
    with pytest.raises(CheckpointError, match="no room"):
        save_head(tmp_path / "head", head.module, head.vocabulary, target)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("last", ["README.md", "model.safetensors", "config.json"])
def test_moving_that_breaks_off_leaves_one_state_or_none(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights under an old config would load, where shapes agree, and draft badly."""
    target = small_target()
    head = small_eagle(target)
    folder = save_head(tmp_path / "head", head.module, head.vocabulary, target)
    before = contents(tmp_path)
    replaced = Path.replace

    def fails(self: Path, to: Path) -> Path:
        if self.name == last:
            raise OSError(errno.EIO, "broken")
        return replaced(self, to)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(CheckpointError, match=r"in part: .*Write it again" if last == "config.json" else "broken"):
        save_head(folder, head.module, head.vocabulary, target)
    if last == "config.json":
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
            load_head(folder, target)
    else:
        now = contents(tmp_path)
        assert {k: v for k, v in now.items() if "README" not in str(k)} == {
            k: v for k, v in before.items() if "README" not in str(k)
        }


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    target = small_target()
    head = small_eagle(target)
    (tmp_path / "head").write_text("mine")
    with pytest.raises(CheckpointError, match="head is a file"):
        save_head(tmp_path / "head", head.module, head.vocabulary, target)
    assert (tmp_path / "head").read_text() == "mine"


def test_weights_without_a_finite_value_in_the_type_are_refused(tmp_path: Path) -> None:
    target = small_target()
    head = small_eagle(target)
    head.module.fc.weight.data[0, 0] = 1e5
    with pytest.raises(CheckpointError, match=r"fc.weight cannot be stored in float16.*100000.*float32"):
        save_head(tmp_path / "head", head.module, head.vocabulary, target)
    head.module.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="NaN"):
        save_head(tmp_path / "head", head.module, head.vocabulary, target, dtype=torch.float32)
    assert not list(tmp_path.iterdir())

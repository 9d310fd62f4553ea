"""GGUF files: converted once and exactly, or refused by name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.errors import ModelLoadError
from specdec.models import gguf as converter
from specdec.models import gguf_tokenizer
from specdec.models.gguf import convert_gguf, converted_dir, find_damage
from specdec.models.gguf_header import read_header
from tests.models.tiny_gguf import tiny_llama, vocabulary, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def llama() -> Any:
    return tiny_llama()


@pytest.fixture
def file(tmp_path: Path, llama: Any) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", llama)


def state(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict())


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Type.F32, torch.float32), (Type.F16, torch.float16), (Type.BF16, torch.bfloat16)]
)
def test_plain_floats_come_back_bit_for_bit(tmp_path: Path, kind: Type, dtype: torch.dtype) -> None:
    model = tiny_llama(dtype)
    folder = convert_gguf(write_gguf(tmp_path / "tiny.gguf", model, kind=kind))
    loaded = state(folder)
    assert loaded.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], tensor), name


def test_quantised_weights_become_bfloat16(tmp_path: Path, llama: Any) -> None:
    loaded = state(convert_gguf(write_gguf(tmp_path / "tiny.gguf", llama, kind=Type.Q8_0)))
    name = "model.layers.1.mlp.up_proj.weight"
    blocks = gguf.quants.quantize(llama.state_dict()[name].numpy(), Type.Q8_0)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, Type.Q8_0)).bfloat16()
    assert loaded[name].dtype == torch.bfloat16
    assert torch.equal(loaded[name], expected)


def test_logits_are_the_original_models(file: Path, llama: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(convert_gguf(file), dtype="auto")
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, llama(ids).logits, rtol=0, atol=1e-5)


def test_converted_once_and_readable_by_others(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = convert_gguf(file)
    reference = file.stat().st_mode & 0o044
    assert all(path.stat().st_mode & 0o044 == reference for path in folder.iterdir())
    assert str(file.parent) not in (folder / "config.json").read_text()
    monkeypatch.setattr(converter, "_build", lambda *_: pytest.fail("converted again"))
    assert convert_gguf(file) == folder
    (file.parent / "elsewhere").mkdir()
    assert convert_gguf(Path(shutil.move(file, file.parent / "elsewhere" / "tiny.gguf"))) == folder


def test_changed_file_gets_its_own_directory(file: Path) -> None:
    before = converted_dir(file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert converted_dir(file) != before


def test_progress_is_logged(file: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level("INFO", logger="specdec"):
        convert_gguf(file)
    assert f"converting {file} once, about 1 s" in caplog.text
    assert "it/s" not in capfd.readouterr().err


class TestTokenizer:
    def test_smollm_splits_digits_from_white_space(self, file: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(convert_gguf(file))
        tokens = tokenizer.convert_ids_to_tokens(tokenizer("\n\t12 hello<|end|>")["input_ids"])
        assert tokens == ["Ċ", "ĉ", "1", "2", "Ġ", "hell", "o", "<|end|>"]
        split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("\n\t12")
        assert [piece for piece, _ in split] == ["Ċĉ", "1", "2"]
        assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.model_max_length) == (0, 1, 128)
        assert tokenizer.decode(tokenizer("a , b n't")["input_ids"]) == "a , b n't"

    def test_no_token_lies_outside_the_models_vocabulary(self, file: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(convert_gguf(file))
        assert len(tokenizer) == len(vocabulary())
        assert max(tokenizer("<|endoftext|> <|pad|>")["input_ids"]) < len(vocabulary())

    @pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
    def test_known_name_is_silent(self, tmp_path: Path, llama: Any, pre: str, recwarn: Any) -> None:
        if pre not in gguf_tokenizer._known_to_transformers() | {"gpt-2"}:
            pytest.skip("this transformers splits as for GPT-2")
        convert_gguf(write_gguf(tmp_path / "tiny.gguf", llama, pre=pre))
        assert not [w for w in recwarn if "pre-tokenizer" in str(w.message)]

    def test_unknown_name_warns(self, tmp_path: Path, llama: Any) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", llama, pre="my-own")
        with pytest.warns(UserWarning, match="'my-own', which transformers does not know"):
            convert_gguf(path)

    def test_model_without_tokenizer_is_converted(self, tmp_path: Path, llama: Any) -> None:
        folder = convert_gguf(write_gguf(tmp_path / "tiny.gguf", llama, pre=None))
        assert find_damage(folder) is None
        assert not (folder / "tokenizer.json").exists()


class TestRefused:
    def check(self, path: Path, match: str) -> None:
        with pytest.raises(ModelLoadError, match=match):
            convert_gguf(path, advice="reinstall it")
        assert not converted_dir(path).exists()

    def test_rope_factors(self, tmp_path: Path, llama: Any) -> None:
        def extra(writer: gguf.GGUFWriter) -> None:
            writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))

        path = write_gguf(tmp_path / "tiny.gguf", llama, extra=extra)
        self.check(path, r"tiny.gguf uses RoPE scaling \(rope_freqs.weight\).*Load the original")

    @pytest.mark.parametrize(("kind", "factor"), [("yarn", 4.0), ("linear", 2.0), (None, 2.0), ("longrope", 1.0)])
    def test_rope_scaling(self, tmp_path: Path, llama: Any, kind: str | None, factor: float) -> None:
        def extra(writer: gguf.GGUFWriter) -> None:
            if kind is not None:
                writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_float32("llama.rope.scaling.factor", factor)

        path = write_gguf(tmp_path / "tiny.gguf", llama, extra=extra)
        self.check(path, r"llama\.rope\.scaling\.(type|factor)")

    @pytest.mark.parametrize(("kind", "factor"), [("none", 1.0), ("linear", 1.0)])
    def test_rope_scaling_by_nothing_is_fine(self, tmp_path: Path, llama: Any, kind: str, factor: float) -> None:
        def extra(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_float32("llama.rope.scaling.factor", factor)
            writer.add_rope_scaling_orig_ctx_len(128)

        assert find_damage(convert_gguf(write_gguf(tmp_path / "tiny.gguf", llama, extra=extra))) is None

    def test_split_file(self, tmp_path: Path, llama: Any) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", llama, extra=lambda writer: writer.add_uint16("split.count", 2))
        self.check(path, "one part of a split model")

    def test_missing_weight(self, tmp_path: Path, llama: Any) -> None:
        self.check(
            write_gguf(tmp_path / "tiny.gguf", llama, without="blk.1.ffn_up.weight"), "lacks 1 weights .*up_proj"
        )

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "odd")
        writer.add_tensor("a.weight", np.zeros(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self.check(tmp_path / "odd.gguf", "odd.gguf cannot be converted.*architecture odd")

    def test_no_room(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage(file.parent)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        self.check(file, "needs 1 MB .*0 MB are free; make room or set SPECDEC_CACHE")

    @pytest.mark.parametrize("cut", [1, 40_000])
    def test_truncated_data(self, file: Path, cut: int) -> None:
        size = file.stat().st_size
        expected = read_header(file).expected_bytes
        os.truncate(file, size - cut - (size - expected))
        self.check(file, rf"is truncated: {expected} bytes expected, {expected - cut} bytes found; reinstall it")

    def test_truncated_anywhere_in_the_header(self, file: Path) -> None:
        header = read_header(file)
        for length in [*range(4, 40), *range(40, header.data_start, 97)]:
            os.truncate(file, length)
            with pytest.raises(ModelLoadError, match=r"damaged.*download the file again"):
                read_header(file)
            os.truncate(file, header.file_bytes)

    @pytest.mark.parametrize("content", [b"", b"GG", b"hello world"])
    def test_other_content(self, file: Path, content: bytes) -> None:
        file.write_bytes(content)
        self.check(file, "is not a GGUF file.*reinstall it")

    def test_garbage_after_the_magic(self, file: Path) -> None:
        generator = np.random.default_rng(0)
        for _ in range(200):
            file.write_bytes(b"GGUF" + generator.bytes(200))
            with pytest.raises(ModelLoadError):
                read_header(file)
        for _ in range(200):
            file.write_bytes(b"GGUF\x03\0\0\0" + generator.integers(0, 9, 400, np.uint8).tobytes())
            with pytest.raises(ModelLoadError):
                read_header(file)

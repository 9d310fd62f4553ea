"""Peers that run GGUF files, against stand-ins for their packages: what they are asked, and what is made of answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import LLM
from specdec.eval.peers import PeerAbsent, build_peer, genai, llamacpp
from tests.tiny_chat_model import save_tiny_chat_model

FILE = Path("/models/target.gguf")
PROMPT, COUNT = [3, 4, 5], 7


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture
def gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "gguf_path", lambda source: FILE)


def build(name: str, llm: LLM, **options: Any) -> Any:
    settings = {"temperature": 0.0, "seed": None, "num_draft_tokens": 2, **options}
    return build_peer(name, llm, source="target", **settings)


class FakeLlama:
    """Answers 100, 101, ...; with a draft model a forward gives up to three of them."""

    def __init__(self, path: str, **options: Any) -> None:
        self.path, self.options = path, options
        self.log: list[str] = []

    def reset(self) -> None:
        self.log.append("reset")

    def set_seed(self, seed: int) -> None:
        self.log.append(f"seed {seed}")

    def generate(self, tokens: list[int], **sampling: Any) -> Iterator[int]:
        self.log.append(f"prompt {tokens}")
        self.sampling = sampling
        draft, number = self.options.get("draft_model"), 100
        yield number
        while True:
            block = 1
            if draft is not None:
                block += len(draft(tokens))
            for _ in range(block):
                number += 1
                yield number

    def close(self) -> None:
        self.log.append("closed")


@pytest.fixture
def fake_llama(monkeypatch: pytest.MonkeyPatch, gguf: None) -> None:
    lookup = SimpleNamespace(
        LlamaPromptLookupDecoding=lambda max_ngram_size, num_pred_tokens: lambda ids: [0] * num_pred_tokens
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=FakeLlama))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", lookup)


def test_llama_cpp_gets_ids_and_no_earlier_prompts_cache(llm: LLM, fake_llama: None) -> None:
    peer = build("llama_cpp", llm, temperature=0.5, seed=11)
    llama = peer._llama
    assert llama.path == str(FILE) and llama.options["n_threads"] == llama.options["n_threads_batch"] > 0
    (answer,) = peer.run([PROMPT], [COUNT])
    assert answer.token_ids == list(range(100, 100 + COUNT))
    assert [tokens for _, tokens in answer.emissions] == [1] * COUNT
    peer.run([PROMPT], [COUNT])
    assert llama.log == ["reset", "seed 11", f"prompt {PROMPT}"] * 2
    assert llama.sampling == {"temp": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
    peer.close()
    assert llama.log[-1] == "closed"


@pytest.mark.parametrize(("count", "blocks"), [(1, [1]), (4, [1, 3]), (6, [1, 3, 2]), (8, [1, 3, 3, 1])])
def test_llama_cpp_lookup_groups_tokens_by_forward(llm: LLM, fake_llama: None, count: int, blocks: list[int]) -> None:
    peer = build("llama_cpp_prompt_lookup", llm)
    assert peer.info.max_draft_tokens == 2
    for _ in range(2):
        (answer,) = peer.run([PROMPT], [count])
        assert answer.token_ids == list(range(100, 100 + count))
        assert [tokens for _, tokens in answer.emissions] == blocks
        assert [at for at, _ in answer.emissions] == sorted(at for at, _ in answer.emissions)


class FakeStreamer:
    def __init__(self) -> None: ...


class FakePipeline:
    """Answers 200, 201, ... in blocks of three, and one token more than it was asked for."""

    def __init__(self, path: str, device: str, **options: Any) -> None:
        self.path, self.device, self.options = path, device, options

    def generate(self, inputs: Any, config: Any, streamer: Any) -> Any:
        self.inputs, self.config = inputs, config
        ids = list(range(200, 200 + config.max_new_tokens + 1))
        for i in range(0, len(ids), 3):
            streamer.write(ids[i : i + 3])
        streamer.end()
        return SimpleNamespace(tokens=[ids])


@pytest.fixture
def fake_openvino(monkeypatch: pytest.MonkeyPatch, gguf: None) -> None:
    package = SimpleNamespace(
        LLMPipeline=FakePipeline,
        StreamerBase=FakeStreamer,
        StreamingStatus=SimpleNamespace(RUNNING=0),
        SchedulerConfig=lambda: SimpleNamespace(enable_prefix_caching=True),
        GenerationConfig=lambda **options: SimpleNamespace(**options),
        TokenizedInputs=lambda ids, mask: (ids, mask),
        draft_model=lambda path, device, **options: (path, device),
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", package)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda array: array.tolist()))


def test_openvino_gets_ids_and_shares_no_prefixes(llm: LLM, fake_openvino: None) -> None:
    peer = build("openvino", llm)
    (answer,) = peer.run([PROMPT], [COUNT])
    assert answer.token_ids == list(range(200, 200 + COUNT))  # what it gives beyond is cut off
    assert [tokens for _, tokens in answer.emissions] == [3, 3, 1]
    pipeline = peer._pipeline
    assert (pipeline.path, pipeline.device) == (str(FILE), "CPU")
    assert pipeline.inputs == ([PROMPT], [[1] * len(PROMPT)])
    assert pipeline.options["scheduler_config"].enable_prefix_caching is False
    assert pipeline.options["INFERENCE_NUM_THREADS"] > 0
    assert pipeline.config.ignore_eos and pipeline.config.max_new_tokens == COUNT and not pipeline.config.do_sample


def test_openvino_lookup_says_what_it_drafts_and_that_its_sampling_is_not_exact(llm: LLM, fake_openvino: None) -> None:
    peer = build("openvino_prompt_lookup", llm, temperature=0.7, seed=5)
    peer.run([PROMPT], [COUNT])
    config = peer._pipeline.config
    assert (config.num_assistant_tokens, config.do_sample, config.temperature, config.rng_seed) == (2, True, 0.7, 5)
    assert peer._pipeline.options["prompt_lookup"] is True
    assert not peer.info.lossless and "speculative sampling" in peer.info.note


def test_openvino_converts_a_named_gguf_draft_model_in_a_folder_of_its_own(
    llm: LLM, fake_openvino: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named = tmp_path / "small.gguf"
    named.write_bytes(b"GGUF")
    converted = []

    def pipeline(path: str, device: str, **options: Any) -> FakePipeline:
        if options.get("enable_save_ov_model"):
            converted.append((path, Path(path).read_bytes()))
        return FakePipeline(path, device, **options)

    monkeypatch.setattr(sys.modules["openvino_genai"], "LLMPipeline", pipeline)
    peer = build("openvino_draft_model", llm, draft_model=str(named))
    ((path, data),) = converted
    assert data == b"GGUF" and Path(path).parent != tmp_path
    assert peer._pipeline.options["draft_model"] == (str(Path(path).parent), "CPU")
    assert not Path(path).parent.exists()
    assert peer.info.options["draft_model"] == str(named)


def test_openvino_converts_no_draft_model_with_an_embedding_of_its_own(
    llm: LLM, fake_openvino: None, tmp_path: Path
) -> None:
    other = save_tiny_chat_model(tmp_path / "other")
    with pytest.raises(PeerAbsent, match=r"other has an embedding of its own.* peer_options\.openvino_draft_model"):
        build("openvino_draft_model", llm, draft_model=str(other))


def test_openvino_takes_a_folder_of_its_own(llm: LLM, fake_openvino: None, tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").write_text("<net/>")
    peer = build("openvino_draft_model", llm, draft_model=str(tmp_path), num_draft_tokens=None)
    assert peer._pipeline.options["draft_model"] == (str(tmp_path), "CPU")
    assert (peer.info.max_draft_tokens, peer.info.options["draft_model"]) == (5, str(tmp_path))


@pytest.mark.parametrize("name", ["llama_cpp", "llama_cpp_prompt_lookup", "openvino", "openvino_draft_model"])
def test_what_is_not_installed_is_absent(llm: LLM, gguf: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in ("llama_cpp", "llama_cpp.llama_speculative", "openvino_genai"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PeerAbsent, match=r"is not installed; pip install 'torch-specdec\[peers\]'"):
        build(name, llm)


@pytest.mark.parametrize("name", ["llama_cpp", "openvino", "openvino_prompt_lookup"])
def test_targets_that_are_no_gguf_files_are_absent(
    llm: LLM, fake_llama: None, fake_openvino: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(llamacpp, "gguf_path", lambda source: None)
    with pytest.raises(PeerAbsent, match="it runs GGUF files, and the target target is none"):
        build(name, llm)


@pytest.mark.parametrize(("name", "owner"), [("llama_cpp", "llama_cpp"), ("openvino", "openvino_genai")])
def test_files_that_do_not_load_are_absent(
    llm: LLM, fake_llama: None, fake_openvino: None, monkeypatch: pytest.MonkeyPatch, name: str, owner: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("unknown architecture")

    loader = "Llama" if name == "llama_cpp" else "LLMPipeline"
    monkeypatch.setattr(sys.modules[owner], loader, fail)
    with pytest.raises(PeerAbsent, match=r"cannot load .*target\.gguf \(RuntimeError\): unknown architecture"):
        build(name, llm)


def test_other_weights_are_said(llm: LLM, fake_llama: None, fake_openvino: None) -> None:
    assert build("llama_cpp", llm).info.note == llamacpp.NOTE
    assert build("openvino", llm).info.note == genai.NOTE

"""The built-in model in the peers themselves, where their packages are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM
from specdec.api import gguf_path
from specdec.eval.peers import build_peer
from specdec.eval.peers.draft_gguf import write_draft_gguf
from specdec.eval.peers.hf import find_draft_model
from specdec.eval.peers.interface import PeerSettings

pytestmark = pytest.mark.slow
COUNT = 14
NEEDS = {"llama_cpp": "llama_cpp", "openvino": "openvino_genai"}
REAL = [
    "transformers_assisted",
    "llama_cpp",
    "llama_cpp_prompt_lookup",
    "openvino",
    "openvino_prompt_lookup",
    "openvino_draft_model",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Peers take torch's number, and wait for each other in busy loops: on shared cores that is minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm(smollm2: tuple[Any, Any]) -> LLM:
    return LLM(smollm2[0], tokenizer=smollm2[1])


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    texts = ("Explain to a child why the sky is blue.", "List five fruits, then list them again.")
    return [llm.chat_token_ids([{"role": "user", "content": text}]) for text in texts]


@pytest.mark.parametrize("name", REAL)
def test_counts_are_equal_and_nothing_is_left_of_the_last_prompt(name: str, llm: LLM, prompts: list[list[int]]) -> None:
    needed = next((package for start, package in NEEDS.items() if name.startswith(start)), None)
    if needed is not None:
        pytest.importorskip(needed)
    peer = build_peer(name, llm, source="smollm2", temperature=0.0, seed=None, num_draft_tokens=4)
    try:
        answers = [peer.run([prompt], [COUNT])[0] for prompt in (*prompts, prompts[0])]
    finally:
        peer.close()
    for answer in answers:
        assert len(answer.token_ids) == COUNT == sum(tokens for _, tokens in answer.emissions)
        times = [at for at, _ in answer.emissions]
        assert times == sorted(times)
        assert len(times) < COUNT or name in ("llama_cpp", "openvino", "llama_cpp_prompt_lookup")
    assert answers[0].token_ids == answers[2].token_ids
    if not name.startswith("openvino"):  # whose weights are others
        same = llm.generate(prompts[0], max_new_tokens=COUNT, ignore_eos=True)[0].token_ids
        assert answers[0].token_ids[:8] == same[:8]


def test_the_shipped_draft_model_written_as_gguf_is_the_same_model(llm: LLM, tmp_path: Path) -> None:
    settings = PeerSettings(llm, "smollm2", 0.0, None, None)
    draft = find_draft_model(settings, whole_head=True)
    target = gguf_path("smollm2")
    assert target is not None
    write_draft_gguf(draft, target, tmp_path / "draft.gguf")
    again = LLM(str(tmp_path / "draft.gguf"), dtype="float32").model
    ids = torch.tensor([[9690, 198, 2683, 359, 253, 5356, 5646, 11173]])
    with torch.no_grad():
        expected, got = draft(ids).logits, again(ids).logits
    assert expected.shape == got.shape
    # int8 with a scale per row became int8 with a scale per 32 of them.
    assert float((got - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_the_assistant_drafts_what_the_drafter_would(llm: LLM) -> None:
    settings = PeerSettings(llm, "smollm2", 0.0, None, None)
    some, whole = find_draft_model(settings), find_draft_model(settings, whole_head=True)
    ids = torch.tensor([[9690, 198, 2683, 359]])
    with torch.no_grad():
        logits, others = some(ids).logits, whole(ids).logits
    drafted = logits > torch.finfo(logits.dtype).min
    assert 0 < int(drafted[0, 0].sum()) < logits.shape[-1]
    torch.testing.assert_close(logits[drafted], others[drafted])

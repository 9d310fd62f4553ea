"""Peers of transformers, on a tiny random model: their tokens, their counts, and when tokens came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, ConfigError
from specdec.eval.peers import PEERS, PeerAbsent, PeerAnswer, build_peer, hf
from specdec.eval.peers.hf import transformers_answer
from specdec.eval.peers.interface import import_peer
from tests.tiny_chat_model import save_tiny_chat_model

PROMPTS = [[5, 9, 30, 9, 5, 9, 30, 9], [40, 41, 42], [7, 7, 7, 7, 7, 90, 91, 92, 93, 94, 95, 96]]
COUNTS = [17, 9, 12]
OURS = [name for name in PEERS if name.startswith("transformers")]
ALONE = ["transformers_assisted", "transformers_prompt_lookup"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    llm = LLM(str(folder), dtype="float64")
    # An EOS token that comes early: every answer has to go on past it.
    llm.model.generation_config.eos_token_id = generated(llm, PROMPTS[0], 3)[-1]
    return llm


def generated(llm: LLM, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = llm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def build(name: str, llm: LLM, folder: Path, **options: Any) -> Any:
    settings = {"temperature": 0.0, "seed": None, "num_draft_tokens": 3, "draft_model": str(folder), **options}
    return build_peer(name, llm, source=str(folder), **settings)


def check(answer: PeerAnswer, count: int) -> None:
    assert len(answer.token_ids) == count
    assert sum(tokens for _, tokens in answer.emissions) == count
    times = [at for at, _ in answer.emissions]
    assert times == sorted(times) and times[0] > 0
    assert all(tokens >= 1 for _, tokens in answer.emissions)


@pytest.mark.parametrize("name", OURS)
def test_greedy_ids_are_those_of_generate_past_eos_with_equal_counts(name: str, llm: LLM, folder: Path) -> None:
    peer = build(name, llm, folder)
    assert peer.info.name == name and peer.info.kind == "peer" and peer.info.lossless
    try:
        for prompt, count in zip(PROMPTS, COUNTS, strict=True):
            (answer,) = peer.run([prompt], [count])
            check(answer, count)
            assert answer.token_ids == generated(llm, prompt, count)
    finally:
        peer.close()
    assert llm.is_current  # the engine's model is as it was


@pytest.mark.parametrize("name", [name for name in OURS if name not in ALONE])
def test_each_row_of_a_batch_has_its_own_prompt_and_count(name: str, llm: LLM, folder: Path) -> None:
    peer = build(name, llm, folder)
    assert peer.max_batch >= len(PROMPTS)
    try:
        answers = peer.run(PROMPTS, COUNTS)
    finally:
        peer.close()
    for answer, prompt, count in zip(answers, PROMPTS, COUNTS, strict=True):
        check(answer, count)
        assert answer.token_ids == generated(llm, prompt, count)


@pytest.mark.parametrize("name", ALONE)
def test_what_transformers_drafts_for_one_prompt_only_says_so(name: str, llm: LLM, folder: Path) -> None:
    assert build(name, llm, folder).max_batch == 1


def test_tokens_of_one_step_come_in_one_emission(llm: LLM, folder: Path) -> None:
    # The draft model has the target's weights, but does not always trust itself: blocks of up to 3 + 1.
    peer = build("transformers_assisted", llm, folder)
    (answer,) = peer.run([PROMPTS[0]], [16])
    assert max(tokens for _, tokens in answer.emissions) > 1
    assert max(tokens for _, tokens in answer.emissions) <= 4
    assert peer.info.max_draft_tokens == 3


def test_plain_generate_gives_one_token_at_a_time(llm: LLM, folder: Path) -> None:
    (answer,) = build("transformers", llm, folder).run([PROMPTS[0]], [5])
    assert [tokens for _, tokens in answer.emissions] == [1] * 5


def test_a_seed_repeats_sampled_answers_and_leaves_torchs_generator_alone(llm: LLM, folder: Path) -> None:
    peer = build("transformers", llm, folder, temperature=1.0, seed=3)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first, second = (peer.run([PROMPTS[0]], [12])[0].token_ids for _ in range(2))
    assert first == second != generated(llm, PROMPTS[0], 12)
    assert torch.equal(torch.rand(1), expected)


def test_an_engines_draft_model_keeps_its_own_config(llm: LLM, folder: Path) -> None:
    own = LLM(llm.model, tokenizer=llm.tokenizer, drafter="draft_model", drafter_options={"model": llm.model})
    before = llm.model.generation_config.num_assistant_tokens
    build("transformers_assisted", llm, folder)
    assert own.engine.drafter.model is llm.model
    assert llm.model.generation_config.num_assistant_tokens == before


def test_without_a_draft_model_the_assisted_peer_is_absent(llm: LLM, folder: Path) -> None:
    with pytest.raises(PeerAbsent, match="no draft model for"):
        build("transformers_assisted", llm, folder, draft_model=None)


def test_a_target_that_transformers_cannot_run_is_absent(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such cache")

    monkeypatch.setattr(type(llm.model), "generate", fail)
    with pytest.raises(PeerAbsent, match=r"does not run this target \(NotImplementedError\): no such cache"):
        build("transformers", llm, folder)


def test_one_greedy_answer(llm: LLM) -> None:
    assert transformers_answer(llm.model, PROMPTS[1], 6) == generated(llm, PROMPTS[1], 6)


def test_unknown_peers_are_refused_with_the_nearest_name(llm: LLM, folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama_cpp'"):
        build("lama_cpp", llm, folder)


def test_a_peer_for_one_prompt_is_not_loaded_for_more(llm: LLM, folder: Path) -> None:
    for name in PEERS:
        if name in ALONE or not name.startswith("transformers"):
            with pytest.raises(PeerAbsent, match="takes one prompt at once, batch_size is 2"):
                build_peer(
                    name, llm, source="none", temperature=0.0, seed=None, num_draft_tokens=None, batch_size=2
                )  # fmt: skip
        else:
            peer = build(name, llm, folder, batch_size=2)
            assert peer.max_batch > 1
            peer.close()


def test_the_assisted_peer_says_what_it_runs_with(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build("transformers_assisted", llm, folder, num_draft_tokens=None).info.max_draft_tokens == 20
    for installed, said in ((True, "adapted with scikit-learn"), (False, "0.4, without scikit-learn")):
        monkeypatch.setattr(hf, "find_spec", lambda name, installed=installed: installed)
        assert said in hf._threshold()


def test_what_is_missing_is_told_from_what_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("not_there", "not_there.part"):
        with pytest.raises(PeerAbsent, match="some-package is not installed"):
            import_peer(module, "some-package")
    (tmp_path / "needs_more.py").write_text("import not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PeerAbsent, match=r"cannot be imported \(ModuleNotFoundError\)"):
        import_peer("needs_more", "some-package")


def asking(folder: Path, **settings: Any) -> LLM:
    """Return a target whose generation config asks for something."""
    llm = LLM(str(folder), dtype="float64")
    for name, value in settings.items():
        setattr(llm.model.generation_config, name, value)
    return llm


def engines(llm: LLM, prompt: list[int], count: int) -> list[int]:
    return llm.generate(prompt, max_new_tokens=count, ignore_eos=True)[0].token_ids


@pytest.mark.parametrize("name", OURS)
def test_logits_processors_of_the_generation_config_apply_as_in_the_engine(name: str, llm: LLM, folder: Path) -> None:
    plain = generated(llm, PROMPTS[0], COUNTS[0])
    suppressing = asking(folder, suppress_tokens=plain[1:3], remove_invalid_values=True)
    peer = build(name, suppressing, folder)
    try:
        (answer,) = peer.run([PROMPTS[0]], [COUNTS[0]])
    finally:
        peer.close()
    assert answer.token_ids == engines(suppressing, PROMPTS[0], COUNTS[0]) != plain


@pytest.mark.parametrize("name", OURS)
def test_processors_that_read_the_answer_apply_or_the_peer_is_absent(name: str, llm: LLM, folder: Path) -> None:
    penalising = asking(folder, repetition_penalty=1.3)
    if name == "transformers_generate_batch":  # it would leave the penalty out without a word
        with pytest.raises(PeerAbsent, match=r"does not apply what .* asks for: RepetitionPenaltyLogitsProcessor"):
            build(name, penalising, folder)
        return
    (answer,) = build(name, penalising, folder).run([PROMPTS[0]], [COUNTS[0]])
    expected = engines(penalising, PROMPTS[0], COUNTS[0])
    assert answer.token_ids == expected != generated(llm, PROMPTS[0], COUNTS[0])


@pytest.mark.parametrize("cut", [{"min_p": 0.5}, {"typical_p": 0.2}, {"epsilon_cutoff": 0.5}, {"top_k": 1}])
def test_a_models_own_cuts_of_the_distribution_do_not_apply(llm: LLM, folder: Path, cut: dict[str, Any]) -> None:
    expected, cutting = (
        build("transformers", own, folder, temperature=1.0, seed=3).run([PROMPTS[0]], [16])[0].token_ids
        for own in (llm, asking(folder, **cut))
    )
    assert cutting == expected


def test_a_seedless_batch_draws_from_the_whole_distribution(folder: Path) -> None:
    peer = build("transformers_generate_batch", asking(folder, top_k=1, min_p=0.9), folder, temperature=1.0)
    try:
        answers = {tuple(peer.run([PROMPTS[0]], [12])[0].token_ids) for _ in range(3)}
    finally:
        peer.close()
    assert len(answers) > 1

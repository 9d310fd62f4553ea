"""EAGLE heads in an engine: heads that know everything, steps that fail, prompts in pieces, memory, and wrong heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.build import build_drafter
from specdec.drafters import eagle
from specdec.drafters.autoregression import draw_chain
from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.heads.loaded import LoadedHead
from specdec.heads.saving import save_head
from specdec.heads.target import head_target
from specdec.interfaces import DraftRequest, Observation, SamplingParams, TokenTree
from specdec.models.build import runner_for
from tests.decoding import add, drain, engine_of, prompts, reference
from tests.drafters.looping import looping_model
from tests.drafters.test_eagle import DYNAMIC, PROMPTS, RAGGED, compared, engine_with, head_of, noise_of, text_of, told
from tests.faults import test_sampling_end_to_end as sampling_tests
from tests.faults.test_alignment import Corruption
from tests.heads.plain_forward import features_of, plain_forward
from tests.heads.tiny_heads import tiny_eagle, tiny_medusa
from tests.models.architectures import build, model_of, named
from tests.odd_drafters import Wrapped
from tests.test_engine import Once
from tests.verifiers.enumeration import chi_square_p

DEEP = [[0], [1], [0, 0], [0, 0, 0], [0, 0, 0, 0]]


@cache
def knowing_head(generation: int) -> LoadedHead:
    """Return a head that says what the looping model says, from the token of its own row.

    EAGLE-3's attention is made to see its own row only: equal queries and keys that the position alone turns.
    """
    options: dict[str, Any] = {"attention_bias": True, "norm_before_residual": True} if generation == 3 else {}
    head = tiny_eagle(runner_for(looping_model()), generation=generation, num_kv_heads=4, **options)
    module: Any = head.module
    layer, width = module.layers[0], 32
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.fill_(float("norm" in name))
        if generation == 1:
            module.fc.weight[:, :width] = 10 * torch.eye(width)
            return head
        layer.self_attn.q_proj.bias.fill_(10.0)
        layer.self_attn.k_proj.bias.fill_(10.0)
        layer.self_attn.v_proj.weight[:, :width] = torch.eye(width)
        layer.self_attn.o_proj.weight.copy_(10 * torch.eye(width))
        module.fc.weight[:, :width] = torch.eye(width)
    return head


@pytest.mark.parametrize("tree", ["chain", DEEP, DYNAMIC], ids=["chain", "static", "dynamic"])
@pytest.mark.parametrize("generation", [1, 3])
def test_fault_08_a_head_that_knows_is_accepted_whole(generation: int, tree: Any) -> None:
    """Also while prompts are read in pieces, in a batch of uneven requests."""
    engine = engine_with(looping_model(), knowing_head(generation), tree, max_draft_tokens=8, prefill_chunk_tokens=9)
    requests = [add(engine, prompt, 30) for prompt in RAGGED]
    drain(engine)
    depth = {"chain": 8}.get(str(tree), 3 if tree is DYNAMIC else 4)
    for prompt, request in zip(RAGGED, requests, strict=True):
        assert request.new_tokens == text_of(looping_model(), tuple(prompt))[len(prompt) :]
        # While more than a tree's tokens are to come; then fewer nodes fit.
        assert [n for _, n in request.stats.emissions[1:4]] == [depth + 1] * 3


def test_fault_08_a_head_that_knows_is_accepted_up_to_a_forced_error() -> None:
    engine = engine_with(looping_model(), knowing_head(3), max_draft_tokens=4)
    corruption = Corruption([0, 1, 0, 3, 2, 4, 0, 0])
    engine.drafting.drafter = Wrapped(engine.drafter, corruption)
    requests = [add(engine, prompt, 40) for prompt in PROMPTS]
    while engine.has_unfinished:
        corruption.expected.clear()
        for output in engine.step():
            assert output.num_accepted == corruption.expected.get(output.request_id, 0)
    assert all(r.finish_reason == "length" for r in requests)


@pytest.mark.parametrize(
    "stage", ["propose", "after_propose", "second_forward", "catch_up", "commit", "observe", "after_observe"]
)
def test_a_failed_step_leaves_nothing_out_of_step(stage: str) -> None:
    """Hidden states of steps that are undone are gone: the head goes on from the next ones, aligned, as compared."""
    model = model_of(named("llama"))
    head = head_of(model)
    engine = engine_with(model, head, max_draft_tokens=4)
    drafter: Any = engine.drafter
    plain = compared(engine, model, head, PROMPTS, [2, 0, 4])
    requests = [add(engine, prompt, 24) for prompt in PROMPTS]
    for at in (1, 2, 1):
        engine.step()
        engine.step()
        owner, name, after = {
            "propose": (drafter, "propose", False),
            "after_propose": (drafter, "propose", True),
            "second_forward": (drafter, "_forward", False),
            "catch_up": (drafter, "_forward", True),
            "commit": (drafter._cache, "commit", True),
            "observe": (drafter, "observe", False),
            "after_observe": (drafter, "observe", True),
        }[stage]
        calls = {"second_forward": 2, "commit": at}.get(stage, 1)
        fault = Once(owner, name, KeyboardInterrupt(), calls, after=after)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        fault.undo()
        num_compared = plain.num_compared
        engine.step()
        assert (plain.num_compared == num_compared) == ("observe" in stage)
    while engine.has_unfinished:
        engine.step()
    assert [r.new_tokens for r in requests] == [t[len(p) :][:24] for p, t in zip(PROMPTS, plain.texts, strict=True)]
    assert plain.num_compared >= 9
    # Where they were told anew, what the head sees begins behind it.
    assert (plain.num_rows[-1] < len(requests[2].tokens) - 12) == ("observe" in stage)


def test_fault_17_acceptance_does_not_know_how_a_prompt_was_read() -> None:
    """In one chunk or many, alone or beside a request with the same beginning, after another or first."""
    model = model_of(named("llama"))
    long = prompts(41, seed=5)[0]
    rows = [long, [*long[:32], 7, 9], long[:32]]
    head = fitted_head(model, rows)

    def run(together: bool, **options: Any) -> list[Any]:
        engine = engine_with(model, head, [2, 2, 1], max_draft_tokens=8, **options)
        found = []
        for group in [rows] if together else [[row] for row in rows]:
            requests = [add(engine, row, 20) for row in group]
            drain(engine)
            found += [(r.new_tokens, r.stats.accepted_at, r.stats.num_steps) for r in requests]
        return found

    cold = run(together=False)
    assert sum(sum(accepted) for _, accepted, _ in cold) >= 6
    assert run(together=True) == cold
    assert run(together=True, prefill_chunk_tokens=3) == cold
    assert run(together=False, prefill_chunk_tokens=16) == cold


def fitted_head(model: Any, rows: Sequence[list[int]]) -> LoadedHead:
    """Return a head that is sometimes right about the answers to `rows`: its output rows are fitted to them."""
    head = tiny_eagle(runner_for(model), own_parts=True)
    module: Any = head.module
    said, wanted = [], []
    for row in rows:
        text = text_of(model, tuple(row))
        features = features_of(model, text[:-1], module.config.features)[:-1]
        with torch.no_grad():
            said.append(module.norm(plain_forward(head, module.fuse(features), text[1:-1])))
        wanted.append(torch.tensor(text[2:]))
    target = torch.nn.functional.one_hot(torch.cat(wanted), 64).double()
    module.lm_head.weight.data = torch.linalg.lstsq(torch.cat(said), target).solution.T.contiguous()
    return head


@cache
def six_tokens() -> tuple[Any, LoadedHead]:
    """Return a target of six tokens and a head that drafts four of them."""
    target, _ = sampling_tests.pair()
    return target, tiny_eagle(runner_for(target), drafted=[0, 2, 3, 5], seed=1)


@pytest.mark.parametrize(("tree", "sampled"), [("chain", False), ([2, 2], True)], ids=["chain", "drawn"])
def test_fault_02_the_law_of_three_tokens(tree: Any, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens outside the draft vocabulary have probability 0 in draft_probs, and their own in the output."""
    _, head = six_tokens()
    monkeypatch.setattr(sampling_tests, "NUM_SAMPLES", 1000)
    options = {"model": head, "tree": tree, "sampled": sampled}
    law = sampling_tests.FILTERS["cold"]
    counts = sampling_tests.sample(law, "rejection", "eagle3", drafter_options=options, max_draft_tokens=6)
    assert chi_square_p(counts, sampling_tests.law(law)) > sampling_tests.THRESHOLD


def test_fault_02_the_law_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions that are not those the tokens were drawn from are found."""
    _, head = six_tokens()

    def dishonest(*args: Any) -> TokenTree:
        tree = draw_chain(*args)
        assert tree.draft_probs is not None
        upside_down = torch.where(tree.draft_probs > 0, 1 / tree.draft_probs, 0.0)
        return replace(tree, draft_probs=upside_down / upside_down.sum(dim=1, keepdim=True))

    monkeypatch.setattr(sampling_tests, "NUM_SAMPLES", 1000)
    monkeypatch.setattr(eagle, "draw_chain", dishonest)
    law = sampling_tests.FILTERS["plain"]
    counts = sampling_tests.sample(law, "rejection", "eagle3", drafter_options={"model": head, "tree": "chain"})
    assert chi_square_p(counts, sampling_tests.law(law)) < 1e-6


def test_a_chain_over_a_draft_vocabulary_stops_where_it_is_unsure() -> None:
    """As one over scattered logits does, greedy and sampled requests side by side."""
    ids = torch.tensor([1, 3, 4, 6])
    generator = torch.Generator().manual_seed(2)
    table = 1.5 * torch.randn(8, 4, generator=generator)
    full = torch.full((8, 8), float("-inf"))
    full[:, ids] = table
    sampled = SamplingParams(temperature=0.8, seed=1)
    requests = [DraftRequest(i, i, 5, 6, s, 0.8) for i, s in enumerate([SamplingParams(), sampled, sampled])]
    own = draw_chain(requests, noise_of(requests), lambda rows, last: table[last], 8, ids)
    scattered = draw_chain(requests, noise_of(requests), lambda rows, last: full[last], 8)
    assert torch.equal(own.token_ids, scattered.token_ids)
    assert torch.equal(own.num_nodes, scattered.num_nodes)
    assert own.draft_probs is not None
    assert scattered.draft_probs is not None
    torch.testing.assert_close(own.draft_probs, scattered.draft_probs)
    assert int(own.num_nodes.min()) < 7


def test_fault_13_past_the_heads_positions_the_target_goes_on_alone() -> None:
    model = model_of(named("llama"))
    engine = engine_with(model, head_of(model, max_positions=16), max_draft_tokens=4)
    requests = [add(engine, prompt, 24) for prompt in RAGGED]
    drafter: Any = engine.drafter
    while engine.has_unfinished:
        engine.step()
        for i, text in drafter._texts.items():
            assert text.end <= 16 or (not text._waiting.parts and not drafter._cache.is_open(i))
    assert [r.new_tokens for r in requests] == [text_of(model, tuple(row))[len(row) :][:24] for row in RAGGED]
    assert requests[0].stats.num_draft_tokens > 0
    assert requests[4].stats.num_draft_tokens == 0


@pytest.mark.parametrize("chunk", [4, 512])
def test_without_memory_for_the_head_the_target_goes_on_alone(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether that shows while drafting or while hearing of tokens; what waits does not grow."""
    monkeypatch.setattr(eagle, "_CHUNK_ROWS", chunk)
    monkeypatch.setattr(eagle, "_FIRST_RUN_ROWS", 3)
    model = model_of(named("llama"))
    engine = engine_with(model, head_of(model), max_draft_tokens=4)
    drafter: Any = engine.drafter
    requests = [add(engine, prompt, 20) for prompt in PROMPTS]
    engine.step()
    engine.step()
    drafter._cache.max_bytes = drafter._cache._pool.num_used * drafter._cache.bytes_per_token
    while engine.has_unfinished:
        engine.step()
        assert all(sum(map(len, text._waiting.parts)) < max(chunk, 40) for text in drafter._texts.values())
    assert [r.new_tokens for r in requests] == [text_of(model, tuple(row))[len(row) :][:20] for row in PROMPTS]
    drafter._cache.check_integrity()


def test_rows_heard_again_or_otherwise() -> None:
    """The same again changes nothing; another text begins anew; without hidden states nothing is drafted."""
    model = model_of(named("llama"))
    drafter: Any = engine_with(model, head_of(model)).drafter
    text, other = prompts(12, 12, seed=3)

    def drafted(tokens: list[int]) -> list[int]:
        request = DraftRequest(0, tokens[-1], len(tokens) - 1, 3, SamplingParams())
        return drafter.propose([request], noise_of([request])).token_ids[0, 1:].tolist()

    told(drafter, model, 0, text[:7])
    first = drafted(text[:7])
    assert len(first) == 3
    told(drafter, model, 0, text[:7])
    assert drafted(text[:7]) == first
    told(drafter, model, 0, text, 7)
    told(drafter, model, 0, text, 5)
    second = drafted(text)
    told(drafter, model, 0, text[:5] + other[5:])
    third = drafted(text[:5] + other[5:])
    drafter.observe([Observation(0, 0, torch.tensor(text))])
    assert drafted(text) == []
    assert drafted(text[:-1]) == []
    told(drafter, model, 0, text)
    assert drafted(text) == second
    drafter.release(0)
    told(drafter, model, 0, text[:5] + other[5:])
    assert drafted(text[:5] + other[5:]) == third
    assert drafted(text) == []


class TestWhichHead:
    def refused(self, error: type[Exception], complaint: str, name: str = "eagle3", **options: Any) -> None:
        with pytest.raises(error, match=complaint):
            build_drafter(name, runner_for(model_of(named("llama"))), None, options)

    def test_heads_that_do_not_fit_are_refused(self) -> None:
        llama, wide = (runner_for(m) for m in (model_of(named("llama")), build(named("llama"), hidden_size=48)))
        self.refused(IncompatibleDrafterError, "is for drafter='eagle3'", "eagle", model=tiny_eagle(llama))
        self.refused(IncompatibleDrafterError, "is for drafter='eagle'", model=tiny_eagle(llama, generation=1))
        self.refused(IncompatibleDrafterError, "is for drafter='medusa'", model=tiny_medusa(llama))
        self.refused(
            IncompatibleDrafterError, r"hidden size 48 and 64 tokens; .* has 32 and 64", model=tiny_eagle(wide)
        )
        half = tiny_eagle(llama)
        half.module.to(torch.float16)
        self.refused(IncompatibleDrafterError, "loaded as torch.float16", model=half)
        self.refused(IncompatibleDrafterError, "no eagle3 head ships for")
        self.refused(ConfigError, "model is a int", model=3)
        deep = tiny_eagle(llama, feature_layers=(0, 5))
        with pytest.raises(IncompatibleDrafterError, match=r"layers \[5\]"):
            engine_with(model_of(named("llama")), deep)

    def test_shapes(self) -> None:
        model = model_of(named("llama"))
        head = head_of(model, settings={"tree": DYNAMIC})
        self.refused(ConfigError, "sampled=True goes with a static tree", model=head, tree="chain", sampled=True)
        self.refused(ConfigError, "tree='eagle9'", model=head, tree="eagle9")
        advised: Any = build_drafter("eagle3", runner_for(model), None, {"model": head})
        assert not advised.samples
        assert advised._shape.total_tokens == 9
        chain: Any = build_drafter("eagle3", runner_for(model), None, {"model": head, "tree": "chain"})
        assert chain._shape is None
        assert chain.samples
        only_chains = engine_with(model, head).target
        only_chains.supports_trees = False
        with pytest.raises(IncompatibleDrafterError, match="chains only; leave tree out"):
            build_drafter("eagle3", only_chains, None, {"model": head, "tree": [2, 1]})
        without: Any = build_drafter("eagle3", only_chains, None, {"model": head})
        assert without._shape is None

    def test_a_saved_head_is_loaded_once_per_target(self, tmp_path: Path) -> None:
        model = model_of(named("llama"))
        head = head_of(model, drafted=range(0, 64, 2))
        runner = runner_for(model)
        save_head(tmp_path, head.module, head.vocabulary, head_target(runner), dtype=torch.float64)
        out = {}
        for kind in (head, str(tmp_path), tmp_path):
            engine = engine_with(model, head)
            engine = engine_of(model, "eagle3", {"model": kind}, runner=engine.target, max_draft_tokens=3)
            requests = [add(engine, prompt, 12) for prompt in PROMPTS]
            drain(engine)
            out[repr(kind)] = [r.stats.num_accepted_tokens for r in requests]
        assert len({str(counts) for counts in out.values()}) == 1
        assert sum(isinstance(key, tuple) and str(tmp_path) in key for key in runner.loaded) == 1


def test_trees_are_whole_up_to_the_last_tokens() -> None:
    """What is left to generate bounds the depth of a tree, not its nodes."""
    model = model_of(named("llama"))
    engine = engine_of(
        model, "eagle3", {"model": tiny_eagle(runner_for(model)), "tree": [3, 2, 1]}, max_draft_tokens=15
    )
    request = add(engine, prompts(7)[0], 8)
    drafted = []
    while engine.has_unfinished:
        before = request.stats.num_draft_tokens
        left = request.num_remaining
        engine.step()
        drafted.append((left, request.stats.num_draft_tokens - before))
    assert request.new_tokens == reference(model, prompts(7)[0], 8)
    assert all(nodes == 15 for left, nodes in drafted[1:] if left > 3)
    assert all(nodes == left - 1 for left, nodes in drafted[1:] if left <= 3)
    assert drafted[1:]

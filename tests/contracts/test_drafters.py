"""What every registered drafter keeps, new ones included: it may be slow, it may not be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.build import build_drafter
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.interfaces import DraftRequest, FeatureSpec, Observation, SamplingParams, TokenTree
from specdec.kv.cache import KVCache
from specdec.models.runner import ModelRunner
from specdec.noise import KeyedNoise
from specdec.registry import DRAFTERS
from specdec.request import Request
from specdec.tree import check_tree
from tests.decoding import add, drain, engine_of, prompts, reference
from tests.heads.tiny_heads import tiny_eagle, tiny_medusa
from tests.models.architectures import model_of, named
from tests.odd_drafters import Wrapped

PROMPTS = prompts(3, 7, 12)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0, seed=4)
# Options a drafter cannot do without, or that are worth a second round. A new drafter that needs none needs no entry.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "draft_model": [  # the model is filled in below: it is built only when a test runs
        {"model": None},
        {"model": None, "tree": [2, 1], "sampled": True},
        {"model": None, "tree": {"depth": 3, "top_k": 2, "total_tokens": 5}},
    ],
    "eagle": [{"model": None}],
    "eagle3": [
        {"model": None, "tree": "chain"},
        {"model": None, "tree": [2, 1], "sampled": True},
        {"model": None, "tree": {"depth": 3, "top_k": 2, "total_tokens": 5}},
    ],
    "medusa": [{"model": None}, {"model": None, "tree": "chain"}, {"model": None, "tree": "best"}],
    "oracle": [{}, {"width": 2, "accept_rate": 0.5}],
    "adversary": [{}, {"width": 3}],
    "scripted": [{"accept_counts": [0, 2, 1]}, {"accept_counts": [1], "width": 2}],
    "random": [{}, {"branching": [2, 2]}, {"branching": [2, 1], "with_replacement": True}, {"with_probs": False}],
    "ngram": [{}, {"max_ngram": 1}],
    "suffix": [{}, {"tree": True, "offset": 3, "min_token_prob": 0.0}, {"share": True, "max_depth": 3}],
    "token_recycling": [{}, {"tree": None}, {"tree": [3, 2], "top_k": 4}],
    "early_exit": [{}, {"tree": [2, 2, 1]}, {"num_layers": 2}, {"num_layers": 2, "tree": "eagle"}],
}
CASES = [
    pytest.param(name, options, id=f"{name}-{i}")
    for name in DRAFTERS.names()
    for i, options in enumerate(OPTIONS.get(name, [{}]))
]
each = pytest.mark.parametrize(("name", "options"), CASES)


def model_for(name: str, runner: ModelRunner) -> Any:
    """Return what a drafter that needs `model` is given for this target."""
    if name in ("eagle", "eagle3"):
        generation = 3 if name == "eagle3" else 1
        return tiny_eagle(runner, generation=generation, drafted=range(1, 64, 2) if generation == 3 else None)
    if name == "medusa":
        return tiny_medusa(runner, drafted=range(1, 64, 2))
    return model_of(named("qwen2"))


def build(name: str, options: dict[str, Any]) -> Engine:
    """Return an engine with a fresh drafter over a cache of its own."""
    model = model_of(named("llama"))
    runner = engine_of(model).target.with_own_cache()
    if "model" in options:
        options = {**options, "model": model_for(name, runner)}
    return engine_of(model, name, options, runner=runner, max_draft_tokens=4)


def prefilled(engine: Engine, sampling: SamplingParams = GREEDY) -> list[Request]:
    """Return requests after prefill and one more step, with a reservation open as a step opens it."""
    requests = [add(engine, prompt, 20, sampling=sampling) for prompt in PROMPTS]
    for _ in range(2):
        engine.step()
    for r in requests:
        engine.target.cache.reserve(r.request_id, 1 + 6)
    return requests


def asked(requests: Sequence[Request], most: Sequence[int]) -> list[DraftRequest]:
    return [
        DraftRequest(r.request_id, r.tokens[-1], len(r.tokens) - 1, n, r.sampling)
        for r, n in zip(requests, most, strict=True)
    ]


def noise(requests: Sequence[Request]) -> KeyedNoise:
    positions = torch.tensor([len(r.tokens) - 1 for r in requests])
    return KeyedNoise(torch.arange(len(requests)), positions, torch.zeros(len(requests), dtype=torch.bool))


def propose(engine: Engine, requests: Sequence[Request], most: Sequence[int]) -> TokenTree:
    tree = engine.drafter.propose(asked(requests, most), noise(requests))
    if engine.drafter.shares_target_kv:
        for r in requests:
            engine.target.cache.rewind(r.request_id)
    return tree


@each
def test_it_says_what_it_is(name: str, options: dict[str, Any]) -> None:
    drafter = build(name, options).drafter
    assert drafter.name == name
    assert isinstance(drafter.features, FeatureSpec)
    assert drafter.max_position is None or isinstance(drafter.max_position, int)
    assert isinstance(drafter.shares_target_kv, bool)
    assert isinstance(drafter.samples, bool)


@each
def test_greedy_output_is_the_targets(name: str, options: dict[str, Any]) -> None:
    engine = build(name, options)
    requests = [add(engine, prompt, 14) for prompt in PROMPTS]
    drain(engine)
    assert [r.new_tokens for r in requests] == [reference(model_of(named("llama")), p, 14) for p in PROMPTS]
    assert sum(r.stats.num_rejected_drafts for r in requests) == 0


@each
def test_seeded_output_is_the_undrafted_one(name: str, options: dict[str, Any]) -> None:
    outputs = []
    for engine in (build("none", {}), build(name, options)):
        requests = [add(engine, prompt, 14, sampling=SAMPLED) for prompt in PROMPTS]
        drain(engine)
        outputs.append([r.new_tokens for r in requests])
        assert sum(r.stats.num_rejected_drafts for r in requests) == 0
    assert outputs[0] == outputs[1]


@each
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("most", [(1, 1, 1), (4, 4, 4), (1, 4, 2), (6, 1, 5)], ids=str)
def test_proposals_are_valid_and_within_bounds(
    name: str, options: dict[str, Any], sampling: SamplingParams, most: tuple[int, ...]
) -> None:
    engine = build(name, options)
    requests = prefilled(engine, sampling)
    tree = propose(engine, requests, most)
    assert check_tree(tree, asked(requests, most), 64) == [None] * 3
    assert tree.token_ids[:, 0].tolist() == [r.tokens[-1] for r in requests]
    assert bool((tree.num_nodes - 1 <= torch.tensor(most)).all())
    assert (tree.draft_probs is not None) <= (engine.drafter.samples and not sampling.greedy) or name == "random"


@each
def test_a_part_of_the_batch_can_be_asked(name: str, options: dict[str, Any]) -> None:
    engine = build(name, options)
    requests = prefilled(engine)
    for part in (requests[1:], requests[:1], requests[::-1]):
        tree = propose(engine, part, [3] * len(part))
        assert tree.token_ids[:, 0].tolist() == [r.tokens[-1] for r in part]


@each
def test_a_proposal_leaves_the_target_alone(name: str, options: dict[str, Any]) -> None:
    engine = build(name, options)
    requests = prefilled(engine)
    cache = engine.target.cache

    def state() -> list[Any]:
        lengths = [cache.context_len(r.request_id) for r in requests]
        return [lengths, [cache.contents(r.request_id, layer) for r in requests for layer in cache.layers]]

    lengths, before = state()
    tokens = [list(r.tokens) for r in requests]
    for most in ((4, 4, 4), (2, 5, 1)):
        propose(engine, requests, most)
        now_lengths, now = state()
        assert now_lengths == lengths
        for old, new in zip(before, now, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
        assert [r.tokens for r in requests] == tokens
    cache.check_integrity()


@each
def test_proposing_again_proposes_the_same(name: str, options: dict[str, Any]) -> None:
    """A step that failed after drafting is drafted again."""
    engine = build(name, options)
    requests = prefilled(engine, SAMPLED)
    first, second = (propose(engine, requests, (4, 3, 4)) for _ in range(2))
    assert torch.equal(first.num_nodes, second.num_nodes)
    for b, n in enumerate(first.num_nodes.tolist()):
        assert torch.equal(first.token_ids[b, :n], second.token_ids[b, :n])
        assert torch.equal(first.parents[b, :n], second.parents[b, :n])


@each
def test_hearing_everything_twice_changes_nothing(name: str, options: dict[str, Any]) -> None:
    class Echo(Wrapped):
        def observe(self, seen: Sequence[Observation]) -> None:
            self.inner.observe(seen)
            self.inner.observe(seen)

    def run(engine: Engine) -> list[Any]:
        requests = [add(engine, prompt, 16) for prompt in PROMPTS]
        drain(engine)
        return [(r.tokens, r.stats.num_draft_tokens, r.stats.accepted_at) for r in requests]

    once, twice = build(name, options), build(name, options)
    twice.drafting.drafter = Echo(twice.drafter)
    assert run(once) == run(twice)


@each
def test_steps_without_drafts_are_heard_too(name: str, options: dict[str, Any]) -> None:
    """A drafter that was not asked for a while goes on as if it had been."""
    engine = build(name, options)
    request = add(engine, PROMPTS[1], 24)
    for step in range(40):
        engine._scheduler.max_draft_tokens = 0 if step % 5 < 3 else 4
        engine.step()
        if request.finish_reason is not None:
            break
    assert request.new_tokens == reference(model_of(named("llama")), PROMPTS[1], 24)
    assert request.stats.num_rejected_drafts == 0


def mentions(thing: Any, request_id: int, seen: set[int]) -> list[str]:
    """Return where an object's own attributes still hold something under `request_id`."""
    if id(thing) in seen or isinstance(thing, ModelRunner | torch.Tensor | torch.nn.Module | type):
        return []
    seen.add(id(thing))
    if isinstance(thing, dict):
        found = ["a dict"] if request_id in thing else []
        return found + [f"{k}: {m}" for k, v in thing.items() for m in mentions(v, request_id, seen)]
    if isinstance(thing, KVCache):
        return ["a KV cache"] if thing.is_open(request_id) else []
    if type(thing).__module__.startswith(("specdec", "drafters")):
        slots = [s for c in type(thing).__mro__ for s in getattr(c, "__slots__", ())]
        names = [*getattr(thing, "__dict__", {}), *slots]
        return [f"{n}: {m}" for n in names for m in mentions(getattr(thing, n, None), request_id, seen)]
    return []


@each
def test_release_frees_everything(name: str, options: dict[str, Any]) -> None:
    engine = build(name, options)
    requests = prefilled(engine)
    propose(engine, requests, (4, 4, 4))
    kept = requests.pop()
    for r in requests:
        engine.drafter.release(r.request_id)
        engine.drafter.release(r.request_id)  # again changes nothing
        assert mentions(engine.drafter, r.request_id, {id(engine.target.cache)}) == []
        own = getattr(engine.drafter, "_runner", engine.target)
        assert own is engine.target or own.cache is engine.target.cache or not own.cache.is_open(r.request_id)
    engine.drafter.release(10**9)  # never heard of
    tree = propose(engine, [kept], [3])
    assert tree.token_ids[0, 0] == kept.tokens[-1]


@each
def test_a_finished_run_leaves_nothing_behind(name: str, options: dict[str, Any]) -> None:
    engine = build(name, options)
    requests = [add(engine, prompt, 6) for prompt in PROMPTS]
    engine.step()
    engine.abort(requests[0].request_id)
    drain(engine)
    for r in requests:
        assert mentions(engine.drafter, r.request_id, {id(engine.target.cache)}) == []
        assert not engine.target.cache.is_open(r.request_id)
    assert engine.target.cache._pool.num_used == 0
    engine.drafter.reset()
    again = add(engine, PROMPTS[0], 6)
    drain(engine)
    assert again.new_tokens == reference(model_of(named("llama")), PROMPTS[0], 6)


@pytest.mark.parametrize("name", DRAFTERS.names())
def test_an_unknown_option_is_refused(name: str) -> None:
    runner = engine_of(model_of(named("llama"))).target
    with pytest.raises(ConfigError, match=f"drafter '{name}' has no option 'max_ngrams'"):
        build_drafter(name, runner, None, {"max_ngrams": 3})


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("ngram", {"max_ngram": 0}, "1 <= min_ngram <= max_ngram"),
        ("ngram", {"max_ngram": 2, "min_ngram": 3}, "min_ngram=3, max_ngram=2"),
        ("ngram", {"max_ngram": "3"}, "max_ngram='3'"),
        ("oracle", {"accept_rate": 1.5}, "accept_rate=1.5; allowed: 0 to 1"),
        ("oracle", {"width": 0}, "width=0"),
        ("scripted", {"accept_counts": []}, "at least one number"),
        ("scripted", {"accept_counts": [1, -1]}, "accept_counts"),
        ("random", {"branching": [0]}, "branching"),
    ],
)
def test_values_out_of_range_are_refused(name: str, options: dict[str, Any], complaint: str) -> None:
    runner = engine_of(model_of(named("llama"))).target
    with pytest.raises(ConfigError, match=complaint):
        build_drafter(name, runner, None, options)


def test_a_missing_option_is_named() -> None:
    runner = engine_of(model_of(named("llama"))).target
    with pytest.raises(ConfigError, match="accept_counts"):
        build_drafter("scripted", runner, None, {})


def test_a_drafter_from_outside_is_built_the_same_way() -> None:
    runner = engine_of(model_of(named("llama"))).target
    drafter = build_drafter("specdec.drafters.ngram:NgramDrafter", runner, None, {"max_ngram": 2})
    assert drafter.name == "ngram"

"""Early exit: the first layers say what transformers' own truncated model says, on the target's KV."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from specdec.build import build_drafter
from specdec.drafters.static_tree import static_tree
from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.interfaces import DraftRequest, FeatureSpec, SamplingParams, Segment
from specdec.models.build import RunnerConfig, build_runner, runner_for
from specdec.models.early_exit import first_layers
from specdec.models.hosted import HostedProgram
from specdec.models.lean import LeanProgram
from specdec.models.taps import find_blocks
from tests.decoding import GREEDY, add, drain, engine_of, prompts, reference
from tests.drafters.looping import looping_model
from tests.models.architectures import SUPPORTED, Architecture, build, model_of, named

IDS = torch.tensor(prompts(13)[0])
# A target that is deep enough to be cut in more than one place.
DEEP = {"num_hidden_layers": 4}


@cache
def deep_llama() -> Any:
    return build(named("llama"), **DEEP)


def truncated(model: Any, num_layers: int) -> Any:
    """Return what transformers runs when the last decoder blocks are gone."""
    model = copy.deepcopy(model)
    blocks = find_blocks(model, model.config.get_text_config().num_hidden_layers)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child is blocks:
                setattr(parent, name, nn.ModuleList(blocks[:num_layers]))
    model.config.get_text_config().num_hidden_layers = num_layers
    return model


def logits_of(runner: Any, *, tree: bool = False) -> torch.Tensor:
    """Return the logits after all of IDS, in two chunks and the last two tokens as siblings if `tree`."""
    runner = runner.with_own_cache()
    runner.cache.open(0, len(IDS))
    runner.cache.reserve(0, len(IDS))
    first = runner.forward([Segment(0, IDS[:7], None, torch.arange(7))]).logits
    runner.cache.commit(0, torch.arange(7))
    runner.cache.reserve(0, len(IDS) - 7)
    parents = torch.tensor([-1, 0, 1, 2, 3, 3]) if tree else None
    return torch.cat([first, runner.forward([Segment(0, IDS[7:], parents, torch.arange(len(IDS) - 7))]).logits])


HAVE_LEAN = {"llama", "llama_mha_biases", "qwen2", "qwen2_window", "qwen3", "mistral", "mistral_window"}


@pytest.mark.parametrize(
    ("architecture", "lean"),
    [
        pytest.param(a, lean, id=f"{a}-{'lean' if lean else 'hosted'}")
        for a in SUPPORTED
        for lean in ([True, False] if a.name in HAVE_LEAN else [False])
    ],
)
def test_the_first_layers_say_what_a_truncated_model_says(architecture: Architecture, lean: bool) -> None:
    model = model_of(architecture)
    runner = runner_for(model, RunnerConfig(lean=lean))
    short = first_layers(runner, 1)
    assert isinstance(short.program, LeanProgram) == lean
    with torch.inference_mode():
        expected = truncated(model, 1)(input_ids=IDS[None], use_cache=False).logits[0]
        whole = model(input_ids=IDS[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(short), expected, rtol=1e-5, atol=1e-5)
    assert (expected - whole).abs().max() > 0.1
    if runner.supports_trees:
        torch.testing.assert_close(logits_of(short, tree=True)[:-1], expected[:-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_every_number_of_layers(num_layers: int, lean: bool) -> None:
    runner = runner_for(deep_llama(), RunnerConfig(lean=lean))
    before = logits_of(runner)
    with torch.inference_mode():
        expected = truncated(deep_llama(), num_layers)(input_ids=IDS[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(first_layers(runner, num_layers)), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits_of(runner), before)


def test_weights_are_shared_and_the_target_stays_whole() -> None:
    model = deep_llama()
    runner = build_runner(model, RunnerConfig(lean=False))
    program: Any = first_layers(runner, 2).program
    assert {p.data_ptr() for p in program.model.parameters()} < {p.data_ptr() for p in model.parameters()}
    assert program.model.config.num_hidden_layers == 2
    assert model.config.num_hidden_layers == runner.config.num_hidden_layers == 4
    assert isinstance(runner.program, HostedProgram)
    assert runner.program.model.config.num_hidden_layers == 4
    assert len(runner.program.model.model.layers) == 4


def test_reordered_weights_are_not_copied() -> None:
    """What a Linear was replaced by may hold a second copy of the weights; a third would be too many."""
    runner = build_runner(build(named("llama"), **DEEP), RunnerConfig(lean=False))
    assert isinstance(runner.program, HostedProgram)
    model = runner.program.model

    class Replaced(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.call = inner.forward  # no child, as in FusedLinear

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.call(x)
            return out

    model.lm_head = Replaced(model.lm_head)
    for layer in model.model.layers:
        layer.mlp.down_proj = Replaced(layer.mlp.down_proj)
    short: Any = first_layers(runner, 2).program
    assert short.model.lm_head is model.lm_head


DEEP_TREE = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0], [1]]


@pytest.mark.parametrize(
    ("tree", "sampling"),
    # A tree's tokens are the likeliest ones, not drawn, so only greedy decoding accepts all of them.
    [(None, GREEDY), (None, SamplingParams(temperature=1.0, seed=5)), (DEEP_TREE, GREEDY)],
    ids=["chain-greedy", "chain-seeded", "tree-greedy"],
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2_window", "deepseek_v3"])
def test_all_layers_are_accepted_whole(name: str, tree: Any, sampling: SamplingParams) -> None:
    model = model_of(named(name))
    options = {"num_layers": 2, "tree": tree}
    engine = engine_of(model, "early_exit", options, max_draft_tokens=6, verifier="match")
    requests = [add(engine, prompt, 37, sampling=sampling) for prompt in prompts(3, 7)]
    drain(engine)
    for request in requests:
        depth = 6 if tree is None else 5
        # 36 tokens after the prompt's; the last step may draft no more than remain.
        assert request.stats.num_steps == -(-36 // (depth + 1))
        if sampling.greedy:
            assert request.new_tokens == reference(model, request.tokens[: request.num_prompt_tokens], 37)


def test_a_model_whose_layers_agree_is_drafted_for_by_the_first() -> None:
    engine = engine_of(looping_model(), "early_exit", {"num_layers": 1}, max_draft_tokens=4)
    request = add(engine, [3], 51)
    drain(engine)
    assert request.stats.acceptance_rate == 1.0
    assert request.stats.num_steps == 10


def test_a_tree_holds_the_likeliest_tokens_of_the_first_layers() -> None:
    model = deep_llama()
    runner = engine_of(model).target.with_own_cache()
    shape = static_tree([3, 2, 1])
    drafter: Any = build_drafter("early_exit", runner, None, {"num_layers": 2, "tree": [3, 2, 1]})
    texts = {0: IDS[:6].tolist(), 1: IDS[3:12].tolist()}
    for request_id, text in texts.items():
        runner.cache.open(request_id, 40)
        runner.cache.reserve(request_id, len(text) - 1)
        rows = torch.tensor([], dtype=torch.int64)
        runner.forward([Segment(request_id, torch.tensor(text[:-1]), None, rows)])
        runner.cache.commit(request_id, torch.arange(len(text) - 1))
        runner.cache.reserve(request_id, 20)
    most = {0: 15, 1: 7}
    asked = [DraftRequest(i, text[-1], len(text) - 1, most[i], GREEDY) for i, text in texts.items()]
    tree = drafter.propose(asked, None)
    short = truncated(model, 2)
    assert tree.num_nodes.tolist() == [16, 8]
    for i, text in texts.items():
        for node in range(1, int(tree.num_nodes[i])):
            path = shape.paths[node - 1]
            said = list(text)
            for rank in path:
                with torch.inference_mode():
                    logits = short(input_ids=torch.tensor([said]), use_cache=False).logits[0, -1]
                said.append(int(logits.topk(rank + 1).indices[-1]))
            assert int(tree.token_ids[i, node]) == said[-1], path


def test_a_quarter_of_the_layers_is_the_default() -> None:
    for model, expected in ((deep_llama(), 1), (model_of(named("llama")), 1)):
        drafter: Any = build_drafter("early_exit", engine_of(model).target, None, {})
        assert drafter._runner.program.num_layers == expected


@pytest.mark.parametrize("num_layers", [0, 3, -1, True, "1", 1.0])
def test_numbers_of_layers_out_of_range_are_refused(num_layers: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_layers=.*; allowed: an integer from 1 to the target's 2 layers"):
        build_drafter("early_exit", engine_of(model_of(named("llama"))).target, None, {"num_layers": num_layers})


def test_trees_for_a_target_of_chains_are_refused() -> None:
    runner = engine_of(model_of(named("llama"))).target.with_own_cache()
    runner.supports_trees = False
    with pytest.raises(
        IncompatibleDrafterError, match=r"'early_exit' was asked for trees.*chains only; leave tree out"
    ):
        build_drafter("early_exit", runner, None, {"tree": "eagle"})
    build_drafter("early_exit", runner, None, {})


def test_layers_that_cannot_be_cut_are_refused_by_name() -> None:
    runner = build_runner(build(named("llama"), **DEEP), RunnerConfig(lean=False))
    assert isinstance(runner.program, HostedProgram)
    inner = runner.program.model.model
    whole = type(inner).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.layers[3]
        return whole(self, *args, **kwargs)

    inner.__class__ = type("Attached", (type(inner),), {"forward": forward})
    with pytest.raises(IncompatibleDrafterError, match="cannot run LlamaForCausalLM without its last 2 layers"):
        first_layers(runner, 2)
    runner = build_runner(build(named("llama"), **DEEP), RunnerConfig(lean=False))
    runner.program.model.model.layers = nn.Sequential(*runner.program.model.model.layers)  # type: ignore[attr-defined]
    with pytest.raises(IncompatibleDrafterError, match="no list of 4 decoder blocks"):
        first_layers(runner, 2)


def test_a_target_whose_hidden_states_were_asked_for() -> None:
    """Hooks that take them do not keep the model from being cut."""
    model = build(named("gemma2"))
    engine = engine_of(model)
    runner = engine.target.with_own_cache()
    runner.cache.open(0, 8)
    runner.cache.reserve(0, 3)
    runner.forward([Segment(0, torch.tensor([1, 2, 3]), None, torch.arange(3))], FeatureSpec(layers=(0,)))
    drafting = engine_of(model, "early_exit", {"num_layers": 1}, runner=engine.target.with_own_cache())
    request = add(drafting, prompts(5)[0], 12)
    drain(drafting)
    assert request.new_tokens == reference(model, prompts(5)[0], 12)

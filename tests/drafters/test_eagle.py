"""EAGLE heads: what the drafter computes step by step is what one plain forward over the whole text says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafters import eagle
from specdec.drafters.autoregression import draw_chain
from specdec.drafters.tree_option import grow_shape, tree_option
from specdec.engine import Engine
from specdec.heads.loaded import LoadedHead
from specdec.interfaces import DraftRequest, Observation, SamplingParams, TokenTree
from specdec.models.build import runner_for
from specdec.noise import KeyedNoise
from tests.decoding import add, drain, engine_of, private_runner, prompts, reference
from tests.heads.plain_forward import features_of, said_after
from tests.heads.tiny_heads import tiny_eagle
from tests.models.architectures import model_of, named
from tests.odd_drafters import Wrapped

PROMPTS = prompts(3, 7, 12)
RAGGED = prompts(3, 7, 12, 1, 20, 5, 9, 2)
# Every way in which heads differ; each is one EagleConfig.
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle1": {"generation": 1, "fc_bias": True},
    "draft_vocabulary": {"drafted": range(3, 64, 3)},
    "another_width": {"hidden_size": 24, "own_parts": True},
    "head_dim": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 12},
    "biases": {"attention_bias": True, "output_bias": True, "mlp_bias": True, "fc_bias": True},
    "qk_norm": {"qk_norm": True, "fc_norm": True},
    "norms": {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    "two_layers": {"num_layers": 2, "feature_layers": (1,)},
}
DYNAMIC = {"depth": 3, "top_k": 3, "total_tokens": 9}


def head_of(model: Any, **options: Any) -> LoadedHead:
    return tiny_eagle(runner_for(model), **options)


@cache
def text_of(model: Any, prompt: tuple[int, ...]) -> list[int]:
    """Return a prompt and 30 tokens of the model's own behind it."""
    return [*prompt, *reference(model, prompt, 30)]


def engine_with(model: Any, head: LoadedHead, tree: Any = "chain", sampled: bool = False, **options: Any) -> Engine:
    name = "eagle3" if head.module.config.generation == 3 else "eagle"
    runner = private_runner(model)
    chosen = {"model": head, "tree": tree, "sampled": sampled}
    return engine_of(model, name, chosen, runner=runner, **options)


class Plain:
    """Compares every proposal with a plain forward, then steers it: true tokens down to a depth, wrong ones below."""

    def __init__(self, model: Any, head: LoadedHead, texts: Sequence[Sequence[int]], depths: Sequence[int]) -> None:
        self.head, self.texts, self.depths = head, texts, depths
        # Of all of a text: hidden states do not depend on what comes behind.
        self.features = {tuple(text): features_of(model, text, head.module.config.features) for text in texts}
        self.drafter: Any = None
        self.num_compared = self.num_steps = 0
        self.num_rows: list[int] = []

    def text(self, request: DraftRequest) -> Sequence[int]:
        """Return the one of the known texts that a request is a part of."""
        known = self.drafter._texts[request.request_id].token_ids
        assert len(known) == request.root_position + 1
        return next(text for text in self.texts if list(text[: len(known)]) == known)

    def __call__(self, tree: TokenTree, requests: Sequence[DraftRequest]) -> TokenTree:
        token_ids = tree.token_ids.clone()
        for row, request in enumerate(requests):
            text, drafted = self.text(request), int(tree.num_nodes[row]) - 1
            root = request.root_position
            drafts = token_ids[row, 1 : 1 + drafted].tolist()
            if drafted:
                self.compare(request, text, drafts)
            depth = self.depths[(self.num_steps + row) % len(self.depths)]
            for i in range(drafted):
                true = text[root + 1 + i]
                token_ids[row, 1 + i] = true if i < depth else (true + 1) % 64
        self.num_steps += 1
        return TokenTree(token_ids, tree.parents, tree.num_nodes)

    def compare(self, request: DraftRequest, text: Sequence[int], drafts: Sequence[int]) -> None:
        first, root = self.drafter._texts[request.request_id].first, request.root_position
        features = self.features[tuple(text)][first:root]
        said = said_after(self.head, features, text[first + 1 : root + 1], drafts[:-1], first)
        num_rows, newest = self.drafter._newest[request.request_id]
        assert num_rows == request.root_position
        torch.testing.assert_close(newest, said[:1], rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            best = self.head.vocabulary.target_ids[self.head.module.logits(said).argmax(dim=-1)]
        assert drafts == best.tolist()
        self.num_compared += 1
        self.num_rows.append(len(features))


def compared(engine: Engine, model: Any, head: LoadedHead, rows: Sequence[list[int]], depths: Sequence[int]) -> Plain:
    """Let every proposal of an engine be compared and steered."""
    plain = Plain(model, head, [text_of(model, tuple(row)) for row in rows], depths)
    plain.drafter = engine.drafter
    engine.drafting.drafter = Wrapped(engine.drafter, plain)
    return plain


@pytest.mark.parametrize("name", HEADS)
def test_fault_26_every_head_drafts_what_a_plain_forward_says(name: str) -> None:
    model = model_of(named("llama"))
    head = head_of(model, **HEADS[name])
    engine = engine_with(model, head, max_draft_tokens=4)
    plain = compared(engine, model, head, PROMPTS, [0, 2, 4, 1])
    requests = [add(engine, prompt, 20) for prompt in PROMPTS]
    drain(engine)
    assert [r.new_tokens for r in requests] == [
        text[len(p) :][:20] for p, text in zip(PROMPTS, plain.texts, strict=True)
    ]
    assert plain.num_compared >= 18
    assert sum(r.stats.num_rejected_drafts for r in requests) == 0


@pytest.mark.parametrize(
    ("chunk", "depths"), [(2, [0]), (2, [4]), (2, [1, 0, 3, 2, 4, 0]), (512, [1, 0, 3, 2, 4, 0])], ids=str
)
def test_fault_08_after_rejections_and_in_small_pieces(
    chunk: int, depths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come in chunks smaller than K, waiting rows are run in pieces, the cache moves to longer runs."""
    if chunk == 2:
        monkeypatch.setattr(eagle, "_CHUNK_ROWS", 4)
        monkeypatch.setattr(eagle, "_FIRST_RUN_ROWS", 3)
    model = model_of(named("qwen3"))
    head = head_of(model)
    engine = engine_with(model, head, max_draft_tokens=4, prefill_chunk_tokens=chunk)
    plain = compared(engine, model, head, RAGGED, depths)
    requests = [add(engine, prompt, 12) for prompt in RAGGED]
    drafter = plain.drafter
    while engine.has_unfinished:
        engine.step()
        drafter._cache.check_integrity()
        for i, text in drafter._texts.items():
            # What waits is bounded, also while a long prompt is read.
            assert text.end - drafter._num_done(i) < max(eagle._CHUNK_ROWS, 5)
            assert sum(len(part) for part in text._waiting.parts) <= eagle._CHUNK_ROWS + 4
    assert [r.new_tokens for r in requests] == [t[len(p) :][:12] for p, t in zip(RAGGED, plain.texts, strict=True)]
    assert plain.num_compared >= 16


@pytest.mark.parametrize(
    ("tree", "max_draft_tokens"),
    [*(("chain", k) for k in range(1, 9)), *((tree, k) for tree in ([2, 2, 1], DYNAMIC) for k in (1, 2, 6, 12))],
    ids=str,
)
def test_fault_01_greedy_identity(tree: Any, max_draft_tokens: int) -> None:
    model = model_of(named("llama"))
    head = head_of(model, drafted=range(0, 64, 2))
    rows = RAGGED if max_draft_tokens in (3, 6, 12) else RAGGED[2:3]
    engine = engine_with(model, head, tree, max_draft_tokens=max_draft_tokens)
    requests = [add(engine, prompt, 16) for prompt in rows]
    drain(engine)
    assert [r.new_tokens for r in requests] == [text_of(model, tuple(row))[len(row) :][:16] for row in rows]
    assert sum(r.stats.num_rejected_drafts for r in requests) == 0
    assert sum(r.stats.num_draft_tokens for r in requests) > 0


class PlainGrowth:
    """An `Expand` and an `Advance` that run every path from scratch."""

    def __init__(self, model: Any, head: LoadedHead, texts: Sequence[Sequence[int]]) -> None:
        self.head, self.texts = head, texts
        self.features = [features_of(model, text, head.module.config.features)[:-1] for text in texts]
        self.paths: dict[int, list[list[int]]] = {i: [] for i in range(len(texts))}

    def logits(self, request: int, drafts: Sequence[int]) -> Tensor:
        said = said_after(self.head, self.features[request], self.texts[request][1:], drafts)[-1:]
        with torch.no_grad():
            logits: Tensor = self.head.module.logits(said)
        return logits

    def expand(self, rows: list[int], token_ids: list[Tensor], parents: list[Tensor]) -> Tensor:
        found = []
        for i, tokens, above in zip(rows, token_ids, parents, strict=True):
            new = [
                self.paths[i][p] + [t] if p >= 0 else [] for t, p in zip(tokens.tolist(), above.tolist(), strict=True)
            ]
            self.paths[i] += new
            found += [self.logits(i, path) for path in new]
        return torch.cat(found)

    def advance(self, rows: list[int], last: Tensor) -> Tensor:
        for i, token in zip(rows, last.tolist(), strict=True):
            self.paths[i].append([*self.paths[i][-1], token] if self.paths[i] else [])
        return torch.cat([self.logits(i, self.paths[i][-1]) for i in rows])


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize(
    ("tree", "sampled"),
    [("chain", False), ([2, 2, 1], False), ([3, 1, 2], True), (DYNAMIC, False)],
    ids=["chain", "static", "drawn", "dynamic"],
)
@pytest.mark.parametrize("name", ["eagle1", "draft_vocabulary"])
def test_fault_18_trees_are_those_of_plain_forwards(name: str, tree: Any, sampled: bool, temperature: float) -> None:
    """Every node is run on its own path: siblings do not see each other. Distributions are kept as they were drawn."""
    model = model_of(named("llama"))
    head = head_of(model, **HEADS[name])
    drafter: Any = engine_with(model, head, tree, sampled).drafter
    sampling = SamplingParams(temperature=temperature, top_k=7, seed=3)
    texts = [text_of(model, tuple(prompt))[: len(prompt) + 9] for prompt in PROMPTS]
    most = [9, 2, 6]
    requests = [
        DraftRequest(i, t[-1], len(t) - 1, n, sampling) for i, (t, n) in enumerate(zip(texts, most, strict=True))
    ]
    for i, text in enumerate(texts):
        told(drafter, model, i, text)
    tree_of = drafter.propose(requests, noise_of(requests))
    plain = PlainGrowth(model, head, texts)
    shape = tree_option(tree, sampled)
    ids = None if head.vocabulary.is_whole else head.vocabulary.target_ids
    if shape is None:
        expected = draw_chain(requests, noise_of(requests), plain.advance, 64, ids)
    else:
        drawn = noise_of(requests) if sampled else None
        expected = grow_shape(requests, shape, plain.expand, 64, drawn, ids).tree
    assert torch.equal(tree_of.token_ids, expected.token_ids)
    assert torch.equal(tree_of.parents, expected.parents)
    assert torch.equal(tree_of.num_nodes, expected.num_nodes)
    assert int(tree_of.num_nodes[0]) > 4
    assert (tree_of.draft_probs is None) == (expected.draft_probs is None)
    assert (tree_of.draft_probs is not None) == (drafter.samples and temperature > 0)
    if expected.draft_probs is not None:
        torch.testing.assert_close(tree_of.draft_probs, expected.draft_probs, rtol=1e-5, atol=1e-6)
        assert torch.equal(tree_of.draft_row, expected.draft_row)
        if ids is not None:
            assert float(tree_of.draft_probs[:, [i for i in range(64) if i not in ids.tolist()]].sum()) == 0.0


def told(drafter: Any, model: Any, request_id: int, text: Sequence[int], start: int = 0) -> None:
    """Tell a drafter the tokens of a text from `start` on, as one forward would."""
    features = features_of(model, text, drafter.features)[max(start - 1, 0) : -1]
    drafter.observe([Observation(request_id, start, torch.tensor(list(text[start:])), features)])


def noise_of(requests: Sequence[DraftRequest]) -> KeyedNoise:
    positions = torch.tensor([r.root_position for r in requests])
    return KeyedNoise(torch.arange(len(requests)), positions, torch.zeros(len(requests), dtype=torch.bool))

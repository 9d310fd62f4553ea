"""Medusa: what is drafted from one hidden state, and what it is built from."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.build import build_drafter
from specdec.drafters.medusa import MedusaDrafter
from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.heads.loaded import LoadedHead
from specdec.heads.medusa import MedusaHeads
from specdec.heads.saving import save_head
from specdec.heads.target import head_target
from specdec.interfaces import DraftRequest, Observation, SamplingParams, TokenTree
from specdec.models.build import runner_for
from specdec.noise import KeyedNoise
from tests.heads.small_heads import small_eagle, small_target
from tests.heads.tiny_heads import tiny_medusa
from tests.models.architectures import build, model_of, named

NOISE = KeyedNoise(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(1).bool())


def proposed(drafter: MedusaDrafter, hidden: Tensor, *asked: tuple[int, int], least: float = 0.0) -> TokenTree:
    """Return trees below roots at position 5 for (root, max_draft_tokens), with hidden states [B, H] seen before."""
    for i, (root, _) in enumerate(asked):
        drafter.observe([Observation(i, 5, torch.tensor([root]), features=hidden[i : i + 1])])
    requests = [DraftRequest(i, root, 5, most, SamplingParams(), least) for i, (root, most) in enumerate(asked)]
    return drafter.propose(requests, NOISE)


def built(model: Any, head: LoadedHead | None = None, tree: Any = None, **options: Any) -> MedusaDrafter:
    runner = runner_for(model)
    drafter = build_drafter(
        "medusa", runner, None, {"model": tiny_medusa(runner, **options) if head is None else head, "tree": tree}
    )
    assert isinstance(drafter, MedusaDrafter)
    return drafter


class TestGuesses:
    """What is drafted from one hidden state."""

    HIDDEN = torch.randn(2, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    DRAFTED = range(1, 64, 3)

    def ranked(self, drafter: MedusaDrafter) -> Tensor:
        """Return [B, heads, Vd] the guesses of each head, best first."""
        return drafter._module.logits(self.HIDDEN).argsort(dim=-1, descending=True)

    @pytest.mark.parametrize("drafted", [None, DRAFTED], ids=["whole", "reduced"])
    @pytest.mark.parametrize("own_heads", [False, True])
    def test_a_path_is_a_rank_of_each_head(self, own_heads: bool, drafted: Any) -> None:
        paths = [(0,), (2,), (0, 1), (2, 3), (0, 1, 4)]
        drafter = built(
            model_of(named("llama")), tree=[list(p) for p in paths], own_heads=own_heads, drafted=drafted, num_layers=2
        )
        tree = proposed(drafter, self.HIDDEN, (9, 5), (11, 3))
        ranked = self.ranked(drafter)
        ids = torch.arange(64) if drafted is None else torch.tensor(list(drafted))
        assert tree.num_nodes.tolist() == [6, 4]
        for row, root in enumerate((9, 11)):
            expected = [root, *(int(ids[ranked[row, len(p) - 1, p[-1]]]) for p in paths)]
            n = int(tree.num_nodes[row])
            assert tree.token_ids[row, :n].tolist() == expected[:n]
            assert tree.parents[row, :n].tolist() == [-1, 0, 0, 1, 2, 3][:n]
        assert tree.draft_probs is None

    def test_a_chain_is_the_likeliest_guess_of_each_head(self) -> None:
        drafter = built(model_of(named("llama")), tree="chain")
        tree = proposed(drafter, self.HIDDEN, (9, 2), (11, 8))
        best = self.ranked(drafter)[:, :, 0]
        assert tree.num_nodes.tolist() == [3, 4]
        assert tree.token_ids[0, :3].tolist() == [9, *best[0, :2].tolist()]
        assert tree.token_ids[1].tolist() == [11, *best[1].tolist()]
        assert tree.parents[1].tolist() == [-1, 0, 1, 2]

    @pytest.mark.parametrize("most", [1, 4, 30])
    def test_the_best_tree_has_the_largest_products(self, most: int) -> None:
        drafter = built(model_of(named("llama")), tree={"top_k": 4, "total_tokens": 31})
        tree = proposed(drafter, self.HIDDEN, (9, most), (11, 64))
        assert tree.num_nodes.tolist() == [most + 1, 31]
        probs = drafter._module.logits(self.HIDDEN).softmax(dim=-1)
        best = probs.topk(4, dim=-1).values
        for row in range(2):
            token_ids, parents, n = tree.token_ids[row].tolist(), tree.parents[row].tolist(), int(tree.num_nodes[row])
            chances, depth = [1.0], [0]
            for node in range(1, n):
                above = parents[node]
                depth.append(depth[above] + 1)
                chances.append(chances[above] * float(probs[row, depth[above], token_ids[node]]))
            every = [
                float(torch.stack([best[row, head, rank] for head, rank in enumerate(path)]).prod())
                for length in (1, 2, 3)
                for path in itertools.product(range(4), repeat=length)
            ]
            assert chances[1:] == pytest.approx(sorted(every, reverse=True)[: n - 1], rel=1e-5)

    def test_a_chain_ends_after_a_guess_of_little_confidence(self) -> None:
        drafter = built(model_of(named("llama")), tree="chain")
        probs = drafter._module.logits(self.HIDDEN).softmax(dim=-1).amax(dim=-1)  # [B, heads]
        for least in (0.0, 0.02, float(probs[0, 1]) - 1e-4, float(probs[0, 1]) + 1e-4, 1.0):
            tree = proposed(drafter, self.HIDDEN, (9, 8), (11, 8), least=least)
            stops = [next((i + 1 for i in range(3) if float(row[i]) < least), 3) for row in probs]
            assert (tree.num_nodes - 1).tolist() == stops

    def test_only_the_heads_that_a_tree_needs_are_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        drafter = built(model_of(named("llama")), tree="medusa", num_heads=5)
        asked: list[int | None] = []
        whole = drafter._module.logits

        def logits(hidden: Tensor, num_heads: int | None = None) -> Tensor:
            asked.append(num_heads)
            return whole(hidden, num_heads)

        monkeypatch.setattr(drafter._module, "logits", logits)
        for most in (1, 2, 63):
            proposed(drafter, self.HIDDEN, (9, most))
        assert asked == [1, 2, 4]

    def test_without_the_hidden_state_of_the_root_nothing_is_drafted(self) -> None:
        drafter = built(model_of(named("llama")), tree=[3, 2])
        proposed(drafter, self.HIDDEN, (9, 4), (11, 4))
        drafter.observe([Observation(0, 0, torch.arange(6))])  # told anew, without features
        requests = [DraftRequest(i, 9 + 2 * i, 5, 4, SamplingParams()) for i in range(3)]
        assert drafter.propose(requests, NOISE).num_nodes.tolist() == [1, 5, 1]
        elsewhere = [DraftRequest(1, 11, 6, 4, SamplingParams())]
        assert drafter.propose(elsewhere, NOISE).num_nodes.tolist() == [1]

    @pytest.mark.parametrize("tree", ["chain", "best", [3, 2]])
    def test_what_nan_says_is_never_drafted(self, tree: Any) -> None:
        drafter = built(model_of(named("llama")), tree=tree, num_heads=2)
        hidden = self.HIDDEN.clone()
        hidden[0] = torch.nan
        assert proposed(drafter, hidden, (9, 2), (11, 2)).num_nodes.tolist() == [1, 3]


class TestBuilding:
    """Options, and what is refused."""

    def test_the_default_tree_is_medusas_as_far_as_the_heads_reach(self) -> None:
        model = model_of(named("llama"))
        shape: Any = built(model, num_heads=2, drafted=range(6))._shape
        assert (shape.tree.depth, shape.tree.width) == (2, 6)
        assert len(built(model, num_heads=4)._shape.tree) == 63  # type: ignore[union-attr]

    def test_the_checkpoint_may_advise_a_tree(self) -> None:
        model = model_of(named("llama"))
        advised: Any = built(model, settings={"tree": [[0], [1], [0, 0]]})._shape
        assert advised.tree.paths == ((0,), (1,), (0, 0))
        own: Any = built(model, tree="chain", settings={"tree": [2]})._shape
        assert own.tree.paths == ((0,), (0, 0), (0, 0, 0))

    @pytest.mark.parametrize(
        ("tree", "complaint"),
        [
            ("medusa", "the tree is 4 deep .* a/medusa has 3 heads"),
            ([64, 65], "takes the 65 likeliest tokens; .* for 64 tokens"),
            ("bets", "tree='bets'; allowed: 'chain', 'best', a dict of top_k, total_tokens, a name"),
            ({"topk": 3}, "has no option 'topk'; did you mean 'top_k'"),
            ({"total_tokens": 1}, "total_tokens=1; allowed: an integer from 2 to 1025"),
        ],
        ids=str,
    )
    def test_trees_that_do_not_fit_are_refused(self, tree: Any, complaint: str) -> None:
        with pytest.raises(ConfigError, match=complaint):
            built(model_of(named("llama")), tree=[[64]] if tree == [64, 65] else tree)

    def test_a_target_of_chains_gets_chains_and_refuses_trees(self) -> None:
        runner = runner_for(model_of(named("llama"))).with_own_cache()
        runner.supports_trees = False
        head = tiny_medusa(runner, settings={"tree": [3, 2]})
        chains: Any = build_drafter("medusa", runner, None, {"model": head})
        assert chains._shape.tree.paths == ((0,), (0, 0), (0, 0, 0))
        for tree in ("best", [2, 2]):
            with pytest.raises(IncompatibleDrafterError, match="chains only; use tree='chain'"):
                build_drafter("medusa", runner, None, {"model": head, "tree": tree})

    def test_heads_of_another_target_are_refused(self) -> None:
        head = tiny_medusa(runner_for(model_of(named("llama"))))
        other = runner_for(build(named("llama"), vocab_size=60))
        with pytest.raises(IncompatibleDrafterError, match=r"hidden size 32 and 64 tokens; .* has 32 and 60"):
            build_drafter("medusa", other, None, {"model": head})

    def test_an_eagle_head_is_refused(self) -> None:
        with pytest.raises(IncompatibleDrafterError, match="is for drafter='eagle3'; use that one"):
            built(model_of(named("llama")), small_eagle(small_target(torch.float64)))

    def test_heads_come_from_a_folder_once_per_target(self, tmp_path: Path) -> None:
        runner = runner_for(model_of(named("llama"))).with_own_cache()
        head = tiny_medusa(runner, drafted=range(0, 64, 2), num_layers=2)
        settings = {"tree": [[0], [1], [0, 0]]}
        save_head(tmp_path / "heads", head.module, head.vocabulary, head_target(runner), settings=settings)
        options = {"model": str(tmp_path / "heads")}
        one: Any = build_drafter("medusa", runner, None, options)
        two: Any = build_drafter("medusa", runner, None, options)
        assert one._module is two._module
        assert one._shape.tree.paths == ((0,), (1,), (0, 0))
        hidden = torch.randn(1, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        memory: Any = build_drafter("medusa", runner, None, {"model": head, "tree": settings["tree"]})
        assert torch.equal(proposed(one, hidden, (9, 4)).token_ids, proposed(memory, hidden, (9, 4)).token_ids)

    def test_no_heads_ship_for_a_tiny_target(self) -> None:
        runner = runner_for(model_of(named("llama")))
        with pytest.raises(IncompatibleDrafterError, match="no medusa head ships for"):
            build_drafter("medusa", runner, None, {})
        with pytest.raises(ConfigError, match=r"drafter 'medusa': model is a int; allowed: a directory"):
            build_drafter("medusa", runner, None, {"model": 3})


def test_fresh_heads_repeat_the_target() -> None:
    """Before any training a head's logits are the target's own, one place late."""
    runner = runner_for(model_of(named("llama")))
    head = tiny_medusa(runner, num_layers=2, num_heads=2)
    fresh = MedusaHeads(head.module.config).to(torch.float64)
    fresh.lm_head = head.module.lm_head
    hidden = torch.randn(3, 32, dtype=torch.float64)
    for i in range(2):
        torch.testing.assert_close(fresh.logits(hidden)[:, i], head.module.lm_head(hidden))
    torch.testing.assert_close(head.module.logits(hidden, 1), head.module.logits(hidden)[:, :1])

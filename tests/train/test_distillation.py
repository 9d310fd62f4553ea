"""The loss against autograd's own, and what it is a loss against."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.train.distillation import soft_cross_entropy, target_rows
from specdec.train.losses import accuracy, walk


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 5, dtype=dtype), torch.randn(11, 5, dtype=dtype)
    probs = torch.randn(7, 11).mul(3).softmax(dim=-1)
    return x.requires_grad_(), weight.requires_grad_(), probs, torch.tensor([1.0, 0.0, 0.5, 1, 1, 2, 0])


@pytest.mark.parametrize("trains_weight", [True, False])
def test_the_gradient_is_autograds_own(trains_weight: bool) -> None:
    x, weight, probs, scale = _inputs()
    weight.requires_grad_(trains_weight)
    loss, best = soft_cross_entropy(x, weight, probs, scale)
    (3 * loss).backward()
    mine = x.grad, weight.grad
    x.grad = weight.grad = None
    logits = x @ weight.T
    plain = (-(probs * F.log_softmax(logits, dim=-1)).sum(dim=-1) * scale).sum()
    (3 * plain).backward()
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine[0], x.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(best, logits.argmax(dim=-1))
    if trains_weight:
        torch.testing.assert_close(mine[1], weight.grad, rtol=1e-5, atol=1e-6)
    else:
        assert mine[1] is None


def test_probabilities_and_inputs_are_left_as_they_are() -> None:
    x, weight, probs, scale = _inputs()
    before = [t.detach().clone() for t in (x, weight, probs, scale)]
    soft_cross_entropy(x, weight, probs, scale)[0].backward()
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, (x, weight, probs, scale), strict=True))


def test_large_logits_give_finite_losses() -> None:
    x, weight, probs, scale = _inputs()
    loss, _ = soft_cross_entropy(x * 1e4, weight, probs, scale)
    loss.backward()
    assert bool(torch.isfinite(loss)) and x.grad is not None and bool(torch.isfinite(x.grad).all())


def test_no_rows_have_no_loss() -> None:
    x, weight, probs, scale = _inputs()
    loss, best = soft_cross_entropy(x[:0], weight, probs[:0], scale[:0])
    assert loss.item() == 0.0 and best.shape == (0,)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_target_rows_are_the_targets_softmax_renormalised(temperature: float) -> None:
    torch.manual_seed(1)
    hidden, weight, keep = torch.randn(4, 5), 9 * torch.randn(11, 5), torch.tensor([1, 4, 9])
    whole = (hidden @ weight.T / temperature).double().softmax(dim=-1)[:, keep]
    found = target_rows(hidden, weight[keep], temperature)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(4))
    torch.testing.assert_close(found.double(), whole / whole.sum(dim=-1, keepdim=True), rtol=1e-4, atol=1e-6)


def test_a_walk_by_hand() -> None:
    """Hits of two chained drafts over seven places: each forward takes its run of hits and one token more."""
    first = [1, 0, 1, 1, 0, 1, 1, -1]
    second = [0, 1, 1, 0, 1, 1, -1, -1]
    grid = torch.tensor([[first], [second]], dtype=torch.int8)
    # place 0: one hit, 2 tokens; place 2: two hits, 3 tokens; place 5: two hits, but the text has 2 tokens left
    assert walk([grid]) == (7, 3)
    assert walk([]) == (0, 0)
    assert walk([torch.full((2, 1, 4), -1, dtype=torch.int8)]) == (0, 0)
    assert accuracy(grid) == [round(5 / 7, 5), round(4 / 6, 5)]

"""The loss of every head: cross-entropy against the target's own distribution over the draft vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy of softmax(x W') against given probabilities, with its gradient made in the forward pass.

    log_softmax over some thousand tokens costs more on a CPU than the products around it; here the exponentials are
    computed once, in place, and the gradient with respect to x takes one more product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, probs: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Take x [T, H], weight [Vd, H], probs [T, Vd], scale [T]; return sum of scale * cross-entropy, argmax [T]."""
        logits = (x.to(weight.dtype) @ weight.T).to(torch.float32)
        best = logits.argmax(dim=-1)
        crossed = torch.linalg.vecdot(logits, probs.to(torch.float32))
        top = logits.gather(1, best[:, None])
        grad = logits.sub_(top).exp_()
        total = grad.sum(dim=-1, keepdim=True)
        loss = top[:, 0] + total[:, 0].log() - crossed
        grad.div_(total).sub_(probs).mul_(scale[:, None])
        ctx.save_for_backward((grad.to(weight.dtype) @ weight).to(x.dtype))
        ctx.grad_weight = (grad.T @ x.to(torch.float32)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        ctx.mark_non_differentiable(best)
        return (loss * scale).sum(), best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (grad_x,) = ctx.saved_tensors
        grad_weight = None if ctx.grad_weight is None else ctx.grad_weight * grad_loss
        return grad_x * grad_loss, grad_weight, None, None


def soft_cross_entropy(x: Tensor, weight: Tensor, probs: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of cross-entropies (a scalar) and the head's own choices [T].

    Args:
        x: [T, H] what the output projection reads.
        weight: [Vd, H] of it; its dtype is that of the products.
        probs: [T, Vd] of the target, each row summing to 1.
        scale: [T] float32 weight of each row.
    """
    result: tuple[Tensor, Tensor] = _SoftCrossEntropy.apply(x, weight, probs, scale)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def target_rows(hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the target's distribution over the draft vocabulary, renormalised, [T, Vd].

    Args:
        hidden: [T, H] behind the target's final norm.
        weight: [Vd, H] rows of the target's lm_head.
        temperature: > 0.
    """
    logits = F.linear(hidden.to(weight.dtype), weight).to(torch.float32)
    if temperature != 1.0:
        logits.div_(temperature)
    logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
    return logits.div_(logits.sum(dim=-1, keepdim=True))

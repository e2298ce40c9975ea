"""What may be asked of the gradients: not their own derivatives, and not for a batch of upstream gradients at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from liger_cutedsl.compat import is_transformed


def without_second_derivative(gradients, *leading_to_inputs: torch.Tensor | None) -> list[torch.Tensor | None]:
    """What a backward returns. Under create_graph=True, differentiating it fails: it must not vanish.

    leading_to_inputs: tensors of the graph from which each input of the operator can be reached, and the upstream
    gradient. autograd runs only what lies between a loss and the tensors that it is asked for: a node that raises has
    to lie on the way to every one of them, or it is left out and its share of the result is silently missing.
    """
    if not torch.is_grad_enabled():
        return list(gradients)
    ways = [tensor for tensor in leading_to_inputs if tensor is not None]
    return [None if g is None else _NoSecondDerivative.apply(g, *ways) for g in gradients]


class _NoSecondDerivative(torch.autograd.Function):
    """The identity, which raises when it is differentiated."""

    @staticmethod
    def forward(ctx, gradient, *_ways):
        return gradient.detach()

    @staticmethod
    def backward(ctx, *_):
        refuse_second_derivative()


def refuse_second_derivative(*_):
    raise RuntimeError(
        "fused linear cross entropy has no second derivative: leave create_graph=True out, or compute this loss "
        "with torch.nn.functional.cross_entropy"
    )


def refuse_batched_upstream(gradients: Iterable[torch.Tensor | None]) -> None:
    """torch.autograd.grad(is_grads_batched=True) hands over a wrapper of many, whose memory is not what it seems."""
    if any(gradient is not None and is_transformed(gradient) for gradient in gradients):
        raise RuntimeError(
            "fused linear cross entropy takes one upstream gradient at a time, not a batch of them (is_grads_batched, "
            "vectorize=True, torch.func): call torch.autograd.grad once for each, with retain_graph=True"
        )

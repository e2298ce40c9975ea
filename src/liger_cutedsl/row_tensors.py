"""Gradients of a row loss's own tensors: known with the loss, they wait for its upstream gradient."""

from __future__ import annotations

import torch

from liger_cutedsl.checkpointing import unseen_by_saved_tensor_hooks
from liger_cutedsl.derivatives import refuse_batched_upstream, without_second_derivative


def with_gradients(
    loss: torch.Tensor, tensors: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """The loss (), on which the tensors depend too. gradients: ∂loss/∂ of each."""
    if not tensors:
        return loss
    with unseen_by_saved_tensor_hooks():  # as the loss's own: a checkpoint would run all of it again
        return _WithGradients.apply(loss, len(tensors), *tensors, *gradients)


class _WithGradients(torch.autograd.Function):
    """The identity of a loss, whose backward gives each tensor its gradient times the upstream one."""

    @staticmethod
    def forward(ctx, loss, count, *tensors_and_gradients):
        ctx.count = count
        ctx.save_for_backward(loss, *tensors_and_gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        refuse_batched_upstream((upstream,))
        loss, *rest = ctx.saved_tensors
        tensors, gradients = rest[: ctx.count], rest[ctx.count :]
        with torch.no_grad():
            found = [upstream, *(g * upstream.to(g.dtype) for g in gradients)]
        found = without_second_derivative(found, upstream, loss, *tensors)
        return found[0], None, *found[1:], *(None for _ in gradients)

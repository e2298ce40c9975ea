"""The module Liger-Kernel loads for LIGER_KERNEL_IMPL=cutedsl: Liger's stock CuTe operators with our FLCE
and our scaled cross entropy.

Liger copies every name in __all__ over its own. The stock operators (cross entropy, RMSNorm, RoPE, SwiGLU) need
Hopper or a later GPU, and CuTe DSL; elsewhere only these two are replaced and the rest stays as Liger has it.
"""

from __future__ import annotations

import logging

import torch

from liger_cutedsl.api import LigerFusedLinearCrossEntropyFunction, LigerResults
from liger_cutedsl.autograd import run_with_gradients
from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.checks import check_tensors
from liger_cutedsl.cross_entropy import LossOutput
from liger_cutedsl.liger.scaled import (
    LigerFusedLinearScaledCrossEntropyFunction,
    LigerFusedLinearScaledCrossEntropyTPFunction,
)
from liger_cutedsl.options import LossOptions, python_scalar
from liger_cutedsl.route import Settings

__all__ = [
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearScaledCrossEntropyFunction",
    "LigerFusedLinearScaledCrossEntropyTPFunction",
    "fused_linear_cross_entropy_backward",
    "fused_linear_cross_entropy_forward",
]
# What Liger's second dispatcher asks of each of them.
STOCK_CAPABILITY = (9, 0)


def _stock_operators() -> dict[str, object]:
    """Liger's own CuTe operators by name, without those that are ours; none where they do not run."""
    obstacle = _stock_obstacle()
    if obstacle is None:
        try:
            from liger_kernel.ops.cutedsl import ops as stock

            return {name: getattr(stock, name) for name in stock.__all__ if name not in __all__}
        except Exception as error:  # a broken installation of CuTe DSL fails in many ways
            obstacle = f"{type(error).__name__}: {error}"
    logging.getLogger(__name__).info("Liger's other operators stay as they are without CuTe DSL: %s", obstacle)
    return {}


def _stock_obstacle() -> str | None:
    """Why Liger's own CuTe operators cannot run on every GPU of this process, or None."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "they need an NVIDIA GPU"
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if capability < STOCK_CAPABILITY:
            return "they need sm_90 or later, and cuda:{} is sm_{}{}".format(index, *capability)
    return None


_found = _stock_operators()
globals().update(_found)
__all__ += _found


def fused_linear_cross_entropy_forward(
    _input,
    weight,
    target,
    ce_weight=None,
    bias=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
    accum_dtype=None,
    use_token_scaling=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    ce_impl=None,
    ce_mode=None,
    token_grad_output=None,
    compute_gradients=None,
    weight_requires_grad=None,
    chunk_mem_const=1,
):
    """Liger-Kernel's function of this name, outside autograd; its arguments in its order.

    Returns (loss, z_loss, token_accuracy, predicted_tokens, grad_input, grad_weight, grad_bias): the gradients for
    an upstream gradient of token_grad_output (N,), or of 1; None where not computed. token_grad_output weighs each
    token's share of the gradients, of a mean or sum too, and not the loss. compute_gradients and weight_requires_grad
    default to what _input and weight say.
    """
    if token_grad_output is not None and token_grad_output.shape != target.shape:
        raise ValueError(
            f"token_grad_output must have target's shape {tuple(target.shape)}, got {tuple(token_grad_output.shape)}"
        )
    options = LossOptions.from_arguments(locals())
    problem = Problem(_input, weight, target, bias, ce_weight, options)
    wants = _input.requires_grad if compute_gradients is None else compute_gradients
    wants_weight = weight.requires_grad if weight_requires_grad is None else weight_requires_grad
    wanted = WantedGradients.of(problem, (wants, wants and wants_weight, wants and bias is not None))
    settings = Settings.resolve(chunk_mem_const=python_scalar(chunk_mem_const))
    check_tensors(problem)
    upstream = None if token_grad_output is None else LossOutput(token_grad_output)
    output, gradients = run_with_gradients(problem, settings, wanted, upstream)
    return (*LigerResults.of(output), gradients.x, gradients.weight, gradients.bias)


def fused_linear_cross_entropy_backward(grad_output, grad_input, grad_weight, grad_bias):
    """Liger-Kernel's function of this name: the three gradients times the scalar grad_output, as new tensors."""
    return tuple(None if g is None else g * grad_output for g in (grad_input, grad_weight, grad_bias))

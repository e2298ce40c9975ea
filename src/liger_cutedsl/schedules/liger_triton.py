"""Liger-Kernel's own Triton operator behind the interface of our schedules: what the CuTe engine cannot run.

Liger's functions are called rather than its autograd.Function, for three reasons: its forward computes no
gradient at all when only weight or bias wants one, its backward scales in place (twice, on a second call),
and its metrics divide by zero when every row is ignored.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from liger_cutedsl.call import Gradients, Problem, WantedGradients
from liger_cutedsl.cross_entropy import LossOutput, of_exact_gradients
from liger_cutedsl.route import Route
from liger_cutedsl.schedules.kept import KeptGradients
from liger_cutedsl.schedules.schedule import Task

NAME = "liger"


def obstacle(_engine, task: Task) -> None:
    return None


def plan(_engine, task: Task, reason: str) -> Route:
    return Route("triton", NAME, task.problem.gemm_dtype, reason, gemms=3)


def forward(_engine, task: Task, route: Route) -> tuple[LossOutput, KeptGradients | None]:
    """Loss and, where the upstream gradient cannot reach the rows (mean, sum), the gradients for g = 1."""
    problem, wanted = task.problem, task.wanted
    eager = bool(wanted) and problem.options.reduction != "none"
    output, gradients = _call(problem, route, wanted if eager else WantedGradients())
    if output.token_accuracy is not None and problem.options.reduction != "none":
        output = output._replace(token_accuracy=output.token_accuracy.nan_to_num(0.0))
    return output, KeptGradients(gradients, wanted) if eager else None


def backward(_engine, task: Task, route: Route, _state: None, upstream: LossOutput) -> Gradients:
    """Only for reduction="none": the gradients of the others are kept in forward."""
    return _call(task.problem, route, task.wanted, token_grad_output=upstream.loss)[1]


def _call(problem: Problem, route: Route, wanted: WantedGradients, token_grad_output=None):
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    options, problem = problem.options, _readable(problem)
    accum_dtype = options.accum_dtype
    if accum_dtype is None and wanted.weight == torch.float32:
        accum_dtype = torch.float32  # the sum is returned in float32 anyway: under AMP too
    # Liger's products take what autocast makes of their operands. A bias wider than x makes logits and dz wider, too.
    operands = [t.dtype for t in (problem.x, problem.weight, problem.bias) if t is not None]
    mixed = route.dtype.itemsize == 2 and any(dtype != route.dtype for dtype in operands)
    with torch.autocast(problem.device.type, dtype=route.dtype, enabled=mixed):
        loss, z_loss, accuracy, predicted, *grads = fused_linear_cross_entropy_forward(
            problem.x,
            problem.weight,
            problem.target,
            ce_weight=problem.ce_weight,
            bias=problem.bias,
            ignore_index=options.ignore_index,
            lse_square_scale=options.lse_square_scale,
            label_smoothing=options.label_smoothing,
            reduction=options.reduction,
            softcap=options.softcap,
            return_z_loss=options.return_z_loss,
            accum_dtype=accum_dtype,
            use_token_scaling=options.use_token_scaling,
            return_token_accuracy=options.return_token_accuracy,
            return_predicted_tokens=options.return_predicted_tokens,
            token_grad_output=token_grad_output,
            compute_gradients=bool(wanted),
            weight_requires_grad=wanted.weight is not None,
        )
    dtypes = (wanted.x, wanted.weight, wanted.bias)
    gradients = Gradients(*(None if d is None else g.to(d) for d, g in zip(dtypes, grads, strict=True)))
    z_loss = None if z_loss is None else z_loss.to(loss.dtype)  # Liger's is in x's dtype
    sampling = of_exact_gradients(loss.device) if options.return_gradient_sampling else ()
    return LossOutput(loss, z_loss, accuracy, predicted, *sampling), gradients


def _readable(problem: Problem) -> Problem:
    """The problem as Liger's function takes it: int64 targets, bias of x's dtype or float32, class weights in float32,
    because it sums them in their own; and a weight of which autocast keeps no copy, which a layer that shares the
    weight would take for one with a gradient."""
    compute, bias, ce_weight = problem.compute_dtype, problem.bias, problem.ce_weight
    return replace(
        problem,
        weight=problem.weight.detach(),
        target=problem.target.long(),
        bias=bias if bias is None or bias.dtype == problem.x.dtype else bias.to(compute),
        ce_weight=None if ce_weight is None else ce_weight.to(compute),
    )

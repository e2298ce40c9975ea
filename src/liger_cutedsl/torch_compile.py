"""The operator inside torch.compile: custom ops that a graph holds as one node each, forward and backward.

A graph knows shapes, not data: it cannot hold rows that were dropped, or a schedule that was chosen for their number.
So the ops take and return whole tensors and decide inside, as eager mode does, what to run:

    forward   the loss and, where the upstream gradient is one number (mean, sum), the gradients for an upstream
              gradient of 1, whichever schedule computes them; else the row statistics
    backward  those gradients times the upstream gradient; else the gradients from the row statistics (`recompute`)

Options go through as numbers and names, because a custom op takes no objects; environment variables count as they are
when the graph is traced.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import fields, replace
from typing import NamedTuple

import torch

from liger_cutedsl.autograd import forward_of, gradients_of, prepare, run_with_gradients
from liger_cutedsl.derivatives import refuse_second_derivative
from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.objective import LossOutput, RowStatistics, row_weights
from liger_cutedsl.options import LossOptions
from liger_cutedsl.problem import (
    Gradients,
    Problem,
    WantedGradients,
    autocast_dtype,
    check_tensors,
    gradients_needed,
    planned_device,
)
from liger_cutedsl.routing import Settings, give_up_on_cute
from liger_cutedsl.rows import TargetCheck
from liger_cutedsl.schedules import recompute

_TENSORS = "Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? ce_weight"
_CALL = (
    "int ignore_index, float lse_square_scale, float label_smoothing, str reduction, float? softcap, "
    "bool use_token_scaling, ScalarType? accum_dtype, bool return_z_loss, bool return_token_accuracy, "
    "bool return_predicted_tokens, "  # the fields of LossOptions, in their order
    "str engine, str schedule, float? workspace_mb, int chunk_mem_const, ScalarType? autocast, "
    "bool needs_x, bool needs_weight, bool needs_bias"
)
_DEFAULTS = {field.name: field.default for field in fields(LossOptions)}
_OPTIONS = len(_DEFAULTS)


class _Call(NamedTuple):
    """The arguments of an op, as everything else in this package knows them."""

    problem: Problem
    settings: Settings
    needs: tuple[bool, bool, bool]
    autocast: torch.dtype | None

    @classmethod
    def of(cls, tensors, call) -> _Call:
        engine, schedule, workspace_mb, chunk_mem_const, autocast, *needs = call[_OPTIONS:]
        settings = Settings.resolve(engine, schedule, workspace_mb, chunk_mem_const)
        return cls(Problem(*tensors, LossOptions(*call[:_OPTIONS])), settings, tuple(needs), autocast)

    def context(self) -> contextlib.AbstractContextManager:
        """The autocast the graph was traced under."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(planned_device(self.problem.device).type, dtype=self.autocast)

    @property
    def wanted(self) -> WantedGradients:
        return WantedGradients.of(self.problem, self.needs)


def run_compiled(
    x,
    weight,
    target,
    bias,
    ce_weight,
    *,
    engine=None,
    schedule=None,
    workspace_mb=None,
    chunk_mem_const=1,
    **options,
) -> LossOutput:
    """autograd.run for tensors (N, H), (V, H), (N,), written so that torch.compile can trace it."""
    options = {**_DEFAULTS, **options}
    if len(options) > _OPTIONS:
        raise TypeError(f"{list(options)[_OPTIONS]} is not an option: the options are {', '.join(_DEFAULTS)}")
    loss, z_loss, accuracy, predicted, *_ = torch.ops.liger_cutedsl.flce(
        x,
        weight,
        target,
        bias,
        ce_weight,
        *options.values(),
        (os.environ.get("LIGER_CUTEDSL_ENGINE") or "auto") if engine is None else engine,
        (os.environ.get("LIGER_CUTEDSL_SCHEDULE") or "auto") if schedule is None else schedule,
        workspace_mb,
        chunk_mem_const,
        autocast_dtype(x.device),
        *gradients_needed(x, weight, bias),
    )
    return LossOutput(
        loss,
        z_loss if options["return_z_loss"] else None,
        accuracy if options["return_token_accuracy"] else None,
        predicted if options["return_predicted_tokens"] else None,
    )


def _gradients_in_forward(call: _Call) -> bool:
    """Whether the gradients for an upstream gradient of 1 are all that backward needs, at the same accuracy."""
    return call.problem.options.reduction != "none" and call.settings.schedule != "recompute"


def _flce(*arguments):
    """(loss, z_loss, token_accuracy, predicted_tokens, dx, dW, db, lse, target_logit), empty if unused."""
    call = _Call.of(arguments[:5], arguments[5:])
    problem, kept, stats = call.problem, (None, None, None), (None, None)
    with call.context():
        check_tensors(problem)
        if _gradients_in_forward(call) or not call.wanted:
            output, found = run_with_gradients(problem, call.settings, call.wanted.kept(), None)
            kept = (found.x, found.weight, found.bias)
        else:
            output, stats = _forward_only(call)
    return _filled(problem, *output, *kept, *stats)


def _filled(problem: Problem, *results: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """An op returns tensors, as its fake says: contiguous (Liger's gradients have the strides of their parameters), and
    empty ones for what there is not."""
    return tuple(problem.x.new_empty(0) if v is None else v.contiguous() for v in results)


def _prepared(call: _Call):
    """A call whose gradients are computed in backward, and which keeps nothing but row statistics until then."""
    prepared = prepare(TargetCheck(call.problem), call.settings, call.wanted)
    return prepared._replace(route=replace(prepared.route, kept=0))


def _forward_only(call: _Call):
    """The loss, and lse and target_logit (N,) for backward; zeros for Liger's operator, which has none to give."""
    prepared = _prepared(call)._replace(wanted=WantedGradients())
    try:
        output, state = forward_of(prepared)
    except KernelFailure as failure:
        give_up_on_cute(failure, call.settings)
        return _forward_only(call)
    if state is None:
        local = prepared.problem
        # two of them: an op's results may not share memory
        stats = (torch.zeros(local.tokens, dtype=local.compute_dtype, device=local.device) for _ in range(2))
    else:
        stats = (state.stats.lse, state.stats.target_logit)
    return output, [prepared.rows.spread(v, 0.0) for v in stats]


def _flce_fake(*arguments):
    call = _Call.of(arguments[:5], arguments[5:])
    problem, needs = call.problem, call.needs
    with call.context():
        check_tensors(problem)
        in_forward = _gradients_in_forward(call)
    options, dtype, x, target = problem.options, problem.compute_dtype, problem.x, problem.target
    per_row = target.shape if options.reduction == "none" else ()

    def empty(shape, dtype, there=True):
        return x.new_empty(shape if there else (0,), dtype=dtype if there else x.dtype)

    kept = call.wanted.kept()
    gradients = (
        empty(v.shape, dtype) if dtype is not None and in_forward else x.new_empty(0)
        for v, dtype in zip((x, problem.weight, problem.bias), (kept.x, kept.weight, kept.bias), strict=True)
    )
    later = any(needs) and not in_forward
    return (
        empty(per_row, dtype),
        empty(per_row, dtype, options.return_z_loss),
        empty(per_row, torch.float32, options.return_token_accuracy),
        empty(target.shape, torch.int64, options.return_predicted_tokens),
        *gradients,
        empty(target.shape, dtype, later),
        empty(target.shape, dtype, later),
    )


def _flce_backward(grad, lse, target_logit, *arguments):
    """(dx, dW, db) for the upstream gradient, () or (N,), empty where not needed."""
    call = _Call.of(arguments[:5], arguments[5:])
    with call.context():
        check_tensors(call.problem)
        prepared = _prepared(call)
        rows, state = prepared.rows, None
        if prepared.route.engine != "triton":
            weights = row_weights(prepared.problem.for_kernels(prepared.route.dtype))
            state = recompute.RecomputeState(RowStatistics(rows.select(lse), rows.select(target_logit)), weights)
        elif call.problem.options.reduction != "none":  # Liger's operator has these gradients in forward alone
            _, state = forward_of(prepared)
        found = gradients_of(prepared, state, grad)
    return _filled(call.problem, found.x, found.weight, found.bias)


def _flce_backward_fake(grad, lse, target_logit, x, weight, target, bias, *rest):
    return tuple(
        torch.empty_like(v, memory_format=torch.contiguous_format) if v is not None and need else x.new_empty(0)
        for v, need in zip((x, weight, bias), rest[-3:], strict=True)
    )


def _setup_context(ctx, inputs, output):
    call = _Call.of(inputs[:5], inputs[5:])
    with call.context():
        ctx.in_forward = _gradients_in_forward(call)
    ctx.wanted, ctx.needs, ctx.call = call.wanted, call.needs, inputs[5:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    if ctx.in_forward:
        differentiated = [v if need else None for v, need in zip((*inputs[:2], inputs[3]), call.needs, strict=True)]
        ctx.save_for_backward(*output[4:7], *differentiated)
    else:
        ctx.save_for_backward(*output[7:], *inputs[:5])


def _backward(ctx, grad, *_others):
    found = Gradients()
    if grad is not None:
        if ctx.in_forward:
            *kept, x, weight, bias = ctx.saved_tensors
            factor = torch.ops.liger_cutedsl.flce_factor(grad, x, weight, bias)
            dtypes = (ctx.wanted.x, ctx.wanted.weight, ctx.wanted.bias)
            computed = [None if d is None else (k * factor).to(d) for k, d in zip(kept, dtypes, strict=True)]
        else:
            computed = torch.ops.liger_cutedsl.flce_backward(grad, *ctx.saved_tensors, *ctx.call)
        found = Gradients(*(g if need else None for g, need in zip(computed, ctx.needs, strict=True)))
    return found.x, found.weight, None, found.bias, None, *([None] * len(ctx.call))


def _flce_factor(grad, *_inputs):
    """What kept gradients are multiplied by. The inputs are not read: they are there so that autograd finds this node,
    which refuses, on its way from a gradient to any of them."""
    return grad.clone()


def _define(name: str, schema: str, function, fake):
    op = torch.library.custom_op(f"liger_cutedsl::{name}", function, mutates_args=(), schema=schema)
    op.register_fake(fake)
    return op


_define("flce", f"({_TENSORS}, {_CALL}) -> ({', '.join(['Tensor'] * 9)})", _flce, _flce_fake).register_autograd(
    _backward, setup_context=_setup_context
)
_define(
    "flce_backward",
    f"(Tensor grad, Tensor lse, Tensor target_logit, {_TENSORS}, {_CALL}) -> (Tensor, Tensor, Tensor)",
    _flce_backward,
    _flce_backward_fake,
).register_autograd(refuse_second_derivative)
_define(
    "flce_factor",
    "(Tensor grad, Tensor? x, Tensor? weight, Tensor? bias) -> Tensor",
    _flce_factor,
    _flce_factor,
).register_autograd(refuse_second_derivative)

"""The operator inside torch.compile: custom ops that a graph holds as one node each, forward and backward.

A graph knows shapes, not data: it cannot hold rows that were dropped, or a schedule that was chosen for their number.
So the ops take and return whole tensors and decide inside, as eager mode does, what to run:

    forward   the loss and, where the upstream gradient is one number (mean, sum), the gradients for an upstream
              gradient of 1, whichever schedule computes them; else the row statistics
    backward  those gradients times the upstream gradient; else the gradients from the row statistics (`recompute`)
"""

from __future__ import annotations

from dataclasses import replace

import torch

from liger_cutedsl.autograd import Call, begun, forward_of, gradients_of, run_with_gradients, with_fallback
from liger_cutedsl.call import DIFFERENTIABLE, TENSORS, Gradients, WantedGradients
from liger_cutedsl.checks import check_tensors
from liger_cutedsl.cross_entropy import SAMPLING_METRICS, LossOutput
from liger_cutedsl.custom_ops import (
    TENSORS_SCHEMA,
    Arguments,
    as_described,
    call_schema,
    call_values,
    defaults_of,
    define,
    empty_results,
)
from liger_cutedsl.derivatives import refuse_second_derivative
from liger_cutedsl.objective import row_weights
from liger_cutedsl.options import LossOptions
from liger_cutedsl.row_statistics import RowStatistics
from liger_cutedsl.schedules import liger_triton, recompute

_DEFAULTS, _CALL = defaults_of(LossOptions), call_schema(LossOptions)


class _Arguments(Arguments):
    """The arguments of flce."""

    @property
    def in_forward(self) -> bool:
        """Whether the gradients for an upstream gradient of 1 are all that backward needs, at the same accuracy."""
        return self.problem.options.reduction != "none" and self.settings.schedule != recompute.NAME

    def results(self) -> dict[str, tuple | None]:
        """(shape, dtype) of what flce returns, None for what there is not: of the real results and of the fake ones."""
        problem, options, dtype = self.problem, self.problem.options, self.problem.compute_dtype
        rows = tuple(problem.target.shape)
        per_row = rows if options.reduction == "none" else ()
        later = bool(self.wanted) and not self.in_forward
        return {
            "loss": (per_row, dtype),
            "z_loss": (per_row, dtype) if options.return_z_loss else None,
            "token_accuracy": (per_row, torch.float32) if options.return_token_accuracy else None,
            "predicted_tokens": (rows, torch.int64) if options.return_predicted_tokens else None,
            **dict.fromkeys(SAMPLING_METRICS, ((), torch.float32) if options.return_gradient_sampling else None),
            **(self.gradients(self.wanted.kept()) if self.in_forward else dict.fromkeys(DIFFERENTIABLE)),
            "lse": (rows, dtype) if later else None,
            "target_logit": (rows, dtype) if later else None,
        }


def run_compiled(
    tensors, options: dict, engine, schedule, workspace_mb, chunk_mem_const, gradient_sampling
) -> LossOutput:
    """autograd.run for tensors in the order of TENSORS, written so that torch.compile can trace it."""
    named = dict(zip(TENSORS, tensors, strict=True))
    how = (engine, schedule, workspace_mb, chunk_mem_const)
    values = call_values(_DEFAULTS | options, named, *how, gradient_sampling=gradient_sampling)
    loss, z_loss, accuracy, predicted, *others = FLCE(*tensors, *values)
    sampling = others[: len(SAMPLING_METRICS)] if options.get("return_gradient_sampling") else ()
    return LossOutput(
        loss,
        z_loss if options.get("return_z_loss") else None,
        accuracy if options.get("return_token_accuracy") else None,
        predicted if options.get("return_predicted_tokens") else None,
        *sampling,
    )


def _flce(*arguments):
    """The results of _Arguments.results."""
    call, stats = _Arguments.of(LossOptions, *arguments), (None, None)
    problem, gradients = call.problem, Gradients()
    with call.context(), torch.no_grad():
        check_tensors(problem)
        if call.in_forward or not call.wanted:
            output, gradients = run_with_gradients(problem, call.settings, call.wanted.kept(), None)
        else:
            output, stats = with_fallback(
                call.settings, lambda: begun(_forward_only, problem, call.settings, call.wanted)
            )
    return as_described(problem.x, call.results(), (*output, *gradients, *stats))


def _forward_only(call: Call):
    """The loss, and lse and target_logit (N,) for backward; zeros for Liger's operator, which has none to give."""
    rows = call.rows
    output, state = forward_of(replace(call, route=replace(call.route, kept=0)).with_task(wanted=WantedGradients()))
    if state is None:
        none = torch.zeros(call.task.problem.tokens, dtype=torch.float32, device=call.whole.device)
        return output, (rows.spread(none, 0.0), rows.spread(none.clone(), 0.0))  # results may not share memory
    return output, [rows.spread(v, 0.0) for v in (state.stats.lse, state.stats.target_logit)]


def _flce_fake(*arguments):
    call = _Arguments.of(LossOptions, *arguments)
    with call.context():
        check_tensors(call.problem)
        return empty_results(call.problem.x, call.results())


def _flce_backward(grad, lse, target_logit, *arguments):
    """(dx, dW, db) for the upstream gradient, () or (N,)."""
    call = _Arguments.of(LossOptions, *arguments)

    def use(begun_call: Call):
        task, rows, state = begun_call.task, begun_call.rows, None
        begun_call = replace(begun_call, route=replace(begun_call.route, kept=0))
        if begun_call.route.schedule != liger_triton.NAME:
            problem = task.problem.for_kernels(begun_call.route.dtype)
            if problem.options.reduction == "none":  # nothing is divided by their number: it need not be waited for
                problem = replace(problem, count=None)
            weights = row_weights(problem)
            state = recompute.RecomputeState(RowStatistics(rows.select(lse), rows.select(target_logit)), weights)
        elif task.problem.options.reduction != "none":  # Liger's operator has these gradients in forward alone
            _, state = forward_of(begun_call)
        return gradients_of(begun_call, state, LossOutput(grad))

    with call.context(), torch.no_grad():
        check_tensors(call.problem)
        found = begun(use, call.problem, call.settings, call.wanted)
        return as_described(call.problem.x, call.gradients(call.wanted), found)


def _flce_backward_fake(grad, lse, target_logit, *arguments):
    call = _Arguments.of(LossOptions, *arguments)
    return empty_results(call.problem.x, call.gradients(call.wanted))


def _setup_context(ctx, inputs, output):
    call = _Arguments.of(LossOptions, *inputs)
    ctx.in_forward, ctx.wanted, ctx.call = call.in_forward, call.wanted, inputs[len(TENSORS) :]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    found = dict(zip(call.results(), output, strict=True))
    if ctx.in_forward:
        needs = zip(DIFFERENTIABLE, call.needs, strict=True)
        differentiated = [getattr(call.problem, name) if need else None for name, need in needs]
        ctx.save_for_backward(*(found[name] for name in DIFFERENTIABLE), *differentiated)
    else:
        ctx.save_for_backward(found["lse"], found["target_logit"], *inputs[: len(TENSORS)])


def _backward(ctx, grad, *_others):
    computed = dict.fromkeys(TENSORS)
    if grad is not None:
        if ctx.in_forward:
            kept, inputs = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
            factor = FLCE_FACTOR(grad, *inputs)
            gradients = [None if d is None else (k * factor).to(d) for k, d in zip(kept, ctx.wanted, strict=True)]
        else:
            gradients = FLCE_BACKWARD(grad, *ctx.saved_tensors, *ctx.call)
        wanted = zip(DIFFERENTIABLE, gradients, ctx.wanted, strict=True)
        computed |= {name: g for name, g, dtype in wanted if dtype is not None}
    return *computed.values(), *([None] * len(ctx.call))


def _flce_factor(grad, *_inputs):
    """What kept gradients are multiplied by. The inputs are not read: they are there so that autograd finds this node,
    which refuses, on its way from a gradient to any of them."""
    return grad.clone()


FLCE = define(
    "flce",
    f"({TENSORS_SCHEMA}, {_CALL}) -> ({', '.join(['Tensor'] * 12)})",
    _flce,
    _flce_fake,
    _backward,
    _setup_context,
)
FLCE_BACKWARD = define(
    "flce_backward",
    f"(Tensor grad, Tensor lse, Tensor target_logit, {TENSORS_SCHEMA}, {_CALL}) -> (Tensor, Tensor, Tensor)",
    _flce_backward,
    _flce_backward_fake,
    refuse_second_derivative,
)
FLCE_FACTOR = define(
    "flce_factor",
    "(Tensor grad, Tensor? x, Tensor? weight, Tensor? bias) -> Tensor",
    _flce_factor,
    _flce_factor,
    refuse_second_derivative,
)

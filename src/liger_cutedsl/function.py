"""The entrances: Liger-Kernel's autograd class, and a keyword function for everyone else."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from liger_cutedsl.dtensor import run_dtensor
from liger_cutedsl.engines import KernelFailure, make_engine
from liger_cutedsl.objective import LossOutput
from liger_cutedsl.options import LossOptions
from liger_cutedsl.problem import Gradients, Problem, WantedGradients, check_tensors, is_dtensor, wanted_gradients
from liger_cutedsl.routing import Route, Settings, choose_route, give_up_on_cute, warn_about_fallback
from liger_cutedsl.rows import NotDense, Rows, TargetCheck
from liger_cutedsl.schedules.kept import KeptGradients

_SCHEDULE_MODULES = {"recompute": "recompute", "single_pass": "single_pass", "liger": "liger_triton"}


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Runs a route's schedule: its forward now, its backward when the upstream gradient is there."""

    @staticmethod
    def forward(ctx, x, weight, bias, call: _Call):
        problem, route, rows, wanted = call.problem, call.route, call.rows, call.wanted
        engine = make_engine(route.engine, call.confirm)
        output, state = _schedule(route).forward(engine, problem, route, wanted)
        output = rows.spread_output(output)
        # Gradients that are there already need no inputs: nothing keeps x and weight alive, or from being changed.
        inputs = (None,) * 5
        if not isinstance(state, KeptGradients):
            inputs = (x, weight, call.target, bias, problem.ce_weight)
        ctx.save_for_backward(*inputs, rows.keep, rows.drop)
        ctx.call = (problem.options, problem.dense, route, wanted)
        ctx.state = state
        ctx.mark_non_differentiable(*(metric for metric in output[1:] if metric is not None))
        return tuple(output)

    @staticmethod
    def backward(ctx, grad_output, *_metrics):
        options, dense, route, wanted = ctx.call
        *inputs, keep, drop = ctx.saved_tensors
        rows = Rows(keep, drop)
        with torch.no_grad():
            problem = None if inputs[0] is None else rows.compact(Problem(*inputs, options, dense))
            found = rows.spread_gradients(_gradients(problem, route, wanted, ctx.state, rows.select(grad_output)))
        gradients = [found.x, found.weight, found.bias]
        if torch.is_grad_enabled():  # create_graph=True: a second derivative must fail, not vanish
            gradients = [g if g is None else _NoSecondDerivative.apply(g.requires_grad_()) for g in gradients]
        return (*gradients, None)


def _gradients(problem: Problem | None, route: Route, wanted: WantedGradients, state, upstream) -> Gradients:
    """The gradients for an upstream gradient: kept ones scaled, others computed from the problem."""
    if isinstance(state, KeptGradients):
        return state.for_upstream(upstream)
    return _schedule(route).backward(make_engine(route.engine), problem, route, wanted, state, upstream)


class _NoSecondDerivative(torch.autograd.Function):
    """The identity, which raises when it is differentiated."""

    @staticmethod
    def forward(ctx, gradient):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "fused linear cross entropy has no second derivative: leave create_graph=True out, or compute this loss "
            "with torch.nn.functional.cross_entropy"
        )


def _schedule(route: Route):
    return importlib.import_module(f"liger_cutedsl.schedules.{_SCHEDULE_MODULES[route.schedule]}")


class _Call(NamedTuple):
    """A checked call: what to compute and how, where its rows belong among the caller's, the gradients that will be
    asked for, the caller's own targets, and what is still to be confirmed once the first GEMM is launched."""

    problem: Problem
    route: Route
    rows: Rows
    wanted: WantedGradients
    target: torch.Tensor
    confirm: Callable[[], None] | None = None


def prepare(check: TargetCheck, settings: Settings, wanted: WantedGradients) -> _Call:
    """Everything that can be refused is refused before anything is computed: shapes by check_tensors, the rest here."""
    rows = check.rows()
    compact = check.compact(rows)
    route = choose_route(compact, wanted, settings)
    warn_about_fallback(route)
    return _Call(compact, route, rows, wanted, check.problem.target)


def _begin_dense(check: TargetCheck, settings: Settings, wanted: WantedGradients) -> _Call | None:
    """The call as if no target were ignored, where that is likely and the engine can wait to have it confirmed."""
    if not check.likely_dense:
        return None
    problem = replace(check.problem, dense=True)
    route = choose_route(problem, wanted, settings)
    if route.engine != "cute":
        return None
    return _Call(problem, route, Rows(), wanted, problem.target, check.confirm_dense)


@torch.compiler.disable  # what compiled.py does not trace runs between two graphs
def run(problem: Problem, settings: Settings) -> LossOutput:
    """Checks, routes and runs a problem under autograd."""
    if is_dtensor(problem.weight) or is_dtensor(problem.x):
        return run_dtensor(problem, settings)
    check_tensors(problem)
    _refuse_function_transforms(problem)
    wanted, apply = wanted_gradients(problem), _FusedLinearCrossEntropy.apply
    with torch.no_grad():
        check = TargetCheck(problem)
        call = _begin_dense(check, settings, wanted)
    if call is not None:
        try:
            return LossOutput(*apply(problem.x, problem.weight, problem.bias, call))
        except NotDense:
            pass  # nothing was handed out; the rows that count are computed below
        except KernelFailure as failure:
            give_up_on_cute(failure, settings)
    with torch.no_grad():
        call = prepare(check, settings, wanted)
    try:
        return LossOutput(*apply(problem.x, problem.weight, problem.bias, call))
    except KernelFailure as failure:
        give_up_on_cute(failure, settings)
        return run(problem, settings)


def _refuse_function_transforms(problem: Problem) -> None:
    for name in ("x", "weight", "target", "bias", "ce_weight"):
        value = getattr(problem, name)
        if value is not None and torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise RuntimeError(
                f"{name} is inside a torch.func transform (grad, vmap, jacrev, ...), which fused linear cross entropy "
                "does not support: use torch.autograd.grad, and reduction='none' for one loss a row"
            )


def run_with_gradients(
    problem: Problem, settings: Settings, wanted: WantedGradients, upstream: torch.Tensor | None
) -> tuple[LossOutput, Gradients]:
    """A problem and its gradients in one go, outside autograd, for an upstream gradient () or (N,), or of 1."""
    check_tensors(problem)
    with torch.no_grad():
        local, route, rows, *_ = prepare(TargetCheck(problem), settings, wanted)
        try:
            output, state = _schedule(route).forward(make_engine(route.engine), local, route, wanted)
        except KernelFailure as failure:
            give_up_on_cute(failure, settings)
            return run_with_gradients(problem, settings, wanted, upstream)
        if not wanted:
            return rows.spread_output(output), Gradients()
        upstream = torch.ones_like(output.loss) if upstream is None else rows.select(upstream)
        gradients = _gradients(local, route, wanted, state, upstream)
        return rows.spread_output(output), rows.spread_gradients(gradients)


def fused_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    engine: str | None = None,
    schedule: str | None = None,
    workspace_mb: float | None = None,
    **options,
) -> torch.Tensor | LossOutput:
    """Cross entropy of the logits x @ weight.T + bias, without storing the logits.

    x: (..., H), bfloat16, float16, float32 or float64.  weight: (V, H), of x's dtype (or any under autocast).
    target: (...), int64 or int32, in [0, V) or ignore_index.  bias, ce_weight: (V,), floating point.
    options: the fields of liger_cutedsl.LossOptions by name (reduction="mean", label_smoothing=0.0, …).
    engine, schedule, workspace_mb: see liger_cutedsl.routing.Settings.

    Returns the loss, float32 (float64 for float64 inputs): a scalar, or target's shape for reduction="none";
    a LossOutput where a metric is asked for (return_z_loss, return_token_accuracy, return_predicted_tokens).
    Gradients reach x, weight and bias, each only if it requires one; they come in their parameter's dtype.

    Raises TypeError or ValueError naming the argument; RuntimeError where a forced engine cannot run the call.
    """
    shape = getattr(target, "shape", None)
    plain = isinstance(x, torch.Tensor) and isinstance(target, torch.Tensor) and not is_dtensor(x)
    if plain and x.dim() != 2:
        if x.shape[:-1] != target.shape:
            raise ValueError(
                f"target must have shape {tuple(x.shape[:-1])}, one target for each row of x "
                f"{tuple(x.shape)}, got {tuple(target.shape)}"
            )
        x, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    route = dict(engine=engine, schedule=schedule, workspace_mb=workspace_mb)
    if torch.compiler.is_compiling() and plain and not is_dtensor(weight):
        return run_compiled(x, weight, target, bias, ce_weight, **route, **options).result(shape)
    problem = Problem(x, weight, target, bias, ce_weight, LossOptions(**options))
    return run(problem, Settings.resolve(**route)).result(shape)


class LigerFusedLinearCrossEntropyFunction:
    """Liger-Kernel's class of this name: the same positional arguments, the same four results.

    apply(_input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
    softcap, return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
    ce_impl, ce_mode, chunk_mem_const) → (loss, z_loss, token_accuracy, predicted_tokens), None where not asked
    for. _input is (N, H), weight (V, H), target (N,). ce_impl and ce_mode choose between Liger's own inner
    kernels and are ignored here; chunk_mem_const multiplies the workspace budget.
    """

    supports_inner_impl_dispatch = True

    @classmethod
    def apply(
        cls,
        _input,
        weight,
        target,
        bias=None,
        ce_weight=None,
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
        chunk_mem_const=1,
    ):
        options = dict(
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            use_token_scaling=use_token_scaling,
            accum_dtype=accum_dtype,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
        if torch.compiler.is_compiling() and not (is_dtensor(weight) or is_dtensor(_input)):
            tensors = (_input, weight, target, bias, ce_weight)
            return tuple(run_compiled(*tensors, chunk_mem_const=chunk_mem_const, **options))
        problem = Problem(_input, weight, target, bias, ce_weight, LossOptions(**options))
        return tuple(run(problem, Settings.resolve(chunk_mem_const=chunk_mem_const)))


def explain(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    engine: str | None = None,
    schedule: str | None = None,
    workspace_mb: float | None = None,
    **options,
) -> Route:
    """The route fused_linear_cross_entropy would take with these arguments, without running anything.

    Takes meta or fake tensors too. target may be left out.
    """
    x = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    if target is None:
        target = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    problem = Problem(x, weight, target.reshape(-1), bias, ce_weight, LossOptions(**options))
    check_tensors(problem)
    return choose_route(problem, wanted_gradients(problem), Settings.resolve(engine, schedule, workspace_mb))


from liger_cutedsl.compiled import run_compiled  # noqa: E402  (it builds on what stands above)

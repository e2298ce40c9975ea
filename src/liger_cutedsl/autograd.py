"""Running a call: checked, routed, and under autograd. Entrances are in api.py, torch.compile's in torch_compile.py."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from liger_cutedsl.checkpointing import unseen_by_checkpoints
from liger_cutedsl.derivatives import refuse_batched_upstream, without_second_derivative
from liger_cutedsl.dtensor import run_dtensor
from liger_cutedsl.engines import KernelFailure, make_engine
from liger_cutedsl.objective import LossOutput
from liger_cutedsl.problem import (
    TENSORS,
    Gradients,
    Problem,
    WantedGradients,
    check_tensors,
    is_dtensor,
    wanted_gradients,
)
from liger_cutedsl.readable import check_still_readable
from liger_cutedsl.routing import Route, Settings, choose_route, give_up_on_cute, warn_about_fallback
from liger_cutedsl.rows import NotDense, Rows, TargetCheck
from liger_cutedsl.schedules.kept import KeptGradients

_SCHEDULE_MODULES = {"recompute": "recompute", "single_pass": "single_pass", "liger": "liger_triton"}


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Runs a route's schedule: its forward now, its backward when the upstream gradient is there.

    Besides the results it returns an empty tensor, which backward finds connected to this node, and so to all inputs.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, call: _Call):
        problem, rows = call.problem, call.rows
        output, state = forward_of(call)
        # Gradients that are there already need no inputs: nothing keeps x and weight alive, or from being changed.
        inputs = (None,) * 5
        if not isinstance(state, KeptGradients):
            inputs = (x, weight, call.target, bias, problem.ce_weight)
        origin = x.new_empty(0) if call.wanted else None
        ctx.save_for_backward(*inputs, rows.keep, rows.drop, rows.masked, origin)
        ctx.saves = not isinstance(state, KeptGradients) or rows.keep is not None
        ctx.shapes = {name: t.shape for name, t in zip(TENSORS, inputs, strict=True) if t is not None}
        ctx.call = call._replace(problem=None, rows=None, target=None, confirm=None)  # what holds no tensors
        ctx.options, ctx.dense, ctx.state = problem.options, problem.dense, state
        ctx.mark_non_differentiable(*(metric for metric in output[1:] if metric is not None))
        return *output, origin

    @staticmethod
    def backward(ctx, grad_output, *_others):
        refuse_batched_upstream(grad_output)
        # Not read in vain: activation checkpointing would run the whole forward again to have them.
        reads = ctx.saves or torch.is_grad_enabled()
        *inputs, keep, drop, masked, origin = ctx.saved_tensors if reads else (None,) * 9
        check_still_readable(ctx.shapes, dict(zip(TENSORS, inputs, strict=True)))
        rows = Rows(keep, drop, masked)
        with torch.no_grad():
            problem = None if inputs[0] is None else rows.compact(Problem(*inputs, ctx.options, ctx.dense))
            found = gradients_of(ctx.call._replace(problem=problem, rows=rows), ctx.state, grad_output)
        return (*without_second_derivative((found.x, found.weight, found.bias), grad_output, origin), None)


def _schedule(route: Route):
    return importlib.import_module(f"liger_cutedsl.schedules.{_SCHEDULE_MODULES[route.schedule]}")


class _Call(NamedTuple):
    """A checked call: what to compute and how, where its rows belong among the caller's, the gradients that will be
    asked for, the caller's settings and targets, and what is still to be confirmed once the first GEMM is launched."""

    problem: Problem
    route: Route
    rows: Rows
    wanted: WantedGradients
    settings: Settings
    target: torch.Tensor
    confirm: Callable[[], None] | None = None


def prepare(check: TargetCheck, settings: Settings, wanted: WantedGradients) -> _Call:
    """Everything that can be refused is refused before anything is computed: shapes by check_tensors, the rest here."""
    rows = check.rows()
    compact = check.compact(rows)
    route = choose_route(compact, wanted, settings)
    warn_about_fallback(route)
    return _Call(compact, route, rows, wanted, settings, check.problem.target)


def _begin_dense(check: TargetCheck, settings: Settings, wanted: WantedGradients) -> _Call | None:
    """The call as if no target were ignored, where that is likely and the engine can wait to have it confirmed."""
    if not check.likely_dense:
        return None
    problem = replace(check.problem, dense=True)
    route = choose_route(problem, wanted, settings)
    if route.engine != "cute":
        return None
    return _Call(problem, route, Rows(), wanted, settings, problem.target, check.confirm_dense)


def between_graphs(function):
    """What torch_compile.py does not trace runs between two graphs: torch.compiler.disable, put off until something is
    being traced, because it imports torch._dynamo, which takes a second. And beneath the modes of activation
    checkpointing.
    """

    @functools.wraps(function)
    def eager(*arguments):
        if torch.compiler.is_compiling():
            return torch.compiler.disable(eager)(*arguments)
        if torch._C._len_torch_dispatch_stack():
            return unseen_by_checkpoints(function, arguments)
        return function(*arguments)

    return eager


def forward_of(call: _Call):
    """What the caller gets of a prepared call, and what its schedule's backward needs."""
    engine = make_engine(call.route.engine, call.confirm)
    output, state = _schedule(call.route).forward(engine, call.problem, call.route, call.wanted)
    return call.rows.spread_output(output), state


def gradients_of(call: _Call, state, upstream: torch.Tensor) -> Gradients:
    """The gradients of a prepared call for an upstream gradient () or (N,): kept ones scaled, others computed.

    Where a kernel fails only now, from the start on what runs without it: the loss that was handed out stands.
    """
    problem, route, upstream = call.problem, call.route, call.rows.select(upstream)
    if isinstance(state, KeptGradients):
        return state.for_upstream(upstream, call.rows)
    try:
        found = _schedule(route).backward(make_engine(route.engine), problem, route, call.wanted, state, upstream)
    except KernelFailure as failure:
        give_up_on_cute(failure, call.settings)
        found = run_with_gradients(problem.for_kernels(route.dtype), call.settings, call.wanted, upstream)[1]
    return call.rows.spread_gradients(found)


@between_graphs
def run(problem: Problem, settings: Settings) -> LossOutput:
    """Checks, routes and runs a problem under autograd."""
    if is_dtensor(problem.weight) or is_dtensor(problem.x):
        return run_dtensor(problem, settings)
    check_tensors(problem)
    wanted = wanted_gradients(problem)
    with torch.no_grad():
        check = TargetCheck(problem)
        call = _begin_dense(check, settings, wanted)
    if call is not None:
        try:
            return _applied(problem, call)
        except NotDense:
            pass  # nothing was handed out; the rows that count are computed below
        except KernelFailure as failure:
            give_up_on_cute(failure, settings)
    with torch.no_grad():
        call = prepare(check, settings, wanted)
    try:
        return _applied(problem, call)
    except KernelFailure as failure:
        give_up_on_cute(failure, settings)
        return run(problem, settings)


def _applied(problem: Problem, call: _Call) -> LossOutput:
    *output, _origin = _FusedLinearCrossEntropy.apply(problem.x, problem.weight, problem.bias, call)
    return LossOutput(*output)


def _with_gradients_in_backward(call: _Call) -> _Call:
    """The same call by a schedule that takes an upstream gradient (N,), on the same engine.

    Liger's operator stays: its backward takes one, whatever the reduction.
    """
    if call.route.schedule != "single_pass":
        return call
    if call.settings.schedule == "single_pass":
        raise RuntimeError(
            "schedule 'single_pass' was asked for but cannot run this call: it sums the tokens' gradients in forward, "
            "before it knows an upstream gradient for each. Unset LIGER_CUTEDSL_SCHEDULE to let it take another"
        )
    settings = replace(call.settings, engine=call.route.engine, schedule="recompute")
    return call._replace(route=choose_route(call.problem, call.wanted, settings))


def run_with_gradients(
    problem: Problem, settings: Settings, wanted: WantedGradients, upstream: torch.Tensor | None
) -> tuple[LossOutput, Gradients]:
    """A problem and its gradients in one go, outside autograd, for an upstream gradient () or (N,), or of 1.

    (N,) for a mean or a sum weighs each token's share of it.
    """
    check_tensors(problem)
    with torch.no_grad():
        call = prepare(TargetCheck(problem), settings, wanted)
        begun = call
        if wanted and upstream is not None and upstream.dim():
            call = begun = _with_gradients_in_backward(call)
            if call.route.schedule == "liger":  # what its forward would keep is for one number
                begun = call._replace(wanted=WantedGradients())
        try:
            output, state = forward_of(begun)
        except KernelFailure as failure:
            give_up_on_cute(failure, settings)
            return run_with_gradients(problem, settings, wanted, upstream)
        if not wanted:
            return output, Gradients()
        return output, gradients_of(call, state, torch.ones_like(output.loss) if upstream is None else upstream)

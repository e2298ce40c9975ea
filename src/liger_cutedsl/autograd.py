"""The one road of a call: checked, routed, run, differentiated, and retried without a kernel that failed.

Eager, compiled, split and DTensor calls take it; entrances are in api.py, torch.compile's ops in torch_compile.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from liger_cutedsl import objectives
from liger_cutedsl.call import DIFFERENTIABLE, TENSORS, Gradients, Problem, WantedGradients
from liger_cutedsl.checkpointing import between_graphs, unseen_by_saved_tensor_hooks
from liger_cutedsl.checks import check_tensors
from liger_cutedsl.derivatives import refuse_batched_upstream, without_second_derivative
from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.first_call import announce
from liger_cutedsl.objective import flat, named
from liger_cutedsl.readable import check_still_readable
from liger_cutedsl.route import Route, Settings
from liger_cutedsl.routing import give_up_on_cute, planned, warn_about_fallback
from liger_cutedsl.row_function import of_derivatives
from liger_cutedsl.rows import Rows, TargetCheck, TooManyIgnored
from liger_cutedsl.saved_state import put_together, taken_apart
from liger_cutedsl.schedules import by_name, kept_shares, liger_triton, recompute, sampled, single_pass
from liger_cutedsl.schedules.kept import AddedInForward, KeptGradients
from liger_cutedsl.schedules.schedule import Task
from liger_cutedsl.shards import OtherShards
from liger_cutedsl.split import WHOLE, Split
from liger_cutedsl.upstream import History, history_of
from liger_cutedsl.weight_grad_buffer import added_once, wholly_added


@dataclass(frozen=True)
class Call:
    """A checked call: what to compute, on which engine and how, and where its rows belong among the caller's.

    whole: the caller's own problem, of which task.problem holds the rows that count.
    around_backward: makes the context in which backward reads what forward saved.
    """

    task: Task
    engine: object
    route: Route
    rows: Rows
    whole: Problem
    around_backward: Callable = contextlib.nullcontext

    def without_tensors(self) -> Call:
        """What a graph may hold beside its saved tensors."""
        task = self.task
        task = Task(None, task.wanted, task.settings, task.split)
        return replace(self, task=task, rows=None, whole=None)

    def with_task(self, **changes) -> Call:
        return replace(self, task=replace(self.task, **changes))

    def by_recompute(self, settings: Settings, **changes) -> Call:
        """The same call by the schedule that computes gradients in backward, on the same engine."""
        call = self.with_task(settings=replace(settings, schedule=recompute.NAME), **changes)
        route = recompute.plan(call.engine, call.task, call.route.reason)
        return replace(call, route=replace(route, dtype=self.route.dtype))  # backward runs outside forward's autocast


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Runs a route's schedule: its forward now, its backward when the upstream gradient is there.

    Besides the results it returns an empty tensor, which backward finds connected to this node, and so to all inputs.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, call: Call, history: History | None):
        problem, rows = call.whole, call.rows
        output, state = forward_of(call)
        # Gradients that are there already need no inputs: nothing keeps x and weight alive, or from being changed.
        ctx.saved = {} if isinstance(state, KeptGradients) else {name: t.shape for name, t in problem.tensors().items()}
        inputs = [getattr(problem, name) if name in ctx.saved else None for name in TENSORS]
        origin = x.new_empty(0) if call.task.wanted else None
        held = []
        ctx.state = state if isinstance(state, KeptGradients) else taken_apart(state, held)
        ctx.save_for_backward(*inputs, origin, *held)
        ctx.rows, ctx.weight_grad_buffer = rows, problem.weight_grad_buffer
        ctx.history = history if isinstance(state, (KeptGradients, AddedInForward)) else None
        ctx.call, ctx.options, ctx.valid = call.without_tensors(), problem.options, call.task.problem.valid_rows()
        ctx.results = type(output)
        ctx.set_materialize_grads(False)
        differentiable = objectives.of(problem.options).DIFFERENTIABLE
        others = flat(output._replace(**dict.fromkeys(differentiable)))
        ctx.mark_non_differentiable(*(value for value in others if value is not None))
        return *flat(output), origin

    @staticmethod
    def backward(ctx, *upstream):
        upstream = ctx.results(*upstream[: len(ctx.results._fields)])
        if all(gradient is None for gradient in upstream):
            return (None,) * 5
        refuse_batched_upstream(upstream)
        with ctx.call.around_backward():
            return (*_differentiated(ctx, upstream), None, None)


def _differentiated(ctx, upstream: NamedTuple) -> list[torch.Tensor | None]:
    saved = ctx.saved_tensors
    inputs, origin = dict(zip(TENSORS, saved, strict=False)), saved[len(TENSORS)]
    check_still_readable(ctx.saved, inputs)
    call = replace(ctx.call, rows=ctx.rows)
    with torch.no_grad():
        if ctx.saved:
            whole = Problem(**inputs, options=ctx.options, weight_grad_buffer=ctx.weight_grad_buffer)
            count = None if ctx.valid is None else functools.partial(int, ctx.valid)
            compact = replace(call.rows.compact(whole), count=count)
            call = replace(call.with_task(problem=replace(compact, dense=ctx.valid == compact.tokens)), whole=whole)
        state = ctx.state
        if not isinstance(state, KeptGradients):
            state = put_together(state, saved[len(TENSORS) + 1 :])
        with added_once(ctx.weight_grad_buffer):
            found = gradients_of(call, state, upstream)
        if ctx.history is not None:
            ctx.history.note(ctx.valid, upstream[0])
    return without_second_derivative(found, *upstream, origin)


def with_fallback(settings: Settings, attempt: Callable):
    """attempt(), and once more without the CuTe engine where a kernel of it fails."""
    try:
        return attempt()
    except KernelFailure as failure:
        give_up_on_cute(failure, settings)
    return attempt()


def begun(
    use: Callable,
    problem: Problem,
    settings: Settings,
    wanted: WantedGradients,
    split: Split = WHOLE,
    expected=None,
    foreseen: Route | None = None,
):
    """use(call) of a checked problem, refused by now for all that it can be refused for.

    Where no row of it is likely to be dropped, the call begins before that is known, on an engine that can wait for the
    answer behind its first GEMM. expected: Task.expected_upstream. foreseen: the route of all of the problem's rows,
    where it is known.
    """
    with torch.no_grad():
        check, call = TargetCheck(problem, split.vocab), None
        if check.likely_whole and split.settled:
            task = Task(check.whole(), wanted, settings, split, expected)
            call = _planned(task, Rows(), problem, check.confirm_whole, foreseen)
    if call is not None and call.route.engine == "cute":
        with contextlib.suppress(TooManyIgnored):  # nothing was handed out; the rows that count are computed below
            return use(call)
    with torch.no_grad():
        rows = check.rows()
        task = Task(check.compact(rows), wanted, settings, split, expected, rows.dropped, rows.bytes(problem))
        call = _planned(task, rows, problem, foreseen=None if rows.dropped else foreseen)
    return use(call)


def _planned(task: Task, rows: Rows, whole: Problem, confirm=None, foreseen: Route | None = None) -> Call:
    try:
        engine, route = planned(task, confirm, foreseen)
    except RuntimeError:
        task.split.refused(task.problem)
        raise
    warn_about_fallback(route)
    return Call(task, engine, route, rows, whole)


def forward_of(call: Call):
    """What the caller gets of a prepared call, and what its schedule's backward needs."""
    sampling = call.task.settings.gradient_sampling
    if sampling and call.task.wanted and call.route.schedule != sampled.NAME:
        kept_shares.passed_over(call.task.problem, sampling)
    with wholly_added(call.whole.weight_grad_buffer):
        output, state = by_name(call.route.schedule).forward(call.engine, call.task, call.route)
        call.task.split.confirm(call.whole)
        announce(call.route, call.whole, bool(call.task.wanted))
        return call.rows.spread_results(output, objectives.of(call.whole.options).FILLS), state


def gradients_of(call: Call, state, upstream: NamedTuple) -> Gradients:
    """The gradients of a prepared call for those of its results: kept ones scaled, others computed.

    Where a kernel fails only now, from the start on what runs without it: the loss that was handed out stands.
    """
    task, upstream = call.task, call.rows.select_upstream(upstream)
    if isinstance(state, AddedInForward) and (missing := state.missing(upstream[0])) is not None:
        rest = call.by_recompute(call.task.settings, wanted=WantedGradients(weight=task.wanted.weight))
        gradients_of(rest, state.rest, type(upstream)(missing, *[None] * len(upstream[1:])))
    if isinstance(state, (KeptGradients, AddedInForward)):
        return state.for_upstream(upstream[0], call.rows)
    if task.problem.weight_grad_buffer is not None:
        task.problem.weight_grad_buffer.begins(upstream)
    states, evaluated = [state], getattr(getattr(state, "stats", None), "evaluated", None)
    row_loss = None if evaluated is None else of_derivatives(evaluated)

    def attempt():
        if states:
            return by_name(call.route.schedule).backward(call.engine, task, call.route, states.pop(), upstream)
        problem = replace(task.problem.for_kernels(call.route.dtype), row_loss=row_loss)
        return run_with_gradients(problem, task.settings, task.wanted, upstream)[1]

    found = call.rows.spread_gradients(with_fallback(task.settings, attempt))
    return task.split.padded(found, call.whole)


@between_graphs
def run(
    problem: Problem,
    settings: Settings,
    split_of: Callable[[Problem, WantedGradients, Settings], Split] | None = None,
    around_backward: Callable = contextlib.nullcontext,
    foreseen: Route | None = None,
) -> NamedTuple:
    """Checks, routes and runs a problem under autograd. Returns the results of its objective.

    split_of: what gives this process's share of a vocabulary over ranks, for a problem that holds its rows of weight,
    bias and ce_weight; asked again where the ranks turn out to have other shares, or budgets, than they thought.
    around_backward: makes a context that backward enters before it looks at x, weight and bias (as ZeRO-3 gathers a
        parameter), and leaves when their gradients are computed.
    foreseen: the route of all of the problem's rows, for a caller that had to know it; planned here, if None.
    """
    check_tensors(problem, empty_shard=split_of is not None)
    wanted, routes = WantedGradients.of(problem), [foreseen]

    def attempt():
        split = WHOLE if split_of is None else split_of(problem, wanted, settings)
        # ranks may expect different things, which their shares of dX would then be of
        history = history_of(problem, wanted) if split is WHOLE else None
        expected = None if history is None else history.expected

        def applied(call: Call) -> NamedTuple:
            return _applied(replace(call, around_backward=around_backward), history)

        return begun(applied, problem, settings, wanted, split, expected, routes.pop() if routes else None)

    try:
        return with_fallback(settings, attempt)
    except OtherShards:  # known by now
        return with_fallback(settings, attempt)


def _applied(call: Call, history: History | None) -> NamedTuple:
    leaves = (getattr(call.whole, name) for name in DIFFERENTIABLE)
    in_forward = call.route.schedule != recompute.NAME and call.whole.options.reduction != "none"
    with unseen_by_saved_tensor_hooks() if in_forward else contextlib.nullcontext():
        *results, _origin = _FusedLinearCrossEntropy.apply(*leaves, call, history)
    return named(objectives.of(call.whole.options).FILLS, results)


def run_with_gradients(
    problem: Problem, settings: Settings, wanted: WantedGradients, upstream: NamedTuple | None
) -> tuple[NamedTuple, Gradients]:
    """A checked problem and its gradients in one go, outside autograd, for gradients of its results, or of 1.

    (N,) for the gradient of a mean or a sum weighs each token's share of it.
    """

    def use(call: Call):
        begin = call
        if wanted and upstream is not None and any(g is not None and g.dim() for g in upstream):
            call = begin = _with_gradients_in_backward(call)
            if call.route.schedule == liger_triton.NAME:  # what its forward would keep is for one number
                begin = call.with_task(wanted=WantedGradients())
        output, state = forward_of(begin)
        if not wanted:
            return output, Gradients()
        one = torch.ones_like(output[0])
        return output, gradients_of(call, state, type(output)(one) if upstream is None else upstream)

    with torch.no_grad():
        return with_fallback(settings, lambda: begun(use, problem, settings, wanted))


def _with_gradients_in_backward(call: Call) -> Call:
    """The same call by a schedule that takes an upstream gradient (N,), on the same engine.

    Liger's operator stays: its backward takes one, whatever the reduction.
    """
    settings = call.task.settings
    if call.route.schedule not in (single_pass.NAME, sampled.NAME):
        return call
    if settings.schedule == call.route.schedule:
        raise RuntimeError(
            f"schedule {settings.schedule!r} was asked for but cannot run this call: it sums the tokens' gradients in "
            "forward, before it knows an upstream gradient for each. Unset LIGER_CUTEDSL_SCHEDULE to let it take "
            "another"
        )
    return call.by_recompute(replace(settings, engine=call.route.engine))

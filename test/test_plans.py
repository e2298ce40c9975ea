"""Plans are made once for calls that look alike: whatever came before, a call's plan is that of a fresh process."""

import contextlib
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch

from liger_cutedsl import LossOptions, fused_linear_log_probs, routing, testing
from liger_cutedsl.api_row_loss import row_loss_of
from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.engines import make_engine
from liger_cutedsl.options import LogProbOptions, RowLossOptions
from liger_cutedsl.route import Settings
from liger_cutedsl.schedules import single_pass
from liger_cutedsl.schedules.schedule import Task
from liger_cutedsl.weight_grad_buffer import WeightGradBuffer
from reference import Case, on_a_gpu


def task(options=None, settings=None, needs=(True, True, False), **case) -> Task:
    """On tensors of its own, as each step of a training has."""
    x, weight, target, bias, ce_weight = Case(
        **dict(tokens=700, hidden=64, vocab=3000, dtype=torch.float32) | case
    ).tensors()
    problem = Problem(x, weight, target, bias, ce_weight, options or LossOptions(), dense=True)
    return Task(problem, WantedGradients.of(problem, needs), settings or Settings(engine="torch", workspace_mb=1.0))


def changed(**problem) -> Task:
    made = task()
    return replace(made, problem=replace(made.problem, **problem))


def own_loss(needs=(True, True, False), **case) -> Task:
    made = task(RowLossOptions(reads_entropy=True), needs=needs, **case)
    x, weight, target = (getattr(made.problem, name) for name in ("x", "weight", "target"))
    a = torch.ones(made.problem.tokens)
    row_loss = row_loss_of(lambda v, a: a * v.entropy, (a,), (x, weight, target, None), target.shape)
    return replace(made, problem=replace(made.problem, row_loss=row_loss))


# what a plan may depend on: each of these takes another route than the first, or says something else of it
CALLS = {
    "as it is": task,
    "tokens": lambda: task(tokens=300),
    "hidden": lambda: task(hidden=72),
    "vocabulary": lambda: task(vocab=2000),
    "dtype": lambda: task(dtype=torch.bfloat16),
    "bias": lambda: task(bias=True, needs=(True, True, True)),
    "x alone": lambda: task(needs=(True, False, False)),
    "no gradient": lambda: task(needs=(False, False, False)),
    "none": lambda: task(LossOptions(reduction="none")),
    "softcap": lambda: task(LossOptions(softcap=30.0)),
    "accumulator": lambda: task(LossOptions(accum_dtype=torch.float64)),
    "log-probabilities": lambda: task(LogProbOptions()),
    "budget": lambda: task(settings=Settings(engine="torch", workspace_mb=4.0)),
    "schedule": lambda: task(settings=Settings(engine="torch", schedule="recompute", workspace_mb=1.0)),
    "reason": lambda: task(settings=Settings(workspace_mb=1.0)),
    "dropped": lambda: replace(task(), dropped=50, beside=200_000),
    "captured": lambda: changed(dense=False),
    "a loss of one's own": lambda: own_loss(),
    "its forward alone, in slices": lambda: own_loss((False, False, False), tokens=9000, hidden=8),
    "counted": lambda: changed(dense=False, count=lambda: 700),
    "buffer": lambda: changed(weight_grad_buffer=WeightGradBuffer(torch.zeros(3000, 64), "weight_grad_buffer")),
}
AROUND = {
    "alone": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def fresh(call: Task):
    testing.reset()
    return routing.planned(call)[1]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.filterwarnings("ignore:a workspace of")
def test_a_plan_is_that_of_a_fresh_process(around):
    with AROUND[around]():
        alone = {name: fresh(make()) for name, make in CALLS.items()}
    assert len({*alone.values()}) > len(CALLS) / 2  # they are situations that differ
    for first, then in product(CALLS, repeat=2):
        testing.reset()
        before = routing.planned(CALLS[first]())[1]
        with AROUND[around]():
            assert routing.planned(CALLS[then]())[1] == alone[then], f"{then} after {first}"
        assert routing.planned(CALLS[first]())[1] == before, f"{first} before and after {then}"


@pytest.mark.filterwarnings("ignore:a workspace of")
@pytest.mark.parametrize("name", CALLS)
def test_an_outline_gives_the_plan_of_its_tensors(name):
    call, engine = CALLS[name](), make_engine("torch")
    outlined = replace(call, problem=call.problem.outline())
    assert routing._schedule(engine, outlined, "") == routing._schedule(engine, call, "")


def test_tiles_for_experiments_count(h200, monkeypatch):
    testing.reset()
    monkeypatch.setattr(routing, "cute_obstacle", lambda _: None)
    problem = on_a_gpu(8192, 4096, 128256, torch.bfloat16, {})
    call = Task(problem, WantedGradients.of(problem), Settings())
    before = routing.planned(call)[1]
    monkeypatch.setenv("LIGER_CUTEDSL_TILES", "exp=128x64/2x1")
    assert routing.planned(call)[1].workspace_bytes > before.workspace_bytes  # more tiles have more maxima
    monkeypatch.delenv("LIGER_CUTEDSL_TILES")
    assert routing.planned(call)[1] == before


def test_calls_that_look_alike_are_planned_once():
    testing.reset()
    with mock.patch.object(single_pass, "plan", wraps=single_pass.plan) as plan:
        engines, routes = zip(*(routing.planned(task()) for _ in range(3)), strict=True)
    assert plan.call_count == 1 and routes[0] == routes[1] == routes[2]
    assert len({*map(id, engines)}) == 3  # what an engine holds is its call's


def test_calls_that_wait_for_their_backward_count():
    """Their memory is part of what another may take."""
    testing.reset()
    x, weight, target, _, _ = Case(tokens=2000, hidden=64, vocab=1000, dtype=torch.bfloat16).tensors()
    problem = Problem(x, weight, target, options=LogProbOptions(), dense=True)
    call = Task(problem, WantedGradients.of(problem), Settings(engine="torch", workspace_mb=1.0))
    alone = routing.planned(call)[1]
    waits = fused_linear_log_probs(x, weight, target, workspace_mb=1)
    assert routing.planned(call)[1].kept == 0 < alone.kept
    del waits
    assert routing.planned(call)[1] == alone


def test_a_plan_keeps_no_tensor():
    testing.reset()
    routing.planned(task(bias=True, needs=(True, True, True)))
    routing.planned(CALLS["buffer"]())
    held = [value for _, made, *_ in routing._plans for value in vars(made.problem).values()]
    assert held and not any(isinstance(value, (torch.Tensor, WeightGradBuffer)) for value in held)


def test_plans_do_not_gather():
    testing.reset()
    made = task()
    with mock.patch.object(routing, "MOST_PLANS", 3):
        for rows in range(1, 9):
            routing.planned(replace(made, problem=made.problem.of(slice(rows))))
            assert len(routing._plans) <= 3

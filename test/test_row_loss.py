"""A loss of the caller's own against the same function of plain float64 logits, and what it is refused for."""

import functools
import inspect
import math
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import liger_cutedsl
from liger_cutedsl import (
    RowLossOutput,
    autograd,
    fused_linear_cross_entropy,
    fused_linear_loss,
    objectives,
    row_check,
    testing,
)
from liger_cutedsl.call import Problem
from liger_cutedsl.cross_entropy import LossOutput
from liger_cutedsl.cross_entropy import coefficients as closed_form
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.objective import row_weights
from liger_cutedsl.options import LossOptions, RowLossOptions
from liger_cutedsl.row_function import RowLoss
from liger_cutedsl.row_loss import coefficients as through_autograd
from liger_cutedsl.row_loss import results
from liger_cutedsl.schedules import single_pass
from reference import GRADIENT_BOUND, LOSS_BOUND, LOSS_BOUND_FLOAT32, Case, assert_close
from reference_log_probs import LOGITS
from reference_row_loss import expected, grpo, in_float64, values_of

ONE = 2.0**-52


@pytest.fixture
def routes(monkeypatch):
    """The routes that calls take, as they are planned."""
    found, planned = [], autograd.planned

    def recorded(*arguments):
        engine, route = planned(*arguments)
        found.append(route)
        return engine, route

    monkeypatch.setattr(autograd, "planned", recorded)
    return found


@pytest.fixture(autouse=True)
def _nothing_known():
    row_check.forget()


def tensors(tokens=50, ignored=(3,), dtype=torch.float64, **more):
    x, weight, target, bias, _ = Case(tokens=tokens, vocab=61, dtype=dtype, bias=True, ignored=0, **more).tensors()
    target[list(ignored)] = -100
    return x, weight, target, bias


def grpo_rows(case: Case, x, weight, target, bias, **logits):
    """Old and reference log-probabilities near this policy's, advantages that want a gradient, weights."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        wide = [v if v is None else v.double() for v in (x, weight)]
        near = values_of(*wide, target, None if bias is None else bias.double(), **logits).log_prob.float()
    draws = torch.randn(3, case.tokens, generator=generator).to(case.device)
    advantage = draws[2].to(torch.float64 if case.dtype == torch.float64 else torch.float32).requires_grad_()
    weight = torch.rand(case.tokens, generator=generator).to(case.device)
    return near + 0.2 * draws[0], near + 0.3 * draws[1], advantage, weight


def check(case: Case, row_loss, rows, given=None, reduction="mean", exact_aux=True, **call):
    """A call's loss, aux and gradients, those of row tensors included, are those of plain logits."""
    x, weight, target, bias, _ = case.tensors() if given is None else (*given, None)
    logits = {name: call[name] for name in ("softcap", "temperature", "logit_scale", "ignore_index") if name in call}
    got = fused_linear_loss(x, weight, target, row_loss, *rows, bias=bias, reduction=reduction, **call)
    loss, aux = (got, ()) if isinstance(got, torch.Tensor) else (got.loss, got.aux)
    wide = [in_float64(v) for v in (x, weight, bias, *rows)]
    want, want_aux = expected(*wide[:2], target, row_loss, *wide[3:], bias=wide[2], reduction=reduction, **logits)
    bound = LOSS_BOUND.get(case.dtype, LOSS_BOUND_FLOAT32)
    # a loss is a function of log-probabilities, which are differences of logits of this size
    size = 30.0 if reduction == "mean" else 30.0 * case.tokens
    assert loss.shape == () and loss.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert_close(loss, want.detach(), bound, "loss", size=size)
    assert len(aux) == len(want_aux)
    for value, other in zip(aux, want_aux, strict=True):
        assert value.shape == target.shape and not value.requires_grad
        if value.is_floating_point():
            assert_close(value, other, bound, "aux", size=30.0 * case.tokens**0.5)
        else:  # of equals, rounding may prefer another
            assert torch.equal(value, other) or not exact_aux
    leaves = [v for v in (x, weight, bias, *rows) if isinstance(v, torch.Tensor) and v.requires_grad]
    wide = [v for v in wide if isinstance(v, torch.Tensor) and v.requires_grad]
    grads = torch.autograd.grad(3.0 * loss, leaves)
    wants = torch.autograd.grad(3.0 * want, wide)
    for leaf, grad, other in zip(leaves, grads, wants, strict=True):
        assert grad.dtype == leaf.dtype and grad.shape == leaf.shape
        # coefficients of random signs and sizes: a few rows dominate, so that both roundings may be whole ones at once
        twice = 2 if leaf.dtype.itemsize == 2 else 1
        allowed = twice * GRADIENT_BOUND[leaf.dtype]
        # a sum over rows of terms of both signs is exact to the rounding of these
        assert_close(grad, other, allowed, f"gradient of {tuple(leaf.shape)}", size=float(loss.dim() == grad.dim()))
    return got, grads


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_values_and_gradients(place, logits):
    """GRPO with a KL, an entropy bonus and three aux, on every engine, in every schedule."""
    for dtype in place.dtypes:
        for ignored, reduction in ((0.3, "mean"), (0.0, "sum"), (0.02, "mean")):
            case = Case(tokens=70, dtype=dtype, device=place.device, bias=True, ignored=ignored)
            given = case.tensors()[:4]
            schedule = place.schedule
            rows = grpo_rows(case, *given, **logits)
            check(case, grpo, rows, given, reduction, **logits, **(place.call | {"schedule": schedule}))


def every_value(values, a):
    """All of them at once, which no row of kernels' coefficients is left out of."""
    loss = values.log_prob * a + 0.3 * values.entropy - 0.2 * values.mean_logit + 0.01 * values.lse**2
    return loss, values.argmax


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_every_value_at_once(place, logits):
    for dtype in place.dtypes:
        case = Case(tokens=70, dtype=dtype, device=place.device, bias=True, ignored=0.02)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        a = torch.linspace(-1.0, 2.0, 70, dtype=wide, device=place.device).requires_grad_()
        got, _ = check(case, every_value, [a], exact_aux=dtype == torch.float64, **logits, **place.call)
        assert got.aux[0].dtype == torch.int64


SOURCES = ("log_prob", "lse", "entropy", "mean_logit", "a", "b", "scalar", "number")


def expression(draw, depth):
    """A random function of (values, a, b, scalar): a tree of tuples."""
    kind = draw(10) if depth else draw(2)
    if depth == 0 or kind < 2:
        return ("leaf", SOURCES[draw(len(SOURCES))])
    inner = [expression(draw, depth - 1) for _ in range(3)]
    return (("add", "mul", "exp", "clamp", "where", "detach", "tanh", "mul")[kind - 2], *inner)


def evaluated(tree, values, a, b, scalar):
    kind, *inner = tree
    if kind == "leaf":
        name = inner[0]
        found = {"a": a, "b": b, "scalar": scalar, "number": 0.7}.get(name)
        return getattr(values, name) if found is None else found + 0.0 * a
    first = evaluated(inner[0], values, a, b, scalar)
    if kind == "detach":
        return first.detach()
    if kind == "exp":
        return torch.exp(first.clamp(max=1.0))
    if kind == "clamp":
        return first.clamp(-2.0, 1.5)
    if kind == "tanh":
        return torch.tanh(first)
    second = evaluated(inner[1], values, a, b, scalar)
    if kind == "where":
        return torch.where(first > second, second, evaluated(inner[2], values, a, b, scalar))
    return first + second if kind == "add" else first * torch.tanh(second)


@pytest.mark.parametrize("part", range(8))
def test_random_row_losses(part):
    """200 functions of a small grammar, with random options and masks: no difference to plain logits in float64."""
    for seed in range(25 * part, 25 * (part + 1)):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda n: int(torch.randint(n, (), generator=generator))  # noqa: B023, E731
        tree = expression(draw, 4)
        case = Case(tokens=33, hidden=8, vocab=37, bias=bool(draw(2)), ignored=(0.0, 0.03, 0.4)[draw(3)], seed=seed)
        given = case.tensors()[:4]
        draws = torch.randn(2, 33, generator=generator, dtype=torch.float64)
        rows = [draws[0].requires_grad_(), draws[1], torch.tensor(0.4, dtype=torch.float64, requires_grad=True)]
        if not bool((given[2] != -100).any()):
            continue

        def row_loss(values, a, b, scalar):
            found = evaluated(tree, values, a, b, scalar)  # noqa: B023
            # all that wants a gradient has one, of zero
            return found + 0.0 * (a * scalar + values.log_prob), found * 2.0, found > 0

        logits = LOGITS[list(LOGITS)[draw(len(LOGITS))]]
        schedule = ("auto", "recompute", "single_pass")[draw(3)]
        if draw(2):
            row_check.forget()
        check(case, row_loss, rows, given, ("mean", "sum")[draw(2)], schedule=schedule, **logits)


def test_the_built_in_loss_through_autograd():
    """Cross entropy with every option is a row loss: autograd finds the coefficients of its closed form."""
    problem = Problem(torch.zeros(4, 8), torch.zeros(5, 8), torch.tensor([0, 1, -100, 3]))
    problem = Problem(
        *(v.double() if v.is_floating_point() else v for v in (problem.x, problem.weight)), problem.target
    )
    options = LossOptions(label_smoothing=0.2, lse_square_scale=0.3, use_token_scaling=True)
    g = torch.Generator().manual_seed(1)
    z = torch.randn(4, 5, generator=g, dtype=torch.float64)
    stats = TorchEngine().row_statistics(  # a product with the identity
        Problem(torch.eye(4, dtype=torch.float64), z.t().contiguous(), problem.target.clamp(min=0), options=options),
        192,
    )
    closed = Problem(problem.x, problem.weight, problem.target, options=options, count=lambda: 3)
    rows, one = row_weights(closed), LossOutput(torch.ones((), dtype=torch.float64))
    want = closed_form(stats, rows, closed, one, 3.0)

    def row_loss(values):
        smooth = 0.8 * -values.log_prob + 0.2 * (values.lse - values.mean_logit)
        return values.log_prob.exp().detach() * (smooth + 0.3 * values.lse.square())

    loss = RowLoss(row_loss, (), (), True, True)
    own = Problem(problem.x, problem.weight, problem.target, options=RowLossOptions(), count=lambda: 3, row_loss=loss)
    got = through_autograd(objectives.evaluated(stats, rows, own), rows, own, one, 3.0)
    for name in ("a", "c", "fix"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=8 * ONE, atol=8 * ONE)


ONE_LINERS = {
    "class weights": (lambda v, w: -v.log_prob * w, dict()),
    "label smoothing": (lambda v, w: -0.9 * v.log_prob + 0.1 * (v.lse - v.mean_logit), dict(label_smoothing=0.1)),
    "z-loss": (lambda v, w: -v.log_prob + 1e-2 * v.lse**2, dict(lse_square_scale=1e-2)),
    "token scaling": (lambda v, w: -v.log_prob * v.log_prob.exp().detach(), dict(use_token_scaling=True)),
}


@pytest.mark.parametrize("name", ONE_LINERS)
def test_options_of_the_loss_are_one_line(name):
    row_loss, options = ONE_LINERS[name]
    x, weight, target, bias = tensors()
    ce_weight = torch.rand(61, dtype=torch.float64)
    of_target = ce_weight[target.clamp(min=0)]
    got = fused_linear_loss(x, weight, target, row_loss, of_target, bias=bias)
    weights = dict(ce_weight=ce_weight) if name == "class weights" else {}
    want = fused_linear_cross_entropy(x, weight, target, bias=bias, **options, **weights)
    share = of_target[target >= 0].mean() if weights else 1.0  # a mean there divides by the weights' sum
    grads = [torch.autograd.grad(loss, (x, weight, bias)) for loss in (got, want * share)]
    assert_close(got, want.detach() * share, 1e-12, name)
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, 1e-9, name)


# What reaches what.


@pytest.mark.parametrize("ignored", [(3,), tuple(range(20))], ids=["masked", "dropped"])
@pytest.mark.parametrize("schedule", ["auto", "recompute"])
def test_padding_reaches_nothing(ignored, schedule):
    """NaN in ignored rows of x and of row tensors: as if they were not there, a tensor that all rows share included."""
    x, weight, target, bias = tensors(ignored=ignored)
    a, scale = torch.randn(50, 2, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    a[list(ignored)] = torch.nan
    if len(ignored) > 1:
        x = x.detach().index_fill(0, torch.tensor(ignored), torch.nan).requires_grad_()
    a.requires_grad_()

    def row_loss(values, a, scale):
        return scale * values.log_prob * a[:, 0] + a[:, 1] * scale.exp() - values.entropy, a.sum(dim=1)

    got = fused_linear_loss(x, weight, target, row_loss, a, scale, bias=bias, schedule=schedule, return_entropy=True)
    assert not got.aux[0][list(ignored)].any() and not got.entropy[list(ignored)].any()
    grads = torch.autograd.grad(got.loss, (x, weight, bias, a, scale))
    kept = target >= 0
    part = [v.detach()[kept].requires_grad_() for v in (x, a)]
    want = fused_linear_loss(part[0], weight, target[kept], row_loss, part[1], scale, bias=bias, schedule=schedule)
    wants = torch.autograd.grad(want.loss, (part[0], weight, bias, part[1], scale))
    assert_close(got.loss, want.loss.detach(), 1e-12, "loss")
    for grad, other in zip(grads, wants, strict=True):
        if len(grad.shape) and len(grad) == 50:
            assert not grad[~kept].any()
            grad = grad[kept]
        assert_close(grad, other, 1e-9, "gradient")


def test_padding_is_no_anomaly():
    x, weight, target, _ = tensors()
    a = torch.ones(50, dtype=torch.float64).index_fill(0, torch.tensor(3), torch.nan).requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        fused_linear_loss(x, weight, target, lambda v, a: -v.log_prob * a.sqrt(), a).backward()
    assert a.grad.isfinite().all() and x.grad.isfinite().all()


def test_no_row_counts():
    x, weight, target, _ = tensors(ignored=range(50))
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    for rows in (slice(0, 50), slice(0, 0)):
        got = fused_linear_loss(x[rows], weight, target[rows], lambda v, s: -v.log_prob * s, scale)
        grads = torch.autograd.grad(got, (x, weight, scale))
        assert got == 0 and not any(g.any() for g in grads)


def test_no_row_counts_and_only_the_device_knows():
    """As while a CUDA graph is captured: 1/D is infinite, and times nothing is nothing."""
    x, weight, target, _ = tensors(ignored=range(50))
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    loss = RowLoss(lambda v, s: -v.log_prob * s, (scale,), (True,), True, True)
    problem = Problem(x.detach(), weight.detach(), target, options=RowLossOptions(), row_loss=loss)
    rows = row_weights(problem)
    assert rows.inverse_d.isinf()
    with torch.no_grad():
        stats = objectives.evaluated(TorchEngine().row_statistics(problem, 192), rows, problem)
        found = results(stats, rows, problem)
        one = LossOutput(torch.ones((), dtype=torch.float64))
        coefficients = through_autograd(stats, rows, problem, one, 1.0)
    assert found.loss == 0 and found.aux[0] == 0 and not coefficients.a.any() and not coefficients.fix.any()


def test_shapes_and_what_is_asked_for():
    x, weight, target, _ = tensors()
    a = torch.randn(5, 10, 3, dtype=torch.float64, requires_grad=True)
    got = fused_linear_loss(
        x.view(5, 10, -1),
        weight,
        target.view(5, 10),
        lambda v, a, n: (-v.log_prob * a.sum(dim=1) * n, v.argmax),
        a,
        2,
        return_log_probs=True,
    )
    assert isinstance(got, RowLossOutput) and got.entropy is None
    assert got.aux[0].shape == got.log_probs.shape == (5, 10) and got.aux[0].dtype == torch.int64
    values = values_of(x, weight, target)
    assert torch.equal(got.aux[0].view(-1), torch.where(target < 0, 0, values.argmax))
    assert_close(got.log_probs.view(-1), torch.where(target < 0, 0.0, values.log_prob), 1e-12, "log_probs")
    (grad,) = torch.autograd.grad(got.loss, a)
    assert grad.shape == a.shape and not got.log_probs.requires_grad
    alone = fused_linear_loss(x, weight, target, lambda v: -v.log_prob)
    assert isinstance(alone, torch.Tensor)
    assert_close(alone, fused_linear_cross_entropy(x, weight, target).detach(), 1e-12, "loss")


def test_only_what_is_read_is_computed(monkeypatch):
    x, weight, target, _ = tensors()
    asked, evaluated = [], objectives.evaluated

    def noting(stats, rows, problem):
        options = problem.options
        asked.append((options.needs_entropy, options.needs_weighted_sum, options.needs_argmax))
        return evaluated(stats, rows, problem)

    monkeypatch.setattr(objectives, "evaluated", noting)
    for function, needs in (
        (lambda v: -v.log_prob + v.lse, (False, False, False)),
        (lambda v: -v.entropy, (True, False, False)),
        (lambda v: (v.mean_logit, v.argmax), (False, True, True)),
    ):
        fused_linear_loss(x, weight, target, function)
        assert set(asked) == {needs}
        asked.clear()


def test_what_is_read_now_and_then():
    """A function that reads a statistic in a later call only: the call begins again with it."""
    x, weight, target, _ = tensors()
    rich = []

    def row_loss(values):
        return -values.log_prob - (0.1 * values.entropy if rich else 0.0)

    fused_linear_loss(x, weight, target, row_loss)
    rich.append(1)
    got = fused_linear_loss(x, weight, target, row_loss)
    assert_close(got, expected(x, weight, target, row_loss)[0].detach(), 1e-12, "loss")


def test_the_function_is_called_once_a_chunk():
    x, weight, target, _ = tensors(tokens=2000)
    calls = []

    def row_loss(values):
        calls.append(len(values.lse))
        return -values.log_prob

    fused_linear_loss(x, weight, target, row_loss)
    calls.clear()
    fused_linear_loss(x, weight, target, row_loss, workspace_mb=0.6, schedule="single_pass")
    assert sum(calls) == 2000 and len(calls) > 1 and calls[0] < 2000
    calls.clear()
    fused_linear_loss(x, weight, target, row_loss, schedule="recompute").backward()
    assert calls == [2000]


def test_chunks_are_one_call(monkeypatch):
    """Row tensors, aux and gradients of many chunks, one of which uses less than the others."""
    monkeypatch.setattr(single_pass, "SMALLEST_CHUNK", 16)
    case = Case(tokens=300, hidden=8, vocab=300, ignored=0.02, bias=True)
    given = case.tensors()[:4]
    rows = [torch.randn(300, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    rows.append(torch.tensor(0.4, dtype=torch.float64, requires_grad=True))

    def row_loss(values, a, b, scale):
        if bool((a > 2).any()):
            return scale * (-values.log_prob * a - b * (values.lse + 0.0 * values.entropy)), a
        return scale * (-values.log_prob * a - b * values.lse), a

    check(case, row_loss, rows, given, workspace_mb=0.3, schedule="single_pass")


def test_schedules():
    """float16 on an engine that stores it takes recompute; so does a cap with an entropy."""

    class Half(TorchEngine):
        def __init__(self):
            super().__init__(torch.float16)

    x, weight, target, _ = tensors(dtype=torch.float16)
    loss = RowLoss(lambda v: v.lse, (), (), True, True)
    problem = Problem(x, weight, target, options=RowLossOptions(), dense=True, row_loss=loss)
    task = single_pass.Task(problem, single_pass.WantedGradients.of(problem), liger_cutedsl.route.Settings())
    assert "a loss of one's own needs a scale" in single_pass.obstacle(Half(), task)
    assert single_pass.obstacle(TorchEngine(), task) is None
    capped = Problem(x, weight, target, options=RowLossOptions(softcap=5.0, reads_entropy=True), row_loss=loss)
    task = single_pass.Task(capped, task.wanted, task.settings)
    assert "slope" in single_pass.obstacle(TorchEngine(), task)


# What is refused.


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, values):
        return -values.log_prob * self.beta

    def method(self, values):
        return self.forward(values)


LEAF = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)


def captures():
    leaf, holder = LEAF.detach().clone().requires_grad_(), Holder()
    inner = lambda values: values.log_prob * leaf  # noqa: E731
    before = leaf.exp()
    return {
        "closure": (inner, "leaf"),
        "global": (lambda values: -values.log_prob * LEAF, "LEAF"),
        "default": (lambda values, beta=leaf: -values.log_prob * beta, "a default"),
        "partial": (functools.partial(lambda values, beta: -values.log_prob * beta, beta=leaf), "beta"),
        "module": (holder, "beta"),
        "method": (holder.method, "self.beta"),
        "a function of it": (lambda values: -values.log_prob * leaf.exp(), "leaf"),
        "a function of it, computed before": (lambda values, beta=before: -values.log_prob * beta, "a default"),
        "inside another": (lambda values: -inner(values), "inner.leaf"),
        "itself": (lambda values: leaf + torch.zeros_like(values.lse), "leaf"),
    }


@pytest.mark.parametrize("how", captures())
@pytest.mark.parametrize("frozen", [False, True])
def test_a_captured_parameter_is_named(how, frozen):
    x, weight, target, _ = tensors()
    function, name = captures()[how]
    if frozen:
        x, weight = x.detach(), weight.detach()
    kind = r"(, a function of a parameter)? \(\) float64"
    with pytest.raises(ValueError, match=f"row_loss captures '?{name}'?{kind}, which requires a gradient"):
        fused_linear_loss(x, weight, target, function)
    with torch.no_grad():
        assert fused_linear_loss(x, weight, target, function).isfinite()


def test_a_parameter_captured_later_is_named():
    """The same code with another tensor, where nothing is checked again."""
    x, weight, target, _ = tensors()

    def made(beta):
        return lambda values: -values.log_prob * beta

    fused_linear_loss(x, weight, target, made(LEAF.detach()))
    with pytest.raises(ValueError, match="captures 'beta'"):
        fused_linear_loss(x, weight, target, made(LEAF))


def straight_through(values):
    total = values.log_prob.sum()
    return -values.log_prob + (total - total.detach())


NOT_OF_ROWS = {
    "mean": (lambda v, a: v.log_prob - v.log_prob.mean(), "for fewer rows"),
    "running sum": (lambda v, a: v.log_prob.cumsum(0), "for fewer rows|when another row changes"),
    "neighbour": (lambda v, a: v.log_prob * torch.roll(a, 1), "for fewer rows"),
    "neighbour's value": (lambda v, a: torch.roll(v.lse, 1), "for fewer rows"),
    "softmax": (lambda v, a: torch.softmax(v.log_prob, 0), "for fewer rows"),
    "first row": (lambda v, a: v.log_prob * v.lse[0], "for fewer rows"),
    "count": (lambda v, a: v.log_prob / len(a), "for fewer rows"),
    "gradient alone": (lambda v, a: straight_through(v), "for fewer rows"),
    "aux alone": (lambda v, a: (v.log_prob, v.log_prob.cumsum(0)), "for fewer rows"),
    "random": (lambda v, a: v.log_prob * torch.rand_like(a), "draws at random"),
    "dropout": (lambda v, a: torch.nn.functional.dropout(v.log_prob), "draws at random"),
    "a sum": (lambda v, a: -v.log_prob.sum(), r"must return one number a row, here a loss of shape \(50,\)"),
    "another shape": (lambda v, a: (v.log_prob, a.sum()), r"here aux of shape \(50,\)"),
    "nothing": (lambda v, a: None, "got <class 'NoneType'>"),
    "a bool": (lambda v, a: v.log_prob > 0, "floating-point loss, got torch.bool"),
}


@pytest.mark.parametrize("what", NOT_OF_ROWS)
def test_a_loss_that_is_none_of_rows_is_refused(what):
    row_loss, error = NOT_OF_ROWS[what]
    x, weight, target, _ = tensors(ignored=())
    a = torch.randn(50, dtype=torch.float64, requires_grad=True)
    with pytest.raises((ValueError, TypeError), match=error):
        fused_linear_loss(x, weight, target, row_loss, a)


def test_another_switch_is_another_function():
    """The same code with another bool, string or tuple of such in its closure is checked again."""
    x, weight, target, _ = tensors(ignored=())

    def made(switch):
        return lambda v: v.log_prob - v.log_prob.mean() * (switch in (True, "on", ("mean", 1)))

    for plain, bad in ((False, True), ("off", "on"), (("none", 1), ("mean", 1))):
        fused_linear_loss(x, weight, target, made(plain))
        with pytest.raises(ValueError, match="for fewer rows"):
            fused_linear_loss(x, weight, target, made(bad))


def test_a_captured_batch_is_refused():
    x, weight, target, _ = tensors()
    a = torch.randn(49, dtype=torch.float64)
    with pytest.raises(ValueError, match="must be a row tensor"):
        fused_linear_loss(x, weight, target, lambda v: -v.log_prob * a)


def test_what_is_of_rows_passes():
    """A frozen module in float32 on a row tensor, float32 asked for, a dictionary's number: no false alarm."""
    x, weight, target, _ = tensors(dtype=torch.float32)
    features, value = torch.randn(50, 4), torch.nn.Linear(4, 1).requires_grad_(False)

    def baseline(values, features):
        return -values.log_prob.float() * (1.0 - value(features)[:, 0])

    def k3(values, near):
        distance = near.float() - values.log_prob.float()
        return distance.exp() - distance - 1

    for row_loss, row in ((baseline, features), (k3, torch.zeros(50) - 1.0), (k3, torch.randn(50) - 2.0)):
        got = fused_linear_loss(x, weight, target, row_loss, row)
        want = expected(x, weight, target, row_loss, row)[0].detach()
        assert_close(got, want, LOSS_BOUND_FLOAT32, "loss", size=30.0)


BAD = [
    (dict(reduction="none"), (), "reduction must be 'mean' or 'sum', got 'none'"),
    (dict(temperature=0.0), (), "temperature must be greater than 0"),
    (dict(entropy=True), (), "did you mean 'return_entropy'"),
    ({}, (torch.zeros(49),), r"row_tensors\[0\] must have target's shape \(50,\)"),
    ({}, (1, "two"), r"row_tensors\[1\] must be a tensor or a number, got <class 'str'>"),
    (dict(engine="triton"), (), "engine 'triton' was asked for but cannot run this call"),
]


@pytest.mark.parametrize("arguments, rows, error", BAD)
def test_refusals(arguments, rows, error):
    x, weight, target, _ = tensors()
    with pytest.raises((TypeError, ValueError, RuntimeError), match=error):
        fused_linear_loss(x, weight, target, lambda v, *_: v.lse, *rows, **arguments)


def test_refusals_of_the_function():
    x, weight, target, _ = tensors()
    with pytest.raises(TypeError, match="row_loss must be callable"):
        fused_linear_loss(x, weight, target, 1.0)
    with pytest.raises(AttributeError, match="no 'log_probs'"):
        fused_linear_loss(x, weight, target, lambda v: v.log_probs)
    with pytest.raises(TypeError, match="fake or meta tensors"):
        fused_linear_loss(x.to("meta"), weight.to("meta"), target.to("meta"), lambda v: v.lse)


# As the rest of the package.


def simple(values, a, scale):
    return -values.log_prob * a * scale, values.log_prob


def rows_of(tokens=50, dtype=torch.float64):
    a = torch.linspace(-1, 2, tokens, dtype=dtype).requires_grad_()
    return a, torch.tensor(0.3, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("schedule", ["auto", "recompute"])
def test_backward_again(schedule):
    x, weight, target, _ = tensors()
    leaves = (x, weight, *rows_of())
    loss = fused_linear_loss(*leaves[:2], target, simple, *leaves[2:], schedule=schedule).loss
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(2 * loss, leaves)
    for a, b in zip(first, second, strict=True):
        assert_close(b, 2 * a, 1e-9, "second")
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("first", range(4))
def test_second_derivatives_are_refused(first):
    """From the gradient of any of them to any of them."""
    for second in range(4):
        x, weight, target, _ = tensors()
        leaves = (x, weight, *rows_of())
        loss = fused_linear_loss(*leaves[:2], target, simple, *leaves[2:]).loss
        (grad,) = torch.autograd.grad(loss, leaves[first], create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(grad.sum(), leaves[second])


def test_only_row_tensors_want_gradients():
    x, weight, target, _ = tensors()
    a, scale = rows_of()
    loss = fused_linear_loss(x.detach(), weight.detach(), target, simple, a, scale).loss
    got = torch.autograd.grad(loss, (a, scale))
    want = torch.autograd.grad(fused_linear_loss(x, weight, target, simple, a, scale).loss, (a, scale))
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, 1e-12, "gradient")
    plain = fused_linear_loss(x.detach(), weight.detach(), target, simple, a.detach(), 0.3)
    assert not plain.loss.requires_grad


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    x, weight, target, _ = tensors()
    want = fused_linear_loss(x, weight, target, simple, *rows_of())
    with context():
        got = fused_linear_loss(x, weight, target, simple, *rows_of())
    assert not got.loss.requires_grad
    assert_close(got.loss, want.loss.detach(), 1e-12, "loss")


def test_under_autocast():
    x, weight, target, bias = tensors(dtype=torch.float32)
    rows = rows_of(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fused_linear_loss(x, weight, target, simple, *rows, bias=bias).loss
    wide = [v.detach().bfloat16().double().requires_grad_() for v in (x, weight)]
    wide += [v.detach().double().requires_grad_() for v in (bias, *rows)]
    want, _ = expected(*wide[:2], target, simple, *wide[3:], bias=wide[2])
    grads = torch.autograd.grad(got, (x, weight, bias, *rows))
    for grad, other in zip(grads, torch.autograd.grad(want, wide), strict=True):
        assert grad.dtype == torch.float32
        assert_close(grad, other, 1e-4, "gradient")


@pytest.mark.parametrize("schedule", ["auto", "recompute"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(schedule, reentrant):
    x, weight, target, _ = tensors()
    leaves, calls = (x, weight, *rows_of()), []

    def row_loss(values, a, scale):
        calls.append(1)
        return simple(values, a, scale)[0]

    def part(x, weight, a, scale):
        return fused_linear_loss(x, weight, target, row_loss, a, scale, schedule=schedule)

    want = torch.autograd.grad(part(*leaves), leaves)
    with torch.no_grad():  # as a reentrant checkpoint begins
        part(*leaves)
    calls.clear()
    loss = checkpoint(part, *leaves, use_reentrant=reentrant)
    loss.backward()
    for leaf, other in zip(leaves, want, strict=True):
        assert_close(leaf.grad, other, 1e-12, "gradient")
    assert len(calls) == (1 if schedule == "auto" and not reentrant else 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_between_the_graphs_of_a_compiled_model(backend):
    x, weight, target, _ = tensors()
    leaves = (x, weight, *rows_of())

    def model(x, weight, a, scale):
        return fused_linear_loss(torch.tanh(x), weight, target, simple, a.exp(), scale).loss * 2

    got = torch.autograd.grad(torch.compile(model, backend=backend)(*leaves), leaves)
    for grad, other in zip(got, torch.autograd.grad(model(*leaves), leaves), strict=True):
        assert_close(grad, other, 1e-12, "gradient")


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("schedule", ["auto", "recompute"])
def test_a_kernel_that_fails_is_replaced(when, schedule):
    x, weight, target, _ = tensors(dtype=torch.bfloat16, tokens=64)
    leaves, calls = (x, weight, *rows_of(64, torch.float32)), []

    def row_loss(values, a, scale):
        calls.append(1)
        return simple(values, a, scale)[0] - 0.1 * values.entropy

    def grads():
        loss = fused_linear_loss(x, weight, target, row_loss, *leaves[2:], schedule=schedule)
        calls.clear()
        return torch.autograd.grad(loss, leaves)

    want = grads()
    with testing.planted_kernel_failure(when):
        got = grads()
    testing.reset()
    assert not calls  # not again in backward
    for grad, other in zip(got, want, strict=True):
        assert_close(grad, other.double(), 2**-7 if grad.dtype == torch.bfloat16 else 1e-5, "gradient")


def test_nothing_is_kept_alive():
    import gc
    import weakref

    x, weight, target, _ = tensors()
    a, scale = rows_of()
    row = a.detach().exp()
    gone = weakref.ref(row)
    loss = fused_linear_loss(x, weight, target, lambda v, r, s: -v.log_prob * r * s, row, scale)
    loss.backward()
    del row, loss
    gc.collect()
    assert gone() is None


# What a call would do, and what it costs on the host.


def reading(*names):
    def row_loss(values, a):
        return sum((getattr(values, name).to(a.dtype) for name in names), -values.log_prob * a)

    return row_loss


EXPLAINED = {
    "row loss": ((), {}),
    "entropy": (("entropy",), {}),
    "everything": (("entropy", "mean_logit", "argmax"), dict(workspace_mb=1)),
    "recompute": (("entropy",), dict(schedule="recompute", workspace_mb=0.1)),
    "capped": (("mean_logit",), dict(softcap=5.0, temperature=0.7, reduction="sum", ignore_index=7)),
    "returned": ((), dict(return_entropy=True, return_log_probs=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("ignored", [0.0, 0.02, 0.4])
@pytest.mark.parametrize("name", EXPLAINED)
def test_explain_says_what_a_row_loss_does(name, ignored, dtype, routes):
    names, options = EXPLAINED[name]
    case = Case(tokens=600, vocab=500, dtype=dtype, ignored=ignored)
    x, weight, target, *_ = case.tensors()
    if "ignore_index" in options:
        target[target == -100] = 7
    a, row_loss = torch.rand(case.tokens, requires_grad=True), reading(*names)
    for forget in (True, False):
        if forget:
            row_check.forget()
        found = liger_cutedsl.explain(x, weight, target, row_loss=row_loss, row_tensors=(a,), **options)
        routes.clear()
        fused_linear_loss(x, weight, target, row_loss, a, **options)
        assert routes == [found]
    with torch.no_grad():
        assert liger_cutedsl.explain(x, weight, target, row_loss=row_loss, row_tensors=(a,), **options).gemms == 1


@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("ids", [None, torch.tensor([3, 0])])
@pytest.mark.parametrize("asked", [(), ("entropy", "is_top1"), ("log_sum_sq_probs", "mean_logits")])
def test_explain_says_what_log_probabilities_do(asked, ids, ignored, routes):
    case = Case(tokens=64, vocab=500, dtype=torch.float32, ignored=ignored)
    x, weight, target, *_ = case.tensors()
    for options in ({}, dict(workspace_mb=0.1, softcap=5.0, logit_scale=0.5)):
        options = options | {f"return_{name}": True for name in asked} | dict(selected_token_ids=ids)
        found = liger_cutedsl.explain(x, weight, target, log_probs=True, **options)
        routes.clear()
        liger_cutedsl.fused_linear_log_probs(x.view(2, 32, -1), weight, target.view(2, 32), **options)
        assert routes == [found] and found.schedule == "recompute"


def test_explain_of_a_row_loss_without_data_or_targets():
    """What its function reads is known of a call, or taken to be everything."""
    x, weight, target, _ = tensors(tokens=600, ignored=(), dtype=torch.float32)
    a, row_loss = torch.rand(600), reading("entropy")
    metas = [v.detach().to("meta").requires_grad_(v.requires_grad) for v in (x, weight)]
    call = dict(row_loss=row_loss, row_tensors=(a.to("meta"),))
    everything = liger_cutedsl.explain(*metas, **call)
    assert (
        everything.workspace_bytes
        == liger_cutedsl.explain(
            x, weight, row_loss=reading("entropy", "mean_logit", "argmax"), row_tensors=(a,)
        ).workspace_bytes
    )
    found = liger_cutedsl.explain(x, weight, row_loss=row_loss, row_tensors=(a,))
    assert found == liger_cutedsl.explain(x, weight, target, row_loss=row_loss, row_tensors=(a,))
    assert found.workspace_bytes == liger_cutedsl.explain(*metas, **call).workspace_bytes < everything.workspace_bytes
    batch = liger_cutedsl.explain(x.view(2, 300, -1), weight, row_loss=row_loss, row_tensors=(a.view(2, 300),))
    assert batch == found


@pytest.mark.parametrize(
    "arguments, error",
    [
        (dict(log_probs=True, label_smoothing=0.1), "label_smoothing is no argument of fused_linear_log_probs"),
        (dict(log_probs=True, reduction="sum"), "reduction is no argument of fused_linear_log_probs"),
        (dict(return_entropy=True), "return_entropy is no argument of fused_linear_cross_entropy"),
        (dict(row_tensors=(1.0,)), "row_tensors is no argument of fused_linear_cross_entropy"),
        (dict(row_loss=reading(), ce_weight=torch.ones(61)), "ce_weight is no argument of fused_linear_loss"),
        (dict(row_loss=reading(), log_probs=True), "log_probs is no argument of fused_linear_loss"),
        (dict(row_loss=1.0), "row_loss must be callable"),
        (dict(row_loss=reading(), row_tensors=(torch.ones(49),)), r"row_tensors\[0\] must have target's shape"),
        (dict(row_loss=lambda v: v.log_prob - v.log_prob.mean()), "for fewer rows"),
    ],
)
def test_explain_refuses_what_the_operator_would(arguments, error):
    x, weight, target, _ = tensors(ignored=())
    with pytest.raises((TypeError, ValueError), match=error):
        liger_cutedsl.explain(x, weight, target, **arguments)


class Launches(TorchDispatchMode):
    """Counts the operators that compute something: views launch nothing."""

    VIEWS = ("view", "slice", "select", "unsqueeze", "expand", "detach", "alias", "t", "promote_types", "empty")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ not in self.VIEWS
        return function(*args, **(kwargs or {}))

    @classmethod
    def of(cls, call) -> int:
        with cls() as counted:
            call()
        return counted.count


def of_its_own(values, a, b):
    return -values.log_prob * a, (values.log_prob - b).abs()


@pytest.mark.parametrize("ignored", [(), (3,)])
def test_the_host_does_little_more_than_for_cross_entropy(monkeypatch, ignored):
    """In launches, of which a small call's time is made: beside its own function and that one's gradient fewer than the
    closed form takes in PyTorch."""
    monkeypatch.setattr("liger_cutedsl.schedules.chunk_rows.is_plain", lambda problem: False)  # whose rows take one
    x, weight, target, _ = tensors(tokens=256, ignored=ignored, dtype=torch.float32)
    a, b = torch.rand(256), torch.rand(256)

    def ours():
        fused_linear_loss(x, weight, target, of_its_own, a, b).loss.backward()

    def alone():
        log_prob = torch.rand(256, requires_grad=True)
        loss, _ = of_its_own(SimpleNamespace(log_prob=log_prob), a, b)
        torch.autograd.grad(loss, log_prob, torch.ones_like(loss))

    def plain():
        fused_linear_cross_entropy(x, weight, target).backward()

    for call in (ours, alone, plain):
        call()
    more = Launches.of(ours) - Launches.of(plain) - (Launches.of(alone) - 1)  # which draws its log-probabilities
    assert more <= -1, more


def test_a_warm_call_looks_its_function_up_once():
    x, weight, target, _ = tensors()
    a = torch.rand(50, dtype=torch.float64)
    fused_linear_loss(x, weight, target, simple, a, 0.3)
    with (
        mock.patch.object(row_check, "_key_of", wraps=row_check._key_of) as keys,
        mock.patch.object(RowLossOptions, "__post_init__", autospec=True) as checked,
    ):
        fused_linear_loss(x, weight, target, simple, a, 0.3)
    assert keys.call_count == checked.call_count == 1


@pytest.mark.gpu
def test_cuda_graph():
    """Captured before it was checked, too: every statistic is computed then."""
    case = Case(tokens=256, hidden=64, vocab=1000, dtype=torch.bfloat16, device="cuda", ignored=0.1)
    x, weight, target, _, _ = case.tensors()
    rows = grpo_rows(case, x, weight, target, None)
    fused_linear_cross_entropy(x, weight, target).backward()

    def reading_all(values, *rows):
        return *grpo(values, *rows), values.mean_logit, values.argmax

    for warm in (True, False):
        row_check.forget()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            fused_linear_loss(x, weight, target, grpo if warm else reading_all, *rows).loss.backward()
        torch.cuda.current_stream().wait_stream(stream)
        if not warm:
            row_check.forget()
        x.grad = weight.grad = rows[2].grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = fused_linear_loss(x, weight, target, grpo, *rows)
            got.loss.backward()
        graph.replay()
        torch.cuda.synchronize()
        wide = [in_float64(v) for v in (x, weight, *rows)]
        want, _ = expected(*wide[:2], target, grpo, *wide[2:])
        wants = torch.autograd.grad(want, [wide[0], wide[1], wide[4]])
        assert_close(got.loss, want.detach(), LOSS_BOUND_FLOAT32, "loss", size=30.0)
        for leaf, other in zip((x, weight, rows[2]), wants, strict=True):
            assert_close(leaf.grad, other, 2 * GRADIENT_BOUND[torch.bfloat16], "gradient")


def test_odd_slices_cover_what_they_are_cut_from():
    for count in (2, 3, 8, 9, 28, 29, 64):
        covered = [i for rows in row_check._odd_slices(count) for i in range(rows.start, rows.stop)]
        assert covered == list(range(count)), count
    assert math.isclose(row_check.TOLERANCE, 1e-5) and not row_check._odd_slices(1)


DOCUMENT = (Path(__file__).parent.parent / "docs" / "row_losses.md").read_text()


def documented() -> dict:
    """The functions of docs/row_losses.md, which the table names."""
    code = max(re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL), key=len)
    functions = {}
    exec(code, functions)
    return {name: value for name, value in functions.items() if inspect.isfunction(value)}


@pytest.mark.parametrize("name", documented())
def test_published_losses_of_the_documentation(name):
    assert f"`{name}`" in DOCUMENT
    row_loss = documented()[name]
    case = Case(tokens=50, vocab=61, ignored=0.2)
    given = case.tensors()[:4]
    old, reference, advantage, weight = grpo_rows(case, *given)
    known = dict(old=old, reference=reference, advantage=advantage, weight=weight, weight_of_target=weight)
    required = [p.name for p in inspect.signature(row_loss).parameters.values() if p.default is p.empty]
    check(case, row_loss, [known[name] for name in required[1:]], given)

"""torch.compile, activation checkpointing and torch.func: what a graph holds, and that its numbers are eager mode's."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from liger_cutedsl import LigerFusedLinearCrossEntropyFunction, fused_linear_cross_entropy
from liger_cutedsl.objective import LossOutput
from liger_cutedsl.problem import Gradients
from reference import GRADIENT_BOUND, assert_close

EVERY_OPTION = dict(
    softcap=10.0,
    label_smoothing=0.1,
    lse_square_scale=1e-2,
    use_token_scaling=True,
    return_z_loss=True,
    return_token_accuracy=True,
    return_predicted_tokens=True,
)
CALLS = {
    "plain": {},
    "sum": dict(reduction="sum"),
    "none": dict(reduction="none"),
    "recompute": dict(schedule="recompute"),
    "all": EVERY_OPTION,
    "all_none": dict(**EVERY_OPTION, reduction="none"),
}


class Head(torch.nn.Module):
    """A small model that ends in the loss."""

    def __init__(self, call, dtype, device, ce_weight):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16, dtype=dtype, device=device)
        self.head = torch.nn.Linear(16, 300, dtype=dtype, device=device)
        self.call, self.ce_weight = call, torch.rand(300, device=device) + 0.5 if ce_weight else None

    def forward(self, x, target):
        x = torch.tanh(self.inner(x))
        call = {**self.call, "ce_weight": self.ce_weight}
        output = fused_linear_cross_entropy(x, self.head.weight, target, bias=self.head.bias, **call)
        return (output,) if isinstance(output, torch.Tensor) else tuple(v for v in output if v is not None)


# As torch.amp.GradScaler's: a mean's gradients of x are subnormal in float16, which earlier layers would inherit.
LOSS_SCALE = 256.0


def results(model, parameters, x, target):
    """The outputs and the gradients of their first."""
    model.zero_grad()
    outputs = parameters(x, target)
    loss = outputs[0]
    weights = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype, device=loss.device).view_as(loss)
    (loss * weights * LOSS_SCALE).sum().backward()
    return [v.detach() for v in outputs], [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_with_dynamic_rows(place, name):
    """fullgraph, one compilation for any number of rows, ignored ones among them; the numbers of eager mode."""
    if place.schedule != "auto":
        pytest.skip("schedules are among the calls")
    device = "cuda" if place.device == "cuda" else "cpu"
    backend = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    for dtype in place.dtypes[1:] if device == "cpu" else place.dtypes[-2:]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        graphs = None
        model = Head({**CALLS[name], "engine": place.engine}, dtype, device, ce_weight="all" in name)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
        for tokens in (8, 13, 40):
            x = torch.randn(tokens, 16, dtype=dtype, device=device)
            target = torch.randint(0, 300, (tokens,), device=device)
            target[::4] = -100
            eager, graph = (results(model, run, x, target) for run in (model, compiled))
            # gradients may come by another schedule: each is within GRADIENT_BOUND of the truth
            for got, want in zip(graph[0] + graph[1], eager[0] + eager[1], strict=True):
                assert got.dtype == want.dtype
                if not got.is_floating_point():
                    assert torch.equal(got, want)
                    continue
                assert_close(got, want.double(), 2 * GRADIENT_BOUND[dtype], "compiled against eager")
            graphs = backend.frame_count if graphs is None else graphs
            assert backend.frame_count == graphs, "a new number of rows compiled a new graph"


@pytest.mark.parametrize(
    "backend, marked",
    [("aot_eager", False), ("aot_eager", True), pytest.param("inductor", False, marks=pytest.mark.slow)],
)
def test_the_number_of_tokens_recompiles_at_most_once(backend, marked):
    """As torch.compile is by default: the second number makes it symbolic, or the first, where it is marked dynamic."""
    model = Head({}, torch.float32, "cpu", ce_weight=False)
    for batch in ((), (3,)) if backend == "aot_eager" else ((),):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for tokens in (8, 13, 40, 41):
            x, target = torch.randn(*batch, tokens, 16), torch.randint(0, 300, (*batch, tokens))
            if marked:
                torch._dynamo.mark_dynamic(x, len(batch))
                torch._dynamo.mark_dynamic(target, len(batch))
            eager, graph = (results(model, run, x, target) for run in (model, compiled))
            for got, want in zip(graph[0] + graph[1], eager[0] + eager[1], strict=True):
                assert_close(got, want.double(), 2 * GRADIENT_BOUND[torch.float32], "compiled against eager")
        assert counter.frame_count == (1 if marked else 2)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ligers_operator_in_a_graph(monkeypatch, reduction):
    """What the Triton engine does, with Liger's own function replaced by one that runs on a CPU."""

    def planted(problem, route, wanted, token_grad_output=None):
        z, options = problem.x @ problem.weight.t(), problem.options
        loss = torch.nn.functional.cross_entropy(z, problem.target, reduction=options.reduction)
        dz = torch.softmax(z, dim=1)
        dz[torch.arange(len(z)), problem.target] -= 1
        dz = dz / len(z) if options.reduction == "mean" else dz
        dz = dz if token_grad_output is None else dz * token_grad_output[:, None]
        return LossOutput(loss), Gradients(wanted.x and dz @ problem.weight, wanted.weight and dz.t() @ problem.x)

    monkeypatch.setattr("liger_cutedsl.routing._choose_engine", lambda *_: ("triton", "planted"))
    monkeypatch.setattr("liger_cutedsl.schedules.liger_triton._call", planted)
    torch._dynamo.reset()
    x, weight = torch.randn(9, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    target = torch.randint(0, 50, (9,))
    target[::3] = -100
    loss = torch.compile(fused_linear_cross_entropy, fullgraph=True, backend="aot_eager")(
        x, weight, target, reduction=reduction
    )
    expected = torch.nn.functional.cross_entropy(x @ weight.t(), target, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    upstream = torch.linspace(0.5, 1.5, loss.numel()).view_as(loss)
    for got, want in zip(
        torch.autograd.grad(loss, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_ligers_class_in_one_graph():
    head, x = torch.nn.Linear(16, 100), torch.randn(8, 16, requires_grad=True)
    target = torch.randint(0, 100, (8,))

    def function(x):
        return LigerFusedLinearCrossEntropyFunction.apply(torch.tanh(x), head.weight, target, head.bias)[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        torch.autograd.grad(compiled(x), (x, head.weight, head.bias)),
        torch.autograd.grad(function(x), (x, head.weight, head.bias)),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_importing_the_package_leaves_dynamo_alone():
    """torch._dynamo takes a second to import, which a process that compiles nothing need not spend."""
    code = "import torch, sys; import liger_cutedsl; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0


def test_only_gradients_that_are_needed_leave_the_graph():
    weight, target = torch.randn(100, 16, requires_grad=True), torch.randint(0, 100, (8,))
    x = torch.randn(8, 16)
    compiled = torch.compile(fused_linear_cross_entropy, fullgraph=True, backend="aot_eager")
    compiled(x, weight, target).backward()
    expected = torch.autograd.grad(fused_linear_cross_entropy(x, weight, target), weight)[0]
    torch.testing.assert_close(weight.grad, expected)
    with torch.no_grad():
        assert not compiled(x, weight, target).requires_grad


def test_autocast_is_part_of_the_graph():
    head, x, target = torch.nn.Linear(16, 100), torch.randn(8, 16), torch.randint(0, 100, (8,))

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fused_linear_cross_entropy(x, head.weight, target)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), function(x))
    assert not torch.equal(compiled(x), fused_linear_cross_entropy(x, head.weight, target)), "nothing was rounded"


def test_bad_options_are_named_while_tracing():
    x, weight, target = torch.randn(8, 16), torch.randn(100, 16), torch.randint(0, 100, (8,))
    for options, message in ((dict(reduction="average"), "mean, sum, none"), (dict(softcap=-1.0), "greater than 0")):
        compiled = torch.compile(
            lambda x, o=options: fused_linear_cross_entropy(x, weight, target, **o), fullgraph=True
        )
        with pytest.raises(Exception, match=message):
            compiled(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_activation_checkpointing(place, reentrant, reduction):
    device, dtype = place.device, place.dtypes[0]
    weight = torch.randn(300, 16, dtype=dtype, device=device, requires_grad=True)
    target, x = torch.randint(0, 300, (20,), device=device), torch.randn(20, 16, dtype=dtype, device=device)

    def loss(x):
        return fused_linear_cross_entropy(torch.tanh(x), weight, target, reduction=reduction, **place.call).sum()

    def gradients(run):
        leaf = x.clone().requires_grad_()
        weight.grad = None
        run(leaf).backward()
        return leaf.grad, weight.grad

    for got, want in zip(
        gradients(lambda leaf: checkpoint(loss, leaf, use_reentrant=reentrant)), gradients(loss), strict=True
    ):
        assert torch.equal(got, want)


def test_function_transforms_are_refused_by_name():
    x, weight, target = torch.randn(4, 16), torch.randn(100, 16), torch.randint(0, 100, (4,))
    with pytest.raises(RuntimeError, match=r"x is inside a torch.func transform .*use torch.autograd.grad"):
        torch.func.grad(lambda x: fused_linear_cross_entropy(x, weight, target))(x)
    with pytest.raises(RuntimeError, match=r"target is inside a torch.func transform"):
        torch.vmap(lambda t: fused_linear_cross_entropy(x, weight, t[None].expand(4)))(target)

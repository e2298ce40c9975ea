"""torch.compile, activation checkpointing and torch.func: what a graph holds, and that its numbers are eager mode's."""

import functools
import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from liger_cutedsl import LigerFusedLinearCrossEntropyFunction, LossOptions, fused_linear_cross_entropy, torch_compile
from liger_cutedsl.call import Gradients
from liger_cutedsl.cross_entropy import LossOutput
from reference import EVERY_OPTION, GRADIENT_BOUND, LOSS_BOUND, LOSS_BOUND_FLOAT32, Case, assert_close, reference
from test_inputs import laid_out

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


def plant_ligers_operator(monkeypatch):
    """The Triton engine on a CPU: Liger's function as it is in dtypes and strides, its arithmetic by PyTorch."""

    def planted(x, weight, target, *, reduction, lse_square_scale, token_grad_output=None, **_):
        z = x.float() @ weight.float().t()
        lse = torch.logsumexp(z, dim=1)
        z_loss, dz = lse_square_scale * lse.square(), torch.softmax(z, dim=1)
        dz = dz * (1.0 + 2.0 * lse_square_scale * lse)[:, None] - torch.nn.functional.one_hot(target, len(weight))
        loss = torch.nn.functional.cross_entropy(z, target, reduction="none") + z_loss
        if reduction == "mean":
            loss, z_loss, dz = loss.mean(), z_loss.mean(), dz / len(z)
        dz = dz if token_grad_output is None else dz * token_grad_output[:, None]
        dx, dw = torch.zeros_like(x), torch.zeros_like(weight)  # with the strides of a transposed x and weight
        dx.copy_(dz @ weight.float())
        dw.copy_(dz.t() @ x.float())
        return loss, z_loss.to(x.dtype), None, None, dx, dw, None

    monkeypatch.setattr("liger_cutedsl.routing._choose_engine", lambda *_: ("triton", "planted"))
    monkeypatch.setattr("liger_kernel.ops.fused_linear_cross_entropy.fused_linear_cross_entropy_forward", planted)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_ligers_dtypes_and_strides_in_a_graph(monkeypatch, reduction, layout):
    """Liger's z-loss comes in bfloat16, and its gradients with their parameter's strides: a graph that was told
    otherwise reads other memory, or stops."""
    plant_ligers_operator(monkeypatch)
    torch._dynamo.reset()
    x, weight, target, *_ = Case(12, 16, 50, dtype=torch.bfloat16, ignored=0.0).tensors()
    options = dict(reduction=reduction, lse_square_scale=0.1)
    leaves = [laid_out(v.detach(), layout).requires_grad_() for v in (x, weight)]

    def function(x, weight):
        out = fused_linear_cross_entropy(x, weight, target, **options, return_z_loss=True)
        return out.loss * 2.0, out.z_loss * 2.0

    loss, z_loss = torch.compile(function, fullgraph=True, backend="inductor")(*leaves)
    expected, grads = reference(x, weight, target, None, None, LossOptions(**options))
    assert loss.dtype == z_loss.dtype == function(*leaves)[1].dtype == torch.float32
    assert_close(loss, 2 * expected["loss"], LOSS_BOUND_FLOAT32, "loss")
    assert_close(z_loss, 2 * expected["z_loss"], torch.finfo(torch.bfloat16).eps / 2, "z_loss, rounded once")
    for got, want in zip(torch.autograd.grad(loss.sum(), leaves), grads[:2], strict=True):
        assert_close(got, 2 * want, 2 * GRADIENT_BOUND[torch.bfloat16], "gradient, of kept ones times 2")
    check_op(leaves[0], leaves[1], target, None, None, **options, return_z_loss=True)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_ligers_real_operator_in_a_graph(layout):
    x, weight, target, *_ = Case(64, 64, 500, dtype=torch.bfloat16, device="cuda", ignored=0.0).tensors()
    leaves = [laid_out(v.detach(), layout).requires_grad_() for v in (x, weight)]

    def function(x, weight):
        out = fused_linear_cross_entropy(x, weight, target, engine="triton", return_z_loss=True, lse_square_scale=0.1)
        return out.loss * 2.0, out.z_loss * 2.0

    eager, compiled = function(*leaves), torch.compile(function, fullgraph=True)(*leaves)
    assert eager[1].dtype == compiled[1].dtype == torch.float32
    for got, want in zip(compiled, eager, strict=True):
        assert_close(got, want.double(), 1e-5, "compiled against eager")
    for got, want in zip(torch.autograd.grad(compiled[0], leaves), torch.autograd.grad(eager[0], leaves), strict=True):
        assert_close(got, want.double(), torch.finfo(torch.bfloat16).eps, "gradient")


def check_op(x, weight, target, bias, ce_weight, autocast=None, engine="auto", schedule="auto", mb=None, **options):
    """torch's own check of the custom op: what it declares against what it does, dtypes and strides among it."""
    values = [options.get(field.name, field.default) for field in fields(LossOptions)]
    needs = [v is not None and v.requires_grad for v in (x, weight, bias)]
    tensors = (x, weight, target, bias, ce_weight, None)
    call = (*values, engine, schedule, mb, 1, None, "", autocast, *needs)
    torch.library.opcheck(torch_compile.FLCE.default, (*tensors, *call))
    with torch.no_grad():
        *_, lse, target_logit = torch_compile.FLCE(*tensors, *call)
    if lse.numel():
        loss = torch.ones(len(target) if options.get("reduction") == "none" else (), dtype=lse.dtype, device=x.device)
        arguments = (loss, lse, target_logit, *(v if v is None else v.detach() for v in tensors), *call)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch_compile.FLCE_BACKWARD.default, arguments, test_utils=checks)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "columns"])
def test_the_ops_do_what_they_declare(layout, dtype, autocast):
    case = Case(11, 16, 50, dtype=dtype, bias=True, ce_weight=True)
    x, weight, target, bias, ce_weight = case.tensors()
    x, weight = (laid_out(v.detach(), layout).requires_grad_() for v in (x, weight))
    for options in (dict(return_z_loss=True), dict(**EVERY_OPTION, reduction="none"), dict(schedule="recompute")):
        check_op(x, weight, target, bias, ce_weight, autocast, **options)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inductor_under_autocast(dtype, reduction):
    """float64 stays as it is, float32 is multiplied in bfloat16: in a graph as in eager mode. All are transposed."""
    torch._dynamo.reset()
    x, weight, target, bias, _ = Case(11, 16, 50, dtype=dtype, bias=True).tensors()
    leaves = [laid_out(v.detach(), "transposed").requires_grad_() for v in (x, weight, bias)]

    def function(x, weight, bias):
        with torch.autocast("cpu", torch.bfloat16):
            return fused_linear_cross_entropy(x, weight, target, bias=bias, reduction=reduction) * 2.0

    rounded = [v if dtype == torch.float64 else v.detach().bfloat16() for v in (x, weight)]
    upstream = torch.linspace(0.5, 1.5, 11, dtype=torch.float64) if reduction == "none" else None
    expected, grads = reference(*rounded, target, bias, None, LossOptions(reduction=reduction), upstream)
    for run in (function, torch.compile(function, fullgraph=True, backend="inductor")):
        loss = run(*leaves)
        assert loss.dtype == dtype
        assert_close(loss, 2 * expected["loss"], LOSS_BOUND.get(dtype, LOSS_BOUND_FLOAT32), "loss")
        found = torch.autograd.grad(loss, leaves, None if upstream is None else upstream.to(dtype))
        for got, want in zip(found, grads, strict=True):
            assert got.dtype == dtype
            assert_close(got, 2 * want, GRADIENT_BOUND[dtype], "gradient")


# aot_eager and inductor raise by themselves, as for any operator, where a gradient leads to an input of the graph
@pytest.mark.parametrize(
    "backend, words",
    [("eager", "no second derivative"), ("aot_eager", "double backward"), ("inductor", "double backward")],
)
@pytest.mark.parametrize("name", ["plain", "none", "recompute"])
def test_second_derivatives_of_a_graph_are_refused(name, backend, words):
    x, weight, target, bias, _ = Case(6, 16, 40, bias=True).tensors()
    leaves = (x, weight, bias)
    torch._dynamo.reset()

    def loss_of(x, weight, bias):
        x = torch.tanh(x) if backend == "eager" else x
        return fused_linear_cross_entropy(x, weight, target, bias=bias, **CALLS[name]).sum()

    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    expected = torch.autograd.grad(loss_of(*leaves), leaves)
    for first, second in itertools.product(range(3), range(3)):
        loss = compiled(*leaves)
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        for got, want in zip(grads, expected, strict=True):
            assert_close(got, want, GRADIENT_BOUND[torch.float64], "first gradient")
        with pytest.raises(RuntimeError, match=words):
            torch.autograd.grad(loss + grads[first].square().sum(), leaves[second])
    if backend == "eager":
        for function, arguments in (("hessian", ()), ("hvp", (torch.ones_like(x),)), ("vhp", (torch.ones_like(x),))):
            with pytest.raises(RuntimeError, match=words):
                ask = getattr(torch.autograd.functional, function)
                ask(lambda x: compiled(x, weight, bias), x.detach(), *arguments)


def test_a_graphs_gradients_need_the_weight_to_be_there():
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(fused_linear_cross_entropy, fullgraph=True, backend=backend)
        x, weight, target, *_ = Case().tensors()
        loss = compiled(x, weight, target, reduction="none")
        weight.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=r"weight of shape .* has no memory.*Keep it gathered"):
            loss.sum().backward()


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


def test_no_locals_where_dynamo_traces():
    """torch 2.11's dynamo does not know the builtin; later ones do."""
    import inspect

    from liger_cutedsl import api, options, torch_compile

    for traced in (api, torch_compile, options.suggesting):
        assert "locals()" not in inspect.getsource(traced), traced.__name__


def test_graphs_of_another_version_are_not_found_again(tmp_path):
    """torch keeps compiled graphs on disk by the names of their ops; those of an upgrade may return other things."""
    import liger_cutedsl

    shutil.copytree(Path(liger_cutedsl.__file__).parent, tmp_path / "liger_cutedsl")
    source = tmp_path / "liger_cutedsl" / "torch_compile.py"
    source.write_text(source.read_text() + "\n# another version\n")
    code = "from liger_cutedsl.torch_compile import FLCE; print(FLCE)"
    command = [sys.executable, "-W", "ignore", "-c", code]
    upgraded = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert upgraded.stdout.startswith("liger_cutedsl.flce_"), upgraded.stderr[-1000:]
    assert upgraded.stdout.strip() != str(torch_compile.FLCE)


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


def test_a_checkpointed_loss_is_not_computed_again_for_nothing(monkeypatch):
    """Its gradients are there; nothing that backward reads may make the checkpoint run forward a second time."""
    x, weight, target, *_ = Case(ignored=0.0).tensors()
    from liger_cutedsl import autograd

    calls, forward_of = [], autograd.forward_of
    monkeypatch.setattr(autograd, "forward_of", lambda call: calls.append(call) or forward_of(call))
    checkpoint(fused_linear_cross_entropy, x, weight, target, use_reentrant=False).backward()
    assert len(calls) == 1 and weight.grad is not None


POLICIES = {
    "everything": lambda name: True,
    "products": lambda name: "mm" in name,
    "products with a bias": lambda name: "addmm" in name,
    "nothing": lambda name: False,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_selective_activation_checkpointing(place, reduction, policy):
    """What a policy saves are the results around the operator; none of the products inside, which reuse memory."""
    device, dtype = place.device, place.dtypes[0]
    seen = []

    def decide(_context, op, *_arguments, **_options):
        seen.append(str(op))
        save = POLICIES[policy](str(op))
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    inner = torch.randn(16, 16, dtype=dtype, device=device, requires_grad=True)
    case = Case(40, 16, 300, dtype=dtype, device=device, bias=True)
    x, weight, target, bias, _ = case.tensors()
    leaves = (x, inner, weight, bias)

    def loss(x, inner, weight, bias):
        hidden = torch.tanh(x @ inner)
        return fused_linear_cross_entropy(hidden, weight, target, bias=bias, reduction=reduction, **place.call).sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    for _ in range(2):
        got = checkpoint(loss, *leaves, use_reentrant=False, context_fn=contexts)
        for g, want in zip(torch.autograd.grad(got, leaves), expected, strict=True):
            assert torch.equal(g, want)
    assert any("aten.mm.default" in op for op in seen), "the policy was asked about the product outside"
    assert not any("out" in op for op in seen)


def test_other_modes_see_what_happens_inside_a_checkpoint():
    """Only checkpointing's own modes are kept from looking in: a FLOP counter still counts."""
    from torch.utils.flop_counter import FlopCounterMode

    x, weight, target, *_ = Case(40, 16, 300, ignored=0.0).tensors()
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def flops(run):
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    def loss():
        return fused_linear_cross_entropy(x, weight, target, schedule="single_pass")

    assert flops(loss) == 3 * 2 * 40 * 16 * 300
    assert flops(lambda: checkpoint(loss, use_reentrant=False, context_fn=contexts)) == flops(loss)


def test_function_transforms_are_refused_by_name():
    x, weight, target = torch.randn(4, 16), torch.randn(100, 16), torch.randint(0, 100, (4,))
    with pytest.raises(RuntimeError, match=r"x is inside a torch.func transform .*use torch.autograd.grad"):
        torch.func.grad(lambda x: fused_linear_cross_entropy(x, weight, target))(x)
    with pytest.raises(RuntimeError, match=r"target is inside a torch.func transform"):
        torch.vmap(lambda t: fused_linear_cross_entropy(x, weight, t[None].expand(4)))(target)

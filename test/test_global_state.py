"""What a process has set globally: default dtype and device, FakeTensorMode; and calls of tensors without data."""

import ast
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import liger_cutedsl
from liger_cutedsl import LigerFusedLinearCrossEntropyFunction, fused_linear_cross_entropy
from reference import EVERY_OPTION, Case

DEFAULTS = ["bfloat16", "float16", "float64", "cpu", "meta", "cuda"]


@contextlib.contextmanager
def default(name):
    """A default dtype or device. (Without a GPU the default device "cuda" fails whatever does not name its own.)"""
    if name in ("cpu", "meta", "cuda"):
        with torch.device(name):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def results(function, x, weight, bias):
    """Outputs and gradients, as a list of tensors."""
    output = function()
    outputs = [v for v in ((output,) if isinstance(output, torch.Tensor) else output) if v is not None]
    loss = outputs[0]
    upstream = torch.full(loss.shape, 0.5, dtype=loss.dtype, device=loss.device)
    leaves = [v for v in (x, weight, bias) if v is not None]
    return [v.detach() for v in outputs] + list(torch.autograd.grad(loss, leaves, upstream))


def assert_same_bits(run, name):
    torch._dynamo.reset()
    plain = run()
    torch._dynamo.reset()
    with default(name):
        found = run()
    for a, b in zip(found, plain, strict=True):
        assert a.dtype == b.dtype and a.device == b.device
        assert torch.equal(a, b)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_change_nothing(place, name, reduction):
    for dtype in place.dtypes:
        case = Case(tokens=50, vocab=700, dtype=dtype, device=place.device, bias=True, ce_weight=True)
        x, weight, target, bias, ce_weight = case.tensors()
        for options in ({}, EVERY_OPTION):
            call = dict(ce_weight=ce_weight, reduction=reduction, **options, **place.call)
            assert_same_bits(
                lambda call=call, x=x, weight=weight, bias=bias, target=target: results(
                    lambda: fused_linear_cross_entropy(x, weight, target, bias=bias, **call), x, weight, bias
                ),
                name,
            )


@pytest.mark.parametrize("amp_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_change_nothing_under_autocast(place, name, amp_dtype):
    x, weight, target, bias, _ = Case(vocab=700, dtype=torch.float32, device=place.device, bias=True).tensors()

    def call():
        with torch.autocast(place.device, dtype=amp_dtype):
            return fused_linear_cross_entropy(x, weight, target, bias=bias, **place.call)

    assert_same_bits(lambda: results(call, x, weight, bias), name)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_change_nothing_for_ligers_class_and_functions(name):
    x, weight, target, bias, _ = Case(tokens=50, vocab=700, dtype=torch.float32, bias=True).tensors()
    assert_same_bits(
        lambda: results(
            lambda: LigerFusedLinearCrossEntropyFunction.apply(x, weight, target, bias, None, -100, 1e-3, 0.1),
            *(x, weight, bias),
        ),
        name,
    )
    from liger_cutedsl.liger.operators import fused_linear_cross_entropy_forward as forward

    assert_same_bits(lambda: [v.detach() for v in forward(x, weight, target, bias=bias) if v is not None], name)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_change_nothing_in_a_graph(name, backend):
    if backend == "inductor" and name not in ("bfloat16", "float64"):
        pytest.skip("two of them, for time")
    x, weight, target, bias, _ = Case(vocab=700, dtype=torch.bfloat16, bias=True).tensors()
    for reduction in ("mean", "none"):

        def run(reduction=reduction):
            compiled = torch.compile(fused_linear_cross_entropy, fullgraph=True, backend=backend)
            call = dict(bias=bias, reduction=reduction, **EVERY_OPTION)
            return results(lambda: compiled(x, weight, target, **call), x, weight, bias)

        assert_same_bits(run, name)


@pytest.fixture
def one_rank():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_change_nothing_for_a_split_vocabulary(one_rank, name):
    for weighted in (False, True):
        case = Case(tokens=50, vocab=700, dtype=torch.bfloat16, bias=True, ce_weight=weighted)
        x, weight, target, bias, ce_weight = case.tensors()
        call = dict(bias=bias, ce_weight=ce_weight, vocab_start=0, vocab_size=690, reduction="none", **EVERY_OPTION)

        def run(x=x, weight=weight, bias=bias, target=target, call=call):
            split = liger_cutedsl.vocab_parallel_fused_linear_cross_entropy
            return results(lambda: split(x, weight, target.clamp(max=689), **call), x, weight, bias)

        assert_same_bits(run, name)


FACTORIES = {"empty", "empty_strided", "zeros", "ones", "full", "tensor", "scalar_tensor", "arange", "linspace", "eye"}


def test_every_tensor_that_is_made_names_its_dtype_and_device():
    """Also where no CPU gets to: what the engines of a GPU make."""
    found = 0
    for source in Path(liger_cutedsl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if getattr(node.func.value, "id", None) != "torch" or node.func.attr not in FACTORIES:
                continue
            found += 1
            named = {keyword.arg for keyword in node.keywords}  # None for **these
            assert None in named or {"dtype", "device"} <= named, f"{source}:{node.lineno}: {ast.unparse(node)}"
    assert found > 15


@pytest.mark.slow
def test_kernels_compile_under_another_default_dtype(tmp_path):
    pytest.importorskip("quack")
    kernels = ("backward/bf16/plain", "forward/bf16/plain", "exp/bf16/bias+ce_weight+smoothing+argmax+ragged")
    code = (
        "import torch, quack.gemm_runtime.host as host; host.get_max_active_clusters = lambda *_: 1\n"
        "torch.set_default_dtype(torch.bfloat16)\n"
        "torch.set_default_device('meta')\n"
        "from liger_cutedsl.ahead_of_time import _trace, all_variants\n"
        f"for variant in all_variants():\n    if variant.name in {kernels!r}: print('done', _trace(variant))"
    )
    environment = {**os.environ, "QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**environment, "QUACK_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("done") == len(kernels), done.stderr[-3000:]


def fakes(mode, tensors, device):
    """The tensors of a case without their data: fake ones on a device, or meta ones."""
    with mode or contextlib.nullcontext():
        made = [v if v is None else torch.empty(v.shape, dtype=v.dtype, device=device) for v in tensors]
    return [v if v is None else v.requires_grad_(t.requires_grad) for v, t in zip(made, tensors, strict=True)]


# A build without CUDA cannot differentiate fake tensors of a GPU.
WITHOUT_DATA = ["fake", "meta", pytest.param("fake-gpu", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kind", WITHOUT_DATA)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_calls_without_data_give_shapes(kind, reduction):
    """Under their FakeTensorMode and outside of it, with the dtypes and shapes of a call with data."""
    mode = None if kind == "meta" else FakeTensorMode()
    device = {"fake": "cpu", "meta": "meta", "fake-gpu": "cuda:0"}[kind]
    for dtype in (torch.float64, torch.bfloat16):
        for options in ({}, EVERY_OPTION, dict(schedule="recompute")):
            tensors = Case(dtype=dtype, bias=True, ce_weight=True).tensors()

            def call(x, weight, target, bias, ce_weight, options=options):
                x, target = x.view(1, *x.shape), target.view(1, -1)
                out = fused_linear_cross_entropy(
                    x, weight, target, bias=bias, ce_weight=ce_weight, reduction=reduction, **options
                )
                outputs = [v for v in ((out,) if isinstance(out, torch.Tensor) else out) if v is not None]
                return outputs + list(torch.autograd.grad(outputs[0].sum(), (x, weight, bias)))

            expected = call(*tensors)
            without = fakes(mode, tensors, device)
            for context in (contextlib.nullcontext(), mode or torch.device("meta")):
                with context:
                    found = call(*without)
                for got, want in zip(found, expected, strict=True):
                    assert got.shape == want.shape and got.dtype == want.dtype
                    assert str(got.device) == device
                    assert got.is_meta or type(got).__name__ == "FakeTensor"


@pytest.mark.parametrize("kind", WITHOUT_DATA)
def test_calls_without_data_under_autocast(kind):
    mode = None if kind == "meta" else FakeTensorMode()
    device = {"fake": "cpu", "meta": "meta", "fake-gpu": "cuda:0"}[kind]
    tensors = Case(dtype=torch.float32).tensors()
    x, weight, target, *_ = fakes(mode, tensors, device)
    x = x.detach().bfloat16().requires_grad_()
    with pytest.raises(TypeError, match="x and weight must have one dtype"):
        fused_linear_cross_entropy(x, weight, target)
    stands_for = "cpu" if kind == "fake" or not torch.cuda.is_available() else "cuda"
    with torch.autocast(stands_for, dtype=torch.bfloat16):
        loss = LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]
        route = liger_cutedsl.explain(x, weight, target)
    assert route.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    found = torch.autograd.grad(loss, (x, weight))
    assert [v.dtype for v in found] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_explain_takes_tensors_without_data(place, dtype):
    """The route is that of tensors with data on the device they stand for."""
    # no target is ignored: explain() sees those of tensors with data
    tensors = Case(tokens=600, vocab=5000, dtype=dtype, device=place.device, bias=True, ignored=0).tensors()
    for call in ({}, dict(reduction="none"), dict(workspace_mb=3), dict(schedule="recompute", softcap=5.0)):
        for autocast in (False, True):
            with torch.autocast(place.device, dtype=torch.float16, enabled=autocast):

                def explain(x, weight, target, bias, _, call=call):
                    with_target = liger_cutedsl.explain(x, weight, target, bias=bias, **call)
                    assert liger_cutedsl.explain(x[None], weight, bias=bias, **call) == with_target
                    return with_target

                want = explain(*tensors)
                assert explain(*fakes(FakeTensorMode(), tensors, place.device)) == want
                mode = FakeTensorMode()
                with mode:
                    assert explain(*fakes(None, tensors, place.device)) == want
                if torch.cuda.is_available() != (place.device == "cuda"):
                    continue  # meta tensors stand for a GPU's where there is one
                found = explain(*fakes(None, tensors, "meta"))
                assert found.reason == f"{want.reason} (meta tensors, taken for {place.device}'s)"
                same = {**vars(found), "reason": want.reason}
                assert same == vars(want)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_explain_of_a_gpus_fake_tensors_where_there_is_no_gpu():
    with FakeTensorMode():
        x, weight = (torch.empty(n, 64, dtype=torch.bfloat16, device="cuda") for n in (100, 5000))
        route = liger_cutedsl.explain(x, weight)
        assert route.engine == "triton" and "torch finds none here" in route.reason


def test_what_needs_data_is_refused_by_name(one_rank):
    from liger_cutedsl.liger.operators import fused_linear_cross_entropy_forward as forward

    x, weight, target, *_ = Case(dtype=torch.float32).tensors()
    split = liger_cutedsl.vocab_parallel_fused_linear_cross_entropy
    for function in (forward, split):
        for device in ("meta", "cpu"):
            without = fakes(FakeTensorMode() if device == "cpu" else None, (x, weight, target), device)
            with pytest.raises(TypeError, match="x, weight and target are fake or meta tensors"):
                function(*without)
    apply = LigerFusedLinearCrossEntropyFunction.apply
    mode = FakeTensorMode()
    for function in (fused_linear_cross_entropy, apply, forward, split):
        with mode, pytest.raises(TypeError, match=r"x is a tensor with data .*under FakeTensorMode"):
            function(x, weight, target)
        with pytest.raises(TypeError, match="weight is a tensor with data among fake ones"):
            function(mode.from_tensor(x), weight, mode.from_tensor(target))
    with pytest.raises(ValueError, match="weight must be on x's device meta, got cpu"):
        fused_linear_cross_entropy(x.detach().to("meta"), weight, target)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fused_linear_cross_entropy(x, weight, target).shape == ()


def test_calls_without_data_that_come_first_do_no_harm(place):
    """In a fresh process: nothing that they made serves a later call."""
    if place.device == "cpu" and place.schedule != "auto":
        pytest.skip("a CPU keeps nothing for later calls, whatever the schedule")
    code = f"""
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from liger_cutedsl import explain, fused_linear_cross_entropy

call = dict(engine={place.engine!r}, schedule={place.schedule!r}, workspace_mb={place.workspace_mb!r})
def made(device):
    x, w = (torch.empty(n, 64, dtype=torch.bfloat16, device=device) for n in (64, 500))
    return x, w, torch.zeros(64, dtype=torch.int64, device=device)

with_data = made({place.device!r})
for mode, device in ((FakeTensorMode(), {place.device!r}), (torch.device("meta"), "meta")):
    with mode:
        fused_linear_cross_entropy(*made(device), **call)
        explain(*made(device))
        try:
            fused_linear_cross_entropy(*with_data, **call)
            assert device == "meta"
        except TypeError:
            assert device != "meta"
g = torch.Generator().manual_seed(0)
x, w = ((torch.randn(n, 64, generator=g) * s).to({place.device!r}, torch.bfloat16) for n, s in ((64, 1), (500, 0.125)))
t = torch.randint(0, 500, (64,), generator=g).to({place.device!r})
x, w = x.requires_grad_(), w.requires_grad_()
for first in (torch.device("meta"), torch.device("cpu")):
    with first:
        loss = fused_linear_cross_entropy(x, w, t, **call)
    leaves = [v.detach().double().requires_grad_() for v in (x, w)]
    want = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].t(), t)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    for a, b in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(want, leaves)):
        assert (a.double() - b).norm() < 2**-8 * b.norm()
print("right")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr[-3000:]

"""Runs the triton engine, Liger-Kernel's own operator behind our front, in Triton's interpreter on CPU tensors, against
float64 PyTorch. Prints "ok" a suite.

    TRITON_INTERPRET=1 python test/liger_triton_probe.py SUITE…     functions suite_… below, or all of them

What PyTorch does between Liger's kernels takes its path for CPUs, and gradients are summed as there.
"""

import itertools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

import liger_cutedsl
from liger_cutedsl import LigerFusedLinearCrossEntropyFunction, LossOptions, fused_linear_cross_entropy, routing
from liger_cutedsl.autograd import run_with_gradients
from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.route import Settings
from reference import Case, assert_close, check_case, check_predictions, reference


@triton.jit
def _tanh(v):
    return 1.0 - 2.0 / (tl.exp(2.0 * v) + 1.0)


class _Scalar(float):
    """A number among a kernel's arguments, which the interpreter passes as it is and a compiled kernel as a tensor."""

    def to(self, _dtype):
        return self


class _Interpreted:
    """Liger's kernel, launched with _Scalars."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(**arguments):
            scalars = {k: _Scalar(v) if isinstance(v, float) else v for k, v in arguments.items()}
            return self.kernel[grid](**scalars)

        return launch


def plant():
    """A CPU that takes Liger's operator for possible, and what its kernel lacks in the interpreter."""
    import liger_kernel.ops.cross_entropy as kernels
    import liger_kernel.ops.fused_linear_cross_entropy as operator

    kernels.tanh = _tanh
    operator.liger_cross_entropy_kernel = _Interpreted(kernels.liger_cross_entropy_kernel)
    routing.triton_obstacle = lambda *_: None


VECTORS = dict(bias=True, ce_weight=True)
OPTIONS = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "z_loss": dict(lse_square_scale=1e-2),
    "softcap": dict(softcap=10.0),
    "scaling": dict(use_token_scaling=True),
    "ignore_index": dict(ignore_index=7),
    "all": dict(softcap=10.0, label_smoothing=0.1, lse_square_scale=1e-2, use_token_scaling=True, ignore_index=7),
}


def suite_float32():
    """Every option, alone and together, each with and without vectors, and so each reduction: loss, metrics and
    gradients to float32's rounding."""
    combinations = itertools.product(OPTIONS.values(), ("mean", "sum", "none"))
    for (options, reduction), vectors in zip(combinations, itertools.cycle(({}, VECTORS)), strict=False):
        case = Case(dtype=torch.float32, options=dict(**options, reduction=reduction), **vectors)
        check_case(case, engine="triton")
    print("ok float32")


# Liger stores logits in 16 bits, and dz in their memory, unless a wider bias widens both. The interpreter writes bf16
# by truncation, off by a whole unit.
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def check_16_bit(case: Case, dtypes, unit: float, matrices=None, **call):
    """Runs a case with x, weight and bias in the given dtypes, against float64 on what they are then multiplied as.

    unit: the largest rounding error of a 16-bit number, relative; matrices: the dtype of the products, if autocast's.
    """
    x, weight, target, bias, ce_weight = case.tensors()
    leaves = [
        None if v is None else v.detach().to(dtype).requires_grad_()
        for v, dtype in zip((x, weight, bias), dtypes, strict=True)
    ]
    x, weight, bias = leaves
    metrics = dict(return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True)
    out = fused_linear_cross_entropy(
        x, weight, target, bias=bias, ce_weight=ce_weight, engine="triton", **case.options, **metrics, **call
    )
    upstream = torch.linspace(0.5, 1.5, out.loss.numel(), dtype=out.loss.dtype).view_as(out.loss)
    found = torch.autograd.grad(out.loss, [v for v in leaves if v is not None], upstream)
    rounded = [v if v is None or matrices is None else v.detach().to(matrices) for v in (x, weight)]
    options = LossOptions(**case.options)
    want, grads = reference(*rounded, target, bias, ce_weight, options, upstream)
    largest = float(want["logits"].abs().max())
    assert out.loss.dtype == out.z_loss.dtype == torch.float32
    # a row's loss is off by at most two logits' roundings, lse's and the target's; a scaled one by a share too
    rows = {"mean": 1.0, "sum": case.tokens, "none": case.tokens**0.5}[options.reduction]
    for name in ("loss", "z_loss"):
        error = (getattr(out, name).detach().double() - want[name]).norm()
        assert error <= 2 * unit * largest * (rows + want[name].norm()), f"{name} {case} {dtypes}: {error}"
    # dz is off by two logits' roundings, its own and lse's, and its own; then come the product's, and the sum's
    bound = unit * (2 * largest + 3)
    for name, leaf, got, expected in zip(
        ("dx", "dW", "db"), leaves, found, [g for g in grads if g is not None], strict=False
    ):
        assert got.dtype == leaf.dtype, name
        assert_close(got, expected, bound, f"{name} {case} {dtypes}")
    return out


def suite_16_bit():
    """16-bit x and weight, with a bias of theirs or of float32, which Liger's own function refuses."""
    for dtype, bias, reduction in itertools.product(UNIT, ("none", "same", "float32"), ("mean", "sum", "none")):
        for options in ({}, OPTIONS["all"]):
            case = Case(tokens=21, dtype=dtype, bias=bias != "none", options=dict(**options, reduction=reduction))
            case.ce_weight = bool(options)
            check_16_bit(case, (dtype, dtype, torch.float32 if bias == "float32" else dtype), UNIT[dtype])
    print("ok 16 bits")


def suite_amp():
    """Autocast: x as its layers leave it, and parameters of float32, with a bias or without."""
    f32 = torch.float32
    for amp, bias, reduction in itertools.product(UNIT, (False, True), ("mean", "none")):
        for dtypes in ((amp, f32, f32), (f32, f32, f32), (amp, amp, f32), (amp, amp, amp), (f32, f32, amp)):
            for options in ({}, OPTIONS["all"]):
                # numbers that 16 bits hold, so that the reference's are those that are multiplied
                case = Case(tokens=21, dtype=amp, bias=bias, options=dict(**options, reduction=reduction))
                case.ce_weight = bool(options)
                with torch.autocast("cpu", dtype=amp):
                    check_16_bit(case, dtypes, UNIT[amp], amp)
    print("ok autocast")


def suite_amp_leaves_no_copies():
    """A weight that another layer shares has its gradient from both: autocast keeps no copy without one."""
    x, weight = torch.randn(8, 16), torch.randn(50, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused_linear_cross_entropy(x.bfloat16(), weight, torch.arange(8), engine="triton")
        assert torch.nn.functional.linear(x, weight).requires_grad
    print("ok no copies")


def suite_sums():
    """accum_dtype: dW of 16 chunks is rounded once with a float32 sum, and once a chunk without."""
    case = Case(tokens=64, hidden=16, vocab=256, dtype=torch.float16, ignored=0.0, options=dict(reduction="sum"))
    x, weight, target, *_ = case.tensors()
    _, (_, want, _) = reference(x, weight, target, None, None, LossOptions(**case.options))

    def error(dtypes=(torch.float16, torch.float16), **call):
        leaves = [v.detach().to(dtype).requires_grad_() for v, dtype in zip((x, weight), dtypes, strict=True)]
        loss = fused_linear_cross_entropy(*leaves, target, engine="triton", **case.options, **call)
        got = torch.autograd.grad(loss, leaves[1])[0]
        return float((got.double() - want).norm() / want.norm())

    often, once = error(), error(accum_dtype=torch.float32)
    assert once < 0.7 * often, (once, often)
    with torch.autocast("cpu", dtype=torch.float16):  # float32 parameters have float32 sums unasked
        wide = error((torch.float16, torch.float32))
    assert wide < 0.7 * often, (wide, often)
    # and so they have where a kernel that failed leaves x and weight in 16 bits already
    problem, wanted = (
        Problem(x, weight, target, options=LossOptions(**case.options)),
        WantedGradients(weight=torch.float32),
    )
    _, found = run_with_gradients(problem, Settings(engine="triton"), wanted, None)
    wide = float((found.weight.double() - want).norm() / want.norm())
    assert wide < 0.7 * often, (wide, often)
    print("ok sums")


def suite_front():
    """What Liger's operator lacks: frozen operands, repeated backward, ignored and empty batches, odd vectors; and the
    interfaces and defaults that reach it."""
    case = Case(dtype=torch.float32, bias=True, ce_weight=True, options=dict(label_smoothing=0.1))
    x, weight, target, bias, ce_weight = case.tensors()
    call = dict(ce_weight=ce_weight, engine="triton", **case.options)
    _, grads = reference(x, weight, target, bias, ce_weight, LossOptions(**case.options))
    for needs in itertools.product((False, True), repeat=3):
        leaves = [v.detach().requires_grad_(need) for v, need in zip((x, weight, bias), needs, strict=True)]
        loss = fused_linear_cross_entropy(leaves[0], leaves[1], target.int(), bias=leaves[2], **call)
        assert loss.requires_grad == any(needs)
        for factor in (2.0, 3.0) if any(needs) else ():  # the graph is kept: a second backward gives its own
            asked = [v for v in leaves if v.requires_grad]
            found = torch.autograd.grad(loss, asked, torch.tensor(factor), retain_graph=True)
            for got, want in zip(found, [g for g, need in zip(grads, needs, strict=True) if need], strict=True):
                assert_close(got, factor * want, 1e-5, f"gradient of {needs}")
    wide = dict(bias=bias.detach().double(), ce_weight=ce_weight.double()[:, None].expand(-1, 2)[:, 0])
    got = fused_linear_cross_entropy(x, weight, target, engine="triton", **wide, **case.options)
    want, _ = reference(x, weight, target, bias, ce_weight, LossOptions(**case.options))
    assert_close(got, want["loss"], 1e-5, "loss with float64 vectors")
    metrics = dict(return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True)
    for rows in (slice(0, 0), slice(0, 3)):
        ignored = torch.full_like(target[rows], -100)
        out = fused_linear_cross_entropy(x[rows], weight, ignored, bias=bias, engine="triton", **metrics)
        assert out.loss == 0 and out.z_loss == 0 and out.token_accuracy == 0
        assert (torch.autograd.grad(out.loss, weight)[0] == 0).all()
    with torch.no_grad():
        plain = fused_linear_cross_entropy(x, weight, target, bias=bias, **call)
    loss = fused_linear_cross_entropy(x, weight, target, bias=bias, **call)
    assert torch.equal(plain, loss)
    for default in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(default)
        try:
            with torch.device("meta"):
                again = fused_linear_cross_entropy(x, weight, target, bias=bias, **call)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(again, loss)
    os.environ["LIGER_CUTEDSL_ENGINE"] = "triton"
    loss, z_loss, accuracy, predicted = LigerFusedLinearCrossEntropyFunction.apply(
        x, weight, target, bias, ce_weight, -100, 1e-2, 0.1, "mean", 10.0, True, torch.float32, True, True, True
    )
    options = LossOptions(label_smoothing=0.1, lse_square_scale=1e-2, softcap=10.0, use_token_scaling=True)
    want, grads = reference(x, weight, target, bias, ce_weight, options)
    output = liger_cutedsl.LossOutput(loss, z_loss, accuracy, predicted)
    for name in ("loss", "z_loss"):
        assert_close(getattr(output, name), want[name], 1e-5, name)
    check_predictions(output, want, want["logits"], torch.float32)
    for got, expected in zip(torch.autograd.grad(loss, (x, weight, bias)), grads, strict=True):
        assert_close(got, expected, 1e-5, "gradient through Liger's class")
    print("ok front")


def suite_graph():
    """Inside torch.compile: the same dtypes and numbers, of 16-bit inputs and under autocast."""
    for dtypes, options in (((torch.bfloat16,) * 3, OPTIONS["all"]), ((torch.bfloat16,) + (torch.float32,) * 2, {})):
        for reduction in ("mean", "none"):
            case = Case(dtype=torch.bfloat16, bias=True, options=options)
            x, weight, target, bias, _ = case.tensors()
            leaves = [v.detach().to(d).requires_grad_() for v, d in zip((x, weight, bias), dtypes, strict=True)]

            def call(x, weight, bias, target=target, options=options, reduction=reduction):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dtype != weight.dtype):
                    out = fused_linear_cross_entropy(
                        x,
                        weight,
                        target,
                        bias=bias,
                        engine="triton",
                        reduction=reduction,
                        return_z_loss=True,
                        **options,
                    )
                return out.loss, out.z_loss * 2.0

            torch._dynamo.reset()
            results = []
            for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
                loss, z_loss = function(*leaves)
                assert loss.dtype == z_loss.dtype == torch.float32
                results.append([loss, z_loss, *torch.autograd.grad(loss.sum(), leaves)])
            for got, want in zip(*results, strict=True):
                assert got.dtype == want.dtype
                torch.testing.assert_close(got, want)
    print("ok graph")


if __name__ == "__main__":
    plant()
    torch.manual_seed(0)
    for suite in sys.argv[1:] or [name for name in globals() if name.startswith("suite_")]:
        globals()[suite if suite.startswith("suite_") else f"suite_{suite}"]()

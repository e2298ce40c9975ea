"""float16 holds numbers up to 65504 and down to 6e-8: gradients are right wherever their dtype holds them, whatever the
schedule that a call takes for it."""

import pytest
import torch

from liger_cutedsl import LossOptions, fused_linear_cross_entropy
from liger_cutedsl.engines.torch_engine import TorchEngine
from reference import GRADIENT_BOUND, Case, assert_close, reference


@pytest.fixture
def fp16_place(place, monkeypatch):
    """A place where dz is stored in float16: the torch engine is made to, and its gradients come in float32."""
    if place.device == "cpu":
        monkeypatch.setattr("liger_cutedsl.routing.make_engine", lambda *_: TorchEngine(dz_dtype=torch.float16))
    elif place.engine != "cute":
        pytest.skip("the torch engine stores dz in float32")
    return place


def uneven(vocab, heavy):
    """Class weights of 1, and of `heavy` in every seventh class."""
    weight = torch.ones(vocab, dtype=torch.float64)
    weight[::7] = heavy
    return weight


# What makes gradients of a size that is not known from N.
CASES = {
    "plain": {},
    "heavy classes": dict(heavy=1e4),
    "light classes": dict(heavy=1e-4),
    "equal light classes": dict(every=1e-5),
    "strong z_loss": dict(lse_square_scale=30.0),
    "weak z_loss": dict(lse_square_scale=1e-4),
    "strong z_loss, heavy classes": dict(lse_square_scale=30.0, heavy=100.0),
    "softcap and smoothing": dict(softcap=30.0, label_smoothing=0.1, scale=12.0),
    "everything": dict(softcap=30.0, label_smoothing=0.1, lse_square_scale=1.0, heavy=100.0, use_token_scaling=True),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_any_size(fp16_place, name, reduction, compiled):
    if compiled and fp16_place.schedule != "auto":
        pytest.skip("a graph of a forced schedule adds nothing")
    options = dict(CASES[name])
    heavy, every, scale = options.pop("heavy", None), options.pop("every", None), options.pop("scale", 2.0)
    options["reduction"] = reduction
    case = Case(120, 32, 600, dtype=torch.float32, device=fp16_place.device, bias=True, scale=scale, ignored=0.2)
    x, weight, target, bias, _ = (v if v is None else v.detach() for v in case.tensors())
    # numbers that float16 holds
    x, weight, bias = (v.half().float().requires_grad_() for v in (x, weight, bias))
    ce_weight = None if heavy is None else uneven(case.vocab, heavy).to(x)
    ce_weight = torch.full_like(bias.detach(), every) if every else ce_weight
    torch._dynamo.reset()

    def run(x, weight, bias):
        with torch.autocast(fp16_place.device, dtype=torch.float16):
            return fused_linear_cross_entropy(
                x, weight, target, bias=bias, ce_weight=ce_weight, **options, **fp16_place.call
            )

    loss = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x, weight, bias)
    for factor in (1.0, 2.0**12):  # the larger one as GradScaler's
        upstream = torch.full_like(loss, factor)
        if reduction == "none":
            upstream *= torch.linspace(0.5, 1.5, len(upstream), device=upstream.device)
        _, grads = reference(x, weight, target, bias, ce_weight, LossOptions(**options), upstream)
        found = torch.autograd.grad(loss, (x, weight, bias), upstream, retain_graph=True)
        # dz is rounded twice at most: as an exponential, and as itself; in rows of uneven weight by whole units
        bound = 2 * GRADIENT_BOUND[torch.float16]
        for what, got, expected in zip(("dx", "dW", "db"), found, grads, strict=True):
            assert_close(got, expected, bound, f"{what}, upstream {factor}")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens, size", [(120, 1e-5), (120, 3e6), (20000, 1.0)])
def test_parameters_of_float16_with_gradients_of_any_size(fp16_place, tokens, size, reduction, compiled):
    """What is kept until backward is kept as the parameters' dtype holds it, though gradients for an upstream gradient
    of 1 may be beyond it."""
    if compiled and fp16_place.schedule != "auto":
        pytest.skip("a graph of a forced schedule adds nothing")
    case = Case(
        tokens, 32, 600 if tokens < 1000 else 100, dtype=torch.float16, device=fp16_place.device, bias=True, ignored=0.2
    )
    x, weight, target, bias, _ = case.tensors()
    ce_weight = None if size == 1.0 else uneven(case.vocab, size).to(x.device, torch.float32)
    torch._dynamo.reset()

    def run(x, weight, bias):
        return fused_linear_cross_entropy(
            x, weight, target, bias=bias, ce_weight=ce_weight, reduction=reduction, **fp16_place.call
        )

    loss = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x, weight, bias)
    options = LossOptions(reduction=reduction)
    _, grads = reference(x, weight, target, bias, ce_weight, options)
    # so that the largest entry is 1000, and the rest well within the dtype
    upstream = torch.full_like(loss, 1000.0 / max(float(g.abs().max()) for g in grads))
    _, grads = reference(x, weight, target, bias, ce_weight, options, upstream)
    for what, got, want in zip(
        ("dx", "dW", "db"), torch.autograd.grad(loss, (x, weight, bias), upstream), grads, strict=True
    ):
        # three roundings: those of the test above, and the gradient's
        assert_close(got, want, 3 * GRADIENT_BOUND[torch.float16], what)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_probabilities_below_float16s_normal_numbers(fp16_place, reduction):
    """Of 300 000 classes each has 3e-6, where float16's numbers are 6e-8 apart: dW's rows of classes that are no target
    are made of nothing else."""
    case = Case(32, 16, 300_000, dtype=torch.float32, device=fp16_place.device, scale=0.5, ignored=0.0)
    x, weight, target, *_ = case.tensors()
    with torch.no_grad():
        x.copy_(x.half())
        weight.copy_(weight.half())
    with torch.autocast(fp16_place.device, dtype=torch.float16):
        loss = fused_linear_cross_entropy(x, weight, target, reduction=reduction, **fp16_place.call)
    upstream = torch.full_like(loss, 0.01)
    _, (_, want, _) = reference(x, weight, target, None, None, LossOptions(reduction=reduction), upstream)
    got = torch.autograd.grad(loss, weight, upstream)[0].clone()
    got[target], want[target] = 0.0, 0.0
    assert_close(got, want, 2 * GRADIENT_BOUND[torch.float16], "dW of other classes")

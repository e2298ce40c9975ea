"""Where numbers could be wrong without a sign of it: saturated caps, float16's range, ends of long sums, NaN."""

import random

import pytest
import torch

import liger_cutedsl
from liger_cutedsl import LossOptions, fused_linear_cross_entropy
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.gemm import matmul
from liger_cutedsl.rows import TargetCheck
from reference import GRADIENT_BOUND, Case, assert_close, reference


def check_gradients(x, weight, target, bias, bound, call, upstream=None, **options):
    """Gradients of fresh leaves against float64; returns nothing."""
    leaves = [None if v is None else v.detach().clone().requires_grad_() for v in (x, weight, bias)]
    loss = fused_linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2], **call, **options)
    upstream = None if upstream is None else torch.full_like(loss, upstream)
    loss.backward(upstream)
    _, grads = reference(x, weight, target, bias, None, LossOptions(**options), upstream)
    for name, leaf, want in zip(("dx", "dW"), leaves, grads, strict=False):
        assert_close(leaf.grad, want, bound, name)


def capped_bound(dtype, place):
    """Two roundings, of what is stored of a logit and of the gradient, may be whole ones at once where few logits
    decide; a float32 logit of up to 8 caps moves a slope by 32 ulp more."""
    if dtype.itemsize == 2:
        return (2 if place.engine == "cute" else 1) * GRADIENT_BOUND[dtype]
    return GRADIENT_BOUND[dtype] * (2 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("cap", [3.0, 8.0, 30.0])
@pytest.mark.parametrize("offset", [2.0, 4.0, 6.0, -4.0])
@pytest.mark.parametrize("vocab", [8, 304])
def test_gradients_where_a_softcap_is_flat(place, cap, offset, vocab):
    """All logits near ±offset caps, where the slope is 4·exp(−2·offset) and no number of 16 bits says which."""
    for dtype in place.dtypes:
        if dtype == torch.float16 and abs(offset) > 4:
            continue  # such gradients are below float16's smallest number
        x, weight, target, *_ = Case(64, 64, vocab, dtype=dtype, device=place.device, ignored=0.0, scale=1.0).tensors()
        bias = torch.full((vocab,), cap * offset, dtype=dtype, device=place.device)
        upstream = 1024.0 if dtype == torch.float16 else 1.0
        check_gradients(x, weight, target, bias, capped_bound(dtype, place), place.call, upstream, softcap=cap)


@pytest.mark.parametrize("cap, smoothing", [(50.0, 0.1), (60.0, 0.9), (100.0, 1.0), (200.0, 0.1)])
def test_a_large_softcap_with_label_smoothing(place, cap, smoothing):
    """Logits down to 2·cap below their tile's maximum: where exp underflows, smoothing still needs their slope."""
    for dtype in place.dtypes:
        x, weight, target, *_ = Case(64, 64, 1000, dtype=dtype, device=place.device, ignored=0.0, scale=cap).tensors()
        # a logit of up to 4 caps has a float32 rounding of 4·cap ulp, which enters the exponent
        bound = max(capped_bound(dtype, place), (0.0 if dtype == torch.float64 else 8 * cap) * 1.2e-7)
        check_gradients(x, weight, target, None, bound, place.call, softcap=cap, label_smoothing=smoothing)


def store_fp16_dz(monkeypatch):
    """Makes the torch engine store exponentials and dz in float16, as the GPU engine does."""
    monkeypatch.setattr("liger_cutedsl.routing.make_engine", lambda *_: TorchEngine(dz_dtype=torch.float16))


@pytest.mark.parametrize("upstream", [1.0, 1 / 64])
@pytest.mark.parametrize("emulated", [False, True])
def test_fp16_gradients_that_only_the_loss_scale_brings_into_range(place, monkeypatch, emulated, upstream):
    """4096 tokens of one class with a feature of 300: dW is −299.5, and −1.2 million for a sum over tokens."""
    if torch.float16 not in place.dtypes:
        pytest.skip("no float16 here")
    if emulated and place.device == "cpu":
        store_fp16_dz(monkeypatch)
    x, weight, _, *_ = Case(4096, 64, 500, dtype=torch.float16, device=place.device, scale=1.0, ignored=0.0).tensors()
    x, weight = x.detach().clone(), weight.detach() * 0.1
    x[:, 0], weight[:, 0] = 300.0, 0.0
    target = torch.full((4096,), 3, device=place.device)
    check_gradients(x, weight, target, None, 2 * GRADIENT_BOUND[torch.float16], place.call, upstream)


@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
def test_fp16_mean_of_many_rows_does_not_underflow(place, loss_scale):
    """1/16384 is float16's smallest normal number: a gradient rounded before the loss scale has few bits or none."""
    if torch.float16 not in place.dtypes:
        pytest.skip("no float16 here")
    x, weight, target, *_ = Case(16384, 16, 50, torch.float16, place.device, scale=1.0, ignored=0.0).tensors()
    check_gradients(x, weight, target, None, GRADIENT_BOUND[torch.float16], place.call, loss_scale)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fp16_token_scaling_keeps_small_gradients(place, monkeypatch, reduction):
    """Each row is scaled by its target's probability, down to 1e-6 here: no scale chosen from N holds them all."""
    if torch.float16 not in place.dtypes:
        pytest.skip("no float16 here")
    if place.device == "cpu":
        store_fp16_dz(monkeypatch)
    x, weight, target, *_ = Case(64, 32, 8000, torch.float16, place.device, scale=1.0, ignored=0.0).tensors()
    options = dict(use_token_scaling=True, reduction=reduction)
    loss_scale = 2.0**16 if reduction == "mean" else 2.0**10
    check_gradients(x, weight, target, None, 2 * GRADIENT_BOUND[torch.float16], place.call, loss_scale, **options)


@pytest.mark.parametrize("index", [2**32, 2**31, -(2**33) - 100])
def test_an_ignore_index_that_the_targets_dtype_does_not_hold(place, index):
    """2³² is 0 in 32 bits: it ignores no class."""
    x, weight, target, *_ = Case(20, 16, 50, dtype=place.dtypes[0], device=place.device, ignored=0.0).tensors()
    target[::2] = 0
    expected = fused_linear_cross_entropy(x, weight, target, **place.call)
    loss = fused_linear_cross_entropy(x, weight, target.int(), ignore_index=index, **place.call)
    assert torch.equal(loss, expected)
    target[1] = index
    with_one = fused_linear_cross_entropy(x, weight, target, ignore_index=index, reduction="none", **place.call)
    assert (with_one == 0).nonzero().tolist() == [[1]]


@pytest.mark.parametrize("bad", ["hidden state", "bias"])
def test_predicted_token_of_a_row_with_nan(place, bad):
    """The first column, as torch.argmax finds in a row of NaN: the same whichever kernel runs."""
    x, weight, target, bias, _ = Case(64, 16, 500, place.dtypes[-1], place.device, bias=True, ignored=0.0).tensors()
    x, bias = x.detach().clone(), bias.detach().clone()
    if bad == "bias":
        bias[77] = torch.nan
    else:
        x[5] = torch.nan
    rows = slice(None) if bad == "bias" else slice(5, 6)
    for call in (place.call, dict(place.call, schedule="auto", reduction="none", workspace_mb=0.001)):
        call = dict(call, return_predicted_tokens=True, return_token_accuracy=True)
        out = fused_linear_cross_entropy(x.clone().requires_grad_(), weight, target, bias=bias, **call)
        assert (out.predicted_tokens[rows] == 0).all()
        assert ((out.predicted_tokens >= 0) & (out.predicted_tokens < 500)).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nan_in_rows_that_are_masked_because_nothing_can_be_read(place, monkeypatch, reduction):
    """As while a CUDA graph is captured: ignored rows are not dropped then, and 0·NaN would reach dW."""

    class Unreadable(TargetCheck):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            self.readable, self._ready = False, None

    options = dict(reduction=reduction, label_smoothing=0.1, lse_square_scale=1e-3)
    x, weight, target, bias, _ = Case(40, 16, 300, place.dtypes[0], place.device, bias=True, options=options).tensors()
    clean = x.detach()

    def gradients(x):
        x = x.clone().requires_grad_()
        loss = fused_linear_cross_entropy(x, weight, target, bias=bias, **options, **place.call)
        return torch.autograd.grad(loss.sum(), (x, weight, bias))

    expected = gradients(clean)
    monkeypatch.setattr("liger_cutedsl.autograd.TargetCheck", Unreadable)
    spoilt = clean.clone()
    spoilt[target == -100] = torch.nan
    for got, want in zip(gradients(spoilt), expected, strict=True):
        assert_close(got, want.double(), 2 * GRADIENT_BOUND[place.dtypes[0]], "gradient")


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [255984, 255992, 256000, 256001, 256008, 256032, 256064, 256072, 256128])
@pytest.mark.parametrize("hidden, tokens", [(64, 8), (256, 16), (1024, 512)])
def test_the_end_of_a_large_vocabulary_reaches_dx(vocab, hidden, tokens):
    """cuBLAS leaves out the last terms of some sums of this length; here all that matters lies there."""
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", generator=g).bfloat16()
    weight = (torch.randn(vocab, hidden, device="cuda", generator=g) * 0.1 * hidden**-0.5).bfloat16()
    target = torch.randint(vocab - 8, vocab, (tokens,), device="cuda", generator=g)
    for schedule in ("single_pass", "recompute"):
        call = dict(engine="cute", schedule=schedule)
        check_gradients(x, weight, target, None, GRADIENT_BOUND[torch.bfloat16], call)


@pytest.mark.gpu
def test_a_captured_graph_keeps_nan_of_ignored_rows_out_of_dw():
    x, weight, target, *_ = Case(256, 128, 5000, torch.bfloat16, "cuda", ignored=0.2).tensors()
    x = x.detach().clone()
    x[target == -100] = torch.nan
    x.requires_grad_()

    def step():
        return torch.autograd.grad(fused_linear_cross_entropy(x, weight, target, engine="cute"), (x, weight))

    expected = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for got, want in zip(captured, expected, strict=True):
        assert_close(got, want.double(), 2 * GRADIENT_BOUND[torch.bfloat16], "gradient")


def test_dw_of_dozens_of_chunks_by_default(place):
    """300 000 tokens of a small vocabulary: dW would be rounded 73 times, and a sum in float32 takes 131 kB."""
    if place.device == "cpu" or place.schedule != "auto":
        pytest.skip("the torch engine takes one chunk here: test_schedules.py has the rule")
    x, weight, target, *_ = Case(300_000, 64, 512, torch.bfloat16, place.device, scale=1.0, ignored=0.0).tensors()
    assert liger_cutedsl.explain(x, weight, target, engine=place.engine).schedule == "single_pass"
    check_gradients(x, weight, target, None, GRADIENT_BOUND[torch.bfloat16], dict(engine=place.engine))


@pytest.mark.gpu
def test_no_product_loses_terms_of_its_sum():
    """All that matters lies in the last 64 terms. Of such products by cuBLAS alone, one in a hundred is wrong."""
    rng, g = random.Random(0), torch.Generator("cuda").manual_seed(0)
    memory = (torch.randn(2**28, device="cuda", generator=g) * 0.1).bfloat16()
    errors = {}
    while len(errors) < 3000:
        terms = rng.choice((64 * rng.randrange(16, 4000) + rng.choice((1, 3, 8, 40)), rng.randrange(1000, 256_000)))
        rows, columns = rng.choice((1, 8, 40, 200, 512, 1536)), rng.choice((8, 64, 576, 1024, 2560, 4096))
        if terms * columns > len(memory) or terms * rows > len(memory):
            continue
        b, width = memory[: terms * columns].view(terms, columns), -(-terms // 8) * 8
        if rng.random() < 0.5:  # dX = dz·W: rows of dz start at multiples of 16 bytes
            a = torch.zeros(rows, width, device="cuda", dtype=b.dtype)[:, :terms]
        else:  # dW = dzᵀ·x
            a = torch.zeros(terms, rows, device="cuda", dtype=b.dtype).t()
        a[:, -64:] = torch.randn(rows, 64, device="cuda", generator=g).bfloat16()
        out = torch.empty(rows, columns, device="cuda", dtype=rng.choice((b.dtype, torch.float32))).fill_(torch.nan)
        matmul(a, b, out=out, alpha=0.5)
        want = 0.5 * (a[:, -64:].double() @ b[-64:].double())
        errors[terms, rows, columns, a.is_contiguous(), out.dtype] = (out.double() - want).norm() / want.norm()
    wrong = [case for case, error in errors.items() if not error < 5e-3]
    assert not wrong, f"{len(wrong)} of {len(errors)}: {wrong[:5]}"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype, schedule", [(torch.bfloat16, "single_pass"), (torch.float16, "recompute")])
def test_autocast_leaves_the_products_inside_a_call_alone(place, dtype, schedule, compiled):
    """Gradients of 50 classes that are targets dwarf those of the others, which float16 would lose if dz were cast to
    it without a scale: when gradients are computed in forward, or backward runs within autocast."""
    if place.schedule != "auto" or dtype not in place.dtypes or (compiled and schedule == "single_pass"):
        pytest.skip("both schedules are among the cases; a graph takes bf16's the same way")
    torch._dynamo.reset()
    x, weight, _, *_ = Case(2048, 32, 8000, dtype, place.device, scale=1.0, ignored=0.0).tensors()
    target = torch.arange(2048, device=place.device) % 50
    call = dict(schedule=schedule, engine=place.engine)
    run = torch.compile(fused_linear_cross_entropy) if compiled else fused_linear_cross_entropy
    with torch.autocast(place.device, torch.float16):
        run(x, weight, target, **call).backward()
    _, (dx, dw, _) = reference(x, weight, target, None, None, LossOptions())
    bound = 2 * GRADIENT_BOUND[dtype]
    assert_close(x.grad, dx, bound, "dx")
    assert_close(weight.grad[:50], dw[:50], bound, "dW of targets")
    # on a GPU dz is stored in float16, with a scale: what is below 2⁻²⁴ of the largest has fewer bits
    assert_close(weight.grad[50:], dw[50:], bound if place.engine == "torch" else 2 * bound, "dW of the others")

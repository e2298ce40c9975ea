"""Per-token values against float64 PyTorch: log-probabilities, entropy, selected columns; temperature, logit scale."""

from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from liger_cutedsl import (
    LogProbs,
    LossOptions,
    fused_linear_cross_entropy,
    fused_linear_log_probs,
    routing,
    testing,
    torch_compile_log_probs,
)
from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.options import LogProbOptions
from liger_cutedsl.route import Settings
from liger_cutedsl.schedules import recompute
from liger_cutedsl.schedules.schedule import Task
from reference import GRADIENT_BOUND, Case, assert_close, check_case
from reference_log_probs import ALONE, EVERYTHING, LOGITS, check, expected

X, W = torch.randn(6, 16, dtype=torch.float64), torch.randn(40, 16, dtype=torch.float64)
T = torch.tensor([3, -100, 39, 0, 7, -100])


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_values_and_gradients(place, logits):
    for dtype in place.dtypes:
        for bias in (False, True):
            check(Case(dtype=dtype, device=place.device, bias=bias), logits, **place.call)


@pytest.mark.parametrize("names", ALONE, ids="-".join)
def test_each_gradient_alone(place, names):
    dtype = place.dtypes[0]
    check(Case(dtype=dtype, device=place.device, bias=True), LOGITS["cap, temperature and scale"], names, **place.call)


@pytest.mark.parametrize("logits", [LOGITS["scale"], LOGITS["cap, temperature and scale"]], ids=["scale", "all"])
def test_the_loss_of_scaled_logits(place, logits):
    """Every option of the loss counts with the scaled logits' lse and p."""
    for dtype in place.dtypes:
        for options in ({}, dict(label_smoothing=0.1, lse_square_scale=1e-2, use_token_scaling=True)):
            case = Case(dtype=dtype, device=place.device, bias=True, options=options | logits)
            check_case(case, may_cancel=bool(options), **place.call)


def rows_of_logits():
    """Uniform, peaked and in between, with offsets of ±10³."""
    base = torch.randn(7, 5000)
    base[0] = 0.25
    base[1, 17] = 60.0
    base[2, 17] = 18.0
    base[3] *= 5.0
    base[4] += 1000.0
    base[5] = base[3] - 1000.0
    base[6] = base[2] + 1000.0
    return base


@pytest.mark.parametrize("width", [192, 5000])
def test_entropy_of_the_same_logits(width):
    """Against float64 on the float32 logits: a product with the identity makes them exactly."""
    z = rows_of_logits()
    problem = Problem(
        torch.eye(7),
        z.t().contiguous(),
        torch.zeros(7, dtype=torch.int64),
        options=LogProbOptions(return_entropy=True, return_log_sum_sq_probs=True),
        dense=True,
    )
    stats = TorchEngine().row_statistics(problem, width).finished()
    log_p = F.log_softmax(z.double(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    assert ((stats.entropy - entropy).abs() <= 1e-5 * entropy + 5e-7).all(), (stats.entropy, entropy)
    squares = torch.logsumexp(2 * log_p, dim=-1)
    # log Σ e^(z−m) counts twice in it
    assert ((stats.log_sum_sq - squares).abs() <= 2 * (1e-5 * squares.abs() + 5e-7)).all()
    out = torch.empty(7, 5000)
    chunk, *_ = TorchEngine().exp_chunk(problem, out)
    assert ((chunk.finished().entropy - entropy).abs() <= 1e-5 * entropy + 5e-7).all()


def test_masked_logits():
    """A bias of −∞, in whole tiles and all but one column: no NaN, and a row with one column left has no entropy."""
    bias = torch.zeros(1000)
    bias[100:900] = -torch.inf
    x, weight = torch.randn(5, 8), torch.randn(1000, 8)
    got = fused_linear_log_probs(x, weight, torch.arange(5), bias=bias, **EVERYTHING)
    kept = torch.cat([torch.arange(100), torch.arange(900, 1000)])
    want = expected(x.double(), weight[kept].double(), torch.arange(5), None)
    assert_close(got.log_probs, want.log_probs, 1e-6, "log_probs")
    assert_close(got.entropy, want.entropy, 1e-6, "entropy")
    assert torch.isneginf(got.mean_logits).all()
    bias[1:] = -torch.inf
    leaf = x.clone().requires_grad_()
    got = fused_linear_log_probs(leaf, weight, torch.zeros(5, dtype=torch.int64), bias=bias, return_entropy=True)
    (got.entropy.sum() + got.log_probs.sum()).backward()
    assert torch.equal(got.entropy, torch.zeros(5)) and torch.equal(leaf.grad, torch.zeros(5, 8))


def test_shapes_and_ignored_rows():
    x = X.view(2, 3, 16).clone()
    x[0, 1] = torch.nan  # an ignored row
    leaf, weight = x.requires_grad_(), W.clone().requires_grad_()
    got = fused_linear_log_probs(leaf, weight, T.view(2, 3), selected_token_ids=torch.tensor([1, 1]), **EVERYTHING)
    assert isinstance(got, LogProbs) and got.selected_log_probs.shape == (2, 3, 2)
    for value in got:
        assert value.shape[:2] == (2, 3) and not value.view(6, -1)[[1, 5]].any()
    got.selected_log_probs.sum().backward()
    assert not leaf.grad.view(6, 16)[[1, 5]].any() and weight.grad.isfinite().all()
    alone = fused_linear_log_probs(X, W, T)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone == 0, T == -100)


def test_no_tokens():
    x, weight = X[:0].clone().requires_grad_(), W.clone().requires_grad_()
    got = fused_linear_log_probs(x, weight, T[:0], selected_token_ids=torch.tensor([1]), **EVERYTHING)
    (got.log_probs.sum() + got.entropy.sum() + got.selected_log_probs.sum()).backward()
    assert x.grad.shape == (0, 16) and torch.equal(weight.grad, torch.zeros_like(W))


def test_no_selected_columns():
    got = fused_linear_log_probs(X, W, T, selected_token_ids=torch.empty(0, dtype=torch.int64))
    assert got.selected_log_probs.shape == (6, 0)


@pytest.mark.parametrize(
    "arguments, error",
    [
        (dict(temperature=0.0), "temperature must be greater than 0, got 0.0"),
        (dict(temperature=torch.tensor(1.0)), "temperature must be a finite number"),
        (dict(temperature=True), "temperature must be a finite number, got True"),
        (dict(temperature=float("inf")), "temperature must be a finite number, got inf"),
        (dict(logit_scale=float("nan")), "logit_scale must be a finite number, got nan"),
        (dict(return_entropy=1), "return_entropy must be True or False, got 1"),
        (dict(selected_token_ids=[1]), "selected_token_ids must be a torch.Tensor or None"),
        (
            dict(selected_token_ids=torch.tensor([40])),
            r"selected_token_ids must lie in \[0, 40\), the vocabulary, got 40",
        ),
        (dict(selected_token_ids=torch.tensor([[1]])), r"selected_token_ids must be int64 of shape \(K,\)"),
        (dict(selected_token_ids=torch.tensor([1], dtype=torch.int32)), "selected_token_ids must be int64"),
        (dict(engine="triton"), "engine 'triton' was asked for but cannot run this call"),
        (dict(schedule="single_pass"), "reduction='none'"),
        (dict(entropy=True), "did you mean 'return_entropy'"),
    ],
)
def test_refusals(arguments, error):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=error):
        fused_linear_log_probs(X.clone().requires_grad_(), W, T, **arguments)


def test_a_temperature_from_numpy_and_an_int():
    want = expected(X, W, T, None, temperature=2).log_probs
    for temperature in (2, np.float32(2), np.int64(2)):
        assert_close(fused_linear_log_probs(X, W, T, temperature=temperature), want, 1e-9, "log_probs")


def test_a_scale_of_zero():
    """All logits are equal: log p is −log V, the entropy log V, and no gradient is left."""
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    got = fused_linear_log_probs(x, weight, T.clamp(min=0), logit_scale=0, return_entropy=True)
    assert_close(got.entropy, torch.full((6,), 40.0, dtype=torch.float64).log(), 1e-12, "entropy")
    (got.entropy.sum() + got.log_probs.sum()).backward()
    assert not x.grad.any() and not weight.grad.any()


def test_second_derivatives_are_refused():
    x = X.clone().requires_grad_()
    got = fused_linear_log_probs(x, W, T, return_entropy=True)
    (dx,) = torch.autograd.grad(got.entropy.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


def test_twice_through_one_graph():
    x = X.clone().requires_grad_()
    got = fused_linear_log_probs(x, W, T, return_entropy=True)
    first = torch.autograd.grad(got.entropy.sum(), x, retain_graph=True)[0]
    got_both = torch.autograd.grad(got.entropy.sum() + got.log_probs.sum(), x)[0]
    only = torch.autograd.grad(fused_linear_log_probs(x, W, T).sum(), x)[0]
    assert_close(got_both, first + only, 1e-9, "dx")


def test_under_autocast():
    """fp32 inputs are multiplied in autocast's dtype; gradients come in their own."""
    case = Case(dtype=torch.float32, bias=True)
    x, weight, target, bias, _ = case.tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fused_linear_log_probs(x, weight, target, bias=bias, return_entropy=True)
    rounded = [v.detach().bfloat16().double().requires_grad_() for v in (x, weight)]
    want = expected(*rounded, target, bias.detach().double())
    assert_close(got.entropy, want.entropy, 1e-5, "entropy")
    (got.entropy.sum() + 2 * got.log_probs.sum()).backward()
    grads = torch.autograd.grad(want.entropy.sum() + 2 * want.log_probs.sum(), rounded)
    for leaf, grad in zip((x, weight), grads, strict=True):
        assert leaf.grad.dtype == torch.float32
        assert_close(leaf.grad, grad, 1e-5, "gradient")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    """One graph: every result and gradient as in eager mode, alone and together; then a call with other options."""

    def both(x, weight, target, bias, selected, names):
        got = fused_linear_log_probs(
            x, weight, target, bias=bias, selected_token_ids=selected, softcap=5.0, temperature=0.8, **EVERYTHING
        )
        return sum(getattr(got, name).square().sum() for name in names), got

    compiled = torch.compile(both, backend=backend, fullgraph=True)
    selected = torch.tensor([3, 3, 200])
    for names in ALONE:
        x, weight, target, bias, _ = Case(dtype=torch.float32, bias=True).tensors()
        results = []
        for function in (both, compiled):
            loss, values = function(x, weight, target, bias, selected, names)
            results.append((*values, *torch.autograd.grad(loss, (x, weight, bias))))
        for eager, other in zip(*results, strict=True):
            assert other.dtype == eager.dtype
            torch.testing.assert_close(other, eager, rtol=1e-5, atol=1e-5)

    @torch.compile(backend=backend, fullgraph=True)
    def plain(x, weight, target):
        return fused_linear_log_probs(x, weight, target)

    with torch.no_grad():
        torch.testing.assert_close(plain(x, weight, target), fused_linear_log_probs(x, weight, target))


@pytest.mark.parametrize("flags", [{}, EVERYTHING], ids=["plain", "everything"])
def test_the_ops_do_what_they_declare(flags):
    """torch's own check: what they declare against what they do, aliasing, dtypes and strides among it."""
    x, weight, target, bias, _ = Case(11, 16, 50, dtype=torch.bfloat16, bias=True).tensors()
    selected = torch.tensor([4, 4]) if flags else None
    values = [({"softcap": 5.0} | flags).get(field.name, field.default) for field in fields(LogProbOptions)]
    tensors, call = (
        (x, weight, target, bias, None, selected),
        (*values, "auto", "auto", None, 1, 0.0, "", None, True, True, True),
    )
    torch.library.opcheck(torch_compile_log_probs.FLLP.default, (*tensors, *call))
    with torch.no_grad():
        *results, lse, target_logit, entropy, chosen = torch_compile_log_probs.FLLP(*tensors, *call)
    upstream = [torch.ones_like(value) if value.numel() else None for value in results[:3]]
    saved = (lse, target_logit, *(value if value.numel() else None for value in (entropy, chosen)))
    arguments = (*upstream, *saved, *(v if v is None else v.detach() for v in tensors), *call)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch_compile_log_probs.FLLP_BACKWARD.default, arguments, test_utils=checks)


def test_shapes_without_data():
    with torch.device("meta"):
        got = fused_linear_log_probs(
            torch.empty(2, 3, 16), torch.empty(40, 16), torch.empty(2, 3, dtype=torch.int64), **EVERYTHING
        )
    assert got.entropy.shape == (2, 3) and got.is_top1.dtype == torch.bool and got.entropy.is_meta


def test_another_call_before_does_not_matter():
    """Gradients with and without the entropy's take other kernels, with and without a temperature too."""
    case, logits = Case(dtype=torch.bfloat16), (LOGITS["plain"], LOGITS["temperature"])
    alone = {(i, names): check(case, logits[i], names)[1] for i in (0, 1) for names in ALONE}
    for (i, names), grads in reversed(alone.items()):
        assert all(map(torch.equal, check(case, logits[i], names)[1], grads))


def test_the_liger_engine_is_not_asked():
    """A loss with a temperature runs where Liger's operator, which has none, would."""
    x, weight, target = (torch.empty(*shape, device="meta") for shape in ((6, 16), (40, 16), (6,)))
    for options, reason in (
        (LogProbOptions(), "computes a loss"),
        (LossOptions(temperature=3.0), "has no temperature"),
    ):
        problem = Problem(OnGpu(x), OnGpu(weight), OnGpu(target), options=options)
        assert reason in routing.triton_obstacle(Task(problem, WantedGradients(), Settings()))
    loss = fused_linear_cross_entropy(X, W, T, temperature=3.0)
    assert_close(loss, -expected(X, W, T, None, temperature=3.0).log_probs.sum() / 4, 1e-12, "loss")


class OnGpu:
    """A tensor as far as routing looks at it, on a GPU."""

    def __init__(self, tensor):
        self.device, self.dtype, self.shape = torch.device("cuda"), torch.bfloat16, tensor.shape


@pytest.mark.parametrize("workspace_mb", [0.05, None], ids=["tiles", "kept"])
def test_a_wide_weight_is_cast_in_parts(monkeypatch, workspace_mb):
    """float32 weights under autocast, columns of two tiles at a time: as with the weight cast beforehand."""
    monkeypatch.setattr(recompute, "CAST_COLUMNS", 384)
    x, weight, target, bias, _ = Case(vocab=1000, dtype=torch.float32, bias=True).tensors()
    selected, results = torch.tensor([999, 5, 5]), []
    for head in (weight, weight.detach().bfloat16().requires_grad_()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = fused_linear_log_probs(
                x, head, target, bias=bias, selected_token_ids=selected, workspace_mb=workspace_mb, **EVERYTHING
            )
        loss = sum((value * (i + 1)).square().sum() for i, value in enumerate(got[:3]))
        results.append((*got, *torch.autograd.grad(loss, (x, head, bias))))
    for parts, at_once in zip(*results, strict=True):
        bound = 2**-8 if at_once.dtype == torch.bfloat16 else 1e-5
        assert_close(parts.double(), at_once.double(), bound, "in parts")


def test_calls_that_wait_for_their_backward_keep_vectors():
    """Of three calls whose backward comes later, the first keeps its exponentials; another after them does again."""
    x, weight, target, _, _ = Case(tokens=2000, hidden=64, vocab=1000, dtype=torch.bfloat16).tensors()
    testing.reset()  # a graph that an earlier test made with backward(create_graph=True) is never freed, and waits

    def kept():
        problem = Problem(x, weight, target, options=LogProbOptions(), dense=True)
        settings = Settings.resolve("torch", None, 1.0)
        return routing.choose_route(problem, WantedGradients.of(problem), settings).kept

    alone = kept()
    assert 0 < alone < 1000  # as many as dW's memory holds
    first = fused_linear_log_probs(x, weight, target, workspace_mb=1)
    assert kept() == 0
    second = fused_linear_log_probs(x, weight, target, workspace_mb=1)
    grads = [torch.autograd.grad(call.sum(), weight)[0] for call in (second, first)]
    assert kept() == alone
    assert_close(grads[0].double(), grads[1].double(), 2**-8, "dW")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_graph(dtype):
    """Captured once, replayed with other inputs, targets and selected columns; some targets ignored."""
    tokens, hidden, vocab = 300, 64, 5000
    x, weight = (torch.zeros(n, hidden, device="cuda", dtype=dtype, requires_grad=True) for n in (tokens, vocab))
    target = torch.zeros(tokens, device="cuda", dtype=torch.int64)
    selected = torch.zeros(3, device="cuda", dtype=torch.int64)

    def step():
        got = fused_linear_log_probs(
            x, weight, target, engine="cute", temperature=1.3, selected_token_ids=selected, **EVERYTHING
        )
        sum((value * (i + 1)).sum() for i, value in enumerate(got[:3])).backward()
        return [value.detach() for value in got]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    x.grad = weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for seed, ignored in enumerate((0.0, 0.4)):
        case = Case(tokens, hidden, vocab, dtype=dtype, device="cuda", seed=seed, ignored=ignored)
        new_x, new_weight, new_target, *_ = case.tensors()
        with torch.no_grad():
            x.copy_(new_x)
            weight.copy_(new_weight)
            target.copy_(new_target)
            selected.copy_(torch.tensor([seed, vocab - 1, seed]))
        graph.replay()
        leaves = [v.detach().double().requires_grad_() for v in (x, weight)]
        want = expected(*leaves, target, None, selected, temperature=1.3)
        for name, value, reference in zip(LogProbs._fields, got, want, strict=True):
            if reference.dtype == torch.bool:
                assert torch.equal(value, reference)
            else:
                assert_close(value, reference, 1e-5, name, size=30 * tokens**0.5)
        grads = torch.autograd.grad(sum((value * (i + 1)).sum() for i, value in enumerate(want[:3])), leaves)
        for name, leaf, grad in zip(("dx", "dW"), (x, weight), grads, strict=True):
            assert_close(leaf.grad, grad, 2 * GRADIENT_BOUND[dtype], name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant):
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()

    def head(x, weight):
        got = fused_linear_log_probs(x, weight, T, return_entropy=True)
        return got.log_probs.sum() + 0.1 * got.entropy.sum()

    grads = []
    for run in (head, lambda *leaves: torch.utils.checkpoint.checkpoint(head, *leaves, use_reentrant=reentrant)):
        x.grad = weight.grad = None
        run(x, weight).backward()
        grads.append((x.grad.clone(), weight.grad.clone()))
    for plain, checkpointed in zip(*grads, strict=True):
        assert_close(checkpointed, plain, 1e-12, "gradient")

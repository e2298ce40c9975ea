"""What only a GPU shows: real heads, odd sizes, poisoned memory, devices and streams, routes, recompilation."""

import time

import pytest
import torch

import liger_cutedsl
from liger_cutedsl import LossOptions, fused_linear_cross_entropy, testing
from liger_cutedsl.call import Problem
from reference import GRADIENT_BOUND, Case, assert_close, check_case, reference

pytestmark = pytest.mark.gpu
ALL_OPTIONS = dict(softcap=20.0, label_smoothing=0.1, lse_square_scale=1e-3, use_token_scaling=True)


def poison(megabytes=2000):
    """Fills the allocator's free blocks with NaN: whatever a kernel reads without having written it shows."""
    blocks = [torch.full((megabytes * 2**18 // 8,), float("nan"), device="cuda") for _ in range(8)]
    small = [torch.full((size,), float("nan"), device="cuda") for size in (64, 512, 4096, 65536) for _ in range(32)]
    del blocks, small


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])
@pytest.mark.parametrize(
    "tokens, vocab, hidden",
    [
        (1, 50257, 768),
        (7, 32003, 8),
        (129, 151669, 72),
        (300, 193, 1024),
        (1000, 50257, 768),
        (4096, 100, 64),
        (255, 128256, 512),
        (257, 1, 64),
        (2, 7, 8),
    ],
)
def test_odd_sizes_on_poisoned_memory(tokens, vocab, hidden, options):
    poison()
    for dtype in (torch.bfloat16, torch.float16):
        case = Case(tokens, hidden, vocab, dtype=dtype, device="cuda", options=options, ignored=0.2)
        case.bias = case.ce_weight = bool(options)
        # one token or one class: a handful of elements, each rounded by up to the whole unit
        few = tokens < 8 or vocab < 8
        bound = GRADIENT_BOUND[dtype] * (2 if few else 1)
        check_case(case, engine="cute", gradient_bound=bound, may_cancel=few)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_real_head(reduction):
    case = Case(2048, 2048, 32000, dtype=torch.bfloat16, device="cuda", options=dict(reduction=reduction))
    check_case(case, engine="cute")
    case.options = dict(**ALL_OPTIONS, reduction=reduction)
    case.bias = case.ce_weight = True
    check_case(case, engine="cute")


def test_more_than_2_to_31_elements():
    """N·V and V·H beyond 32 bits. Checked on rows and columns drawn at random, in float64."""
    tokens, vocab, hidden = 9000, 262144, 8200
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    target[-1] = vocab - 1
    out = fused_linear_cross_entropy(x, weight, target, engine="cute", reduction="none", return_predicted_tokens=True)
    rows = torch.tensor([0, 5000, tokens - 1], device="cuda")
    logits = x.detach()[rows].double() @ weight.detach().double().t()
    expected = torch.nn.functional.cross_entropy(logits, target[rows], reduction="none")
    assert_close(out.loss[rows], expected, 1e-5, "loss")
    assert torch.equal(out.predicted_tokens[rows], logits.argmax(dim=1))
    upstream = torch.zeros_like(out.loss)
    upstream[rows] = 1.0
    out.loss.backward(upstream)
    dz = torch.softmax(logits, dim=1)
    dz[torch.arange(3), target[rows]] -= 1
    bound = GRADIENT_BOUND[torch.bfloat16]
    assert_close(x.grad[rows], dz @ weight.detach().double(), bound, "dx")
    for columns in (slice(0, 100), slice(vocab - 100, vocab)):
        assert_close(weight.grad[columns], dz[:, columns].t() @ x.detach()[rows].double(), bound, "dW")
    assert torch.count_nonzero(x.grad[1:4000]) == 0


def test_fp16_without_loss_scaling_does_not_underflow():
    case = Case(8192, 512, 32000, dtype=torch.float16, device="cuda", scale=1.0, ignored=0.0)
    check_case(case, engine="cute", gradient_bound=3e-3)


def test_another_batch_size_compiles_nothing():
    from liger_cutedsl.engines import cute_kernels

    weight = torch.randn(5000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step(tokens):
        x = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(0, 5000, (tokens,), device="cuda")
        fused_linear_cross_entropy(x, weight, target, engine="cute").backward()
        torch.cuda.synchronize()

    step(256)
    from quack.gemm_runtime.host import _compile_gemm_epi

    before = _compile_gemm_epi.cache_info().misses, cute_kernels.forward_kernel.cache_info().misses
    for tokens in (255, 1000, 3):
        start = time.perf_counter()
        step(tokens)
        assert time.perf_counter() - start < 0.5
    assert (_compile_gemm_epi.cache_info().misses, cute_kernels.forward_kernel.cache_info().misses) == before


def waits_of(run) -> list[str]:
    """The CUDA calls in which the host waits for the device while run() is on its way."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("the call"):
            run()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CPU]
    (call,) = (e.time_range for e in events if e.name == "the call")
    within = [e for e in events if call.start <= e.time_range.start <= call.end]
    return [e.name for e in within if e.name.startswith("cu") and "Synchronize" in e.name]


@pytest.mark.parametrize("ignored", [0, 1])
@pytest.mark.parametrize(
    "call", [{}, dict(schedule="recompute"), dict(schedule="recompute", workspace_mb=0.5)], ids=str
)
def test_at_most_one_device_to_host_read(call, ignored):
    """The counts of the targets are written to page-locked memory: the host waits for the event behind them, once."""
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32000, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 32000, (256,), device="cuda")
    target[:ignored] = -100

    def step():
        fused_linear_cross_entropy(x, weight, target, engine="cute", **call).backward()

    for _ in range(2):  # compiles, and settles whether targets are likely to be ignored
        step()
    assert waits_of(step) == ["cudaEventSynchronize"]
    # and this sees another read
    assert len(waits_of(lambda: (step(), weight.grad[0, 0].item()))) == 2


@pytest.mark.parametrize(
    "call", [{}, dict(schedule="recompute"), dict(schedule="recompute", workspace_mb=0.5)], ids=str
)
def test_side_stream(call):
    """A call on a stream of its own waits for nothing that the default stream has to do, and is right."""
    case = Case(512, 256, 8000, dtype=torch.bfloat16, device="cuda", ignored=0.0)
    x, weight, target, *_ = case.tensors()
    expected, grads = reference(x, weight, target, None, None, LossOptions())
    side = torch.cuda.Stream()

    def step():
        with torch.cuda.stream(side):
            loss = fused_linear_cross_entropy(x, weight, target, engine="cute", **call)
            found = loss.detach(), *torch.autograd.grad(loss, (x, weight))
        side.synchronize()
        return found

    torch.cuda.synchronize()
    for _ in range(2):  # compiles, and allocates
        step()
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # some two seconds, on the default stream
    busy = torch.cuda.Event()
    busy.record()
    found = step()
    assert not busy.query(), "the side stream waited for the default one"
    with torch.cuda.stream(side):
        assert_close(found[0], expected["loss"], 1e-5, "loss")
        for name, got, want in zip(("dx", "dW"), found[1:], grads, strict=False):
            assert_close(got, want, GRADIENT_BOUND[torch.bfloat16], name)
    busy.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_device_counts_not_the_current_one():
    torch.cuda.set_device(0)
    check_case(Case(256, 64, 5000, dtype=torch.bfloat16, device="cuda:1"), engine="cute")


def test_routes():
    def engine(dtype=torch.bfloat16, hidden=64, **call):
        x = torch.empty(16, hidden, device="cuda", dtype=dtype, requires_grad=True)
        weight = torch.empty(1000, hidden, device="cuda", dtype=dtype, requires_grad=True)
        return liger_cutedsl.explain(x, weight, **call)

    capability = torch.cuda.get_device_capability()
    if capability in ((9, 0), (10, 0), (10, 3)):
        assert engine().engine == "cute" and not engine().fallback
        assert engine(softcap=3.0, return_token_accuracy=True).engine == "cute"
        odd = engine(hidden=63)
        assert odd.engine == "triton" and odd.fallback and "multiple of 8" in odd.reason
        assert "float32" in engine(dtype=torch.float32).reason
    assert engine(dtype=torch.float32).engine == "triton"
    assert engine(dtype=torch.float64).engine == "torch"
    with pytest.raises(RuntimeError, match="bfloat16 or float16, not float32"):
        engine(dtype=torch.float32, engine="cute")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_liger_triton_behind_our_front(reduction):
    """float32 goes to Liger's operator, with what that lacks: frozen x, repeated backward, ignored batches."""
    options = dict(reduction=reduction, label_smoothing=0.1, softcap=10.0, lse_square_scale=1e-3)
    case = Case(dtype=torch.float32, device="cuda", bias=True, ce_weight=True, options=options)
    # matrix products of Liger's operator follow torch's float32 precision setting
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    check_case(case, engine="triton", gradient_bound=1e-4)
    x, weight, target, bias, _ = case.tensors()
    x = x.detach()
    loss = fused_linear_cross_entropy(x, weight, target, bias=bias, engine="triton").sum()
    first = torch.autograd.grad(2 * loss, weight, retain_graph=True)[0].clone()
    second = torch.autograd.grad(2 * loss, weight)[0]
    _, grads = reference(x, weight, target, bias, None, LossOptions())
    assert_close(first, 2 * grads[1], 1e-4, "dW with x frozen")
    assert torch.equal(first, second)


@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("hidden, call", [(64, dict(engine="triton")), (60, {})])
def test_amp_on_ligers_operator(hidden, call, reduction, bias):
    """x of 16 bits, as its layers leave it under autocast, and parameters of float32; and what H falls back to."""
    options = dict(reduction=reduction, label_smoothing=0.1, softcap=10.0, lse_square_scale=1e-3)
    case = Case(dtype=torch.bfloat16, hidden=hidden, device="cuda", bias=bias is not None, options=options)
    tensors = case.tensors()
    for x_dtype in (torch.bfloat16, torch.float32):
        dtypes = (x_dtype, torch.float32, bias)
        leaves = [
            v if v is None else v.detach().to(dtype).requires_grad_()
            for v, dtype in zip((tensors[0], tensors[1], tensors[3]), dtypes, strict=True)
        ]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = fused_linear_cross_entropy(
                leaves[0], leaves[1], tensors[2], bias=leaves[2], return_z_loss=True, **call, **options
            )
            assert torch.nn.functional.linear(tensors[0].detach(), leaves[1]).requires_grad, "autocast kept a copy"
        assert out.loss.dtype == out.z_loss.dtype == torch.float32
        upstream = torch.linspace(0.5, 1.5, out.loss.numel(), device="cuda").view_as(out.loss)
        out.loss.backward(upstream)
        want, grads = reference(*tensors[:4], None, LossOptions(**options), upstream)
        # Liger rounds logits, dz, products and gradients to 16 bits: dz is off by two logits' roundings, and its own
        bound = GRADIENT_BOUND[torch.bfloat16] * (2 * float(want["logits"].abs().max()) + 3)
        for name, leaf, grad in zip(("dx", "dW", "db"), leaves, grads, strict=True):
            if leaf is not None:
                assert leaf.grad.dtype == leaf.dtype
                assert_close(leaf.grad, grad, bound, name)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "cuda", "meta"], ids=str)
def test_defaults_change_nothing_on_ligers_operator(default):
    case = Case(dtype=torch.bfloat16, device="cuda", bias=True, ce_weight=True, options=ALL_OPTIONS)
    x, weight, target, bias, ce_weight = case.tensors()

    def step():
        call = dict(bias=bias, ce_weight=ce_weight, engine="triton", return_z_loss=True, **ALL_OPTIONS)
        out = fused_linear_cross_entropy(x, weight, target, **call)
        return out.loss, out.z_loss, *torch.autograd.grad(out.loss, (x, weight, bias))

    plain = step()
    if isinstance(default, str):
        with torch.device(default):
            found = step()
    else:
        torch.set_default_dtype(default)
        try:
            found = step()
        finally:
            torch.set_default_dtype(torch.float32)
    for a, b in zip(found, plain, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_fallback_warns_once():
    testing.reset()
    x, weight, target, *_ = Case(dtype=torch.float32, device="cuda").tensors()
    with pytest.warns(RuntimeWarning, match="triton engine: .*float32"):
        fused_linear_cross_entropy(x, weight, target)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused_linear_cross_entropy(x, weight, target)


@pytest.mark.parametrize("schedule", ["single_pass", "recompute"])
def test_a_wrong_guess_about_ignored_targets_does_no_harm(schedule):
    """A call may begin as if no row were to be dropped, because none was in the last one."""
    from liger_cutedsl.rows import TargetCheck

    for ignored, whole_next in ((0.0, True), (0.01, True), (0.4, False), (0.4, False), (0.0, True)):
        # an ignore_index that is no index of the class weights: they must not be read there
        options = dict(ignore_index=10**6)
        case = Case(256, 64, 5000, dtype=torch.bfloat16, device="cuda", ignored=ignored, options=options)
        case.ce_weight = True
        check_case(case, engine="cute", schedule=schedule)
        x, weight, target, _, ce_weight = case.tensors()
        assert TargetCheck(Problem(x, weight, target)).likely_whole == whole_next
    fused_linear_cross_entropy(x, weight, target, engine="cute")
    target[3] = 5000
    with pytest.raises(ValueError, match="got 5000"):  # found behind the first GEMM
        fused_linear_cross_entropy(x, weight, target, ce_weight=ce_weight, engine="cute", schedule=schedule)


def test_vocabulary_parallel_over_one_nccl_rank():
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        options = dict(label_smoothing=0.1, softcap=20.0)
        case = Case(512, 256, 8003, dtype=torch.bfloat16, device="cuda", bias=True, ce_weight=True, options=options)
        x, weight, target, bias, ce_weight = case.tensors()
        out = liger_cutedsl.vocab_parallel_fused_linear_cross_entropy(
            x, weight, target, bias=bias, ce_weight=ce_weight, return_predicted_tokens=True, engine="cute", **options
        )
        out.loss.backward()
        expected, grads = reference(x, weight, target, bias, ce_weight, LossOptions(**options))
        assert_close(out.loss, expected["loss"], 1e-5, "loss")
        for name, leaf, want in zip(("dx", "dW"), (x, weight), grads, strict=False):
            assert_close(leaf.grad, want, GRADIENT_BOUND[torch.bfloat16], name)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "schedule, workspace_mb, dtype",
    [
        ("single_pass", None, torch.bfloat16),
        ("recompute", None, torch.bfloat16),
        ("recompute", 0.5, torch.bfloat16),
        ("auto", None, torch.float16),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_cuda_graph(schedule, workspace_mb, dtype, backward):
    """Captured once, replayed with other inputs and targets, none to nearly all of them ignored."""
    tokens, hidden, vocab = 300, 64, 5000
    x = torch.zeros(tokens, hidden, device="cuda", dtype=dtype, requires_grad=backward)
    weight = torch.zeros(vocab, hidden, device="cuda", dtype=dtype, requires_grad=backward)
    target = torch.zeros(tokens, device="cuda", dtype=torch.int64)

    def step():
        loss = fused_linear_cross_entropy(
            x, weight, target, engine="cute", schedule=schedule, workspace_mb=workspace_mb, softcap=20.0
        )
        if backward:
            loss.backward()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up elsewhere, as torch wants it
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    x.grad = weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for seed, ignored in enumerate((0.0, 0.2, 0.4, 0.98)):
        case = Case(tokens, hidden, vocab, dtype=dtype, device="cuda", seed=seed, ignored=ignored)
        new_x, new_weight, new_target, *_ = case.tensors()
        with torch.no_grad():
            x.copy_(new_x)
            weight.copy_(new_weight)
            target.copy_(new_target)
        if backward:
            poison(100)
        graph.replay()
        expected, grads = reference(x, weight, target, None, None, LossOptions(softcap=20.0))
        assert_close(loss, expected["loss"], 1e-5, "loss")
        if backward:
            for name, leaf, want in (("dx", x, grads[0]), ("dW", weight, grads[1])):
                assert_close(leaf.grad, want, GRADIENT_BOUND[dtype], name)


def test_first_calls_from_several_threads():
    """Kernels nobody has compiled in this process, asked for by four threads at once."""
    from concurrent.futures import ThreadPoolExecutor

    def step(seed):
        options = dict(label_smoothing=0.1, softcap=9.0)
        case = Case(200, 40, 999, dtype=torch.float16, device="cuda", bias=True, seed=seed, options=options)
        check_case(case, engine="cute")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(step, range(8)))


def test_a_gradient_of_more_than_2_31_elements_is_scaled():
    from liger_cutedsl.gemm import scale_in_place

    data = torch.ones(2**31 + 5, dtype=torch.bfloat16, device="cuda")
    for factor, expected in ((1.0, 1.0), (0.5, 0.5)):
        scale_in_place([data], torch.tensor(factor, device="cuda"))
        assert data.min().item() == data.max().item() == expected


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_does_not_grow(reduction):
    case = Case(300, 64, 5000, dtype=torch.bfloat16, device="cuda")
    x, weight, target, *_ = case.tensors()

    def step():
        x.grad = weight.grad = None
        fused_linear_cross_entropy(x, weight, target, engine="cute", reduction=reduction).sum().backward()

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_fuzz_against_ligers_triton_operator():
    """Random shapes and options for 15 seconds: our loss and gradients are near float64, Liger's as near as logits of
    16 bits let them, and on the whole no nearer than ours."""
    import random

    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw, stop, errors = random.Random(seed), time.perf_counter() + 15, []
    while time.perf_counter() < stop:
        # Triton compiles for each set of options and size of vocabulary: several cases share them.
        options = dict(
            softcap=draw.choice([None, 15.0, 30.0]),
            label_smoothing=draw.choice([0.0, 0.1]),
            lse_square_scale=draw.choice([0.0, 1e-3]),
            use_token_scaling=draw.choice([False, True]),
            reduction=draw.choice(["mean", "sum"]),
        )
        vectors = dict(bias=draw.random() < 0.5, ce_weight=draw.random() < 0.3)
        vocab = draw.choice([31, 1000, 4099, 9000])
        for _ in range(10):
            case = Case(
                tokens=draw.randint(8, 600),
                hidden=8 * draw.randint(2, 64),
                vocab=vocab,
                dtype=torch.bfloat16,
                device="cuda",
                ignored=draw.choice([0.0, 0.0, 0.3, 0.9]),
                scale=draw.choice([0.5, 2.0, 5.0]),
                seed=draw.randrange(2**31),
                options=options,
                **vectors,
            )
            ours, ligers = (_errors(case, engine) for engine in ("cute", "triton"))
            what = f"seed {seed}, case {len(errors)}: {case}: ours {ours}, Liger's {ligers}"
            for name, error in ours.items():
                # of a few valid rows each number may be rounded by nearly the whole unit: twice the usual bound
                assert error <= (1e-5 if name == "loss" else 2 * GRADIENT_BOUND[torch.bfloat16]), what
            assert ligers["loss"] < 0.05, what  # as far as a share of the logits' size
            for name, bound in _ligers_bounds(case).items():
                assert ligers[name] <= bound, f"{what}, bound {bound}"
            errors.append((ours, ligers))
    assert len(errors) >= 10, f"only {len(errors)} cases in 15 seconds"
    for name in ("loss", "dx", "dW"):
        mean_of_ours, mean_of_ligers = (sum(pair[i][name] for pair in errors) / len(errors) for i in (0, 1))
        assert mean_of_ours <= 1.05 * mean_of_ligers, f"{name}: ours {mean_of_ours}, Liger's {mean_of_ligers}"


def _ligers_bounds(case):
    """What rounding logits to 16 bits may do to gradients, relative as _errors' are.

    A logit z is off by u·|z|/2, and by as much again where a bias is added; dz by its own logit's and lse's, and under
    token scaling by two more. All that is relative to the terms of dz, which cancel where a target's probability is
    near 1. Then come the roundings of dz, of a product and of the gradient. Rows err independently of each other.
    """
    x, weight, *_ = tensors = case.tensors()
    options = LossOptions(**case.options)
    expected, grads = reference(*tensors, options)
    off = GRADIENT_BOUND[torch.bfloat16] * (4 * float(expected["logits"].abs().max()) + 3)
    terms = _terms_of_rows(*tensors, options, expected["logits"])
    sizes = {
        "dx": terms.norm() * weight.detach().double().norm(dim=1).max(),
        "dW": 2 * (terms * x.detach().double().norm(dim=1)).norm(),
        "db": 2 * terms.norm(),
    }
    return {
        name: off * max(1.0, float(size / grad.norm().clamp(min=1e-30)))
        for (name, size), grad in zip(sizes.items(), grads, strict=True)
        if grad is not None
    }


def _terms_of_rows(x, weight, target, bias, ce_weight, options, logits):
    """(N,) how large the terms of a row of dz are that cancel."""
    valid = target != options.ignore_index
    safe = torch.where(valid, target, 0)
    lse = torch.logsumexp(logits, dim=1)
    own = torch.ones_like(lse) if ce_weight is None else ce_weight.double()[safe]
    share = own + 2 * options.lse_square_scale * lse.abs()
    if options.reduction == "mean":
        share = share / own[valid].sum().clamp(min=1e-30)
    if options.use_token_scaling:
        share = share * torch.exp(logits.gather(1, safe[:, None])[:, 0] - lse)
    return torch.where(valid, share, 0.0)


def _errors(case, engine):
    """Relative errors of loss and gradients against float64."""
    x, weight, target, bias, ce_weight = case.tensors()
    call = dict(bias=bias, ce_weight=ce_weight, engine=engine, **case.options)
    loss = fused_linear_cross_entropy(x, weight, target, **call)
    loss.backward()
    expected, grads = reference(x, weight, target, bias, ce_weight, LossOptions(**case.options))
    sizes = {"loss": (loss, expected["loss"], expected["loss_size"])}
    for name, leaf, want in (("dx", x, grads[0]), ("dW", weight, grads[1]), ("db", bias, grads[2])):
        if want is not None:
            sizes[name] = (leaf.grad, want, 0.0)
    return {
        name: float((got.detach().double() - want).norm()) / max(float(want.norm()), size, 1e-30)
        for name, (got, want, size) in sizes.items()
    }

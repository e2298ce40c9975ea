"""dW added to a tensor of the caller's: what is in it, when, and that nothing is added twice."""

import gc
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import liger_cutedsl
from liger_cutedsl import (
    LossOptions,
    fused_linear_cross_entropy,
    fused_linear_log_probs,
    fused_linear_loss,
    testing,
)
from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.rows import Rows
from liger_cutedsl.schedules import gradient_sink, single_pass
from ranks import run_ranks
from reference import EVERY_OPTION, GRADIENT_BOUND, Case, assert_close, reference
from test_autograd import Recorder, peak_bytes

MIB = 2**20
SCHEDULES = {
    "default": {},
    "recompute": dict(schedule="recompute", workspace_mb=0.05),  # tiles as narrow as they get
    "kept": dict(schedule="recompute"),
    "single_pass": dict(schedule="single_pass"),
    "single_pass, chunks": dict(schedule="single_pass", workspace_mb=0.01),
}
VARIANTS = {
    "plain": {},
    "bias": dict(bias=True),
    "all": dict(bias=True, ce_weight=True, options=EVERY_OPTION),
    "sum": dict(options=dict(reduction="sum", softcap=4.0)),
    "none": dict(bias=True, options=dict(reduction="none", temperature=0.7)),
}


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    """Nothing is expected of a backward, and chunks are small enough for a few of them."""
    monkeypatch.setattr(single_pass, "SMALLEST_CHUNK", 16)
    testing.reset()
    yield
    testing.reset()


def filled(weight, dtype):
    """A buffer that holds something, of dW's size, and a copy in float64."""
    generator = torch.Generator().manual_seed(7)
    buffer = (0.1 * torch.randn(weight.shape, generator=generator)).to(weight.device, dtype)
    return buffer, buffer.double().clone()


def assert_added(buffer, before, expected, dtype, times=1, engine="torch"):
    """buffer = before + expected, up to what products in this dtype leave, and so many roundings of the buffer."""
    rounded = times * torch.finfo(buffer.dtype).eps / 2 * (before.norm() + expected.norm())
    exact = dtype.itemsize == 2 and engine == "torch"  # inputs of 16 bits, and float32 from there on
    bound = GRADIENT_BOUND[torch.float32 if exact else dtype] * (1 if engine == "torch" else 2)  # rounds dz too
    error = (buffer.double() - before - expected).norm()
    assert error <= bound * expected.norm() + rounded, f"{float(error):.2e}, {float(expected.norm()):.2e}"


def gradients(loss, leaves, upstream=None):
    loss.backward(upstream)
    return [None if leaf is None else leaf.grad for leaf in leaves]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dw_is_added(place, schedule, variant):
    """Times the upstream gradient, to what is there; weight gets none, and x and bias theirs."""
    if place.schedule != "auto":
        pytest.skip("schedules are this test's own")
    options = VARIANTS[variant].get("options", {})
    if options.get("reduction") == "none" and "single_pass" in schedule:
        pytest.skip("single_pass takes no row losses")
    for dtype in place.dtypes:
        case = Case(dtype=dtype, device=place.device, **VARIANTS[variant])
        if dtype == torch.float16 and "single_pass" in schedule and variant == "all" and place.engine == "cute":
            continue
        x, weight, target, bias, ce_weight = case.tensors()
        call = dict(bias=bias, ce_weight=ce_weight, engine=place.engine, **options, **SCHEDULES[schedule])
        for wide in {dtype, torch.float64 if dtype == torch.float64 else torch.float32}:
            x.grad = None
            if bias is not None:
                bias.grad = None
            buffer, before = filled(weight, wide)
            output = fused_linear_cross_entropy(x, weight, target, weight_grad_buffer=buffer, **call)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            upstream = torch.linspace(0.5, 1.5, loss.numel(), device=loss.device, dtype=loss.dtype).view(loss.shape)
            if not loss.dim():
                upstream = torch.tensor(-3.0, dtype=loss.dtype, device=loss.device)
            dx, dw, db = gradients(loss, (x, weight, bias), upstream)
            _, want = reference(x, weight, target, bias, ce_weight, LossOptions(**options), upstream)
            assert dw is None
            times = 1 if "recompute" in schedule or schedule in ("default", "kept") else 5
            assert_added(buffer, before, want[1], dtype, times, place.engine)
            assert_close(dx, want[0], 2 * GRADIENT_BOUND[dtype], "dx")
            if bias is not None:
                assert_close(db, want[2], 2 * GRADIENT_BOUND[dtype], "db")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_give_what_one_batch_gives(schedule):
    """float32 in the buffer, bfloat16 in the weight: sums are no further from float64 than one batch is."""
    case = Case(60, 24, 301, dtype=torch.bfloat16)
    x, weight, target, *_ = case.tensors()
    buffer = torch.zeros(weight.shape)
    items = int((target != -100).sum())
    for part in (slice(0, 20), slice(20, 25), slice(25, 60)):
        loss = fused_linear_cross_entropy(
            x[part], weight, target[part], reduction="sum", weight_grad_buffer=buffer, **SCHEDULES[schedule]
        )
        (loss / items).backward()
    _, (_, want, _) = reference(x, weight, target, None, None, LossOptions())
    assert weight.grad is None
    assert_added(buffer, torch.zeros(()), want, torch.bfloat16, times=3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_adds_nothing_leaves_the_buffer_alone(schedule):
    x, weight, target, *_ = Case().tensors()
    buffer, before = filled(weight, torch.float64)
    call = dict(weight_grad_buffer=buffer, **SCHEDULES[schedule])
    with torch.no_grad():
        fused_linear_cross_entropy(x, weight, target, **call)
    if "single_pass" not in schedule:
        fused_linear_cross_entropy(x, weight, target, **call)  # no backward
    fused_linear_cross_entropy(x, weight, torch.full_like(target, -100), **call).backward()
    fused_linear_cross_entropy(x[:0], weight, target[:0], **call).backward()
    with pytest.raises(ValueError, match="class indices"):
        fused_linear_cross_entropy(x, weight, target + 1000, **call)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_backward_adds(schedule):
    """Through a graph that is kept, with another upstream gradient each time; what is expected changes nothing."""
    x, weight, target, *_ = Case().tensors()
    _, (_, want, _) = reference(x, weight, target, None, None, LossOptions())
    buffer, before = filled(weight, torch.float64)
    loss = fused_linear_cross_entropy(x, weight, target, weight_grad_buffer=buffer, **SCHEDULES[schedule])
    for times, total in ((1.0, 1.0), (1.0, 2.0), (0.0, 2.0), (-0.5, 1.5)):
        loss.backward(torch.tensor(times, dtype=torch.float64), retain_graph=True)
        assert_added(buffer, before, total * want, torch.float64, times=5)


def test_an_expected_upstream_gradient_needs_no_product_in_backward():
    """The third of equal ones: dX and dW are there, for it, when backward begins."""
    x, weight, target, *_ = Case(ignored=0.0, dtype=torch.float32).tensors()
    _, (dx, dw, _) = reference(x, weight, target, None, None, LossOptions())
    products = []
    for _ in range(4):
        buffer, before = filled(weight, torch.float32)
        x.grad = None
        loss = fused_linear_cross_entropy(x, weight, target, weight_grad_buffer=buffer, **SCHEDULES["single_pass"])
        there = buffer.clone()
        with Recorder() as recorder:
            (loss * 0.25).backward()
        products.append(recorder.products)
        assert_close(x.grad, 0.25 * dx, GRADIENT_BOUND[torch.float32], "dx")
        assert_added(buffer, before, 0.25 * dw, torch.float32, times=3)
        assert torch.equal(there, buffer) == (recorder.products == 0)
    assert products == [2, 2, 0, 0]


def failing_at(nth, function, error):
    calls = []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == nth:
            raise error("planted")
        return function(*arguments, **options)

    return failing


@pytest.mark.parametrize("schedule", ["recompute", "kept", "single_pass"])
@pytest.mark.parametrize("owner, name", [(gradient_sink, "matmul"), (Rows, "spread"), (torch.Tensor, "to")])
def test_a_backward_that_failed_adds_nothing_twice(monkeypatch, schedule, owner, name):
    """Out of memory in any product, or after the last: the second try adds what the first did not."""
    x, weight, target, bias, _ = Case(dtype=torch.float32, bias=True, vocab=700).tensors()
    twice = torch.tensor(2.0)
    _, (dx, dw, db) = reference(x, weight, target, bias, None, LossOptions(), twice)
    for nth in range(1, 100):
        buffer, before = filled(weight, torch.float32)
        x.grad = bias.grad = None
        loss = fused_linear_cross_entropy(
            x, weight, target, bias=bias, weight_grad_buffer=buffer, **SCHEDULES[schedule]
        )
        failed = False
        with monkeypatch.context() as planted:
            planted.setattr(owner, name, failing_at(nth, getattr(owner, name), torch.cuda.OutOfMemoryError))
            try:
                loss.backward(twice)
            except torch.cuda.OutOfMemoryError:
                failed = True
        if not failed:
            break
        loss.backward(twice)
        assert_added(buffer, before, dw, torch.float32, times=3)
        assert_close(x.grad, dx, GRADIENT_BOUND[torch.float32], "dx")
        assert_close(bias.grad, db, GRADIENT_BOUND[torch.float32], "db")
    assert nth > 1


@pytest.mark.parametrize("schedule", ["recompute", "single_pass"])
def test_what_a_failed_backward_left_is_not_taken_for_another_ones(monkeypatch, schedule):
    x, weight, target, *_ = Case(vocab=700).tensors()
    buffer, _ = filled(weight, torch.float64)
    call = dict(SCHEDULES[schedule], weight_grad_buffer=buffer, workspace_mb=0.05)
    loss = fused_linear_cross_entropy(x, weight, target, **call)
    with monkeypatch.context() as planted, pytest.raises(torch.cuda.OutOfMemoryError):
        planted.setattr(gradient_sink, "matmul", failing_at(5, gradient_sink.matmul, torch.cuda.OutOfMemoryError))
        with pytest.warns(RuntimeWarning, match="the same backward, called again, adds the rest"):
            loss.backward(torch.tensor(2.0, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="weight_grad_buffer holds a part of the gradient of a backward that failed"):
        loss.backward(torch.tensor(3.0, dtype=torch.float64))


@pytest.mark.parametrize("schedule", ["recompute", "kept", "single_pass"])
def test_a_kernel_that_fails_in_backward_adds_nothing_twice(monkeypatch, schedule):
    """What runs without it begins behind the tiles that were added; in forward nothing else may run."""
    case = Case(dtype=torch.float64, bias=True, vocab=700)
    x, weight, target, bias, _ = case.tensors()
    twice = torch.tensor(2.0, dtype=torch.float64)
    _, (dx, dw, db) = reference(x, weight, target, bias, None, LossOptions(), twice)
    method = "scale_chunk" if schedule == "kept" else "dz_tile"
    for nth in range(1, 100):
        testing.reset()
        buffer, before = filled(weight, torch.float64)
        x.grad = bias.grad = None
        call = dict(bias=bias, weight_grad_buffer=buffer, **SCHEDULES[schedule])
        loss = fused_linear_cross_entropy(x, weight, target, **call)
        with monkeypatch.context() as planted:
            planted.setattr(TorchEngine, method, failing_at(nth, getattr(TorchEngine, method), KernelFailure))
            planted.setattr(TorchEngine, "tile_width", lambda *_: 320)  # what was added ends in the middle of a tile
            loss.backward(twice)
        if testing.kernel_failure() is None:
            break
        assert_added(buffer, before, dw, torch.float64, times=3)
        assert_close(x.grad, dx, GRADIENT_BOUND[torch.float64], "dx")
        assert_close(bias.grad, db, GRADIENT_BOUND[torch.float64], "db")
    assert nth > 1


@pytest.mark.parametrize("error", [KernelFailure, torch.cuda.OutOfMemoryError])
def test_a_forward_that_failed_with_a_part_added_says_so(monkeypatch, error):
    """In its first chunk it runs again without the kernel, in a later one it names the buffer."""
    x, weight, target, *_ = Case(tokens=48, ignored=0.0).tensors()
    buffer, before = filled(weight, torch.float64)
    call = dict(weight_grad_buffer=buffer, **SCHEDULES["single_pass, chunks"])
    assert liger_cutedsl.explain(x, weight, target, **call).chunk == 16
    with monkeypatch.context() as planted:
        planted.setattr(TorchEngine, "exp_chunk", failing_at(2, TorchEngine.exp_chunk, error))
        with pytest.raises(RuntimeError, match=f"weight_grad_buffer holds a part.*{error.__name__}: planted"):
            fused_linear_cross_entropy(x, weight, target, **call)
    assert not torch.equal(buffer, before)
    buffer.copy_(before)
    if error is KernelFailure:
        with monkeypatch.context() as planted:
            planted.setattr(TorchEngine, "exp_chunk", failing_at(1, TorchEngine.exp_chunk, error))
            fused_linear_cross_entropy(x, weight, target, **call).backward()
        _, (_, want, _) = reference(x, weight, target, None, None, LossOptions())
        assert_added(buffer, before, want, torch.float64, times=3)


def test_a_gradient_that_was_added_in_vain_is_warned_of():
    x, weight, target, *_ = Case().tensors()
    call = dict(weight_grad_buffer=torch.zeros_like(weight).detach(), schedule="single_pass")
    loss = fused_linear_cross_entropy(x, weight, target, **call)
    words = "dropped without a backward, and weight_grad_buffer keeps its gradient"
    with pytest.warns(RuntimeWarning, match=words) as given:
        del loss
        gc.collect()
    assert [warning.filename for warning in given] == [__file__]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for schedule in ("single_pass", "recompute"):
            loss = fused_linear_cross_entropy(x, weight, target, **dict(call, schedule=schedule))
            if schedule == "single_pass":
                loss.backward()
            del loss
            gc.collect()
    assert not seen


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_activation_checkpointing(reentrant):
    x, weight, target, *_ = Case().tensors()
    _, (dx, want, _) = reference(x, weight, target, None, None, LossOptions())
    buffer, before = filled(weight, torch.float64)

    def loss(x, **call):
        return fused_linear_cross_entropy(x * 1.0, weight, target, weight_grad_buffer=buffer, **call)

    checkpoint(loss, x, use_reentrant=reentrant).backward()
    assert_added(buffer, before, want, torch.float64)
    assert_close(x.grad, dx, GRADIENT_BOUND[torch.float64], "dx")
    if not reentrant:
        loss(x.detach(), schedule="single_pass").backward()  # whose plan is known then
        buffer.copy_(before)
        with pytest.raises(RuntimeError, match="weight_grad_buffer would get its gradient twice"):
            checkpoint(loss, x, use_reentrant=False, schedule="single_pass")
        assert torch.equal(buffer, before)
        return
    buffer.copy_(before)
    checkpoint(lambda x: loss(x, schedule="single_pass"), x, use_reentrant=True).backward()
    assert_added(buffer, before, want, torch.float64, times=3)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Each replay adds. What would have to be read in backward is refused while the graph is captured."""
    x, weight, target, *_ = Case(300, 64, 5000, dtype=torch.bfloat16, device="cuda", ignored=0.0).tensors()
    buffer = torch.zeros_like(weight, dtype=torch.float32).detach()

    def step(schedule):
        call = dict(weight_grad_buffer=buffer, engine="cute", schedule=schedule)
        fused_linear_cross_entropy(x, weight, target, **call).backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step("auto")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step("auto")
        with pytest.raises(RuntimeError, match="not in a CUDA graph"):
            step("single_pass")
    _, (_, want, _) = reference(x, weight, target, None, None, LossOptions())
    buffer.zero_()
    for times in (1, 2):
        graph.replay()
        assert_added(buffer, torch.zeros_like(want), times * want, torch.bfloat16, times=2, engine="cute")


def parameter(weight, dtype=torch.float32, **attributes):
    weight = torch.nn.Parameter(weight.detach().clone())
    weight.main_grad = torch.zeros(weight.shape, dtype=dtype)
    for name, value in attributes.items():
        setattr(weight, name, value)
    return weight


@pytest.mark.parametrize("schedule", ["default", "single_pass"])
def test_main_grad_as_megatron_has_it(schedule):
    """With a hook that adds what is in .grad unless it was added, as Megatron-Core's data-parallel wrapper has one."""
    x, weight, target, *_ = Case(dtype=torch.bfloat16).tensors()
    weight, seen = parameter(weight, grad_added_to_main_grad=False), []

    def hook(*_):
        seen.append((weight.grad, weight.grad_added_to_main_grad))
        if weight.grad is not None and not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(hook)
    _, (_, want, _) = reference(x, weight, target, None, None, LossOptions())
    for step in (1, 2):
        call = dict(gradient_accumulation_fusion=True, **SCHEDULES[schedule])
        fused_linear_cross_entropy(x, weight, target, **call).backward()
        assert seen == [(None, True)] * step and weight.grad is None
        assert_added(weight.main_grad, torch.zeros(()), step * want, torch.bfloat16, times=3)
    plain = parameter(weight)
    fused_linear_cross_entropy(x, plain, target, gradient_accumulation_fusion=True).backward()
    assert not hasattr(plain, "grad_added_to_main_grad") and plain.main_grad.any()


def test_a_tied_weight_keeps_its_other_gradient():
    """An embedding's, through the same parameter."""
    case = Case(dtype=torch.float64)
    x, weight, target, *_ = case.tensors()
    weight = parameter(weight, torch.float64)
    (x + weight[0]).pow(2).sum().backward()
    other = weight.grad.clone()
    weight.grad = x.grad = None
    hidden = x + weight[0]
    loss = fused_linear_cross_entropy(hidden, weight, target, gradient_accumulation_fusion=True)
    (loss + hidden.pow(2).sum()).backward()
    leaf = (x + weight[0]).detach().requires_grad_()
    _, (dx, want, _) = reference(leaf, weight, target, None, None, LossOptions())
    assert_close(weight.grad[0], other[0] + dx.sum(dim=0), 1e-9, "the embedding's")
    assert_added(weight.main_grad, torch.zeros(()), want, torch.float64)


def test_what_is_refused_by_name():
    x, weight, target, *_ = Case(dtype=torch.bfloat16).tensors()
    float64 = Case(dtype=torch.float64).tensors()
    shape = weight.shape
    for words, error, arguments in (
        ("weight's shape", ValueError, dict(weight_grad_buffer=torch.zeros(shape[1], shape[0]))),
        (
            "must be bfloat16 or float32 .* got torch.float16",
            TypeError,
            dict(weight_grad_buffer=torch.zeros(shape).half()),
        ),
        ("contiguous", ValueError, dict(weight_grad_buffer=torch.zeros(shape[1], shape[0]).t())),
        ("must not require", ValueError, dict(weight_grad_buffer=torch.zeros(shape, requires_grad=True))),
        ("on x's device", ValueError, dict(weight_grad_buffer=torch.zeros(shape, device="meta"))),
        ("torch.Tensor or None", TypeError, dict(weight_grad_buffer=[1.0])),
        ("shares memory with weight", ValueError, dict(weight_grad_buffer=weight.detach())),
        ("has no memory", RuntimeError, dict(weight_grad_buffer=freed(shape))),
        ("pass one", ValueError, dict(weight_grad_buffer=torch.zeros(shape), gradient_accumulation_fusion=True)),
        ("weight.main_grad, and this weight has none", ValueError, dict(gradient_accumulation_fusion=True)),
        ("True or False", TypeError, dict(gradient_accumulation_fusion=1)),
    ):
        for function in (fused_linear_cross_entropy, fused_linear_log_probs, liger_cutedsl.explain):
            with pytest.raises(error, match=words):
                function(x, weight, target, **arguments)
        with pytest.raises(error, match=words):
            fused_linear_loss(x, weight, target, lambda values: -values.log_prob, **arguments)
    with pytest.raises(TypeError, match="must be float64"):
        fused_linear_cross_entropy(*float64[:3], weight_grad_buffer=torch.zeros(shape))
    frozen = weight.detach()
    with pytest.raises(ValueError, match="weight_grad_buffer is for a weight that requires a gradient"):
        fused_linear_cross_entropy(x, frozen, target, weight_grad_buffer=torch.zeros(shape))
    with pytest.raises(ValueError, match="gradient_accumulation_fusion=True is for a weight that requires"):
        fused_linear_cross_entropy(x, frozen, target, gradient_accumulation_fusion=True)
    with pytest.raises(RuntimeError, match="reduction='none'"):
        call = dict(weight_grad_buffer=torch.zeros(shape), schedule="single_pass", reduction="none")
        fused_linear_cross_entropy(x, weight, target, **call)
    with torch.device("meta"):
        tensors = torch.empty(5, 8), torch.empty(20, 8, requires_grad=True), torch.empty(5, dtype=torch.int64)
        buffer = torch.empty(20, 8)
    with pytest.raises(TypeError, match=r"weight_grad_buffer takes no gradient .* of fake or meta"):
        fused_linear_cross_entropy(*tensors, weight_grad_buffer=buffer)
    assert liger_cutedsl.explain(*tensors[:2], weight_grad_buffer=buffer).schedule == "recompute"
    with pytest.raises(RuntimeError, match="memory went away"):
        buffer = torch.zeros(shape)
        loss = fused_linear_cross_entropy(x, weight, target, weight_grad_buffer=buffer)
        buffer.untyped_storage().resize_(0)
        loss.backward()


def freed(shape):
    tensor = torch.zeros(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("schedule", ["recompute", "single_pass"])
def test_nothing_of_the_size_of_dw_is_allocated(schedule):
    """H is larger than the number of tokens, so that dW is the largest there could be: tiles and chunks are smaller."""
    x, weight, target, bias, _ = Case(40, 64, 1500, dtype=torch.float32, bias=True).tensors()
    call = dict(bias=bias, **SCHEDULES[schedule])
    buffer = torch.zeros(weight.shape)

    def step(**more):
        with Recorder() as recorder:
            fused_linear_cross_entropy(x, weight, target, **call, **more).backward()
        return recorder.largest

    assert step() >= weight.numel(), "without the buffer there is a dW, or this test sees nothing"
    assert step(weight_grad_buffer=buffer) < weight.numel()


@pytest.mark.parametrize("situation", ["plain", "half ignored", "autocast", "narrow buffer"])
@pytest.mark.parametrize("schedule", ["default", "small", "kept", "single_pass"])
def test_bytes_are_as_promised(schedule, situation):
    """What explain() says, counted by an allocator: a dW, of 24 MiB, gives no room to what comes before it."""
    route = dict(SCHEDULES, small=dict(schedule="recompute", workspace_mb=20)).get(schedule)
    narrow = situation == "narrow buffer"
    hidden = 128 if situation == "autocast" else 384  # what a tile casts is counted as of the widest
    case = Case(256, hidden, 16384, dtype=torch.bfloat16 if narrow else torch.float32, ignored=0.0, bias=True)
    x, weight, target, bias, _ = case.tensors()
    if situation == "half ignored":
        target[:128] = -100
    buffer = torch.zeros(weight.shape, dtype=weight.dtype)
    call = dict(bias=bias, weight_grad_buffer=buffer, **route)
    if narrow and schedule != "small":
        pytest.skip("PyTorch widens all of a 16-bit buffer on a CPU to add to it, and a tile's of it elsewhere")

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=situation == "autocast"):
            fused_linear_cross_entropy(x, weight, target, **call).backward()

    step()
    x.grad = bias.grad = None
    counted = peak_bytes("cpu", step) - x.numel() * x.itemsize - bias.numel() * bias.itemsize
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=situation == "autocast"):
        route = liger_cutedsl.explain(x, weight, target, **call)
    assert abs(route.workspace_bytes - counted) <= max(0.03 * counted, 8 * MIB), (
        f"predicted {route.workspace_bytes / MIB:.1f} MiB, counted {counted / MIB:.1f}: {route}"
    )
    assert weight.grad is None


@pytest.mark.parametrize("schedule", ["default", "kept", "recompute"])
def test_log_probabilities(schedule):
    """With an entropy, and columns that all rows ask for, some of them twice: the buffer gets theirs too, once."""
    x, weight, target, bias, _ = Case(bias=True, vocab=700).tensors()
    ids = torch.tensor([5, 699, 5, 0])
    asked = dict(bias=bias, return_entropy=True, selected_token_ids=ids, temperature=0.8, **SCHEDULES[schedule])

    def total(**more):
        out = fused_linear_log_probs(x, weight, target, **asked, **more)
        weights = torch.linspace(0.5, 1.5, len(target), dtype=torch.float64)
        return ((out.log_probs + 0.3 * out.entropy) * weights).sum() + 0.2 * out.selected_log_probs.square().sum()

    want = torch.autograd.grad(total(), (x, weight, bias))
    buffer, before = filled(weight, torch.float64)
    loss = total(weight_grad_buffer=buffer)
    with pytest.MonkeyPatch.context() as planted, pytest.raises(torch.cuda.OutOfMemoryError):
        planted.setattr(Rows, "spread", failing_at(1, Rows.spread, torch.cuda.OutOfMemoryError))
        loss.backward(retain_graph=True)
    dx, dw, db = gradients(loss, (x, weight, bias))
    assert dw is None
    assert_added(buffer, before, want[1], torch.float64, times=2)
    assert_close(dx, want[0], 1e-9, "dx")
    assert_close(db, want[2], 1e-9, "db")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_of_ones_own(schedule):
    """Its derivatives are there in backward too, of all chunks, where another upstream gradient comes."""
    x, weight, target, *_ = Case(tokens=50).tensors()
    scale = torch.linspace(0.5, 1.5, 50, dtype=torch.float64)

    def row_loss(values, scale):
        return -values.log_prob * scale + 0.1 * values.entropy + 0.01 * values.lse.square() + 0.2 * values.mean_logit

    def loss(**more):
        return fused_linear_loss(x, weight, target, row_loss, scale, **SCHEDULES[schedule], **more)

    (want,) = torch.autograd.grad(loss(), weight, torch.tensor(-2.0, dtype=torch.float64))
    buffer, before = filled(weight, torch.float64)
    (dw,) = gradients(loss(weight_grad_buffer=buffer), (weight,), torch.tensor(-2.0, dtype=torch.float64))
    assert dw is None
    assert_added(buffer, before, want, torch.float64, times=5)


@pytest.mark.filterwarnings("ignore:a workspace of")
def test_a_statistic_that_only_a_later_chunk_reads():
    """A part is added by then: that is said, and the next call knows."""
    x, weight, target, *_ = Case(tokens=40, ignored=0.0, dtype=torch.float32).tensors()
    buffer = torch.zeros_like(weight).detach()

    def late(values):
        few = values.log_prob.shape[0] < 16 and values.log_prob.dtype == torch.float32
        return -values.log_prob + (values.entropy if few else 0.0)

    def call():
        how = dict(schedule="single_pass", workspace_mb=0.001)  # chunks of 16, 16 and 8
        return fused_linear_loss(x, weight, target, late, weight_grad_buffer=buffer, **how)

    with pytest.raises(RuntimeError, match="weight_grad_buffer holds a part of the gradient of a forward that failed"):
        call()
    buffer.zero_()
    call().backward()
    assert weight.grad is None and float(buffer.norm()) > 0


@pytest.mark.parametrize("upstream", [1.0, 3.0])  # of which single_pass adds what is missing in backward
@pytest.mark.parametrize("schedule", ["default", "single_pass"])
def test_with_frozen_inputs_and_under_autocast(schedule, upstream):
    x, weight, target, bias, _ = Case(bias=True, dtype=torch.float32).tensors()
    rounded = (v.detach().bfloat16() for v in (x, weight))
    _, (_, want, db) = reference(*rounded, target, bias, None, LossOptions())
    buffer, before = filled(weight, torch.float32)
    call = dict(bias=bias, weight_grad_buffer=buffer, **SCHEDULES[schedule])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused_linear_cross_entropy(x.detach(), weight, target, **call)
    (upstream * loss).backward()
    assert weight.grad is None
    # operands are rounded, and so in the reference; the torch engine's dz and sums are float32
    assert_added(buffer, before, upstream * want, torch.float32, times=3)
    assert_close(bias.grad, upstream * db, GRADIENT_BOUND[torch.float32], "db")


@pytest.mark.parametrize("schedule", ["default", "recompute", "single_pass"])
def test_a_loss_scale_reaches_a_wide_buffer_whole(schedule):
    """float16: what is too small for it before the scale, and too large after it, is there in float32. What single_pass
    has added for 1 leaves its own rounding, where less is asked for.
    """
    x, weight, target, *_ = Case(dtype=torch.float16, ignored=0.0).tensors()
    call = dict(SCHEDULES[schedule])
    _, (_, of_one, _) = reference(x, weight, target, None, None, LossOptions())
    for scale in (2.0**-14, 2.0**20):
        buffer, upstream = torch.zeros(weight.shape), torch.tensor(scale)
        fused_linear_cross_entropy(x, weight, target, weight_grad_buffer=buffer, **call).backward(upstream)
        size = float(of_one.norm()) * max(scale, 1.0 if schedule == "single_pass" else 0.0)
        assert_close(buffer, scale * of_one, GRADIENT_BOUND[torch.float32], "dW", size=size)


def test_a_buffer_comes_between_two_graphs():
    """A graph does not hold it: the call runs between two, as over ranks, and fullgraph=True is refused by name."""
    torch._dynamo.reset()
    x, weight, target, *_ = Case().tensors()
    buffer, before = filled(weight, torch.float64)

    def loss(x):
        return 2.0 * fused_linear_cross_entropy(torch.tanh(x), weight, target, weight_grad_buffer=buffer)

    eager, want = buffer.clone(), None
    loss(x).backward()
    want, dx = buffer.double() - eager, x.grad.clone()
    x.grad = None
    buffer.copy_(before)
    torch.compile(loss, backend="eager")(x).backward()
    assert_added(buffer, before, want, torch.float64)
    assert_close(x.grad, dx, 1e-9, "dx")
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="weight_grad_buffer takes no gradient"):
        torch.compile(loss, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("options", [{}, dict(bias=True)])
def test_what_is_planned(options):
    """explain() takes both arguments: the default computes all in backward, single_pass has to be asked for."""
    x, weight, target, bias, _ = Case(**options, dtype=torch.bfloat16).tensors()
    buffer = torch.zeros(weight.shape)
    route = liger_cutedsl.explain(x, weight, target, bias=bias, weight_grad_buffer=buffer)
    assert route.schedule == "recompute" and "weight_grad_buffer gets its gradient in backward" in route.reason
    assert route.kept == len(weight) and route.gemms == 3
    small = liger_cutedsl.explain(x, weight, target, bias=bias, weight_grad_buffer=buffer, workspace_mb=0.01)
    assert small.kept == 0 and small.gemms == 4
    weight.main_grad = buffer
    forced = dict(schedule="single_pass", gradient_accumulation_fusion=True, accum_dtype=torch.float64)
    route = liger_cutedsl.explain(x, weight, target, bias=bias, **forced)
    assert route.schedule == "single_pass" and route.gemms == 3 and route.dw_sum == torch.float32


@pytest.mark.parametrize("ranks", [2])
def test_over_ranks(tmp_path, ranks):
    run_ranks("weight_grad_worker", tmp_path, ranks)

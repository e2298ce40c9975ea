"""Schedules, their budget, and dropped rows: what is chosen, what it allocates, and that every choice is right."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

import liger_cutedsl
from liger_cutedsl import LossOptions, fused_linear_cross_entropy, testing, tiling
from liger_cutedsl.call import TENSORS, Problem, WantedGradients
from liger_cutedsl.engines import torch_engine
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.route import Settings
from liger_cutedsl.rows import TargetCheck
from liger_cutedsl.saved_state import put_together
from liger_cutedsl.schedules import dw_sum, recompute, single_pass
from liger_cutedsl.schedules.schedule import Task
from per_token import peak_of
from reference import GRADIENT_BOUND, Case, assert_close, check_case, reference

X, W = torch.randn(2000, 64, requires_grad=True), torch.randn(20000, 64, requires_grad=True)


@pytest.mark.parametrize("tokens", [511, 512, 513, 1100])
def test_chunks_of_tokens(place, tokens):
    """Several chunks, the last one short: a budget below one chunk's needs leaves the smallest chunk, 512."""
    if place.schedule == "recompute":
        pytest.skip("recompute has no chunks")
    with_options = [dict(label_smoothing=0.1), dict(softcap=8.0), dict(label_smoothing=0.1, softcap=8.0)]
    with_options = [dict(options, use_token_scaling=True) for options in with_options]
    for options in ({}, *with_options):
        case = Case(tokens=tokens, vocab=500, dtype=place.dtypes[0], device=place.device, bias=True, options=options)
        case.ignored = 0.0
        check_case(case, engine=place.engine, schedule="single_pass", workspace_mb=0.01)


def test_budget_decides_between_schedules():
    routes = [liger_cutedsl.explain(X, W, workspace_mb=mb) for mb in (500, 100, 20, 4)]
    assert [r.schedule for r in routes] == ["single_pass", "single_pass", "recompute", "recompute"]
    assert routes[0].chunk == 2000 and 512 <= routes[1].chunk < 2000
    assert routes[2].tile_width > routes[3].tile_width
    for route, mb in zip(routes, (500, 100, 20, 10), strict=True):
        assert route.workspace_bytes <= mb * 2**20
    assert [r.gemms for r in routes[:2]] == [3, 3]
    assert all(r.gemms == 4 - r.kept / 20000 for r in routes[2:])
    assert "does not fit 20 MiB" in routes[2].reason
    assert "3 GEMMs" in str(routes[0]) and "MiB workspace" in str(routes[0])


def test_a_wider_accumulator_counts_against_the_budget():
    x, weight = X.detach().bfloat16().requires_grad_(), W.detach().bfloat16().requires_grad_()
    plain = liger_cutedsl.explain(x, weight, workspace_mb=58)
    wide = liger_cutedsl.explain(x, weight, workspace_mb=58, accum_dtype=torch.float32)
    assert plain.schedule == wide.schedule == "single_pass"
    assert wide.workspace_bytes > 20000 * 64 * 4
    assert wide.chunk < plain.chunk


def test_explain_counts_the_gemms_that_run():
    assert liger_cutedsl.explain(X, W.detach()).gemms == 2
    call = dict(schedule="recompute", workspace_mb=20)
    assert liger_cutedsl.explain(X, W.detach(), **call).gemms == 3
    assert liger_cutedsl.explain(X.detach(), W, **call).gemms == 3 - 576 / 20000
    assert liger_cutedsl.explain(X.detach(), W, schedule="recompute").gemms == 2
    with torch.no_grad():
        assert liger_cutedsl.explain(X, W).gemms == 1
        assert liger_cutedsl.explain(X, W).schedule == "recompute"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("entrance", ["argument", "variable", "class", "functions"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_budget_reaches_the_memory_of_every_entrance(entrance, reduction, compiled, monkeypatch):
    """A budget 64 times as large, by workspace_mb, its variable or Liger's chunk_mem_const, takes more memory."""
    from liger_cutedsl import LigerFusedLinearCrossEntropyFunction
    from liger_cutedsl.liger.operators import fused_linear_cross_entropy_forward
    from test_autograd import peak_bytes

    if entrance == "functions" and (compiled or reduction == "none"):
        pytest.skip("Liger's functions return eager mode's gradients of a scalar")
    x, weight = torch.randn(256, 32, requires_grad=True), torch.randn(8192, 32, requires_grad=True)
    target = torch.randint(0, 8192, (256,))
    if entrance in ("class", "functions"):
        monkeypatch.setenv("LIGER_CUTEDSL_WORKSPACE_MB", "0.5")

    def run(times):
        if entrance == "argument":
            return fused_linear_cross_entropy(x, weight, target, reduction=reduction, workspace_mb=0.5 * times)
        if entrance == "variable":
            return fused_linear_cross_entropy(x, weight, target, reduction=reduction)
        if entrance == "class":
            options = (None, None, -100, 0.0, 0.0, reduction, None, False, None, False, False, False, None, None)
            return LigerFusedLinearCrossEntropyFunction.apply(x, weight, target, *options, times)[0]
        return fused_linear_cross_entropy_forward(x, weight, target, reduction=reduction, chunk_mem_const=times)[0]

    def peak(times):
        if entrance == "variable":
            monkeypatch.setenv("LIGER_CUTEDSL_WORKSPACE_MB", str(0.5 * times))
        torch._dynamo.reset()
        call = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run

        def step():
            loss = call(times).sum()
            return loss.backward() if loss.requires_grad else None

        step()
        return peak_bytes("cpu", step)

    few, many = peak(1), peak(64)
    # the exponentials of all of the vocabulary; in a graph, what "none" recomputes in wider tiles
    assert many > few + 3 * 2**20, (few, many)


def test_too_small_a_budget_warns_and_runs():
    x, weight = torch.randn(5000, 64, requires_grad=True), torch.randn(3001, 64, requires_grad=True)
    target = torch.randint(0, 3001, (5000,))
    with pytest.warns(RuntimeWarning, match="0.001 MiB holds no schedule"):
        fused_linear_cross_entropy(x, weight, target, workspace_mb=0.001).backward()


def test_forced_single_pass_that_cannot_run_is_an_error():
    with pytest.raises(RuntimeError, match=r"'single_pass' was asked for but cannot run.*reduction='none'"):
        fused_linear_cross_entropy(X, W, torch.zeros(2000, dtype=torch.long), reduction="none", schedule="single_pass")
    assert liger_cutedsl.explain(X, W, reduction="none").schedule == "recompute"


def test_a_wide_accumulator_rounds_the_weight_gradient_once(place):
    """Of eight chunks: as accurate as one, where summing them in 16 bits is not."""
    if place.schedule != "auto":
        pytest.skip("recompute has no chunks")
    x, weight, target, *_ = Case(4096, 32, 300, dtype=torch.bfloat16, device=place.device, ignored=0.0).tensors()
    _, (_, expected, _) = reference(x, weight, target, None, None, LossOptions())

    def error(**call):
        loss = fused_linear_cross_entropy(x, weight, target, engine=place.engine, schedule="single_pass", **call)
        return float((torch.autograd.grad(loss, weight)[0].double() - expected).norm() / expected.norm())

    once = error()
    assert error(workspace_mb=0.01, accum_dtype=torch.float32) < 1.1 * once
    assert error(workspace_mb=0.01) > 1.3 * once


def test_dw_has_a_better_sum_where_it_would_be_rounded_often(place, monkeypatch):
    """Of ten chunks, float32 where that fits beside a chunk, else two parts where they do: without accum_dtype."""
    monkeypatch.setattr(dw_sum, "ROUNDED_AS_OFTEN", 0)  # else only later ones of more than twelve
    testing.reset()
    if place.schedule != "auto":
        pytest.skip("recompute has no chunks")
    x, weight, target, *_ = Case(5120, 32, 300, dtype=torch.bfloat16, device=place.device, ignored=0.0).tensors()
    _, (_, expected, _) = reference(x, weight, target, None, None, LossOptions())
    call = dict(engine=place.engine, schedule="single_pass")
    smallest = liger_cutedsl.explain(x, weight, target, workspace_mb=0.01, **call)
    assert smallest.chunk == 512 and smallest.dw_sum == torch.bfloat16

    def error(**call):
        loss = fused_linear_cross_entropy(x, weight, target, **call)
        return float((torch.autograd.grad(loss, weight)[0].double() - expected).norm() / expected.norm())

    # while it is summed in float32, its 16 bits are not there yet
    once, wide = error(**call), (smallest.workspace_bytes + 300 * 32 * 2) / 2**20
    route = liger_cutedsl.explain(x, weight, target, workspace_mb=wide, **call)
    assert route.chunk == 512 and route.dw_sum == torch.float32
    assert route.workspace_bytes == wide * 2**20
    assert error(workspace_mb=wide, **call) < 1.1 * once
    # a byte less, and 8 bits a number more do, which have half of float32's bytes
    two_parts = (smallest.workspace_bytes + 300 * 32) / 2**20
    for given in (wide - 1 / 2**20, two_parts):
        route = liger_cutedsl.explain(x, weight, target, workspace_mb=given, **call)
        assert route.dw_sum == torch.bfloat16 and route.dw_low_bytes == 300 * 32
        assert error(workspace_mb=given, **call) < 1.1 * once
    assert route.workspace_bytes == two_parts * 2**20
    assert error(workspace_mb=two_parts - 1 / 2**20, **call) > 1.3 * once


def test_a_softcap_with_label_smoothing_stores_no_exponentials():
    both = dict(softcap=8.0, label_smoothing=0.1)
    for options, stored in ((dict(softcap=1.0), True), (dict(label_smoothing=0.1), True), (both, False)):
        problem = Problem(X.detach(), W.detach(), torch.zeros(2000, dtype=torch.long))
        problem = replace(problem, options=LossOptions(**options))
        task = Task(problem, WantedGradients.of(problem), Settings())
        assert (single_pass.obstacle(TorchEngine(torch.bfloat16), task) is None) == stored
        assert (liger_cutedsl.explain(X, W, schedule="recompute", **options).kept > 0) == stored
    # where it is asked for all the same, a second GEMM takes their place
    assert liger_cutedsl.explain(X, W, schedule="single_pass", **both).gemms == 4


def test_targets_outside_a_part_of_the_vocabulary_are_no_column_of_it():
    problem = Problem(X.detach()[:5], W.detach()[:100], torch.tensor([0, 39, 40, 99, -100]))
    assert problem.of_columns(slice(0, 40)).target.tolist() == [0, 39, -1, -1, -1]
    assert problem.of_columns(slice(40, None)).target.tolist() == [-1, -1, 0, 59, -1]


def test_single_pass_releases_its_gradients_in_backward():
    x, weight = torch.randn(40, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    loss = fused_linear_cross_entropy(x, weight, torch.randint(0, 300, (40,)), schedule="single_pass")
    state = loss.grad_fn.state
    kept = weakref.ref(state.gradients.weight)
    storage = state.gradients.weight.data_ptr()
    loss.backward()
    assert state.gradients is None
    assert weight.grad.data_ptr() == storage, "the gradient was copied on its way to weight.grad"
    weight.grad = None
    gc.collect()
    assert kept() is None


def test_single_pass_keeps_no_inputs():
    """An optimizer may change a weight between forward and backward: the gradient is there already."""
    x, weight = torch.randn(40, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    loss = fused_linear_cross_entropy(x, weight, torch.randint(0, 300, (40,)), schedule="single_pass")
    with torch.no_grad():
        weight.mul_(2.0)
    loss.backward()
    assert weight.grad is not None
    loss = fused_linear_cross_entropy(x, weight, torch.randint(0, 300, (40,)), schedule="recompute")
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def few_rows_at_a_time(monkeypatch):
    """A forward alone takes 32 rows at a time, on any engine, however little that saves."""
    for module in (torch_engine, tiling):
        monkeypatch.setattr(module, "FORWARD_ROWS", 32)
    monkeypatch.setattr(recompute, "FORWARD_BYTES", 0)
    monkeypatch.setattr(tiling, "SLICES_COST", 100.0)
    tiling.WaveModel.forward_rows.cache_clear()
    testing.reset()
    yield
    tiling.WaveModel.forward_rows.cache_clear()
    testing.reset()


def forward_of_all_kinds(place, case, call):
    """Results of each operator without gradients, flat."""
    x, weight, target, bias, _ = case.tensors()
    asked = dict(bias=bias, softcap=5.0, **call)
    extra = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    ids = torch.tensor([3, 0, 3], device=place.device)
    a = torch.linspace(-1, 1, case.tokens, device=place.device)
    with torch.no_grad():
        found = liger_cutedsl.fused_linear_log_probs(
            x, weight, target, selected_token_ids=ids, **{f"return_{name}": True for name in extra}, **asked
        )
        loss = fused_linear_cross_entropy(x, weight, target, return_predicted_tokens=True, **asked)
        own = liger_cutedsl.fused_linear_loss(
            x, weight, target, lambda v, a: (v.entropy * a - v.log_prob, v.argmax), a, **asked
        )
    return [*found, loss.loss, loss.predicted_tokens, own.loss, *own.aux]


def test_a_forward_alone_in_slices_of_rows(place, few_rows_at_a_time, monkeypatch):
    """What all rows at once give, to the bit on the CuTe engine, whose tiles know nothing of their neighbours; on the
    torch engine a product of fewer rows may be summed in another order."""
    case = Case(tokens=131, vocab=500, dtype=place.dtypes[0], device=place.device, bias=True, ignored=0.02)
    call = dict(engine=place.engine, schedule="recompute", workspace_mb=place.workspace_mb)
    with torch.no_grad():
        assert liger_cutedsl.explain(*case.tensors()[:2], **call).chunk == 32
    sliced = forward_of_all_kinds(place, case, call)
    monkeypatch.setattr(recompute, "FORWARD_BYTES", 2**40)
    testing.reset()  # plans are remembered
    with torch.no_grad():
        assert liger_cutedsl.explain(*case.tensors()[:2], **call).chunk == 0
    for part, whole in zip(sliced, forward_of_all_kinds(place, case, call), strict=True):
        if place.engine == "cute" or not part.is_floating_point():
            assert torch.equal(part, whole)
        else:
            assert_close(part, whole.double(), 64 * torch.finfo(part.dtype).eps, "forward in slices", size=40.0)


def test_a_forward_alone_in_slices_takes_what_a_slice_takes(few_rows_at_a_time, monkeypatch):
    """As predicted, and less than all rows at once."""
    for module in (torch_engine, tiling):
        monkeypatch.setattr(module, "FORWARD_ROWS", 512)
    x, weight, target = torch.randn(4096, 64), torch.randn(8192, 64), torch.randint(0, 8192, (4096,))

    def peak():
        call = lambda: liger_cutedsl.fused_linear_log_probs(x, weight, target, return_entropy=True)  # noqa: E731
        call()
        return peak_of(call), liger_cutedsl.explain(x, weight, log_probs=True, return_entropy=True)

    sliced, route = peak()
    monkeypatch.setattr(recompute, "FORWARD_BYTES", 2**40)
    testing.reset()  # plans are remembered
    whole, other = peak()
    assert route.chunk == 512 and route.tile_width == other.tile_width
    assert 7 * route.workspace_bytes < other.workspace_bytes and 6 * sliced < whole
    for counted, promised in ((sliced, route), (whole, other)):
        assert abs(counted - promised.workspace_bytes) <= 0.03 * counted + 40 * 4 * 4096


def test_recompute_keeps_exponentials_in_the_memory_of_dw():
    x, weight = torch.randn(40, 64, requires_grad=True), torch.randn(1000, 64, requires_grad=True)
    target = torch.randint(0, 1000, (40,))
    call = dict(schedule="recompute", workspace_mb=0.05)
    kept = liger_cutedsl.explain(x, weight, target, **call).kept
    assert kept == 576  # of at most 1000·64/(40 + 64), in tiles of 192
    loss = fused_linear_cross_entropy(x, weight, target, **call)
    lent = put_together(loss.grad_fn.state, loss.grad_fn.saved_tensors[len(TENSORS) + 1 :]).kept
    e, memory = lent.e, lent.weight_gradient.data_ptr()
    assert e.untyped_storage().data_ptr() == lent.weight_gradient.untyped_storage().data_ptr()
    assert e.data_ptr() >= lent.weight_gradient[kept:].data_ptr(), "dW's first rows reach into the exponentials"
    logits = x.detach() @ weight.detach().t()
    largest = logits[:, 192:384].amax(dim=1, keepdim=True)
    torch.testing.assert_close(e[:, 192:384], torch.exp(logits[:, 192:384] - largest))
    del e, lent
    loss.backward()
    assert weight.grad.data_ptr() == memory, "the gradient was copied on its way to weight.grad"
    assert loss.grad_fn.state.kept.waiting.taken


def test_recompute_keeps_all_exponentials_that_fit_the_budget():
    needed = liger_cutedsl.explain(X, W, schedule="recompute", workspace_mb=1000).workspace_bytes
    for mb, kept in ((needed / 2**20, 20000), ((needed - 1) / 2**20, 576)):
        route = liger_cutedsl.explain(X, W, schedule="recompute", workspace_mb=mb)
        assert route.kept == kept and route.gemms == 4 - kept / 20000
    assert liger_cutedsl.explain(X, W, reduction="none").gemms == 3
    frozen = liger_cutedsl.explain(X, W.detach(), schedule="recompute", workspace_mb=20)
    assert frozen.kept == 0, "no dW, no memory to lend"


@pytest.mark.parametrize("options", [dict(softcap=8.0), dict(label_smoothing=0.1)], ids=["softcap", "smoothing"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_recompute_without_its_exponentials(place, reduction, options):
    """They serve one backward. Those that keep the graph, and any that comes after, recompute everything."""
    if place.schedule != "recompute":
        pytest.skip("about recompute")
    options = dict(reduction=reduction, **options)
    case = Case(tokens=100, hidden=64, vocab=1000, dtype=place.dtypes[0], device=place.device, options=options)
    x, weight, target, *_ = case.tensors()
    loss = fused_linear_cross_entropy(x, weight, target, **place.call, **options)
    upstream = torch.full_like(loss, 2.0)
    bound = GRADIENT_BOUND[case.dtype]
    _, grads = reference(x, weight, target, None, None, LossOptions(**options), upstream)
    for retain in (True, True, False):
        found = torch.autograd.grad(loss, (x, weight), upstream, retain_graph=retain)
        for name, got, want in zip(("dx", "dW"), found, grads, strict=False):
            assert_close(got, want, bound, f"{name}, retain_graph={retain}")


def test_gradients_are_scaled_by_any_upstream_gradient():
    x, weight = torch.randn(40, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    target = torch.randint(0, 300, (40,))
    once = torch.autograd.grad(fused_linear_cross_entropy(x, weight, target), (x, weight))
    for factor in (0.0, -2.0, 1e-3):
        scaled = torch.autograd.grad(factor * fused_linear_cross_entropy(x, weight, target), (x, weight))
        for a, b in zip(once, scaled, strict=True):
            torch.testing.assert_close(b, factor * a)


def test_nothing_is_gathered_when_nothing_is_ignored():
    problem = Problem(X.detach(), W.detach(), torch.randint(0, 20000, (2000,)), None, None, LossOptions())
    check = TargetCheck(problem)
    rows = check.rows()
    compact = check.compact(rows)
    assert compact.x is problem.x and compact.dense and rows.keep is None


@pytest.mark.parametrize("ignored", [0.02, 0.5, 0.98])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_are_dropped_and_put_back(place, ignored, reduction):
    options = dict(reduction=reduction, ignore_index=5, label_smoothing=0.1, lse_square_scale=1e-3)
    case = Case(tokens=300, dtype=place.dtypes[0], device=place.device, bias=True, ignored=ignored, options=options)
    case.ce_weight = True
    dx, *_ = check_case(case, **place.call)
    *_, target, _, _ = case.tensors()
    zero = (dx == 0).all(dim=1)
    assert torch.equal(zero, target == 5)


def test_only_rows_that_count_are_multiplied():
    x, weight = torch.randn(400, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    target = torch.randint(0, 300, (400,))
    target[:399] = -100
    from test_autograd import Recorder

    with Recorder() as recorder:
        fused_linear_cross_entropy(x, weight, target).backward()
    assert recorder.largest <= 400 * 16


def test_rows_with_nan_that_are_ignored_do_no_harm(place):
    x, weight, target, *_ = Case(dtype=place.dtypes[0], device=place.device).tensors()
    poisoned = x.detach().clone()
    poisoned[target == -100] = float("nan")
    poisoned.requires_grad_()
    a = fused_linear_cross_entropy(x, weight, target, **place.call)
    b = fused_linear_cross_entropy(poisoned, weight, target, **place.call)
    for got, want in zip(torch.autograd.grad(b, (poisoned, weight)), torch.autograd.grad(a, (x, weight)), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(a, b)


def test_wave_model_fills_the_machine():
    """132 multiprocessors, N=8192, H=4096: at 66 · 192 columns both GEMMs of a tile are whole waves of blocks."""
    from liger_cutedsl.tiling import WaveModel

    model = WaveModel(multiprocessors=132, tile_m=128, tile_n=192)
    assert model.best_width(128256, 8192, 4096, 13056) == 66 * 192
    assert (8192 // 128) * 66 % 132 == 0 and (66 * 192 // 128) * (4096 // 256) % 132 == 0
    assert model.best_chunk(8192, 128256, 4096, 2048) == 2048
    assert model.best_chunk(4130, 128256, 4096, 2176) == 2176, "34 rows in a third chunk cost as much as 600"
    assert model.best_chunk(4110, 128256, 4096, 2048) == 1408, "three chunks of nearly the same size"
    assert model.best_chunk(8192, 152064, 3584, 1920) == 1664, "not eight, whose dX fills a wave to 85%"
    assert model.best_width(100, 8192, 4096, 13056) % 192 == 0

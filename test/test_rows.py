"""Ignored rows: few are masked where they lie, many dropped, and what such a row holds reaches nothing."""

import pytest
import torch

import liger_cutedsl
from liger_cutedsl import LossOptions, api_explain, fused_linear_cross_entropy, routing, testing
from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.objective import dz_unit, row_weights
from liger_cutedsl.route import Settings
from liger_cutedsl.rows import LARGEST_MASKED, MASKED_SHARE, TargetCheck
from reference import EVERY_OPTION, GRADIENT_BOUND, Case, assert_close, check_case, reference

FEW = 0.5 * MASKED_SHARE  # of the targets


def few_ignored(place, tokens=200, vocab=400, dtype=None, ignore_index=-100, **case):
    """A case with a few ignored targets, and which they are: less than MASKED_SHARE, one at each end."""
    options = dict(case.pop("options", {}), ignore_index=ignore_index)
    dtype = dtype or place.dtypes[0]
    case = Case(tokens, 32, vocab, dtype=dtype, device=place.device, ignored=0.0, options=options, **case)
    tensors, ignored = case.tensors(), torch.zeros(tokens, dtype=torch.bool, device=place.device)
    target, count = tensors[2], int(FEW * tokens)
    if ignore_index >= 0:
        target[target == ignore_index] += 1
    ignored[torch.linspace(0, tokens - 1, count).long()] = True
    target[ignored] = ignore_index
    return case, tensors, ignored


def kept_rows(x, weight, target, bias, ce_weight, options, **settings):
    return TargetCheck(Problem(x, weight, target, bias, ce_weight, LossOptions(**options))).rows()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {**EVERY_OPTION, "ignore_index": 5}], ids=["plain", "all"])
def test_few_ignored_rows_are_masked(place, reduction, options):
    """Loss, metrics and gradients are those of the rows that count; the others have a gradient of exactly zero."""
    options = {**options, "reduction": reduction}
    every = len(options) > 1
    ignore_index = options.pop("ignore_index", -100)
    for dtype in place.dtypes:
        case, tensors, ignored = few_ignored(
            place, dtype=dtype, options=options, ignore_index=ignore_index, bias=every, ce_weight=every
        )
        assert kept_rows(*tensors, case.options).keep is None, "nothing is gathered"
        case.tensors = lambda tensors=tensors: tensors
        dx, *_ = check_case(case, **place.call)
        assert (dx[ignored] == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_masked_rows_leave_no_trace(place, reduction):
    """The same as of a call without them, but for the order in which dW is summed."""
    options = dict(reduction=reduction, label_smoothing=0.1)
    _, (x, weight, target, bias, _), ignored = few_ignored(place, bias=True)

    def gradients(x, target, rows):
        x = x.detach().clone().requires_grad_()
        loss = fused_linear_cross_entropy(x, weight, target, bias=bias, **options, **place.call)
        upstream = None if reduction == "mean" else torch.linspace(0.5, 1.5, len(ignored), device=x.device)[rows]
        dx, *others = torch.autograd.grad(loss, (x, weight, bias), upstream)
        return loss.detach() if reduction == "mean" else loss.detach()[~ignored[rows]], dx[~ignored[rows]], *others

    everything, counting = torch.ones_like(ignored), ~ignored
    found, want = gradients(x, target, everything), gradients(x[counting], target[counting], counting)
    for name, got, expected in zip(("loss", "dx", "dW", "db"), found, want, strict=True):
        assert_close(got, expected.double(), GRADIENT_BOUND[place.dtypes[0]], name)


def test_rows_are_dropped_from_a_share_on(place):
    x, weight, *_ = Case(1000, 32, 400, dtype=place.dtypes[0], device=place.device).tensors()
    most = int(MASKED_SHARE * 1000)
    for count, dropped in ((0, 0), (1, 0), (most, 0), (most + 1, most + 1)):
        target = torch.zeros(1000, dtype=torch.int64, device=place.device)
        target[:count] = -100
        check = TargetCheck(Problem(x, weight, target))
        found = check.rows()
        assert found.dropped == dropped
        assert check.compact(found).valid_rows() == 1000 - count
        assert check.compact(found).dense == (count == 0 or dropped > 0)


BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf, "beyond": 1.5 * LARGEST_MASKED}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_an_ignored_row_holds_reaches_nothing(place, bad, compiled, reduction):
    """NaN or infinity in one feature: 0·NaN would reach dW. Those rows are dropped, few as they are."""
    if compiled and place.schedule != "auto":
        pytest.skip("a graph runs either schedule the same way")
    torch._dynamo.reset()
    run = torch.compile(fused_linear_cross_entropy, backend="aot_eager") if compiled else fused_linear_cross_entropy
    _, (x, weight, target, *_), ignored = few_ignored(place)
    spoilt = x.detach().clone()
    spoilt[ignored.nonzero()[-1, 0], 7] = BAD[bad]
    assert kept_rows(spoilt, weight, target, None, None, {}).dropped == int(ignored.sum())

    def gradients(x):
        x = x.detach().clone().requires_grad_()
        loss = run(x, weight, target, reduction=reduction, **place.call)
        upstream = None if reduction == "mean" else torch.ones_like(loss)
        return torch.autograd.grad(loss, (x, weight), upstream)

    for got, want in zip(gradients(spoilt), gradients(x), strict=True):
        assert_close(got, want.double(), 2 * GRADIENT_BOUND[place.dtypes[0]], "gradient")


def test_a_row_that_counts_may_hold_anything(place):
    """Only ignored rows are looked at: what is not finite elsewhere is the caller's loss."""
    _, (x, weight, target, *_), ignored = few_ignored(place)
    spoilt = x.detach().clone()
    spoilt[int((~ignored).nonzero()[0, 0]), 0] = 2 * LARGEST_MASKED
    assert kept_rows(spoilt, weight, target, None, None, {}).keep is None


def test_the_number_of_rows_that_count_divides_dz_exactly():
    """16-bit dz of a mean is stored in a unit of that number, known behind the first GEMM: masked rows bring no
    bias."""
    target = torch.zeros(2048, dtype=torch.int64)
    target[:8] = -100
    problem = Problem(torch.zeros(2048, 8), torch.zeros(5, 8), target)
    check = TargetCheck(problem)
    masked = check.compact(check.rows())
    assert dz_unit(masked, torch.bfloat16) == 2040 and row_weights(masked).inverse_d == 1 / 2040
    assert dz_unit(check.whole(), torch.bfloat16) == 2040


def test_nothing_is_asked_before_the_first_product(monkeypatch):
    """The host may wait for the number of rows only when the GPU has work."""
    order = []
    count = TargetCheck.count
    from liger_cutedsl.engines.torch_engine import TorchEngine

    exp_chunk, row_statistics = TorchEngine.exp_chunk, TorchEngine.row_statistics
    monkeypatch.setattr(TorchEngine, "exp_chunk", lambda *a, **k: order.append("product") or exp_chunk(*a, **k))
    monkeypatch.setattr(
        TorchEngine, "row_statistics", lambda *a, **k: order.append("product") or row_statistics(*a, **k)
    )
    monkeypatch.setattr(TargetCheck, "count", lambda self: order.append("count") or count(self))
    from liger_cutedsl.engines import make_engine
    from liger_cutedsl.routing import planned
    from liger_cutedsl.schedules import by_name
    from liger_cutedsl.schedules.schedule import Task

    target = torch.arange(50)
    target[3] = -100
    problem = Problem(torch.randn(50, 8), torch.randn(60, 8), target)
    for schedule in ("single_pass", "recompute"):
        order.clear()
        task = Task(TargetCheck(problem).whole(), WantedGradients(torch.float32), Settings(schedule=schedule))
        route = planned(task)[1]
        assert not order, "planning knows nothing of the targets"
        by_name(schedule).forward(make_engine("torch"), task, route)
        assert order[0] == "product" and "count" in order


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["single_pass", "recompute"])
def test_what_came_before_changes_nothing(schedule):
    """A call begins as the last one let expect. The results are the same bits whatever that was."""

    def tensors(ignored, bad=False):
        x, weight, target, *_ = Case(1024, 64, 5000, torch.bfloat16, "cuda", ignored=0.0).tensors()
        target[:ignored] = -100
        if bad:
            with torch.no_grad():
                x[0, 3] = torch.nan
        return x, weight, target

    def gradients(x, weight, target):
        loss = fused_linear_cross_entropy(x, weight, target, engine="cute", schedule=schedule)
        return loss.detach(), *torch.autograd.grad(loss, (x, weight))

    kinds = [tensors(0), tensors(4), tensors(20), tensors(4, bad=True), tensors(512)]
    for now in kinds:
        results = []
        for before in (None, *kinds):
            testing.reset()
            if before is not None:
                gradients(*before)
            results.append(gradients(*now))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
        assert all(torch.isfinite(value).all() for value in results[0])


@pytest.mark.gpu
def test_a_call_with_few_ignored_targets_begins_early():
    x, weight, target, *_ = Case(1024, 64, 5000, torch.bfloat16, "cuda", ignored=0.0).tensors()
    for ignored, next_whole in ((0, True), (4, True), (512, False), (4, True), (0, True)):
        target[:] = 7
        target[:ignored] = -100
        fused_linear_cross_entropy(x, weight, target, engine="cute").backward()
        assert TargetCheck(Problem(x, weight, target)).likely_whole == next_whole


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens, hidden", [(1, 8), (63, 40), (2048, 4096), (5000, 264)])
def test_the_summary_of_targets_on_a_gpu(dtype, tokens, hidden):
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", generator=g).to(dtype)
    weight = torch.empty(100, hidden, device="cuda", dtype=dtype)
    target = torch.randint(3, 90, (tokens,), device="cuda", generator=g)
    target[::50] = -100
    for spoilt in ((), (0,), (tokens - 1) // 50 * 50):
        for value in (torch.nan, torch.inf, -3e4):
            bad = x.clone()
            if spoilt != ():
                bad[spoilt, hidden - 1] = value
            for stored in (bad, bad.t().contiguous().t()):
                check = TargetCheck(Problem(stored, weight, target))
                valid = target[target >= 0].tolist()
                assert check.count() == len(valid)
                if valid:
                    assert check._summary[1:3] == (min(valid), max(valid))
                assert check._summary[3] == (spoilt != ())


@pytest.mark.gpu
def test_a_captured_graph_counts_the_copy_of_x(monkeypatch):
    """Rows that nobody has looked at are zeroed in a copy, and the route says so."""
    x, weight, target, *_ = Case(4096, 1024, 5000, torch.bfloat16, "cuda", ignored=0.01).tensors()
    fused_linear_cross_entropy(x, weight, target, engine="cute").backward()
    seen = []
    from liger_cutedsl import autograd

    planned = autograd.planned
    monkeypatch.setattr(autograd, "planned", lambda *a: seen.append(planned(*a)) or seen[-1])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        fused_linear_cross_entropy(x, weight, target, engine="cute")
    assert seen[-1][1].copied_bytes == x.numel() * 2
    fused_linear_cross_entropy(x, weight, target, engine="cute")
    assert seen[-1][1].copied_bytes == 0


def test_explain_knows_what_a_captured_graph_cannot(monkeypatch):
    """While one is captured no target is read, and a float16 mean takes the schedule that scales on the device."""

    class Unread(TargetCheck):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.readable = self._summary = None

    monkeypatch.setattr(api_explain, "TargetCheck", Unread)
    monkeypatch.setattr(routing, "make_engine", lambda *_: TorchEngine(torch.float16))
    x, weight, target, *_ = Case(700, 32, 400, torch.float16, ignored=0.0).tensors()
    assert liger_cutedsl.explain(x, weight).schedule == "single_pass"  # none is ignored
    captured = liger_cutedsl.explain(x, weight, target)
    assert captured.schedule == "recompute" and "a float16 mean needs a scale" in captured.reason
    assert liger_cutedsl.explain(x, weight, target, reduction="sum").schedule == "single_pass"


def test_explain_reads_the_targets_it_is_given():
    x, weight, target, *_ = Case(1000, 32, 400, torch.float32, ignored=0.0).tensors()
    few, many = target.clone(), target.clone()
    few[:10], many[:500] = -100, -100
    routes = [liger_cutedsl.explain(x, weight, t) for t in (None, target, few, many)]
    assert [r.copied_bytes for r in routes[:3]] == [0, 0, 0]
    assert routes[3].copied_bytes == 500 * 32 * 4 + 1000 * 8 + 500 * 8
    assert "copies of inputs" not in str(routes[0])
    assert routes[2].chunk == routes[1].chunk


def test_the_limit_keeps_logits_numbers_that_two_products_agree_on(place):
    """A row just within it, where W has entries of 1: exp of the difference of its logits is a number."""
    if place.dtypes[0] not in (torch.bfloat16, torch.float64):
        pytest.skip("about the range of numbers")
    _, (x, _, target, *_), ignored = few_ignored(place)
    weight = torch.ones(400, 32, dtype=x.dtype, device=x.device).requires_grad_()
    large = x.detach().clone()
    large[ignored] = LARGEST_MASKED * 0.99
    large.requires_grad_()
    assert kept_rows(large, weight, target, None, None, {}).keep is None
    loss = fused_linear_cross_entropy(large, weight, target, **place.call)
    _, (_, dw, _) = reference(x, weight, target, None, None, LossOptions())
    found = torch.autograd.grad(loss, (large, weight))
    assert_close(found[1], dw, 2 * GRADIENT_BOUND[place.dtypes[0]], "dW")
    assert (found[0][ignored] == 0).all()

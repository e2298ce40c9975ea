"""dW's sum in bfloat16 and 8 bits more: what an addition is off by, at any number, and the gradients of a call."""

import pytest
import torch

import liger_cutedsl
from liger_cutedsl import LossOptions, fused_linear_cross_entropy
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.schedules import dw_sum, footprint
from liger_cutedsl.testing import reset
from liger_cutedsl.two_part_sum import TwoPartSum, low_bytes
from reference import Case, reference

# Half a step of 2⁻¹⁵; float32's own roundings of three operations, and its last bit.
OF_ONE_ADDITION = 2.0**-16 + 5 * 2.0**-24
SMALLEST = 2.0**-126  # what is added to a zero is smaller


def zero(rows: int, columns: int) -> TwoPartSum:
    return TwoPartSum.zero(torch.full((rows, columns), torch.nan, dtype=torch.bfloat16))


def numbers(count: int) -> torch.Tensor:
    """Of both signs and of any size that a gradient has, with those next to powers of two and to halves of bf16."""
    g = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.rand(count, generator=g) * 120 - 90)
    powers = torch.exp2(torch.arange(-90.0, 30.0))
    edges = [powers * (1 + sign * k * 2.0**-16) for sign in (1, -1) for k in range(300)]
    values = torch.cat([sizes * torch.randn(count, generator=g), torch.cat(edges), torch.zeros(1)])
    return torch.cat([values, -values])[:, None]


def test_one_addition_at_any_number():
    values = numbers(100_000)
    total = zero(*values.shape)
    total.add(values, 1.0, 1.0)
    half_way = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(total.high[~half_way], values.bfloat16()[~half_way]), "the upper part is the sum rounded"
    assert bool(half_way.any())
    error = (total.value().double() - values.double()).abs()
    assert bool((error <= OF_ONE_ADDITION * values.double().abs() + SMALLEST).all())
    assert bool((total.high == 0)[values == 0].all())
    typical = (error / values.double().abs().clamp(min=1e-300))[values != 0]
    assert float(typical.median()) < 1.1 * 2.0**-17, "all 8 bits are used"


def test_a_long_sum_is_rounded_once():
    """64 products of one size, in float64, in two parts, and in bfloat16 alone."""
    g = torch.Generator().manual_seed(1)
    total, exact, narrow = zero(200, 30), torch.zeros(200, 30).double(), torch.zeros(200, 30).bfloat16()
    size = torch.zeros(200, 30).double()
    for _ in range(64):
        product = torch.randn(200, 30, generator=g)
        total.add(product, 0.5, 1.0)
        narrow = (narrow.float() + 0.5 * product).bfloat16()
        exact += 0.5 * product.double()
        size += exact.abs()
    assert bool(((total.value().double() - exact).abs() <= OF_ONE_ADDITION * size).all())

    def error(found):
        return float((found.double() - exact).norm() / exact.norm())

    once = error(exact.bfloat16())
    assert error(total.high) < 1.02 * once and error(narrow) > 3 * once


def test_factors_of_the_sum_and_of_the_product():
    product = torch.randn(50, 7, generator=torch.Generator().manual_seed(2))
    total = zero(50, 7)
    total.add(product, 1.0, 1.0)
    before = total.value().double()
    total.add(product, -0.25, 3.0)
    exact = -0.25 * product.double() + 3 * before
    size = exact.abs() + 3 * before.abs() * 2.0**-20
    assert bool(((total.value().double() - exact).abs() <= OF_ONE_ADDITION * size).all())


def test_what_is_not_finite_stays_so():
    total = zero(1, 4)
    total.add(torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0]]), 1.0, 1.0)
    total.add(torch.ones(1, 4), 1.0, 1.0)
    assert not total.high[0, :3].isfinite().any() and total.high[0, 3] == 2
    total = zero(1, 2)
    total.add(torch.tensor([[3.4e38, -3.4e38]]), 1.0, 1.0)  # too large for bfloat16, and not for the sum
    total.add(torch.tensor([[-1e38, 1e38]]), 1.0, 1.0)
    assert total.high.float() == pytest.approx(torch.tensor([[2.4e38, -2.4e38]]), rel=2.0**-8)


def test_rows_start_where_the_copy_engine_wants_them():
    total = zero(3, 5)
    assert total.low.shape == (3, 5) and total.low.stride() == (16, 1) and low_bytes(3, 5) == 48
    assert total.low.data_ptr() % 16 == 0 and total.high.is_contiguous()


def two_parts(monkeypatch) -> dict:
    """What makes a call of 640 rows take ten chunks, and two parts: float32 is left no room."""
    monkeypatch.setattr(TorchEngine, "chunk_size", lambda engine, problem, fitting: min(fitting, 64))
    monkeypatch.setattr(dw_sum, "ROUNDED_AS_OFTEN", 0)  # all of them in two parts
    reset()
    plain = footprint.single_pass_bytes

    def bytes_of(engine, task, sums, chunk, held=None, low=0, beside=0):
        return plain(engine, task, sums, chunk, held, low, beside) + (sums.weight == torch.float32) * 2**40

    monkeypatch.setattr(footprint, "single_pass_bytes", bytes_of)
    return dict(schedule="single_pass", engine="torch")


def test_the_first_chunks_of_many_are_added_in_16_bits_alone(monkeypatch):
    """Of 40 chunks 21, which lose as much as 12 of 12 would: less than a third of all roundings' squares. The error is
    between those of a sum that is wide throughout and of one that never is, and nearer to the first."""
    x, weight, target, *_ = Case(640, 32, 300, dtype=torch.bfloat16, ignored=0.0).tensors()
    _, (_, exact, _) = reference(x, weight, target, None, None, LossOptions())
    call = two_parts(monkeypatch)
    monkeypatch.setattr(TorchEngine, "chunk_size", lambda engine, problem, fitting: 16)

    def error():
        reset()
        assert liger_cutedsl.explain(x, weight, target, **call).chunk == 16
        loss = fused_linear_cross_entropy(x, weight, target, **call)
        return float((torch.autograd.grad(loss, weight)[0].double() - exact).norm() / exact.norm())

    found = []
    for as_often in (0, 12, 40):
        monkeypatch.setattr(dw_sum, "ROUNDED_AS_OFTEN", as_often)
        found.append(error())
    assert [dw_sum.in_16_bits(k) for k in (40, 3)] == [40, 3]
    wide, default, never = (e**2 for e in found)
    assert wide < default < wide + 0.45 * (never - wide), found  # 21²/40² = 0.28, of a sum that does not grow evenly


@pytest.mark.parametrize("options", [{}, dict(reduction="sum"), dict(label_smoothing=0.1, softcap=8.0)], ids=str)
def test_gradients_of_a_call(monkeypatch, options):
    """As accurate as one rounding, with a bias, and where backward is given what was expected or something else."""
    case = Case(640, 32, 300, dtype=torch.bfloat16, bias=True, ignored=0.0)
    x, weight, target, bias, _ = case.tensors()
    _, (of_x, of_weight, of_bias) = reference(x, weight, target, bias, None, LossOptions(**options))
    leaves = (x, weight, bias)
    call = dict(bias=bias, **options)

    def errors(upstream, **more):
        loss = fused_linear_cross_entropy(x, weight, target, **call, **more) * upstream
        found = torch.autograd.grad(loss, leaves)
        exact = (upstream * g for g in (of_x, of_weight, of_bias))
        return [float((f.double() - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]

    once = errors(1.0, schedule="single_pass", engine="torch", accum_dtype=torch.float32)
    call |= two_parts(monkeypatch)
    route = liger_cutedsl.explain(x, weight, target, **call)
    assert (route.chunk, route.dw_sum, route.dw_low_bytes) == (64, torch.bfloat16, 300 * 32)
    for upstream in (1.0, 0.3, 0.3, 0.3, 0.7):  # the fourth is expected, the last is not
        found = errors(upstream)
        # scaled afterwards, what was rounded is rounded again
        bound = 2.0 if upstream in (0.3, 0.7) else 1.1
        assert all(f < bound * max(o, 1e-4) for f, o in zip(found, once, strict=True)), (upstream, found, once)
    expected = errors(0.7), errors(0.7)
    assert expected[1][1] < 1.1 * once[1], "the expected factor enters with the last chunk"


def test_a_frozen_x_and_a_frozen_weight(monkeypatch):
    x, weight, target, *_ = Case(640, 32, 300, dtype=torch.bfloat16, ignored=0.0).tensors()
    _, (of_x, of_weight, _) = reference(x, weight, target, None, None, LossOptions())
    call = two_parts(monkeypatch)
    for frozen, leaf, exact in ((x, weight, of_weight), (weight, x, of_x)):
        frozen.requires_grad_(False)
        route = liger_cutedsl.explain(x, weight, target, **call)
        assert bool(route.dw_low_bytes) == (leaf is weight)
        (found,) = torch.autograd.grad(fused_linear_cross_entropy(x, weight, target, **call), leaf)
        assert float((found.double() - exact).norm() / exact.norm()) < 2.0**-8  # one rounding, of each number
        frozen.requires_grad_()


def test_no_second_part_where_there_is_none(monkeypatch):
    """Rows that the copy engine cannot take, and a dW of another dtype than the product's."""
    call = two_parts(monkeypatch)
    for hidden, autocast, expected in ((32, None, 300 * 32), (30, None, 0), (32, torch.float16, 0)):
        x = torch.randn(640, hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(300, hidden, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            route = liger_cutedsl.explain(x, weight, torch.zeros(640, dtype=torch.int64), **call)
        assert route.dw_low_bytes == expected, (hidden, autocast)

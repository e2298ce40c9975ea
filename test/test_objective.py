"""The formulas of objective.py and epilogues.py where a whole call cannot see them."""

import pytest
import torch

from liger_cutedsl import LossOptions, cross_entropy
from liger_cutedsl.call import Problem
from liger_cutedsl.epilogues import EpilogueFlags, backward_epilogue, capped, forward_epilogue
from liger_cutedsl.objective import row_weights
from liger_cutedsl.row_statistics import RowStatistics


def test_the_target_gradient_survives_p_near_one():
    log_p = torch.tensor([-1e-6, -1e-3, -1.0])
    problem = Problem(torch.zeros(3, 8), torch.zeros(5, 8), torch.tensor([0, 1, 2]), None, None, LossOptions())
    stats = RowStatistics(lse=torch.zeros(3), target_logit=log_p)
    upstream = cross_entropy.LossOutput(torch.tensor(1.0))
    coefficients = cross_entropy.coefficients(stats, row_weights(problem), problem, upstream, 1.0)
    exact = torch.expm1(log_p.double()) / 3
    torch.testing.assert_close(coefficients.fix.double(), exact, rtol=4 * 1.2e-7, atol=0)
    naive = (coefficients.a * torch.exp(log_p) - 1 / 3).double()  # A·p − B
    assert ((naive - exact) / exact).abs()[0] > 1e-3


@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_softcap_formula_matches_tanh(softcap):
    """tanh from exp2 and a reciprocal, in float32, against float64's tanh and its derivative."""
    acc = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([1e-6, -1e-6, 1e30, -1e30])])
    flags, scalars = EpilogueFlags(softcap=True), dict(softcap=softcap, inverse_softcap=1.0 / softcap)
    z, slope = capped(flags, acc, scalars)
    exact = torch.tanh(acc.double() / softcap)
    # 1 − 2r rounds at 1, so z is off by a few ulp of the cap
    assert (z.double() - softcap * exact).abs().max() <= 4 * softcap * 1.2e-7
    assert (slope.double() - (1 - exact.square())).abs().max() <= 4 * 1.2e-7
    # and relative accuracy where the cap saturates, on either side
    tail = acc.abs() > 2 * softcap
    tail &= acc.abs() < 40 * softcap
    u = acc.double()[tail].abs() / softcap
    exact_tail = 4 * torch.exp(-2 * u) / (1 + torch.exp(-2 * u)).square()
    assert ((slope.double()[tail] - exact_tail) / exact_tail).abs().max() <= 2e-5  # exponents of up to 80 · 2⁻²⁴
    nan = capped(
        EpilogueFlags(softcap=True), torch.tensor(torch.nan), dict(softcap=softcap, inverse_softcap=1.0 / softcap)
    )
    assert all(v.isnan() for v in nan)
    assert slope[-1] == slope[-2] == 0.0


def test_epilogues_name_the_operands_they_take():
    import inspect

    flags = EpilogueFlags(
        bias=True, softcap=True, ce_weight=True, smoothing=True, argmax=True, scale=True, entropy=True
    )
    assert list(inspect.signature(forward_epilogue(flags)).parameters)[1:] == list(flags.forward_operands)
    assert list(inspect.signature(backward_epilogue(flags)).parameters)[1:] == list(flags.backward_operands)
    problem = Problem(torch.zeros(1, 8), torch.zeros(5, 8), torch.tensor([0]), None, torch.ones(5), LossOptions())
    assert not EpilogueFlags.of(problem).ce_weight  # without smoothing class weights are in A and fix

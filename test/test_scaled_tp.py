"""Liger's scaled cross entropy with a vocabulary over two ranks (gloo, CPU). See scaled_tp_worker.py."""

import pytest
import torch

import liger_cutedsl
from ranks import run_ranks

ops = pytest.importorskip("liger_kernel.ops")


def test_over_two_ranks(tmp_path):
    run_ranks("scaled_tp_worker", tmp_path)


@pytest.mark.parametrize("value,error", [(3, ValueError), (1.0, TypeError)])
def test_without_a_group_or_with_bad_values(value, error):
    liger_cutedsl.enable()
    try:
        call = ops.LigerFusedLinearScaledCrossEntropyTPFunction.apply
        x, target = torch.randn(3, 8), torch.tensor([0, 1, 2])
        with pytest.raises(RuntimeError, match=r"torch\.distributed must be initialized"):  # Liger's words
            call(x, torch.randn(5, 8), target, None)
        with pytest.raises(error, match="tiles_per_reduce"):
            call(x, torch.randn(5, 8), target, None, 1.0, -100, value)
    finally:
        liger_cutedsl.disable()

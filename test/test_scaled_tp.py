"""Liger's scaled cross entropy with a vocabulary over two ranks (gloo, CPU). See scaled_tp_worker.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import liger_cutedsl

ops = pytest.importorskip("liger_kernel.ops")
WORKER = Path(__file__).parent / "scaled_tp_worker.py"


def test_over_two_ranks(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(2):
        command = [sys.executable, "-W", "ignore", str(WORKER), str(rank), "2", str(tmp_path)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True))
    for rank, process in enumerate(ranks):
        output = process.communicate(timeout=240)[0]
        assert process.returncode == 0 and f"rank {rank} done" in output, output[-3000:]


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

"""The Triton passes, and Liger-Kernel's operator behind our front, in Triton's interpreter: in other processes, because
it has to be chosen before triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def interpreted(probe: str) -> list[str]:
    """The suites or cases that a probe says are right."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).parent / probe],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [line.removeprefix("ok ") for line in done.stdout.splitlines() if line.startswith("ok ")]


def test_kernels_in_the_interpreter():
    assert len(interpreted("triton_probe.py")) == 50


def test_kernels_of_sampled_pairs_in_the_interpreter():
    assert len(interpreted("triton_pairs_probe.py")) == 30


@pytest.mark.slow
def test_ligers_operator_in_the_interpreter():
    """The triton engine: every option, 16 bits, autocast, accumulators, what our front adds, torch.compile."""
    pytest.importorskip("liger_kernel")
    found = interpreted("liger_triton_probe.py")
    assert found == ["float32", "16 bits", "autocast", "no copies", "sums", "front", "graph"]

"""The Triton passes in Triton's interpreter, which has to be chosen before triton is imported: in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_in_the_interpreter():
    probe = Path(__file__).parent / "triton_probe.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", probe],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert sum(line.startswith("ok ") for line in done.stdout.splitlines()) == 23

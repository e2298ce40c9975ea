"""TRL's fused head under FSDP2, by TRL's kernel and by ours, over two ranks (gloo, CPU). See trl_fsdp_worker.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "trl_fsdp_worker.py"


@pytest.mark.slow
def test_gradients_are_right_where_trls_own_are(tmp_path):
    pytest.importorskip("trl.kernels", reason="TRL 1.15 or later is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(2):
        command = [sys.executable, "-W", "ignore", str(WORKER), str(rank), "2", str(tmp_path)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True))
    for rank, process in enumerate(ranks):
        output = process.communicate(timeout=240)[0]
        assert process.returncode == 0 and f"rank {rank} done" in output, output[-3000:]

"""FSDP2: what the error about a sharded weight advises, against plain PyTorch, over two ranks (gloo, CPU)."""

import os
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).parent / "fsdp_worker.py"


def test_the_advice_for_a_sharded_weight_is_right(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(2):
        command = [sys.executable, "-W", "ignore", str(WORKER), str(rank), "2", str(tmp_path)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True))
    for rank, process in enumerate(ranks):
        output = process.communicate(timeout=240)[0]
        assert process.returncode == 0 and f"rank {rank} done" in output, output[-3000:]

"""Tests of several processes: a worker started as each rank, told RANK, RANKS and a folder by its arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(worker: str, folder, ranks: int = 2) -> None:
    """Runs test/WORKER.py as every rank (gloo, CPU), and wants "rank R done" of each."""
    script, environment = Path(__file__).parent / f"{worker}.py", {**os.environ, "OMP_NUM_THREADS": "1"}
    started = []
    for rank in range(ranks):
        command = [sys.executable, "-W", "ignore", str(script), str(rank), str(ranks), str(folder)]
        started.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True))
    for rank, process in enumerate(started):
        output = process.communicate(timeout=240)[0]
        assert process.returncode == 0 and f"rank {rank} done" in output, output[-3000:]

"""The vocabulary split over 2, 3 and 4 ranks (gloo, CPU) against one process in float64."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import liger_cutedsl

WORKER = Path(__file__).parent / "vocab_parallel_worker.py"
CHUNKS = Path(__file__).parent / "vocab_parallel_chunks_worker.py"


def launch(world: int, *suites: str, worker: Path = WORKER, **variables: str) -> list[tuple[int, str]]:
    """(exit status, output) of every rank."""
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            environment = {**os.environ, **variables, "RANK": str(rank), "WORLD_SIZE": str(world)}
            environment.update(STORE=f"{folder}/store", OMP_NUM_THREADS="1")
            command = [sys.executable, "-W", "ignore", str(worker), *suites]
            ranks.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True))
        try:
            return [(process.communicate(timeout=240)[0], process.returncode)[::-1] for process in ranks]
        finally:
            for process in ranks:
                process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_agree_with_one_process(world):
    suites = ("options", "shards", "ignored", "sizes", "bytes", "errors", "changes", "failing_kernels", "dtensor")
    suites += ("replicated", "named_mesh", "log_probs", "row_losses")
    for rank, (status, output) in enumerate(launch(world, *suites)):
        assert status == 0 and f"rank {rank} done" in output, output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_chunks_agree_with_one_process(world):
    suites = ["options", "shards", "collectives", "workspaces", "disagreement", "failing_kernels"]
    if world == 2:
        suites += ["row_losses", "dtypes", "ignored", "dtensor", "memory", "compiled", "upstream"]
    for rank, (status, output) in enumerate(launch(world, *suites, worker=CHUNKS)):
        assert status == 0 and f"rank {rank} done" in output, output[-3000:]


@pytest.mark.slow
def test_a_head_that_transformers_splits():
    pytest.importorskip("transformers")
    for rank, (status, output) in enumerate(launch(2, "hugging_face", CUDA_VISIBLE_DEVICES="")):
        assert status == 0 and f"rank {rank} done" in output, output[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_agree_with_one_process():
    for rank, (status, output) in enumerate(
        launch(2, "options", "shards", "changed_on_gpus", "log_probs", "row_losses", DEVICE="cuda")
    ):
        assert status == 0 and f"rank {rank} done" in output, output[-3000:]
    for rank, (status, output) in enumerate(launch(2, "options", "shards", worker=CHUNKS, DEVICE="cuda")):
        assert status == 0 and f"rank {rank} done" in output, output[-3000:]


@pytest.mark.slow
def test_a_rank_that_fails_does_not_leave_the_others_hanging():
    *others, last = launch(3, "failure")
    assert last[0] == 3
    for status, output in others:
        assert status == 0 and "done" in output, output[-3000:]


def test_what_a_split_vocabulary_refuses(monkeypatch):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, weight, target = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)
        with pytest.raises(ValueError, match="vocab_start must be None or an int ≥ 0, got -1"):
            liger_cutedsl.vocab_parallel_fused_linear_cross_entropy(x, weight, target, vocab_start=-1)
        with pytest.raises(ValueError, match="without gaps"):
            liger_cutedsl.vocab_parallel_fused_linear_cross_entropy(x, weight, target, vocab_start=2)
        leaf = x.clone().requires_grad_()
        loss = liger_cutedsl.vocab_parallel_fused_linear_cross_entropy(leaf, weight, target)
        (dx,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            dx.sum().backward()
        monkeypatch.setenv("LIGER_CUTEDSL_SCHEDULE", "single_pass")
        split = liger_cutedsl.vocab_parallel_fused_linear_cross_entropy(leaf, weight, target)
        torch.testing.assert_close(split, loss.detach())
        with pytest.raises(RuntimeError, match="knows its gradient's weights only in backward"):
            liger_cutedsl.vocab_parallel_fused_linear_cross_entropy(leaf, weight, target, reduction="none")
    finally:
        dist.destroy_process_group()

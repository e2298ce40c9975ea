"""A vocabulary split over GPUs, measured: time, memory, and how much of the communication shows.

torchrun --nproc-per-node 2 -m benchmark.vocab_parallel     into benchmark/results/<gpu>-x2.json

For each vocabulary, interleaved on every rank: the whole head on one GPU (each rank runs it by itself), the split head,
and the split head with its collectives left out (dX stays each rank's own share): its time is that of the split head
without communication. Time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import liger_cutedsl
from benchmark.measure import Shape, peak_mb, time_ms
from benchmark.records import RESULTS, environment, slug

VOCABULARIES = (128256, 262144)


class _Nothing:
    """In place of a collective that was started."""

    def wait(self):
        pass


class without_communication:
    """The collectives of vocab_parallel.py return at once: a gather with what it gave the first time."""

    def __init__(self):
        self.gathered = None

    def __enter__(self):
        self._kept = dist.all_gather_into_tensor, dist.all_reduce

        def gather(out, packed, **how):
            if self.gathered is None:
                self._kept[0](out, packed, **how)
                self.gathered = out.clone()
            out.copy_(self.gathered)

        dist.all_gather_into_tensor, dist.all_reduce = gather, lambda *_, **__: _Nothing()

    def __exit__(self, *_):
        dist.all_gather_into_tensor, dist.all_reduce = self._kept


def collective_ms(run) -> dict[str, float]:
    """Device milliseconds of the NCCL kernels of one call, by collective. They include waiting for the other ranks."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = {"all_gather": 0.0, "all_reduce": 0.0}
    for event in profile.key_averages():
        for name in found:
            if "nccl" in event.key.lower() and name.replace("_", "") in event.key.lower().replace("_", ""):
                found[name] += event.self_device_time_total / 1e3
    return found


def slowest(value: float) -> float:
    values = torch.tensor([value], device="cuda")
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return round(float(values), 4)


def rows_of(vocab: int, rounds: int):
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = Shape(8192, vocab, 4096)
    x, weight, target = shape.inputs("cuda")
    shard = weight.detach()[vocab * rank // world : vocab * (rank + 1) // world].clone().requires_grad_()

    def whole(schedule):
        def run():
            x.grad = weight.grad = None
            liger_cutedsl.fused_linear_cross_entropy(x, weight, target, schedule=schedule).backward()

        return run

    def split():
        x.grad = shard.grad = None
        liger_cutedsl.vocab_parallel_fused_linear_cross_entropy(x, shard, target).backward()

    silence = without_communication()

    def silent():
        with silence:
            split()

    runs = {"whole, default": whole("auto"), "whole, recompute": whole("recompute"), "split": split, "silent": silent}
    peaks, times = {}, {name: [] for name in runs}
    for name, run in runs.items():
        run()
        run()
        x.grad = weight.grad = shard.grad = None
        dist.barrier()
        peaks[name] = peak_mb(run, (x, shard if name in ("split", "silent") else weight), "cuda")
    for _ in range(rounds):
        for name, run in runs.items():
            dist.barrier()
            run()  # untimed, as in measure.py
            times[name].append(slowest(time_ms(run, "cuda")))
    collectives = {name: slowest(ms) for name, ms in collective_ms(split).items()}
    for name in runs:
        ms = statistics.median(times[name])
        row = {"kind": "vocab_parallel", "implementation": name, "ranks": world if name in ("split", "silent") else 1}
        row |= {"tokens": shape.tokens, "vocab": vocab, "hidden": shape.hidden, "ms": round(ms, 4)}
        row |= {"least_ms": min(times[name]), "greatest_ms": max(times[name]), "peak_mb": slowest(peaks[name])}
        yield row | (collectives if name == "split" else {})


def obstacle() -> str | None:
    """Why this cannot run here, or None."""
    if "LOCAL_RANK" not in os.environ:
        return "start it with torchrun: torchrun --nproc-per-node 2 -m benchmark.vocab_parallel"
    needed, there = int(os.environ["LOCAL_RANK"]) + 1, torch.cuda.device_count()
    if not torch.cuda.is_available() or there < needed:
        return f"every rank needs an NVIDIA GPU of its own, and here are {there}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="the JSON lines file to write")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    if obstacle():
        print(f"benchmark.vocab_parallel cannot run: {obstacle()}", file=sys.stderr)
        return 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world = dist.get_world_size()
    command = f"torchrun --nproc-per-node {world} -m benchmark.vocab_parallel"
    lines = [environment("cuda", command)]
    for vocab in VOCABULARIES:
        lines += rows_of(vocab, chosen.rounds)
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        path = Path(chosen.out) if chosen.out else RESULTS / f"{slug('cuda')}-x{world}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for line in lines[1:]:
            print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A vocabulary split over GPUs, measured: time, memory, and how much of the communication shows.

torchrun --nproc-per-node 2 -m benchmark.vocab_parallel     into benchmark/results/<gpu>-x2.json

For each shape, interleaved on every rank: the whole head on one GPU (each rank runs it by itself), the split head by
both schedules, and each with its collectives left out (dX stays each rank's own share): its time is that of the split
head without communication. Time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import functools
import itertools
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

SHAPES = (Shape(8192, 128256, 4096), Shape(8192, 262144, 4096), Shape(1024, 128256, 4096))
# "auto" is recompute: the name that its rows have
SPLIT = {"split": "auto", "split, single_pass": "single_pass"}


class _Nothing:
    """In place of a collective that was started."""

    def wait(self):
        pass


class without_communication:
    """The collectives of a split head return at once: each gather of a call with what it gave the first time."""

    def __init__(self):
        self.gathered = []

    def __enter__(self):
        self._kept, turn = (dist.all_gather_into_tensor, dist.all_reduce), itertools.count()

        def gather(out, packed, async_op=False, **how):
            index = next(turn)
            if index == len(self.gathered):
                self._kept[0](out, packed, **how)
                self.gathered.append(out.clone())
            out.copy_(self.gathered[index])
            return _Nothing() if async_op else None

        dist.all_gather_into_tensor, dist.all_reduce = gather, lambda *_, **__: _Nothing()

    def __exit__(self, *_):
        dist.all_gather_into_tensor, dist.all_reduce = self._kept


def collective_ms(run) -> dict[str, float]:
    """Device milliseconds of the NCCL kernels of one call, by collective, on the slowest rank. They include waiting for
    the other ranks."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = {"all_gather": 0.0, "all_reduce": 0.0}
    for event in profile.key_averages():
        for name in found:
            if "nccl" in event.key.lower() and name.replace("_", "") in event.key.lower().replace("_", ""):
                found[name] += event.self_device_time_total / 1e3
    return {name: slowest(ms) for name, ms in found.items()}


def slowest(value: float) -> float:
    values = torch.tensor([value], device="cuda")
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return round(float(values), 4)


def rows_of(shape: Shape, rounds: int):
    rank, world, vocab = dist.get_rank(), dist.get_world_size(), shape.vocab
    x, weight, target = shape.inputs("cuda")
    shard = weight.detach()[vocab * rank // world : vocab * (rank + 1) // world].clone().requires_grad_()

    def whole(schedule):
        def run():
            x.grad = weight.grad = None
            liger_cutedsl.fused_linear_cross_entropy(x, weight, target, schedule=schedule).backward()

        return run

    def split(schedule):
        x.grad = shard.grad = None
        liger_cutedsl.vocab_parallel_fused_linear_cross_entropy(x, shard, target, schedule=schedule).backward()

    def silent(schedule, silence):
        with silence:
            split(schedule)

    runs = {"whole, default": whole("auto"), "whole, recompute": whole("recompute")}
    for name, schedule in SPLIT.items():
        split(schedule)  # the first call, which the ranks begin by agreeing
        runs[name] = functools.partial(split, schedule)
        runs[name.replace("split", "silent")] = functools.partial(silent, schedule, without_communication())
    peaks, times = {}, {name: [] for name in runs}
    for name, run in runs.items():
        run()
        run()
        x.grad = weight.grad = shard.grad = None
        dist.barrier()
        peaks[name] = peak_mb(run, (x, weight if name.startswith("whole") else shard), "cuda")
    for _ in range(rounds):
        for name, run in runs.items():
            dist.barrier()
            run()  # untimed, as in measure.py
            times[name].append(slowest(time_ms(run, "cuda")))
    collectives = {name: collective_ms(functools.partial(split, schedule)) for name, schedule in SPLIT.items()}
    for name in runs:
        ms = statistics.median(times[name])
        row = {"kind": "vocab_parallel", "implementation": name, "ranks": 1 if name.startswith("whole") else world}
        row |= {"tokens": shape.tokens, "vocab": vocab, "hidden": shape.hidden, "ms": round(ms, 4)}
        row |= {"least_ms": min(times[name]), "greatest_ms": max(times[name]), "peak_mb": slowest(peaks[name])}
        yield row | collectives.get(name, {})


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
    for shape in SHAPES:
        lines += rows_of(shape, chosen.rounds)
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

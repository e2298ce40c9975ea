"""Trains a linear head whose vocabulary is split over the ranks, next to the whole head on every rank.

    torchrun --nproc-per-node 2 examples/vocab_parallel_train.py [--steps 10]

Runs on as many GPUs as ranks (NCCL), or on the CPU (gloo).
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from liger_cutedsl import fused_linear_cross_entropy, vocab_parallel_fused_linear_cross_entropy

TOKENS, HIDDEN = 512, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--vocab", type=int, default=32003, help="entries of the vocabulary; shards are padded")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/vocab_parallel_train.py")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= world
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", **({"device_id": device} if on_gpu else {}))

    torch.manual_seed(0)  # the same x, targets and initial head on every rank
    vocab, rows = arguments.vocab, -(-arguments.vocab // world)
    head = torch.randn(rows * world, HIDDEN) * HIDDEN**-0.5
    x, target = torch.randn(TOKENS, HIDDEN, device=device), torch.randint(0, vocab, (TOKENS,), device=device)
    whole = head[:vocab].to(device, copy=True).requires_grad_()
    shard = head[rank * rows : (rank + 1) * rows].to(device, copy=True).requires_grad_()
    for step in range(arguments.steps):
        split_loss = vocab_parallel_fused_linear_cross_entropy(
            x, shard, target, vocab_start=rank * rows, vocab_size=vocab, label_smoothing=0.05
        )
        loss = fused_linear_cross_entropy(x, whole, target, label_smoothing=0.05)
        for parameter, value in ((shard, split_loss), (whole, loss)):
            (gradient,) = torch.autograd.grad(value, parameter)
            with torch.no_grad():
                parameter -= 50.0 * gradient
        if rank == 0:
            print(f"step {step:2d}   split over {world}: {split_loss.item():.6f}   whole: {loss.item():.6f}")
    start, stop = rank * rows, min((rank + 1) * rows, vocab)
    apart = float((shard[: stop - start] - whole[start:stop]).abs().max())
    print(f"rank {rank} on {device}: largest difference of a weight after {arguments.steps} steps {apart:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

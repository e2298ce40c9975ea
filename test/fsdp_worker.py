"""One rank of test_fsdp.py: python test/fsdp_worker.py RANK RANKS FOLDER     prints "rank R done" when everything held

A small model under FSDP2 (gloo, CPU): the gradients that follow the error's advice are those of plain PyTorch for the
mean over all ranks' batches.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

from liger_cutedsl import fused_linear_cross_entropy
from reference import assert_close

RANK, RANKS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(16, 16, dtype=torch.float64)
        self.head = torch.nn.Linear(16, 51, dtype=torch.float64)

    def forward(self, x, target=None):
        hidden = torch.tanh(self.body(x))
        if target is None:
            return hidden
        return fused_linear_cross_entropy(hidden, self.head.weight, target, bias=self.head.bias)


def batch(rank):
    g = torch.Generator().manual_seed(rank)
    return torch.randn(12, 16, generator=g, dtype=torch.float64), torch.randint(0, 51, (12,), generator=g)


def plain_gradients():
    model, losses = Model(), []
    for x, target in map(batch, range(RANKS)):
        losses.append(torch.nn.functional.cross_entropy(model.head(model(x)), target))
    (sum(losses) / RANKS).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def sharded(mesh, head_apart):
    model = Model()
    if head_apart:
        fully_shard(model.head, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(parameter):
    return parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)


def errors(model, expected):
    """Relative errors of the head's gradients."""
    found = {name: getattr(model.head, name).grad.full_tensor() for name in ("weight", "bias")}
    return {n: float((g - expected[f"head.{n}"]).norm() / expected[f"head.{n}"].norm()) for n, g in found.items()}


def check(model, loss, expected):
    loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad.full_tensor(), expected[name], 1e-9, name)


def main():
    store = dist.FileStore(os.path.join(FOLDER, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=120))
    expected, (x, target) = plain_gradients(), batch(RANK)
    meshes = [
        init_device_mesh("cpu", (RANKS,)),
        init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("copies", "shards")),
    ]
    for mesh in meshes:
        model = sharded(mesh, head_apart=False)
        check(model, model(x, target), expected)  # the first advice: inside the module that owns the weight

        model = sharded(mesh, head_apart=True)
        hidden = model(x)
        assert isinstance(model.head.weight, DTensor)
        try:
            fused_linear_cross_entropy(hidden, model.head.weight, target, bias=model.head.bias)
            raise SystemExit("a sharded weight with a plain x was accepted")
        except TypeError as error:
            assert "weight.full_tensor(grad_placements=[Partial('avg')])" in str(error), error
        weight, bias = whole(model.head.weight), whole(model.head.bias)
        check(model, fused_linear_cross_entropy(hidden, weight, target, bias=bias), expected)

        model = sharded(mesh, head_apart=True)
        hidden = model(x)
        model.head.unshard()
        loss = fused_linear_cross_entropy(hidden, model.head.weight, target, bias=model.head.bias)
        check(model, loss, expected)

    model = sharded(meshes[0], head_apart=True)  # what the error warns of, or these tests could not fail
    weight, bias = model.head.weight.full_tensor(), model.head.bias.full_tensor()
    fused_linear_cross_entropy(model(x), weight, target, bias=bias).backward()
    assert min(errors(model, expected).values()) > 0.1
    print(f"rank {RANK} done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    os._exit(0)

"""DTensor heads: W sharded by rows of the vocabulary over a mesh dimension, as tensor parallelism does it."""

from __future__ import annotations

from liger_cutedsl.objective import LossOutput
from liger_cutedsl.problem import Problem, is_dtensor
from liger_cutedsl.routing import Settings

_FSDP_OR_TP = (
    "Under FSDP2 each rank has its own x, and the sharded parameter has to be whole: call the loss in the forward of "
    "the module that owns it; or pass weight.full_tensor(grad_placements=[Partial('avg')]), a Partial for each mesh "
    "dimension, and the bias likewise (weight.full_tensor() alone would leave each rank only its own share of the "
    "gradient); or call head.unshard() before, where the head lies in a model that fully_shard took as a whole. Under "
    "tensor parallelism x is the same on every rank: pass it as DTensor.from_local(x, mesh, [Replicate()]), or call "
    "vocab_parallel_fused_linear_cross_entropy on the local tensors"
)


def run_dtensor(problem: Problem, settings: Settings) -> LossOutput:
    """The loss of a problem whose weight is a DTensor: Shard(0) over one mesh dimension, replicated over the others.

    x and target: DTensors over the same mesh, replicated, or sharded along that dimension by rows (a sequence-parallel
    region), in which case they are gathered first; target may be a plain tensor that is the same on every rank. bias
    and ce_weight: sharded as weight, or plain and whole. The result is plain, and the same on every rank.

    Raises TypeError or ValueError for anything else, above all for a plain x: whether it is the same on every rank
    (tensor parallelism) or not (FSDP) decides what is right, and cannot be seen.
    """
    from torch.distributed.tensor import Replicate, Shard

    from liger_cutedsl.vocab_parallel import vocab_parallel_output

    weight, x = problem.weight, problem.x
    if not is_dtensor(weight):
        raise TypeError("x is a DTensor and weight is not: pass x.to_local(), or weight as a DTensor over x's mesh")
    if not is_dtensor(x):
        raise TypeError(f"weight is a DTensor sharded as {weight.placements} and x is a plain tensor. {_FSDP_OR_TP}")
    mesh = weight.device_mesh
    if x.device_mesh != mesh:
        raise ValueError(f"x must be on weight's mesh {mesh}, got {x.device_mesh}")
    sharded = [dim for dim, placement in enumerate(weight.placements) if placement == Shard(0)]
    others = [p for p in weight.placements if p not in (Shard(0), Replicate())]
    if len(sharded) != 1 or others:
        raise ValueError(
            f"weight must be Shard(0) over one mesh dimension and replicated else, got {weight.placements}"
        )
    (dim,) = sharded
    whole = [Replicate()] * mesh.ndim

    def replicated(name, value):
        if not is_dtensor(value):
            return value
        elsewhere = [p for i, p in enumerate(value.placements) if i != dim and p != Replicate()]
        if elsewhere or value.placements[dim].is_partial():
            raise ValueError(
                f"{name} must be replicated, or sharded by rows over weight's mesh dimension {dim} alone, got "
                f"{value.placements}: over other dimensions call the loss on each one's local part"
            )
        return value.redistribute(placements=whole).to_local(grad_placements=whole)

    rows = weight.to_local().shape[0]
    start = _first_row(weight, dim)

    def shard_of(name, value):
        if value is None:
            return None
        if not is_dtensor(value):
            return value[start : start + rows]
        if tuple(value.placements) != tuple(weight.placements):
            raise ValueError(f"{name} must be sharded as weight, {weight.placements}, got {value.placements}")
        return value.to_local()

    x, target = replicated("x", x), replicated("target", problem.target)
    local = Problem(
        x.reshape(-1, x.shape[-1]),
        weight.to_local(),
        target.reshape(-1),
        shard_of("bias", problem.bias),
        shard_of("ce_weight", problem.ce_weight),
        problem.options,
    )
    return vocab_parallel_output(local, mesh.get_group(dim), start, weight.shape[0], settings)


def _first_row(weight, dim: int) -> int:
    """Index of the local shard's first row: DTensor gives every rank ceil(V / ranks) rows while they last."""
    per_rank = -(-weight.shape[0] // weight.device_mesh.size(dim))
    return min(per_rank * weight.device_mesh.get_local_rank(dim), weight.shape[0])

"""DTensor heads: W sharded by rows of the vocabulary over a mesh dimension, as tensor parallelism does it, or whole."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from liger_cutedsl.autograd import run
from liger_cutedsl.call import TENSORS, VECTORS, Problem, is_dtensor
from liger_cutedsl.checkpointing import between_graphs
from liger_cutedsl.route import Settings
from liger_cutedsl.split import over_ranks
from liger_cutedsl.weight_grad_buffer import WeightGradBuffer

_FSDP_OR_TP = (
    "Under FSDP2 each rank has its own x, and the sharded parameter has to be whole: call the loss in the forward of "
    "the module that owns it; or pass weight.full_tensor(grad_placements=[Partial('avg')]), a Partial for each mesh "
    "dimension, and the bias likewise (weight.full_tensor() alone would leave each rank only its own share of the "
    "gradient); or call head.unshard() before, where the head lies in a model that fully_shard took as a whole. Under "
    "tensor parallelism x is the same on every rank: pass it as DTensor.from_local(x, mesh, [Replicate()]), or call "
    "vocab_parallel_fused_linear_cross_entropy on the local tensors"
)


_NAMED_MESH = (
    "A plain x is taken for the same on every rank where weight's mesh is one dimension named 'tp', as Hugging Face's "
    "tp_plan makes it: a mesh of your own needs mesh_dim_names=('tp',)"
)


@between_graphs
def run_dtensor(problem: Problem, settings: Settings) -> NamedTuple:
    """The loss of a problem whose weight is a DTensor. It is plain.

    weight: Shard(0) over one mesh dimension and replicated over the others. x and target: DTensors over the same mesh,
    replicated, or sharded along that dimension by rows (a sequence-parallel region), in which case they are gathered
    first; or plain tensors that are the same on every rank, x only on a mesh that says so by its name. bias and
    ce_weight: sharded as weight, or plain and whole. The loss is the same on every rank.

    Or weight is replicated over all dimensions. Where x is replicated or plain, each rank computes its loss from its
    own tensors, and gradients are as replicated as those are. Where x is sharded by rows, the vocabulary is split for
    the call, over the same dimension; dW comes back replicated.

    Raises TypeError or ValueError for anything else, above all for another plain x: whether it is the same on every
    rank (tensor parallelism) or not (FSDP) decides what is right, and cannot be seen.
    """
    from torch.distributed.tensor import Replicate

    weight, x = problem.weight, problem.x
    if not is_dtensor(weight):
        raise TypeError("x is a DTensor and weight is not: pass x.to_local(), or weight as a DTensor over x's mesh")
    mesh = weight.device_mesh
    if is_dtensor(x) and x.device_mesh != mesh:
        raise ValueError(f"x must be on weight's mesh {mesh}, got {x.device_mesh}")
    dim = _vocabulary_dim(weight)
    if dim is None and is_dtensor(x) and any(p != Replicate() for p in x.placements):
        dim = next(i for i, placement in enumerate(x.placements) if placement != Replicate())
        problem = _split(problem, dim)
    else:
        problem = replace(problem, weight_grad_buffer=_local_buffer(problem))
    if dim is None:
        return _run_replicated(problem, settings)
    named = mesh.ndim == 1 and mesh.mesh_dim_names == ("tp",)
    if not is_dtensor(x) and not named:
        raise TypeError(
            f"weight is a DTensor sharded as {weight.placements} and x is a plain tensor. {_FSDP_OR_TP}. {_NAMED_MESH}"
        )
    return _run_sharded(problem, dim, settings)


def _vocabulary_dim(weight) -> int | None:
    """The mesh dimension that weight's rows are sharded over, None for a weight that every rank has whole."""
    from torch.distributed.tensor import Replicate, Shard

    sharded = [dim for dim, placement in enumerate(weight.placements) if placement == Shard(0)]
    others = [p for p in weight.placements if p not in (Shard(0), Replicate())]
    if len(sharded) > 1 or others:
        raise ValueError(
            f"weight must be Shard(0) over one mesh dimension and replicated else, got {weight.placements}: split the "
            f"head by rows of the vocabulary ('colwise_gather_output' in a tp_plan), or pass "
            f"weight.redistribute(placements=…)"
        )
    return sharded[0] if sharded else None


def _split(problem: Problem, dim: int) -> Problem:
    """A replicated weight's problem with the vocabulary split over a mesh dimension; gradients come back replicated."""
    from torch.distributed.tensor import Replicate, Shard

    if problem.weight_grad_buffer is not None:
        raise ValueError(
            f"{problem.weight_grad_buffer.name} goes with a weight that is sharded as it is computed: this one is "
            f"replicated and x is sharded by rows, so that each rank would have dW of other rows of the vocabulary"
        )
    mesh = problem.weight.device_mesh
    placements = [Shard(0) if i == dim else Replicate() for i in range(mesh.ndim)]
    return replace(
        problem,
        weight=problem.weight.redistribute(placements=placements),
        **{
            name: value.redistribute(placements=placements)
            for name in VECTORS
            if is_dtensor(value := getattr(problem, name))
        },
    )


def _local_buffer(problem: Problem) -> WeightGradBuffer | None:
    """That of this rank's rows: a plain one is taken for it. Raises ValueError for one that is placed otherwise."""
    buffer, weight = problem.weight_grad_buffer, problem.weight
    if buffer is None or not is_dtensor(buffer.tensor):
        return buffer
    there, wanted = ((t.device_mesh, tuple(t.placements)) for t in (buffer.tensor, weight))
    if there != wanted:
        raise ValueError(f"{buffer.name} must be placed as weight, {wanted[1]} over {wanted[0]}, got {there[1]}")
    return buffer.over(buffer.tensor.to_local())


def _run_replicated(problem: Problem, settings: Settings) -> NamedTuple:
    from torch.distributed.tensor import Replicate

    local = {}
    for name in TENSORS:
        value = local[name] = getattr(problem, name)
        if is_dtensor(value):
            if any(placement != Replicate() for placement in value.placements):
                raise ValueError(f"{name} must be replicated, as x and weight are, got {value.placements}")
            local[name] = value.to_local()
    x, target = local.pop("x"), local.pop("target")
    return run(replace(problem, x=x.reshape(-1, x.shape[-1]), target=target.reshape(-1), **local), settings)


def _run_sharded(problem: Problem, dim: int, settings: Settings) -> NamedTuple:
    from torch.distributed.tensor import DTensor, Replicate

    weight, mesh = problem.weight, problem.weight.device_mesh
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

    def shard_of(name, value):
        if value is None:
            return None
        if not is_dtensor(value):  # whole, and so is its gradient, gathered from the ranks
            value = DTensor.from_local(value, mesh, whole, run_check=False).redistribute(placements=weight.placements)
        if tuple(value.placements) != tuple(weight.placements):
            raise ValueError(f"{name} must be sharded as weight, {weight.placements}, got {value.placements}")
        return value.to_local()

    x, target = replicated("x", problem.x), replicated("target", problem.target)
    local = Problem(
        x.reshape(-1, x.shape[-1]),
        weight.to_local(),
        target.reshape(-1),
        shard_of("bias", problem.bias),
        shard_of("ce_weight", problem.ce_weight),
        problem.options,
        selected_token_ids=replicated("selected_token_ids", problem.selected_token_ids),
        row_loss=problem.row_loss,
        weight_grad_buffer=problem.weight_grad_buffer,
    )
    place = mesh.get_group(dim), _first_row(weight, dim), weight.shape[0]
    return run(local, settings, over_ranks(*place))


def _first_row(weight, dim: int) -> int:
    """Index of the local shard's first row: DTensor gives every rank ceil(V / ranks) rows while they last."""
    per_rank = -(-weight.shape[0] // weight.device_mesh.size(dim))
    return min(per_rank * weight.device_mesh.get_local_rank(dim), weight.shape[0])

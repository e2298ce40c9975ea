"""The vocabulary split over ranks: each holds some rows of W, all hold x and the targets.

    forward   each rank reduces its own logits to row statistics, and keeps exponentials, as `recompute` does;
              one all-gather of a few numbers a row; every rank folds them into the same loss
    backward  each rank computes dz of its own columns, as `recompute` does; its dW needs no one else;
              one all-reduce of dX (N, H) in the compute dtype, under the last dW GEMM

Communication per call and rank: (2 to 6) · N numbers forward, N · H backward. dX is reduced in float32 (float64 for
float64 inputs), so that the result is the single process's up to float32 rounding; it is then written in x's dtype.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from liger_cutedsl.autograd import between_graphs
from liger_cutedsl.derivatives import refuse_batched_upstream, without_second_derivative
from liger_cutedsl.engines import make_engine
from liger_cutedsl.epilogues import EXACT_INDICES
from liger_cutedsl.objective import LossOutput, RowStatistics, RowWeights, loss_terms, over_parts, row_weights
from liger_cutedsl.options import LossOptions
from liger_cutedsl.problem import TENSORS, Problem, WantedGradients, check_tensors, wanted_gradients
from liger_cutedsl.readable import check_still_readable
from liger_cutedsl.routing import Route, Settings, choose_route
from liger_cutedsl.rows import Rows, TargetCheck
from liger_cutedsl.schedules import recompute
from liger_cutedsl.split import OtherShards, VocabShard, agreed


def vocab_parallel_fused_linear_cross_entropy(
    x: torch.Tensor,
    weight_shard: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    engine: str | None = None,
    workspace_mb: float | None = None,
    **options,
) -> torch.Tensor | LossOutput:
    """fused_linear_cross_entropy with W's rows split over the ranks of a group.

    x: (..., H) and target: (...) the same on every rank, targets indexing the whole vocabulary.
    weight_shard: (V_rank, H), this rank's rows; bias, ce_weight: (V_rank,), theirs.
    group: a torch.distributed process group, the default one if None.
    Shards may be of any size, in the order of the ranks. vocab_start: index of the shard's first row, None for the rows
        of the ranks before. vocab_size: entries of the whole vocabulary, None for the rows of all ranks; rows beyond it
        are padding (Megatron pads V to a multiple), which counts for nothing and gets zero gradients.
    options: the fields of liger_cutedsl.LossOptions. engine, workspace_mb: see liger_cutedsl.routing.Settings.

    Returns what fused_linear_cross_entropy returns, the same on every rank; so is x's gradient.
    Raises as that function does; ValueError, on every rank, where what the ranks say of their shards does not agree.
    The sizes come with the first call's numbers (whose forward runs again where shards are unequal), and are not waited
    for later: on a GPU, a call in which only some ranks' shards changed has a loss of NaN on the others. Two heads that
    are equal on one rank and not on another are told apart by vocab_size.
    A rank that fails alone leaves the others to their process group's timeout.
    """
    shape = getattr(target, "shape", None)
    if isinstance(x, torch.Tensor) and isinstance(target, torch.Tensor) and x.dim() != 2 and x.shape[:-1] == shape:
        x, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    problem = Problem(x, weight_shard, target, bias, ce_weight, LossOptions(**options))
    output = vocab_parallel_output(
        problem, group, vocab_start, vocab_size, Settings.resolve(engine, None, workspace_mb)
    )
    return output.result(shape)


@between_graphs
def vocab_parallel_output(
    problem: Problem, group, vocab_start: int | None, vocab_size: int | None, settings: Settings
) -> LossOutput:
    """The loss of a problem that holds this rank's shard of weight, bias and ce_weight; x (N, H), target (N,)."""
    check_tensors(problem, empty_shard=True)
    shard = VocabShard.of(problem.weight, group, vocab_start, vocab_size)
    if settings.schedule == "single_pass":
        raise RuntimeError("schedule 'single_pass' was asked for, and a vocabulary split over ranks runs 'recompute'")
    settings = replace(settings, schedule="recompute")
    wanted, leaves = wanted_gradients(problem), (problem.x, problem.weight, problem.bias)
    try:
        return LossOutput(*_VocabParallel.apply(*leaves, problem, shard, wanted, settings))
    except OtherShards:  # known by now
        shard = VocabShard.of(problem.weight, group, vocab_start, vocab_size)
        return LossOutput(*_VocabParallel.apply(*leaves, problem, shard, wanted, settings))


class _VocabParallel(torch.autograd.Function):
    """`recompute` over a shard, with a gather behind its forward and a reduction inside its backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, problem: Problem, shard: VocabShard, wanted, settings):
        check = TargetCheck(problem, vocab=sys.maxsize if shard.reads else shard.vocab)
        rows = check.rows()
        whole = check.compact(rows)
        local = _local(whole, shard)
        route = _route(local, wanted, settings)
        kept = local.for_kernels(route.dtype)
        stats, exponentials = _local_statistics(kept, route, wanted)
        stats, weights = _gathered(shard, whole, kept, stats)
        if shard.reads:  # not before all ranks know the vocabulary: they refuse a target together
            TargetCheck(problem, vocab=shard.vocab).rows()
            _check_argmax(problem, shard)
        output = rows.spread_output(loss_terms(stats, weights, whole))
        state = recompute.RecomputeState(RowStatistics(stats.lse, stats.target_logit), weights, exponentials)
        tensors = (x, weight, problem.target, bias, problem.ce_weight)
        ctx.save_for_backward(*tensors, rows.keep, rows.drop, rows.masked)
        ctx.shapes = {name: t.shape for name, t in zip(TENSORS, tensors, strict=True) if t is not None}
        ctx.call = (problem.options, whole.dense, shard, wanted, route, state)
        ctx.mark_non_differentiable(*(metric for metric in output[1:] if metric is not None))
        return tuple(output)

    @staticmethod
    def backward(ctx, grad_output, *_metrics):
        options, dense, shard, wanted, route, state = ctx.call
        *tensors, keep, drop, masked = ctx.saved_tensors
        refuse_batched_upstream(grad_output)
        check_still_readable(ctx.shapes, dict(zip(TENSORS, tensors, strict=True)))
        rows = Rows(keep, drop, masked)
        problem = Problem(*tensors, options)
        local = _local(replace(rows.compact(problem), dense=dense), shard)
        with torch.no_grad():
            found = _backward(local, route, wanted, state, rows.select(grad_output), shard)
            found = rows.spread_gradients(found)
            padding = problem.vocab - shard.valid
            weight, bias = (_padded(g, padding) for g in (found.weight, found.bias))
        inputs = (problem.x, problem.weight, problem.bias)
        return *without_second_derivative((found.x, weight, bias), grad_output, *inputs), None, None, None, None


def _check_argmax(problem: Problem, shard: VocabShard) -> None:
    """The ranks' indices travel in the compute dtype."""
    if problem.options.needs_argmax and shard.vocab > EXACT_INDICES and problem.compute_dtype == torch.float32:
        raise ValueError(f"vocab_size must be at most {EXACT_INDICES} for token metrics, got {shard.vocab}")


def _route(local: Problem, wanted: WantedGradients, settings: Settings) -> Route:
    if local.vocab == 0:  # a shard of nothing but padding
        settings = replace(settings, engine="torch")
        local = replace(local, weight=local.x[:1] if local.tokens else local.x.new_empty(1, local.hidden))
    return choose_route(local, wanted, settings)


def _local(problem: Problem, shard: VocabShard) -> Problem:
    """The problem over this shard's own columns; targets elsewhere are −1."""
    return replace(problem, target=problem.target - shard.start).of_columns(slice(0, shard.valid))


def _target_here(local: Problem) -> torch.Tensor:
    """(N,) bool: whether the shard holds the target's column."""
    return local.target >= 0


def _local_statistics(
    local: Problem, route: Route, wanted: WantedGradients
) -> tuple[RowStatistics, recompute.KeptExponentials | None]:
    """Row statistics over the shard, and what its backward need not recompute."""
    if local.vocab == 0:
        nothing = torch.full((local.tokens,), -torch.inf, dtype=local.compute_dtype, device=local.device)
        column = torch.zeros(local.tokens, dtype=torch.int64, device=local.device)
        return RowStatistics(nothing, nothing, torch.zeros_like(nothing), column, nothing), None
    return recompute.statistics(make_engine(route.engine), local, route, wanted)


def _gathered(
    shard: VocabShard, whole: Problem, local: Problem, stats: RowStatistics
) -> tuple[RowStatistics, RowWeights]:
    """The statistics over the whole vocabulary, from one all-gather of all ranks' packed numbers."""
    options, weighted = whole.options, whole.ce_weight is not None
    here = _target_here(local)
    columns = [stats.lse, stats.target_logit]
    if options.smoothing:
        columns.append(stats.weighted_sum)
    if options.needs_argmax:
        columns += [stats.max_logit, (stats.argmax + shard.start).to(stats.lse.dtype)]
    if weighted:
        index = local.target.long().clamp(0, max(local.vocab - 1, 0))
        own = local.ce_weight[index] if local.vocab else torch.zeros_like(stats.lse)
        columns.append(torch.where(here, own, 0.0))
    total = local.ce_weight.sum() if weighted else stats.lse.new_full((), float(shard.valid))
    header = torch.tensor(shard.header(), dtype=stats.lse.dtype, device=whole.device)
    packed = torch.cat([header, total.to(header)[None], *columns])
    world = dist.get_world_size(shard.group)
    everyone = torch.empty(world * packed.numel(), dtype=packed.dtype, device=packed.device)
    dist.all_gather_into_tensor(everyone, packed, group=shard.group)
    everyone = everyone.view(world, -1)
    known = agreed(shard, everyone[:, :3])
    numbers = iter(everyone[:, 4:].view(world, len(columns), whole.tokens).unbind(1))
    parts = RowStatistics(next(numbers), next(numbers), next(numbers) if options.smoothing else None)
    if options.needs_argmax:
        parts = replace(parts, max_logit=next(numbers), argmax=next(numbers))
    target_weight = next(numbers).sum(dim=0) if weighted else None
    weights = _row_weights(shard, whole, target_weight, everyone[:, 3].sum() if weighted else float(shard.vocab))
    stats = over_parts(parts)
    return replace(stats, lse=torch.where(known, stats.lse, torch.nan)), weights


def _row_weights(shard: VocabShard, whole: Problem, target_weight, total) -> RowWeights:
    """objective.row_weights with what class weights need gathered from the ranks."""
    weights = replace(row_weights(replace(whole, ce_weight=None)), vocab=shard.vocab, total_weight=total)
    if target_weight is None:
        return weights
    target_weight = weights.mask(target_weight)
    mean = whole.options.reduction == "mean"
    return replace(
        weights,
        target_weight=target_weight,
        inverse_d=target_weight.sum().reciprocal() if mean else 1.0,
    )


def _backward(local: Problem, route: Route, wanted, state, upstream, shard: VocabShard):
    def reduce_dx(dx):
        return dist.all_reduce(dx, group=shard.group, async_op=True)

    if local.vocab == 0:
        found = replace(wanted, x=wanted.x and local.compute_dtype).allocate(local)
        if found.x is not None:
            reduce_dx(found.x.zero_()).wait()
            found = replace(found, x=found.x.to(wanted.x))
        return found
    engine = make_engine(route.engine)
    return recompute.backward(engine, local, route, wanted, state, upstream, reduce_dx)


def _padded(gradient: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """The gradient of a shard with zero rows for its padding."""
    if gradient is None or rows == 0:
        return gradient
    return torch.cat([gradient, gradient.new_zeros(rows, *gradient.shape[1:])])

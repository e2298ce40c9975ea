"""The `recompute` schedule: a store-free forward, and a backward that recomputes the softmax tile by tile.

    forward   one pass over the vocabulary reduces logits to row statistics; no logit is stored
    backward  for each vocabulary tile: dz (N, tile) again from x, W and the row statistics;
              dW[tile] = dzᵀ·x, written once;  dX += dz·W[tile], in fp32;  db[tile] = Σ_i dz

Four GEMMs. The upstream gradient is known when dz is computed, so it enters the rows' coefficients: per-token
gradients (reduction="none") and any loss scale cost nothing.

Less where exponentials of the vocabulary's first columns can be kept until backward:

    forward   e = exp(x·W[:kept]ᵀ − tile maximum), with the tiles' maxima and sums; the rest store-free as above
    backward  dz = e scaled by each row's coefficients, in place; dW[:kept], dX, db from it; then the rest tile by tile

Where the whole vocabulary's fit the workspace budget, in memory of their own: three GEMMs. Else where dW is wanted, in
dW's memory, which is taken in forward already: they lie behind the rows of dW that will be written from them, and
backward begins with these, before any other row of dW is written. That saves H/(N + H) of the fourth GEMM and costs
no memory.

Where dW is added to a buffer of the caller's, backward adds each tile's to its rows, once: weight_grad_buffer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from liger_cutedsl import gemm, objectives
from liger_cutedsl.call import Gradients, Problem, WantedGradients
from liger_cutedsl.compat import graph_is_kept
from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.gemm import matmul
from liger_cutedsl.objective import RowWeights, dz_unit, scaled_for_fp16
from liger_cutedsl.route import Route
from liger_cutedsl.row_statistics import RowStatistics, combined, over_parts
from liger_cutedsl.schedules import footprint, selected
from liger_cutedsl.schedules.exponentials import KeptExponentials, Waiting, end_of, exponentials_buffer, kept_columns
from liger_cutedsl.schedules.schedule import Task, gemms
from liger_cutedsl.tiling import (
    CAST_COLUMNS,
    FORWARD_BYTES,
    SPARE_COLUMNS,
    TILE_QUANTUM,
    Tile,
    fitting_width,
    slices,
    vocabulary_tiles,
)

NAME = "recompute"


@dataclass
class RecomputeState:
    """What backward needs from forward: three (N,) vectors, and the exponentials kept for it."""

    stats: RowStatistics
    rows: RowWeights
    kept: KeptExponentials | None = None

    def take_kept(self) -> KeptExponentials | None:
        """The exponentials, once: they turn into dz where they lie. A backward that keeps its graph recomputes all."""
        if self.kept is None or self.kept.waiting.taken or graph_is_kept():
            return None
        self.kept.waiting.end()
        return self.kept


def obstacle(engine, task: Task) -> None:
    return None


def plan(engine, task: Task, reason: str) -> Route:
    problem, wanted, copies = task.local, task.wanted, footprint.copied_bytes(task, CAST_COLUMNS)
    if problem.vocab == 0:  # a shard of nothing but padding
        return Route(engine.name, NAME, problem.gemm_dtype, reason, tile_width=TILE_QUANTUM)
    budget = footprint.budget(engine, task)
    kept = kept_columns(engine, problem, wanted, budget)
    tiled = 0 if kept == problem.vocab else kept  # all are kept: tiles are for a second backward
    fixed, column = footprint.accumulator_bytes(problem, wanted), engine.column_bytes(problem)
    width = engine.tile_width(problem, fitting_width(problem.vocab - tiled, column, budget - fixed), tiled)
    count = gemms(4 - kept / problem.vocab, wanted) if wanted else 1
    rows = 0 if wanted else _forward_rows(engine, problem, width)
    return Route(
        engine.name,
        NAME,
        problem.gemm_dtype,
        reason,
        tile_width=width,
        kept=kept,
        chunk=rows,
        gemms=count,
        workspace_bytes=footprint.recompute_bytes(engine, task, width, kept, rows),
        copied_bytes=copies,
    )


def _forward_rows(engine, problem: Problem, width: int) -> int:
    """How many rows a forward alone takes at a time, where its partial results of all are worth the slices; else 0."""
    if engine.forward_bytes(problem, width, 0) <= FORWARD_BYTES:
        return 0
    rows = engine.forward_rows(problem)
    return 0 if rows == problem.tokens else rows


def forward(engine, task: Task, route: Route) -> tuple[NamedTuple, RecomputeState]:
    problem, local = task.problem, task.local.for_kernels(route.dtype, but=("weight",))
    try:
        stats, kept = _statistics(engine, local, route, task.wanted)
        stats = replace(stats, selected=selected.logits(engine, local))
    except KernelFailure as failure:
        task.split.failed(failure, problem)
        raise
    stats, rows = task.split.combine(stats, problem, local)
    stats = objectives.evaluated(stats, rows, problem)
    return objectives.of(problem.options).results(stats, rows, problem), state_of(stats, rows, kept)


def state_of(stats: RowStatistics, rows: RowWeights, kept: KeptExponentials | None = None) -> RecomputeState:
    """From evaluated statistics of all rows."""
    needed = RowStatistics(stats.lse, stats.target_logit, selected=stats.selected, entropy=stats.entropy)
    if stats.evaluated is not None:
        needed = replace(needed, evaluated=stats.evaluated.derivatives())
    return RecomputeState(needed, rows, kept)


def _statistics(
    engine, problem: Problem, route: Route, wanted: WantedGradients
) -> tuple[RowStatistics, KeptExponentials | None]:
    """Row statistics, and what backward will not have to recompute."""
    if problem.vocab == 0:
        return RowStatistics.of_no_columns(problem), None
    e, weight_gradient, e_dtype = None, None, engine.dz_dtype(problem.x.dtype)
    if route.kept == problem.vocab:
        e = exponentials_buffer(problem, problem.tokens, e_dtype)
    elif route.kept:
        weight_gradient = replace(wanted, x=None, bias=None).allocate(problem).weight
        e = end_of(weight_gradient, problem.tokens, route.kept, e_dtype)
    pieces, maxima = [], []
    for tile in (*_parts(problem, 0, route.kept), *_parts(problem, route.kept, problem.vocab)):
        part = problem if tile.width == problem.vocab else problem.of_columns(tile.columns)
        part = part.for_kernels(route.dtype)
        if tile.start < route.kept:
            stats, m, _ = engine.exp_chunk(part, out=e[:, tile.columns])
            maxima.append(m)
        else:
            stats = _row_statistics(engine, part, route)
        pieces.append(stats if stats.argmax is None else replace(stats, argmax=stats.argmax + tile.start))
    stats = pieces[0] if len(pieces) == 1 else over_parts(combined(pieces, torch.stack))
    if not maxima:
        return stats, None
    maxima = maxima[0] if len(maxima) == 1 else torch.cat(maxima, dim=1)
    return stats, KeptExponentials(e, maxima, weight_gradient, Waiting.of(e, weight_gradient))


def _row_statistics(engine, problem: Problem, route: Route) -> RowStatistics:
    """Some rows at a time, where the route says so: their partial results are folded before the next ones come."""
    if not route.chunk:
        return engine.row_statistics(problem, route.tile_width)
    slices_of = (problem.of(rows) for rows in slices(problem.tokens, route.chunk))
    return combined([engine.row_statistics(part, route.tile_width) for part in slices_of], torch.cat)


def _parts(problem: Problem, start: int, stop: int) -> Iterator[Tile]:
    """Columns [start, stop) in as many parts as are cast at once: one, where weight is multiplied as it is."""
    cast = problem.weight.dtype != problem.x.dtype
    return vocabulary_tiles(stop, CAST_COLUMNS if cast else max(stop - start, 1), start)


def backward(engine, task: Task, route: Route, state: RecomputeState, upstream: NamedTuple) -> Gradients:
    try:
        return _gradients(engine, task, route, state, upstream)
    except KernelFailure as failure:
        task.split.failed_in_backward(failure, task.problem, task.wanted)
        raise


def _gradients(engine, task: Task, route: Route, state: RecomputeState, upstream: NamedTuple) -> Gradients:
    problem, tile_width = task.local.for_kernels(route.dtype, but=("weight",)), route.tile_width
    dz_dtype, unscale = engine.dz_dtype(problem.x.dtype), None
    unit = dz_unit(problem, dz_dtype)
    coefficients = objectives.of(problem.options).coefficients(state.stats, state.rows, problem, upstream, unit)
    if dz_dtype == torch.float16:
        coefficients, unscale = scaled_for_fp16(coefficients, problem)
    kept, first = state.take_kept(), 0
    sink = _GradientSink(engine, problem, task, problem.options.scale / unit, unscale, kept, coefficients.selected)
    if kept is not None:
        dz, first = kept.e, kept.e.shape[1]
        part = problem if first == problem.vocab else problem.of_columns(slice(0, first))
        sums = engine.scale_chunk(part, dz, kept.maxima, state.stats.lse, coefficients, task.wanted.bias is not None)
        for tile in _parts(problem, 0, first):
            sink.add(dz[:, tile.columns], tile, None if sums is None else sums[tile.columns])
        if first == problem.vocab:
            return sink.finish()
        del kept
    buffer = torch.empty(problem.tokens, tile_width + SPARE_COLUMNS, dtype=dz_dtype, device=problem.device)
    fix, target = coefficients.fix.to(dz_dtype)[:, None], problem.target - first
    owner, column = target // tile_width, (target % tile_width).long()
    for index, tile in enumerate(vocabulary_tiles(problem.vocab, tile_width, first)):
        dz = buffer[:, : tile.width]
        part = None  # before another is cast
        part = problem.columns_for_kernels(tile.columns, route.dtype)
        engine.dz_tile(part, state.stats.lse, coefficients, Tile(0, tile.width), out=dz)
        buffer.scatter_(1, column.masked_fill(owner != index, tile_width)[:, None], fix)
        sink.add(dz, tile, weight=part.weight)
    del buffer  # before dX takes memory a second time, in its own dtype
    dz = part = None
    return sink.finish()


class _GradientSink:
    """Turns tiles of dz into dX, dW and db: times alpha, and times unscale, a scalar tensor, where there is one.

    buffer: of the caller's, to which dW is added; its gradient is None then.
    """

    def __init__(self, engine, problem: Problem, task: Task, alpha: float, unscale, kept, selected_dz):
        self.engine, self.problem, self.split, self.wanted = engine, problem, task.split, task.wanted
        self.alpha, self.unscale, self.pending, self.selected_dz = alpha, unscale, None, selected_dz
        self.x = engine.gemm_operand(problem.x) if task.wanted.weight is not None else None
        self.buffer = problem.weight_grad_buffer if task.wanted.weight is not None else None
        alone = kept is not None and kept.e.shape[1] == problem.vocab and len([*_parts(problem, 0, problem.vocab)]) == 1
        one_product = alone and not task.split.sums_dx and selected_dz is None
        # dX is summed in the compute dtype; its own dtype comes last
        sums = task.returned if one_product else replace(task.returned, x=task.wanted.x and problem.compute_dtype)
        lent = None if kept is None else kept.weight_gradient
        self.gradients = (sums if lent is None else replace(sums, weight=None)).allocate(problem)
        if lent is not None:
            self.gradients = replace(self.gradients, weight=lent)
        if problem.vocab == 0 and self.gradients.x is not None:
            self.gradients.x.zero_()
            self._dx_is_complete()

    def add(self, dz: torch.Tensor, tile: Tile, column_sums: torch.Tensor | None = None, weight=None) -> None:
        """weight: the tile's rows as they are multiplied, where they are there."""
        grads = self.gradients
        if grads.x is not None:
            weight = self.problem.weight[tile.columns].to(self.problem.x.dtype) if weight is None else weight
            weight = self.engine.gemm_operand(weight)
            matmul(dz, weight, out=grads.x, beta=float(tile.start > 0), alpha=self.alpha)
            if tile.stop == self.problem.vocab:
                if self.selected_dz is not None:
                    selected.add_dx(self.engine, self.problem, self.selected_dz, grads.x, self.alpha)
                self._dx_is_complete()
        if grads.weight is not None:
            self._write(grads.weight[tile.columns], dz)
        if self.buffer is not None:
            self._add_to_buffer(dz, tile)
        if grads.bias is not None:
            if column_sums is None:
                column_sums = gemm.column_sums(dz, self.problem.compute_dtype)
            sums = column_sums if self.unscale is None else column_sums * self.unscale
            torch.mul(sums, self.alpha, out=grads.bias[tile.columns])

    def _dx_is_complete(self) -> None:
        """Other ranks' shares are added under the products that follow."""
        if self.unscale is not None:
            self.gradients.x.mul_(self.unscale)
        self.pending = self.split.add_dx(self.gradients.x)

    def finish(self) -> Gradients:
        if self.pending is not None:
            self.pending.wait()
        grads = self.gradients
        if self.selected_dz is not None:
            self._add_selected(grads)
            if self.buffer is not None and self.buffer.lacks_selected:
                self._add_selected(Gradients(weight=self.buffer.tensor))
                self.buffer.selected_added()
        return grads if grads.x is None else replace(grads, x=grads.x.to(self.wanted.x))

    def _add_selected(self, gradients: Gradients) -> None:
        factor = self.alpha if self.unscale is None else self.alpha * self.unscale
        selected.add_dw(self.engine, self.problem, self.selected_dz, gradients, factor)

    def _add_to_buffer(self, dz: torch.Tensor, tile: Tile) -> None:
        """What an attempt before this one has not added."""
        rows = self.buffer.rest(*tile)
        if rows.start < rows.stop:
            self._write(self.buffer.tensor[rows], dz[:, rows.start - tile.start :], beta=1.0)
        self.buffer.added(tile.stop)

    def _write(self, out: torch.Tensor, dz: torch.Tensor, beta: float = 0.0) -> None:
        """out = beta·out + dzᵀ·x: directly, or through fp32 where the scale of fp16 has to come off first."""
        if self.unscale is None:
            matmul(dz.t(), self.x, out=out, beta=beta, alpha=self.alpha)
            return
        wide = torch.empty_like(out, dtype=torch.float32)
        matmul(dz.t(), self.x, out=wide, alpha=self.alpha).mul_(self.unscale)
        out.add_(wide) if beta else out.copy_(wide)

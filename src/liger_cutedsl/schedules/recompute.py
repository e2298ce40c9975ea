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

Where dX's sum of all rows leaves no room for wide tiles, both go by blocks of rows (blocks.py), each of which is as
above, though only the first keeps exponentials: dW's memory, whose share of its vocabulary is the larger for that, is
written by then. dX of a block is finished before the next begins; dW is added to, in one rounding a block.

Where dW is added to a buffer of the caller's, backward adds each tile's to its rows, once: weight_grad_buffer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from liger_cutedsl import objectives
from liger_cutedsl.call import Gradients, Problem, WantedGradients
from liger_cutedsl.compat import graph_is_kept
from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.objective import RowWeights, dz_unit, scaled_for_fp16
from liger_cutedsl.route import Route
from liger_cutedsl.row_statistics import RowStatistics, combined, over_parts
from liger_cutedsl.schedules import footprint, selected
from liger_cutedsl.schedules.blocks import blocks, first_of, room_for_dz, row_block
from liger_cutedsl.schedules.exponentials import KeptExponentials, Waiting, end_of, exponentials_buffer, kept_columns
from liger_cutedsl.schedules.gradient_sink import GradientSink
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
    budget = footprint.budget(engine, task)
    if problem.vocab == 0:  # a shard of nothing but padding
        block = row_block(engine, task, budget)
        return Route(engine.name, NAME, problem.gemm_dtype, reason, tile_width=TILE_QUANTUM, row_block=block)
    kept = kept_columns(engine, problem, wanted, budget)
    # ranks have as many blocks whatever they keep
    block = row_block(engine, task, budget) if kept < problem.vocab or task.split.sums_dx else 0
    part = first_of(problem, block)
    if block and kept < problem.vocab:
        kept = kept_columns(engine, part, wanted, 0)  # in dW's memory alone
    tiled = 0 if block or kept == problem.vocab else kept  # all are kept: tiles are for a second backward
    room, column = room_for_dz(engine, part, wanted, budget, block > 0), engine.column_bytes(part)
    width = engine.tile_width(part, fitting_width(problem.vocab - tiled, column, room), tiled)
    saved = 1 if kept == problem.vocab else kept * part.tokens / (problem.vocab * max(problem.tokens, 1))
    rows = 0 if wanted else _forward_rows(engine, problem, width)
    return Route(
        engine.name,
        NAME,
        problem.gemm_dtype,
        reason,
        tile_width=width,
        kept=kept,
        row_block=block,
        chunk=rows,
        gemms=gemms(4 - saved, wanted) if wanted else 1,
        workspace_bytes=footprint.recompute_bytes(engine, task, width, kept, rows, block),
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
    of_blocks, found, maxima = blocks(problem.tokens, route.row_block), [], []
    e, weight_gradient, e_dtype = None, None, engine.dz_dtype(problem.x.dtype)
    if route.kept == problem.vocab:
        e = exponentials_buffer(problem, problem.tokens, e_dtype)
    elif route.kept:
        weight_gradient = replace(wanted, x=None, bias=None).allocate(problem).weight
        e = end_of(weight_gradient, of_blocks[0].stop, route.kept, e_dtype)
    for rows in of_blocks:
        kept_here = None if e is None or rows.start >= len(e) else e[rows]
        stats, m = _statistics_and_maxima(engine, problem.of(rows), route, kept_here)
        found.append(stats)
        maxima += [] if m is None else [m]
    stats = found[0] if len(found) == 1 else combined(found, torch.cat)
    if e is None:
        return stats, None
    maxima = maxima[0] if len(maxima) == 1 else torch.cat(maxima)
    return stats, KeptExponentials(e, maxima, weight_gradient, Waiting.of(e, weight_gradient))


def _statistics_and_maxima(
    engine, problem: Problem, route: Route, e: torch.Tensor | None
) -> tuple[RowStatistics, torch.Tensor | None]:
    """Of a block. e (rows, kept): takes the exponentials of the first columns, whose tiles' maxima are returned."""
    kept, pieces, maxima = 0 if e is None else e.shape[1], [], []
    for tile in (*_parts(problem, 0, kept), *_parts(problem, kept, problem.vocab)):
        part = problem if tile.width == problem.vocab else problem.of_columns(tile.columns)
        part = part.for_kernels(route.dtype)
        if tile.start < kept:
            stats, m, _ = engine.exp_chunk(part, out=e[:, tile.columns])
            maxima.append(m)
        else:
            stats = _row_statistics(engine, part, route)
        pieces.append(stats if stats.argmax is None else replace(stats, argmax=stats.argmax + tile.start))
    stats = pieces[0] if len(pieces) == 1 else over_parts(combined(pieces, torch.stack))
    if not maxima:
        return stats, None
    return stats, maxima[0] if len(maxima) == 1 else torch.cat(maxima, dim=1)


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
    problem, unscale = task.local.for_kernels(route.dtype, but=("weight",)), None
    dz_dtype = engine.dz_dtype(problem.x.dtype)
    unit = dz_unit(problem, dz_dtype)
    coefficients = objectives.of(problem.options).coefficients(state.stats, state.rows, problem, upstream, unit)
    if dz_dtype == torch.float16:
        coefficients, unscale = scaled_for_fp16(coefficients, problem)
    buffer, kept, block = problem.weight_grad_buffer, state.take_kept(), route.row_block
    if buffer is not None:
        block = buffer.row_block(block)
    sink = GradientSink(
        engine,
        problem,
        task,
        alpha=problem.options.scale / unit,
        unscale=unscale,
        selected_dz=coefficients.selected,
        lent=None if kept is None else kept.weight_gradient,
        one_product=_is_one_product(problem, task, kept),
        in_blocks=block > 0,
    )
    try:
        for rows in blocks(problem.tokens, block):
            sink.begin(rows, problem.of(rows))
            of_rows, first = (state.stats.lse[rows], coefficients.of(rows)), 0
            if kept is not None and rows.start < len(kept.e):
                first = _add_kept(engine, sink, kept.e[rows], kept.maxima[rows], *of_rows)
            _add_tiles(engine, sink, first, route, *of_rows)
        return sink.finish()
    except KernelFailure as failure:
        rest = task.problem.of(slice(sink.summed, None))
        task.split.failed_in_backward(failure, rest, task.wanted, block)
        raise


def _is_one_product(problem: Problem, task: Task, kept: KeptExponentials | None) -> bool:
    """Whether nothing but one product of kept exponentials makes dX: not where it is summed over ranks."""
    if kept is None or task.split.sums_dx or problem.selected_token_ids is not None:
        return False
    return kept.e.shape[1] == problem.vocab and len([*_parts(problem, 0, problem.vocab)]) == 1


def _add_kept(engine, sink: GradientSink, dz: torch.Tensor, maxima: torch.Tensor, lse, coefficients) -> int:
    """dz of the kept columns, whose number it returns, where their exponentials lie."""
    problem, first = sink.part, dz.shape[1]
    part = problem if first == problem.vocab else problem.of_columns(slice(0, first))
    sums = engine.scale_chunk(part, dz, maxima, lse, coefficients, sink.wanted.bias is not None)
    for tile in _parts(problem, 0, first):
        sink.add(dz[:, tile.columns], tile, None if sums is None else sums[tile.columns])
    return first


def _add_tiles(engine, sink: GradientSink, first: int, route: Route, lse: torch.Tensor, coefficients) -> None:
    """dz of the columns from `first` on, recomputed."""
    problem, tile_width = sink.part, route.tile_width
    if first == problem.vocab:
        return
    dtype = engine.dz_dtype(problem.x.dtype)
    buffer = torch.empty(problem.tokens, tile_width + SPARE_COLUMNS, dtype=dtype, device=problem.device)
    fix, target = coefficients.fix.to(dtype)[:, None], problem.target - first
    owner, column = target // tile_width, (target % tile_width).long()
    for index, tile in enumerate(vocabulary_tiles(problem.vocab, tile_width, first)):
        dz = buffer[:, : tile.width]
        part = None  # before another is cast
        part = problem.columns_for_kernels(tile.columns, route.dtype)
        engine.dz_tile(part, lse, coefficients, Tile(0, tile.width), out=dz)
        buffer.scatter_(1, column.masked_fill(owner != index, tile_width)[:, None], fix)
        sink.add(dz, tile, weight=part.weight)

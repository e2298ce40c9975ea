"""The `single_pass` schedule: loss and gradients in forward, chunk of tokens by chunk, with three GEMMs.

    for each chunk:  e = exp(x·Wᵀ − tile maximum) into a (chunk, V) buffer, with the tiles' maxima and sums
                     dz = e scaled by each row's coefficients, in place, the target's element exact
                     dX[chunk] = dz·W;  dW += dzᵀ·x;  db += Σ_i dz
    backward:        the gradients times the upstream gradient, a scalar: at once in forward where it is expected

Faster than `recompute` by the fourth GEMM; dW is rounded once per chunk unless its sum is wider (Route.dw_sum) or,
where chunks are many, has a second part for the later ones (Route.dw_low_bytes). It cannot know the upstream gradient,
so reduction="none" takes `recompute`; and calls without gradients store no exponentials.

fp16's gradients are kept in fp32 until the upstream gradient is known (WantedGradients.kept).

Where dW is added to a buffer of the caller's, each chunk's is, in forward, for the upstream gradient that is expected.
Backward adds what is missing where another comes, by `recompute`: two GEMMs more. So it has to be asked for.

Over a split vocabulary the same in another order, with two buffers (overlapped.py). All ranks take chunks of one size:
as many tokens as fit the budget of each (Route.chunk_limit), which they tell each other in the first call.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from liger_cutedsl.call import Gradients, Problem, WantedGradients
from liger_cutedsl.cross_entropy import LossOutput
from liger_cutedsl.route import DEFAULT_CHUNK, DEFAULT_SPLIT_CHUNK, Route
from liger_cutedsl.schedules import dw_sum, footprint, overlapped
from liger_cutedsl.schedules.chunk_rows import rows_of
from liger_cutedsl.schedules.exponentials import exponentials_buffer
from liger_cutedsl.schedules.forward_gradients import GradientSink, Weighing
from liger_cutedsl.schedules.kept import AddedInForward, KeptGradients
from liger_cutedsl.schedules.recompute import state_of
from liger_cutedsl.schedules.schedule import Task, gemms
from liger_cutedsl.split import equal_chunk
from liger_cutedsl.tiling import TILE_QUANTUM, slices

NAME = "single_pass"

# It reads and writes all of dW once a chunk. Chunks smaller than this cost more than the GEMM they save.
SMALLEST_CHUNK = 512


# Why "auto" leaves a split vocabulary to recompute, on every device alike. (If it did not, ranks would have to agree on
# whether chunks fit, too.)
SPLIT_ONLY_WHERE_ASKED_FOR = "'single_pass' over a split vocabulary was not measured on GPUs: it is taken if asked for"

# Tokens of a chunk of a split vocabulary where the user names a workspace: as many as fit, but no more than gain
# anything.
LARGEST_SPLIT_CHUNK = 2 * DEFAULT_CHUNK


def obstacle(engine, task: Task) -> str | None:
    problem, options = task.problem, task.problem.options
    if task.split.sums_dx and task.settings.schedule != NAME:
        return SPLIT_ONLY_WHERE_ASKED_FOR
    if options.reduction == "none":
        return "reduction='none' knows its gradient's weights only in backward"
    if problem.weight_grad_buffer is not None and (why := _not_in_forward(task)):
        return f"{problem.weight_grad_buffer.name} {why}"
    if options.needs_slope_apart and task.settings.schedule != NAME:
        return "stored exponentials hold the softcap's slope, and label smoothing or an entropy needs both apart"
    # all ranks of a split vocabulary alike, one whose shard is padding, which PyTorch computes, too
    alike = task.split.sums_dx and problem.device.type == "cuda"
    if (problem.gemm_dtype if alike else engine.dz_dtype(problem.gemm_dtype)) == torch.float16:
        if options.reduction == "mean" and not problem.dense and problem.count is None:  # while a graph is captured
            return "a float16 mean needs a scale from the number of valid rows, which only the device knows"
        if not fp16_scale_fits(problem):
            own = "a loss of one's own" if problem.row_loss is not None else "class weights, token scaling or a z-loss"
            return f"float16 with {own} needs a scale known only in backward"
    return None


def _not_in_forward(task: Task) -> str | None:
    """Why dW is not added to the caller's buffer before backward."""
    if task.split.sums_dx:
        return "gets its gradient in backward where the vocabulary is split"
    if task.settings.schedule != NAME:
        return "gets its gradient in backward"
    return task.problem.weight_grad_buffer.not_in_forward


def plan(engine, task: Task, reason: str) -> Route:
    problem, wanted = task.local, task.wanted
    sums, copies = dw_sum.sum_dtypes(problem, wanted), footprint.copied_bytes(task)
    allowed, limit = footprint.budget(engine, task) + copies, 0
    if task.split.sums_dx:
        limit = task.split.chunk_limit(functools.partial(_fitting_split_chunk, engine, task, sums, allowed))
        chunk = min(equal_chunk(limit, problem.tokens), problem.tokens)
    else:
        chunk = _fitting_chunk(engine, task, sums, allowed)
    sums, low = dw_sum.chosen(engine, task, sums, chunk, allowed)
    if not low and (needed := dw_sum.second_part(task, sums, chunk)):
        smaller = _fitting_chunk(engine, task, sums, allowed - needed)
        chunk, low = (smaller, needed) if smaller >= DEFAULT_CHUNK else (chunk, 0)
    return Route(
        engine.name,
        NAME,
        problem.gemm_dtype,
        reason,
        chunk=chunk,
        chunk_limit=limit,
        dw_sum=sums.weight,
        dw_low_bytes=low,
        gemms=gemms(3 + problem.options.needs_slope_apart, wanted),
        buffers=footprint.buffers(task, chunk),
        workspace_bytes=footprint.single_pass_bytes(engine, task, sums, chunk, low=low),
        copied_bytes=copies,
    )


def _fitting_chunk(engine, task: Task, sums: WantedGradients, allowed: int) -> int:
    """The engine's choice among the chunks that fit the allowed bytes; SMALLEST_CHUNK where none does."""
    problem, least = task.problem, min(SMALLEST_CHUNK, task.problem.tokens)
    per_row = engine.chunk_bytes(problem, 2) - engine.chunk_bytes(problem, 1)
    # beside a chunk of many rows, whose dX cuBLAS computes without scratch memory
    fixed = footprint.single_pass_bytes(engine, task, sums, problem.tokens) - per_row * problem.tokens
    fitting = min(max((allowed - fixed) // per_row // TILE_QUANTUM * TILE_QUANTUM, least), problem.tokens)
    chunk = engine.chunk_size(problem, fitting)
    while fitting > least and footprint.single_pass_bytes(engine, task, sums, chunk) > allowed:
        fitting = max(least, fitting - TILE_QUANTUM)  # what a product of few rows allocates is none of per_row
        chunk = engine.chunk_size(problem, fitting)
    return chunk


def _fitting_split_chunk(engine, task: Task, sums: WantedGradients, allowed: int) -> int:
    """The tokens of a chunk of which two, and a sum of dX beside them, fit the allowed bytes, however many tokens there
    are; SMALLEST_CHUNK where none does."""
    most = DEFAULT_SPLIT_CHUNK if task.settings.workspace_mb is None else LARGEST_SPLIT_CHUNK
    sizes = range(most, SMALLEST_CHUNK, -TILE_QUANTUM)
    fitting = (n for n in sizes if footprint.single_pass_bytes(engine, task, sums, n, held=2) <= allowed)
    return next(fitting, SMALLEST_CHUNK)


def forward(engine, task: Task, route: Route) -> tuple[LossOutput, KeptGradients]:
    wanted, sums = task.wanted, replace(dw_sum.sum_dtypes(task.local, task.wanted), weight=route.dw_sum)
    if task.split.sums_dx:
        weigh = functools.partial(Weighing.of, task.local, engine.dz_dtype(route.dtype), None)
        return overlapped.forward(engine, task, route, sums, GradientSink, weigh)
    problem = task.problem
    added_to = None if sums.weight is None else problem.weight_grad_buffer
    sums = sums if added_to is None else replace(sums, weight=None)
    in_16_bits = dw_sum.in_16_bits(-(-problem.tokens // route.chunk)) if route.dw_low_bytes else None
    sink = GradientSink(engine, sums.allocate(problem), problem.tokens, added_to, in_16_bits)
    problem = problem.for_kernels(route.dtype)
    dz_dtype = engine.dz_dtype(problem.x.dtype)
    weigh = functools.cache(functools.partial(Weighing.of, problem, dz_dtype, task.expected_upstream))
    rows = rows_of(engine, problem, weigh)
    buffer = exponentials_buffer(problem, min(route.chunk, problem.tokens), dz_dtype)
    for chunk in slices(problem.tokens, route.chunk):
        part = problem.of(chunk)
        dz = buffer[: part.tokens]
        column_sums = rows.dz_of(chunk, part, dz, wanted.bias is not None)
        sink.add(dz, column_sums, part, chunk, weigh())
    del buffer, dz
    kept = KeptGradients.of(sink.take(), wanted, weigh().expected)
    if problem.weight_grad_buffer is not None:
        kept = AddedInForward(kept, state_of(rows.statistics(), weigh().rows), problem.weight_grad_buffer)
    return rows.results(), kept


def backward(engine, task: Task, route: Route, state, upstream: torch.Tensor) -> Gradients:
    raise NotImplementedError("single_pass keeps gradients, and no state of its own")


def fp16_scale_fits(problem: Problem) -> bool:
    """Whether dz fits fp16 with a scale chosen from N alone: class weights, the target's probability, a z-loss and a
    loss of the caller's own make it of any size."""
    options = problem.options
    return (
        problem.row_loss is None
        and problem.ce_weight is None
        and not options.lse_square_scale
        and not options.use_token_scaling
    )

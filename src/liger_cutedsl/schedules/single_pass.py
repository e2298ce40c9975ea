"""The `single_pass` schedule: loss and gradients in forward, chunk of tokens by chunk, with three GEMMs.

    for each chunk:  e = exp(x·Wᵀ − tile maximum) into a (chunk, V) buffer, with the tiles' maxima and sums
                     dz = e scaled by each row's coefficients, in place, the target's element exact
                     dX[chunk] = dz·W;  dW += dzᵀ·x;  db += Σ_i dz
    backward:        the gradients times the upstream gradient, a scalar

Faster than `recompute` by the fourth GEMM; dW is rounded once per chunk unless accum_dtype is wider. It cannot know
the upstream gradient, so reduction="none" takes `recompute`; and calls without gradients store no exponentials.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from liger_cutedsl.gemm import matmul
from liger_cutedsl.objective import (
    LossOutput,
    combined,
    divisor,
    dz_unit,
    loss_terms,
    row_coefficients,
    row_weights,
)
from liger_cutedsl.problem import Gradients, Problem, WantedGradients
from liger_cutedsl.schedules import recompute
from liger_cutedsl.schedules.kept import KeptGradients
from liger_cutedsl.schedules.tiling import slices

if TYPE_CHECKING:
    from liger_cutedsl.routing import Route

# fp16: dz is at most twice this (an eighth of fp16's largest number), and the GEMMs take it down again so that the
# gradients kept until backward are those of a loss 16 times smaller than the sum over rows: a token that fills a
# batch of a million rows still fits.
FP16_DZ, FP16_GRADIENTS = 2.0**12, 2.0**-4


def accumulator_dtype(problem: Problem, wanted: WantedGradients) -> torch.dtype | None:
    """What dW is summed in, chunk by chunk: options.accum_dtype where that is wider than dW; None without a dW."""
    accum = problem.options.accum_dtype
    if wanted.weight is None or accum is None or accum.itemsize <= wanted.weight.itemsize:
        return wanted.weight
    return accum


def accumulator_bytes(problem: Problem, wanted: WantedGradients) -> int:
    """Bytes of the sums that are not themselves the gradients."""
    bias = 0 if wanted.bias is None else problem.vocab * problem.compute_dtype.itemsize
    dtype = accumulator_dtype(problem, wanted)
    return bias if dtype == wanted.weight else bias + problem.vocab * problem.hidden * dtype.itemsize


def forward(engine, problem: Problem, route: Route, wanted: WantedGradients) -> tuple[LossOutput, object]:
    if not wanted:
        return recompute.forward(engine, problem, route, wanted)
    sink = _GradientSink(engine, problem, wanted)
    problem = problem.for_kernels(route.dtype)
    dz_dtype, rows = engine.dz_dtype(problem.x.dtype), row_weights(problem)
    dz_scale, scale = dz_unit(problem, dz_dtype), 1.0
    if dz_dtype == torch.float16:
        dz_scale, scale = dz_scale * FP16_DZ, fp16_scale(problem)
    upstream = torch.full((), dz_scale, dtype=problem.compute_dtype, device=problem.device)
    buffer = recompute.exponentials_buffer(problem, min(route.chunk, problem.tokens), dz_dtype)
    pieces = []
    for chunk in slices(problem.tokens, route.chunk):
        part = problem.of(chunk)
        e = buffer[: part.tokens]
        stats, tile_max = engine.exp_chunk(part, out=e)
        coefficients = row_coefficients(stats, rows.of(chunk), problem.options, upstream)
        sums = engine.scale_chunk(part, e, tile_max, stats.lse, coefficients, wanted.bias is not None)
        sink.add(e, sums, part, chunk, alpha=scale / dz_scale)
        pieces.append(stats)
    del buffer, e
    stats = combined(pieces, torch.cat) if len(pieces) > 1 else pieces[0]
    return loss_terms(stats, rows, problem), KeptGradients(sink.finish(), scale)


class _GradientSink:
    """Turns chunks of dz into dX, dW and db."""

    def __init__(self, engine, problem: Problem, wanted: WantedGradients):
        self.engine, self.wanted = engine, wanted
        self.gradients = WantedGradients(
            wanted.x, accumulator_dtype(problem, wanted), wanted.bias and problem.compute_dtype
        ).allocate(problem)

    def add(
        self, dz: torch.Tensor, column_sums: torch.Tensor | None, part: Problem, chunk: slice, alpha: float
    ) -> None:
        grads, first = self.gradients, chunk.start == 0
        if grads.x is not None:
            matmul(dz, self.engine.gemm_operand(part.weight), out=grads.x[chunk], alpha=alpha)
        if grads.weight is not None:
            x = self.engine.gemm_operand(part.x)
            matmul(dz.t(), x, out=grads.weight, accumulate=not first, alpha=alpha)
        if grads.bias is not None:
            torch.mul(column_sums, alpha, out=grads.bias) if first else grads.bias.add_(column_sums, alpha=alpha)

    def finish(self) -> Gradients:
        dtypes = (self.wanted.x, self.wanted.weight, self.wanted.bias)
        found = (self.gradients.x, self.gradients.weight, self.gradients.bias)
        self.gradients = None  # so that an accumulator wider than its gradient is freed here
        return Gradients(*(None if g is None else g.to(dtype) for g, dtype in zip(found, dtypes, strict=True)))


def fp16_scale(problem: Problem) -> float:
    """The scale of the kept gradients, a power of two: of the sum over rows, whatever the loss is."""
    return 2.0 ** math.floor(math.log2(divisor(problem))) * FP16_GRADIENTS


def fp16_scale_fits(problem: Problem) -> bool:
    """Whether it does, chosen from N alone: class weights and a z-loss make gradients of any size."""
    return problem.ce_weight is None and not problem.options.lse_square_scale

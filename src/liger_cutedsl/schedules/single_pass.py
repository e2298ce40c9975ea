"""The `single_pass` schedule: loss and gradients in forward, chunk of tokens by chunk, with three GEMMs.

    for each chunk:  e = exp(x·Wᵀ − tile maximum) into a (chunk, V) buffer, with the tiles' maxima and sums
                     dz = e scaled by each row's coefficients, in place, the target's element exact
                     dX[chunk] = dz·W;  dW += dzᵀ·x;  db += Σ_i dz
    backward:        the gradients times the upstream gradient, a scalar

Faster than `recompute` by the fourth GEMM; dW is rounded once per chunk unless its sum is wider (Route.dw_sum). It
cannot know the upstream gradient, so reduction="none" takes `recompute`; and calls without gradients store no
exponentials.

fp16's gradients are kept in fp32 until the upstream gradient is known (WantedGradients.kept).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from liger_cutedsl.gemm import matmul
from liger_cutedsl.objective import (
    LossOutput,
    combined,
    dz_unit,
    loss_terms,
    row_coefficients,
    row_weights,
)
from liger_cutedsl.problem import Gradients, Problem, WantedGradients
from liger_cutedsl.schedules import recompute
from liger_cutedsl.schedules.kept import KeptGradients
from liger_cutedsl.tiling import slices

if TYPE_CHECKING:
    from liger_cutedsl.routing import Route

# fp16's dz is at most twice this, an eighth of fp16's largest number; the GEMMs, summing in fp32, take it down again.
FP16_DZ = 2.0**12

# dW may be rounded to 16 bits this often: its error is then some 2.5 times that of one rounding.
MOST_ROUNDINGS = 8


def sum_dtypes(problem: Problem, wanted: WantedGradients) -> WantedGradients:
    """What dX, dW and db are summed in and kept until backward: dW in options.accum_dtype where that is wider."""
    kept, accum = wanted.kept(), problem.options.accum_dtype
    wider = kept.weight is not None and accum is not None and accum.itemsize > kept.weight.itemsize
    return replace(kept, weight=accum if wider else kept.weight, bias=wanted.bias and problem.compute_dtype)


def sums_bytes(problem: Problem, wanted: WantedGradients, sums: WantedGradients) -> int:
    """Bytes of the sums that are not themselves the gradients."""
    sizes = (problem.tokens * problem.hidden, problem.vocab * problem.hidden, problem.vocab)
    pairs = zip(sizes, (sums.x, sums.weight), (wanted.x, wanted.weight), strict=False)
    bias = 0 if sums.bias is None else sizes[2] * sums.bias.itemsize
    return bias + sum(size * kept.itemsize for size, kept, final in pairs if kept != final)


def roundings(problem: Problem, sums: WantedGradients, chunk: int) -> int:
    """How often dW is rounded to 16 bits."""
    narrow = sums.weight is not None and sums.weight.itemsize == 2
    return -(-problem.tokens // chunk) if narrow else 0


def forward(engine, problem: Problem, route: Route, wanted: WantedGradients) -> tuple[LossOutput, object]:
    if not wanted:
        return recompute.forward(engine, problem, route, wanted)
    sums = replace(sum_dtypes(problem, wanted), weight=route.dw_sum)
    sink = _GradientSink(engine, problem, sums)
    problem = problem.for_kernels(route.dtype)
    dz_dtype, rows = engine.dz_dtype(problem.x.dtype), row_weights(problem)
    dz_scale = dz_unit(problem, dz_dtype) * (FP16_DZ if dz_dtype == torch.float16 else 1.0)
    upstream = torch.full((), dz_scale, dtype=problem.compute_dtype, device=problem.device)
    buffer = recompute.exponentials_buffer(problem, min(route.chunk, problem.tokens), dz_dtype)
    pieces = []
    for chunk in slices(problem.tokens, route.chunk):
        part = problem.of(chunk)
        e = buffer[: part.tokens]
        stats, tile_max = engine.exp_chunk(part, out=e)
        coefficients = row_coefficients(stats, rows.of(chunk), problem.options, upstream)
        column_sums = engine.scale_chunk(part, e, tile_max, stats.lse, coefficients, wanted.bias is not None)
        sink.add(e, column_sums, part, chunk, alpha=1.0 / dz_scale)
        pieces.append(stats)
    del buffer, e
    stats = combined(pieces, torch.cat) if len(pieces) > 1 else pieces[0]
    return loss_terms(stats, rows, problem), KeptGradients.of(sink.take(), wanted)


class _GradientSink:
    """Turns chunks of dz into dX, dW and db."""

    def __init__(self, engine, problem: Problem, sums: WantedGradients):
        self.engine, self.gradients = engine, sums.allocate(problem)

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

    def take(self) -> Gradients:
        """The sums, which belong to the caller alone then."""
        gradients, self.gradients = self.gradients, None
        return gradients


def fp16_scale_fits(problem: Problem) -> bool:
    """Whether dz fits fp16 with a scale chosen from N alone: class weights, the target's probability and a z-loss make
    it of any size."""
    options = problem.options
    return problem.ce_weight is None and not options.lse_square_scale and not options.use_token_scaling

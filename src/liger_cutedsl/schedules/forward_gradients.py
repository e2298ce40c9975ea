"""Gradients that are made in forward: in what dtypes they are summed, what dz is stored times, and how chunks of it
become dX, dW and db. For single_pass and sampled."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from liger_cutedsl.call import Gradients, Problem
from liger_cutedsl.cross_entropy import LossOutput
from liger_cutedsl.gemm import matmul
from liger_cutedsl.objective import RowWeights, dz_unit, row_weights
from liger_cutedsl.two_part_sum import TwoPartSum
from liger_cutedsl.weight_grad_buffer import WeightGradBuffer

# fp16's dz is at most twice this, an eighth of fp16's largest number; the GEMMs, summing in fp32, take it down again.
FP16_DZ = 2.0**12


@dataclass(frozen=True)
class Weighing:
    """What is made of exponentials, known behind the first GEMM: the rows' weights; dz_scale, what dz is stored times,
    and alpha, what takes it off again; the upstream gradient that is expected."""

    rows: RowWeights
    vectors: torch.dtype
    device: torch.device
    dz_scale: float
    alpha: float
    expected: float

    @classmethod
    def of(cls, problem: Problem, dz_dtype: torch.dtype, expected_upstream, rows: RowWeights | None = None):
        """rows: those of a split vocabulary; None for one process."""
        scale = dz_unit(problem, dz_dtype) * (FP16_DZ if dz_dtype == torch.float16 else 1.0)
        expected = 1.0 if expected_upstream is None else expected_upstream(problem)
        rows = row_weights(problem) if rows is None else rows
        return cls(rows, problem.compute_dtype, problem.device, scale, problem.options.scale / scale, expected)

    @functools.cached_property
    def upstream(self) -> LossOutput:
        """Of 1, on the device."""
        return LossOutput(torch.ones((), dtype=self.vectors, device=self.device))


class GradientSink:
    """Turns chunks of dz into dX, dW and db, for the upstream gradient that is expected.

    That enters dW with the last chunk, as a factor of the sum so far too: each sum before is the same whatever is
    expected, and so is the result but for its one rounding. A buffer of the caller's, which holds other gradients too,
    gets each chunk's with it.
    """

    def __init__(
        self,
        engine,
        gradients: Gradients,
        tokens: int,
        buffer: WeightGradBuffer | None = None,
        in_16_bits: int | None = None,
    ):
        """gradients: uninitialised.  in_16_bits: how many chunks are added to dW before its sum has a second part; None
        where it never has one."""
        self.engine, self.gradients, self.tokens, self.buffer = engine, gradients, tokens, buffer
        self.in_16_bits, self.added, self.dw = in_16_bits, 0, None
        self.began = False

    def add(
        self, dz: torch.Tensor, column_sums: torch.Tensor | None, part: Problem, chunk: slice, weighing: Weighing
    ) -> None:
        self.add_dense(dz, column_sums, part, chunk, weighing, last=chunk.stop == self.tokens)

    def add_dense(self, dz, column_sums, part: Problem, chunk: slice, weighing: Weighing, last: bool) -> None:
        """last: whether nothing is added behind it."""
        grads, factor = self.gradients, weighing.expected if last else 1.0
        if grads.x is not None:
            alpha = weighing.alpha * weighing.expected
            matmul(dz, self.engine.gemm_operand(part.weight), out=grads.x[chunk], alpha=alpha)
        if self.added == self.in_16_bits:
            self.dw = TwoPartSum.of(grads.weight) if self.began else TwoPartSum.zero(grads.weight)
        self.added += 1
        if self.dw is not None:
            self.engine.add_product(dz, part.x, self.dw, weighing.alpha * factor, factor)
        elif grads.weight is not None:
            x = self.engine.gemm_operand(part.x)
            beta = factor if self.began else 0.0
            matmul(dz.t(), x, out=grads.weight, beta=beta, alpha=weighing.alpha * factor)
        if self.buffer is not None:
            self.buffer.forward_began, rows = True, self.buffer.tensor[: part.vocab]
            alpha = weighing.alpha * weighing.expected
            matmul(dz.t(), self.engine.gemm_operand(part.x), out=rows, beta=1.0, alpha=alpha)
        if grads.bias is not None:
            self.add_to_bias(column_sums, weighing.alpha, factor)
        self.began = True

    def add_to_bias(self, column_sums: torch.Tensor, alpha: float, factor: float) -> None:
        bias = self.gradients.bias
        bias.add_(column_sums, alpha=alpha) if self.began else torch.mul(column_sums, alpha, out=bias)
        if factor != 1.0:
            bias.mul_(factor)

    def take(self) -> Gradients:
        """The sums, which belong to the caller alone then."""
        gradients, self.gradients, self.dw = self.gradients, None, None
        return gradients

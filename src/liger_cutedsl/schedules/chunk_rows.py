"""Rows of a chunk, between its exponentials and its dz: their part in the results, and their coefficients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_cutedsl import objectives
from liger_cutedsl.call import Problem
from liger_cutedsl.cross_entropy import LossOutput, Plain, is_plain
from liger_cutedsl.objective import RowCoefficients
from liger_cutedsl.row_statistics import RowStatistics, combined
from liger_cutedsl.schedules import chunk_dz


class BegunRows(NamedTuple):
    """Rows whose exponentials are there: lse (n,), the tiles' maxima and sums as Engine.exp_chunk returns them, and
    what dz is made with."""

    lse: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor
    coefficients: RowCoefficients


def rows_of(engine, problem: Problem, weigh) -> PlainRows | RowsByObjective:
    """For a problem as the kernels read it.  weigh() → forward_gradients.Weighing, known behind the first GEMM."""
    plain = is_plain(problem) and problem.weight_grad_buffer is None
    return (PlainRows if plain else RowsByObjective)(engine, problem, weigh)


class RowsByObjective:
    """Of any loss, by PyTorch on (n,) vectors.

    size: |a| of every row that counts, known behind the first GEMM; None where rows differ.
    """

    size = None

    def __init__(self, engine, problem: Problem, weigh):
        self.engine, self.problem, self.weigh = engine, problem, weigh
        self.objective = objectives.of(problem.options)
        self.pieces: list[RowStatistics] = []

    def dz_of(self, chunk: slice, part: Problem, dz: torch.Tensor, column_sums: bool) -> torch.Tensor | None:
        """Writes dz (n, V) of some rows; Σ_i dz (V,) where asked for."""
        waiting = chunk_dz.begun(self.engine, part, dz)
        return waiting.finish(waiting.stats.lse, self._coefficients(chunk, part, waiting.stats), column_sums)

    def begun(self, chunk: slice, part: Problem, e: torch.Tensor) -> BegunRows:
        """Writes exponentials (n, V) of some rows."""
        stats, maxima, sums = self.engine.exp_chunk(part, out=e)
        return BegunRows(stats.lse, maxima, sums, self._coefficients(chunk, part, stats))

    def _coefficients(self, chunk: slice, part: Problem, stats: RowStatistics) -> RowCoefficients:
        weighing = self.weigh()
        rows = weighing.rows.of(chunk)
        self.pieces.append(objectives.evaluated(stats, rows, part))
        return self.objective.coefficients(self.pieces[-1], rows, part, weighing.upstream, weighing.dz_scale)

    def statistics(self) -> RowStatistics:
        """Of all rows."""
        return combined(self.pieces, torch.cat) if len(self.pieces) > 1 else self.pieces[0]

    def results(self) -> NamedTuple:
        return self.objective.results(self.statistics(), self.weigh().rows, self.problem)


class PlainRows:
    """Of cross entropy without options: by the launch that folds the tiles. Ten small ones a chunk less, which a small
    call waits for on the host, and any call on the GPU."""

    def __init__(self, engine, problem: Problem, weigh):
        self.engine, self.ignore_index, self.weigh = engine, problem.options.ignore_index, weigh
        padded = -(-problem.tokens // 4) * 4  # each vector at a multiple of 16 bytes, as compiled kernels expect it
        rows = torch.empty(4, padded, dtype=problem.compute_dtype, device=problem.device)
        self.rows = rows[:, : problem.tokens]

    @property
    def size(self) -> float:
        weighing = self.weigh()
        return abs(weighing.dz_scale * weighing.rows.inverse_d)

    def dz_of(self, chunk: slice, part: Problem, dz: torch.Tensor, column_sums: bool) -> torch.Tensor | None:
        """Writes dz (n, V) of some rows; Σ_i dz (V,) where asked for."""
        begun = self.begun(chunk, part, dz)
        return self.engine.scale_chunk(part, dz, begun.maxima, begun.lse, begun.coefficients, column_sums)

    def begun(self, chunk: slice, part: Problem, e: torch.Tensor) -> BegunRows:
        """Writes exponentials (n, V) of some rows."""
        stats, maxima, sums = self.engine.exp_chunk(part, out=e, fold=False)
        weighing = self.weigh()
        share = weighing.rows.inverse_d
        ignored = None if weighing.rows.ignored is None else self.ignore_index
        plain = Plain(self.rows[:, chunk], weighing.dz_scale * share, share, ignored)
        self.engine.fold_plain(part, stats, maxima, sums, plain)
        return BegunRows(plain.rows[0], maxima, sums, plain.coefficients)

    def results(self) -> LossOutput:
        return LossOutput(self.rows[3].sum())

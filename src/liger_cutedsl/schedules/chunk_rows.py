"""Rows of a chunk, between its exponentials and its dz: their part in the results, and their coefficients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_cutedsl import objectives
from liger_cutedsl.call import Problem
from liger_cutedsl.cross_entropy import LossOutput, Plain, is_plain
from liger_cutedsl.row_statistics import RowStatistics, combined
from liger_cutedsl.schedules import chunk_dz


def rows_of(engine, problem: Problem, weigh) -> PlainRows | RowsByObjective:
    """For a problem as the kernels read it.  weigh() → what is known behind the first GEMM (single_pass._Weighing)."""
    plain = is_plain(problem) and problem.weight_grad_buffer is None
    return (PlainRows if plain else RowsByObjective)(engine, problem, weigh)


class RowsByObjective:
    """Of any loss, by PyTorch on (n,) vectors."""

    def __init__(self, engine, problem: Problem, weigh):
        self.engine, self.problem, self.weigh = engine, problem, weigh
        self.objective = objectives.of(problem.options)
        self.pieces: list[RowStatistics] = []

    def dz_of(self, chunk: slice, part: Problem, dz: torch.Tensor, column_sums: bool) -> torch.Tensor | None:
        """Writes dz (n, V) of some rows; Σ_i dz (V,) where asked for."""
        waiting, weighing = chunk_dz.begun(self.engine, part, dz), self.weigh()
        rows = weighing.rows.of(chunk)
        self.pieces.append(objectives.evaluated(waiting.stats, rows, part))
        found = self.objective.coefficients(self.pieces[-1], rows, part, weighing.upstream, weighing.dz_scale)
        return waiting.finish(waiting.stats.lse, found, column_sums)

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

    def dz_of(self, chunk: slice, part: Problem, dz: torch.Tensor, column_sums: bool) -> torch.Tensor | None:
        """Writes dz (n, V) of some rows; Σ_i dz (V,) where asked for."""
        stats, maxima, sums = self.engine.exp_chunk(part, out=dz, fold=False)
        weighing = self.weigh()
        share = weighing.rows.inverse_d
        ignored = None if weighing.rows.ignored is None else self.ignore_index
        plain = Plain(self.rows[:, chunk], weighing.dz_scale * share, share, ignored)
        self.engine.fold_plain(part, stats, maxima, sums, plain)
        return self.engine.scale_chunk(part, dz, maxima, plain.rows[0], plain.coefficients, column_sums)

    def results(self) -> LossOutput:
        return LossOutput(self.rows[3].sum())

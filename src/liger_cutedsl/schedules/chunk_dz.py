"""dz of a chunk of tokens, in two steps: row statistics now, and dz when their coefficients are known."""

from __future__ import annotations

import torch

from liger_cutedsl import gemm
from liger_cutedsl.call import Problem
from liger_cutedsl.objective import RowCoefficients
from liger_cutedsl.row_statistics import RowStatistics
from liger_cutedsl.tiling import TILE_QUANTUM, vocabulary_tiles


def begun(engine, part: Problem, dz: torch.Tensor, whole: bool = True) -> FromExponentials | Recomputed | OfNoColumns:
    """part: some rows, as the kernels read them.  dz: (n, V), the memory that dz will be in.  whole: whether all of the
    vocabulary is here, and so every target that is not ignored."""
    if part.vocab == 0:
        return OfNoColumns(part)
    if part.options.needs_slope_apart:
        return Recomputed(engine, part, dz, whole)
    return FromExponentials(engine, part, dz)


class FromExponentials:
    """One GEMM, whose exponentials wait in dz's memory."""

    def __init__(self, engine, part: Problem, dz: torch.Tensor):
        self.engine, self.part, self.dz = engine, part, dz
        self.stats, self.maxima, _ = engine.exp_chunk(part, out=dz)

    def finish(self, lse: torch.Tensor, coefficients: RowCoefficients, column_sums: bool) -> torch.Tensor | None:
        """Writes dz; Σ_i dz (V,) where asked for."""
        return self.engine.scale_chunk(self.part, self.dz, self.maxima, lse, coefficients, column_sums)


class Recomputed:
    """The same with a second GEMM in place of stored exponentials, for what these do not hold."""

    def __init__(self, engine, part: Problem, dz: torch.Tensor, whole: bool):
        self.engine, self.part, self.dz, self.whole = engine, part, dz, whole
        self.width = 64 * TILE_QUANTUM
        self.stats: RowStatistics = engine.row_statistics(part, self.width)

    def finish(self, lse: torch.Tensor, coefficients: RowCoefficients, column_sums: bool) -> torch.Tensor | None:
        part, dz = self.part, self.dz
        for tile in vocabulary_tiles(part.vocab, self.width):
            self.engine.dz_tile(part, lse, coefficients, tile, out=dz[:, tile.columns])
        # where a target is ignored, all of its row is zero
        target = part.target.long()[:, None]
        column, fix = target.clamp(0, part.vocab - 1), coefficients.fix.to(dz.dtype)[:, None]
        if not self.whole:
            fix = torch.where(target == column, fix, dz.gather(1, column))
        dz.scatter_(1, column, fix)
        return gemm.column_sums(dz, part.compute_dtype) if column_sums else None


class OfNoColumns:
    """A shard of nothing but padding: no dz."""

    def __init__(self, part: Problem):
        self.stats = RowStatistics.of_no_columns(part)

    def finish(self, lse: torch.Tensor, coefficients: RowCoefficients, column_sums: bool) -> None:
        return None

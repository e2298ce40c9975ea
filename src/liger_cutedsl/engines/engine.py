"""Engine: what a schedule asks of PyTorch or of the CuTe kernels."""

from __future__ import annotations

from typing import Protocol

import torch

from liger_cutedsl.call import Problem
from liger_cutedsl.cross_entropy import Plain
from liger_cutedsl.objective import RowCoefficients
from liger_cutedsl.row_statistics import RowStatistics
from liger_cutedsl.sampling import ByTile, Draw, Packed, Segment, Selection
from liger_cutedsl.tiling import Tile
from liger_cutedsl.two_part_sum import TwoPartSum


class KernelFailure(RuntimeError):
    """A kernel of the CuTe engine could not be compiled or launched."""


class Engine(Protocol):
    """The primitives of a pass over the vocabulary, and what they need. An engine keeps nothing of a call for another.

    The problems that the first four methods take are as Problem.for_kernels makes them: x (N, H) and weight (V, H) in
    the dtype they are multiplied in, bias and ce_weight in the compute dtype. Row vectors are (N,) in the compute
    dtype. A target outside [0, V), such as one of another part of the vocabulary, belongs to no column.

    name: "torch" or "cute", as in Route.engine.  wide_tile: columns of a tile of recompute, from which on wider ones
    gain little.
    """

    name: str
    wide_tile: int

    # What it computes.

    def row_statistics(self, problem: Problem, tile_width: int) -> RowStatistics:
        """The statistics that the options ask for, over the whole vocabulary. No logit is stored beyond tile_width
        columns."""
        ...

    def exp_chunk(
        self, problem: Problem, out: torch.Tensor, fold: bool = True
    ) -> tuple[RowStatistics, torch.Tensor, torch.Tensor]:
        """Writes exponentials relative to their tile's maximum, exp(z − m)·dz/du·2^headroom (epilogues.py), into
        out (N, V), of dtype dz_dtype, whose rows start at multiples of 16 bytes. Tiles are exp_tile columns wide.

        Returns the statistics, the maxima m (N, tiles) and the tiles' sums Σ_v exp(z_v − m)·2^headroom (N, tiles), in
        the compute dtype. Not for options.needs_slope_apart.  fold: False leaves lse to fold_plain.
        """
        ...

    def fold_plain(
        self, problem: Problem, stats: RowStatistics, maxima: torch.Tensor, sums: torch.Tensor, plain: Plain
    ) -> None:
        """What exp_chunk(fold=False) left, to the rows of a cross entropy without options: writes plain.rows (4, N),
        which are lse, a, fix and the loss, in the compute dtype (cross_entropy.Plain)."""
        ...

    def scale_chunk(
        self,
        problem: Problem,
        e: torch.Tensor,
        maxima: torch.Tensor,
        lse: torch.Tensor,
        coefficients: RowCoefficients,
        column_sums: bool,
    ) -> torch.Tensor | None:
        """Turns what exp_chunk wrote, e (N, V) with its maxima, into dz in place, the targets' own entries
        (coefficients.fix) included. column_sums: returns Σ_i dz (V,) in the compute dtype; else None."""
        ...

    def dz_tile(
        self, problem: Problem, lse: torch.Tensor, coefficients: RowCoefficients, tile: Tile, out: torch.Tensor
    ) -> None:
        """Writes dz of the tile's columns, recomputed, into out (N, tile.width) of dtype dz_dtype. The targets' own
        entries are the caller's to overwrite with coefficients.fix."""
        ...

    def add_product(self, dz: torch.Tensor, x: torch.Tensor, total: TwoPartSum, alpha: float, beta: float) -> None:
        """The sum (V, H) = alpha · dzᵀ·x + beta · the sum, of dz (n, V) whose rows start at multiples of 16 bytes and
        x (n, H)."""
        ...

    # What the sampled schedule asks for beside, of problems with `sampled` set.

    def select_pairs(self, draw: Draw) -> Selection:
        """Which pairs are kept, counted: sampling.shares and sampling.kept_pairs, with the same random numbers."""
        ...

    def pack_pairs(
        self,
        problem: Problem,
        e: torch.Tensor,
        coefficients: RowCoefficients,
        selection: Selection,
        into: Packed,
        segment: Segment,
    ) -> None:
        """Writes the selection's pairs, drawn again, to their places in `into`, segment.count of them at most: rows
        (segment.row + the row of e), factors and dz/q. e (n, V) is what exp_chunk wrote, and stays. coefficients: those
        of these n rows, without c; the target's element is fix. Row vectors are contiguous."""
        ...

    def pairs_by_tile(self, packed: Packed, vocab: int) -> ByTile:
        """The pairs of all segments, of which there may be none, as the products take them: in memory of their own, as
        much as dz of the pairs takes in `packed`."""
        ...

    def dx_of_pairs(self, pairs: ByTile, weight: torch.Tensor, out: torch.Tensor) -> None:
        """out (n, H) += Σ of pairs dz·W[tile], in any order: out[i] is of the call's row packed.first_row + i. out: the
        compute dtype. weight (V, H) as the problem for kernels has it."""
        ...

    def dw_of_pairs(self, pairs: ByTile, x: torch.Tensor, out: torch.Tensor, alpha: float, beta: float) -> None:
        """out (V, H) = beta·out + alpha·Σ of pairs dzᵀ·x[row], summed in the compute dtype and rounded once. All rows
        are written; for beta = 0 out is not read. x (N, H): all rows of the call."""
        ...

    def column_sums_of_pairs(self, pairs: ByTile, vocab: int) -> torch.Tensor:
        """Σ of pairs dz (vocab,) in float32, or float64 for such dz."""
        ...

    def gemm_operand(self, matrix: torch.Tensor) -> torch.Tensor:
        """The matrix in the dtype in which this engine multiplies it with dz: itself, or a wider copy."""
        ...

    # What it knows about its needs. Nothing is launched; fake tensors will do.

    def dz_dtype(self, gemm_dtype: torch.dtype) -> torch.dtype:
        """What dz, and exponentials, are stored in for matrices multiplied in gemm_dtype."""
        ...

    def tile_width(self, problem: Problem, fitting: int, kept: int) -> int:
        """The best width of recompute's tiles behind the first `kept` columns, where `fitting` columns' workspace fits
        the budget: more than that only where none would be reasonable."""
        ...

    def column_bytes(self, problem: Problem) -> int:
        """Workspace that recompute's backward takes for each column of a tile."""
        ...

    def forward_bytes(self, problem: Problem, tile_width: int, kept: int) -> int:
        """Workspace that recompute's forward takes beside the exponentials of the first `kept` columns."""
        ...

    def forward_rows(self, problem: Problem) -> int:
        """The fewest rows that a forward alone may take at a time at little cost; all of them, where none are few
        enough. Slices of so many rows have the results of all rows at once."""
        ...

    def operand_bytes(self, problem: Problem) -> int:
        """Workspace that gemm_operand takes for all of W, and a product for all of a 16-bit dW."""
        ...

    def column_sums_bytes(self, problem: Problem, columns: int) -> int:
        """Workspace that scale_chunk takes for the sums of so many columns."""
        ...

    def add_product_bytes(self, problem: Problem) -> int:
        """Workspace that add_product takes."""
        ...

    def exp_tile(self, problem: Problem) -> int:
        """Columns that share a maximum in exp_chunk: sampling.TILE where problem.sampled says so."""
        ...

    def chunk_size(self, problem: Problem, fitting: int) -> int:
        """The best number of tokens for single_pass's chunks, at most `fitting`."""
        ...

    def chunk_bytes(self, problem: Problem, rows: int) -> int:
        """Workspace of a chunk of `rows` tokens, its exponentials included: so much, and so much more for each row."""
        ...

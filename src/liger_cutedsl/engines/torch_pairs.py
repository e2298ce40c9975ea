"""The primitives of sampled pairs by PyTorch, on any device and dtype: the reference of the GPU engine's."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from liger_cutedsl.call import Problem
from liger_cutedsl.epilogues import EpilogueFlags, dz_of_exp, exp_headroom
from liger_cutedsl.gemm import matmul
from liger_cutedsl.objective import RowCoefficients
from liger_cutedsl.sampling import TILE, ByTile, Draw, Packed, Segment, Selection, kept_pairs, shares, tile_count
from liger_cutedsl.tiling import Tile, slices, vocabulary_tiles

AT_ONCE = 4096  # pairs whose columns are gathered at a time


class TorchPairs:
    """Those methods of an Engine. The host reads how many pairs each tile has."""

    def select_pairs(self, draw: Draw) -> Selection:
        q = shares(draw)
        counts = kept_pairs(draw, q).sum(dim=0)
        start = torch.zeros(draw.tiles + 1, dtype=torch.int32, device=counts.device)
        start[1:] = counts.cumsum(0)
        return Selection(draw, q.sum(dtype=torch.float32).view(1), start)

    def pack_pairs(
        self,
        problem: Problem,
        e: torch.Tensor,
        coefficients: RowCoefficients,
        selection: Selection,
        into: Packed,
        segment: Segment,
    ) -> None:
        q = shares(selection.draw)
        tile, row = kept_pairs(selection.draw, q).t().nonzero()[: segment.count].unbind(1)
        pairs = slice(segment.first, segment.first + len(row))
        into.rows[pairs] = (row + segment.row).int()
        factor = 1.0 / q[row, tile]
        into.factor[pairs] = factor
        for part in slices(len(row), AT_ONCE):
            dz = _dz(problem, e, coefficients, selection.draw, row[part], tile[part])
            into.dz[pairs][part] = dz * factor[part, None]

    def pairs_by_tile(self, packed: Packed, vocab: int) -> ByTile:
        starts = [segment.start for segment in packed.segments]
        tiles = torch.arange(tile_count(vocab), dtype=torch.int64, device=packed.dz.device)
        tile_of = torch.cat([tiles[:0], *(tiles.repeat_interleave(start.diff()) for start in starts)])
        lies = [
            torch.arange(one.first, one.first + one.count, dtype=torch.int64, device=tiles.device)
            for one in packed.segments
        ]
        order = torch.cat([tiles[:0], *lies])[tile_of.argsort(stable=True)]
        start = sum((start for start in starts), tiles.new_zeros(len(tiles) + 1, dtype=torch.int32))
        return ByTile(start, packed.rows[order] - packed.first_row, packed.dz[order], packed.first_row)

    def dx_of_pairs(self, pairs: ByTile, weight: torch.Tensor, out: torch.Tensor) -> None:
        for tile, rows, dz in _tiles(pairs, weight.shape[0]):
            product = out.new_empty(len(dz), out.shape[1])
            matmul(self.gemm_operand(dz), self.gemm_operand(weight[tile.columns]), out=product)
            out.index_add_(0, rows, product)

    def dw_of_pairs(self, pairs: ByTile, x: torch.Tensor, out: torch.Tensor, alpha: float, beta: float) -> None:
        for tile, rows, dz in _tiles(pairs, out.shape[0]):
            of_x = self.gemm_operand(x[rows + pairs.first_row])
            matmul(self.gemm_operand(dz).t(), of_x, out=out[tile.columns], beta=beta, alpha=alpha)

    def column_sums_of_pairs(self, pairs: ByTile, vocab: int) -> torch.Tensor:
        wide = torch.promote_types(pairs.dz.dtype, torch.float32)
        sums = torch.empty(vocab, dtype=wide, device=pairs.dz.device)
        for tile, _, dz in _tiles(pairs, vocab):
            sums[tile.columns] = dz.sum(dim=0, dtype=wide)
        return sums


def _tiles(pairs: ByTile, vocab: int) -> Iterator[tuple[Tile, torch.Tensor, torch.Tensor]]:
    """Every tile, with rows (n,) int64 and dz (n, width) of its pairs."""
    start = pairs.start.tolist()
    for index, tile in enumerate(vocabulary_tiles(vocab, TILE)):
        some = slice(start[index], start[index + 1])
        yield tile, pairs.rows[some].long(), pairs.dz[some, : tile.width]


def pair_temporaries(problem: Problem, rows: int) -> int:
    """Bytes of what drawing pairs of so many rows takes, or packing some of them, as measured."""
    drawn = rows * tile_count(problem.vocab) * 64
    return max(drawn, AT_ONCE * TILE * (8 + 4 * problem.compute_dtype.itemsize))


def _dz(problem: Problem, e: torch.Tensor, coefficients: RowCoefficients, draw: Draw, row, tile) -> torch.Tensor:
    """dz (pairs, TILE) in the compute dtype, of pairs (rows of e, tiles); 0 beyond the vocabulary's end."""
    flags = EpilogueFlags.of(problem).for_gradients(coefficients)
    column = tile[:, None] * TILE + torch.arange(TILE, dtype=torch.int64, device=e.device)
    values = e[row[:, None], column.clamp(max=problem.vocab - 1)].to(draw.lse.dtype)
    vectors = {"lse": draw.lse, "row_a": coefficients.a, "row_h": coefficients.h}
    operands = {name: vector[row, None] for name, vector in vectors.items() if vector is not None}
    dz = dz_of_exp(flags, exp_headroom(e.dtype), values, operands | {"m": draw.maxima[row, tile][:, None]})
    dz = torch.where(column == draw.target[row, None], coefficients.fix[row, None], dz)
    return dz.masked_fill(column >= problem.vocab, 0.0)

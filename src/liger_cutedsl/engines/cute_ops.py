"""Reductions along the vocabulary that quack does not have, written in the manner of its own EpiOps.

MaskedColVecSum and OnlineArgmax extend quack's ColVecReduce, whose engine carries a tuple of register accumulators
per row across lanes and warps and writes one value per (row, vocabulary tile); TileMaximum extends its grouped
statistics, which a pass over the accumulator computes before anything is stored. See quack.epilogue.ops. All mask
the columns beyond the vocabulary in a ragged last tile: what an epilogue computes there comes from uninitialised
operands.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import cutlass
import quack.layout_utils as layout_utils
import torch
from cutlass import Float32, Int32, Int64, const_expr, cute
from quack.epilogue.ops import ColVecReduce, GroupedColStatsBase, GroupedColStatsOut, colvec_reduce_accumulate
from quack.utils import f32x2_to_i64

from liger_cutedsl.epilogues import LOWEST_MAXIMUM

# quack keys its kernel cache by an op's name and config_key(), not by its code: this makes the code part of it.
_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
NO_COLUMN = 2.0**25  # indices travel as float32, exact up to epilogues.EXACT_INDICES


@cute.jit
def mask_columns(gemm, frag, coords, limit_n, value):
    """Overwrites the elements of a sink's scratch that lie beyond the vocabulary (limit_n, relative to the tile)."""
    offsets = _column_offsets(gemm.cta_tile_shape_mnk[:2], coords)
    limit = limit_n - coords[0][1]
    for i in cutlass.range(cute.size(frag), unroll_full=True):
        frag[i] = frag[i] if cute.crd2idx(i, offsets) < limit else value


@cute.jit
def _column_offsets(tile_shape_mn, coords):
    """The column of element i, relative to element 0's: static, so that a compare against it takes an immediate
    (the idiom of quack's OnlineLSEReduce._fold)."""
    return cute.composition(cute.make_layout(tile_shape_mn, stride=(0, 1)), coords.layout)


class MaskedColVecReduce(ColVecReduce):
    """A ColVecReduce that keeps, besides its accumulators, the coordinates of their elements."""

    def config_key(self):
        return (*super().config_key(), _SOURCE)

    @cute.jit
    def begin(self, gemm, param, smem_tensor, ctx):
        layout = ctx.partition_for_epilogue_fn(
            cute.make_rmem_tensor(cute.make_layout((ctx.tile_M, ctx.tile_N), stride=(1, 0)), Float32)
        ).layout
        accumulators = tuple(cute.make_rmem_tensor(layout, Float32) for _ in range(self.reduce_planes))
        coords = ctx.partition_for_epilogue_fn(cute.make_identity_tensor((ctx.tile_M, ctx.tile_N)))
        first_column = ctx.tile_coord_mnkl[1] * ctx.tile_N
        limit_n = ctx.varlen_manager.len_n() - first_column
        return (accumulators, smem_tensor, coords, limit_n, first_column)

    @cute.jit
    def begin_loop(self, gemm, state, epi_coord):
        accumulators, _, coords, limit_n, first_column = state
        here = (None, None, None, epi_coord[0], epi_coord[1])
        current = tuple(a[here] for a in accumulators)
        if const_expr(epi_coord[1] == 0):
            for a, identity in zip(current, self.identities, strict=True):
                cute.filter_zeros(a).fill(identity)
        return (current, coords[here], limit_n, first_column)

    @cute.jit
    def _end_loop_values(self, state, epi_coord):
        return tuple(a[None, None, None, epi_coord[0], epi_coord[1]] for a in state[0])

    @cute.jit
    def _end_loop_smem(self, state):
        return state[1]


class MaskedColVecSum(MaskedColVecReduce):
    """out[m, n_tile] = Σ_n v, or Σ_n v·scale with scaled=True, over the columns that exist.

    quack's plain sum takes the zeros of columns beyond N for granted; with a bias the epilogue's value is not zero.
    """

    identities = (0.0,)

    def __init__(self, name, scaled=False):
        super().__init__(name, combine="add", scaled=scaled)

    @cute.jit
    def fn_sink_flush(self, gemm, state, frag, scale=None):
        (total,), coords, limit_n, _ = state
        mask_columns(gemm, frag, coords, limit_n, 0.0)
        if const_expr(scale is not None):
            mask_columns(gemm, scale, coords, limit_n, 0.0)
        colvec_reduce_accumulate(gemm, total, frag, rScale=scale, combine="add")


class OnlineArgmax(MaskedColVecReduce):
    """The largest value of a row in a vocabulary tile, with its column: the first one on ties.

    Output: int64 (m, n_tiles), a key whose maximum over the tiles is the row's: the value's bits as an ordered
    integer in the upper half, 2³² − 1 − column in the lower. ``decoded`` reads it.
    """

    identities = (-math.inf, 0.0)
    reduce_planes = 2  # value, column

    def __init__(self, name):
        super().__init__(name, combine="max")

    @staticmethod
    def decoded(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(m, n_tiles) int64 → the row's largest value, (m,) float32, and its first column, (m,) int64."""
        best = keys.amax(dim=1)
        ordered = (best >> 32).to(torch.int32)
        bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
        return bits.view(torch.float32), 0xFFFFFFFF - (best & 0xFFFFFFFF)

    @cute.jit
    def fn_sink_flush(self, gemm, state, frag):
        (largest, column), coords, limit_n, first_column = state
        mask_columns(gemm, frag, coords, limit_n, -math.inf)
        reference = largest.layout
        values = layout_utils.convert_layout_zero_stride(frag, reference)
        coordinates = layout_utils.convert_layout_zero_stride(coords, reference)
        largest_of = layout_utils.convert_layout_zero_stride(largest, reference)[None, 0]
        column_of = layout_utils.convert_layout_zero_stride(column, reference)[None, 0]
        offsets = _column_offsets(gemm.cta_tile_shape_mnk[:2], coordinates)
        for row in cutlass.range_constexpr(cute.size(values, mode=[0])):
            # Within the subtile in ascending order, keeping the earlier of equals; then one full merge, so that
            # nothing depends on the order in which subtiles are visited.
            ascending = sorted((cute.crd2idx((row, j), offsets), j) for j in range(cute.size(values, mode=[1])))
            first_offset, j0 = ascending[0]
            best, best_offset = values[row, j0], Float32(first_offset)
            for offset, j in ascending[1:]:
                larger = values[row, j] > best
                best_offset = Float32(cutlass.select_(larger, Float32(offset), best_offset))
                best = cute.arch.fmax(best, values[row, j])
            best_column = best_offset + Float32(first_column + coordinates[0, 0][1])
            merged = self._merge((largest_of[row], column_of[row]), (best, best_column))
            largest_of[row], column_of[row] = merged

    @cute.jit
    def _merge(self, vals, others):
        (value, column), (other, other_column) = vals, others
        take = (other > value) | ((other == value) & (other_column < column))
        return (
            Float32(cutlass.select_(take, other, value)),
            Float32(cutlass.select_(take, other_column, column)),
        )

    @cute.jit
    def _finalize(self, vals):
        value, column = vals
        value = Float32(cutlass.select_(value == Float32(0.0), Float32(0.0), value))  # −0.0 equals 0.0
        bits = Int32(f32x2_to_i64(value, value))  # its low half
        ordered = Int32(cutlass.select_(bits < 0, bits ^ Int32(0x7FFFFFFF), bits))
        return (Int64(ordered) << 32) | (Int64(0xFFFFFFFF) - Int64(Int32(column)))


class FirstZero(MaskedColVecReduce):
    """out[m, n_tile] = the first column whose value is not negative, as float32; NO_COLUMN where all are.

    Given u − max(u) of a tile, it finds the maximum's column, with less work than OnlineArgmax.
    """

    identities = (NO_COLUMN,)

    def __init__(self, name):
        super().__init__(name)

    @cute.jit
    def fn_sink_flush(self, gemm, state, frag):
        (column,), coords, limit_n, first_column = state
        mask_columns(gemm, frag, coords, limit_n, -1.0)
        values = layout_utils.convert_layout_zero_stride(frag, column.layout)
        coordinates = layout_utils.convert_layout_zero_stride(coords, column.layout)
        column_of = layout_utils.convert_layout_zero_stride(column, column.layout)[None, 0]
        offsets = _column_offsets(gemm.cta_tile_shape_mnk[:2], coordinates)
        base = Float32(first_column + coordinates[0, 0][1])
        for row in cutlass.range_constexpr(cute.size(values, mode=[0])):
            descending = sorted(
                ((cute.crd2idx((row, j), offsets), j) for j in range(cute.size(values, mode=[1]))), reverse=True
            )
            found = Float32(NO_COLUMN)
            for offset, j in descending:  # the last to match, which stays, is the first column
                found = Float32(cutlass.select_(values[row, j] >= Float32(0.0), Float32(offset), found))
            found = Float32(cutlass.select_(found < Float32(NO_COLUMN), found + base, found))
            column_of[row] = cute.arch.fmin(column_of[row], found)

    @cute.jit
    def _merge(self, vals, others):
        return (cute.arch.fmin(vals[0], others[0]),)

    @cute.jit
    def _finalize(self, vals):
        return vals[0]


class TileMaximum(GroupedColStatsBase):
    """The largest value of a row in a vocabulary tile, known before the tile is stored.

    As a prepass sink it receives the values; as an operand of the main function it is the maximum, at least
    epilogues.LOWEST_MAXIMUM; ``out(name)`` writes it to a (m, n_tiles) output. Its argument is the tile's width.
    """

    combine = "max"

    def config_key(self):
        return (_SOURCE,)

    def host_validate(self, value, *, n, tile_N, **_):
        if value != tile_N:
            raise ValueError(f"'{self.name}': the group is a whole tile of {tile_N} columns, got {value}")

    def out(self, name):
        return _TileMaximumOut(name, self)

    @cute.jit
    def begin(self, gemm, param, smem_tensor, ctx):
        limit_n = ctx.varlen_manager.len_n() - ctx.tile_coord_mnkl[1] * ctx.tile_N
        return (self.stats_begin(gemm, smem_tensor, ctx, const_expr(self._group_cols(param))), limit_n)

    @cute.jit
    def begin_loop(self, gemm, state, epi_coord):
        return [self.stats_slice(state[0], epi_coord), state[1]]

    @cute.jit
    def fn_sink_flush(self, gemm, state, frag):
        mask_columns(gemm, frag, state[0][1], state[1], -math.inf)
        super().fn_sink_flush(gemm, state, frag)

    def stat_value(self, total, group_cols):
        return cute.arch.fmax(total, Float32(LOWEST_MAXIMUM))


class _TileMaximumOut(GroupedColStatsOut):
    """Writes TileMaximum's values, one per (row, tile), a ragged last tile included."""

    def config_key(self):
        return (*super().config_key(), _SOURCE)

    def host_validate(self, value, *, m, n, tile_M, tile_N, batch, varlen_m, epi_args):
        expected = (m, -(-n // tile_N))
        if tuple(value.shape) != expected:
            raise ValueError(f"'{self.name}': expected shape {expected}, got {tuple(value.shape)}")

"""Two reductions along the vocabulary that quack does not have, written in the manner of its own EpiOps.

Both extend quack's ColVecReduce, whose engine carries a tuple of register accumulators per row across lanes and
warps and writes one value per (row, vocabulary tile); see quack.epilogue.ops. Both mask the columns beyond the
vocabulary in a ragged last tile: what an epilogue computes there comes from uninitialised operands.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import cutlass
import quack.layout_utils as layout_utils
from cutlass import Float32, Int32, Int64, const_expr, cute
from quack.epilogue.ops import ColVecReduce, colvec_reduce_accumulate
from quack.utils import f32x2_to_i64

# quack keys its kernel cache by an op's name and config_key(), not by its code: this makes the code part of it.
_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
LARGEST_VOCABULARY = 2**24  # column indices travel as float32, exact up to here


@cute.jit
def _column_offsets(tile_shape_mn, coords):
    """(offsets, first): column of element i is first + offsets(i), offsets static, so that a compare against them
    takes an immediate (the idiom of quack's OnlineLSEReduce._fold)."""
    return cute.composition(cute.make_layout(tile_shape_mn, stride=(0, 1)), coords.layout)


class _MaskedColVecReduce(ColVecReduce):
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

    @cute.jit
    def _mask(self, gemm, frag, coords, limit_n, value):
        """Overwrites the elements beyond the vocabulary; frag is this sink's own scratch."""
        offsets = _column_offsets(gemm.cta_tile_shape_mnk[:2], coords)
        limit = limit_n - coords[0][1]
        for i in cutlass.range(cute.size(frag), unroll_full=True):
            frag[i] = frag[i] if cute.crd2idx(i, offsets) < limit else value


class MaskedColVecSum(_MaskedColVecReduce):
    """out[m, n_tile] = Σ_n v, or Σ_n v·scale with scaled=True, over the columns that exist.

    quack's plain sum takes the zeros of columns beyond N for granted; with a bias the epilogue's value is not zero.
    """

    identities = (0.0,)

    def __init__(self, name, scaled=False):
        super().__init__(name, combine="add", scaled=scaled)

    @cute.jit
    def fn_sink_flush(self, gemm, state, frag, scale=None):
        (total,), coords, limit_n, _ = state
        self._mask(gemm, frag, coords, limit_n, 0.0)
        if const_expr(scale is not None):
            self._mask(gemm, scale, coords, limit_n, 0.0)
        colvec_reduce_accumulate(gemm, total, frag, rScale=scale, combine="add")


class OnlineArgmax(_MaskedColVecReduce):
    """The largest value of a row in a vocabulary tile, with its column: the first one on ties.

    Output: int64 (m, n_tiles), a key whose maximum over the tiles is the row's: the value's bits as an ordered
    integer in the upper half, 2³² − 1 − column in the lower. ``column_of`` decodes it.
    """

    identities = (-math.inf, 0.0)
    reduce_planes = 2  # value, column

    def __init__(self, name):
        super().__init__(name, combine="max")

    @staticmethod
    def column_of(keys):
        """(m, n_tiles) int64 → (m,) int64 column of the row's first largest value."""
        return 0xFFFFFFFF - (keys.amax(dim=1) & 0xFFFFFFFF)

    @cute.jit
    def fn_sink_flush(self, gemm, state, frag):
        (largest, column), coords, limit_n, first_column = state
        self._mask(gemm, frag, coords, limit_n, -math.inf)
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

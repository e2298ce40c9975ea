"""The moments of a row's logits in a vocabulary tile, by which entropies are folded: several sums at once, online.

One of quack's EpiOps (quack.epilogue.ops), which writes one number a tile; this one writes several.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import cutlass
import quack.layout_utils as layout_utils
from cutlass import Float32, Int32, const_expr, cute
from quack.epilogue.ops import ColVecReduce

from liger_cutedsl.engines.cute_ops import MaskedColVecReduce, mask_columns
from liger_cutedsl.epilogues import LOWEST_MAXIMUM

_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # as in cute_ops.py


class OnlineMoments(MaskedColVecReduce):
    """The largest value m of a row in a vocabulary tile, Σ e^(v−m), Σ e^(v−m)·(v−m) and Σ e^(2(v−m)).

    moments: which of them, by the names of RowStatistics, as in EpilogueFlags.moments.  ragged: mask the last tile.
    Output: float32 (m, moments · n_tiles), all tiles of one moment after those of another. Values of −∞ add nothing to
    any sum; NaN and +∞ make the sums NaN.
    """

    def __init__(self, name, moments, ragged):
        super().__init__(name)
        self.moments, self.ragged = moments, ragged
        self.reduce_planes, self.identities = len(moments), (-math.inf, 0.0, 0.0, 0.0)[: len(moments)]
        self.planes = tuple(_Plane(self, index) for index in range(len(moments)))

    def config_key(self):
        return (*super().config_key(), self.moments, self.ragged, _SOURCE)

    def sink_alloc_shape(self, lead, n, tile_m, tile_n, num_seqs=None):
        return (*lead, len(self.moments) * -(-n // tile_n))

    @cute.jit
    def fn_sink_flush(self, gemm, state, frag):
        accumulators, coords, limit_n, _ = state
        if const_expr(self.ragged):
            mask_columns(gemm, frag, coords, limit_n, -math.inf)
        reference = accumulators[0].layout
        values = layout_utils.convert_layout_zero_stride(frag, reference)
        per_row = tuple(layout_utils.convert_layout_zero_stride(a, reference)[None, 0] for a in accumulators)
        for row in cutlass.range_constexpr(cute.size(values, mode=[0])):
            columns = const_expr(cute.size(values, mode=[1]))
            largest = values[row, 0]
            for j in cutlass.range_constexpr(1, columns):
                largest = cute.arch.fmax(largest, values[row, j])
            largest = cute.arch.fmax(per_row[0][row], largest)
            shift = _finite(largest)
            totals = self._shifted(tuple(a[row] for a in per_row), shift)
            for j in cutlass.range_constexpr(columns):
                below = values[row, j] - shift
                e = cute.math.exp(below, fastmath=True)
                terms = {"sum_exp": e}
                if const_expr("sum_exp_z" in self.moments):
                    terms["sum_exp_z"] = e * cute.arch.fmax(below, Float32(LOWEST_MAXIMUM))  # −∞·0 is NaN
                if const_expr("sum_exp_sq" in self.moments):
                    terms["sum_exp_sq"] = e * e
                totals = tuple(t + terms[name] for t, name in zip(totals, self.moments[1:], strict=True))
            for total, accumulator in zip((largest, *totals), per_row, strict=True):
                accumulator[row] = total

    @cute.jit
    def _shifted(self, vals, shift):
        """The sums of vals, (m, sums…), relative to another maximum."""
        below = vals[0] - shift
        factor = cute.math.exp(below, fastmath=True)
        sums = dict(zip(self.moments, vals, strict=True))
        shifted = {"sum_exp": sums["sum_exp"] * factor}
        if const_expr("sum_exp_z" in self.moments):
            distance = cute.arch.fmax(below, Float32(LOWEST_MAXIMUM))
            shifted["sum_exp_z"] = (sums["sum_exp_z"] + sums["sum_exp"] * distance) * factor
        if const_expr("sum_exp_sq" in self.moments):
            shifted["sum_exp_sq"] = sums["sum_exp_sq"] * (factor * factor)
        return tuple(shifted[name] for name in self.moments[1:])

    @cute.jit
    def _merge(self, vals, others):
        largest = cute.arch.fmax(vals[0], others[0])
        shift = _finite(largest)
        both = zip(self._shifted(vals, shift), self._shifted(others, shift), strict=True)
        return (largest, *(a + b for a, b in both))

    @cute.jit
    def end_loop_finish(self, gemm, param, staged, tile_coord_mnkl, varlen_manager):
        """Merges over the warps of a row with the first moment, and writes each at its own tiles."""
        tile_m, tile_n, tile_k, batch = tile_coord_mnkl
        tiles = param.shape[2] // len(self.moments)
        for index in cutlass.range_constexpr(len(self.moments)):
            # a tile beyond the vocabulary, as clusters have, stays beyond all of them
            place = cutlass.select_(tile_n < tiles, tile_n + index * tiles, param.shape[2])
            coord = (tile_m, place, tile_k, batch)
            self.planes[index].end_loop_finish(gemm, param, staged, coord, varlen_manager)
            if const_expr(index == 0):
                staged = _merged(staged)


class _Plane(ColVecReduce):
    """Writes one of an OnlineMoments' values."""

    def __init__(self, owner, index):
        super().__init__(owner.name)
        self.owner, self.index = owner, index

    @cute.jit
    def _merge(self, vals, others):
        return self.owner._merge(vals, others)

    @cute.jit
    def _finalize(self, vals):
        return vals[self.index]


def _merged(staged):
    """What ColVecReduce.end_loop_finish takes, for values whose warps it has merged into the first one: only that one
    writes."""
    values, coords, exchange, warps, warp, leader, swapped, slices, per_slice, lane = staged
    if const_expr(warps > 1):
        first = warp == 0
        leader, lane = leader & first, cutlass.select_(first, lane, Int32(slices))
    return values, coords, exchange, 1, warp, leader, swapped, slices, per_slice, lane


@cute.jit
def _finite(largest):
    """What is subtracted: −∞ − (−∞) is NaN, of a row that has nothing yet."""
    return Float32(cutlass.select_(largest == Float32(-math.inf), Float32(0.0), largest))

"""Tiles of bytes for an epilogue: numbers of 0 to 255 as floats, in and out. quack's own tiles of 8 bits take unsigned
numbers for signed ones, in either direction.

A byte in the lowest bits of the float 2²³ makes it 2²³ + the byte, and a float to which 2²³ is added is rounded to a
whole number there: no conversion, of which a multiprocessor does a quarter as many as of additions.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import cutlass
from cutlass import Float32, Uint8, Uint32, cute
from quack.epilogue.ops import TileLoad, TileStore

_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # as in cute_ops.py
WHOLE = 2.0**23  # from here on float32 holds whole numbers alone
BITS_OF_WHOLE = 0x4B000000


class ByteTileLoad(TileLoad):
    """A (m, n) operand of uint8: the function receives it as Float32."""

    fn_port = "value"

    def config_key(self):
        return (*super().config_key(), _SOURCE)

    @cute.jit
    def fn_prepare(self, gemm, state, paired):
        words = cute.make_rmem_tensor(state.layout, Uint32)
        for i in cutlass.range(cute.size(state), unroll_full=True):
            words[i] = Uint32(state[i]) | Uint32(BITS_OF_WHOLE)
        values = cute.recast_tensor(words, Float32)
        for i in cutlass.range(cute.size(state), unroll_full=True):
            values[i] = values[i] - Float32(WHOLE)
        return values


class ByteTileStore(TileStore):
    """A (m, n) output of uint8, of values from 0 to 255, which are rounded to the nearest."""

    def config_key(self):
        return (*super().config_key(), _SOURCE)

    @cute.jit
    def store_convert(self, gemm, frag, sr_seed, tidx, tile_coord_mnkl, num_prev_subtiles, epi_idx):
        for i in cutlass.range(cute.size(frag), unroll_full=True):
            frag[i] = frag[i] + Float32(WHOLE)
        words = cute.recast_tensor(frag, Uint32)
        out = cute.make_rmem_tensor(frag.layout, Uint8)
        for i in cutlass.range(cute.size(frag), unroll_full=True):
            out[i] = Uint8(words[i] & Uint32(0xFF))
        return out

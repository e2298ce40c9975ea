"""Tiles of bytes that are a part of each number's bits, in and out of an epilogue: the lower part of a sum
(two_part_sum.py). quack's own tiles of 8 bits are numbers, and it takes unsigned ones for signed ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

import cutlass
from cutlass import Float32, Int32, Uint8, Uint32, cute
from quack.epilogue.ops import TileLoad, TileStore

from liger_cutedsl.two_part_sum import HALF_OF_THE_REST

_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # as in cute_ops.py


class LowPartLoad(TileLoad):
    """A (m, n) operand of uint8: the function receives the word that plus_bits adds to the upper part."""

    fn_port = "value"

    def config_key(self):
        return (*super().config_key(), HALF_OF_THE_REST, _SOURCE)

    @cute.jit
    def fn_prepare(self, gemm, state, paired):
        words = cute.make_rmem_tensor(state.layout, Int32)
        for i in cutlass.range(cute.size(state), unroll_full=True):
            words[i] = ((Int32(state[i]) << 24) >> 16) + Int32(HALF_OF_THE_REST)
        return cute.recast_tensor(words, Float32)


class LowPartStore(TileStore):
    """A (m, n) output of uint8: the third 8 bits of the function's values."""

    def config_key(self):
        return (*super().config_key(), _SOURCE)

    @cute.jit
    def store_convert(self, gemm, frag, sr_seed, tidx, tile_coord_mnkl, num_prev_subtiles, epi_idx):
        words = cute.recast_tensor(frag, Uint32)
        out = cute.make_rmem_tensor(frag.layout, Uint8)
        for i in cutlass.range(cute.size(frag), unroll_full=True):
            out[i] = Uint8((words[i] >> 8) & Uint32(0xFF))
        return out

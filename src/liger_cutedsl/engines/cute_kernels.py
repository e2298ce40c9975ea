"""The CuTe kernels: quack GEMMs with the epilogues of epilogues.py, and the tiles they run with.

    forward   x·Wᵀ with no output matrix: log-sum-exp partials, target logit, weighted sum, argmax
    backward  x·W[tile]ᵀ whose epilogue writes dz
    exp       x·Wᵀ of a chunk of tokens, writing exponentials relative to their tile's maximum, with sums and maxima

A kernel is compiled once for each combination of Epilogue, dtype and GemmTile, and kept on disk by quack
(QUACK_CACHE_DIR). Neither N nor V nor the value of an option is compiled in.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass

from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import ColVecLoad, ColVecReduce, ColVecSelect, OnlineLSEReduce, RowVecLoad

from liger_cutedsl.engines.cute_ops import FirstZero, MaskedColVecSum, OnlineArgmax, TileMaximum
from liger_cutedsl.epilogues import Epilogue, backward_epilogue, exp_epilogue, exp_prepass, forward_epilogue

_OPERAND_OPS = {
    "bias": RowVecLoad,
    "ce_weight": RowVecLoad,
    "lse": ColVecLoad,
    "row_a": ColVecLoad,
    "row_c": ColVecLoad,
}


@dataclass(frozen=True)
class GemmTile:
    """Tile and cluster of a GEMM: rows (tokens) × columns (vocabulary)."""

    tile_m: int
    tile_n: int
    cluster_m: int = 2
    cluster_n: int = 1
    pingpong: bool = False

    def arguments(self) -> dict:
        return dict(
            tile_M=self.tile_m,
            tile_N=self.tile_n,
            cluster_M=self.cluster_m,
            cluster_N=self.cluster_n,
            pingpong=self.pingpong,
        )

    def __str__(self) -> str:
        pingpong = "/pingpong" if self.pingpong else ""
        return f"{self.tile_m}x{self.tile_n}/{self.cluster_m}x{self.cluster_n}{pingpong}"


# Compute capability (major) → kernel → tile. Measured on an H200 at N=8192, V=128256, H=4096 where it says so.
GEMM_TILES = {
    9: {
        # Two warpgroups take turns, one's epilogue under the other's MMAs. Forward alone 12.5 ms; 128x128 12.6,
        # cooperative 128x256 14.0 and 256x128 14.1, other clusters 13.1 to 14.0.
        "forward": GemmTile(128, 192, 2, 1, pingpong=True),
        # Whole call, in one run: 49.7 ms with 128x192, 52.1 with 128x128, 52.9 with cooperative 128x256.
        "backward": GemmTile(128, 192, 2, 1, pingpong=True),
        "exp": GemmTile(128, 192, 2, 1, pingpong=True),
        # With any option the epilogue of 128x192 runs out of registers (685 spilled words with all of them).
        "exp-options": GemmTile(128, 128, 2, 1, pingpong=True),
    },
    10: {
        # The widest 2-SM tile: two CTAs share one 256 × 256 tcgen05 MMA. Not measured (no Blackwell GPU).
        "forward": GemmTile(256, 256, 2, 1),
        "backward": GemmTile(256, 256, 2, 1),
        "exp": GemmTile(256, 256, 2, 1),
        "exp-options": GemmTile(256, 256, 2, 1),
    },
}
TILES_VARIABLE = "LIGER_CUTEDSL_TILES"


def gemm_tile(kernel: str, major: int) -> GemmTile:
    """The tile of a kernel on an architecture, or the one LIGER_CUTEDSL_TILES sets for experiments:
    for instance forward=128x256/2x1,backward=128x192/2x1/pingpong."""
    return _tile_overrides(os.environ.get(TILES_VARIABLE, "")).get(kernel) or GEMM_TILES[major][kernel]


@functools.cache
def _tile_overrides(text: str) -> dict[str, GemmTile]:
    overrides = {}
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([\w-]+)=(\d+)x(\d+)/(\d+)x(\d+)(/pingpong)?", part.strip())
        if not match or match[1] not in GEMM_TILES[9]:
            raise ValueError(
                f"{TILES_VARIABLE} must be a list of KERNEL=MxN/CLUSTERMxCLUSTERN[/pingpong] with KERNEL one of "
                f"{', '.join(GEMM_TILES[9])}, got {part!r}"
            )
        overrides[match[1]] = GemmTile(*(int(match[i]) for i in (2, 3, 4, 5)), pingpong=bool(match[6]))
    return overrides


@functools.cache
def forward_kernel(part: Epilogue, ragged: bool):
    """ragged: the last tile of the vocabulary is not full, so reductions have to mask it."""
    target, sinks = _row_sinks(part, ragged)
    sinks["lse"] = OnlineLSEReduce("lse", check_oob=ragged)
    if part.argmax:
        sinks["argmax"] = OnlineArgmax("argmax")
    pins = _pinned(part.forward_operands)
    return gemm_epilogue(ops=pins, outs=sinks, extra_ops=(target,))(forward_epilogue(part))


@functools.cache
def exp_kernel(part: Epilogue, ragged: bool, headroom: int):
    """headroom: exponentials are stored times 2^headroom."""
    target, sinks = _row_sinks(part, ragged)
    sinks["sum_exp"] = MaskedColVecSum("sum_exp") if ragged else ColVecReduce("sum_exp")
    if part.argmax:
        sinks["is_max"] = FirstZero("is_max")
    maximum = TileMaximum("tile_max")
    return gemm_epilogue(
        ops={**_pinned(part.forward_operands), "tile_max": maximum},
        prepass=exp_prepass(part),
        prepass_outs=("tile_max",),
        outs=sinks,
        extra_ops=(maximum.out("tile_max_out"), target),
    )(exp_epilogue(part, headroom))


def _row_sinks(part: Epilogue, ragged: bool):
    """What both kernels reduce logits to besides the log-sum-exp; and the load of the target's column."""
    target = ColVecLoad("target")
    sinks = {"target_logit": ColVecSelect("target_logit", idx_op=target)}
    if part.smoothing:
        reduce = MaskedColVecSum if ragged else ColVecReduce
        sinks["weighted_sum"] = reduce("weighted_sum", scaled=part.ce_weight)
    return target, sinks


@functools.cache
def backward_kernel(part: Epilogue):
    return gemm_epilogue(ops=_pinned(part.backward_operands))(backward_epilogue(part))


def _pinned(names) -> dict:
    """Row or column, said rather than inferred: inference refuses a square problem. Scalars infer themselves."""
    return {name: _OPERAND_OPS[name](name) for name in names if name in _OPERAND_OPS}

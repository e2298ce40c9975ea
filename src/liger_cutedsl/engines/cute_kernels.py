"""The CuTe kernels: quack GEMMs with the epilogues of epilogues.py. Their tiles: architectures.py.

    forward   x·Wᵀ with no output matrix: log-sum-exp partials or moments, target logit, weighted sum, argmax
    backward  x·W[tile]ᵀ whose epilogue writes dz
    dw-sum    dzᵀ·x of a chunk of tokens, added to a sum in two parts (two_part_sum.py)
    exp       x·Wᵀ of a chunk of tokens, writing exponentials relative to their tile's maximum, with sums and maxima

A kernel is compiled once for each combination of EpilogueFlags, dtype and GemmTile, and kept on disk by quack
(QUACK_CACHE_DIR). Neither N nor V nor the value of an option is compiled in.
"""

from __future__ import annotations

import functools

from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import ColVecLoad, ColVecReduce, ColVecSelect, OnlineLSEReduce, RowVecLoad

from liger_cutedsl.engines.cute_bytes import LowPartLoad, LowPartStore
from liger_cutedsl.engines.cute_moments import OnlineMoments
from liger_cutedsl.engines.cute_ops import FirstZero, MaskedColVecSum, OnlineArgmax, TileMaximum
from liger_cutedsl.epilogues import EpilogueFlags, backward_epilogue, exp_epilogue, exp_prepass, forward_epilogue
from liger_cutedsl.two_part_sum import sum_epilogue

_OPERAND_OPS = {
    "bias": RowVecLoad,
    "ce_weight": RowVecLoad,
    "lse": ColVecLoad,
    "row_a": ColVecLoad,
    "row_c": ColVecLoad,
    "row_h": ColVecLoad,
}


@functools.cache
def forward_kernel(flags: EpilogueFlags, ragged: bool):
    """ragged: the last tile of the vocabulary is not full, so reductions have to mask it."""
    target, sinks = _row_sinks(flags, ragged)
    if flags.moments:
        sinks["moments"] = OnlineMoments("moments", flags.moments, ragged)
    else:
        sinks["lse"] = OnlineLSEReduce("lse", check_oob=ragged)
    if flags.argmax:
        sinks["argmax"] = OnlineArgmax("argmax")
    pins = _pinned(flags.forward_operands)
    return gemm_epilogue(ops=pins, outs=sinks, extra_ops=(target,))(forward_epilogue(flags))


@functools.cache
def exp_kernel(flags: EpilogueFlags, ragged: bool, headroom: int):
    """headroom: exponentials are stored times 2^headroom."""
    target, sinks = _row_sinks(flags, ragged)
    reduce = MaskedColVecSum if ragged else ColVecReduce
    sinks |= {name: reduce(name) for name in flags.moments[1:] or ("sum_exp",)}
    if flags.argmax:
        sinks |= {"argmax": OnlineArgmax("argmax")} if flags.scale else {"is_max": FirstZero("is_max")}
    maximum = TileMaximum("tile_max")
    return gemm_epilogue(
        ops={**_pinned(flags.forward_operands), "tile_max": maximum},
        prepass=exp_prepass(flags),
        prepass_outs=("tile_max",),
        outs=sinks,
        extra_ops=(maximum.out("tile_max_out"), target),
    )(exp_epilogue(flags, headroom))


def _row_sinks(flags: EpilogueFlags, ragged: bool):
    """What both kernels reduce logits to besides the log-sum-exp; and the load of the target's column."""
    target = ColVecLoad("target")
    sinks = {"target_logit": ColVecSelect("target_logit", idx_op=target)}
    if flags.smoothing:
        reduce = MaskedColVecSum if ragged else ColVecReduce
        sinks["weighted_sum"] = reduce("weighted_sum", scaled=flags.ce_weight)
    return target, sinks


@functools.cache
def backward_kernel(flags: EpilogueFlags):
    return gemm_epilogue(ops=_pinned(flags.backward_operands))(backward_epilogue(flags))


@functools.cache
def sum_kernel():
    return gemm_epilogue(ops={"low": LowPartLoad("low")}, outputs=(LowPartStore("next_low"),))(sum_epilogue())


def _pinned(names) -> dict:
    """Row or column, said rather than inferred: inference refuses a square problem. Scalars infer themselves."""
    return {name: _OPERAND_OPS[name](name) for name in names if name in _OPERAND_OPS}

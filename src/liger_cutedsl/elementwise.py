"""Functions of one element under one name, for the three kinds of value: torch tensors, Float32 scalars, packed f32x2
pairs. Their source is a part of the identity of the epilogues that use them."""

from __future__ import annotations

import torch

LN_2 = 0.6931471805599453
SMALLEST_EXPONENTIAL = 2.0**-126  # float32's least normal number: less is nothing, and the logarithm of that −∞


def exp2(v):
    if hasattr(v, "exp2"):  # torch.Tensor
        return v.exp2()
    from quack.epilogue.math import pexp2

    return pexp2(v)


def reciprocal(v):
    if hasattr(v, "reciprocal"):  # torch.Tensor
        return v.reciprocal()
    from cutlass import cute

    if isinstance(v, tuple):
        return type(v)(reciprocal(v[0]), reciprocal(v[1]))
    return cute.arch.rcp_approx(v)


def at_least(v, least: float):
    """The larger of v and a number; the number where v is NaN."""
    if hasattr(v, "fmax"):  # torch.Tensor
        return v.fmax(v.new_full((), least))
    from cutlass import cute

    if isinstance(v, tuple):
        return type(v)(at_least(v[0], least), at_least(v[1], least))
    return cute.arch.fmax(v, least)


def at_most_one(v):
    """The smaller of v and 1; 1 where v is NaN."""
    if hasattr(v, "fmin"):  # torch.Tensor
        return v.fmin(v.new_ones(()))
    from cutlass import cute

    if isinstance(v, tuple):
        return type(v)(at_most_one(v[0]), at_most_one(v[1]))
    return cute.arch.fmin(v, 1.0)


def plus_bits(v, word):
    """The number whose bits are v's and the word's added up; both float32."""
    if hasattr(v, "view"):  # torch.Tensor
        return (v.view(torch.int32) + word.view(torch.int32)).view(torch.float32)
    from cutlass import Float32, Int32

    if isinstance(v, tuple):
        return type(word)(plus_bits(v[0], word[0]), plus_bits(v[1], word[1]))
    return (v.bitcast(Int32) + word.bitcast(Int32)).bitcast(Float32)


def with_last_bit(v):
    """v, float32, with the last of its bits set; what was infinite is NaN."""
    if hasattr(v, "view"):  # torch.Tensor
        return (v.view(torch.int32) | 1).view(torch.float32)
    from cutlass import Float32, Int32

    if isinstance(v, tuple):
        return type(v)(with_last_bit(v[0]), with_last_bit(v[1]))
    return (v.bitcast(Int32) | Int32(1)).bitcast(Float32)

"""Functions of one element under one name, for the three kinds of value: torch tensors, Float32 scalars, packed f32x2
pairs. Their source is a part of the identity of the epilogues that use them."""

from __future__ import annotations

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


def at_most(v, most: float):
    """The smaller of v and a number; the number where v is NaN."""
    if hasattr(v, "fmin"):  # torch.Tensor
        return v.fmin(v.new_full((), most))
    from cutlass import cute

    if isinstance(v, tuple):
        return type(v)(at_most(v[0], most), at_most(v[1], most))
    return cute.arch.fmin(v, most)


def rounded_to_bfloat16(v):
    """The nearest number of bfloat16, in float32."""
    if hasattr(v, "bfloat16"):  # torch.Tensor
        return v.bfloat16().float()
    from cutlass import BFloat16, Float32

    if isinstance(v, tuple):
        return type(v)(rounded_to_bfloat16(v[0]), rounded_to_bfloat16(v[1]))
    return v.to(BFloat16).to(Float32)

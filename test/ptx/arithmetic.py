"""Integer, float, logic, comparison and conversion instructions (PTX ISA: Integer Arithmetic, Floating
Point, Comparison and Selection, Logic and Shift, Data Movement and Conversion Instructions).

Approximate functions (ex2, lg2, rcp) are computed exactly and rounded to float32, subnormal operands and results
flushed to zero where the instruction says .ftz, as those of our kernels do: a GPU may differ in the last two bits.
"""

from __future__ import annotations

import numpy as np

from ptx.values import CTA_SHIFT, F32, F64, I32, I64, OFFSET_MASK, U32, U64, Form

SMALLEST = F32(2.0**-126)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < SMALLEST, np.copysign(F32(0), x), x).astype(F32)


def fused(a, b, c) -> np.ndarray:
    """a·b + c of float32, rounded once but for float64's own rounding of the sum."""
    return (a.astype(F64) * b + c).astype(F32)


def _shift(left: bool):
    """Shifts clamp their amount to the type's width (PTX ISA: shl, shr)."""

    def shift(x, amount):
        bits = 8 * x.dtype.itemsize
        amount = np.minimum(amount.astype(I64), 63)
        if bits == 64:
            return x << amount.astype(x.dtype) if left else x >> amount.astype(x.dtype)
        wide = x.astype(U64 if x.dtype.kind == "u" else I64)
        return ((wide << amount.astype(wide.dtype)) if left else (wide >> amount.astype(wide.dtype))).astype(x.dtype)

    return shift


def _high(a, b):
    wide = U64 if a.dtype == U32 else I64
    return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 → bf16, to nearest even; NaN becomes 0x7fff, as cvt's text says."""
    bits = x.view(U32).astype(U64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(U32)


def _f16_bits(x):
    return np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(U32)


def _clipped16(x):
    return np.clip(x, -32768, 32767).astype(np.int16).view(np.uint16).astype(U32)


def _to_integer(dtype):
    def convert(x):  # cvt.rzi and its like: NaN gives 0, and the range is clamped
        return np.nan_to_num(np.trunc(x.astype(F64))).clip(-(2.0**31), 2.0**31 - 1).astype(dtype)

    return convert


UNARY = {
    "not": np.invert,
    "neg": np.negative,
    "abs": np.abs,
    "ex2": lambda x: flushed(np.exp2(flushed(x))),
    "lg2": lambda x: np.log2(flushed(x)),
    "rcp": lambda x: flushed(F32(1) / flushed(x)),
}
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
PACKED_CONVERSIONS = {  # cvt d, a, b: a goes to the upper half
    "cvt.pack.sat.s16.s32": (_clipped16, I32),
    "cvt.rn.bf16x2.f32": (bf16_bits, F32),
    "cvt.rn.f16x2.f32": (_f16_bits, F32),
}


def decode(form: Form):
    found = _operation(form)
    if found is None:
        return None
    function, source_types, result_type = found
    reads = [form.source(1 + i, dtype) for i, dtype in enumerate(source_types)]
    if len(form.operands) != 1 + len(reads):
        return None
    destination, result_type = form.operands[0], np.dtype(result_type)
    if len(reads) == 1:
        (first,) = reads
        return lambda warp: warp.set(destination, np.asarray(function(first(warp)), result_type))
    if len(reads) == 2:
        first, second = reads
        return lambda warp: warp.set(destination, np.asarray(function(first(warp), second(warp)), result_type))
    return lambda warp: warp.set(destination, np.asarray(function(*[r(warp) for r in reads]), result_type))


def _operation(form: Form):
    """(function, operand types, result type), or None."""
    base, parts, last = form.parts[0], form.parts, form.types[-1] if form.types else None
    if base in UNARY:
        return UNARY[base], [last], last
    if base == "mul" and "wide" in parts:
        wide = U64 if last is U32 else I64
        return (lambda a, b: a.astype(wide) * b.astype(wide)), [last, last], wide
    if base == "mul" and "hi" in parts:
        return _high, [last, last], last
    if base in ("shl", "shr"):
        return _shift(base == "shl"), [last, U32], last
    if base in BINARY:
        return BINARY[base], [last, last], last
    if base in ("max", "min"):
        return _extremum(base, parts, last), [last, last], last
    if base == "mad":
        return (lambda a, b, c: a * b + c), [last] * 3, last
    if base == "fma" and last is F32:
        return fused, [last] * 3, last
    if base == "selp":
        return (lambda a, b, p: np.where(p, a, b)), [last, last, np.bool_], last
    if base == "setp" and len(parts) == 3 + (parts[-2] == "ftz"):
        return _comparison(parts[1], last), [last, last], np.bool_
    if parts == ["prmt", "b32"]:
        return _permuted, [U32] * 3, U32
    return _conversion(form, last)


def _permuted(a, b, selector):
    """Four of the eight bytes of b:a, one a nibble of the selector; its highest bit asks for the byte's sign in each
    bit (PTX ISA: prmt)."""
    pair, result = b.astype(U64) << U64(32) | a.astype(U64), U32(0)
    for place in range(4):
        choice = selector >> U32(4 * place) & U32(15)
        byte = (pair >> (choice & U32(7)).astype(U64) * U64(8) & U64(255)).astype(U32)
        byte = np.where(choice & U32(8), (byte >> U32(7)) * U32(255), byte)
        result = result | byte << U32(8 * place)
    return result


def _extremum(base: str, parts: list[str], dtype):
    """Of floats, a NaN loses, unless the instruction says .NaN (PTX ISA: max, min)."""
    if dtype is F32 and "NaN" not in parts:
        return np.fmax if base == "max" else np.fmin
    return np.maximum if base == "max" else np.minimum


def _comparison(name: str, dtype):
    if name == "ne" and dtype is F32:  # ordered: false where one is NaN, unlike numpy's
        return lambda a, b: (a < b) | (a > b)
    if name in ("gtu", "geu", "ltu", "leu", "neu", "equ"):  # unordered: true where one is NaN
        return lambda a, b: COMPARE[name[:2]](a, b) | np.isnan(a) | np.isnan(b)
    return COMPARE[name]


def _halves(convert):
    return lambda a, b: convert(a) << U32(16) | convert(b)


def _conversion(form: Form, last):
    base = form.parts[0]
    if form.op == "cvt.rn.bf16.f32":
        return bf16_bits, [F32], np.uint16
    if form.op == "cvt.f32.bf16":
        return (lambda a: (a.astype(U32) << U32(16)).view(F32)), [np.uint16], F32
    for prefix, (convert, dtype) in PACKED_CONVERSIONS.items():
        if form.op.startswith(prefix):
            return _halves(convert), [dtype, dtype], U32
    if base == "cvt" and len(form.types) == 2 and "sat" not in form.parts:
        to, source = form.types
        if to in (I32, U32) and source is F32:
            return (_to_integer(to), [source], to) if "rzi" in form.parts else None
        return (lambda a: a.astype(to)), [source], to
    if base in ("cvta", "mov"):
        return (lambda a: a), [last], last
    if base == "mapa":  # a shared address of another CTA of the cluster (PTX ISA: mapa)
        low, shift = U32(OFFSET_MASK), U32(CTA_SHIFT)
        return (lambda a, rank: a & low | rank << shift), [U32, U32], U32
    return None

"""Instructions on registers that hold two values: f32x2 arithmetic, mov of halves, comparisons of f16x2."""

from __future__ import annotations

import numpy as np

from ptx.arithmetic import fused
from ptx.values import F32, LANES, U32, U64, Form, lanes_of, members

HALF = {8: U32, 4: np.uint16}  # of a register's bytes


def _move(form: Form):
    """mov.b64 {a, b}, c and mov.b64 c, {a, b} (PTX ISA: mov); None for other moves."""
    to, source = form.operands
    wide = form.types[-1]
    if to[0] == "{":
        return _unpack(members(to), form.source(1, wide), HALF[np.dtype(wide).itemsize])
    if source[0] == "{":
        half = HALF[np.dtype(wide).itemsize]
        return _pack(to, form.sources(source, half), half, wide)
    return None


def _unpack(names, read, half):
    def unpack(warp):
        halves = np.ascontiguousarray(lanes_of(read(warp))).view(half).reshape(LANES, 2)
        for i, name in enumerate(names):
            if name != "_":
                warp.set(name, np.ascontiguousarray(halves[:, i]))

    return unpack


def _pack(name, reads, half, wide):
    low, high = reads

    def pack(warp):
        out = np.empty((LANES, 2), half)
        out[:, 0], out[:, 1] = low(warp), high(warp)
        warp.set(name, out.view(wide)[:, 0])

    return pack


def _compare_halves(form: Form):
    """setp.eq.f16x2 p|q, a, b."""
    names, reads = form.operands[0].split("|"), [form.source(i, U32) for i in (1, 2)]

    def compare(warp):
        a, b = (np.ascontiguousarray(lanes_of(read(warp))).view(np.float16).reshape(LANES, 2) for read in reads)
        for i, name in enumerate(names):
            warp.set(name, np.ascontiguousarray((a == b)[:, i]))

    return compare


def _arithmetic(form: Form):
    """add, sub, mul and fma of f32x2 (PTX ISA: add, .f32x2); None for other types."""
    if form.parts[-1] != "f32x2":
        return None
    reads = [form.source(1 + i, U64) for i in range(len(form.operands) - 1)]
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fused}[form.parts[0]]
    name = form.operands[0]
    return lambda warp: warp.set(name, function(*[read(warp).view(F32) for read in reads]).view(U64))


DECODERS = {"mov": _move, "setp.eq.f16x2": _compare_halves, **dict.fromkeys(("add", "sub", "mul", "fma"), _arithmetic)}

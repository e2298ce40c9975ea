"""What a value is: 32 lanes of a PTX type, and how an operand of an instruction is read as one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LANES = 32
LANE = np.arange(LANES)
F32, F64, I32, U32, I64, U64 = np.float32, np.float64, np.int32, np.uint32, np.int64, np.uint64
TYPES = {"f32": F32, "s32": I32, "u32": U32, "b32": U32, "s64": I64, "u64": U64, "b64": U64, "pred": np.bool_}
TYPES |= {"s16": np.int16, "u16": np.uint16, "b16": np.uint16, "b8": np.uint8, "u8": np.uint8, "f32x2": F32}
TYPES |= {"f16": np.float16, "f16x2": np.float16}

# Where things live among generic addresses. A shared address is rank << 24 | offset, so that an address of the CTA's
# own shared memory (shared::cta) is an address of the cluster's (shared::cluster).
PARAMS_AT = 1 << 60
CTA_SHIFT = 24
OFFSET_MASK = (1 << CTA_SHIFT) - 1
POISON32 = 0x7FC0DEAD  # a NaN
DYNAMIC_SHARED_AT = 1024  # as on hardware, where the first KiB belongs to the system

_SPECIAL_REGISTER = re.compile(r"%(tid|ctaid|nctaid|cluster_|laneid)")


class PtxError(Exception):
    """What the kernel did wrong, or what this interpreter does not know."""


@dataclass
class Form:
    """An instruction about to be decoded.

    op: "tcgen05.ld.sync.aligned…"; parts: the same, split at its dots.  guard: "%p1", "!%p1" or None.
    params: name → (offset, size) of the kernel's parameters.  threads: of a CTA.
    """

    text: str
    op: str
    operands: list[str]
    guard: str | None
    params: dict[str, tuple[int, int]]
    threads: int

    def __post_init__(self):
        self.parts = self.op.replace("::", ".").split(".")
        self.types = [TYPES[part] for part in self.parts if part in TYPES]

    def source(self, index: int, dtype) -> Callable:
        """A function of the warp that reads an operand as dtype."""
        return read_operand(self.operands[index], dtype, self.params)

    def sources(self, operand: str, dtype) -> list[Callable]:
        """The same for each member of a vector operand {a, b, …}."""
        return [read_operand(member, dtype, self.params) for member in members(operand)]

    def address(self, index: int) -> Callable:
        """A function of the warp that gives the addresses (int64, one a lane) of an operand [base+offset]."""
        base, _, offset = self.operands[index].strip("[]").partition("+")
        narrow = base.startswith("%r") and not base.startswith("%rd")
        read, offset = read_operand(base, U32 if narrow else U64, self.params), int(offset or 0)
        return lambda warp: lanes_of(read(warp).astype(I64)) + offset


def split(text: str) -> list[str]:
    """Operands, split at the commas outside brackets."""
    out, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    return [*out, text[start:].strip()] if text.strip() else []


def members(operand: str) -> list[str]:
    return split(operand[1:-1]) if operand[0] == "{" else [operand]


def lanes_of(values) -> np.ndarray:
    """One value a lane, of values that may be the same in all."""
    return np.broadcast_to(values, (LANES,))


def read_operand(operand: str, dtype, params: dict) -> Callable:
    """A register, special register, immediate, parameter or shared symbol as a function of the warp."""
    dtype = np.dtype(dtype)
    if _SPECIAL_REGISTER.match(operand):
        return lambda warp: special_register(warp, operand).astype(dtype)
    if operand[0] == "%" or "@" in operand:
        return lambda warp: warp.get(operand, dtype)
    if operand == "__dynamic_shmem__0":
        return lambda warp: np.full(LANES, warp.cta.rank << CTA_SHIFT | DYNAMIC_SHARED_AT, dtype)
    value = _constant(operand, dtype, params)
    return lambda warp: value


def _constant(operand: str, dtype: np.dtype, params: dict) -> np.ndarray:
    if operand.startswith("0f"):
        return np.array(int(operand[2:], 16), U32).view(dtype)
    if operand in params:
        return np.array(PARAMS_AT + params[operand][0], U64)
    integer = int(operand.removesuffix("U"), 0)
    if dtype.kind == "b":
        return np.array(integer != 0)
    if dtype.kind == "f":
        raise PtxError(f"an integer operand {operand} where a float is wanted")
    return np.array(integer & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").view(dtype)


def special_register(warp, name: str) -> np.ndarray:
    """%tid, %ctaid and their like (PTX ISA: Special Registers)."""
    cluster, size = warp.cluster, warp.cluster.size
    rank = warp.cta.rank
    within = rank % size[0], rank // size[0] % size[1], rank // (size[0] * size[1])
    name, _, axis = name[1:].partition(".")
    axis = "xyz".find(axis) if axis else None
    if name == "tid":
        return warp.index * LANES + LANE if axis == 0 else np.zeros(LANES, int)
    value = {
        "laneid": lambda: LANE,
        "cluster_ctarank": lambda: rank,
        "cluster_ctaid": lambda: within[axis],
        "ctaid": lambda: cluster.cluster_id[axis] * size[axis] + within[axis],
        "nctaid": lambda: cluster.grid[axis],
        "cluster_nctaid": lambda: size[axis],
    }[name]()
    return lanes_of(np.asarray(value))

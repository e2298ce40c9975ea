"""Tensor memory and the fifth-generation tensor core, for pairs of CTAs (PTX ISA: TensorCore 5th Generation
Family Instructions).

Products are of float32 and summed in numpy's order; a GPU sums 16 of them exactly, or nearly so, before it rounds.
"""

from __future__ import annotations

import re

import numpy as np

from ptx.control import YIELD, nothing
from ptx.matrices import matrix_operand
from ptx.memory import shared_at
from ptx.values import CTA_SHIFT, F32, LANES, POISON32, U32, U64, Form, PtxError, lanes_of, members

KINDS = ("f16", "bf16")  # of the instruction descriptor's A and B formats
NEGATED = 0b11 << 13  # of the instruction descriptor, an operand each
TRANSPOSED_A, TRANSPOSED_B = 1 << 15, 1 << 16


def _alloc(form: Form):
    """Collective over a pair with cta_group::2. The ISA says that the first warp may block until its peer comes; the
    leader's MMA counts on it: nothing else tells it that the other CTA has allocated."""
    address, columns = form.address(0), form.source(1, U32)

    def alloc(warp):
        warp.whole(form.op)
        if warp.cta.tmem_allocated:
            raise PtxError("tensor memory is allocated already")
        warp.cta.tmem_allocated = warp.uniform(columns(warp))
        shared, offset = shared_at(warp.cluster, warp.uniform(address(warp)), 4, form.op)
        shared.bytes[offset : offset + 4] = 0
        pair = warp.cluster.pair(warp.cta) if "cta_group::2" in form.op else [warp.cta]
        return lambda: all(cta.tmem_allocated for cta in pair)

    return alloc


def _dealloc(form: Form):
    columns = form.source(1, U32)

    def dealloc(warp):
        warp.whole(form.op)
        if warp.uniform(columns(warp)) != warp.cta.tmem_allocated:
            raise PtxError("tensor memory is freed in another size than it was allocated")
        warp.cta.tmem_allocated = 0
        warp.cta.tmem[:] = POISON32

    return dealloc


def _wait(form: Form):
    if "ld" not in form.parts:
        return None

    def wait(warp):
        for load in warp.loads:
            load()
        warp.loads = []

    return wait


def _commit(form: Form):
    """An arrival at an mbarrier, in each CTA of a mask with .multicast::cluster, when the MMAs before it are done."""
    barrier = form.address(0)
    mask = form.source(1, np.uint16) if "multicast" in form.parts else None

    def commit(warp):
        addresses = barrier(warp)
        for lane in warp.active:
            at = int(addresses[lane])
            ranks = 1 << (at >> CTA_SHIFT) if mask is None else int(lanes_of(mask(warp))[lane])
            warp.cluster.tensor_queue.append(lambda at=at, ranks=ranks: warp.cluster.arrive_in(at, ranks))
        return YIELD

    return commit


def _load(form: Form):
    """tcgen05.ld.32x32b: a column of the warp's own 32 lanes a register. It takes place as late as it may: at
    tcgen05.wait::ld, or when a register of it is read (see README.md)."""
    names, address = members(form.operands[0]), form.address(1)
    if not re.search(r"\.32x32b\.x\d+\.b32$", form.op):
        return None

    def load(warp):
        warp.whole(form.op)
        at = warp.uniform(address(warp))
        lane, column = at >> 16, at & 0xFFFF
        if lane != LANES * (warp.index % 4) or column + len(names) > warp.cta.tmem_allocated:
            raise PtxError(f"warp {warp.index} reads tensor memory at lane {lane}, column {column}")

        def perform():
            if column + len(names) > warp.cta.tmem_allocated:
                raise PtxError("a tcgen05.ld of tensor memory that has been freed")
            values = warp.cta.tmem[lane : lane + LANES, column : column + len(names)].T.copy()
            for name, value in zip(names, values, strict=True):
                if warp.regs[name] is perform:
                    warp.regs[name] = value

        warp.regs.update(dict.fromkeys(names, perform))
        warp.loads.append(perform)
        return YIELD

    return load


def _mma(form: Form):
    """cta_group::2, kind::f16: each CTA of a pair holds half of A's rows, of B's and of D's."""
    target, accumulate = form.address(0), form.source(len(form.operands) - 1, np.bool_)
    reads = [form.source(i, dtype) for i, dtype in ((1, U64), (2, U64), (3, U32))]
    if "cta_group::2" not in form.op or "kind::f16" not in form.op or form.operands[1][0] == "[":
        return None

    def mma(warp):
        if warp.cta.rank % 2:
            raise PtxError("tcgen05.mma by the second CTA of a pair")
        addresses, values, flags = target(warp), [lanes_of(r(warp)) for r in reads], lanes_of(accumulate(warp))
        for lane in warp.active:
            arguments = int(addresses[lane]), *(int(v[lane]) for v in values), bool(flags[lane])
            warp.cluster.tensor_queue.append(lambda arguments=arguments: _multiply(warp, *arguments))
        return YIELD

    return mma


def _multiply(warp, at: int, a: int, b: int, shape: int, accumulate: bool) -> None:
    m, n = (shape >> 24 & 31) << 4, (shape >> 17 & 63) << 3
    if shape >> 4 & 3 != 1 or shape & NEGATED or m != 256:
        raise PtxError(f"an instruction descriptor {shape:#x} that is not 256 rows, not negated, into float32")
    of_a, of_b = shape & TRANSPOSED_A != 0, shape & TRANSPOSED_B != 0
    pair = warp.cluster.pair(warp.cta)
    for cta in pair:
        warp.cluster.alive(cta.rank)
    rows = np.concatenate([matrix_operand(cta, a, m // 2, KINDS[shape >> 7 & 7], of_a) for cta in pair])
    columns = np.concatenate([matrix_operand(cta, b, n // 2, KINDS[shape >> 10 & 7], of_b) for cta in pair])
    product = rows @ columns.T
    for cta, half in zip(pair, np.split(product, 2), strict=True):
        if at >> 16 or (at & 0xFFFF) + n > cta.tmem_allocated:
            raise PtxError(f"an accumulator at {at:#x} outside the allocated tensor memory")
        accumulator = cta.tmem[:, at & 0xFFFF :][:, :n].view(F32)
        accumulator[...] = accumulator + half if accumulate else half


DECODERS = {
    "tcgen05.alloc": _alloc,
    "tcgen05.dealloc": _dealloc,
    "tcgen05.wait": _wait,
    "tcgen05.commit": _commit,
    "tcgen05.ld": _load,
    "tcgen05.mma": _mma,
    "tcgen05.relinquish_alloc_permit": nothing,
    "tcgen05.fence": nothing,
}

"""Hopper's warpgroup MMA (PTX ISA: wgmma.mma_async). Each warp computes its own 16 of the 64 rows, as late as it may:
at the wait for its group."""

from __future__ import annotations

import re

import numpy as np

from ptx.control import YIELD, nothing
from ptx.matrices import matrix_operand
from ptx.values import F32, LANE, U64, Form, members


def _commit(form: Form):
    def commit(warp):
        warp.groups.append(warp.open)
        warp.open = []

    return commit


def _wait(form: Form):
    keep = int(form.operands[0])

    def wait(warp):
        while len(warp.groups) > keep:
            for perform in warp.groups.pop(0):
                perform()
        return YIELD

    return wait


def _mma(form: Form):
    """m64nNk16 of two operands in shared memory, each K-major or transposed, scaled by 1, into float32 registers."""
    shape = re.search(r"\.m64n(\d+)k16\.f32\.(bf16|f16)\.", form.op)
    n, dtype, names = int(shape[1]), shape[2], members(form.operands[0])
    a, b, accumulate = (form.source(i, dtype) for i, dtype in ((1, U64), (2, U64), (3, np.bool_)))
    *scales, transpose_a, transpose_b = form.operands[4:]
    if scales != ["1", "1"] or len(names) != n // 2:
        return None
    of_a, of_b = transpose_a == "1", transpose_b == "1"
    index = np.arange(n // 2)[:, None]
    rows, columns = LANE // 4 + 8 * (index // 2 % 2), index // 4 * 8 + LANE % 4 * 2 + index % 2

    def mma(warp):
        warp.whole(form.op)
        at, bt, add = warp.uniform(a(warp)), warp.uniform(b(warp)), bool(warp.uniform(accumulate(warp)))
        first = warp.index % 4 * 16

        def perform():
            left = matrix_operand(warp.cta, at, 64, dtype, of_a)[first : first + 16]
            product = left @ matrix_operand(warp.cta, bt, n, dtype, of_b).T
            for name, value in zip(names, product[rows, columns], strict=True):
                warp.regs[name] = warp.get(name, F32) + value if add else value

        warp.open.append(perform)
        return YIELD

    return mma


DECODERS = {
    "wgmma.fence": nothing,
    "wgmma.commit_group": _commit,
    "wgmma.wait_group": _wait,
    "wgmma.mma_async": _mma,
}

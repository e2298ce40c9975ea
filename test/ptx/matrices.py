"""Matrix operands in shared memory, as tcgen05.mma and wgmma describe them (PTX ISA: their matrix descriptors)."""

from __future__ import annotations

import numpy as np

from ptx.memory import check_fenced
from ptx.tma import swizzled
from ptx.values import F32, U32, PtxError

SWIZZLE_128 = 2  # of the descriptor's highest three bits (two on Hopper, above an unused one)
K = 16  # columns of an operand of 16-bit elements
ROWS = 64  # of one column of it, where that lies together


def matrix_operand(cta, descriptor: int, rows: int, dtype: str, transposed: bool = False) -> np.ndarray:
    """An operand (rows, 16) in float32, swizzled by 128 bytes. K-major: in rows of 128 bytes, eight a group.
    Transposed, or MN-major: 128 bytes hold 64 rows of a column, eight columns a group, more rows a leading stride on.
    """
    start = (descriptor & 0x3FFF) << 4
    leading_stride, group_stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (16, 32))
    if descriptor >> 61 != SWIZZLE_128:
        raise PtxError(f"a matrix descriptor of layout {descriptor >> 61}, not 128-byte swizzle: not modelled")
    row, column = np.arange(rows)[:, None], np.arange(K)
    if transposed:
        at = row // ROWS * leading_stride + row % ROWS * 2 + column // 8 * group_stride + column % 8 * 128
    else:
        at = row // 8 * group_stride + row % 8 * 128 + column * 2
    at = swizzled(start + at, 3)
    check_fenced(cta.shared, slice(int(at.min()), int(at.max()) + 2), "a matrix operand")
    return widened(cta.shared.halves[at >> 1], dtype)


def widened(halves: np.ndarray, dtype: str) -> np.ndarray:
    return (halves.astype(U32) << 16).view(F32) if dtype == "bf16" else halves.view(np.float16).astype(F32)

"""The memory-bound passes between the GEMMs, as Triton kernels: one launch and one pass each."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from liger_cutedsl import elementwise

SMALLEST, LN_2 = tl.constexpr(elementwise.SMALLEST_EXPONENTIAL), tl.constexpr(elementwise.LN_2)


@triton.jit
def _summarize_targets(
    target,
    x,
    summary,
    n,
    hidden,
    stride,
    x_row,
    x_column,
    ignore_index,
    limit,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program for each part of the rows: every so many blocks of ROWS."""
    count = tl.zeros((ROWS,), tl.int64)
    low = tl.full((ROWS,), 2**62, tl.int64)
    high = tl.full((ROWS,), -(2**62), tl.int64)
    beyond = tl.zeros((ROWS,), tl.int64)
    for start in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        value = tl.load(target + row * stride, mask=row < n, other=ignore_index).to(tl.int64)
        valid = (row < n) & (value != ignore_index)
        count += valid.to(tl.int64)
        low = tl.where(valid, tl.minimum(low, value), low)
        high = tl.where(valid, tl.maximum(high, value), high)
        ignored = (row < n) & (value == ignore_index)
        if tl.sum(ignored.to(tl.int32), 0) > 0:
            largest = tl.zeros((ROWS, COLUMNS), tl.int32)
            for first in range(0, hidden, COLUMNS):
                column = first + tl.arange(0, COLUMNS).to(tl.int64)
                here = ignored[:, None] & (column < hidden)[None, :]
                at = row[:, None] * x_row + column[None, :] * x_column
                numbers = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
                largest |= 1 - (tl.abs(numbers) <= limit).to(tl.int32)  # NaN is not below it
            beyond += tl.max(largest, 1).to(tl.int64)
    summary += tl.program_id(0) * 4
    tl.store(summary, tl.sum(count, 0))
    tl.store(summary + 1, tl.min(low, 0))
    tl.store(summary + 2, tl.max(high, 0))
    tl.store(summary + 3, tl.sum(beyond, 0))


def summarize_targets(
    target: torch.Tensor, ignore_index: int, x: torch.Tensor, limit: float, summary: torch.Tensor
) -> None:
    """For each of the parts of the rows, one for each row of summary (parts, 4), int64 in page-locked host memory:
    count, least and greatest of the targets that are not ignore_index, and how many of the other rows of x (N, H) hold
    NaN or what is larger than limit."""
    with torch.cuda.device(target.device):
        _summarize_targets[(summary.shape[0],)](
            target, x, summary, x.shape[0], x.shape[1], target.stride(0), *x.stride(), ignore_index, limit,
            ROWS=32, COLUMNS=256, num_warps=8,
        )  # fmt: skip


@triton.jit
def _scale_one(data, scale, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        value = tl.load(data + at, mask=at < n)
        tl.store(data + at, (value.to(scale.dtype) * scale).to(data.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=["n_first", "n_second"])
def _scale_in_place(first, second, factor, n_first, n_second, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    scale = tl.load(factor)
    if scale != 1.0:
        scale = scale.to(WIDE)
        _scale_one(first, scale, n_first, BLOCK)
        _scale_one(second, scale, n_second, BLOCK)


# Enough to fill a GPU. One for each block would be 64 000 for a large dW: 30 µs, only to find that the factor is 1.
MOST_PROGRAMS = 1024


def scale_in_place(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Each *= factor, a scalar on the device, read there; two of them a launch. Where it is 1, nothing is touched. They
    are contiguous."""
    block, wide = 8192, tl.float64 if torch.float64 in [t.dtype for t in tensors] else tl.float32
    for first, second in zip(tensors[::2], [*tensors[1::2], None], strict=False):
        sizes = first.numel(), 0 if second is None else second.numel()
        programs = min(triton.cdiv(max(sizes), block), MOST_PROGRAMS)
        with torch.cuda.device(first.device):
            _scale_in_place[(programs,)](
                first, first if second is None else second, factor, *sizes, WIDE=wide, BLOCK=block, num_warps=8
            )


@triton.jit(do_not_specialize=["stride", "n", "count"])
def _sum_parts(parts, out, stride, n, count, alpha, beta, HAS_BETA: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(count):
        total += tl.load(parts + part * stride + at, mask=at < n, other=0.0)
    total *= alpha
    if HAS_BETA:
        total += beta * tl.load(out + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < n)


def sum_parts(parts: torch.Tensor, out: torch.Tensor, alpha: float, beta: float) -> None:
    """out = alpha·Σ_k parts[k] + beta·out, rounded once. parts (count, …): float32; both contiguous."""
    n, block = out.numel(), 1024
    with torch.cuda.device(out.device):
        _sum_parts[(triton.cdiv(n, block),)](
            parts,
            out,
            parts.stride(0),
            n,
            parts.shape[0],
            float(alpha),
            float(beta),
            HAS_BETA=bool(beta),
            BLOCK=block,
            num_warps=4,
        )


@triton.jit
def _dz_of_exp(
    e,
    stride,
    maxima,
    tiles,
    lse,
    row_a,
    row_c,
    row_h,
    fix,
    target,
    ce_weight,
    column_sums,
    rows,
    vocab,
    headroom,
    SMOOTHING: tl.constexpr,
    CE_WEIGHT: tl.constexpr,
    ENTROPY: tl.constexpr,
    COLUMN_SUMS: tl.constexpr,
    TILE: tl.constexpr,
    GRAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """BLOCK columns of ROWS rows, as (BLOCK/GRAIN, GRAIN): the columns of a grain share their tile, so that what
    depends on its maximum is computed once a grain."""
    log2_e: tl.constexpr = 1.4426950408889634
    block = tl.program_id(1)
    grain = block * (BLOCK // GRAIN) + tl.arange(0, BLOCK // GRAIN)
    column = (grain * GRAIN)[:, None] + tl.arange(0, GRAIN)[None, :]
    here = column < vocab
    total = tl.zeros((BLOCK // GRAIN, GRAIN), tl.float32)
    if CE_WEIGHT:
        weight = tl.load(ce_weight + column, mask=here, other=0.0)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for index in range(0, tl.minimum(ROWS, rows - first)):
        row = first + index
        value = tl.load(e + row * stride + column, mask=here, other=0.0).to(tl.float32)
        maximum = tl.load(maxima + row * tiles + grain * GRAIN // TILE, mask=grain * GRAIN < vocab, other=0.0)
        from_lse = (maximum - tl.load(lse + row)) * log2_e - headroom
        if ENTROPY:
            log_p = tl.log2(tl.maximum(value, SMALLEST)) + from_lse[:, None]
            of_p = tl.load(row_a + row) - (tl.load(row_h + row) * LN_2) * log_p
            dz = value * (tl.exp2(from_lse)[:, None] * of_p)
        else:
            dz = value * (tl.exp2(from_lse) * tl.load(row_a + row))[:, None]
        if SMOOTHING:
            c = tl.load(row_c + row)
            if CE_WEIGHT:
                dz -= c * weight
            else:
                dz -= c
        at = tl.load(target + row)
        if (at >= block * BLOCK) & (at < (block + 1) * BLOCK):
            dz = tl.where(column == at, tl.load(fix + row), dz)
        tl.store(e + row * stride + column, dz.to(e.dtype.element_ty), mask=here)
        if COLUMN_SUMS:
            total += dz
    if COLUMN_SUMS:
        tl.store(column_sums + tl.program_id(0).to(tl.int64) * vocab + column, total, mask=here)


SUMMED_ROWS = 64  # rows whose columns one block of _dz_of_exp sums: their float32 sums take 1/32 of 16-bit e


def dz_of_exp(
    problem, e: torch.Tensor, maxima, lse, coefficients, tile_n: int, headroom: int, column_sums: bool
) -> torch.Tensor | None:
    """Exponentials (n, V) to dz in place, the targets' own entries exact: epilogues.dz_of_exp in one pass.

    maxima (n, tiles) and the row vectors are contiguous float32; e's rows are contiguous.
    column_sums: return Σ_i dz (V,) too, in float32, of dz before its rounding.
    """
    unused = lse
    (n, vocab), block, at_once = e.shape, 2048, SUMMED_ROWS if column_sums else 1
    sums = unused
    if column_sums:
        sums = torch.empty(triton.cdiv(n, at_once), vocab, dtype=torch.float32, device=e.device)
    with torch.cuda.device(e.device):
        # rows first: a grid's second dimension ends at 65535
        _dz_of_exp[(triton.cdiv(n, at_once), triton.cdiv(vocab, block))](
            e,
            e.stride(0),
            maxima,
            maxima.shape[1],
            lse,
            coefficients.a,
            unused if coefficients.c is None else coefficients.c,
            unused if coefficients.h is None else coefficients.h,
            coefficients.fix,
            problem.target.contiguous(),
            unused if problem.ce_weight is None else problem.ce_weight,
            sums,
            n,
            vocab,
            float(headroom),
            SMOOTHING=coefficients.c is not None,
            CE_WEIGHT=problem.ce_weight is not None,
            ENTROPY=coefficients.h is not None,
            COLUMN_SUMS=column_sums,
            TILE=tile_n,
            GRAIN=math.gcd(tile_n, 64),
            BLOCK=block,
            ROWS=at_once,
            num_warps=4,
        )
    return sums.sum(dim=0) if column_sums else None

"""The memory-bound passes between the GEMMs, as Triton kernels: one launch and one pass each."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from liger_cutedsl import elementwise

SMALLEST, LN_2 = tl.constexpr(elementwise.SMALLEST_EXPONENTIAL), tl.constexpr(elementwise.LN_2)


@triton.jit
def _fold(tile_max, sums, lse, tiles, headroom, WITH_SUMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * tiles
    largest, total = float("-inf"), 0.0
    for start in range(0, tiles, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = column < tiles
        m = tl.load(tile_max + row + column, mask=here, other=float("-inf"))
        new = tl.maximum(largest, tl.max(m, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)  # −inf − (−inf) is NaN
        term = tl.exp(m - shift)
        if WITH_SUMS:
            term *= tl.load(sums + row + column, mask=here, other=0.0)
        total = total * tl.exp(largest - shift) + tl.sum(term, 0)
        largest = new
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(lse + tl.program_id(0), tl.log(total) + (shift - headroom * 0.6931471805599453))


def fold_exp(tile_max: torch.Tensor, sums: torch.Tensor | None, headroom: int) -> torch.Tensor:
    """lse (N,) of exponentials' tile maxima and sums (N, tiles), contiguous float32; the sums carry 2^headroom.

    sums: None where all are 1. NaN gives NaN.
    """
    n, tiles = tile_max.shape
    lse = torch.empty(n, dtype=torch.float32, device=tile_max.device)
    with torch.cuda.device(lse.device):
        block = min(1024, triton.next_power_of_2(tiles))
        with_sums = sums is not None
        terms = sums if with_sums else lse  # which is not read
        _fold[(n,)](tile_max, terms, lse, tiles, float(headroom), WITH_SUMS=with_sums, BLOCK=block, num_warps=4)
    return lse


def fold_lse(partials: torch.Tensor) -> torch.Tensor:
    """(N,) log Σ_j exp partials[i, j] of (N, tiles), contiguous float32. NaN partials give NaN."""
    return fold_exp(partials, None, 0)


@triton.jit
def _fold_moments(
    maximum,
    sum_exp,
    sum_exp_z,
    sum_exp_sq,
    stride,
    tiles,
    headroom,
    folded,
    n,
    ENTROPY: tl.constexpr,
    SUM_SQ: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its moments over all tiles at folded, folded + n, … and its log-sum-exp behind them."""
    row = tl.program_id(0).to(tl.int64)
    largest, total, weighted, squares = float("-inf"), 0.0, 0.0, 0.0
    for start in range(0, tiles, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here, at = column < tiles, row * stride + column
        m = tl.load(maximum + at, mask=here, other=float("-inf"))
        new = tl.maximum(largest, tl.max(m, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)  # −inf − (−inf) is NaN
        below, before = m - shift, largest - shift
        factor, rescale = tl.exp(below), tl.exp(before)
        s = tl.load(sum_exp + at, mask=here, other=0.0)
        if ENTROPY:
            r = tl.load(sum_exp_z + at, mask=here, other=0.0)
            term = (r + s * tl.maximum(below, -1e30)) * factor  # −inf·0 is NaN
            weighted = (weighted + total * tl.maximum(before, -1e30)) * rescale + tl.sum(term, 0)
        if SUM_SQ:
            q = tl.load(sum_exp_sq + at, mask=here, other=0.0)
            squares = squares * (rescale * rescale) + tl.sum(q * (factor * factor), 0)
        total = total * rescale + tl.sum(s * factor, 0)
        largest = new
    unscaled = tl.exp2(-headroom)
    total, weighted, squares = total * unscaled, weighted * unscaled, squares * (unscaled * unscaled)
    tl.store(folded + row, largest)
    tl.store(folded + n + row, total)
    place = 2
    if ENTROPY:
        tl.store(folded + place * n + row, weighted)
        place += 1
    if SUM_SQ:
        tl.store(folded + place * n + row, squares)
        place += 1
    tl.store(folded + place * n + row, tl.log(total) + largest)


def fold_moments(moments: dict[str, torch.Tensor], headroom: int) -> dict[str, torch.Tensor]:
    """RowStatistics' moments (N,) of those of tiles (N, tiles), by their names, and "lse".

    The parts are float32 with rows of one stride and contiguous columns. Sums carry 2^headroom, squares twice that.
    """
    maximum, stride = moments["maximum"], moments["sum_exp"].stride(0)
    if any(part.stride() != (stride, 1) for part in moments.values()):
        raise ValueError("the moments' parts must have rows of one stride")
    n, tiles = maximum.shape
    folded = torch.empty(len(moments) + 1, n, dtype=torch.float32, device=maximum.device)
    with torch.cuda.device(maximum.device):
        _fold_moments[(n,)](
            maximum,
            moments["sum_exp"],
            moments.get("sum_exp_z", maximum),
            moments.get("sum_exp_sq", maximum),
            stride,
            tiles,
            float(headroom),
            folded,
            n,
            ENTROPY="sum_exp_z" in moments,
            SUM_SQ="sum_exp_sq" in moments,
            BLOCK=min(1024, triton.next_power_of_2(tiles)),
            num_warps=4,
        )
    return dict(zip((*moments, "lse"), folded.unbind(), strict=True))


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
def _scale_in_place(data, factor, n, BLOCK: tl.constexpr):
    scale = tl.load(factor)
    if scale != 1.0:
        wide: tl.constexpr = tl.float64 if data.dtype.element_ty == tl.float64 else tl.float32
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK).to(tl.int64)
            value = tl.load(data + at, mask=at < n)
            tl.store(data + at, (value.to(wide) * scale.to(wide)).to(data.dtype.element_ty), mask=at < n)


# Enough to fill a GPU. One for each block would be 64 000 for a large dW: 30 µs, only to find that the factor is 1.
MOST_PROGRAMS = 1024


def scale_in_place(data: torch.Tensor, factor: torch.Tensor) -> None:
    """data *= factor, a scalar on the device, read there. Where it is 1, data is not touched. data is contiguous."""
    with torch.cuda.device(data.device):
        block = 8192
        programs = min(triton.cdiv(data.numel(), block), MOST_PROGRAMS)
        _scale_in_place[(programs,)](data, factor, data.numel(), BLOCK=block, num_warps=8)


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

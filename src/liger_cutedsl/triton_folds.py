"""Triton kernels that fold what the GEMMs' tiles leave of a row: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _folded(tile_max, sums, row, tiles, headroom, WITH_SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """lse of a row that begins at `row`."""
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
    return tl.log(total) + (shift - headroom * 0.6931471805599453)


@triton.jit
def _fold(tile_max, sums, lse, tiles, headroom, WITH_SUMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * tiles
    tl.store(lse + tl.program_id(0), _folded(tile_max, sums, row, tiles, headroom, WITH_SUMS, BLOCK))


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
def _expm1(x):
    """e^x − 1 for x ≤ 0 or a little above, to some 3e-7 of itself: a series where the difference would cancel."""
    series = 1.0 + x * (1 / 8) * (1.0 + x * (1 / 9))
    series = 1.0 + x * (1 / 6) * (1.0 + x * (1 / 7) * series)
    series = x * (1.0 + x * (1 / 2) * (1.0 + x * (1 / 3) * (1.0 + x * (1 / 4) * (1.0 + x * (1 / 5) * series))))
    return tl.where(tl.abs(x) < 0.5, series, tl.exp(x) - 1.0)


# Not compiled again for another number of rows.
@triton.jit(do_not_specialize=["stride", "ignore_index"])
def _fold_plain(
    tile_max,
    sums,
    target_logit,
    target,
    rows,
    stride,
    tiles,
    headroom,
    ignore_index,
    b,
    share,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its lse, a, fix and loss at rows, rows + stride, …"""
    i = tl.program_id(0).to(tl.int64)
    lse = _folded(tile_max, sums, i * tiles, tiles, headroom, True, BLOCK)
    log_p = tl.load(target_logit + i) - lse
    a, fix, loss = b, b * _expm1(log_p), -log_p * share
    if MASKED:
        counts = tl.load(target + i) != ignore_index
        a, fix, loss = tl.where(counts, a, 0.0), tl.where(counts, fix, 0.0), tl.where(counts, loss, 0.0)
    tl.store(rows + i, lse)
    tl.store(rows + stride + i, a)
    tl.store(rows + 2 * stride + i, fix)
    tl.store(rows + 3 * stride + i, loss)


def fold_plain(
    tile_max: torch.Tensor,
    sums: torch.Tensor,
    headroom: int,
    target_logit: torch.Tensor,
    target: torch.Tensor,
    plain,
) -> None:
    """What fold_exp gives, and what cross entropy without options makes of it: writes plain.rows (4, n), float32 whose
    rows are contiguous, as cross_entropy.plain_rows does."""
    n, tiles = tile_max.shape
    with torch.cuda.device(tile_max.device):
        _fold_plain[(n,)](
            tile_max,
            sums,
            target_logit,
            target.contiguous(),
            plain.rows,
            plain.rows.stride(0),
            tiles,
            float(headroom),
            0 if plain.ignore_index is None else plain.ignore_index,
            float(plain.b),
            float(plain.share),
            MASKED=plain.ignore_index is not None,
            BLOCK=min(1024, triton.next_power_of_2(tiles)),
            num_warps=4,
        )


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
    padded = -(-n // 4) * 4  # so that each vector starts at a multiple of 16 bytes, as kernels want it
    folded = torch.empty(len(moments) + 1, padded, dtype=torch.float32, device=maximum.device)
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
            padded,
            ENTROPY="sum_exp_z" in moments,
            SUM_SQ="sum_exp_sq" in moments,
            BLOCK=min(1024, triton.next_power_of_2(tiles)),
            num_warps=4,
        )
    return dict(zip((*moments, "lse"), folded[:, :n].unbind(), strict=True))

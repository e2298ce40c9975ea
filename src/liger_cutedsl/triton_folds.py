"""Triton kernels that fold what the GEMMs' tiles leave of a row: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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

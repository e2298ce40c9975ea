"""Drawing and packing pairs of sampling.py, as Triton kernels: which are kept, where they go, and their dz."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from liger_cutedsl import elementwise, gemm
from liger_cutedsl.sampling import STEPS, TILE, Draw, Packed, Segment

SMALLEST, LN_2 = tl.constexpr(elementwise.SMALLEST_EXPONENTIAL), tl.constexpr(elementwise.LN_2)
U_STEPS = tl.constexpr(STEPS)
# Strides and H reach kernels in units of 16 bytes of 16-bit elements: the compiler sees that they are multiples of it.
UNIT = tl.constexpr(8)
PROGRAMS = 16  # of _pack on a multiprocessor
ROWS, TILES = 64, 32  # of a block of draws; as many tiles as a word of `kept` has bits


@triton.jit
def _shares(maximum, total, lse, a, h, scale, of_target, ENTROPY: tl.constexpr):
    """sampling.shares."""
    below = maximum - lse
    size = tl.abs(a)
    if ENTROPY:
        size += tl.abs(h) * tl.abs(below)
    q = total * tl.exp(below) * size / scale
    q = tl.where(q < 1.0, tl.ceil(q * U_STEPS) * (1.0 / U_STEPS), 1.0)  # NaN is not below 1
    return tl.where(of_target, 1.0, q)


@triton.jit
def _select(
    maxima,
    sums,
    lse,
    row_a,
    row_h,
    target,
    scale,
    seed,
    kept,
    counts,
    expected,
    n,
    tiles,
    first_tile,
    ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """A block of rows and tiles: its bits of `kept` (n, words), its counts (tiles, blocks of rows), its Σ q."""
    rows_block, word = tl.program_id(0), tl.program_id(1)
    row, tile = rows_block * ROWS + tl.arange(0, ROWS), word * TILES + tl.arange(0, TILES)
    real, there = row < n, tile < tiles
    here, at = real[:, None] & there[None, :], row[:, None].to(tl.int64) * tiles + tile[None, :]
    of_row, column = tl.load(lse + row, mask=real, other=0.0), tl.load(target + row, mask=real, other=-1)
    h = tl.load(row_h + row, mask=real, other=0.0)[:, None] if ENTROPY else 0.0
    q = _shares(
        tl.load(maxima + at, mask=here, other=0.0),
        tl.load(sums + at, mask=here, other=0.0),
        of_row[:, None],
        tl.load(row_a + row, mask=real, other=0.0)[:, None],
        h,
        tl.load(scale),
        (column[:, None] >= 0) & (column[:, None] // TILE == tile[None, :]),
        ENTROPY,
    )
    zero = tl.zeros((ROWS, TILES), tl.int32)
    bits, targets = of_row.to(tl.int32, bitcast=True), column.to(tl.int32)
    random, _, _, _ = tl.philox(
        tl.load(seed), zero + bits[:, None], zero + (tile + first_tile)[None, :], zero + targets[:, None], zero
    )
    keep = here & ((random >> 8).to(tl.float32) * (1.0 / U_STEPS) < q)
    ones = keep.to(tl.int32)
    words = tl.num_programs(1)
    tl.store(kept + row * words + word, tl.sum(ones << tl.arange(0, TILES)[None, :], 1), mask=real)
    tl.store(counts + tile * tl.num_programs(0) + rows_block, tl.sum(ones, 0), mask=there)
    tl.store(expected + rows_block * words + word, tl.sum(tl.sum(tl.where(here, q, 0.0), 1), 0))


@triton.jit
def _running_totals(counts, shares, before, start, expected, blocks, count, programs, BLOCK: tl.constexpr):
    """One program: the counts' totals so far, those of every so many blocks apart, and the sum of the shares."""
    total, share = tl.zeros((), tl.int32), tl.zeros((), tl.float32)
    for first in range(0, count + 1, BLOCK):
        at = first + tl.arange(0, BLOCK)
        some = tl.load(counts + at, mask=at < count, other=0)
        so_far = total + tl.cumsum(some, 0) - some
        tl.store(before + at, so_far, mask=at <= count)
        tl.store(start + at // blocks, so_far, mask=(at <= count) & (at % blocks == 0))
        total += tl.sum(some, 0)
    for first in range(0, programs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        share += tl.sum(tl.load(shares + at, mask=at < programs, other=0.0), 0)
    tl.store(expected, share)


def select(draw: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(expected, start, before, kept): Σ q (1,); how many drawn pairs lie before each tile, and before each (tile,
    block of ROWS rows), each with their number behind the last, int32; and a bit for each pair whether it is drawn,
    (n, words) int32."""
    (n, tiles), vector = draw.sums.shape, {"dtype": torch.int32, "device": draw.sums.device}
    blocks, words = triton.cdiv(n, ROWS), triton.cdiv(tiles, TILES)
    kept, counts = torch.empty(n, words, **vector), torch.empty(tiles * blocks, **vector)
    start, before = torch.empty(tiles + 1, **vector), torch.empty(tiles * blocks + 1, **vector)
    shares = torch.empty(1 + blocks * words, dtype=torch.float32, device=kept.device)
    with torch.cuda.device(kept.device):
        _select[(blocks, words)](
            draw.maxima, draw.sums, draw.lse, draw.a, draw.lse if draw.h is None else draw.h, draw.target, draw.scale,
            draw.seed, kept, counts, shares[1:], n, tiles, draw.first_tile,
            ENTROPY=draw.h is not None, TILE=TILE, ROWS=ROWS, TILES=TILES, num_warps=4,
        )  # fmt: skip
        _running_totals[(1,)](
            counts, shares[1:], before, start, shares, blocks, tiles * blocks, blocks * words, BLOCK=4096, num_warps=8
        )
    return shares[:1], start, before, kept


def in_units(elements: int) -> int:
    """A stride, or H. Raises ValueError where it is no multiple of UNIT."""
    if elements % UNIT.value:
        raise ValueError(f"sampled pairs take rows of a multiple of {UNIT.value} elements, and got {elements}")
    return elements // UNIT.value


@triton.jit
def _place(
    kept,
    before,
    rows,
    tile_of,
    count,
    row,
    n,
    tiles,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Rows and tiles of a block's pairs, to where they belong among all."""
    rows_block, word, words = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    local, tile = rows_block * ROWS + tl.arange(0, ROWS), word * TILES + tl.arange(0, TILES)
    bits = tl.load(kept + local * words + word, mask=local < n, other=0)
    ones = (bits[:, None] >> tl.arange(0, TILES)[None, :]) & 1
    first = tl.load(before + tile * tl.num_programs(0) + rows_block, mask=tile < tiles, other=0)
    place = first[None, :] + tl.cumsum(ones, 0) - ones
    written = (ones == 1) & (place < count)
    full = tl.zeros((ROWS, TILES), tl.int32)
    tl.store(rows + place, full + (row + local)[:, None], mask=written)
    tl.store(tile_of + place, full + tile[None, :], mask=written)


@triton.jit
def _pack(
    e,
    stride,
    maxima,
    sums,
    lse,
    row_a,
    row_h,
    fix,
    target,
    scale,
    rows,
    tile_of,
    factors,
    packed,
    drawn,
    room,
    first_row,
    tiles,
    vocab,
    headroom,
    ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """dz/q of the drawn pairs, PAIRS at a time, and 1/q: triton_kernels.dz_of_exp of a tile, in float32 until it is
    divided."""
    log2_e: tl.constexpr = 1.4426950408889634
    count = tl.minimum(tl.load(drawn), room)
    for block in range(tl.program_id(0), tl.cdiv(count, PAIRS), tl.num_programs(0)):
        pair, c = block * PAIRS + tl.arange(0, PAIRS), tl.arange(0, TILE)
        live = pair < count
        row = tl.load(rows + pair, mask=live, other=first_row).to(tl.int64) - first_row
        tile = tl.load(tile_of + pair, mask=live, other=0)
        maximum = tl.load(maxima + row * tiles + tile, mask=live, other=0.0)
        total = tl.load(sums + row * tiles + tile, mask=live, other=0.0)
        of_row, a, at = tl.load(lse + row), tl.load(row_a + row), tl.load(target + row)
        h = tl.load(row_h + row) if ENTROPY else 0.0
        of_target = (at >= 0) & (at // TILE == tile)
        q = _shares(maximum, total, of_row, a, h, tl.load(scale), of_target | (pair >= count), ENTROPY)
        factor = 1.0 / q
        tl.store(factors + pair, factor, mask=live)
        column = (tile * TILE)[:, None] + c[None, :]
        here = live[:, None] & (column < tl.cdiv(vocab, UNIT) * UNIT)  # rows end there at the earliest
        value = tl.load(e + row[:, None] * (stride * UNIT) + column, mask=here, other=0.0).to(tl.float32)
        from_lse = (maximum - of_row) * log2_e - headroom
        if ENTROPY:
            log_p = tl.log2(tl.maximum(value, SMALLEST)) + from_lse[:, None]
            dz = value * (tl.exp2(from_lse)[:, None] * (a[:, None] - (h * LN_2)[:, None] * log_p))
        else:
            dz = value * (tl.exp2(from_lse) * a)[:, None]
        dz = tl.where(column == at[:, None], tl.load(fix + row)[:, None], dz * factor[:, None])
        dz = tl.where(column < vocab, dz, 0.0).to(packed.dtype.element_ty)
        tl.store(packed + pair[:, None].to(tl.int64) * TILE + c[None, :], dz, mask=live[:, None])


def pack(
    e: torch.Tensor,
    headroom: int,
    coefficients,
    draw: Draw,
    drawn: tuple[torch.Tensor, torch.Tensor],
    into: Packed,
    segment: Segment,
) -> None:
    """Engine.pack_pairs. drawn: before and kept, of select. e's rows start at multiples of 16 bytes."""
    (n, tiles), (before, kept), pairs = draw.sums.shape, drawn, segment.pairs
    if not segment.count:
        return
    tile_of = torch.empty(segment.count, dtype=torch.int32, device=e.device)
    rows, at_once = into.rows[pairs], 32
    with torch.cuda.device(e.device):
        _place[(triton.cdiv(n, ROWS), kept.shape[1])](
            kept, before, rows, tile_of, segment.count, segment.row, n, tiles, ROWS=ROWS, TILES=TILES, num_warps=4
        )
        programs = min(triton.cdiv(segment.count, at_once), gemm.multiprocessors(e.device) * PROGRAMS)
        _pack[(programs,)](
            e, in_units(e.stride(0)), draw.maxima, draw.sums, draw.lse, coefficients.a,
            draw.lse if coefficients.h is None else coefficients.h, coefficients.fix, draw.target, draw.scale, rows,
            tile_of, into.factor[pairs], into.dz[pairs], before[-1:], segment.count, segment.row, tiles, e.shape[1],
            float(headroom), ENTROPY=coefficients.h is not None, TILE=TILE, PAIRS=at_once, num_warps=4,
        )  # fmt: skip

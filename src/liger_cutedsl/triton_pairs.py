"""Packed pairs (sampling.py) of all segments by tile, and dW, as Triton kernels.

A pair is a row's dz in a tile of the vocabulary. dW of a tile is a product of its pairs' dz and of the rows of x that
they belong to, gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from liger_cutedsl.sampling import TILE, ByTile, Packed, tile_count
from liger_cutedsl.triton_sampling import UNIT, in_units


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a kernel. pairs: of a step, or of a block of rows.  columns: of H.  group: so many blocks of
    columns at a time, all pairs for them before the next."""

    pairs: int
    columns: int
    group: int
    warps: int
    stages: int

    def launch(self) -> dict:
        return dict(num_warps=self.warps, num_stages=self.stages)


DW_BLOCKS = Blocks(64, 128, 32, 4, 4)


def by_tile(packed: Packed, vocab: int) -> ByTile:
    """A copy: gathered from several places each, pairs take the products 0.5 ms longer than copying them does (an H200,
    8192 tokens, 6% of 1002 tiles)."""
    device, base = packed.dz.device, packed.segments[0].first if packed.segments else 0
    packed_rows, packed_dz = (v[base : base + packed.filled] for v in (packed.rows, packed.dz))
    tiles, parts, vector = tile_count(vocab), max(len(packed.segments), 1), {"dtype": torch.int32, "device": device}
    starts = torch.stack([segment.start for segment in packed.segments] or [torch.zeros(tiles + 1, **vector)])
    start, before = torch.empty(tiles + 1, **vector), torch.empty(tiles * parts, **vector)
    rows, dz = torch.empty_like(packed_rows), torch.empty_like(packed_dz)
    with torch.cuda.device(device):
        _merge_starts[(1,)](starts, start, before, tiles, parts, BLOCK=4096, num_warps=8)
        _merge[(tiles, parts, MERGERS)](
            starts, before, packed_rows, packed_dz, rows, dz, packed.first_row, TILE=TILE, PAIRS=32, num_warps=4
        )
    return ByTile(start, rows, dz, packed.first_row)


MERGERS = 4  # programs that share the pairs of a tile in a segment


@triton.jit
def _merge_starts(starts, start, before, tiles, segments, BLOCK: tl.constexpr):
    """One program: where the pairs of each tile, and of each (tile, segment), begin among all by tile."""
    total = tl.zeros((), tl.int32)
    for first in range(0, tiles * segments, BLOCK):
        at = first + tl.arange(0, BLOCK)
        here, tile, segment = at < tiles * segments, at // segments, at % segments
        begin = tl.load(starts + segment * (tiles + 1) + tile, mask=here, other=0)
        count = tl.load(starts + segment * (tiles + 1) + tile + 1, mask=here, other=0) - begin
        so_far = total + tl.cumsum(count, 0) - count
        tl.store(before + at, so_far, mask=here)
        tl.store(start + tile, so_far, mask=here & (segment == 0))
        total += tl.sum(count, 0)
    tl.store(start + tiles, total)


@triton.jit
def _merge(starts, before, rows, dz, merged_rows, merged_dz, first_row, TILE: tl.constexpr, PAIRS: tl.constexpr):
    tile, segment, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    packed_at, c = 0, tl.arange(0, TILE)
    for one in range(0, segment):  # segments lie one behind the other
        packed_at += tl.load(starts + one * (tiles + 1) + tiles)
    starts += segment * (tiles + 1) + tile
    begin, end = tl.load(starts), tl.load(starts + 1)
    shift = tl.load(before + tile * tl.num_programs(1) + segment) - begin
    for block in range(begin + tl.program_id(2) * PAIRS, end, tl.num_programs(2) * PAIRS):
        pair = block + tl.arange(0, PAIRS)
        live = pair < end
        tl.store(
            merged_rows + shift + pair, tl.load(rows + packed_at + pair, mask=live, other=0) - first_row, mask=live
        )
        there = (packed_at + pair)[:, None].to(tl.int64) * TILE + c[None, :]
        to = (shift + pair)[:, None].to(tl.int64) * TILE + c[None, :]
        tl.store(merged_dz + to, tl.load(dz + there, mask=live[:, None], other=0.0), mask=live[:, None])


@triton.jit
def _dw(
    dz,
    rows,
    start,
    x,
    x_stride,
    out,
    out_stride,
    hidden,
    vocab,
    tiles,
    alpha,
    beta,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile's rows of dW, some columns of them."""
    x_stride, out_stride, hidden = x_stride * UNIT, out_stride * UNIT, hidden * UNIT
    group, within = tl.program_id(0) // (tiles * GROUP), tl.program_id(0) % (tiles * GROUP)
    tile, c = within // GROUP, tl.arange(0, TILE)
    h = (group * GROUP + within % GROUP) * COLUMNS + tl.arange(0, COLUMNS)
    end, acc = tl.load(start + tile + 1), tl.zeros((TILE, COLUMNS), tl.float32)
    for first in range(tl.load(start + tile), end, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        live = pair < end
        row = tl.load(rows + pair, mask=live, other=0).to(tl.int64)
        a = tl.load(dz + pair[:, None].to(tl.int64) * TILE + c[None, :], mask=live[:, None], other=0.0)
        b = tl.load(x + row[:, None] * x_stride + h[None, :], mask=live[:, None] & (h < hidden)[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), b, acc)
    v = tile * TILE + c
    at, here = out + v[:, None].to(tl.int64) * out_stride + h[None, :], (v < vocab)[:, None] & (h < hidden)[None, :]
    acc *= alpha
    if ADD:
        acc += beta * tl.load(at, mask=here, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), mask=here)


def dw(pairs: ByTile, x, out, alpha: float, beta: float, blocks: Blocks = DW_BLOCKS) -> None:
    """out (V, H) = beta·out + alpha·Σ dzᵀ·x[row], rounded once. x: all rows of the call. The rows of x and out are
    multiples of 16 bytes."""
    x = x[pairs.first_row :]
    (vocab, hidden), group = out.shape, min(blocks.group, triton.cdiv(out.shape[1], blocks.columns))
    groups = triton.cdiv(hidden, blocks.columns * group)
    with torch.cuda.device(out.device):
        _dw[(groups * pairs.tiles * group,)](
            pairs.dz, pairs.rows, pairs.start, x, in_units(x.stride(0)), out, in_units(out.stride(0)),
            in_units(hidden), vocab, pairs.tiles, float(alpha), float(beta), ADD=beta != 0.0, TILE=TILE,
            PAIRS=blocks.pairs, COLUMNS=blocks.columns, GROUP=group, **blocks.launch(),
        )  # fmt: skip


@triton.jit
def _column_sums(dz, start, sums, vocab, TILE: tl.constexpr, PAIRS: tl.constexpr):
    tile, c = tl.program_id(0), tl.arange(0, TILE)
    end, total = tl.load(start + tile + 1), tl.zeros((PAIRS, TILE), tl.float32)
    for first in range(tl.load(start + tile), end, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        at = pair[:, None].to(tl.int64) * TILE
        total += tl.load(dz + at + c[None, :], mask=(pair < end)[:, None], other=0.0).to(tl.float32)
    tl.store(sums + tile * TILE + c, tl.sum(total, 0), mask=tile * TILE + c < vocab)


def column_sums(pairs: ByTile, vocab: int) -> torch.Tensor:
    """Σ of the pairs' dz (vocab,) in float32."""
    sums = torch.empty(vocab, dtype=torch.float32, device=pairs.dz.device)
    with torch.cuda.device(sums.device):
        _column_sums[(pairs.tiles,)](pairs.dz, pairs.start, sums, vocab, TILE=TILE, PAIRS=64, num_warps=8)
    return sums

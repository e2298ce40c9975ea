"""dX of packed pairs, as Triton kernels.

dX is a sum over a row's tiles, and pairs lie by tile: products of a tile's pairs with W's rows are added to a float32
dX by atomics, some columns of H after the other, so that what is added to stays in the L2 cache. Tiles that many rows
keep are summed like a dense product instead, a block of dX in registers: `place` says where a row's pair of such a tile
is, if there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from liger_cutedsl import gemm
from liger_cutedsl.sampling import TILE, ByTile
from liger_cutedsl.triton_pairs import Blocks
from liger_cutedsl.triton_sampling import UNIT, in_units

# A tile that more of the rows keep is cheaper dense: 19 µs a tile of 8192 rows, 7 ns an added pair (an H200, H=4096).
DENSE_SHARE = 0.25
DENSE_BLOCKS = Blocks(128, 256, 8, 8, 5)
STEP = 64  # columns of a dense tile
ADDED_BLOCKS = Blocks(64, 64, 8, 4, 3)
RESIDENT = 2  # programs of _dx_added that a multiprocessor has at a time


@triton.jit
def _plan(start, slot_of, dense_tiles, dense, block_start, tiles, least, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the dense tiles, and where the other tiles' blocks of pairs begin among all such blocks."""
    slots, blocks = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        here = tile < tiles
        count = tl.load(start + tile + 1, mask=here, other=0) - tl.load(start + tile, mask=here, other=0)
        is_dense = here & (count >= least)
        one, of_tile = is_dense.to(tl.int32), tl.where(is_dense, 0, tl.cdiv(count, PAIRS))
        slot = slots + tl.cumsum(one, 0) - one
        tl.store(dense_tiles + slot, tile, mask=is_dense)
        tl.store(slot_of + tile, tl.where(is_dense, slot, -1), mask=here)
        tl.store(block_start + tile, blocks + tl.cumsum(of_tile, 0) - of_tile, mask=here)
        slots += tl.sum(one, 0)
        blocks += tl.sum(of_tile, 0)
    tl.store(dense, slots)
    tl.store(block_start + tiles, blocks)


@triton.jit
def _spread(start, rows, slot_of, block_start, place, block_tile, n, BLOCK: tl.constexpr):
    """A dense tile's pairs into `place`, or the tile's number into its blocks."""
    tile, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_of + tile)
    if slot >= 0:
        pair = tl.load(start + tile) + at
        live = pair < tl.load(start + tile + 1)
        row = tl.load(rows + pair, mask=live, other=0)
        tl.store(place + slot * n + row, pair, mask=live)
    else:
        block = tl.load(block_start + tile) + at
        tl.store(block_tile + block, tl.zeros((BLOCK,), tl.int32) + tile, mask=block < tl.load(block_start + tile + 1))


@triton.jit
def _dx_dense(
    dz,
    place,
    dense_tiles,
    dense,
    weight,
    w_stride,
    out,
    n,
    hidden,
    vocab,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A block of dX: the sum over the dense tiles, STEP of their columns at a time."""
    w_stride, hidden = w_stride * UNIT, hidden * UNIT
    parts: tl.constexpr = TILE // STEP
    per_group = GROUP * tl.cdiv(hidden, COLUMNS)
    group, within = tl.program_id(0) // per_group, tl.program_id(0) % per_group
    row = (group * GROUP + within % GROUP) * ROWS + tl.arange(0, ROWS)
    h, k = within // GROUP * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    real, inside = row < n, h < hidden
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(0, tl.load(dense) * parts):
        slot, part = step // parts, step % parts
        at = tl.load(place + slot * n + row, mask=real, other=-1).to(tl.int64)
        a = tl.load(dz + at[:, None] * TILE + (part * STEP + k)[None, :], mask=(at >= 0)[:, None], other=0.0)
        v = tl.load(dense_tiles + slot) * TILE + part * STEP + k
        here = (v < vocab)[:, None] & inside[None, :]
        acc = tl.dot(a, tl.load(weight + v[:, None].to(tl.int64) * w_stride + h[None, :], mask=here, other=0.0), acc)
    at, here = out + row[:, None].to(tl.int64) * hidden + h[None, :], real[:, None] & inside[None, :]
    if ADD:
        acc += tl.load(at, mask=here, other=0.0)
    tl.store(at, acc, mask=here)


@triton.jit
def _dx_added(
    dz,
    rows,
    start,
    block_tile,
    block_start,
    weight,
    w_stride,
    out,
    hidden,
    vocab,
    tiles,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Blocks of a tile's pairs, GROUP · COLUMNS columns of H; all blocks before the next such columns."""
    w_stride, hidden = w_stride * UNIT, hidden * UNIT
    blocks, c = tl.load(block_start + tiles), tl.arange(0, TILE)
    for work in range(tl.program_id(0), blocks * tl.cdiv(hidden, COLUMNS * GROUP), tl.num_programs(0)):
        group, block = work // blocks, work % blocks
        tile = tl.load(block_tile + block)
        begin = tl.load(start + tile) + (block - tl.load(block_start + tile)) * PAIRS
        pair = begin + tl.arange(0, PAIRS)
        live = pair < tl.load(start + tile + 1)
        row = tl.load(rows + pair, mask=live, other=0).to(tl.int64)
        a = tl.load(dz + pair[:, None].to(tl.int64) * TILE + c[None, :], mask=live[:, None], other=0.0)
        v = tile * TILE + c
        for index in range(0, GROUP):
            h = (group * GROUP + index) * COLUMNS + tl.arange(0, COLUMNS)
            here = (v < vocab)[:, None] & (h < hidden)[None, :]
            acc = tl.dot(a, tl.load(weight + v[:, None].to(tl.int64) * w_stride + h[None, :], mask=here, other=0.0))
            there = live[:, None] & (h < hidden)[None, :]
            tl.atomic_add(out + row[:, None] * hidden + h[None, :], acc, mask=there, sem="relaxed")


@dataclass(frozen=True)
class Plan:
    """Which tiles are dense, on the device: the first `dense` () of dense_tiles (slots,). place: (slots, n), the pair
    of a slot's tile and a row, −1 where there is none.  block_tile, block_start: the tile of each block of the other
    tiles' pairs, and each tile's first block. All int32."""

    dense_tiles: torch.Tensor
    dense: torch.Tensor
    place: torch.Tensor
    block_tile: torch.Tensor
    block_start: torch.Tensor

    @classmethod
    def of(cls, pairs: ByTile, n: int, blocks: Blocks = ADDED_BLOCKS) -> Plan:
        least, vector = int(DENSE_SHARE * n) + 1, {"dtype": torch.int32, "device": pairs.rows.device}
        slots = min(pairs.tiles, pairs.pairs // least)  # there can be no more
        place, dense_tiles = torch.full((slots, n), -1, **vector), torch.empty(slots, **vector)
        dense, slot_of = torch.empty((), **vector), torch.empty(pairs.tiles, **vector)
        block_tile = torch.empty(pairs.pairs // blocks.pairs + pairs.tiles, **vector)
        block_start = torch.empty(pairs.tiles + 1, **vector)
        _plan[(1,)](
            pairs.start, slot_of, dense_tiles, dense, block_start, pairs.tiles, least, PAIRS=blocks.pairs, BLOCK=1024,
            num_warps=4,
        )  # fmt: skip
        _spread[(pairs.tiles, triton.cdiv(n, 1024))](
            pairs.start, pairs.rows, slot_of, block_start, place, block_tile, n, BLOCK=1024, num_warps=4
        )
        return cls(dense_tiles, dense, place, block_tile, block_start)


def dx(pairs: ByTile, weight, out, add: bool) -> None:
    """out (N, H) = Σ dz·W[tile] over each row's pairs, or that added to it. out is contiguous float32."""
    with torch.cuda.device(out.device):
        plan = Plan.of(pairs, len(out))
        dx_dense(plan, pairs.dz, weight, out, add)
        dx_added(pairs, plan, weight, out)


def dx_dense(plan: Plan, dz, weight, out, add: bool, blocks: Blocks = DENSE_BLOCKS, step: int = STEP) -> None:
    """out = Σ of the dense tiles' pairs; it is written whether there is any or not."""
    n, hidden = out.shape
    if not len(plan.dense_tiles):
        return None if add else out.zero_()
    row_blocks = triton.cdiv(triton.cdiv(n, blocks.pairs), blocks.group) * blocks.group
    _dx_dense[(row_blocks * triton.cdiv(hidden, blocks.columns),)](
        dz, plan.place, plan.dense_tiles, plan.dense, weight, in_units(weight.stride(0)), out, n, in_units(hidden),
        weight.shape[0], ADD=add, TILE=TILE, ROWS=blocks.pairs, COLUMNS=blocks.columns, STEP=step,
        GROUP=blocks.group, **blocks.launch(),
    )  # fmt: skip


def dx_added(pairs: ByTile, plan: Plan, weight, out, blocks: Blocks = ADDED_BLOCKS, resident: int = RESIDENT) -> None:
    """out += Σ of the other tiles' pairs, by atomics."""
    group = min(blocks.group, triton.cdiv(out.shape[1], blocks.columns))
    _dx_added[(gemm.multiprocessors(out.device) * resident,)](
        pairs.dz, pairs.rows, pairs.start, plan.block_tile, plan.block_start, weight,
        in_units(weight.stride(0)), out, in_units(out.shape[1]), weight.shape[0], pairs.tiles, TILE=TILE,
        PAIRS=blocks.pairs, COLUMNS=blocks.columns, GROUP=group, **blocks.launch(),
    )  # fmt: skip

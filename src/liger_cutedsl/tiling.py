"""Tiles of the vocabulary and what they cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from liger_cutedsl.route import DEFAULT_CHUNK

# Tiles are multiples of this many columns (but for the last): the GEMMs' own tiles divide it or it them.
TILE_QUANTUM = 128

# Rows of 16-bit matrices start at multiples of 16 bytes, as the copy engine (TMA) wants.
ROW_MULTIPLE = 8
# dz has spare columns: what a row without a target in the tile would write over its target goes there.
SPARE_COLUMNS = ROW_MULTIPLE

# Of a weight in another dtype than it is multiplied in, so many columns are cast at once: a multiple of every tile.
CAST_COLUMNS = 16128

# Of recompute's tiles on a GPU: at this many columns its passes over dX's sum cost 2 to 3% of the products, at half as
# many twice that.
WIDE_TILE = 8192

# single_pass reads and writes dW once a chunk, under a long product: that costs about as much as this many tokens.
DW_PASS_TOKENS = 130


# Of a forward alone, so many rows at least are computed at once: below it, reading W again is no longer hidden behind
# their products. Partial results of fewer bytes are nobody's concern.
FORWARD_ROWS, FORWARD_BYTES = 4096, 16 * 2**20
# How much longer the waves of slices of rows may take than those of all rows at once.
SLICES_COST = 1.01


@dataclass(frozen=True)
class Calibration:
    """What planning takes a GPU and its cuBLAS to do.

    per_byte: multiply-adds in the time a byte takes to be read or written.
    weight_tile_m, weight_tile_n: what cuBLAS takes for a large product such as dW (columns × H).
    dw_pass_tokens: how many tokens' products cost as much as reading and writing dW under one of them.
    """

    per_byte: int
    weight_tile_m: int
    weight_tile_n: int
    dw_pass_tokens: int


# Measured: 350 T/s over 4.3 TB/s. Other GPUs take it until they are.
H200 = Calibration(per_byte=81, weight_tile_m=128, weight_tile_n=256, dw_pass_tokens=DW_PASS_TOKENS)


class Tile(NamedTuple):
    """Columns [start, stop) of the vocabulary."""

    start: int
    stop: int

    @property
    def width(self) -> int:
        return self.stop - self.start

    @property
    def columns(self) -> slice:
        return slice(self.start, self.stop)


def slices(total: int, size: int) -> Iterator[slice]:
    """Slices of the given size that cover [0, total); the last may be shorter."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def vocabulary_tiles(vocab: int, width: int, first: int = 0) -> Iterator[Tile]:
    """Tiles of the given width that cover [first, vocab); the last may be narrower."""
    for start in range(first, vocab, width):
        yield Tile(start, min(start + width, vocab))


@dataclass(frozen=True)
class WaveModel:
    """Predicts how well the GEMMs of a vocabulary tile fill a GPU: its thread blocks run in waves, one block for
    each multiprocessor, and a last wave that is nearly empty costs as much as a full one.

    multiprocessors: of the GPU.  tile_m, tile_n: the dz GEMM's own tile, over (tokens, columns).
    """

    multiprocessors: int
    tile_m: int
    tile_n: int
    calibration: Calibration = H200

    def cost(self, width: int, tokens: int, hidden: int) -> int:
        """Relative time of a tile: its dz and dW GEMMs, and reading and writing dX's fp32 sum once.

        (dX's own waves do not depend on the width.)
        """
        gpu = self.calibration
        dz = self._waves(tokens, width, self.tile_m, self.tile_n) * hidden
        dw = self._waves(width, hidden, gpu.weight_tile_m, gpu.weight_tile_n) * tokens
        return dz + dw + 8 * gpu.per_byte * tokens * hidden

    def _waves(self, rows: int, columns: int, tile_m: int, tile_n: int) -> int:
        """Elements of the output that the waves could have computed."""
        blocks = -(-rows // tile_m) * -(-columns // tile_n)
        return -(-blocks // self.multiprocessors) * self.multiprocessors * tile_m * tile_n

    @functools.cache  # noqa: B019  (a model is one of a few constants)
    def forward_rows(self, tokens: int, vocab: int) -> int:
        """The fewest rows, in multiples of FORWARD_ROWS, whose slices' GEMMs take no longer than that of all tokens,
        but for SLICES_COST; all, where there are none."""

        def cost(rows):
            return self._waves(rows, vocab, self.tile_m, self.tile_n)

        for size in range(FORWARD_ROWS, tokens, FORWARD_ROWS):
            if _of_all(tokens, size, cost) <= SLICES_COST * cost(tokens):
                return size
        return tokens

    @functools.cache  # noqa: B019  (a model is one of a few constants)
    def best_chunk(self, tokens: int, vocab: int, hidden: int, largest: int) -> int:
        """The chunk of tokens up to `largest` in which single_pass takes the least predicted time, among those that
        divide the tokens equally. Where DEFAULT_CHUNK is allowed, none below it: there dX's waves cost what they cost,
        and above it cuBLAS has found better ones for all heads that were measured."""
        gpu = self.calibration
        matrix = vocab * hidden
        # each GEMM of a chunk, however short, reads W or reads and writes dW, in 16 bits
        reading = 2 * gpu.per_byte * matrix

        def cost(rows):
            e = self._waves(rows, vocab, self.tile_m, self.tile_n) * hidden
            dx = self._waves(rows, hidden, gpu.weight_tile_m, gpu.weight_tile_n) * vocab
            if dx > 1.3 * rows * matrix:  # cuBLAS would rather split the sum over the vocabulary
                dx = 1.1 * rows * matrix
            dw = (rows + gpu.dw_pass_tokens) * matrix
            return max(e, reading) + max(dx, reading) + max(dw, 2 * reading)

        fewest = -(-tokens // largest)
        equal = (-(-tokens // count // TILE_QUANTUM) * TILE_QUANTUM for count in range(fewest, 2 * fewest + 1))
        sizes = sorted({min(size, largest) for size in equal})
        if largest >= DEFAULT_CHUNK:
            sizes = [size for size in sizes if size >= DEFAULT_CHUNK] or sizes[-1:]
        return _cheapest(tokens, sizes, cost)

    @functools.cache  # noqa: B019  (a model is one of a few constants)
    def best_width(self, vocab: int, tokens: int, hidden: int, widest: int) -> int:
        """The width up to `widest` that covers the vocabulary in the least predicted time; the widest of equals."""
        candidates = range(self.tile_n, max(widest, self.tile_n) + 1, self.tile_n)
        return _cheapest(vocab, candidates, lambda width: self.cost(width, tokens, hidden))


def _cheapest(total: int, sizes: Sequence[int], cost: Callable[[int], float]) -> int:
    """Of ascending sizes, the one whose slices of [0, total) cost least together, the last one shorter; the largest of
    equals."""
    return min(reversed(sizes), key=lambda size: _of_all(total, size, cost))


def _of_all(total: int, size: int, cost: Callable[[int], float]) -> float:
    """What slices of [0, total) of that size cost together, the last one shorter."""
    full, rest = divmod(total, size)
    return full * cost(size) + (cost(rest) if rest else 0)


def fitting_width(vocab: int, column_bytes: int, budget_bytes: int) -> int:
    """How many columns' workspace fits the budget, in multiples of TILE_QUANTUM: at least one of it, at most V's."""
    width = max(1, budget_bytes // max(1, column_bytes) // TILE_QUANTUM) * TILE_QUANTUM
    return min(width, -(-vocab // TILE_QUANTUM) * TILE_QUANTUM)

"""Tiles of the vocabulary and what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# Tiles are multiples of this many columns (but for the last): the GEMMs' own tiles divide it or it them.
TILE_QUANTUM = 128

# dz has spare columns: what a row without a target in the tile would write over its target goes there. Eight
# of them keep the row stride a multiple of 16 bytes, as the copy engine (TMA) wants.
SPARE_COLUMNS = 8


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


def vocabulary_tiles(vocab: int, width: int) -> Iterator[Tile]:
    """Tiles of the given width that cover [0, vocab); the last may be narrower."""
    for start in range(0, vocab, width):
        yield Tile(start, min(start + width, vocab))


def fitting_width(vocab: int, column_bytes: int, budget_bytes: int) -> int:
    """The widest tile whose workspace fits the budget: a multiple of TILE_QUANTUM, at least one of it."""
    width = max(1, budget_bytes // max(1, column_bytes) // TILE_QUANTUM) * TILE_QUANTUM
    tiles = -(-vocab // width)
    even = -(-vocab // tiles)  # the same number of tiles, evenly wide
    return min(width, -(-even // TILE_QUANTUM) * TILE_QUANTUM)

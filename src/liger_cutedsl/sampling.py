"""A sample of the softmax: which pairs of a row and a tile of the vocabulary a gradient is computed from, and how.

dz of a row lies in few tiles. A pair (i, t), the TILE columns of tile t in row i, is kept with probability

    q_it = min(1, mass_it · (|a_i| + |h_i|·|m_it − lse_i|) / (τ·ā)),    mass_it = Σ_{v in t} p_iv

and 1 where t holds the row's target, 0 where the row has no coefficient; ā is the coefficients' mean size. Kept pairs'
dz is divided by q. So the mean over draws is the exact gradient, whatever the q: they decide the variance alone. With
z − lse as log p, the factor is what p is multiplied by in dz (objective.py). The uniform part of dz, −C_i·w_v, is left
out: it is a product of two vectors.

q is rounded up to a multiple of 2⁻²⁴, which is what u < q has a probability of: u is one of 2²⁴ numbers. A row with NaN
keeps all its pairs.

u comes of Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed by the call's seed
and counted by what the row is and not by where it lies: the bits of its lse, its target, and the tile's number. Rows
that are the same, to the bit of lse and in their target, draw the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

TILE = 128  # columns of a pair

STEPS = 2.0**24  # u is a multiple of its inverse
_ROUNDS, _MULTIPLIERS, _WEYL = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Draw:
    """What decides which pairs of n rows are kept, before it is known how many there are.

    maxima, sums: (n, tiles) as Engine.exp_chunk returns them of a sampled problem, but for headroom in the sums.
    lse, a: (n,); h: (n,) or None, as in RowCoefficients.  target: (n,) int64, a column of these tiles; any other number
    for one elsewhere.  scale: () on the device, τ·ā, above 0.  seed: (1,) int64 on the device.  first_tile: the number
    of the first of these tiles in the whole vocabulary.
    """

    maxima: torch.Tensor
    sums: torch.Tensor
    lse: torch.Tensor
    a: torch.Tensor
    h: torch.Tensor | None
    target: torch.Tensor
    scale: torch.Tensor
    seed: torch.Tensor
    first_tile: int = 0

    @property
    def tiles(self) -> int:
        return self.maxima.shape[1]


@dataclass(frozen=True)
class Selection:
    """expected: (1,) float32, Σ q.  start: (tiles + 1,) int32, how many of the drawn pairs lie in the tiles before.
    Both on the device."""

    draw: Draw
    expected: torch.Tensor
    start: torch.Tensor


@dataclass(frozen=True)
class Segment:
    """The pairs of some rows in a Packed: of tile t, those from first + start[t] to first + start[t + 1].

    start: as in Selection.  first, count: where they begin in it, and how many there are; or, while they are packed and
    the host does not know, how many may be.  row: the first of the rows, of which there are `rows`, among those of the
    call.
    """

    start: torch.Tensor
    first: int
    count: int
    row: int
    rows: int

    @property
    def pairs(self) -> slice:
        return slice(self.first, self.first + self.count)


@dataclass
class Packed:
    """Kept pairs of one segment behind the other, in each by tile, in a tile by row.

    rows: (capacity,) int32, each pair's row among all rows of the call.  factor: (capacity,) float32, 1/q.
    dz: (capacity, TILE), dz/q, 0 beyond the vocabulary's end.
    """

    rows: torch.Tensor
    factor: torch.Tensor
    dz: torch.Tensor
    segments: list[Segment] = field(default_factory=list)

    @classmethod
    def of(cls, capacity: int, dz_dtype: torch.dtype, device: torch.device) -> Packed:
        """Uninitialised."""
        return cls(
            torch.empty(capacity, dtype=torch.int32, device=device),
            torch.empty(capacity, dtype=torch.float32, device=device),
            torch.empty(capacity, TILE, dtype=dz_dtype, device=device),
        )

    @property
    def capacity(self) -> int:
        return len(self.rows)

    @property
    def first_row(self) -> int:
        """The first of the call's rows that may have pairs here; 0 where there is no segment."""
        return self.segments[0].row if self.segments else 0

    @property
    def filled(self) -> int:
        return sum(segment.count for segment in self.segments)

    @property
    def room(self) -> int:
        return self.capacity - self.filled

    def next(self, start: torch.Tensor, count: int, row: int, rows: int) -> Segment:
        """The place of the next segment, taken."""
        segment = Segment(start, self.filled, count, row, rows)
        self.segments.append(segment)
        return segment


@dataclass(frozen=True)
class ByTile:
    """Pairs by tile, in a tile by row: those of tile t from start[t] to start[t + 1], (tiles + 1,) int32.  rows:
    (pairs,) int32, counted from the call's first_row.  dz: (pairs, TILE)."""

    start: torch.Tensor
    rows: torch.Tensor
    dz: torch.Tensor
    first_row: int

    @property
    def tiles(self) -> int:
        return len(self.start) - 1

    @property
    def pairs(self) -> int:
        return len(self.rows)


def pair_bytes(dz_dtype: torch.dtype) -> int:
    """Of a pair in a Packed."""
    return 4 + 4 + TILE * dz_dtype.itemsize


def tile_count(vocab: int) -> int:
    return -(-vocab // TILE)


def philox(seed: torch.Tensor, counter: tuple) -> torch.Tensor:
    """The first word of Philox 4x32-10, int64 in [0, 2³²), for a key (1,) int64 and four words of a counter, int64
    tensors that broadcast, or numbers: their lower 32 bits count."""
    key = [seed & _LOW, (seed >> 32) & _LOW]
    c = [word & _LOW for word in counter]
    for _ in range(_ROUNDS):
        # mod 2⁶⁴, as int64 has it
        first, second = (word * multiplier for word, multiplier in zip((c[0], c[2]), _MULTIPLIERS, strict=True))
        high = [(product >> 32) & _LOW for product in (first, second)]
        c = [high[1] ^ c[1] ^ key[0], second & _LOW, high[0] ^ c[3] ^ key[1], first & _LOW]
        key = [(word + weyl) & _LOW for word, weyl in zip(key, _WEYL, strict=True)]
    return c[0]


def uniforms(draw: Draw) -> torch.Tensor:
    """u (n, tiles) float32 in [0, 1)."""
    tile = torch.arange(draw.tiles, dtype=torch.int64, device=draw.lse.device) + draw.first_tile
    of_row = draw.lse.float().view(torch.int32).long()[:, None]
    word = philox(draw.seed, (of_row, tile[None, :], draw.target.long()[:, None], 0))
    return (word >> 8).float() / STEPS


def shares(draw: Draw) -> torch.Tensor:
    """q (n, tiles), in the dtype of the sums."""
    below = draw.maxima - draw.lse[:, None]
    size = draw.a.abs()[:, None]
    if draw.h is not None:
        size = size + draw.h.abs()[:, None] * below.abs()
    q = draw.sums * below.exp() * size / draw.scale
    q = torch.where(q < 1, (q * STEPS).ceil() / STEPS, 1.0)  # NaN is not below 1
    tile = torch.where(draw.target < 0, -1, draw.target // TILE)
    column = torch.arange(draw.tiles, dtype=torch.int64, device=q.device)
    return q.masked_fill(column[None, :] == tile[:, None], 1.0)


def coefficient_sizes(a: torch.Tensor, h: torch.Tensor | None) -> torch.Tensor:
    """(2,): Σ_i |a_i| + |h_i|, and how many rows have it above 0. ā is the quotient, of all rows so far."""
    size = a.abs() if h is None else a.abs() + h.abs()
    return torch.stack((size, size.sign())).sum(dim=1)


def kept_pairs(draw: Draw, q: torch.Tensor) -> torch.Tensor:
    """(n, tiles) bool, for their shares."""
    return uniforms(draw) < q


def capacity_needed(expected: float) -> int:
    """Pairs for which a buffer has room where so many are expected: by Bernstein's inequality a draw beyond has a
    probability below 2e-8, the variance of such a sum being at most its mean; 64 more for means near 0."""
    return int(expected + 6.0 * expected**0.5) + 64

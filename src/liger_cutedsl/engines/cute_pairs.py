"""The primitives of sampled pairs by Triton: those of torch_pairs.py, with nothing read to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_cutedsl import triton_dx, triton_pairs, triton_sampling
from liger_cutedsl.call import Problem
from liger_cutedsl.engines.cute_operands import tma_operand
from liger_cutedsl.epilogues import exp_headroom
from liger_cutedsl.objective import RowCoefficients
from liger_cutedsl.sampling import ByTile, Draw, Packed, Segment, Selection


@dataclass(frozen=True)
class DrawnPairs(Selection):
    """before, kept: of triton_sampling.select. Nothing is drawn twice."""

    before: torch.Tensor
    kept: torch.Tensor


class CutePairs:
    """Those methods of an Engine."""

    def select_pairs(self, draw: Draw) -> Selection:
        expected, start, before, kept = triton_sampling.select(draw)
        return DrawnPairs(draw, expected, start, before, kept)

    def pack_pairs(
        self,
        problem: Problem,
        e: torch.Tensor,
        coefficients: RowCoefficients,
        selection: Selection,
        into: Packed,
        segment: Segment,
    ) -> None:
        headroom, drawn = exp_headroom(problem.x.dtype), (selection.before, selection.kept)
        triton_sampling.pack(e, headroom, coefficients, selection.draw, drawn, into, segment)

    def pairs_by_tile(self, packed: Packed, vocab: int) -> ByTile:
        return triton_pairs.by_tile(packed, vocab)

    def dx_of_pairs(self, pairs: ByTile, weight: torch.Tensor, out: torch.Tensor) -> None:
        triton_dx.dx(pairs, tma_operand(weight), out, add=True)

    def dw_of_pairs(self, pairs: ByTile, x: torch.Tensor, out: torch.Tensor, alpha: float, beta: float) -> None:
        triton_pairs.dw(pairs, tma_operand(x), out, alpha, beta)

    def column_sums_of_pairs(self, pairs: ByTile, vocab: int) -> torch.Tensor:
        return triton_pairs.column_sums(pairs, vocab)

"""What packed pairs become: their number on the host, dW and db, and how noisy those are."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from liger_cutedsl import gemm
from liger_cutedsl.call import Problem
from liger_cutedsl.objective import RowCoefficients, RowWeights
from liger_cutedsl.sampling import TILE, Packed, Segment, Selection, coefficient_sizes, tile_count
from liger_cutedsl.schedules.forward_gradients import GradientSink
from liger_cutedsl.tiling import slices

AT_ONCE = 4096  # pairs that a pass widens at a time: 8 MiB of them
ROWS_AT_ONCE = 2048  # of W or dW
SMALLEST = 1e-30  # of what a tile's share is divided by


class PairCount:
    """How many pairs are expected and drawn, on their way to the host."""

    def __init__(self, selection: Selection):
        self._ready, self._host = None, (selection.expected, selection.start[-1:])
        if selection.expected.is_cuda:
            with torch.cuda.device(selection.expected.device):
                self._host = tuple(_page_locked(value) for value in self._host)
                self._ready = torch.cuda.Event()
                self._ready.record()

    def wait(self) -> tuple[float, int]:
        if self._ready is not None:
            self._ready.synchronize()
        expected, drawn = self._host
        return float(expected), int(drawn)


class Scale:
    """τ·ā, ā being the mean size of the coefficients of all rows so far."""

    def __init__(self, sampling: float):
        self.sampling, self._sizes, self._known = sampling, None, None

    def of(self, a: torch.Tensor, h: torch.Tensor | None, size: float | None) -> torch.Tensor:
        """() with further rows.  size: of every row that counts, where it is known."""
        if size is None:
            sizes = coefficient_sizes(a, h)
            self._sizes = sizes = sizes if self._sizes is None else self._sizes + sizes
            scale = self.sampling * sizes[0] / sizes[1].clamp(min=1.0)
            # of nothing but zeros, nothing is kept; beside an infinite one, everything
            return torch.where(scale.isfinite(), scale.clamp(min=SMALLEST), SMALLEST)
        if self._known is None:
            scale = self.sampling * size if math.isfinite(size) else 0.0
            self._known = torch.full((), max(scale, SMALLEST), dtype=a.dtype, device=a.device)
        return self._known


def _page_locked(value: torch.Tensor) -> torch.Tensor:
    """A copy under way."""
    host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    return host.copy_(value, non_blocking=True)


def groups_of_rows(segments: list[Segment], most: int) -> list[list[Segment]]:
    """In groups whose rows span at most so many, or of one."""
    groups: list[list[Segment]] = []
    for one in segments:
        if groups and one.row + one.rows - groups[-1][0].row <= most:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


class PairSink(GradientSink):
    """A sink of chunks of dz, of packed pairs, and of dz's uniform part."""

    def add_pairs(self, pairs, segments: list[Segment], dx: torch.Tensor | None, problem: Problem, factors) -> None:
        """pairs: Engine.pairs_by_tile of these segments, which may be none.  dx: what dX of their rows, from the first
        one's on, is to be added to.  problem: of all rows.  factors: alpha, and what is expected of upstream gradients
        in dX, and in the others."""
        grads, (alpha, of_x, factor) = self.gradients, factors
        if dx is not None:
            self.engine.dx_of_pairs(pairs, problem.weight, dx)
            for one in segments:
                rows = slice(one.row - segments[0].row, one.row - segments[0].row + one.rows)
                torch.mul(dx[rows], alpha * of_x, out=grads.x[one.row : one.row + one.rows])
        if grads.weight is not None:
            beta = factor if self.began else 0.0
            self.engine.dw_of_pairs(pairs, problem.x, grads.weight, alpha * factor, beta)
        if grads.bias is not None:
            self.add_to_bias(self.engine.column_sums_of_pairs(pairs, problem.vocab), alpha, factor)
        self.began = True

    def add_uniform(self, uniform: Uniform, problem: Problem, alpha: float) -> None:
        """−Σ_i C_i·w_v·x_i of sampled chunks, times alpha. Pairs come behind it, with what is expected of upstream."""
        grads = self.gradients
        vector = {"dtype": problem.compute_dtype, "device": problem.device}
        w = torch.ones(problem.vocab, **vector) if problem.ce_weight is None else problem.ce_weight
        for rows in slices(problem.vocab if grads.weight is not None else 0, ROWS_AT_ONCE):
            out, beta = grads.weight[rows], float(self.began)
            gemm.matmul(w[rows, None], uniform.x[None, :], out=out, alpha=-alpha, beta=beta)
        if grads.bias is not None:
            self.add_to_bias(w * -uniform.total, alpha, 1.0)
        self.began = True


class Uniform:
    """Label smoothing's part of dz, −C_i·w_v, the same in all columns but for class weights.

    of_weight: (H,) Σ_v w_v·W_v.  x: (H,) Σ_i C_i·x_i, and total: () Σ_i C_i, of the rows that were added; began,
    whether any were.
    """

    def __init__(self, problem: Problem):
        vector = {"dtype": problem.compute_dtype, "device": problem.device}
        self.x, self.total = torch.zeros(problem.hidden, **vector), torch.zeros((), **vector)
        self.of_weight, self.began = torch.zeros(problem.hidden, **vector), False
        self._rows: dict[int, torch.Tensor] = {}
        for rows in slices(problem.vocab, ROWS_AT_ONCE):
            some = problem.weight[rows].to(problem.compute_dtype)
            w = some.new_ones(1, len(some)) if problem.ce_weight is None else problem.ce_weight[None, rows]
            gemm.matmul(w, some, out=self.of_weight[None, :], beta=1.0)  # autocast would multiply in its own dtype

    def add(self, part: Problem, first_row: int, c: torch.Tensor) -> None:
        """C of rows, the first of which is that of the call."""
        self.began, self._rows[first_row] = True, c
        gemm.matmul(c[None, :], part.x, out=self.x[None, :], beta=1.0)
        self.total += c.sum()

    def write_dx(self, segments: list[Segment], out: torch.Tensor) -> None:
        """−C_i·Σ_v w_v·W_v of the segments' rows, out[0] being that of the first of them."""
        for one in segments:
            rows = slice(one.row - segments[0].row, one.row - segments[0].row + one.rows)
            torch.mul(-self._rows.pop(one.row)[:, None], self.of_weight[None, :], out=out[rows])


def without_uniform(coefficients: RowCoefficients, rows: RowWeights) -> RowCoefficients:
    """Those of dz + C·w: the target's own dz without its share too."""
    if coefficients.c is None:
        return coefficients
    fix = (coefficients.fix + coefficients.c * rows.target_weight).contiguous()
    return replace(coefficients, c=None, fix=fix)


class Noise:
    """Σ (1/q − 1)·‖dz‖²·‖x‖² over pairs, the variance of dW, and of dX with W's rows taken for orthogonal: without bias
    from the pairs that were kept, each times 1/q. () each, of dz as it is stored."""

    def __init__(self, problem: Problem):
        vector = {"dtype": problem.compute_dtype, "device": problem.device}
        self.of_weight, self.of_x = torch.zeros((), **vector), torch.zeros((), **vector)
        self._x_squares = _row_squares(problem.x, problem.compute_dtype)
        padded = torch.zeros(tile_count(problem.vocab) * TILE, **vector)
        padded[: problem.vocab] = _row_squares(problem.weight, problem.compute_dtype)
        self._weight_squares = padded.view(-1, TILE)

    def add(self, packed: Packed) -> None:
        for segment in packed.segments:
            counts = segment.start.diff()
            index = torch.arange(len(counts), dtype=torch.int64, device=counts.device)
            tiles = torch.repeat_interleave(index, counts, output_size=segment.count)
            for part in slices(segment.count, AT_ONCE):
                squares = packed.dz[segment.pairs][part].to(self.of_x.dtype).square()
                # kept dz is dz/q, and 1/q·(1/q − 1)·dz² = (1 − q)·(dz/q)²
                share = 1.0 - packed.factor[segment.pairs][part].to(squares.dtype).reciprocal()
                of_x = self._x_squares[packed.rows[segment.pairs][part].long()]
                of_tiles = self._weight_squares[tiles[part]]
                self.of_weight += torch.dot(share * of_x, squares.sum(dim=1))
                self.of_x += torch.dot(share, squares.mul_(of_tiles).sum(dim=1))

    def relative(self, gradient: torch.Tensor | None, variance: torch.Tensor, factor: float) -> torch.Tensor:
        """() float32: of a gradient's norm, which is that of dz times factor; NaN for one that is not computed."""
        if gradient is None:
            return torch.full((), torch.nan, dtype=torch.float32, device=variance.device)
        norm = torch.linalg.vector_norm(gradient, dtype=variance.dtype)
        # of nothing, nothing is noise
        return torch.where(variance == 0, 0.0, variance.sqrt() * abs(factor) / norm).float()


def _row_squares(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """‖row‖² of each row."""
    parts = [matrix[rows].to(dtype).square().sum(dim=1) for rows in slices(matrix.shape[0], ROWS_AT_ONCE)]
    return torch.cat(parts)

"""The torch engine: the element functions of epilogues.py run by PyTorch, on any device and dtype.

It works in the compute dtype throughout (float32, float64 for float64 inputs): 16-bit inputs are widened and
nothing is rounded before the gradients are written. It is the reference the GPU engine is tested against.
"""

from __future__ import annotations

import torch

from liger_cutedsl.call import Problem
from liger_cutedsl.cross_entropy import Plain
from liger_cutedsl.engines.torch_pairs import TorchPairs, pair_temporaries
from liger_cutedsl.epilogues import (
    LOWEST_MAXIMUM,
    EpilogueFlags,
    backward_epilogue,
    capped,
    dz_of_exp,
    exp_epilogue,
    exp_headroom,
    exp_prepass,
    forward_epilogue,
    vocabulary_operands,
)
from liger_cutedsl.gemm import matmul
from liger_cutedsl.objective import RowCoefficients
from liger_cutedsl.row_statistics import RowStatistics, combined, over_parts
from liger_cutedsl.sampling import TILE
from liger_cutedsl.tiling import FORWARD_ROWS, Tile, slices, vocabulary_tiles
from liger_cutedsl.two_part_sum import TwoPartSum

WIDEST_TILE = 8192  # wider ones gain nothing
SUM_ROWS, SUM_TEMPORARIES = 256, 8  # rows of dW that are added to at a time, and float32 numbers of each of theirs


class TorchEngine(TorchPairs):
    """An Engine that needs nothing but PyTorch.

    dz_dtype: the dtype of dz between its GEMM and the gradient GEMMs; None for the compute dtype.
    """

    name, wide_tile = "torch", 1024

    def __init__(self, dz_dtype: torch.dtype | None = None):
        self._dz_dtype = dz_dtype

    def row_statistics(self, problem: Problem, tile_width: int) -> RowStatistics:
        flags = EpilogueFlags.of(problem)
        epilogue, x, fold = forward_epilogue(flags), self.gemm_operand(problem.x), _RowFold(problem)
        for tile in vocabulary_tiles(problem.vocab, tile_width):
            acc = self._accumulator(x, problem, tile)
            fold.add(epilogue(acc, **_broadcast_operands(flags.forward_operands, problem, tile)), tile)
        return fold.result()

    def exp_chunk(
        self, problem: Problem, out: torch.Tensor, fold: bool = True
    ) -> tuple[RowStatistics, torch.Tensor, torch.Tensor]:
        flags, headroom = EpilogueFlags.of(problem), exp_headroom(out.dtype)
        epilogue, prepass = exp_epilogue(flags, headroom), exp_prepass(flags)
        x, rows, maxima, tile_sums = self.gemm_operand(problem.x), _RowFold(problem), [], []
        for tile in vocabulary_tiles(problem.vocab, self.exp_tile(problem)):
            acc = self._accumulator(x, problem, tile)
            values = _broadcast_operands(flags.forward_operands, problem, tile)
            u = prepass(acc, **{name: values[name] for name in flags.uncapped_operands})["tile_max"]
            tile_max = u.amax(dim=1).clamp(min=LOWEST_MAXIMUM)
            maxima.append(capped(flags, tile_max, values)[0])
            outputs = epilogue(acc, **values, tile_max=tile_max[:, None])
            out[:, tile.columns] = outputs["D"]
            tile_sums.append(outputs["sum_exp"].sum(dim=1))
            outputs["lse"] = (tile_sums[-1].mul(2.0**-headroom).log() + maxima[-1])[:, None]
            if flags.moments:
                scales = {"sum_exp": headroom, "sum_exp_z": headroom, "sum_exp_sq": 2 * headroom}
                sums = {name: outputs[name].sum(dim=1) * 2.0 ** -scales[name] for name in flags.moments[1:]}
                rows.add_moments({"maximum": maxima[-1], **sums})
            if "is_max" in outputs:  # the maxima are exactly m again
                outputs["argmax"] = outputs.pop("is_max") + maxima[-1][:, None]
            rows.add(outputs, tile)
        return rows.result(), torch.stack(maxima, dim=1), torch.stack(tile_sums, dim=1)

    def fold_plain(
        self, problem: Problem, stats: RowStatistics, maxima: torch.Tensor, sums: torch.Tensor, plain: Plain
    ) -> None:
        """exp_chunk folds in any case here."""
        plain.write(stats, problem.target)

    def scale_chunk(
        self,
        problem: Problem,
        e: torch.Tensor,
        maxima: torch.Tensor,
        lse: torch.Tensor,
        coefficients: RowCoefficients,
        column_sums: bool,
    ) -> torch.Tensor | None:
        flags, headroom = EpilogueFlags.of(problem).for_gradients(coefficients), exp_headroom(e.dtype)
        rows = {"lse": lse, "row_a": coefficients.a, "row_c": coefficients.c, "row_h": coefficients.h}
        for index, tile in enumerate(vocabulary_tiles(problem.vocab, self.exp_tile(problem))):
            values = _broadcast_operands(("ce_weight",) * flags.ce_weight, problem, tile)
            rows["m"] = maxima[:, index]
            values |= {name: vector[:, None] for name, vector in rows.items() if vector is not None}
            e[:, tile.columns] = dz_of_exp(flags, headroom, e[:, tile.columns].to(lse.dtype), values)
        target = problem.target.long()[:, None]
        column = target.clamp(0, problem.vocab - 1)
        fix = torch.where(target == column, coefficients.fix.to(e.dtype)[:, None], e.gather(1, column))
        e.scatter_(1, column, fix)
        return e.sum(dim=0, dtype=problem.compute_dtype) if column_sums else None

    def dz_tile(
        self, problem: Problem, lse: torch.Tensor, coefficients: RowCoefficients, tile: Tile, out: torch.Tensor
    ) -> None:
        flags = EpilogueFlags.of(problem).for_gradients(coefficients)
        values = _broadcast_operands(flags.backward_operands, problem, tile)
        rows = {"lse": lse, "row_a": coefficients.a, "row_c": coefficients.c, "row_h": coefficients.h}
        values |= {name: vector[:, None] for name, vector in rows.items() if vector is not None}
        acc = self._accumulator(self.gemm_operand(problem.x), problem, tile)
        out.copy_(backward_epilogue(flags)(acc, **values)["D"])

    def add_product(self, dz: torch.Tensor, x: torch.Tensor, total: TwoPartSum, alpha: float, beta: float) -> None:
        x = self.gemm_operand(x)
        for rows in slices(dz.shape[1], SUM_ROWS):
            part = total.rows(rows)
            product = torch.empty(part.high.shape, dtype=torch.float32, device=dz.device)
            part.add(matmul(dz[:, rows].t(), x, out=product), alpha, beta)

    def gemm_operand(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix if matrix.dtype == torch.float64 else matrix.float()

    def dz_dtype(self, gemm_dtype: torch.dtype) -> torch.dtype:
        return self._dz_dtype or torch.promote_types(gemm_dtype, torch.float32)

    def tile_width(self, problem: Problem, fitting: int, kept: int) -> int:
        return min(fitting, WIDEST_TILE)

    def column_bytes(self, problem: Problem) -> int:
        """dz and (N, tile) temporaries, as many as measured, and a row of a 16-bit W, widened."""
        return self._column(problem, 1 + _backward_temporaries(problem))

    def forward_bytes(self, problem: Problem, tile_width: int, kept: int) -> int:
        kept_part = self._exp_temporaries(problem, problem.tokens) if kept else 0
        tile_width = min(tile_width, problem.vocab - kept)
        return max(self._column(problem, _forward_temporaries(problem)) * tile_width, kept_part)

    def forward_rows(self, problem: Problem) -> int:
        return min(problem.tokens, FORWARD_ROWS)

    def _column(self, problem: Problem, temporaries: int) -> int:
        widened = problem.hidden if problem.gemm_dtype.itemsize == 2 else 0
        return problem.compute_dtype.itemsize * (temporaries * problem.tokens + widened)

    def operand_bytes(self, problem: Problem) -> int:
        widened = problem.gemm_dtype.itemsize == 2
        return problem.vocab * problem.hidden * problem.compute_dtype.itemsize if widened else 0

    def column_sums_bytes(self, problem: Problem, columns: int) -> int:
        return 0

    def add_product_bytes(self, problem: Problem) -> int:
        return SUM_TEMPORARIES * 4 * min(SUM_ROWS, problem.vocab) * problem.hidden

    def exp_tile(self, problem: Problem) -> int:
        """As many as in the CuTe engine on Hopper, so that tests see their edges."""
        return TILE if problem.sampled else 192

    def chunk_size(self, problem: Problem, fitting: int) -> int:
        return fitting

    def chunk_bytes(self, problem: Problem, rows: int) -> int:
        """Exponentials, or dz, and temporaries of a tile."""
        numbers = rows * problem.vocab + problem.tokens * 8
        if problem.options.needs_slope_apart:
            temporaries = max(_forward_temporaries(problem), _backward_temporaries(problem))
            return problem.compute_dtype.itemsize * (numbers + temporaries * rows * min(WIDEST_TILE, problem.vocab))
        return problem.compute_dtype.itemsize * numbers + self._exp_temporaries(problem, rows)

    def _exp_temporaries(self, problem: Problem, rows: int) -> int:
        """Bytes of the temporaries of a tile of exponentials, as many as measured."""
        options = problem.options
        temporaries = 6 + 2 * (problem.bias is not None) + 5 * (options.softcap is not None) + options.needs_argmax
        temporaries += 4 * options.needs_moments
        of_tile = problem.compute_dtype.itemsize * temporaries * rows * self.exp_tile(problem)
        return max(of_tile, pair_temporaries(problem, rows)) if problem.sampled else of_tile

    def _accumulator(self, x: torch.Tensor, problem: Problem, tile: Tile) -> torch.Tensor:
        acc = x.new_empty(problem.tokens, tile.width)
        return matmul(x, self.gemm_operand(problem.weight[tile.columns]).t(), out=acc)


def _forward_temporaries(problem: Problem) -> int:
    """(rows, columns) temporaries that a tile's logits take, as measured."""
    options = problem.options
    further = 5 if options.softcap is not None else 2 * options.needs_moments  # the cap's are gone when those come
    return 2 + (problem.bias is not None) + further


def _backward_temporaries(problem: Problem) -> int:
    """Those of its dz, beside dz."""
    options, bias = problem.options, problem.bias is not None
    if options.softcap is not None:
        return 7 + bias + 2 * options.needs_entropy
    return 3 + 2 * options.needs_entropy + bias + (options.smoothing and problem.ce_weight is not None)


def _broadcast_operands(names, problem: Problem, tile: Tile) -> dict:
    return vocabulary_operands(names, problem, lambda vector: vector[None, tile.columns])


class _RowFold:
    """Folds the forward epilogue's outputs over vocabulary tiles into RowStatistics."""

    def __init__(self, problem: Problem):
        n, options, self.names = problem.tokens, problem.options, EpilogueFlags.of(problem).moments
        vector = {"dtype": problem.compute_dtype, "device": problem.device}
        self.target = problem.target
        self.lse = torch.full((n,), -torch.inf, **vector)
        self.target_logit = torch.full((n,), -torch.inf, **vector)
        self.weighted_sum = torch.zeros(n, **vector) if options.needs_weighted_sum else None
        self.moments: dict[str, torch.Tensor] = {}
        self.largest = self.argmax = None
        if options.needs_argmax:
            self.largest = torch.full((n,), -torch.inf, **vector)
            self.argmax = torch.zeros(n, dtype=torch.int64, device=problem.device)

    def add(self, outputs: dict, tile: Tile) -> None:
        if "moments" in outputs:
            self.add_moments(_moments_of(outputs["moments"], self.names))
        z_or_lse = outputs["moments"] if "moments" in outputs else outputs["lse"]
        self.lse = torch.logaddexp(self.lse, torch.logsumexp(z_or_lse, dim=1))
        column = self.target.long() - tile.start
        here = (column >= 0) & (column < tile.width)
        selected = outputs["target_logit"].gather(1, torch.where(here, column, 0)[:, None])[:, 0]
        self.target_logit = torch.where(here, selected, self.target_logit)
        if "weighted_sum" in outputs:
            value = outputs["weighted_sum"]
            product = value[0] * value[1] if isinstance(value, tuple) else value
            self.weighted_sum += product.sum(dim=1)
        if "argmax" in outputs:
            z = outputs["argmax"]
            column = z.argmax(dim=1)  # the first of equal maxima
            largest = z.gather(1, column[:, None])[:, 0]
            larger = largest > self.largest  # so on ties the earlier tile stays
            self.largest = torch.where(larger, largest, self.largest)
            self.argmax = torch.where(larger, column + tile.start, self.argmax)

    def add_moments(self, moments: dict[str, torch.Tensor]) -> None:
        """Those of further columns, each (n,)."""
        if self.moments:
            parts = [RowStatistics(**these) for these in (self.moments, moments)]
            folded = over_parts(combined(parts, torch.stack))
            moments = {name: getattr(folded, name) for name in moments}
        self.moments = moments

    def result(self) -> RowStatistics:
        # A logit of +∞ leaves no softmax: NaN, as in torch.nn.functional.log_softmax.
        lse = self.lse.masked_fill(torch.isposinf(self.lse), torch.nan)
        return RowStatistics(lse, self.target_logit, self.weighted_sum, self.argmax, self.largest, **self.moments)


def _moments_of(z: torch.Tensor, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """EpilogueFlags.moments of a tile's logits (n, columns), each (n,)."""
    maximum = z.amax(dim=1)
    finite = torch.where(torch.isneginf(maximum), 0.0, maximum)  # −∞ − (−∞) is NaN, and so is −∞·0
    below = (z - finite[:, None]).clamp(min=LOWEST_MAXIMUM)
    e = below.exp()
    sums = {"sum_exp": lambda: e, "sum_exp_z": lambda: e * below, "sum_exp_sq": lambda: e * e}
    return {"maximum": maximum} | {name: sums[name]().sum(dim=1) for name in names if name in sums}

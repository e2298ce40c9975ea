"""The CuTe engine: the same primitives as the torch engine, on quack's tensor-core GEMMs (Hopper, Blackwell)."""

from __future__ import annotations

import contextlib
import functools
import threading

import torch
from quack.cute_dsl_utils import get_device_capacity

from liger_cutedsl.call import Problem
from liger_cutedsl.cross_entropy import Plain
from liger_cutedsl.engines.architectures import Architecture, GemmTile, to_compile_for
from liger_cutedsl.engines.cute_kernels import backward_kernel, exp_kernel, forward_kernel, sum_kernel
from liger_cutedsl.engines.cute_operands import tma_operand, vector_operand
from liger_cutedsl.engines.cute_ops import OnlineArgmax
from liger_cutedsl.engines.cute_pairs import CutePairs
from liger_cutedsl.engines.engine import KernelFailure
from liger_cutedsl.epilogues import EpilogueFlags, capped, exp_headroom, vocabulary_operands
from liger_cutedsl.gemm import multiprocessors
from liger_cutedsl.kernel_cache import use_private_cache
from liger_cutedsl.objective import RowCoefficients
from liger_cutedsl.options import LogitOptions
from liger_cutedsl.row_statistics import RowStatistics
from liger_cutedsl.tiling import WIDE_TILE, Tile, WaveModel
from liger_cutedsl.triton_folds import fold_exp, fold_lse, fold_moments, fold_plain
from liger_cutedsl.triton_kernels import SUMMED_ROWS, dz_of_exp
from liger_cutedsl.two_part_sum import TwoPartSum

use_private_cache()

# Columns of a vocabulary tile. Wider than this, tiles gain nothing measurable and only take memory; narrower, the
# GEMMs of a tile no longer fill the machine, and dX's accumulator dwarfs what would be saved.
WIDEST_TILE, NARROWEST_TILE = 13056, 1024
# Where dX's sum alone is beyond the budget, a wider tile adds little to it and passes over it less often.
NARROWEST_WHERE_NONE_FITS = 3072
# Tokens of a chunk of exponentials. Twice as many gain about 1% for twice the memory.
LARGEST_CHUNK = 4096


class CuteEngine(CutePairs):
    """An Engine of quack's GEMMs and the passes of triton_kernels.py.

    launch: False compiles the kernels and leaves results undefined (python -m liger_cutedsl compile).
    after_first_launch: called once, when the first GEMM is on its way: what the host waits for there costs no time.
    """

    name, wide_tile = "cute", WIDE_TILE

    def __init__(self, launch: bool = True, after_first_launch=None):
        self._launch = launch
        self._after_first_launch = after_first_launch

    def row_statistics(self, problem: Problem, tile_width: int) -> RowStatistics:
        """One GEMM over the whole vocabulary; its tiles' partial results are folded by one pass each."""
        flags = EpilogueFlags.of(problem)
        arguments, tile, ragged = self._row_arguments("forward", flags, problem)
        name, count = ("moments", len(flags.moments)) if flags.moments else ("lse", 1)
        arguments[name] = _partials(problem, tile, count)
        if flags.argmax:
            arguments["argmax"] = _partials(problem, tile, dtype=torch.int64)
        self._run(forward_kernel(flags, ragged), problem.x, problem.weight, None, arguments, tile)
        if not flags.moments:
            return self._folded(arguments, lambda: fold_lse(arguments["lse"]))
        moments = dict(zip(flags.moments, arguments["moments"].chunk(count, dim=1), strict=True))
        return self._folded(arguments, moments=lambda: fold_moments(moments, 0))

    def exp_chunk(
        self, problem: Problem, out: torch.Tensor, fold: bool = True
    ) -> tuple[RowStatistics, torch.Tensor, torch.Tensor]:
        flags, headroom = EpilogueFlags.of(problem), exp_headroom(problem.x.dtype)
        arguments, tile, ragged = self._row_arguments(exp_kind(problem.options, problem.sampled), flags, problem)
        sums, maxima = _partials(problem, tile), _partials(problem, tile)
        arguments.update(sum_exp=sums, tile_max_out=maxima, tile_max=tile.tile_n)
        arguments |= {name: torch.empty_like(sums) for name in flags.moments[2:]}
        if flags.argmax and flags.scale:
            arguments["argmax"] = _partials(problem, tile, dtype=torch.int64)
        elif flags.argmax:
            arguments["is_max"] = torch.empty_like(sums)
        self._run(exp_kernel(flags, ragged, headroom), problem.x, problem.weight, out, arguments, tile)
        if not fold:
            return RowStatistics(target_logit=arguments["target_logit"]), maxima, sums
        maxima, _ = capped(flags, maxima, arguments)
        if "is_max" in arguments:
            largest, first_tile = maxima.max(dim=1, keepdim=True)
            column = arguments["is_max"].gather(1, first_tile)  # NO_COLUMN if NaN
            arguments["best"] = (largest[:, 0], column[:, 0].long())
        if not flags.moments:
            return self._folded(arguments, lambda: fold_exp(maxima, sums, headroom)), maxima, sums
        moments = {"maximum": maxima} | {name: arguments[name] for name in flags.moments[1:]}
        return self._folded(arguments, moments=lambda: fold_moments(moments, headroom)), maxima, sums

    def fold_plain(
        self, problem: Problem, stats: RowStatistics, maxima: torch.Tensor, sums: torch.Tensor, plain: Plain
    ) -> None:
        if self._launch:
            fold_plain(maxima, sums, exp_headroom(problem.x.dtype), stats.target_logit, problem.target, plain)

    def scale_chunk(
        self,
        problem: Problem,
        e: torch.Tensor,
        maxima: torch.Tensor,
        lse: torch.Tensor,
        coefficients: RowCoefficients,
        column_sums: bool,
    ) -> torch.Tensor | None:
        if not self._launch:
            return torch.empty(problem.vocab, dtype=torch.float32, device=e.device) if column_sums else None
        tile_n, headroom = self.exp_tile(problem), exp_headroom(problem.x.dtype)
        return dz_of_exp(problem, e, maxima, lse, coefficients, tile_n, headroom, column_sums)

    def dz_tile(
        self, problem: Problem, lse: torch.Tensor, coefficients: RowCoefficients, tile: Tile, out: torch.Tensor
    ) -> None:
        flags = EpilogueFlags.of(problem).for_gradients(coefficients)
        values = _readable_operands(flags.backward_operands, problem, tile)
        rows = {"lse": lse, "row_a": coefficients.a, "row_c": coefficients.c, "row_h": coefficients.h}
        values |= {name: vector_operand(vector) for name, vector in rows.items() if vector is not None}
        gemm = tile_of("backward", problem.x)
        self._run(backward_kernel(flags), problem.x, problem.weight[tile.columns], out, values, gemm)

    def add_product(self, dz: torch.Tensor, x: torch.Tensor, total: TwoPartSum, alpha: float, beta: float) -> None:
        values = {"low": total.low, "next_low": total.low, "alpha": alpha, "beta": beta}
        a, b, tile = dz.t(), tma_operand(x).t(), tile_of("dw-sum", x)
        self._multiply(sum_kernel(), a, b, total.high, values, tile, C=total.high)

    def gemm_operand(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix

    def dz_dtype(self, gemm_dtype: torch.dtype) -> torch.dtype:
        return gemm_dtype

    def tile_width(self, problem: Problem, fitting: int, kept: int) -> int:
        """The width for which the GEMMs of the tiles fill the GPU best, among those that fit."""
        narrowest = NARROWEST_TILE if fitting >= NARROWEST_TILE else NARROWEST_WHERE_NONE_FITS
        widest = min(max(fitting, narrowest), WIDEST_TILE)
        return self._waves("backward", problem).best_width(problem.vocab - kept, problem.tokens, problem.hidden, widest)

    def column_bytes(self, problem: Problem) -> int:
        """dz, and for fp16 a row of dW in fp32 (see recompute.py)."""
        fp32_row = 4 * problem.hidden if problem.gemm_dtype == torch.float16 else 0
        return problem.gemm_dtype.itemsize * problem.tokens + fp32_row

    def forward_bytes(self, problem: Problem, tile_width: int, kept: int) -> int:
        """The partial results of the reductions, and of those of the kept columns."""
        tiles = -(-(problem.vocab - kept) // tile_of("forward", problem.x).tile_n)
        options = problem.options
        sums = max(1, len(EpilogueFlags.of(problem).moments)) + options.needs_weighted_sum
        per_row = tiles * (4 * sums + 8 * options.needs_argmax)
        return problem.tokens * (per_row + self._exp_partials(problem, kept))

    def forward_rows(self, problem: Problem) -> int:
        return self._waves("forward", problem).forward_rows(problem.tokens, problem.vocab)

    def operand_bytes(self, problem: Problem) -> int:
        return 0

    def column_sums_bytes(self, problem: Problem, columns: int) -> int:
        """A row for each block of rows that one program sums."""
        return -(-problem.tokens // SUMMED_ROWS) * columns * 4

    def add_product_bytes(self, problem: Problem) -> int:
        return 0

    def exp_tile(self, problem: Problem) -> int:
        return tile_of(exp_kind(problem.options, problem.sampled), problem.x).tile_n

    def chunk_size(self, problem: Problem, fitting: int) -> int:
        """The chunk for which the GEMMs fill the GPU best, among those that fit."""
        largest = min(fitting, LARGEST_CHUNK)
        if problem.tokens <= largest:
            return problem.tokens
        return self._waves(exp_kind(problem.options, problem.sampled), problem).best_chunk(
            problem.tokens, problem.vocab, problem.hidden, largest
        )

    def chunk_bytes(self, problem: Problem, rows: int) -> int:
        """Exponentials, and the partial results of their reductions."""
        row = problem.gemm_dtype.itemsize * (problem.vocab + 8)
        row += self._exp_partials(problem, problem.vocab)
        return rows * row + (0 if problem.bias is None else -(-rows // SUMMED_ROWS) * problem.vocab * 4)

    def _exp_partials(self, problem: Problem, columns: int) -> int:
        """Bytes a row of the partial results of exp_chunk."""
        options, tiles = problem.options, -(-columns // self.exp_tile(problem))
        sums = options.needs_weighted_sum + options.needs_argmax + options.needs_entropy + options.needs_sum_sq
        sums += options.needs_argmax and options.scale != 1.0  # whose keys have 8 bytes
        return tiles * (8 + 4 * (sums + (options.softcap is not None)))

    def _waves(self, kernel: str, problem: Problem) -> WaveModel:
        return _wave_model(problem.device, tile_of(kernel, problem.x))

    def _row_arguments(self, kernel: str, flags: EpilogueFlags, problem: Problem) -> tuple[dict, GemmTile, bool]:
        """(arguments, tile, ragged): operands and outputs that the kernels over the whole vocabulary share."""
        tile, n = tile_of(kernel, problem.x), problem.tokens
        vector = {"dtype": torch.float32, "device": problem.device}
        values = _readable_operands(flags.forward_operands, problem, Tile(0, problem.vocab))
        values["target"] = vector_operand(problem.target.to(torch.int32))
        # A target in no tile, or one whose logit is −inf, is never written.
        values["target_logit"] = torch.full((n,), -torch.inf, **vector)
        if flags.smoothing:
            values["weighted_sum"] = _partials(problem, tile)
        return values, tile, problem.vocab % tile.tile_n != 0

    def _folded(self, arguments: dict, lse=None, moments=None) -> RowStatistics:
        """Folds the partial results (N, tiles) over the tiles; lse or moments: what folds those."""
        weighted_sum, (largest, column) = arguments.get("weighted_sum"), arguments.get("best", (None, None))
        if "argmax" in arguments:
            largest, column = OnlineArgmax.decoded(arguments["argmax"])
        folded = {"lse": arguments["target_logit"]}
        if self._launch:
            folded = {"lse": lse()} if moments is None else moments()
        return RowStatistics(
            **folded,
            target_logit=arguments["target_logit"],
            weighted_sum=None if weighted_sum is None else weighted_sum.sum(dim=1),
            argmax=column,
            max_logit=largest,
        )

    def _run(self, kernel, x, weight, out, arguments: dict, tile: GemmTile) -> None:
        self._multiply(kernel, tma_operand(x), tma_operand(weight), out, arguments, tile)

    def _multiply(self, kernel, a, b, out, arguments: dict, tile: GemmTile, **more) -> None:
        """One GEMM on the tensors' device and its current stream, whatever the current device is."""
        with torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext(), _one_at_a_time:
            try:
                kernel.gemm(a, b, out, epi_args=arguments, _launch=self._launch, **more, **tile.arguments())
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # CuTe DSL, the driver and the cache on disk each have errors of their own
                # Begun as if no target were ignored: where some are, that comes first, as it does on other ranks.
                self._then()
                raise KernelFailure(_failure_text(error)) from error
        self._then()

    def _then(self) -> None:
        then, self._after_first_launch = self._after_first_launch, None
        if then is not None:
            then()


# The first call from each of several threads may compile, and compiling is not known to be safe twice at once.
_one_at_a_time = threading.RLock()


def _failure_text(error: Exception) -> str:
    return (
        f"a CuTe kernel could not be compiled or launched ({type(error).__name__}: {str(error)[:300]}). See what is "
        f"installed with `python -m liger_cutedsl`; QUACK_CACHE_DIR=FOLDER starts with an empty kernel cache, and "
        f"LIGER_CUTEDSL_ENGINE=triton does without these kernels"
    )


def _partials(problem: Problem, tile: GemmTile, count: int = 1, dtype=torch.float32) -> torch.Tensor:
    """Uninitialised (N, count · tiles): what a kernel's reductions leave of each of its tiles."""
    tiles = -(-problem.vocab // tile.tile_n)
    return torch.empty(problem.tokens, count * tiles, dtype=dtype, device=problem.device)


def exp_kind(options: LogitOptions, sampled: bool = False) -> str:
    """The name of exp_chunk's tile in architectures.py."""
    if sampled:
        return "exp-sampled"
    sums = options.needs_weighted_sum or options.needs_argmax or options.needs_moments
    with_options = options.softcap is not None or sums
    return "exp-options" if with_options else "exp"


def _readable_operands(names, problem: Problem, tile: Tile) -> dict:
    return vocabulary_operands(names, problem, lambda vector: vector_operand(vector[tile.columns]))


def tile_of(kernel: str, tensor: torch.Tensor) -> GemmTile:
    return architecture_of(tensor.device).tile(kernel)


@functools.cache
def architecture_of(device: torch.device) -> Architecture:
    """The device's row, or that of QUACK_ARCH's architecture, where it is set: there need not be a GPU then."""
    return to_compile_for(get_device_capacity(device))


@functools.cache
def _wave_model(device: torch.device, tile: GemmTile) -> WaveModel:
    return WaveModel(multiprocessors(device), tile.tile_m, tile.tile_n, architecture_of(device).calibration)

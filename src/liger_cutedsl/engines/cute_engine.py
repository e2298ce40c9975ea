"""The CuTe engine: the same primitives as the torch engine, on quack's tensor-core GEMMs (Hopper, Blackwell)."""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import replace

import torch
from quack.cute_dsl_utils import get_device_capacity

from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.engines.architectures import Architecture, GemmTile, to_compile_for
from liger_cutedsl.engines.cute_kernels import backward_kernel, exp_kernel, forward_kernel
from liger_cutedsl.engines.cute_ops import OnlineArgmax
from liger_cutedsl.engines.triton_kernels import SUMMED_ROWS, dz_of_exp, fold_exp, fold_lse
from liger_cutedsl.epilogues import Epilogue, capped, exp_headroom
from liger_cutedsl.gemm import multiprocessors
from liger_cutedsl.kernel_cache import use_private_cache
from liger_cutedsl.objective import RowCoefficients, RowStatistics
from liger_cutedsl.options import LossOptions
from liger_cutedsl.problem import Problem
from liger_cutedsl.tiling import TILE_QUANTUM, Tile, WaveModel

use_private_cache()

# Columns of a vocabulary tile. Wider than this, tiles gain nothing measurable and only take memory; narrower, the
# GEMMs of a tile no longer fill the machine, and dX's accumulator dwarfs what would be saved.
WIDEST_TILE, NARROWEST_TILE = 13056, 1024
# Where dX's sum alone is beyond the budget, a wider tile adds little to it and passes over it less often.
NARROWEST_WHERE_NONE_FITS = 3072
# Tokens of a chunk of exponentials. Twice as many gain about 1% for twice the memory.
LARGEST_CHUNK = 4096
ROW_ALIGNMENT = 16  # bytes: what the copy engine (TMA) wants of addresses and row strides


class CuteEngine:
    """launch: False compiles the kernels and leaves results undefined (python -m liger_cutedsl compile).

    after_first_launch: called once, when the first GEMM is on its way: what the host waits for there costs no time.
    """

    name = "cute"

    def __init__(self, launch: bool = True, after_first_launch=None):
        self._launch = launch
        self._after_first_launch = after_first_launch

    def dz_dtype(self, gemm_dtype: torch.dtype) -> torch.dtype:
        return gemm_dtype

    def column_bytes(self, problem: Problem) -> int:
        """Workspace a column of a vocabulary tile takes: dz, and for fp16 a row of dW in fp32 (see recompute.py)."""
        fp32_row = 4 * problem.hidden if problem.gemm_dtype == torch.float16 else 0
        return problem.gemm_dtype.itemsize * problem.tokens + fp32_row

    def tile_width(self, problem: Problem, fitting: int, kept: int) -> int:
        """The width for which the GEMMs of the tiles behind the first `kept` columns fill the GPU best, among those
        that fit."""
        narrowest = NARROWEST_TILE if fitting > TILE_QUANTUM else NARROWEST_WHERE_NONE_FITS
        widest = min(max(fitting, narrowest), WIDEST_TILE)
        return self._waves("backward", problem).best_width(problem.vocab - kept, problem.tokens, problem.hidden, widest)

    def forward_bytes(self, problem: Problem, tile_width: int, kept: int) -> int:
        """The partial results of the forward reductions, and of those of the kept columns."""
        tiles = -(-(problem.vocab - kept) // tile_of("forward", problem.x).tile_n)
        options = problem.options
        per_row = tiles * (4 + 4 * options.smoothing + 8 * options.needs_argmax)
        return problem.tokens * (per_row + self._exp_partials(problem, kept))

    def exp_tile(self, problem: Problem) -> int:
        """Columns that share a maximum in exp_chunk."""
        return tile_of(exp_kind(problem.options), problem.x).tile_n

    def _exp_partials(self, problem: Problem, columns: int) -> int:
        """Bytes a row of the partial results of exp_chunk."""
        options, tiles = problem.options, -(-columns // self.exp_tile(problem))
        return tiles * (8 + 4 * (options.smoothing + options.needs_argmax + (options.softcap is not None)))

    def gemm_operand(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix

    def chunk_bytes(self, problem: Problem, rows: int) -> int:
        """Workspace of a chunk of `rows` tokens: exponentials, and the partial results of its reductions."""
        row = problem.gemm_dtype.itemsize * (problem.vocab + 8)
        row += 0 if problem.bias is None else problem.vocab * 4 // SUMMED_ROWS
        return rows * (row + self._exp_partials(problem, problem.vocab))

    def chunk_size(self, problem: Problem, fitting: int) -> int:
        """The chunk for which the GEMMs fill the GPU best, among those that fit."""
        largest = min(fitting, LARGEST_CHUNK)
        if problem.tokens <= largest:
            return problem.tokens
        return self._waves(exp_kind(problem.options), problem).best_chunk(
            problem.tokens, problem.vocab, problem.hidden, largest
        )

    def row_statistics(self, problem: Problem, tile_width: int) -> RowStatistics:
        """One GEMM over the whole vocabulary; its tiles' partial results are folded by one pass each."""
        part = Epilogue.of(problem)
        arguments, tile, ragged = self._row_arguments("forward", part, problem)
        arguments["lse"] = torch.empty_like(arguments["partials"])
        if part.argmax:
            arguments["argmax"] = torch.empty_like(arguments["lse"], dtype=torch.int64)
        self._run(forward_kernel(part, ragged), problem.x, problem.weight, None, arguments, tile)
        return self._folded(arguments, lambda: fold_lse(arguments["lse"]))

    def exp_chunk(self, problem: Problem, out: torch.Tensor) -> tuple[RowStatistics, torch.Tensor]:
        """Exponentials relative to their tile's maximum into out (n, V); statistics, and the maxima m (n, tiles)."""
        part, headroom = Epilogue.of(problem), exp_headroom(problem.x.dtype)
        arguments, tile, ragged = self._row_arguments(exp_kind(problem.options), part, problem)
        sums, maxima = arguments["partials"], torch.empty_like(arguments["partials"])
        arguments.update(sum_exp=sums, tile_max_out=maxima, tile_max=tile.tile_n)
        if part.argmax:
            arguments["is_max"] = torch.empty_like(sums)
        self._run(exp_kernel(part, ragged, headroom), problem.x, problem.weight, out, arguments, tile)
        maxima, _ = capped(part, maxima, arguments)
        if part.argmax:
            largest, first_tile = maxima.max(dim=1, keepdim=True)
            column = arguments["is_max"].gather(1, first_tile)  # NO_COLUMN if NaN
            arguments["best"] = (largest[:, 0], column[:, 0].long())
        return self._folded(arguments, lambda: fold_exp(maxima, sums, headroom)), maxima

    def scale_chunk(
        self,
        problem: Problem,
        e: torch.Tensor,
        tile_max: torch.Tensor,
        lse: torch.Tensor,
        rows: RowCoefficients,
        column_sums: bool,
    ) -> torch.Tensor | None:
        """Turns exponentials (n, V) into dz in place, the targets' own entries exact. column_sums: returns Σ_i dz."""
        if not self._launch:
            return torch.empty(problem.vocab, dtype=torch.float32, device=e.device) if column_sums else None
        return dz_of_exp(
            problem, e, tile_max, lse, rows, self.exp_tile(problem), exp_headroom(problem.x.dtype), column_sums
        )

    def _row_arguments(self, kernel: str, part: Epilogue, problem: Problem) -> tuple[dict, GemmTile, bool]:
        """(arguments, tile, ragged): operands and outputs that the kernels over the whole vocabulary share.

        "partials" is one (N, tiles) buffer, for the kernel's own sums.
        """
        tile, n = tile_of(kernel, problem.x), problem.tokens
        vector = {"dtype": torch.float32, "device": problem.device}
        tiles = -(-problem.vocab // tile.tile_n)
        values = _operand_values(part.forward_operands, problem, Tile(0, problem.vocab))
        values["target"] = vector_operand(problem.target.to(torch.int32))
        # A target in no tile, or one whose logit is −inf, is never written.
        values["target_logit"] = torch.full((n,), -torch.inf, **vector)
        values["partials"] = torch.empty(n, tiles, **vector)
        if part.smoothing:
            values["weighted_sum"] = torch.empty_like(values["partials"])
        return values, tile, problem.vocab % tile.tile_n != 0

    def _folded(self, arguments: dict, lse) -> RowStatistics:
        """Folds the partial results (N, tiles) over the tiles."""
        weighted_sum, (largest, column) = arguments.get("weighted_sum"), arguments.get("best", (None, None))
        if "argmax" in arguments:
            largest, column = OnlineArgmax.decoded(arguments["argmax"])
        return RowStatistics(
            lse=lse() if self._launch else arguments["target_logit"],
            target_logit=arguments["target_logit"],
            weighted_sum=None if weighted_sum is None else weighted_sum.sum(dim=1),
            argmax=column,
            max_logit=largest,
        )

    def _waves(self, kernel: str, problem: Problem) -> WaveModel:
        return _wave_model(problem.device, tile_of(kernel, problem.x))

    def dz_tile(
        self, problem: Problem, lse: torch.Tensor, coefficients: RowCoefficients, tile: Tile, out: torch.Tensor
    ) -> None:
        """Writes dz of the tile's columns into out (N, tile width), except the targets' own entries."""
        part = replace(Epilogue.of(problem), argmax=False)
        values = _operand_values(part.backward_operands, problem, tile)
        values.update(lse=lse, row_a=coefficients.a)
        if part.smoothing:
            values["row_c"] = coefficients.c
        gemm = tile_of("backward", problem.x)
        self._run(backward_kernel(part), problem.x, problem.weight[tile.columns], out, values, gemm)

    def _run(self, kernel, x, weight, out, arguments: dict, tile: GemmTile) -> None:
        """One GEMM on the tensors' device and its current stream, whatever the current device is."""
        x, weight = tma_operand(x), tma_operand(weight)
        arguments = {name: value for name, value in arguments.items() if name != "partials"}  # under its own name there
        with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext(), _one_at_a_time:
            try:
                kernel.gemm(x, weight, out, epi_args=arguments, _launch=self._launch, **tile.arguments())
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # CuTe DSL, the driver and the cache on disk each have errors of their own
                raise KernelFailure(_failure_text(error)) from error
        if self._after_first_launch is not None:
            then, self._after_first_launch = self._after_first_launch, None
            then()


# The first call from each of several threads may compile, and compiling is not known to be safe twice at once.
_one_at_a_time = threading.RLock()


def _failure_text(error: Exception) -> str:
    return (
        f"a CuTe kernel could not be compiled or launched ({type(error).__name__}: {str(error)[:300]}). See what is "
        f"installed with `python -m liger_cutedsl`; QUACK_CACHE_DIR=FOLDER starts with an empty kernel cache, and "
        f"LIGER_CUTEDSL_ENGINE=triton does without these kernels"
    )


def exp_kind(options: LossOptions) -> str:
    """The name of exp_chunk's tile in architectures.py."""
    with_options = options.softcap is not None or options.smoothing or options.needs_argmax
    return "exp-options" if with_options else "exp"


def tma_operand(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself where TMA can read it: rows contiguous, address and row stride multiples of 16 bytes."""
    size = matrix.element_size()
    row_stride = matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]
    readable = (
        matrix.stride(1) == 1
        and row_stride * size % ROW_ALIGNMENT == 0
        and row_stride >= matrix.shape[1]
        and matrix.data_ptr() % ROW_ALIGNMENT == 0
    )
    return matrix if readable else matrix.clone(memory_format=torch.contiguous_format)


def vector_operand(vector: torch.Tensor) -> torch.Tensor:
    """The vector itself where its elements are contiguous and its address is a multiple of 16 bytes, as the kernels
    were compiled for; else a copy."""
    readable = vector.is_contiguous() and vector.data_ptr() % ROW_ALIGNMENT == 0
    return vector if readable else vector.clone(memory_format=torch.contiguous_format)


def _operand_values(names, problem: Problem, tile: Tile) -> dict:
    """The row vectors and scalars among an epilogue's operands."""
    values = {}
    for name in ("bias", "ce_weight"):
        if name in names:
            values[name] = vector_operand(getattr(problem, name)[tile.columns])
    if "softcap" in names:
        values["softcap"] = float(problem.options.softcap)
        values["inverse_softcap"] = 1.0 / problem.options.softcap
    return values


def tile_of(kernel: str, tensor: torch.Tensor) -> GemmTile:
    return architecture_of(tensor.device).tile(kernel)


def architecture_of(device: torch.device) -> Architecture:
    """The device's row, or that of QUACK_ARCH's architecture, where it is set: there need not be a GPU then."""
    return to_compile_for(get_device_capacity(device))


@functools.cache
def _wave_model(device: torch.device, tile: GemmTile) -> WaveModel:
    return WaveModel(multiprocessors(device), tile.tile_m, tile.tile_n, architecture_of(device).calibration)

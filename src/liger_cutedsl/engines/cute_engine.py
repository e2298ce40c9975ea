"""The CuTe engine: the same primitives as the torch engine, on quack's tensor-core GEMMs (Hopper, Blackwell)."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import torch

from liger_cutedsl.engines.cute_kernels import GemmTile, backward_kernel, forward_kernel, gemm_tile
from liger_cutedsl.engines.cute_ops import OnlineArgmax
from liger_cutedsl.engines.triton_kernels import fold_lse
from liger_cutedsl.epilogues import Epilogue
from liger_cutedsl.objective import RowCoefficients, RowStatistics
from liger_cutedsl.problem import Problem
from liger_cutedsl.schedules.tiling import Tile, WaveModel

# Columns of a vocabulary tile. Wider than this, tiles gain nothing measurable and only take memory; narrower, the
# GEMMs of a tile no longer fill the machine, and dX's accumulator dwarfs what would be saved.
WIDEST_TILE, NARROWEST_TILE = 13056, 1024
ROW_ALIGNMENT = 16  # bytes: what the copy engine (TMA) wants of addresses and row strides


class CuteEngine:
    """launch: False compiles the kernels and leaves results undefined (python -m liger_cutedsl compile)."""

    name = "cute"

    def __init__(self, launch: bool = True):
        self._launch = launch

    def dz_dtype(self, problem: Problem) -> torch.dtype:
        return problem.x.dtype

    def column_bytes(self, problem: Problem) -> int:
        """Workspace a column of a vocabulary tile takes: dz, and for fp16 a row of dW in fp32 (see recompute.py)."""
        fp32_row = 4 * problem.hidden if problem.x.dtype == torch.float16 else 0
        return problem.x.dtype.itemsize * problem.tokens + fp32_row

    def tile_width(self, problem: Problem, fitting: int) -> int:
        """The width for which the tile's GEMMs fill the GPU best, among those that fit."""
        gemm = tile_of("backward", problem.x)
        widest = min(max(fitting, NARROWEST_TILE), WIDEST_TILE)
        waves = WaveModel(_multiprocessors(problem.device), gemm.tile_m, gemm.tile_n)
        return waves.best_width(problem.vocab, problem.tokens, problem.hidden, widest)

    def forward_bytes(self, problem: Problem, tile_width: int) -> int:
        """The partial results of the forward reductions."""
        tiles = -(-problem.vocab // tile_of("forward", problem.x).tile_n)
        options = problem.options
        return problem.tokens * tiles * (4 + 4 * options.smoothing + 8 * options.needs_argmax)

    def gemm_operand(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix

    def row_statistics(self, problem: Problem, tile_width: int) -> RowStatistics:
        """One GEMM over the whole vocabulary; its tiles' partial results are folded by torch."""
        part = Epilogue.of(problem)
        x, weight = tma_operand(problem.x), tma_operand(problem.weight)
        tile = tile_of("forward", x)
        n, tiles = problem.tokens, -(-problem.vocab // tile.tile_n)

        def partials(dtype=torch.float32):
            return torch.empty(n, tiles, dtype=dtype, device=x.device)

        # A target in no tile, or one whose logit is −inf, is never written.
        sinks = {"lse": partials(), "target_logit": torch.full((n,), -torch.inf, device=x.device)}
        if part.smoothing:
            sinks["weighted_sum"] = partials()
        if part.argmax:
            sinks["argmax"] = partials(torch.int64)
        values = _operand_values(part.forward_operands, problem, Tile(0, problem.vocab))
        values["target"] = problem.target.to(torch.int32)
        kernel = forward_kernel(part, ragged=problem.vocab % tile.tile_n != 0)
        self._run(kernel, x, weight, None, {**values, **sinks}, tile)
        return self._folded(sinks)

    @staticmethod
    def _folded(sinks: dict) -> RowStatistics:
        """Folds the partial results (N, tiles) over the tiles, in one pass over each."""
        lse, argmax = torch.empty_like(sinks["target_logit"]), None
        if sinks["lse"].is_cuda:
            fold_lse(sinks["lse"], lse)
        weighted_sum = sinks["weighted_sum"].sum(dim=1) if "weighted_sum" in sinks else None
        if "argmax" in sinks:
            argmax = OnlineArgmax.column_of(sinks["argmax"])
        return RowStatistics(lse, sinks["target_logit"], weighted_sum, argmax)

    def dz_tile(
        self, problem: Problem, lse: torch.Tensor, coefficients: RowCoefficients, tile: Tile, out: torch.Tensor
    ) -> None:
        """Writes dz of the tile's columns into out (N, tile width), except the targets' own entries."""
        part = replace(Epilogue.of(problem), argmax=False)
        if not part.smoothing:
            part = replace(part, ce_weight=False)
        x, weight = tma_operand(problem.x), tma_operand(problem.weight[tile.columns])
        values = _operand_values(part.backward_operands, problem, tile)
        values.update(lse=lse, row_a=coefficients.a)
        if part.smoothing:
            values["row_c"] = coefficients.c
        self._run(backward_kernel(part), x, weight, out, values, tile_of("backward", x))

    def _run(self, kernel, x, weight, out, arguments: dict, tile: GemmTile) -> None:
        """One GEMM on the tensors' device and its current stream, whatever the current device is."""
        with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
            kernel.gemm(x, weight, out, epi_args=arguments, _launch=self._launch, **tile.arguments())


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


def _operand_values(names, problem: Problem, tile: Tile) -> dict:
    """The row vectors and scalars among an epilogue's operands."""
    values = {}
    for name in ("bias", "ce_weight"):
        if name in names:
            vector = getattr(problem, name)[tile.columns]
            values[name] = vector if vector.data_ptr() % ROW_ALIGNMENT == 0 else vector.clone()
    if "softcap" in names:
        values["softcap"] = float(problem.options.softcap)
        values["inverse_softcap"] = 1.0 / problem.options.softcap
    return values


def tile_of(kernel: str, tensor: torch.Tensor) -> GemmTile:
    """A kernel's tile on the tensor's device, or on QUACK_ARCH's architecture where there is no GPU."""
    from quack.cute_dsl_utils import get_device_capacity

    return gemm_tile(kernel, get_device_capacity(tensor.device)[0])


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

"""Exponentials of the first columns that `recompute` keeps until backward: how many, where, and that they are there."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import ClassVar

import torch

from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.options import LogProbOptions
from liger_cutedsl.schedules import footprint
from liger_cutedsl.tiling import ROW_MULTIPLE

ALIGNMENT = 128  # bytes, of the first exponential in dW's memory: TMA wants 16, a cache line has 128


class Waiting:
    """Memory of exponentials that wait for their backward: so many bytes on a device, or where dW will be.

    taken: whether backward has them, once and for all; shared by a state and its copies.
    """

    _all: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self, device: torch.device, size: int, lends_dw: bool):
        self.device, self.size, self.lends_dw, self.taken = device, size, lends_dw, False

    @classmethod
    def of(cls, e: torch.Tensor, weight_gradient: torch.Tensor | None) -> Waiting:
        lent = weight_gradient is not None
        waiting = cls(e.device, 0 if lent else e.numel() * e.itemsize, lent)
        cls._all.add(waiting)
        return waiting

    def end(self) -> None:
        self.taken = True
        self._all.discard(self)

    @classmethod
    def forget(cls) -> None:
        """As if none waited."""
        cls._all.clear()

    @classmethod
    def on(cls, device: torch.device) -> tuple[int, bool]:
        """(bytes, whether some lie where a dW will be) of all that wait on a device."""
        those = [waiting for waiting in cls._all if waiting.device == device]
        return sum(waiting.size for waiting in those), any(waiting.lends_dw for waiting in those)


@dataclass
class KeptExponentials:
    """exp(z − tile maximum) of the first columns: e (N, kept), maxima (N, tiles); dW (V, H) if e lies in its memory.

    waiting: says that they are there, until they are taken.
    """

    e: torch.Tensor
    maxima: torch.Tensor
    weight_gradient: torch.Tensor | None
    waiting: Waiting


def kept_columns(engine, problem: Problem, wanted: WantedGradients, budget: int) -> int:
    """How many columns' exponentials are kept: V where they fit the budget (bytes), else what dW's memory holds.

    Of log-probabilities, whose callers make several calls before a backward (two losses in a step, a pipeline): those
    that wait count against the budget, and the dW of one call at a time is there before its backward. Not in a dW that
    is added to the caller's buffer, which holds something already. None for fp16,
    whose dW goes through a float32 copy that would be as large as what is saved.
    """
    e_dtype = engine.dz_dtype(problem.gemm_dtype)
    if not wanted or e_dtype == torch.float16 or problem.tokens == 0 or problem.options.needs_slope_apart:
        return 0
    waiting, lent = Waiting.on(problem.device) if isinstance(problem.options, LogProbOptions) else (0, False)
    if footprint.exponentials_bytes(engine, problem, wanted, problem.tokens) <= budget - waiting:
        return problem.vocab
    if wanted.weight is None or lent or problem.weight_grad_buffer is not None:
        return 0
    row, column = problem.hidden * wanted.weight.itemsize, problem.tokens * e_dtype.itemsize
    fitting = max(0, problem.vocab * row - 2 * ALIGNMENT) // (row + column)
    multiple = engine.exp_tile(problem) if fitting >= engine.exp_tile(problem) else ROW_MULTIPLE
    return fitting // multiple * multiple


def exponentials_buffer(problem: Problem, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised (rows, V), its rows at multiples of 16 bytes, as the copy engine (TMA) wants."""
    width = -(-problem.vocab // ROW_MULTIPLE) * ROW_MULTIPLE
    return torch.empty(rows, width, dtype=dtype, device=problem.device)[:, : problem.vocab]


def end_of(matrix: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A (rows, columns) matrix of another dtype in the last bytes of a contiguous one."""
    memory, size = matrix.view(-1).view(torch.uint8), rows * columns * dtype.itemsize
    start = (memory.numel() - size) // ALIGNMENT * ALIGNMENT
    return memory[start : start + size].view(dtype).view(rows, columns)

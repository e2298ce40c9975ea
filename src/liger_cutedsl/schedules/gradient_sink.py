"""Where `recompute`'s dz goes: dX, summed over the tiles of a block of rows, dW and db, over blocks."""

from __future__ import annotations

from dataclasses import replace

import torch

from liger_cutedsl import gemm
from liger_cutedsl.call import Gradients, Problem
from liger_cutedsl.gemm import matmul
from liger_cutedsl.schedules import selected
from liger_cutedsl.schedules.schedule import Task
from liger_cutedsl.tiling import Tile


class GradientSink:
    """Turns tiles of dz into dX, dW and db: times alpha, and times unscale, a scalar tensor, where there is one.

    Tiles come in ascending order, of one block of rows after another (begin). dX of a block is summed in the compute
    dtype; dW and db are written by the first block and added to by the others, db in the compute dtype.

    summed: how many rows' dX is complete, or on its way over the ranks.
    buffer: of the caller's, to which dW is added; its gradient is None then.  lent: dW, where there is memory for it.
    one_product: whether dX is one product, which its own dtype takes as it is.  in_blocks: whether there are several.
    """

    def __init__(
        self,
        engine,
        problem: Problem,
        task: Task,
        *,
        alpha: float,
        unscale: torch.Tensor | None,
        selected_dz: torch.Tensor | None,
        lent: torch.Tensor | None,
        one_product: bool,
        in_blocks: bool,
    ):
        self.engine, self.problem, self.split, self.wanted = engine, problem, task.split, task.wanted
        self.alpha, self.unscale, self.selected_dz, self.summed = alpha, unscale, selected_dz, 0
        self.buffer = problem.weight_grad_buffer if task.wanted.weight is not None else None
        compute, returned = problem.compute_dtype, task.returned
        self.dx_sum = returned.x if one_product else returned.x and compute
        # dX of all rows is summed as a whole; its own dtype comes last
        sums = replace(returned, bias=returned.bias and compute) if in_blocks else replace(returned, x=self.dx_sum)
        self.gradients = (sums if lent is None else replace(sums, weight=None)).allocate(problem)
        if lent is not None:
            self.gradients = replace(self.gradients, weight=lent)
        self._dx = self._pending = None
        self._added = 0  # rows of dW to which the blocks before have added

    def begin(self, rows: slice, part: Problem) -> None:
        """The tiles that come are of these rows: part, as the kernels read it."""
        self._added = 0 if rows.start == 0 else self._added + part.vocab
        self.rows, self.part = rows, part
        self.x = self.engine.gemm_operand(part.x) if self.wanted.weight is not None else None
        if part.vocab == 0 and self.wanted.x is not None:  # no tile comes
            self._begin_dx().zero_()
            self._dx_is_complete()

    def add(self, dz: torch.Tensor, tile: Tile, column_sums: torch.Tensor | None = None, weight=None) -> None:
        """weight: the tile's rows as they are multiplied, where they are there."""
        grads = self.gradients
        if self.wanted.x is not None:
            self._add_to_dx(dz, tile, weight)
        if grads.weight is not None:
            self._write(grads.weight[tile.columns], dz, beta=float(self.rows.start > 0))
        if self.buffer is not None:
            self._add_to_buffer(dz, tile)
        if grads.bias is not None:
            if column_sums is None:
                column_sums = gemm.column_sums(dz, self.problem.compute_dtype)
            sums, db = column_sums if self.unscale is None else column_sums * self.unscale, grads.bias[tile.columns]
            if self.rows.start:
                db.add_(sums, alpha=self.alpha)
            else:
                torch.mul(sums, self.alpha, out=db)

    def finish(self) -> Gradients:
        self._settle()
        grads = self.gradients
        if self.selected_dz is not None:
            self._add_selected(grads)
            if self.buffer is not None and self.buffer.lacks_selected:
                self._add_selected(Gradients(weight=self.buffer.tensor))
                self.buffer.selected_added()
        # dW is what is wanted, or was added to the caller's buffer
        return grads.each(lambda gradient, dtype: gradient.to(dtype), self.wanted)

    def _add_to_dx(self, dz: torch.Tensor, tile: Tile, weight: torch.Tensor | None) -> None:
        weight = self.part.weight[tile.columns].to(self.part.x.dtype) if weight is None else weight
        dx = self._begin_dx() if tile.start == 0 else self._dx
        matmul(dz, self.engine.gemm_operand(weight), out=dx, beta=float(tile.start > 0), alpha=self.alpha)
        if tile.stop == self.part.vocab:
            if self.selected_dz is not None:
                selected.add_dx(self.engine, self.part, self.selected_dz[self.rows], dx, self.alpha)
            self._dx_is_complete()

    def _begin_dx(self) -> torch.Tensor:
        """Where the block's dX is summed: in its rows of dX itself, where these are as wide."""
        self._settle()
        rows = self.gradients.x[self.rows]
        self._dx = rows if rows.dtype == self.dx_sum else torch.empty_like(rows, dtype=self.dx_sum)
        return self._dx

    def _dx_is_complete(self) -> None:
        """Other ranks' shares are added under the products that follow: the next block's first dz among them."""
        if self.unscale is not None:
            self._dx.mul_(self.unscale)
        self._pending = self.split.add_dx(self._dx)
        self.summed = self.rows.stop
        if self._pending is None:
            self._settle()

    def _settle(self) -> None:
        """Waits for a block's sum over the ranks, and writes it in dX's own dtype."""
        if self._dx is None:
            return
        if self._pending is not None:
            self._pending.wait()
        rows = self.gradients.x[self.summed - len(self._dx) : self.summed]
        if rows.dtype != self._dx.dtype:
            rows.copy_(self._dx)
        self._dx = self._pending = None

    def _add_selected(self, gradients: Gradients) -> None:
        factor = self.alpha if self.unscale is None else self.alpha * self.unscale
        selected.add_dw(self.engine, self.problem, self.selected_dz, gradients, factor)

    def _add_to_buffer(self, dz: torch.Tensor, tile: Tile) -> None:
        """What an attempt before this one has not added."""
        rows = self.buffer.rest(self._added + tile.start, self._added + tile.stop)
        first = rows.start - self._added
        if first < tile.stop:
            self._write(self.buffer.tensor[first : tile.stop], dz[:, first - tile.start :], beta=1.0)
        self.buffer.added(rows.stop)

    def _write(self, out: torch.Tensor, dz: torch.Tensor, beta: float) -> None:
        """out = beta·out + dzᵀ·x: directly, or through fp32 where the scale of fp16 has to come off first."""
        if self.unscale is None:
            matmul(dz.t(), self.x, out=out, beta=beta, alpha=self.alpha)
            return
        wide = torch.empty_like(out, dtype=torch.float32)
        matmul(dz.t(), self.x, out=wide, alpha=self.alpha).mul_(self.unscale)
        out.add_(wide) if beta else out.copy_(wide)

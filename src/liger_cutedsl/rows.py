"""Rows: which rows of a call count. Ignored ones are dropped before the first GEMM and put back after the last."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from liger_cutedsl.problem import Gradients, Problem


@dataclass(frozen=True)
class Rows:
    """keep, drop: (n_valid,) and (N − n_valid,) int64 indices in ascending order; both None where every row is kept."""

    keep: torch.Tensor | None = None
    drop: torch.Tensor | None = None

    def compact(self, problem: Problem) -> Problem:
        if self.keep is None:
            return problem
        return replace(problem, x=problem.x[self.keep], target=problem.target[self.keep], dense=True)

    def spread(self, values: torch.Tensor | None, fill) -> torch.Tensor | None:
        """Per-row results (n_valid, …) in the places of their rows (N, …), fill elsewhere. Scalars stay."""
        if self.keep is None or values is None or values.dim() == 0:
            return values
        full = values.new_empty(len(self.keep) + len(self.drop), *values.shape[1:])
        return full.index_copy_(0, self.keep, values).index_fill_(0, self.drop, fill)

    def spread_gradients(self, gradients: Gradients) -> Gradients:
        return replace(gradients, x=self.spread(gradients.x, 0.0))


def select_rows(problem: Problem) -> tuple[Problem, Rows]:
    """Checks the targets, and leaves the rows that count: the problem to compute, and where its rows belong.

    The only read of device memory in a call: how many targets are valid, the least and the greatest of them. None
    while a CUDA graph is being captured, where reads are not allowed; then rows are masked instead of dropped.

    Raises ValueError for a target that is neither ignore_index nor in [0, V).
    """
    target, ignore_index = problem.target, problem.options.ignore_index
    if problem.tokens == 0:
        return replace(problem, dense=True), Rows()
    if target.is_cuda and torch.cuda.is_current_stream_capturing():
        return problem, Rows()
    n_valid, low, high = _summary(target, ignore_index)
    if n_valid and (low < 0 or high >= problem.vocab):
        raise ValueError(
            f"target must hold class indices in [0, {problem.vocab}) or ignore_index={ignore_index}, got "
            f"{low if low < 0 else high} for a weight of {problem.vocab} rows"
        )
    if n_valid == problem.tokens:
        return replace(problem, dense=True), Rows()
    order = torch.argsort((target == ignore_index).to(torch.uint8), stable=True)
    rows = Rows(order[:n_valid], order[n_valid:])
    return rows.compact(problem), rows


def _summary(target: torch.Tensor, ignore_index: int) -> tuple[int, int, int]:
    """(count, least, greatest) of the targets that are not ignore_index; least and greatest mean nothing at count 0."""
    if target.is_cuda:
        from liger_cutedsl.engines.triton_kernels import summarize_targets

        return tuple(summarize_targets(target, ignore_index).tolist())
    valid = target[target != ignore_index]
    if not valid.numel():
        return 0, 0, 0
    return valid.numel(), int(valid.min()), int(valid.max())

"""Rows: which rows of a call count. Ignored ones are dropped before the first GEMM and put back after the last."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from liger_cutedsl.call import Gradients, Problem
from liger_cutedsl.without_data import refuse_without_data


@dataclass(frozen=True)
class Rows:
    """keep, drop: (n_valid,) and (N − n_valid,) int64 indices in ascending order; both None where every row is kept.

    masked: (N,) bool, rows that are kept though they are ignored, because their number is not known; or None.
    """

    keep: torch.Tensor | None = None
    drop: torch.Tensor | None = None
    masked: torch.Tensor | None = None

    def compact(self, problem: Problem) -> Problem:
        if self.masked is not None:  # a zero coefficient does not undo NaN in a hidden state: 0·NaN would reach dW
            return replace(problem, x=problem.x.masked_fill(self.masked[:, None], 0.0))
        if self.keep is None:
            return problem
        return replace(problem.of(self.keep), dense=True)

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """The kept rows of per-row values (N, …), the opposite of spread. Scalars stay."""
        return values if self.keep is None or values.dim() == 0 else values[self.keep]

    def spread(self, values: torch.Tensor | None, fill) -> torch.Tensor | None:
        """Per-row results (n_valid, …) in the places of their rows (N, …), fill elsewhere. Scalars stay."""
        if self.keep is None or values is None or values.dim() == 0:
            return values
        full = values.new_empty(len(self.keep) + len(self.drop), *values.shape[1:])
        return full.index_copy_(0, self.keep, values).index_fill_(0, self.drop, fill)

    def spread_results(self, results: NamedTuple, fills: NamedTuple) -> NamedTuple:
        """Results in the places of their rows, with those of an ignored row in the others'."""
        return type(results)(*(self.spread(value, fill) for value, fill in zip(results, fills, strict=True)))

    def select_upstream(self, upstream: NamedTuple) -> NamedTuple:
        """Gradients of results, None for none, of the kept rows."""
        return type(upstream)(*(None if g is None else self.select(g) for g in upstream))

    def spread_gradients(self, gradients: Gradients) -> Gradients:
        return replace(gradients, x=self.spread(gradients.x, 0.0))


class NotDense(Exception):
    """Some targets turned out to be ignored, in a call that had begun as if none were."""


class TargetCheck:
    """The only read of device memory in a call: how many targets are valid, the least and the greatest of them.

    It is asked for when this is made, and waited for in rows(). A training loop ignores some targets in every step or
    in none; so where the last call on the device ignored none, likely_dense says that the GPU may start on all rows
    meanwhile, and confirm_dense() waits for the answer behind the first GEMM.
    """

    _ignored_last_time: dict[torch.device, bool] = {}  # noqa: RUF012

    def __init__(self, problem: Problem, vocab: int | None = None):
        """vocab: the size targets are checked against, where it is not problem's own. Raises TypeError for tensors
        without data."""
        refuse_without_data(problem)
        self.problem, self._vocab = problem, problem.vocab if vocab is None else vocab
        target, ignore_index = problem.target, problem.options.ignore_index
        self._host = self._host_selected = self._ready = None
        # No reads while a CUDA graph is being captured: rows are masked then, instead of dropped.
        self.readable = problem.tokens > 0 and not (target.is_cuda and torch.cuda.is_current_stream_capturing())
        if not self.readable:
            return
        selected = problem.selected_token_ids
        if not target.is_cuda:
            self._host = _summary(target[~problem.ignored()])
            self._host_selected = None if selected is None else _summary(selected)
            return
        from liger_cutedsl.triton_kernels import summarize_targets

        self._host = _pinned_slots()[next(_next_slot) % 1024]
        with torch.cuda.device(target.device):
            summarize_targets(target, ignore_index, self._host)
            if selected is not None and selected.numel():
                self._host_selected = _pinned_slots()[next(_next_slot) % 1024]
                summarize_targets(selected, _NO_ID, self._host_selected)
            self._ready = torch.cuda.Event()
            self._ready.record()

    @property
    def likely_dense(self) -> bool:
        return self._ready is not None and not self._ignored_last_time.get(self.problem.device, True)

    def confirm_dense(self) -> None:
        """Raises NotDense where a target is ignored; ValueError as rows() does."""
        if self._count() != self.problem.tokens:
            raise NotDense

    def rows(self) -> Rows:
        """Raises ValueError for a target that is neither ignore_index nor in [0, V)."""
        if not self.readable:
            return Rows(masked=self.problem.ignored() if self.problem.tokens else None)
        n_valid = self._count()
        if n_valid == self.problem.tokens:
            return Rows()
        order = torch.argsort(self.problem.ignored().to(torch.uint8), stable=True)
        return Rows(order[:n_valid], order[n_valid:])

    def compact(self, rows: Rows) -> Problem:
        dense = rows.keep is not None or self.readable or self.problem.tokens == 0
        return replace(rows.compact(self.problem), dense=dense)

    def _count(self) -> int:
        problem, ignore_index, vocab = self.problem, self.problem.options.ignore_index, self._vocab
        if self._ready is not None:
            self._ready.synchronize()
        n_valid, low, high = (int(v) for v in self._host)
        if n_valid and (low < 0 or high >= vocab):
            raise ValueError(
                f"target must hold class indices in [0, {vocab}) or ignore_index={ignore_index}, got "
                f"{low if low < 0 else high} for a vocabulary of {vocab}"
            )
        count, low, high = (0, 0, 0) if self._host_selected is None else (int(v) for v in self._host_selected)
        if count and (low < 0 or high >= vocab):
            raise ValueError(
                f"selected_token_ids must lie in [0, {vocab}), the vocabulary, got {low if low < 0 else high}"
            )
        self._ignored_last_time[problem.device] = n_valid != problem.tokens
        return n_valid


@functools.cache
def _pinned_slots() -> tuple[torch.Tensor, ...]:
    """Page-locked (3,) int64 tensors. Allocating one costs more than everything else a check does, so they go round:
    each belongs to its call until 1024 others were given out."""
    return torch.empty(1024, 3, dtype=torch.int64, device="cpu", pin_memory=True).unbind()


_next_slot = itertools.count()
_NO_ID = -(2**62)  # none of selected_token_ids, which are all looked at


def _summary(valid: torch.Tensor) -> tuple[int, int, int]:
    """(count, least, greatest) of targets; least and greatest mean nothing at count 0."""
    if not valid.numel():
        return 0, 0, 0
    return valid.numel(), int(valid.min()), int(valid.max())

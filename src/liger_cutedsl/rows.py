"""Rows: which rows of a call count. Few ignored ones are computed like the others, with coefficients of zero; where
they are many they are dropped before the first GEMM and put back after the last."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from liger_cutedsl.call import Gradients, Problem
from liger_cutedsl.without_data import refuse_without_data

# Up to this share of ignored rows they are masked: computing them costs less than gathering x, spreading dX and waiting
# for their number before the first GEMM does, and no memory.
MASKED_SHARE = 0.03

# A zero coefficient does not undo NaN: rows that hold anything beyond this, in any feature, are dropped. The logits of
# all others are numbers, and so close to what a second GEMM finds that exp of the difference is one, too: with H = 8192
# and |W| ≤ 1 they are below 2²⁷, where float32 has a spacing of 8.
LARGEST_MASKED = 2.0**14


@dataclass(frozen=True)
class Rows:
    """keep, drop: (n_valid,) and (N − n_valid,) int64 indices in ascending order; both None where no row is dropped.

    zeroed: (N,) bool, ignored rows that nobody has looked at, because nothing can be read: they are zeros in a copy of
        x. Or None.
    """

    keep: torch.Tensor | None = None
    drop: torch.Tensor | None = None
    zeroed: torch.Tensor | None = None

    def compact(self, problem: Problem) -> Problem:
        if self.zeroed is not None:  # 0·NaN would reach dW
            return replace(problem, x=problem.x.masked_fill(self.zeroed[:, None], 0.0))
        if self.keep is None:
            return problem
        return replace(problem.of(self.keep), dense=True)

    @property
    def dropped(self) -> int:
        return 0 if self.drop is None else len(self.drop)

    def bytes(self, problem: Problem) -> int:
        """What compact() allocates for all rows of a call."""
        if self.zeroed is None and self.keep is None:
            return 0
        rows = problem.tokens if self.keep is None else len(self.keep)
        indices = 0 if self.keep is None else problem.tokens * 8 + rows * problem.target.itemsize
        return rows * problem.hidden * problem.x.itemsize + indices

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """The kept rows of per-row values (N, …), the opposite of spread. Scalars stay."""
        return values if self.keep is None or values.dim() == 0 else values[self.keep]

    def spread(self, values: torch.Tensor | None, fill) -> torch.Tensor | None:
        """Per-row results (n_valid, …) in the places of their rows (N, …), fill elsewhere. Scalars stay. A tuple of
        such: 0 elsewhere."""
        if isinstance(values, tuple):
            return tuple(self.spread(value, 0) for value in values)
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


class TooManyIgnored(Exception):
    """A call that had begun with all rows has to drop some: many targets are ignored, or few whose rows of x hold what
    a zero coefficient does not undo."""


class TargetCheck:
    """The only read of device memory in a call: how many targets are valid, the least and the greatest of them, and
    whether the rows of the others can be masked. A problem that is known to be dense is not read: its targets are taken
    as they are, and one outside of [0, V) belongs to no column, on any engine.

    It is asked for when this is made, and waited for in rows(). A training loop ignores about as many targets in every
    step; so where no row of the last call on the device was dropped, likely_whole says that the GPU may start on all
    rows meanwhile, and confirm_whole() waits for the answer behind the first GEMM. What is computed does not depend on
    that guess: coefficients come behind the first GEMM, and know the number of rows that count.
    """

    _dropped_last_time: dict[torch.device, bool] = {}  # noqa: RUF012

    def __init__(self, problem: Problem, vocab: int | None = None):
        """vocab: the size targets are checked against, where it is not problem's own. Raises TypeError for tensors
        without data."""
        refuse_without_data(problem)
        self.problem, self._vocab = problem, problem.vocab if vocab is None else vocab
        self._summary = self._host = self._host_selected = self._ready = None
        self._selected = (0, 0, 0)  # the same of selected_token_ids: how many, the least and the greatest
        target, selected = problem.target, problem.selected_token_ids
        self._trusted = problem.dense and selected is None
        # No reads while a CUDA graph is being captured: rows are zeroed then, in a copy of x.
        capturing = target.is_cuda and torch.cuda.is_current_stream_capturing()
        self.readable = problem.tokens > 0 and not self._trusted and not capturing
        if not self.readable:
            return
        if not target.is_cuda:
            self._summary = _summary(problem)
            if selected is not None and selected.numel():
                self._selected = selected.numel(), int(selected.min()), int(selected.max())
            return
        from liger_cutedsl.triton_kernels import summarize_targets

        self._host = _pinned_slots()[next(_next_slot) % SLOTS]
        with torch.cuda.device(target.device):
            summarize_targets(target, problem.options.ignore_index, problem.x, LARGEST_MASKED, self._host)
            if selected is not None and selected.numel():
                self._host_selected = _pinned_slots()[next(_next_slot) % SLOTS]
                summarize_targets(selected, _NO_ID, problem.x[:0], LARGEST_MASKED, self._host_selected)
            self._ready = torch.cuda.Event()
            self._ready.record()

    @property
    def likely_whole(self) -> bool:
        return self._ready is not None and not self._dropped_last_time.get(self.problem.device, True)

    def whole(self) -> Problem:
        """The problem for a call that begins with all rows, before anything is known."""
        return replace(self.problem, dense=False, count=self.count)

    def confirm_whole(self) -> None:
        """Raises TooManyIgnored where rows are to be dropped; ValueError as rows() does."""
        if self._drops():
            raise TooManyIgnored

    def rows(self) -> Rows:
        """Raises ValueError for a target that is neither ignore_index nor in [0, V)."""
        if self._trusted:
            return Rows()
        if not self.readable:
            return Rows(zeroed=self.problem.ignored() if self.problem.tokens else None)
        if not self._drops():
            return Rows()
        order = torch.argsort(self.problem.ignored().to(torch.uint8), stable=True)
        n_valid = self.count()
        return Rows(order[:n_valid], order[n_valid:])

    def compact(self, rows: Rows) -> Problem:
        problem = rows.compact(self.problem)
        if rows.keep is not None or self.problem.tokens == 0 or self._trusted:
            return replace(problem, dense=True)
        if not self.readable:
            return replace(problem, dense=False, count=None)
        return replace(problem, dense=self.count() == problem.tokens, count=self.count)

    def count(self) -> int:
        """How many targets are valid. Waits for the device, once; raises ValueError as rows() does."""
        if self._summary is None:
            self._ready.synchronize()
            self._summary = _total(self._host)
            self._selected = self._selected if self._host_selected is None else _total(self._host_selected)[:3]
        n_valid, low, high, _ = self._summary
        if n_valid and (low < 0 or high >= self._vocab):
            raise ValueError(
                f"target must hold class indices in [0, {self._vocab}) or ignore_index="
                f"{self.problem.options.ignore_index}, got {low if low < 0 else high} for a vocabulary of {self._vocab}"
            )
        count, low, high = self._selected
        if count and (low < 0 or high >= self._vocab):
            raise ValueError(
                f"selected_token_ids must lie in [0, {self._vocab}), the vocabulary, got {low if low < 0 else high}"
            )
        return n_valid

    def _drops(self) -> bool:
        ignored = self.problem.tokens - self.count()
        drops = ignored > MASKED_SHARE * self.problem.tokens or self._summary[3] > 0
        self._dropped_last_time[self.problem.device] = drops
        return drops


# What a check reads: of each part of the rows, the number of valid targets, the least and the greatest of them, and how
# many of the ignored rows cannot be masked.
PARTS, SLOTS = 64, 1024


@functools.cache
def _pinned_slots() -> tuple[torch.Tensor, ...]:
    """Page-locked (PARTS, 4) int64 tensors. Allocating one costs more than everything else a check does, so they go
    round: each belongs to its call until SLOTS others were given out."""
    return torch.empty(SLOTS, PARTS, 4, dtype=torch.int64, device="cpu", pin_memory=True).unbind()


_next_slot = itertools.count()
_NO_ID = -(2**62)  # none of selected_token_ids, which are all looked at


def _total(parts: torch.Tensor) -> tuple[int, int, int, int]:
    """The summary of all rows, from those of their parts (PARTS, 4)."""
    count, low, high, unmaskable = zip(*parts.tolist(), strict=True)
    return sum(count), min(low), max(high), sum(unmaskable)


def _summary(problem: Problem) -> tuple[int, int, int, int]:
    """(count, least, greatest) of valid targets, and how many of the other rows cannot be masked. Least and greatest
    mean nothing at count 0."""
    ignored = problem.ignored()
    valid = problem.target[~ignored]
    unmaskable = 0
    if 0 < problem.tokens - len(valid) <= MASKED_SHARE * problem.tokens:  # else they are dropped anyway
        unmaskable = int((~(problem.x.detach()[ignored].abs() <= LARGEST_MASKED)).any(dim=1).sum())
    if not len(valid):
        return 0, 0, 0, unmaskable
    return len(valid), int(valid.min()), int(valid.max()), unmaskable

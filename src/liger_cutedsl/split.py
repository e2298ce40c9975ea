"""A vocabulary over ranks, as a guest of a schedule: what statistics and dX of some rows pass through, or nothing.

Each rank holds some rows of W, all hold x and the targets:

    forward   each rank reduces its own logits to row statistics; one all-gather of a few numbers a row; every rank
              folds them into the same loss
    backward  each rank computes dz of its own columns; its dW needs no one else; one all-reduce of dX in the compute
              dtype, under the products that follow

So dX is the single process's up to float32 rounding (float64 for float64 inputs); it is then written in x's dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from liger_cutedsl.call import Gradients, Problem, WantedGradients
from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.epilogues import EXACT_INDICES
from liger_cutedsl.objective import RowWeights, row_weights
from liger_cutedsl.row_statistics import RowStatistics, over_parts
from liger_cutedsl.rows import TargetCheck
from liger_cutedsl.shards import VocabShard


class Split(Protocol):
    """What a schedule asks about the share of the vocabulary that it computes.

    vocab: what targets are checked against beforehand; None for the weight's rows.  settled: whether the ranks know
    each other already, so that a call may begin before its targets are confirmed.
    """

    vocab: int | None
    settled: bool

    def local(self, problem: Problem) -> Problem:
        """The problem over this process's own columns; targets elsewhere are −1."""

    def combine(self, stats: RowStatistics, problem: Problem, local: Problem) -> tuple[RowStatistics, RowWeights]:
        """From the statistics of some rows over the local columns: those over the vocabulary, and the rows' weights.

        problem: these rows; local: the same over the local columns, as the kernels read them.
        """

    def failed(self, failure: KernelFailure, problem: Problem) -> None:
        """In place of combine, so that the other ranks do not wait for it. Raises where they go on without this one."""

    def failed_in_backward(self, failure: KernelFailure, problem: Problem, wanted: WantedGradients) -> None:
        """The same in place of add_dx."""

    def confirm(self, problem: Problem) -> None:
        """Refuses, on every rank, what could not be refused before combine. problem: all rows of the call."""

    sums_dx: bool

    def add_dx(self, dx: torch.Tensor):
        """Where sums_dx: begins the sum of dX over the ranks, in place, and returns what has wait(). Else None.

        dx: (rows, H) of any rows, in the compute dtype; NaN where a kernel failed.
        """

    def padded(self, gradients: Gradients, problem: Problem) -> Gradients:
        """Gradients of the local columns as those of the weight that the caller passed."""


class WholeVocabulary:
    """One process has it all."""

    vocab, settled, sums_dx = None, True, False

    def local(self, problem: Problem) -> Problem:
        return problem

    def combine(self, stats: RowStatistics, problem: Problem, local: Problem) -> tuple[RowStatistics, RowWeights]:
        return stats, row_weights(local)

    def failed(self, failure: KernelFailure, problem: Problem) -> None:
        pass

    def failed_in_backward(self, failure: KernelFailure, problem: Problem, wanted: WantedGradients) -> None:
        pass

    def confirm(self, problem: Problem) -> None:
        pass

    def add_dx(self, dx: torch.Tensor):
        return None

    def padded(self, gradients: Gradients, problem: Problem) -> Gradients:
        return gradients


WHOLE = WholeVocabulary()


_ALONE = (
    "a kernel failed on this rank of a split vocabulary, after all ranks had agreed on an engine; the others go on "
    "with NaN. LIGER_CUTEDSL_ENGINE=torch on all of them does without these kernels"
)


def over_ranks(group, vocab_start: int | None, vocab_size: int | None) -> Callable[[Problem], SplitVocabulary]:
    """What autograd.run asks for a process's share, of problems that hold its rows: as VocabShard.of places them."""
    return lambda problem: SplitVocabulary(VocabShard.of(problem, group, vocab_start, vocab_size))


class SplitVocabulary:
    """Rows [start, start + valid) of a vocabulary split over the ranks of a group, as a VocabShard says."""

    sums_dx = True

    def __init__(self, shard: VocabShard):
        self.shard, self.settled = shard, not shard.reads
        # before all ranks know the vocabulary none refuses a target alone
        self.vocab = sys.maxsize if shard.reads else shard.vocab

    def local(self, problem: Problem) -> Problem:
        ids, start = problem.selected_token_ids, self.shard.start
        moved = None if ids is None else ids - start
        shifted = replace(problem, target=problem.target - start, selected_token_ids=moved)
        return shifted.of_columns(slice(0, self.shard.valid))

    def combine(self, stats: RowStatistics, problem: Problem, local: Problem) -> tuple[RowStatistics, RowWeights]:
        if stats.argmax is not None:
            stats = replace(stats, argmax=stats.argmax + self.shard.start)
        vectors = {name: v.to(stats.lse.dtype) for name, v in stats.there().items()}
        chosen = vectors.pop("selected", stats.lse.new_empty(problem.tokens, 0))
        total = stats.lse.new_full((), float(self.shard.valid))
        if local.ce_weight is not None:
            own = local.ce_weight.index_select(0, local.target.long().clamp(min=0)) if local.vocab else 0.0
            vectors["target_weight"] = torch.where(local.target >= 0, own, torch.zeros_like(stats.lse))
            total = local.ce_weight.sum()
        numbers = torch.cat([torch.stack(list(vectors.values())), chosen.t()])
        known, totals, parts = self.shard.gathered(numbers, total)
        chosen = {} if stats.selected is None else {"selected": parts[:, len(vectors) :].transpose(1, 2)}
        parts = dict(zip(vectors, parts[:, : len(vectors)].unbind(1), strict=True)) | chosen
        target_weight = parts.pop("target_weight", None)
        stats = over_parts(RowStatistics(**parts))
        weights = row_weights(replace(problem, ce_weight=None))
        weights = replace(weights, vocab=self.shard.vocab, total_weight=float(self.shard.vocab))
        if target_weight is not None:
            weights = weights.with_classes(target_weight.sum(dim=0), totals.sum(), problem.options)
        return replace(stats, lse=torch.where(known, stats.lse, torch.nan)), weights

    def confirm(self, problem: Problem) -> None:
        shard = self.shard
        if self.settled:
            return
        TargetCheck(problem, vocab=shard.vocab).rows()
        # the ranks' indices travel in the compute dtype
        if problem.options.needs_argmax and shard.vocab > EXACT_INDICES and problem.compute_dtype == torch.float32:
            raise ValueError(f"vocab_size must be at most {EXACT_INDICES} for token metrics, got {shard.vocab}")

    def failed(self, failure: KernelFailure, problem: Problem) -> None:
        ids = problem.selected_token_ids
        count = len(RowStatistics.names(problem)) + (problem.ce_weight is not None) + (0 if ids is None else len(ids))
        nothing = torch.full((count, problem.tokens), torch.nan, dtype=problem.compute_dtype, device=problem.device)
        self.shard.gathered(nothing, nothing.new_zeros(()), failed=True)  # raises until an engine is agreed upon
        raise RuntimeError(f"{_ALONE}: {failure}") from failure

    def failed_in_backward(self, failure: KernelFailure, problem: Problem, wanted: WantedGradients) -> None:
        if wanted.x is not None:
            self.add_dx(torch.full_like(problem.x, torch.nan, dtype=problem.compute_dtype)).wait()
        raise RuntimeError(f"{_ALONE}: {failure}") from failure

    def add_dx(self, dx: torch.Tensor):
        return self.shard.sum_over_ranks(dx)

    def padded(self, gradients: Gradients, problem: Problem) -> Gradients:
        rows = problem.vocab - self.shard.valid
        if not rows:
            return gradients
        weight, bias = (
            None if g is None else torch.cat([g, g.new_zeros(rows, *g.shape[1:])])
            for g in (gradients.weight, gradients.bias)
        )
        return replace(gradients, weight=weight, bias=bias)

"""A vocabulary over ranks, as a guest of a schedule: what statistics and dX of some rows pass through, or nothing.

Each rank holds some rows of W, all hold x and the targets:

    forward   each rank reduces its own logits to row statistics; one all-gather of a few numbers a row; every rank
              folds them into the same loss
    backward  each rank computes dz of its own columns; its dW needs no one else; one all-reduce of dX in the compute
              dtype, under the products that follow

So dX is the single process's up to float32 rounding (float64 for float64 inputs); it is then written in x's dtype.

A schedule that goes by chunks of tokens has a gather and a sum for each of them, under its products (rounds.py). How
many tokens a chunk has, and that all ranks go by chunks, they tell each other with the sizes of their shards.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from liger_cutedsl.call import Gradients, Problem, WantedGradients
from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.epilogues import EXACT_INDICES
from liger_cutedsl.objective import RowWeights, row_weights
from liger_cutedsl.rounds import Rounds
from liger_cutedsl.route import Settings
from liger_cutedsl.row_statistics import RowStatistics, over_parts
from liger_cutedsl.rows import TargetCheck
from liger_cutedsl.shards import REFUSED, ChangedAlone, VocabShard
from liger_cutedsl.tiling import TILE_QUANTUM, slices


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

    def failed_in_backward(
        self, failure: KernelFailure, problem: Problem, wanted: WantedGradients, block: int = 0
    ) -> None:
        """The same in place of add_dx, of the problem's rows: so many at a time, or all at once for 0."""

    def refused(self, problem: Problem) -> None:
        """The same for a call that cannot run as it was asked for, before anything of it ran: the others refuse it."""

    def confirm(self, problem: Problem) -> None:
        """Refuses, on every rank, what could not be refused before combine. problem: all rows of the call."""

    # Whether others have their shares too. Then it has what SplitVocabulary has for a schedule that goes by chunks.
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

    def failed_in_backward(
        self, failure: KernelFailure, problem: Problem, wanted: WantedGradients, block: int = 0
    ) -> None:
        pass

    def refused(self, problem: Problem) -> None:
        pass

    def confirm(self, problem: Problem) -> None:
        pass

    def add_dx(self, dx: torch.Tensor):
        return None

    def padded(self, gradients: Gradients, problem: Problem) -> Gradients:
        return gradients


WHOLE = WholeVocabulary()


class PlannedShare(WholeVocabulary):
    """A rank's share for a plan alone, without a group: as if its weight were the share, and all budgets its own."""

    vocab, sums_dx = sys.maxsize, True

    def chunk_limit(self, fitting: Callable[[], int]) -> int:
        return fitting()


_ALONE = (
    "a kernel failed on this rank of a split vocabulary, after all ranks had agreed on an engine; the others go on "
    "with NaN. LIGER_CUTEDSL_ENGINE=torch on all of them does without these kernels"
)


def over_ranks(group, vocab_start: int | None, vocab_size: int | None) -> Callable[..., SplitVocabulary]:
    """What autograd.run asks for a process's share, of problems that hold its rows: as VocabShard.of places them."""

    def of(problem: Problem, wanted: WantedGradients, settings: Settings) -> SplitVocabulary:
        # what decides whether a call goes by chunks, and by which
        kind = (settings.workspace_mb, settings.times, wanted, problem.tokens > 0) if settings.single_pass else ()
        return SplitVocabulary(VocabShard.of(problem, group, vocab_start, vocab_size, kind), wanted.x is not None)

    return of


class SplitVocabulary:
    """Rows [start, start + valid) of a vocabulary split over the ranks of a group, as a VocabShard says."""

    sums_dx = True

    def __init__(self, shard: VocabShard, wants_dx: bool):
        self.shard, self.settled, self.wants_dx = shard, not shard.reads, wants_dx
        # before all ranks know the vocabulary none refuses a target alone
        self.vocab = sys.maxsize if shard.reads else shard.vocab

    def local(self, problem: Problem) -> Problem:
        ids, start = problem.selected_token_ids, self.shard.start
        moved = None if ids is None else ids - start
        shifted = replace(problem, target=problem.target - start, selected_token_ids=moved)
        return shifted.of_columns(slice(0, self.shard.valid))

    def combine(self, stats: RowStatistics, problem: Problem, local: Problem) -> tuple[RowStatistics, RowWeights]:
        return self.begin(stats, problem, local, at_once=True)()

    def begin(
        self, stats: RowStatistics, problem: Problem, local: Problem, chunk_limit: int = 0, at_once=False
    ) -> Callable:
        """Begins combine(), for statistics of the first rows alone where the schedule goes by chunks. What is returned
        waits for it, and gives them over the vocabulary, and the weights of all rows."""
        names, numbers = self._told(stats)
        rows = numbers.shape[1]
        if rows < problem.tokens:  # as many numbers, whatever a rank takes for a chunk
            numbers = torch.nn.functional.pad(numbers, (0, problem.tokens - rows))
        total = stats.lse.new_full((), float(self.shard.valid))
        if local.ce_weight is not None:
            own = local.ce_weight.index_select(0, local.target.long().clamp(min=0)) if local.vocab else 0.0
            own = torch.where(local.target >= 0, own, total.new_zeros(()))
            numbers, total = torch.cat([numbers, own[None]]), local.ce_weight.sum()
        arrived = self.shard.begin(numbers, total, chunk_limit, at_once=at_once)

        def finish() -> tuple[RowStatistics, RowWeights]:
            known, totals, parts = self._arrived(arrived, problem)
            weights = row_weights(replace(problem, ce_weight=None))
            weights = replace(weights, vocab=self.shard.vocab, total_weight=float(self.shard.vocab))
            if local.ce_weight is not None:
                weights = weights.with_classes(parts[:, -1].sum(dim=0), totals.sum(), problem.options)
                parts = parts[:, :-1]
            found = _over_ranks(names, parts[:, :, :rows])
            return replace(found, lse=torch.where(known, found.lse, torch.nan)), weights

        return finish

    def begin_next(self, rounds: Rounds, stats: RowStatistics) -> Callable:
        """The same for the next chunk. What is returned gives its statistics over the vocabulary."""
        names, numbers = self._told(stats)
        arrived = rounds.gather(numbers)
        return lambda: _over_ranks(names, arrived())

    def rounds(self, problem: Problem, chunk: int) -> Rounds:
        """The collectives behind begin's, of a call that goes by chunks of so many rows."""
        return Rounds(self.shard, problem, chunk, self.wants_dx, confirms=self.shard.reads)

    def chunk_limit(self, fitting: Callable[[], int]) -> int:
        """The tokens of a chunk for which every rank has room, of which this one has room for fitting(): its own until
        they agree on one, with begin()."""
        return self.shard.chunk_limit or fitting()

    def _told(self, stats: RowStatistics) -> tuple[list[str], torch.Tensor]:
        """What the others are told of some rows: names of vectors, (names, n); the selected columns' come last."""
        if stats.argmax is not None:
            stats = replace(stats, argmax=stats.argmax + self.shard.start)
        vectors = {name: v.to(stats.lse.dtype) for name, v in stats.there().items()}
        chosen = vectors.pop("selected", None)
        numbers = torch.stack(list(vectors.values()))
        if chosen is None:
            return list(vectors), numbers
        return [*vectors, "selected"], torch.cat([numbers, chosen.t()])

    def _arrived(self, arrived: Callable, problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        try:
            return arrived()
        except ChangedAlone as error:
            if error.chunk_limit:
                chunk = equal_chunk(error.chunk_limit, problem.tokens)
                Rounds(self.shard, problem, chunk, self.wants_dx, confirms=False).sit_out()
            raise

    def confirm(self, problem: Problem) -> None:
        shard = self.shard
        if self.settled:
            return
        TargetCheck(problem, vocab=shard.vocab).rows()
        # the ranks' indices travel in the compute dtype
        if problem.options.needs_argmax and shard.vocab > EXACT_INDICES and problem.compute_dtype == torch.float32:
            raise ValueError(f"vocab_size must be at most {EXACT_INDICES} for token metrics, got {shard.vocab}")

    def failed(self, failure: KernelFailure, problem: Problem, chunk_limit: int = 0) -> None:
        # raises until an engine is agreed upon
        self._arrived(self._nothing(problem, chunk_limit, failed=True), problem)
        chunk = equal_chunk(chunk_limit, problem.tokens) if chunk_limit else 0
        self.failed_alone(failure, self.rounds(problem, chunk) if chunk else None)

    def failed_alone(self, failure: KernelFailure, rounds: Rounds | None) -> None:
        """Raises, when the others have had all that they wait for: KernelFailure where all begin again."""
        if rounds:
            rounds.sit_out()
        raise RuntimeError(f"{_ALONE}: {failure}") from failure

    def refused(self, problem: Problem) -> None:
        with contextlib.suppress(ValueError):  # the others' error; this rank has its own
            self._arrived(self._nothing(problem, REFUSED), problem)
            if self.shard.chunk_limit:
                self.rounds(problem, equal_chunk(self.shard.chunk_limit, problem.tokens)).sit_out()

    def _nothing(self, problem: Problem, chunk_limit: int, failed: bool = False) -> Callable:
        ids = problem.selected_token_ids
        count = len(RowStatistics.names(problem)) + (problem.ce_weight is not None) + (0 if ids is None else len(ids))
        nothing = torch.full((count, problem.tokens), torch.nan, dtype=problem.compute_dtype, device=problem.device)
        return self.shard.begin(nothing, nothing.new_zeros(()), chunk_limit, failed, at_once=True)

    def failed_in_backward(
        self, failure: KernelFailure, problem: Problem, wanted: WantedGradients, block: int = 0
    ) -> None:
        for rows in slices(problem.tokens, block or max(problem.tokens, 1)) if wanted.x is not None else ():
            self.add_dx(torch.full_like(problem.x[rows], torch.nan, dtype=problem.compute_dtype)).wait()
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


def equal_chunk(limit: int, tokens: int) -> int:
    """The chunk of tokens, at most `limit` and the same on every rank: as many as `limit` needs, of equal size but for
    the last, in multiples of TILE_QUANTUM."""
    count = -(-tokens // limit)
    return min(-(-tokens // max(count, 1) // TILE_QUANTUM) * TILE_QUANTUM, limit)


def _over_ranks(names: list[str], parts: torch.Tensor) -> RowStatistics:
    """Statistics over the vocabulary, from (ranks, names, n)."""
    count = len(names) - ("selected" in names)
    found = dict(zip(names[:count], parts[:, :count].unbind(1), strict=True))
    if "selected" in names:
        found["selected"] = parts[:, count:].transpose(1, 2)
    return over_parts(RowStatistics(**found))

"""`single_pass` over a split vocabulary: what ranks tell each other travels under the products.

Two buffers of exponentials. For each chunk c, on every rank, in this order:

    product   exponentials of chunk c + 1 into the other buffer           under it: the statistics of chunk c
    wait      for the statistics of chunk c; its rows' coefficients
    begin     the all-gather of those of chunk c + 1
    pass      dz of chunk c, in place                                     under it: the end of dX of chunk c − 1
    wait      for dX of chunk c − 1, which is written in its own dtype
    product   dX of chunk c, in the compute dtype
    begin     its all-reduce
    product   dW of chunk c, and db                                       under it: dX of chunk c

So each collective has a product to run under, and the one that is waited for began before a product that has ended.
The last chunk's statistics have none, nor have those of a call of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from liger_cutedsl import gemm, objectives
from liger_cutedsl.call import Gradients, Problem, WantedGradients
from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.route import Route
from liger_cutedsl.row_statistics import RowStatistics, combined
from liger_cutedsl.schedules import chunk_dz
from liger_cutedsl.schedules.exponentials import exponentials_buffer
from liger_cutedsl.schedules.kept import KeptGradients
from liger_cutedsl.schedules.schedule import Task
from liger_cutedsl.shards import FailedSomewhere
from liger_cutedsl.tiling import slices


def forward(
    engine, task: Task, route: Route, sums: WantedGradients, sink_of: Callable, weigh: Callable
) -> tuple[NamedTuple, KeptGradients]:
    """sums: the dtypes that gradients are summed in.  sink_of(engine, gradients, tokens): what sums dW and db.
    weigh(rows): what single_pass makes of the rows' weights."""
    call = _Call(engine, task, route, sums, sink_of)
    try:
        call.begin()
        call.run(weigh)
    except FailedSomewhere:
        raise
    except KernelFailure as failure:
        call.failed(failure)
        raise
    results = call.results()
    return results, KeptGradients.of(call.gradients(), task.wanted, 1.0)


class _Call:
    """One call under way.

    arriving: waits for the statistics of the chunk that is next.  rounds: the collectives behind the first, once that
    has arrived.
    """

    def __init__(self, engine, task: Task, route: Route, sums: WantedGradients, sink_of: Callable):
        self.engine, self.task, self.route, self.split = engine, task, route, task.split
        self.local: Problem = task.local.for_kernels(route.dtype)
        self.chunks = [*slices(self.local.tokens, route.chunk)]
        dz_dtype, rows = engine.dz_dtype(self.local.x.dtype), min(route.chunk, self.local.tokens)
        self.buffers = [exponentials_buffer(self.local, rows, dz_dtype) for _ in self.chunks[:2]]
        self.sums = sums.allocate(task.problem)  # rows that are padding included
        own = (None if g is None else g[: self.local.vocab] for g in (self.sums.weight, self.sums.bias))
        for g in (self.sums.weight, self.sums.bias):
            if g is not None:
                g[self.local.vocab :].zero_()
        self.sink = sink_of(engine, Gradients(None, *own), self.local.tokens)
        self.arriving = self.rounds = self.rows = self.summing = None
        self.pieces: list[RowStatistics] = []

    def begin(self) -> None:
        """The first chunk's exponentials, and the all-gather of their statistics."""
        self.ahead = self._exponentials(0)
        limit = self.route.chunk_limit
        self.arriving = self.split.begin(self.ahead.stats, self.task.problem, self.local, limit)

    def run(self, weigh: Callable) -> None:
        weighing, objective = None, objectives.of(self.local.options)
        for index, chunk in enumerate(self.chunks):
            waiting, self.ahead = self.ahead, None
            if index + 1 < len(self.chunks):
                self.ahead = self._exponentials(index + 1)
            stats = self._arrived()
            weighing = weigh(self.rows) if weighing is None else weighing
            part, rows = self.local.of(chunk), self.rows.of(chunk)
            self.pieces.append(objectives.evaluated(stats, rows, part))
            found = objective.coefficients(self.pieces[-1], rows, part, weighing.upstream, weighing.dz_scale)
            if self.ahead is not None:
                self.arriving = self.split.begin_next(self.rounds, self.ahead.stats)
            column_sums = waiting.finish(stats.lse, found, self.task.wanted.bias is not None)
            self.rounds.confirm()
            waiting = None
            dz = self._dz(index)
            self._add_dx(dz, part, chunk, weighing.alpha)
            if self.local.vocab:
                self.sink.add(dz, column_sums, part, chunk, weighing)
        self._write_dx()

    def _exponentials(self, index: int):
        return chunk_dz.begun(self.engine, self.local.of(self.chunks[index]), self._dz(index), whole=False)

    def _dz(self, index: int) -> torch.Tensor:
        chunk = self.chunks[index]
        return self.buffers[index % 2][: chunk.stop - chunk.start]

    def _arrived(self) -> RowStatistics:
        """The statistics of a chunk over the vocabulary; with the first come the weights of all rows."""
        arriving, self.arriving = self.arriving, None
        if self.rounds is not None:
            return arriving()
        stats, self.rows = arriving()
        self.rounds = self.split.rounds(self.task.problem, self.route.chunk)
        return stats

    def _add_dx(self, dz: torch.Tensor, part: Problem, chunk: slice, alpha: float) -> None:
        if self.sums.x is None:
            return
        self._write_dx()
        out = self.rounds.dx(part.tokens)
        if part.vocab:
            gemm.matmul(dz, self.engine.gemm_operand(part.weight), out=out, alpha=alpha)
        else:
            out.zero_()
        self.rounds.sum(part.tokens)
        self.summing = chunk, out

    def _write_dx(self) -> None:
        """The last chunk's sum over the ranks, rounded once, where it belongs."""
        if self.summing is None:
            return
        (chunk, out), self.summing = self.summing, None
        self.rounds.summed()
        self.sums.x[chunk].copy_(out)

    def failed(self, failure: KernelFailure) -> None:
        """The other ranks get all that they wait for, and NaN. Raises where they go on without this one."""
        if self.rounds is None and self.arriving is None:  # before anything was said
            self.split.failed(failure, self.task.problem, self.route.chunk_limit)
        else:
            if self.rounds is None:
                self._arrived()  # raises what all ranks raise
            self.split.failed_alone(failure, self.rounds)

    def results(self) -> NamedTuple:
        stats = combined(self.pieces, torch.cat) if len(self.pieces) > 1 else self.pieces[0]
        found = objectives.of(self.local.options).results(stats, self.rows, self.task.problem)
        flag = self.rounds.flag()
        return found if flag is None else found._replace(loss=found.loss + flag)

    def gradients(self) -> Gradients:
        """The sums, which belong to the caller alone then; no other memory is held any longer."""
        gradients, self.sums = self.sums, None
        self.buffers = self.rounds = self.sink = None
        return gradients

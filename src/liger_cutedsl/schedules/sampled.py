"""The `sampled` schedule: as single_pass, with gradients from a sample of dz (sampling.py): one GEMM, and two products
over the pairs of a row and a vocabulary tile that are kept.

    for each chunk:  e = exp(x·Wᵀ − tile maximum) into a (chunk, V) buffer, with the tiles' maxima and sums
                     the pairs that are kept, counted
                     their dz/q packed behind those of other chunks
    at the end:      dX += dz·W, dW += dzᵀ·x and db of all packed pairs: each tile's rows of W and dW are read or
                     written once

The loss is exact, the gradients' mean over draws is. τ (gradient_sampling) is the probability that a tile must hold to
be kept for certain. Label smoothing's uniform part is not sampled: a product of two vectors for each of dX and dW.

How many pairs are expected decides what happens to a chunk, and not how many are drawn, which would be a bias. One that
is expected to keep more than a third, or more than there is room for, is computed whole, as in single_pass. The host
learns that number under the next chunk's GEMM, which takes the chunk's exponentials: pairs are packed before it is
known where the chunk before (or the last call) makes it likely that they fit; if they do not, the chunk is computed
whole at the end, from exponentials that are computed a second time. Where the buffer is about to be full, what it holds
becomes gradients first.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch

from liger_cutedsl.call import Gradients, Problem
from liger_cutedsl.epilogues import exp_headroom
from liger_cutedsl.objective import RowCoefficients
from liger_cutedsl.route import Route
from liger_cutedsl.sampling import Draw, Packed, Segment, Selection, capacity_needed, tile_count
from liger_cutedsl.schedules import footprint, kept_shares, single_pass
from liger_cutedsl.schedules.chunk_rows import BegunRows, rows_of
from liger_cutedsl.schedules.dw_sum import sum_dtypes
from liger_cutedsl.schedules.exponentials import exponentials_buffer
from liger_cutedsl.schedules.forward_gradients import Weighing
from liger_cutedsl.schedules.kept import KeptGradients
from liger_cutedsl.schedules.kept_shares import MOST_KEPT
from liger_cutedsl.schedules.pair_sums import (
    Noise,
    PairCount,
    PairSink,
    Scale,
    Uniform,
    groups_of_rows,
    without_uniform,
)
from liger_cutedsl.schedules.schedule import Task, gemms
from liger_cutedsl.split import equal_chunk
from liger_cutedsl.tiling import slices

NAME = "sampled"

# Exponentials of so many tokens leave the default workspace room for the pairs of 8192.
CHUNKS = (1024, 512)
MOST_IN_FP16 = 4  # dz/q is up to τ times what dz is, whose largest is an eighth of fp16's (FP16_DZ)
MARGIN = 1.25  # by how much more pairs than of the chunk before a chunk is likely to have at most


def circumstances(task: Task) -> tuple:
    """What a plan depends on beside the task."""
    capturing = task.problem.device.type == "cuda" and torch.cuda.is_initialized()
    capturing = capturing and torch.cuda.is_current_stream_capturing()
    share = kept_shares.too_large(task.problem, task.settings.gradient_sampling)
    return torch.are_deterministic_algorithms_enabled(), capturing, share and round(share, 2)


def obstacle(engine, task: Task) -> str | None:
    if not task.settings.gradient_sampling:
        return "it takes gradient_sampling=τ above 0 (or LIGER_CUTEDSL_GRADIENT_SAMPLING), the noise that is allowed"
    deterministic, capturing, share = circumstances(task)
    if task.split.sums_dx:
        return "a vocabulary over ranks is not sampled"
    if task.problem.weight_grad_buffer is not None:
        return f"{task.problem.weight_grad_buffer.name} gets the whole gradient"
    if task.problem.options.needs_slope_apart:
        return "the uniform part of a capped logit's gradient is no product of two vectors"
    if why := single_pass.obstacle(engine, task):
        return why
    if deterministic:
        return "torch.use_deterministic_algorithms(True), and pairs are added to dX in any order"
    if capturing:
        return "how many pairs there are is read on the host, not in a CUDA graph"
    if engine.dz_dtype(task.problem.gemm_dtype) == torch.float16 and task.settings.gradient_sampling > MOST_IN_FP16:
        return f"float16 with gradient_sampling above {MOST_IN_FP16}: a kept pair may be beyond its range"
    if share is not None and task.settings.schedule != NAME:
        return f"sampling would keep {share:.2f} of the pairs"
    return None


def plan(engine, task: Task, reason: str) -> Route:
    sampled, allowed = _sampled(task), footprint.budget(engine, task) + footprint.copied_bytes(task)
    problem, wanted = sampled.local, task.wanted
    sums = sum_dtypes(problem, wanted)
    for most in CHUNKS:
        chunk = min(equal_chunk(most, problem.tokens), problem.tokens)
        room = footprint.fitting_pairs(engine, sampled, sums, chunk, allowed)
        of_chunk, of_all = (capacity_needed(MOST_KEPT * n * tile_count(problem.vocab)) for n in (chunk, problem.tokens))
        pairs = min(max(room, of_chunk), of_all)
        if room >= of_chunk:
            break
    return Route(
        engine.name,
        NAME,
        problem.gemm_dtype,
        reason,
        chunk=chunk,
        pairs=pairs,
        dw_sum=sums.weight,
        gemms=gemms(3, wanted),
        workspace_bytes=footprint.sampled_bytes(engine, sampled, sums, chunk, pairs),
        copied_bytes=footprint.copied_bytes(task),
    )


def _sampled(task: Task) -> Task:
    return replace(task, problem=replace(task.problem, sampled=True))


def forward(engine, task: Task, route: Route) -> tuple[NamedTuple, KeptGradients]:
    call = _Call(engine, task, route)
    for chunk in slices(task.problem.tokens, route.chunk):
        call.add(chunk)
    return call.finished()


def backward(engine, task: Task, route: Route, state, upstream: NamedTuple) -> Gradients:
    raise NotImplementedError("sampled keeps gradients, and no state of its own")


class _Chunk(NamedTuple):
    """Rows whose exponentials are there.  of_pairs: their coefficients without the uniform part."""

    rows: slice
    part: Problem
    begun: BegunRows
    of_pairs: RowCoefficients
    selection: Selection
    count: PairCount


class _Call:
    """One call under way.

    packed: pairs of chunks whose products are to come.  share, foreseen: what share of its pairs, and how many, the
    next chunk is not likely to go beyond.  ahead: the chunk that was packed last, before the host knew how many pairs
    it has.  again: chunks that were, and had too many.  expected, computed: pairs so far, those that are in the
    gradients on average and those that happen to be.
    """

    def __init__(self, engine, task: Task, route: Route):
        self.engine, self.route, self.wanted = engine, route, task.wanted
        self.sampling, self.problem = task.settings.gradient_sampling, _sampled(task).problem.for_kernels(route.dtype)
        sums = replace(sum_dtypes(task.problem, task.wanted), weight=route.dw_sum)
        self.sink = PairSink(engine, sums.allocate(task.problem), task.problem.tokens)
        problem, self.dz_dtype = self.problem, engine.dz_dtype(self.problem.x.dtype)
        self.weigh = functools.cache(functools.partial(Weighing.of, problem, self.dz_dtype, task.expected_upstream))
        self.rows, self.scale = rows_of(engine, problem, self.weigh), Scale(self.sampling)
        self.seed, self.ahead, self.again, self.expected, self.computed = None, None, [], 0.0, 0
        self.uniform = Uniform(problem) if problem.options.needs_weighted_sum else None
        self.noise = Noise(problem) if problem.options.return_gradient_sampling else None
        self._allocate()
        share = kept_shares.known(problem, self.sampling)
        self._foresee(1.0 if share is None else share)

    def _allocate(self) -> None:
        problem = self.problem
        self.e = exponentials_buffer(problem, min(self.route.chunk, problem.tokens), self.dz_dtype)
        self.packed = Packed.of(self.route.pairs, self.dz_dtype, problem.device)

    def _foresee(self, share: float) -> None:
        """For the next chunk, from the share that was expected of the last."""
        self.share, rows = min(share * MARGIN, 1.0), min(self.route.chunk, self.problem.tokens)
        self.foreseen = capacity_needed(self.share * self._pairs(rows))

    def _pairs(self, rows: int) -> int:
        return rows * tile_count(self.problem.vocab)

    def add(self, rows: slice) -> None:
        if self.packed.room < self.foreseen * (1 + (self.ahead is not None)):
            self._settle()
            if self.packed.segments and self.packed.room < self.foreseen <= self.packed.capacity:
                self._flush(last=False)
        one = self._begun(rows)
        self._settle()  # the host waits for the chunk before under this one's GEMM
        if self.share <= MOST_KEPT and self.foreseen <= self.packed.room:
            self._pack(one, self.packed.room)
            self.ahead = one
        elif (count := self._fitting(one)) is not None:
            self._pack(one, count)
            self._take(one, count)
        else:
            self._compute_whole(one)

    def _begun(self, rows: slice) -> _Chunk:
        part = self.problem.of(rows)
        begun = self.rows.begun(rows, part, self.e[: part.tokens])
        if self.seed is None:  # behind all that may begin the call anew
            self.seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=part.device)
        of_pairs = without_uniform(begun.coefficients, self.weigh().rows.of(rows))
        target, headroom = part.target.long().contiguous(), exp_headroom(self.dz_dtype)
        if part.options.ignore_index >= 0:
            target = target.masked_fill(part.ignored(), -1)
        sums = begun.sums * 2.0**-headroom if headroom else begun.sums
        a, h = of_pairs.a, of_pairs.h
        scale = self.scale.of(a, h, self.rows.size)
        selection = self.engine.select_pairs(Draw(begun.maxima, sums, begun.lse, a, h, target, scale, self.seed))
        return _Chunk(rows, part, begun, of_pairs, selection, PairCount(selection))

    def _pack(self, one: _Chunk, most: int) -> None:
        n = one.part.tokens
        segment = Segment(one.selection.start, self.packed.filled, most, one.rows.start, n)
        self.engine.pack_pairs(one.part, self.e[:n], one.of_pairs, one.selection, self.packed, segment)

    def _settle(self) -> None:
        """What was packed ahead is taken, or left to be computed whole."""
        one, self.ahead = self.ahead, None
        if one is not None:
            count = self._fitting(one)
            self.again.append(one) if count is None else self._take(one, count)

    def _fitting(self, one: _Chunk) -> int | None:
        """How many pairs a chunk has; None where it is to be computed whole."""
        expected, drawn = one.count.wait()
        pairs, room = self._pairs(one.part.tokens), self.packed.room
        self.expected += expected
        self._foresee(expected / pairs)
        fits = expected <= MOST_KEPT * pairs and capacity_needed(expected) <= room
        return drawn if fits and drawn <= room else None  # a draw beyond that is not likely

    def _take(self, one: _Chunk, count: int) -> None:
        self.computed += count
        self.packed.next(one.selection.start, count, one.rows.start, one.part.tokens)
        if one.begun.coefficients.c is not None:
            self.uniform.add(one.part, one.rows.start, one.begun.coefficients.c)

    def _compute_whole(self, one: _Chunk) -> None:
        self.computed += self._pairs(one.part.tokens)
        e, begun = self.e[: one.part.tokens], one.begun
        sums = self.wanted.bias is not None
        column_sums = self.engine.scale_chunk(one.part, e, begun.maxima, begun.lse, begun.coefficients, sums)
        self.sink.add_dense(e, column_sums, one.part, one.rows, self.weigh(), last=False)

    def _flush(self, last: bool) -> None:
        """The packed pairs into all gradients. Their copies by tile and dX's sum lie where exponentials were."""
        problem, weighing, packed = self.problem, self.weigh(), self.packed
        if self.noise is not None:
            self.noise.add(packed)
        most = self.e.numel() * self.e.itemsize // (problem.hidden * problem.compute_dtype.itemsize)
        groups = groups_of_rows(packed.segments, most) or [[]]
        self.e = self.packed = None
        for index, segments in enumerate(groups):
            final = index + 1 == len(groups)
            pairs = self.engine.pairs_by_tile(replace(packed, segments=segments), problem.vocab)
            packed = None if final else packed
            factors = (weighing.alpha, weighing.expected, weighing.expected if last and final else 1.0)
            self.sink.add_pairs(pairs, segments, self._dx(segments), problem, factors)
        if not last:
            self._allocate()

    def _dx(self, segments: list[Segment]) -> torch.Tensor | None:
        """What dX of segments' rows is summed in, zeros or the uniform part."""
        if self.wanted.x is None or not segments:
            return None
        rows, problem = segments[-1].row + segments[-1].rows - segments[0].row, self.problem
        dx = torch.zeros(rows, problem.hidden, dtype=problem.compute_dtype, device=problem.device)
        if self.uniform is not None:
            self.uniform.write_dx(segments, dx)
        return dx

    def finished(self) -> tuple[NamedTuple, KeptGradients]:
        self._settle()
        for one in self.again:
            self.engine.exp_chunk(one.part, self.e[: one.part.tokens], fold=False)
            self._compute_whole(one)
        problem, weighing = self.problem, self.weigh()
        if self.uniform is not None and self.uniform.began:
            self.sink.add_uniform(self.uniform, problem, weighing.alpha)
        if self.packed.segments or not self.sink.began or weighing.expected != 1.0:
            self._flush(last=True)
        self.e = self.packed = None
        pairs = self._pairs(problem.tokens)
        kept_shares.note(problem, self.sampling, self.expected / pairs)
        results = self.rows.results()
        if self.noise is not None:
            results = results._replace(**self._metrics(self.computed / pairs))
        return results, KeptGradients.of(self.sink.take(), self.wanted, weighing.expected)

    def _metrics(self, share: float) -> dict:
        grads, factor = self.sink.gradients, self.weigh().alpha * self.weigh().expected
        return dict(
            share_kept=torch.full((), share, dtype=torch.float32, device=self.problem.device),
            noise_dw=self.noise.relative(grads.weight, self.noise.of_weight, factor),
            noise_dx=self.noise.relative(grads.x, self.noise.of_x, factor),
        )

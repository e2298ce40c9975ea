"""Ideas for `single_pass`, measured next to it; what helps goes into the schedule, the rest into NOTES.md.

python -m benchmark.experiments [N V H]        a table; needs a GPU

    chunks              tokens of a chunk, as budgets without end would allow: dX's waves against passes over dW
    two streams         the scaling pass of a chunk under the gradient GEMMs of the one before, with a second buffer
    parallel gradients  dX's GEMM, which may not fill the GPU, beside dW's on a second stream
    dW reduce-add       dW += dzᵀ·x by quack's GEMM with the copy engine's reduce-add, not cuBLAS's accumulation
    dX of exponentials  dX's GEMM scales the exponentials as it loads them (quack's operand transform). dW still has
                        the pass before it, so that the difference is what fusing costs
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmark.implementations import IMPLEMENTATIONS, Implementation
from benchmark.measure import Shape, gradient_errors, measure
from benchmark.sweeps import REFERENCE
from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.engines import make_engine
from liger_cutedsl.engines.architectures import GemmTile
from liger_cutedsl.gemm import matmul
from liger_cutedsl.objective import RowCoefficients, dz_unit
from liger_cutedsl.route import Settings
from liger_cutedsl.routing import choose_route
from liger_cutedsl.schedules import single_pass
from liger_cutedsl.schedules.schedule import Task

CHUNKS = (1024, 1408, 2048, 2816, 4096)


def _problem_and_route(x, weight, target, chunk: int | None):
    """A problem without ignored targets, and the route of single_pass: its own chunk, or a given one."""
    problem, wanted = Problem(x.detach(), weight.detach(), target, dense=True), WantedGradients(x.dtype, weight.dtype)
    route = choose_route(problem, wanted, Settings(schedule="single_pass"))
    return problem, route if chunk is None else replace(route, chunk=chunk)


def with_chunks(chunk: int) -> Implementation:
    """single_pass itself, with its chunk set rather than chosen."""

    def run(x, weight, target):
        problem, route = _problem_and_route(x, weight, target, chunk)
        wanted = WantedGradients(x.dtype, weight.dtype)
        task = Task(problem, wanted, Settings())
        output, kept = single_pass.forward(make_engine(route.engine), task, route)
        x.grad, weight.grad = kept.gradients.x, kept.gradients.weight
        return output.loss

    return Implementation(f"chunks of {chunk}", "single_pass with another chunk", lambda: run)


@dataclass(frozen=True)
class _Chunk:
    """The exponentials of a slice of the rows, what turns them into dz, and where their gradients go."""

    rows: slice
    problem: Problem
    e: torch.Tensor
    maxima: torch.Tensor
    lse: torch.Tensor
    coefficients: RowCoefficients
    engine: object
    dx: torch.Tensor
    dw: torch.Tensor

    def scale(self) -> None:
        self.engine.scale_chunk(self.problem, self.e, self.maxima, self.lse, self.coefficients, False)

    def add_dx(self) -> None:
        matmul(self.e, self.problem.weight, out=self.dx[self.rows])

    def add_dw(self) -> None:
        matmul(self.e.t(), self.problem.x, out=self.dw, beta=float(self.rows.start > 0))


class _WithStep:
    """An engine for single_pass that takes a step of ours where it would scale a chunk's exponentials.

    The step makes dX and dW as well: the schedule is asked for db alone, and has it summed from zeros. buffers: 2 for
    exponentials that outlive the next chunk's step: every other chunk's lie in memory of our own.
    """

    def __init__(self, engine, problem: Problem, step: Callable[[_Chunk], None], gradients, buffers: int):
        self.engine, self.step, self.gradients, self.buffers = engine, step, gradients, buffers
        self.unit = dz_unit(problem, engine.dz_dtype(problem.x.dtype))
        self.no_sums = torch.zeros(problem.vocab, dtype=torch.float32, device=problem.device)
        self.chunks, self.tokens, self.own = 0, 0, None

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def exp_chunk(self, problem, out, **call):
        self.e = out
        if self.chunks % self.buffers:
            self.own = torch.empty_like(out) if self.own is None else self.own
            self.e = self.own[: problem.tokens]
        return self.engine.exp_chunk(problem, out=self.e, **call)

    def scale_chunk(self, problem, e, maxima, lse, coefficients, column_sums):
        rows = slice(self.tokens, self.tokens + problem.tokens)
        a, fix = coefficients.a / self.unit, coefficients.fix / self.unit  # no product here divides by the unit
        row_values = (maxima, lse, RowCoefficients(a, None, fix))
        self.step(_Chunk(rows, problem, self.e, *row_values, self.engine, *self.gradients))
        self.chunks, self.tokens = self.chunks + 1, rows.stop
        return self.no_sums


def _experiment(
    name: str, note: str, make_step: Callable[[], Callable[[_Chunk], None]], chunk: int | None = None, buffers: int = 1
) -> Implementation:
    """single_pass with another step for each chunk. A step with a `finish` has it called behind the last."""

    def make():
        step = make_step()

        def run(x, weight, target):
            problem, route = _problem_and_route(x, weight, target, chunk)
            x.grad, weight.grad = torch.empty_like(problem.x), torch.empty_like(problem.weight)
            engine = _WithStep(make_engine(route.engine), problem, step, (x.grad, weight.grad), buffers)
            nothing_but_db = Task(problem, WantedGradients(bias=torch.float32), Settings())
            output, _ = single_pass.forward(engine, nothing_but_db, replace(route, dw_sum=None))
            getattr(step, "finish", lambda: None)()
            return output.loss

        return run

    return Implementation(name, note, make)


class _TwoStreams:
    """Scales a chunk on a stream of its own, beside the gradients of the one before."""

    def __init__(self):
        self.side, self.before = torch.cuda.Stream(), []  # what the side stream reads stays alive until it is done

    def __call__(self, chunk: _Chunk) -> None:
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            chunk.scale()
        self._gradients_of_the_last()
        main.wait_stream(self.side)
        self.before.append(chunk)

    def _gradients_of_the_last(self) -> None:
        for chunk in self.before[-1:]:
            chunk.add_dx()
            chunk.add_dw()

    def finish(self) -> None:
        self._gradients_of_the_last()
        self.before.clear()


def with_two_streams(chunk: int) -> Implementation:
    """The scaling pass beside the GEMMs of the chunk before it."""
    return _experiment(f"two streams, chunks of {chunk}", "scaling beside GEMMs", _TwoStreams, chunk, buffers=2)


def with_parallel_gradients() -> Implementation:
    """dX's GEMM beside dW's, both of the same chunk, chosen as single_pass does."""

    def make_step():
        side = torch.cuda.Stream()

        def step(chunk):
            main = torch.cuda.current_stream()
            chunk.scale()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                chunk.add_dx()
            chunk.add_dw()
            main.wait_stream(side)

        return step

    return _experiment("parallel gradients", "dX beside dW", make_step)


def with_reduce_add(tile: GemmTile, chunk: int) -> Implementation:
    """dW accumulated by quack's GEMM."""

    def make_step():
        from quack.epilogue.library import identity_epi

        how = dict(epi_args={}, add_to_output=True, **tile.arguments())

        def step(chunk):
            if chunk.rows.start == 0:
                chunk.dw.zero_()
            chunk.scale()
            chunk.add_dx()
            identity_epi.gemm(chunk.e.t(), chunk.problem.x.t(), chunk.dw, **how)

        return step

    return _experiment(f"dW reduce-add, {tile}", "dW through quack", make_step, chunk)


def with_transformed_dx(tile: GemmTile, chunk: int) -> Implementation:
    """dX from exponentials that its GEMM scales as it loads them: by a 16-bit number for each row and 64 columns."""

    def make_step():
        from quack.epilogue.library import identity_epi
        from quack.operand_transform import a_transform
        from quack.operand_transform.host import transform_a_operand

        @a_transform(vec_size=8, args={"scale": "colvec_ktile"})
        def scaled(e, scale):
            return e * scale

        tile_k = 64
        how = dict(epi_args={}, transform_a=scaled, tile_K=tile_k, **tile.arguments())

        def operand(chunk):
            """The exponentials, with an element for the target whose product with its scale is exact, and scales."""
            width = chunk.engine.exp_tile(chunk.problem)
            scale = torch.exp(chunk.maxima - chunk.lse[:, None]) * chunk.coefficients.a[:, None]
            scale, columns = scale.to(chunk.e.dtype), chunk.problem.target[:, None]
            of_target = scale.gather(1, columns // width)
            chunk.e.scatter_(1, columns, (chunk.coefficients.fix[:, None] / of_target).to(chunk.e.dtype))
            strips = scale.repeat_interleave(width // tile_k, dim=1)
            strips = strips[:, : -(-chunk.problem.vocab // tile_k)].t().contiguous()
            return transform_a_operand(scaled, chunk.e, {"scale": strips}, tile.tile_m, tile_k)

        def step(chunk):
            identity_epi.gemm(operand(chunk), chunk.problem.weight.t(), chunk.dx[chunk.rows], **how)
            chunk.scale()
            chunk.add_dw()

        return step

    return _experiment(f"dX of exponentials, {tile}", "the scaling pass within dX", make_step, chunk)


def experiments() -> list[Implementation]:
    wide, narrow = GemmTile(128, 256), GemmTile(128, 192)
    return [
        IMPLEMENTATIONS["floor"],
        IMPLEMENTATIONS["single_pass"],
        *(with_chunks(chunk) for chunk in CHUNKS),
        *(with_two_streams(chunk) for chunk in (1024, 2048)),
        with_parallel_gradients(),
        *(with_reduce_add(tile, 2048) for tile in (replace(narrow, pingpong=True), wide)),
        *(with_transformed_dx(tile, 2048) for tile in (wide, narrow)),
    ]


def main(shape: Shape = REFERENCE, rounds: int = 9) -> int:
    if not torch.cuda.is_available():
        print("benchmark.experiments needs an NVIDIA GPU, and there is none here", file=sys.stderr)
        return 2
    rows = measure(experiments(), shape, rounds, "cuda")
    for implementation in experiments():
        row = rows[implementation.name]
        print(f"{row.implementation:40} {row.skipped or _figures(implementation, row, rows['floor'].ms)}")
    return 0


def _figures(implementation: Implementation, row, floor_ms: float) -> str:
    figures = f"{row.ms:8.3f} ms {row.ms / floor_ms:6.3f} of the floor {row.peak_mb:7.0f} MB"
    if not implementation.plain:
        return figures
    # never time on garbage: three chunks and more, against float64
    errors = gradient_errors(implementation, "std 1", "cuda", tokens=6144, vocab=8000, hidden=512)
    return f"{figures}, errors of dX {errors['dx']:.2e}, of dW {errors['dw']:.2e}"


if __name__ == "__main__":
    sys.exit(main(Shape(*map(int, sys.argv[1:])) if sys.argv[1:] else REFERENCE))

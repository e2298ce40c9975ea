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
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmark.implementations import IMPLEMENTATIONS, Implementation
from benchmark.measure import Shape, gradient_errors, measure
from benchmark.sweeps import REFERENCE
from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.engines import make_engine
from liger_cutedsl.engines.architectures import GemmTile
from liger_cutedsl.gemm import matmul
from liger_cutedsl.objective import RowCoefficients, RowStatistics, row_coefficients, row_weights
from liger_cutedsl.routing import Settings, choose_route
from liger_cutedsl.schedules import single_pass
from liger_cutedsl.tiling import slices

CHUNKS = (1024, 1408, 2048, 2816, 4096)


def _problem(x, weight, target) -> Problem:
    return Problem(x.detach(), weight.detach(), target, dense=True)


def with_chunks(chunk: int) -> Implementation:
    """single_pass itself, with its chunk set rather than chosen."""

    def run(x, weight, target):
        problem, wanted = _problem(x, weight, target), WantedGradients(x.dtype, weight.dtype)
        route = replace(choose_route(problem, wanted, Settings(schedule="single_pass")), chunk=chunk)
        output, kept = single_pass.forward(make_engine(route.engine), problem, route, wanted)
        x.grad, weight.grad = kept.gradients.x, kept.gradients.weight
        return output.loss

    return Implementation(f"chunks of {chunk}", "single_pass with another chunk", lambda: run)


@dataclass(frozen=True)
class _Chunk:
    """The exponentials of a slice of the rows, and what turns them into dz."""

    rows: slice
    problem: Problem
    e: torch.Tensor
    maxima: torch.Tensor
    stats: RowStatistics
    coefficients: RowCoefficients

    def scale(self, engine) -> None:
        engine.scale_chunk(self.problem, self.e, self.maxima, self.stats.lse, self.coefficients, False)

    def dx(self, out: torch.Tensor) -> None:
        matmul(self.e, self.problem.weight, out=out[self.rows])

    def dw(self, out: torch.Tensor) -> None:
        matmul(self.e.t(), self.problem.x, out=out, accumulate=self.rows.start > 0)


def _chunks(engine, problem: Problem, size: int, buffers: int = 1) -> Iterator[_Chunk]:
    """Computes exponentials chunk by chunk, as single_pass does, into each of the buffers in turn."""
    weights, upstream = row_weights(problem), torch.ones((), device=problem.device)
    memory = [torch.empty(size, problem.vocab, dtype=problem.x.dtype, device=problem.device) for _ in range(buffers)]
    for index, rows in enumerate(slices(problem.tokens, size)):
        part = problem.of(rows)
        e = memory[index % buffers][: part.tokens]
        stats, maxima = engine.exp_chunk(part, out=e)
        coefficients = row_coefficients(stats, weights.of(rows), problem.options, upstream)
        yield _Chunk(rows, part, e, maxima, stats, coefficients)


def with_two_streams(size: int) -> Implementation:
    """The scaling pass beside the GEMMs of the chunk before it."""

    def make():
        side = torch.cuda.Stream()

        def run(x, weight, target):
            problem, engine, main = _problem(x, weight, target), make_engine("cute"), torch.cuda.current_stream()
            x.grad, weight.grad = torch.empty_like(problem.x), torch.empty_like(problem.weight)

            def gradients(chunk):
                chunk.dx(x.grad)
                chunk.dw(weight.grad)

            done = []  # what the side stream reads stays alive until it is done
            for chunk in _chunks(engine, problem, size, buffers=2):
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    chunk.scale(engine)
                if done:
                    gradients(done[-1])
                main.wait_stream(side)
                done.append(chunk)
            gradients(done[-1])

        return run

    return Implementation(f"two streams, chunks of {size}", "scaling beside GEMMs", make)


def with_parallel_gradients() -> Implementation:
    """dX's GEMM beside dW's, both of the same chunk, chosen as single_pass does."""

    def make():
        side = torch.cuda.Stream()

        def run(x, weight, target):
            problem, engine, main = _problem(x, weight, target), make_engine("cute"), torch.cuda.current_stream()
            wanted = WantedGradients(x.dtype, weight.dtype)
            route = choose_route(problem, wanted, Settings(schedule="single_pass"))
            x.grad, weight.grad = torch.empty_like(problem.x), torch.empty_like(problem.weight)
            for chunk in _chunks(engine, problem, route.chunk):
                chunk.scale(engine)
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    chunk.dx(x.grad)
                chunk.dw(weight.grad)
                main.wait_stream(side)

        return run

    return Implementation("parallel gradients", "dX beside dW", make)


def with_reduce_add(tile: GemmTile, size: int) -> Implementation:
    """dW accumulated by quack's GEMM."""

    def make():
        from quack.epilogue.library import identity_epi

        def run(x, weight, target):
            problem, engine = _problem(x, weight, target), make_engine("cute")
            x.grad, weight.grad = torch.empty_like(problem.x), torch.zeros_like(problem.weight)
            for chunk in _chunks(engine, problem, size):
                chunk.scale(engine)
                chunk.dx(x.grad)
                x_rows = chunk.problem.x.t()
                identity_epi.gemm(chunk.e.t(), x_rows, weight.grad, epi_args={}, add_to_output=True, **tile.arguments())

        return run

    return Implementation(f"dW reduce-add, {tile}", "dW through quack", make)


def with_transformed_dx(tile: GemmTile, size: int) -> Implementation:
    """dX from exponentials that its GEMM scales as it loads them: by a 16-bit number for each row and 64 columns."""

    def make():
        from quack.epilogue.library import identity_epi
        from quack.operand_transform import a_transform
        from quack.operand_transform.host import transform_a_operand

        @a_transform(vec_size=8, args={"scale": "colvec_ktile"})
        def scaled(e, scale):
            return e * scale

        tile_k = 64

        def operand(chunk, engine):
            """The exponentials, with an element for the target whose product with its scale is exact, and scales."""
            scale = torch.exp(chunk.maxima - chunk.stats.lse[:, None]) * chunk.coefficients.a[:, None]
            scale, columns = scale.to(chunk.e.dtype), chunk.problem.target[:, None]
            of_target = scale.gather(1, columns // engine.exp_tile(chunk.problem))
            chunk.e.scatter_(1, columns, (chunk.coefficients.fix[:, None] / of_target).to(chunk.e.dtype))
            strips = scale.repeat_interleave(engine.exp_tile(chunk.problem) // tile_k, dim=1)
            strips = strips[:, : -(-chunk.problem.vocab // tile_k)].t().contiguous()
            return transform_a_operand(scaled, chunk.e, {"scale": strips}, tile.tile_m, tile_k)

        def run(x, weight, target):
            problem, engine = _problem(x, weight, target), make_engine("cute")
            x.grad, weight.grad = torch.empty_like(problem.x), torch.empty_like(problem.weight)
            how = dict(epi_args={}, transform_a=scaled, tile_K=tile_k, **tile.arguments())
            for chunk in _chunks(engine, problem, size):
                identity_epi.gemm(operand(chunk, engine), problem.weight.t(), x.grad[chunk.rows], **how)
                chunk.scale(engine)
                chunk.dw(weight.grad)

        return run

    return Implementation(f"dX of exponentials, {tile}", "the scaling pass within dX", make)


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

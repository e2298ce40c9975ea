"""Ideas for `single_pass`, measured next to it; what helps goes into the schedule, the rest into NOTES.md.

python -m benchmark.experiments        a table; needs a GPU, for all but the chunks of tokens

    chunks         tokens of a chunk, as budgets without end would allow: the waves of dX's GEMM against passes over dW
    two streams    the scaling pass of a chunk under the gradient GEMMs of the chunk before, with a second buffer
    dW reduce-add  dW += dzᵀ·x by quack's GEMM with the copy engine's reduce-add instead of cuBLAS's accumulation
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from benchmark.implementations import IMPLEMENTATIONS, Implementation
from benchmark.measure import Shape, measure
from benchmark.sweeps import REFERENCE
from liger_cutedsl.engines import make_engine
from liger_cutedsl.gemm import matmul
from liger_cutedsl.objective import row_coefficients, row_weights
from liger_cutedsl.problem import Problem, WantedGradients
from liger_cutedsl.routing import Settings, choose_route
from liger_cutedsl.schedules import single_pass
from liger_cutedsl.schedules.tiling import slices

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


def with_two_streams(chunk: int) -> Implementation:
    """The scaling pass beside the GEMMs of the chunk before it."""

    def make():
        side = torch.cuda.Stream()

        def run(x, weight, target):
            problem, engine = _problem(x, weight, target), make_engine("cute")
            rows, main = row_weights(problem), torch.cuda.current_stream()
            upstream = torch.ones((), device=x.device)
            x.grad, weight.grad = torch.empty_like(problem.x), torch.empty_like(problem.weight)
            buffers = [torch.empty(chunk, problem.vocab, dtype=x.dtype, device=x.device) for _ in range(2)]

            def gradients(dz, part, piece):
                matmul(dz, part.weight, out=x.grad[piece])
                matmul(dz.t(), part.x, out=weight.grad, accumulate=piece.start > 0)

            before, alive = None, []  # what the side stream reads stays alive until it is done
            for index, piece in enumerate(slices(problem.tokens, chunk)):
                part = problem.of(piece)
                e = buffers[index % 2][: part.tokens]
                stats, maxima = engine.exp_chunk(part, out=e)
                coefficients = row_coefficients(stats, rows.of(piece), problem.options, upstream)
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    engine.scale_chunk(part, e, maxima, stats.lse, coefficients, False)
                if before is not None:
                    gradients(*before)
                main.wait_stream(side)
                before = (e, part, piece)
                alive.append((stats, maxima, coefficients))
            gradients(*before)
            return stats.lse.sum()

        return run

    return Implementation(f"two streams, chunks of {chunk}", "scaling beside GEMMs", make)


def with_reduce_add(tile: tuple[int, int, int, int, bool], chunk: int) -> Implementation:
    """dW accumulated by quack's GEMM. tile: tile M, tile N, cluster M, cluster N, ping-pong."""

    def make():
        from quack.epilogue.library import identity_epi

        names = ("tile_M", "tile_N", "cluster_M", "cluster_N", "pingpong")
        shape = dict(zip(names, tile, strict=True))

        def run(x, weight, target):
            problem, engine = _problem(x, weight, target), make_engine("cute")
            rows, upstream = row_weights(problem), torch.ones((), device=x.device)
            x.grad, weight.grad = torch.empty_like(problem.x), torch.zeros_like(problem.weight)
            buffer = torch.empty(chunk, problem.vocab, dtype=x.dtype, device=x.device)
            for piece in slices(problem.tokens, chunk):
                part = problem.of(piece)
                e = buffer[: part.tokens]
                stats, maxima = engine.exp_chunk(part, out=e)
                coefficients = row_coefficients(stats, rows.of(piece), problem.options, upstream)
                engine.scale_chunk(part, e, maxima, stats.lse, coefficients, False)
                matmul(e, part.weight, out=x.grad[piece])
                identity_epi.gemm(e.t(), part.x.t(), weight.grad, epi_args={}, add_to_output=True, **shape)
            return stats.lse.sum()

        return run

    name = "{}x{}/{}x{}".format(*tile[:4]) + "/pingpong" * tile[4]
    return Implementation(f"dW reduce-add, {name}", "dW through quack", make)


def experiments() -> list[Implementation]:
    tiles = ((128, 192, 2, 1, True), (128, 256, 2, 1, False))
    return [
        IMPLEMENTATIONS["floor"],
        IMPLEMENTATIONS["single_pass"],
        *(with_chunks(chunk) for chunk in CHUNKS),
        *(with_two_streams(chunk) for chunk in (1024, 2048)),
        *(with_reduce_add(tile, 2048) for tile in tiles),
    ]


def main(shape: Shape = REFERENCE, rounds: int = 9) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = measure(experiments(), shape, rounds, device)
    for row in rows.values():
        ratio = row.ms / rows["floor"].ms
        figures = f"{row.ms:8.3f} ms {ratio:6.3f} of the floor {row.peak_mb:7.0f} MB, dX error {row.dx_error:.1e}"
        print(f"{row.implementation:34} {row.skipped or figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Blocks of rows of `recompute`, of several sizes and with tiles of several widths: errors first, then time and memory.

python -m benchmark.blocks [N …]        two tables; needs a GPU

Of each way the gradients of a smaller batch, over memory that holds NaN, are compared with float64's; where they are
off, nothing is timed. "recompute" is what the operator does by itself; one block of 3072 columns what it did before it
knew blocks, at N = 65536, and one of 960 at N = 32768.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from benchmark.implementations import IMPLEMENTATIONS, Implementation
from benchmark.measure import Shape, measure, relative_error
from benchmark.sweeps import REFERENCE
from liger_cutedsl import fused_linear_cross_entropy
from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.engines import make_engine
from liger_cutedsl.route import Route, Settings
from liger_cutedsl.routing import choose_route
from liger_cutedsl.schedules import recompute
from liger_cutedsl.schedules.blocks import first_of
from liger_cutedsl.schedules.exponentials import kept_columns
from liger_cutedsl.schedules.schedule import Task

TOKENS = (32768, 65536)
# (blocks, columns of a tile)
WAYS = ((1, 960), (1, 3072), (1, 4224), (1, 12672), (2, 8448), (2, 12672), (4, 8448), (4, 12672), (8, 12672))
# On ‖ĝ − g‖/‖g‖. A rounding to bf16 is off by up to 2⁻⁸, by half of it and less in norm; dz has one, dX one, and dW one
# a block, of a part of it. In quadrature, eight blocks come to 3.6e-3.
BOUND = 2.0**-8
# The same products in a graph may be summed in another order; what is lost then is lost in the last of 8 bits.
SAME = 2.0**-10


def way(count: int, width: int) -> Implementation:
    """recompute in so many blocks, with tiles of so many columns."""

    def run(x, weight, target):
        task = _task(x, weight, target)
        route = choose_route(task.problem, task.wanted, task.settings)
        engine = make_engine(route.engine)
        route = _in_blocks(engine, task, route, count, width)
        with torch.no_grad():
            output, state = recompute.forward(engine, task, route)
            gradients = recompute.backward(engine, task, route, state, type(output)(torch.ones_like(output[0])))
        x.grad, weight.grad = gradients.x, gradients.weight
        return output.loss

    return Implementation(f"{count} × {width} columns", "recompute in blocks", lambda: run)


def _task(x, weight, target) -> Task:
    problem = Problem(x.detach(), weight.detach(), target, dense=True)
    return Task(problem, WantedGradients(x.dtype, weight.dtype), Settings(schedule="recompute"))


def _in_blocks(engine, task: Task, route: Route, count: int, width: int) -> Route:
    block = 0 if count == 1 else -(-task.problem.tokens // count // 128) * 128
    kept = kept_columns(engine, first_of(task.problem, block), task.wanted, 0)
    return replace(route, row_block=block, tile_width=width, kept=kept)


def errors(implementation: Implementation, device="cuda", tokens=6145, vocab=16384, hidden=1024) -> tuple[float, float]:
    """‖ĝ − g‖/‖g‖ of dX and dW against float64; NaN where memory was read that nobody wrote. Four blocks of 1664 rows,
    of which the last has 1153."""
    x, weight, target = Shape(tokens, vocab, hidden).inputs(device)
    expected = _in_float64(x.detach(), weight.detach(), target)
    run = implementation.make()
    memory = torch.full((2**28 if device == "cuda" else 2**20,), torch.nan, dtype=torch.float32, device=device)
    del memory  # what is allocated now holds NaN
    run(x, weight, target)
    return tuple(relative_error(leaf.grad, want) for leaf, want in zip((x, weight), expected, strict=True))


def _in_float64(x, weight, target):
    x, weight = x.double(), weight.double()
    dz = torch.softmax(x @ weight.t(), dim=1)
    dz[torch.arange(len(x), device=x.device), target] -= 1.0
    dz /= len(x)
    return dz @ weight, dz.t() @ x


def graph_captured_error(device="cuda") -> float:
    """How far dX and dW of a captured step in blocks, with row losses, are from those of the same step without."""
    x, weight, target = Shape(6145, 16384, 1024).inputs(device)
    upstream = torch.linspace(0.5, 1.5, len(x), device=device)

    def step():
        loss = fused_linear_cross_entropy(x, weight, target, reduction="none", workspace_mb=16)
        return torch.autograd.grad(loss, (x, weight), upstream)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            eager = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    return max(relative_error(one, other.double()) for one, other in zip(captured, eager, strict=True))


def main(tokens=TOKENS) -> int:
    if not torch.cuda.is_available():
        print("benchmark.blocks needs an NVIDIA GPU, and there is none here", file=sys.stderr)
        return 2
    right = []
    for implementation in (IMPLEMENTATIONS["recompute"], *(way(count, width) for count, width in WAYS)):
        dx, dw = errors(implementation)
        right.append(dx < BOUND and dw < BOUND)
        print(f"{implementation.name:22} error of dX {dx:.2e}, of dW {dw:.2e}{'' if right[-1] else '   WRONG'}")
    apart = graph_captured_error()
    print(f"{'in a CUDA graph':22} {apart:.1e} from the same step without{'' if apart < SAME else '   WRONG'}")
    if not all(right) or not apart < SAME:
        return 1
    for n in tokens:
        _print_times(replace(REFERENCE, tokens=n))
    return 0


def _print_times(shape: Shape, rounds: int = 3) -> None:
    task = _task(*shape.inputs("cuda"))
    print(f"N={shape.tokens}: {choose_route(task.problem, task.wanted, task.settings)}")
    del task
    ways = (IMPLEMENTATIONS["floor"], IMPLEMENTATIONS["recompute"], *(way(count, width) for count, width in WAYS))
    rows = measure(list(ways), shape, rounds, "cuda")
    for row in rows.values():
        low, high = row.spread_ms
        figures = f"{row.ms:8.2f} ms ({low:.1f} to {high:.1f}) {row.ms / rows['floor'].ms:6.3f} of the floor"
        figures += f" {row.peak_mb:7.0f} MB, error of dX {row.dx_error:.2e}"
        print(f"{row.implementation:22} {row.skipped or figures}", flush=True)


if __name__ == "__main__":
    sys.exit(main(tuple(map(int, sys.argv[1:])) or TOKENS))

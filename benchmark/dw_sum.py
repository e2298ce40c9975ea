"""What dW's sum costs and how far it is off: 16 bits, float32, and 16 bits with 8 bits more (two_part_sum.py).

python -m benchmark.dw_sum [products] [errors] [calls]        tables; needs a GPU

    products    dW += dzᵀ·x of one chunk of 2048 tokens at the reference head, by cuBLAS and by the kernel with tiles of
                several shapes, each checked against float64 at small sizes before
    errors      of dW at N=65536, V=8192, H=512 against float64, 32 chunks
    calls       forward + backward at N=65536 and the reference head, with dW's error in 96 of its rows
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import replace

import torch

from benchmark.implementations import Implementation
from benchmark.measure import Shape, gradient_errors, measure, relative_error, time_ms
from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.engines import make_engine
from liger_cutedsl.engines.architectures import GemmTile
from liger_cutedsl.engines.cute_kernels import sum_kernel
from liger_cutedsl.gemm import matmul
from liger_cutedsl.route import Settings
from liger_cutedsl.routing import choose_route
from liger_cutedsl.schedules import single_pass
from liger_cutedsl.schedules.schedule import Task
from liger_cutedsl.two_part_sum import TwoPartSum, low_bytes

CHUNK, VOCAB, HIDDEN = 2048, 128256, 4096
LONG = Shape(65536, VOCAB, HIDDEN)
SAMPLED_ROWS = 96
TILES = (
    GemmTile(128, 192, 2, 1, pingpong=True),
    GemmTile(192, 128, 2, 1, pingpong=True),
    GemmTile(128, 160, 2, 1, pingpong=True),
    GemmTile(128, 128, 2, 1, pingpong=True),
    GemmTile(128, 256, 2, 1),
    GemmTile(256, 128, 2, 1),
    GemmTile(256, 192, 2, 1),
)
WAYS = {"bf16": (torch.bfloat16, False), "bf16 + 8 bits": (torch.bfloat16, True), "fp32": (torch.float32, False)}


def add(tile: GemmTile, dz: torch.Tensor, x: torch.Tensor, total: TwoPartSum, alpha: float, beta: float) -> None:
    values = {"low": total.low, "next_low": total.low, "alpha": alpha, "beta": beta}
    sum_kernel().gemm(dz.t(), x.t(), total.high, C=total.high, epi_args=values, **tile.arguments())


def check(tile: GemmTile) -> float:
    """The largest error of three sums as a share of its bound; infinite where something else was written."""
    worst = 0.0
    for tokens, vocab, hidden in ((200, 300, 64), (1, 515, 272), (2048, 1000, 528)):
        g = torch.Generator("cuda").manual_seed(tokens)
        dz = torch.randn(tokens, -(-vocab // 8) * 8, device="cuda", generator=g).bfloat16()[:, :vocab]
        x = torch.randn(tokens, hidden, device="cuda", generator=g).bfloat16()
        memory = torch.full((vocab + 8, hidden), torch.nan, dtype=torch.bfloat16, device="cuda")
        total, exact = TwoPartSum.zero(memory[:vocab]), torch.zeros(vocab, hidden, dtype=torch.float64, device="cuda")
        for alpha, beta in ((1.0, 1.0), (0.75, 1.0), (-0.5, 0.25)):
            before, product = total.value().double(), dz.double().t() @ x.double()
            add(tile, dz, x, total, alpha, beta)
            exact = alpha * product + beta * before
            size = abs(alpha) * (dz.double().abs().t() @ x.double().abs()) + abs(beta) * before.abs()
            of_product = size * 2.0**-24 * (tokens / 16 + 20)
            shares = (total.value().double() - exact).abs() / (exact.abs() * 2.0**-16 + of_product)
            rounded = (total.high.double() - exact).abs() / (exact.abs() * 2.0**-8 + of_product)
            worst = max(worst, float(shares.max()), float(rounded.max()))
        if not (memory[vocab:].isnan().all() and torch.isfinite(total.value()).all()):
            worst = float("inf")
    return worst


def products(rounds: int = 7, calls: int = 6) -> None:
    dz = torch.randn(CHUNK, VOCAB, device="cuda").bfloat16() * 1e-2
    x = torch.randn(CHUNK, HIDDEN, device="cuda").bfloat16()
    narrow, wide = (torch.zeros(VOCAB, HIDDEN, dtype=d, device="cuda") for d in (torch.bfloat16, torch.float32))
    total = TwoPartSum.zero(torch.empty_like(narrow))
    of_cublas = {"cuBLAS, bf16": narrow, "cuBLAS, fp32": wide}
    ways = {n: lambda out=out: matmul(dz.t(), x, out=out, beta=1.0) for n, out in of_cublas.items()}
    for tile in TILES:
        try:
            share = check(tile)
        except Exception as error:
            print(f"{tile}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        print(f"{tile}: error {share:.3f} of its bound{'' if share <= 1 else '   WRONG'}", flush=True)
        if share <= 1:
            ways[f"kernel {tile}"] = lambda tile=tile: add(tile, dz, x, total, 1e-3, 1.0)
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    for _ in range(rounds):
        for name, way in order.sample(list(ways.items()), len(ways)):
            way(), way()
            times[name].append(time_ms(lambda way=way: [way() for _ in range(calls)], "cuda") / calls)
    best = statistics.median(times["cuBLAS, bf16"])
    print(f"\none product, {CHUNK} tokens, V={VOCAB}, H={HIDDEN}: ms (range), to cuBLAS in bf16")
    for name, found in times.items():
        ms = statistics.median(found)
        print(f"  {name:28} {ms:.3f} ({min(found):.3f} to {max(found):.3f})  {ms / best:.3f}", flush=True)


def way_of(name: str) -> Implementation:
    """single_pass in chunks of 2048 tokens, with one of WAYS."""
    dtype, two_parts = WAYS[name]

    def run(x, weight, target):
        problem = Problem(x.detach(), weight.detach(), target, dense=True)
        wanted = WantedGradients(x.dtype, weight.dtype)
        route = choose_route(problem, wanted, Settings(schedule="single_pass"))
        low = low_bytes(*weight.shape) if two_parts else 0
        route = replace(route, chunk=CHUNK, dw_sum=dtype, dw_low_bytes=low)
        output, kept = single_pass.forward(make_engine(route.engine), Task(problem, wanted, Settings()), route)
        x.grad, weight.grad = kept.gradients.x, kept.gradients.weight
        return output.loss

    return Implementation(name, "dW summed in " + name, lambda: run)


def errors() -> None:
    print("\n‖ĝ − g‖/‖g‖ of dW (dX), N=65536, V=8192, H=512, 32 chunks")
    for name in WAYS:
        found = gradient_errors(way_of(name), "std 1", tokens=65536, vocab=8192, hidden=512)
        print(f"  {name:14} {found['dw']:.2e} ({found['dx']:.2e})", flush=True)


@torch.no_grad()
def sampled_dw(x, weight, target, rows: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    """(vocabulary rows, dW of these rows in float64)."""
    sample = torch.randperm(len(weight), generator=torch.Generator().manual_seed(1))[:SAMPLED_ROWS].to(x.device)
    wide, dw = weight.double(), torch.zeros(SAMPLED_ROWS, x.shape[1], dtype=torch.float64, device=x.device)
    for start in range(0, len(x), rows):
        part, targets = x[start : start + rows].double(), target[start : start + rows]
        logits = part @ wide.t()
        p = torch.exp(logits[:, sample] - torch.logsumexp(logits, dim=1)[:, None])
        dw += (p - (targets[:, None] == sample).double()).t() @ part
    return sample, dw / len(x)


def calls(rounds: int = 3) -> None:
    names = ("bf16", "bf16 + 8 bits")
    x, weight, target = LONG.inputs("cuda")
    sample, expected = sampled_dw(x, weight, target)
    found = {}
    for name in names:
        way_of(name).make()(x, weight, target)
        found[name] = relative_error(weight.grad[sample], expected)
        x.grad = weight.grad = None
    del x, weight, target
    torch.cuda.empty_cache()
    result = measure([way_of(name) for name in names], LONG, rounds)
    print(f"\nforward + backward, N={LONG.tokens}, V={VOCAB}, H={HIDDEN}: ms (range), peak MB, errors of dW and dX")
    for name in names:
        row, (low, high) = result[name], result[name].spread_ms
        ratio = row.ms / result["bf16"].ms
        print(
            f"  {name:14} {row.ms:.1f} ({low:.1f} to {high:.1f})  {ratio:.3f}  {row.peak_mb:.0f}  "
            f"{found[name]:.2e}  {row.dx_error:.2e}  {row.skipped}",
            flush=True,
        )


def default_route() -> None:
    x, weight = (torch.empty(n, HIDDEN, dtype=LONG.dtype, device="meta") for n in (LONG.tokens, VOCAB))
    problem = Problem(x, weight, torch.empty(LONG.tokens, dtype=torch.int64, device="meta"), dense=True)
    print(f"N={LONG.tokens} by default: {choose_route(problem, WantedGradients(x.dtype, weight.dtype), Settings())}")


def main() -> None:
    which = sys.argv[1:] or ["products", "errors", "calls"]
    default_route()
    for name in which:
        {"products": products, "errors": errors, "calls": calls}[name]()


if __name__ == "__main__":
    main()

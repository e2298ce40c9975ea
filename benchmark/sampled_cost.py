"""What gradients from a sample of (token, tile) pairs cost, kernel by kernel, next to three dense products:

    python -m benchmark.sampled_cost

First the kernels against float64 at a small shape, outputs poisoned; then times at the reference shape, of drawn pairs
with the skew of a trained model's logits: a twentieth of the tiles at 0.75, the others alike. Medians of interleaved
rounds; a product runs before each timed call, so that the host is ahead.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from liger_cutedsl import LossOptions, sampling, triton_dx, triton_pairs
from liger_cutedsl.call import Problem
from liger_cutedsl.engines.cute_engine import CuteEngine
from liger_cutedsl.engines.cute_pairs import CutePairs
from liger_cutedsl.engines.torch_pairs import TorchPairs
from liger_cutedsl.objective import RowCoefficients
from liger_cutedsl.sampling import TILE, Draw, Packed
from liger_cutedsl.triton_pairs import Blocks, by_tile

N, V, H, CHUNK, ROUNDS = 8192, 128256, 4096, 1024, 5
HOT, HOT_SHARE, DENSITIES = 0.05, 0.75, (0.06, 0.085, 0.12)
DW = [
    (64, 128, 32, 4, 4),
    (64, 128, 8, 4, 4),
    (64, 128, 8, 4, 5),
    (64, 256, 16, 8, 4),
    (64, 256, 4, 8, 5),
    (32, 256, 16, 8, 5),
]
DENSE = [((128, 256, 8, 8, 5), 64), ((128, 128, 8, 4, 5), 64), ((128, 128, 8, 8, 5), 128), ((256, 128, 8, 8, 5), 64)]
ADDED = [((64, 64, 8, 4, 3), 2), ((64, 64, 8, 4, 3), 4), ((64, 64, 16, 4, 3), 2), ((64, 64, 4, 4, 3), 2)]
ADDED += [
    ((64, 64, 8, 4, 2), 3),
    ((64, 64, 8, 4, 4), 2),
    ((64, 128, 4, 4, 2), 2),
    ((128, 128, 4, 8, 2), 1),
    ((64, 32, 16, 4, 3), 4),
]


@dataclass
class Case:
    """Pairs of N rows in chunks, as the schedule packs them."""

    draws: list[Draw]
    coefficients: list[RowCoefficients]
    problem: Problem
    e: torch.Tensor
    packed: Packed | None = None

    def select(self):
        return [CutePairs().select_pairs(draw) for draw in self.draws]

    def pack(self, selections) -> Packed:
        counts = [int(selection.start[-1]) for selection in selections]
        self.packed = Packed.of(sum(counts), self.e.dtype, self.e.device)
        for index, count in enumerate(counts):
            rows = len(self.draws[0].lse)
            self.packed.next(selections[index].start, count, index * rows, len(self.draws[index].lse))
        self.repack(selections)
        return self.packed

    def repack(self, selections) -> None:
        """All chunks have the same exponentials: those of one take the place of a whole call's."""
        for parts in zip(self.coefficients, selections, self.packed.segments, strict=True):
            coefficients, selection, segment = parts
            e = self.e[: segment.rows]
            CutePairs().pack_pairs(self.problem, e, coefficients, selection, self.packed, segment)


def case(share: torch.Tensor, n: int, chunk: int, vocab: int, dtype=torch.bfloat16) -> Case:
    """share: (tiles,) of pairs that are drawn."""
    device = share.device
    draws, coefficients, seed = [], [], torch.tensor([2**40 + 7], dtype=torch.int64, device=device)
    for begin in range(0, n, chunk):
        rows = min(chunk, n - begin)
        lse = torch.randn(rows, dtype=torch.float32, device=device)
        target = torch.randint(0, vocab, (rows,), dtype=torch.int64, device=device)
        sums, one = share.repeat(rows, 1), torch.ones(rows, dtype=torch.float32, device=device)
        scale = torch.ones((), dtype=torch.float32, device=device)
        draws.append(Draw(lse[:, None].repeat(1, len(share)), sums, lse, one, None, target, scale, seed))
        coefficients.append(RowCoefficients(one, None, -one))
    pitch = -(-vocab // 8) * 8
    e = torch.rand(min(n, chunk), pitch, dtype=torch.float32, device=device).to(dtype)[:, :vocab]
    x, weight = (torch.empty(size, 8, dtype=dtype, device=device) for size in (0, vocab))
    problem = Problem(x, weight, draws[0].target, options=LossOptions(), dense=True, sampled=True)
    return Case(draws, coefficients, problem, e)


def dense_dz(packed: Packed, n: int, vocab: int) -> torch.Tensor:
    """dz (n, vocab) in float64."""
    tiles = sampling.tile_count(vocab)
    dz = torch.zeros(n, tiles, TILE, dtype=torch.float64, device=packed.dz.device)
    for segment in packed.segments:
        tile = torch.arange(tiles, dtype=torch.int64, device=dz.device).repeat_interleave(segment.start.diff().long())
        dz[packed.rows[segment.pairs].long(), tile] = packed.dz[segment.pairs].double()
    return dz.view(n, -1)[:, :vocab]


def poisoned(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def close(name: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    error = float((got.double() - want).norm() / want.norm())
    print(f"{'ok   ' if error <= bound else 'WRONG'} {name}: {error:.1e} (bound {bound:.0e})")
    if not error <= bound:
        sys.exit(1)


def check(dtype: torch.dtype, n=333, chunk=200, vocab=5000, hidden=1000) -> None:
    torch.manual_seed(1)
    share = torch.rand(sampling.tile_count(vocab), dtype=torch.float32, device="cuda") ** 4
    share[3], share[5] = 1.0, 0.0
    small = case(share, n, chunk, vocab, dtype)
    selections = small.select()
    packed = small.pack(selections)
    for draw, selection, segment in zip(small.draws, selections, packed.segments, strict=True):
        reference = TorchPairs().select_pairs(draw)
        pairs = sampling.kept_pairs(draw, sampling.shares(draw)).t().nonzero()
        same = torch.equal(reference.start, selection.start)
        if not (same and torch.equal(packed.rows[segment.pairs] - segment.row, pairs[:, 1].int())):
            sys.exit("WRONG other pairs than torch's")
        close("expected", selection.expected, reference.expected.double(), 1e-5)
        want, coefficients = Packed.of(segment.count, torch.float64, "cuda"), RowCoefficients(draw.a, None, -draw.a)
        place = want.next(reference.start, segment.count, segment.row, segment.rows)
        TorchPairs().pack_pairs(small.problem, small.e[: segment.rows], coefficients, reference, want, place)
        close("packed dz", packed.dz[segment.pairs], want.dz, torch.finfo(dtype).eps)
    x, weight = (torch.randn(size, hidden, device="cuda").to(dtype) for size in (n, vocab))
    dz, pairs, rounding = dense_dz(packed, n, vocab), by_tile(packed, vocab), torch.finfo(dtype).eps
    dw = poisoned(vocab, hidden, dtype=dtype)
    triton_pairs.dw(pairs, x, dw, 1.5, 0.0)
    want = dz.t() @ x.double()
    close("dW", dw, 1.5 * want, rounding)
    triton_pairs.dw(pairs, x, dw, 1.5, -2.0)
    close("dW added", dw, -1.5 * want, 4 * rounding)
    close("column sums", triton_pairs.column_sums(pairs, vocab), dz.sum(dim=0), 1e-5)
    want, dx = dz @ weight.double(), poisoned(n, hidden)
    triton_dx.dx(pairs, weight, dx, False)
    close("dX", dx, want, 1e-5)
    triton_dx.dx(pairs, weight, dx, True)
    close("dX added", dx, 2 * want, 1e-5)
    for (blocks, step), (others, resident) in [(one, ADDED[0]) for one in DENSE] + [(DENSE[0], one) for one in ADDED]:
        plan = triton_dx.Plan.of(pairs, n, Blocks(*others))
        dx.fill_(torch.nan)
        triton_dx.dx_dense(plan, pairs.dz, weight, dx, False, Blocks(*blocks), step)
        triton_dx.dx_added(pairs, plan, weight, dx, Blocks(*others), resident)
        close(f"dX {blocks} {step}, {others} {resident}", dx, want, 1e-5)


def timed(calls: dict[str, Callable], before: Callable) -> dict[str, float]:
    times, order = {name: [] for name in calls}, random.Random(0)
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name in order.sample(list(calls), len(calls)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            begin.record()
            calls[name]()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def dense_calls(x, weight, dw, dx) -> dict[str, Callable]:
    z = torch.empty(4096, V, dtype=x.dtype, device="cuda").normal_()
    halves = [slice(0, 4096), slice(4096, 8192)]

    def weight_gradient():
        torch.mm(z.t(), x[halves[0]], out=dw)
        torch.addmm(dw, z.t(), x[halves[1]], out=dw)

    target = torch.randint(0, V, (N,), dtype=torch.int64, device="cuda")
    problem = Problem(x, weight, target, options=LossOptions(), dense=True)

    def exponentials(sampled: bool, chunk: int):
        one = Problem(x, weight, target, options=LossOptions(), dense=True, sampled=sampled)
        for begin in range(0, N, chunk):
            CuteEngine().exp_chunk(one.of(slice(begin, begin + chunk)), out=z[:chunk])

    assert problem.tokens == N
    return {
        "dense forward": lambda: [torch.mm(x[half], weight.t(), out=z) for half in halves],
        "dense dX": lambda: [torch.mm(z, weight, out=dx[half]) for half in halves],
        "dense dW": weight_gradient,
        "exp 128x192, chunks of 1024": lambda: exponentials(False, 1024),
        "exp 128x128, chunks of 512": lambda: exponentials(True, 512),
        "exp 128x128, chunks of 1024": lambda: exponentials(True, 1024),
        "exp 128x128, chunks of 2048": lambda: exponentials(True, 2048),
    }


def sampled_calls(big: Case, x, weight, dw) -> dict[str, Callable]:
    selections, dx = big.select(), torch.empty(N, H, dtype=torch.float32, device="cuda")
    packed = big.pack(selections)
    pairs, narrow = by_tile(packed, V), torch.empty_like(x)
    plan = triton_dx.Plan.of(pairs, N)
    print(f"{pairs.pairs / N / pairs.tiles:.4f} of the pairs, {int(plan.dense)} dense tiles")
    calls = {
        "select": big.select,
        "pack": lambda: big.repack(selections),
        "by tile": lambda: by_tile(packed, V),
        "column sums": lambda: triton_pairs.column_sums(pairs, V),
        "dX plan": lambda: triton_dx.Plan.of(pairs, N),
        "dX to 16 bits": lambda: narrow.copy_(dx),
        "dX all": lambda: triton_dx.dx(pairs, weight, dx, False),
    }
    for b in DW:
        calls[f"dW {b}"] = partial(triton_pairs.dw, pairs, x, dw, 1.0, 0.0, Blocks(*b))
    for b, step in DENSE:
        calls[f"dX dense {b} {step}"] = partial(triton_dx.dx_dense, plan, pairs.dz, weight, dx, False, Blocks(*b), step)
    for b, resident in ADDED:
        one = triton_dx.Plan.of(pairs, N, Blocks(*b))
        calls[f"dX added {b} {resident}"] = partial(triton_dx.dx_added, pairs, one, weight, dx, Blocks(*b), resident)
    return calls


def report(times: dict[str, float], dense: dict[str, float]) -> None:
    for name, ms in times.items():
        print(f"    {name:48} {ms:7.3f} ms")

    def best(start):
        return min(ms for name, ms in times.items() if name.startswith(start))

    shared = dense["exp 128x128, chunks of 1024"] + sum(times[name] for name in ("select", "pack", "by tile"))
    shared += best("dW")
    floor = sum(dense[f"dense {name}"] for name in ("forward", "dX", "dW"))
    dx = times["dX plan"] + best("dX dense") + best("dX added") + times["dX to 16 bits"]
    print(f"  all: {shared + dx:.2f} ms, {(shared + dx) / floor:.3f} of three dense products ({floor:.2f})")


@torch.no_grad()
def main() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check(dtype)
    torch.manual_seed(0)
    x = torch.randn(N, H, device="cuda").bfloat16()
    weight = (torch.randn(V, H, device="cuda") * H**-0.5).bfloat16()
    dw, dx = torch.empty_like(weight), torch.empty_like(x)
    before = torch.randn(4096, 16384, device="cuda").bfloat16()
    product = torch.empty(16384, 16384, dtype=torch.bfloat16, device="cuda")

    def ahead():
        torch.mm(before.t(), before, out=product)

    dense = timed(dense_calls(x, weight, dw, dx), ahead)
    for name, ms in dense.items():
        print(f"    {name:48} {ms:7.3f} ms")
    tiles = sampling.tile_count(V)
    for density in DENSITIES:
        share = torch.full((tiles,), (density - HOT * HOT_SHARE) / (1 - HOT), dtype=torch.float32, device="cuda")
        share[torch.randperm(tiles, device="cuda")[: int(HOT * tiles)]] = HOT_SHARE
        report(timed(sampled_calls(case(share, N, CHUNK, V), x, weight, dw), ahead), dense)


if __name__ == "__main__":
    main()

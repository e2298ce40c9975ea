"""Runs the Triton kernels of sampled pairs in Triton's interpreter, on CPU tensors, against the torch engine's and
against float64. Prints "ok" a case.

    TRITON_INTERPRET=1 python test/triton_pairs_probe.py
"""

import contextlib
import os
import sys
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.cuda.device = lambda *_: contextlib.nullcontext()  # the wrappers select the tensors' device

from liger_cutedsl import LossOptions, gemm, triton_dx, triton_sampling  # noqa: E402
from liger_cutedsl.call import Problem  # noqa: E402
from liger_cutedsl.engines.cute_pairs import CutePairs  # noqa: E402
from liger_cutedsl.engines.torch_engine import TorchEngine  # noqa: E402
from liger_cutedsl.objective import RowCoefficients  # noqa: E402
from liger_cutedsl.sampling import TILE, Draw, Packed, kept_pairs, shares, tile_count  # noqa: E402

gemm.multiprocessors = lambda _: 1  # so that a program of dX has several blocks
triton_dx.RESIDENT = 3
PAIRS, FLOAT32 = CutePairs(), 2e-6


def close(name, got, want, bound):
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    if not error <= bound:
        sys.exit(f"{name}: error {error:.2e} exceeds {bound:.2e}")
    print("ok", name)


def poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype)


def random_draw(n, vocab, with_h=False, first_tile=0, seed=2**62 + 12345):
    """Rows of softmaxes of very different sharpness; all pairs of tile 1 kept, none of tile 2 but targets'."""
    logits = torch.randn(n, vocab) * torch.rand(n, 1) * 20
    logits[:, TILE : 2 * TILE] += 5
    logits[:, 2 * TILE : 3 * TILE] = -torch.inf
    padded = torch.nn.functional.pad(logits, (0, -vocab % TILE), value=-torch.inf).view(n, -1, TILE)
    maxima = padded.amax(dim=2).clamp(min=-1e30)
    sums = (padded - maxima[:, :, None]).exp().sum(dim=2)
    target = torch.randint(0, vocab, (n,))
    target[0], target[1], target[2] = -100, vocab - 1, vocab + TILE  # none, the last, one of another part
    a, h = torch.randn(n), torch.randn(n) if with_h else None
    a[3] = 0.0
    scale = 0.01 * a.abs().mean()
    draw = Draw(maxima, sums, logits.logsumexp(1), a, h, target, scale, torch.tensor([seed]), first_tile)
    return draw, padded


def same_pairs(draw):
    """The pairs that the kernel kept, as torch does; Selection."""
    got, want, kept = PAIRS.select_pairs(draw), TorchEngine().select_pairs(draw), kept_pairs(draw, shares(draw))
    assert torch.equal(got.start, want.start) and got.start[-1] == kept.sum()
    words = torch.nn.functional.pad(kept, (0, -kept.shape[1] % 32)).view(len(kept), -1, 32)
    assert torch.equal(got.kept.long() & (2**32 - 1), (words.long() << torch.arange(32)).sum(dim=2))
    assert abs(got.expected.double() - want.expected.double()) <= 1e-5 * want.expected
    return got


def check_draws():
    for n, vocab in ((1, 5), (7, 129), (64, 4096), (150, 5003)):
        for with_h in (False, True):
            n = max(n, 4)
            draw, _ = random_draw(n, max(vocab, 3 * TILE), with_h, first_tile=n)
            same_pairs(draw)
    same_pairs(random_draw(200, 132003)[0])  # more counts than one block of their running total has
    draw, _ = random_draw(130, 5003)
    assert torch.equal(same_pairs(draw).kept, same_pairs(draw).kept)
    other = same_pairs(replace(draw, seed=draw.seed + 2**32))  # both halves of the seed count
    assert not torch.equal(other.kept, same_pairs(draw).kept)
    names = ("maxima", "sums", "lse", "a", "target")
    twice = replace(draw, **{name: torch.cat([getattr(draw, name)] * 2) for name in names})
    kept = same_pairs(twice).kept
    assert torch.equal(kept[:130], kept[130:])
    draw.lse[5] = torch.nan
    assert kept_pairs(draw, shares(draw))[5].all()
    same_pairs(draw)
    print("ok draws")


def check_pack(dtype, with_h, vocab=2997, n=100):
    """Two chunks, the second behind the first and with rows from 40; between rows of e, NaN."""
    headroom = 15 if dtype == torch.float16 else 0
    draw, logits = random_draw(n, vocab, with_h)
    pitch = -(-vocab // 8) * 8 + 8
    e = poisoned(n, pitch, dtype=dtype)[:, :vocab]
    e.copy_(((logits - draw.maxima[:, :, None]).exp() * 2.0**headroom).view(n, -1)[:, :vocab])
    coefficients = RowCoefficients(draw.a, None, torch.randn(n), draw.h)
    x, weight = (torch.empty(size, 8, dtype=dtype) for size in (0, vocab))
    problem = Problem(x, weight, draw.target, options=LossOptions())
    selection, got = same_pairs(draw), Packed.of(20000, dtype, torch.device("cpu"))
    got.dz.fill_(torch.nan), got.factor.fill_(torch.nan), got.rows.fill_(-1)
    count = int(selection.start[-1])
    for row, room in ((0, count), (40, 20000 - count)):  # of the second, the host does not know the number
        segment = replace(got.next(selection.start, count, row, n), count=room)
        PAIRS.pack_pairs(problem, e, coefficients, selection, got, segment)
    little = Packed.of(count, dtype, torch.device("cpu"))
    little.dz.fill_(torch.nan)
    segment = replace(little.next(selection.start, count, 0, n), count=count - 7)
    PAIRS.pack_pairs(problem, e, coefficients, selection, little, segment)
    assert torch.equal(little.dz[:-7], got.dz[: count - 7]) and little.dz[-7:].isnan().all()
    wide = replace(draw, **{name: getattr(draw, name).double() for name in ("maxima", "sums", "lse", "a", "scale")})
    coefficients = replace(coefficients, a=wide.a, fix=coefficients.fix.double())
    if with_h:
        wide = replace(wide, h=draw.h.double())
        coefficients = replace(coefficients, h=wide.h)
    want = Packed.of(20000, torch.float64, torch.device("cpu"))
    want.factor = want.factor.double()
    want.next(selection.start, count, 0, n)
    TorchEngine().pack_pairs(problem, e, coefficients, replace(selection, draw=wide), want, want.segments[0])
    first, second = (segment.pairs for segment in got.segments)
    assert torch.equal(got.rows[first], want.rows[first]) and torch.equal(got.rows[second], want.rows[first] + 40)
    assert torch.equal(got.dz[second], got.dz[first]) and got.dz[2 * count :].isnan().all()
    assert (got.rows[2 * count :] == -1).all() and got.factor[2 * count :].isnan().all()
    got_factor, factor = got.factor[first].double(), want.factor[first]
    # float32's exp of a difference of up to some hundred; and q may be off by its step of 2⁻²⁴
    assert ((got_factor - factor).abs() <= factor * (1e-4 + factor * 2**-23)).all()
    scaled = want.dz[first] * (got_factor / factor)[:, None]
    close(f"pack {dtype} {with_h}", got.dz[first], scaled, max(torch.finfo(dtype).eps / 2, 1e-4))
    fixed = (got.factor[first] == 1) & (want.dz[first] == coefficients.fix[got.rows[first].long(), None]).any(dim=1)
    assert fixed.sum() >= n - 3
    found = got.dz[first][fixed] == coefficients.fix.to(dtype)[got.rows[first][fixed].long(), None]
    assert found.any(dim=1).all()  # exact but for the one rounding


def check_rounding(n=64, tiles=150):
    """q is rounded up to a multiple of 2⁻²⁴, here of about 10⁻²: a step is 6e-6 of that."""
    zeros, one = torch.zeros(n, tiles), torch.ones(())
    sums, none, seed = torch.rand(n, tiles) / 50, torch.full((n,), -1), torch.tensor([1])
    draw = Draw(zeros, sums, torch.randn(n), torch.ones(n), None, none, one, seed)
    draw = replace(draw, maxima=draw.lse[:, None].repeat(1, tiles))
    x, weight = (torch.empty(size, 8).half() for size in (0, tiles * TILE))
    problem = Problem(x, weight, none, options=LossOptions())
    selection, packed = same_pairs(draw), Packed.of(n * tiles, torch.float16, torch.device("cpu"))
    segment = packed.next(selection.start, int(selection.start[-1]), 0, n)
    e = torch.zeros(n, tiles * TILE, dtype=torch.float16)
    PAIRS.pack_pairs(problem, e, RowCoefficients(draw.a, None, draw.a), selection, packed, segment)
    tile, row = kept_pairs(draw, shares(draw)).t().nonzero().unbind(1)
    assert len(tile) > 50
    close("1/q", packed.factor[segment.pairs], 1 / shares(draw)[row, tile].double(), 2e-7)


def random_packed(n, vocab, dtype, chunk, density):
    """Random dz in random pairs: tile 0 of all rows, tile 1 of none, tile 2 of three in ten."""
    tiles, dz = tile_count(vocab), torch.zeros(n, tile_count(vocab), TILE, dtype=torch.float64)
    kept = torch.rand(n, tiles) < density
    kept[:, 0], kept[:, 1], kept[:, 2] = True, False, torch.rand(n) < 0.3
    if n > chunk:
        kept[chunk : 2 * chunk] = False  # a chunk without pairs
    packed = Packed.of(int(kept.sum()) + 50, dtype, torch.device("cpu"))
    packed.dz.fill_(torch.nan)
    for row in range(0, n, chunk):
        tile, index = kept[row : row + chunk].t().nonzero().unbind(1)
        start = torch.zeros(tiles + 1, dtype=torch.int32)
        start[1:] = kept[row : row + chunk].sum(dim=0).cumsum(0)
        segment = packed.next(start, len(tile), row, min(chunk, n - row))
        packed.rows[segment.pairs] = (index + row).int()
        beyond = tile[:, None] * TILE + torch.arange(TILE) >= vocab
        packed.dz[segment.pairs] = torch.randn(len(tile), TILE).masked_fill(beyond, 0.0).to(dtype)
        dz[index + row, tile] = packed.dz[segment.pairs].double()
    return packed, dz.view(n, -1)[:, :vocab]


def check_products(dtype, n, vocab, hidden, chunk, density):
    """Against dense float64 products. Rows of x and W lie apart, NaN between them."""
    packed, dz = random_packed(n, vocab, dtype, chunk, density)
    x, weight = (poisoned(size, hidden + 8, dtype=dtype)[:, :hidden] for size in (n, vocab))
    x.normal_(), weight.normal_()
    pairs = PAIRS.pairs_by_tile(packed, vocab)
    what, eps = f"{dtype} {n}x{vocab}x{hidden}", torch.finfo(dtype).eps
    want = dz.t() @ x.double()
    dw = poisoned(vocab, hidden, dtype=dtype)
    PAIRS.dw_of_pairs(pairs, x, dw, 0.5, 0.0)
    # rounded once
    close(f"dW {what}", dw, 0.5 * want, max(eps / 2, FLOAT32))
    assert not dw[TILE : 2 * TILE].any()
    before = torch.randn(vocab, hidden).to(dtype)
    dw.copy_(before)
    PAIRS.dw_of_pairs(pairs, x, dw, 0.5, -2.0)
    close(f"dW added {what}", dw, 0.5 * want - 2.0 * before.double(), max(eps / 2, FLOAT32))
    wide = poisoned(vocab, hidden)
    PAIRS.dw_of_pairs(pairs, x, wide, 1.0, 0.0)
    close(f"dW in float32 {what}", wide, want, FLOAT32)
    want = dz @ weight.double()
    before = torch.randn(n, hidden)
    dx = before.clone()
    PAIRS.dx_of_pairs(pairs, weight, dx)
    close(f"dX added {what}", dx, want + before.double(), FLOAT32)
    sums = PAIRS.column_sums_of_pairs(pairs, vocab)
    close(f"column sums {what}", sums, dz.sum(dim=0), FLOAT32)
    dx = poisoned(n, hidden)
    triton_dx.dx(pairs, weight, dx, add=False)
    close(f"dX {what}", dx, want, FLOAT32)
    if len(packed.segments) > 1:
        rest = replace(packed, segments=packed.segments[1:])
        PAIRS.dw_of_pairs(PAIRS.pairs_by_tile(rest, vocab), x, wide, 1.0, 0.0)
        close(f"dW of some segments {what}", wide, dz[chunk:].t() @ x[chunk:].double(), FLOAT32)
    packed.segments[:] = packed.segments[:1]
    pairs, rows = PAIRS.pairs_by_tile(packed, vocab), packed.segments[0].rows
    dx = torch.zeros(rows, hidden)
    PAIRS.dx_of_pairs(pairs, weight, dx)
    close(f"dX of a segment {what}", dx, want[:rows], FLOAT32)


def check_nothing():
    """No segment, and one without a pair."""
    packed = Packed.of(10, torch.float16, torch.device("cpu"))
    x, weight = (torch.randn(size, 8).half() for size in (4, 300))
    for _ in range(2):
        pairs, dw, dx = PAIRS.pairs_by_tile(packed, 300), poisoned(300, 8, dtype=torch.float16), torch.ones(4, 8)
        PAIRS.dw_of_pairs(pairs, x, dw, 1.0, 0.0)
        PAIRS.dx_of_pairs(pairs, weight, dx)
        assert not dw.any() and not PAIRS.column_sums_of_pairs(pairs, 300).any() and (dx == 1).all()
        packed.next(torch.zeros(4, dtype=torch.int32), 0, 0, 4)
    try:
        triton_sampling.in_units(12)
    except ValueError as error:
        assert "multiple of 8 elements, and got 12" in str(error)
        print("ok nothing")


torch.manual_seed(int(os.environ.get("PROBE_SEED", "0")))
check_draws()
check_rounding()
for dtype in (torch.float32, torch.float16):  # the interpreter truncates to bf16 where a GPU rounds
    for with_h in (False, True):
        check_pack(dtype, with_h)
    check_products(dtype, 70, 1000, 72, 30, 0.2)
check_products(torch.float16, 9, 385, 264, 9, 0.9)
check_nothing()

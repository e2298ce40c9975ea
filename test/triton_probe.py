"""Runs the Triton kernels in Triton's interpreter, on CPU tensors, against the torch engine. Prints "ok" a case.

    TRITON_INTERPRET=1 python test/triton_probe.py

The interpreter runs a kernel's code with numpy, so this checks the code, not what a GPU makes of it.
"""

import contextlib
import itertools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.cuda.device = lambda *_: contextlib.nullcontext()  # the wrappers select the tensors' device

from liger_cutedsl import LossOptions, cross_entropy, triton_folds, triton_kernels  # noqa: E402
from liger_cutedsl.call import Problem  # noqa: E402
from liger_cutedsl.engines.torch_engine import TorchEngine  # noqa: E402
from liger_cutedsl.objective import RowDerivatives, row_coefficients, row_weights  # noqa: E402
from liger_cutedsl.options import LogProbOptions  # noqa: E402
from liger_cutedsl.row_statistics import RowStatistics, over_parts  # noqa: E402
from liger_cutedsl.rows import _total  # noqa: E402

FLOAT32 = 2e-6


def close(name, got, want, bound):
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    if not error <= bound:
        sys.exit(f"{name}: error {error:.2e} exceeds {bound:.2e}")
    print("ok", name)


def check_folds():
    partials = torch.randn(5, 1500) * 20
    partials[1] = -torch.inf
    partials[2, 100:] = -torch.inf
    want = torch.logsumexp(partials, dim=1)
    got = triton_folds.fold_lse(partials)
    assert got[1] == -torch.inf
    close("fold_lse", got[[0, 2, 3, 4]], want[[0, 2, 3, 4]], FLOAT32)
    for headroom in (0, 15):
        maxima, sums = torch.randn(4, 700) * 20, torch.rand(4, 700) + 0.5
        want = torch.logsumexp(maxima + sums.log(), dim=1)
        close(f"fold_exp {headroom}", triton_folds.fold_exp(maxima, sums * 2.0**headroom, headroom), want, FLOAT32)


def check_moments():
    """Of tiles with offsets of up to 10³, one row without any, against the same fold by torch in float64."""
    tiles, names = 700, ("maximum", "sum_exp", "sum_exp_z", "sum_exp_sq")
    for headroom, count in ((0, 4), (15, 4), (0, 3)):
        m = torch.randn(5, tiles) * 20 + torch.tensor([0.0, 1e3, -1e3, 50.0, 0.0])[:, None]
        s = torch.rand(5, tiles) * 5 + 1
        parts = [m, s, -torch.rand(5, tiles) * s, torch.rand(5, tiles) * s + 1]
        for part, nothing in zip(parts, (-torch.inf, 0.0, 0.0, 0.0), strict=True):
            part[4] = nothing
            part[3, :300] = nothing
        scales = [1.0, 2.0**headroom, 2.0**headroom, 4.0**headroom]
        buffer = torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)], dim=1)
        got = triton_folds.fold_moments(dict(zip(names[:count], buffer.chunk(4, dim=1), strict=False)), headroom)
        want = over_parts(RowStatistics(**{n: p.t().double() for n, p in zip(names, parts[:count], strict=False)}))
        assert got.keys() == {*names[:count], "lse"} and got["maximum"][4] == got["lse"][4] == -torch.inf
        assert got["sum_exp"][4] == 0 and torch.equal(got["maximum"].double(), want.maximum)
        for name in names[1:count]:
            close(f"fold_moments {name} {headroom}", got[name][:4], getattr(want, name)[:4], FLOAT32)
        close(f"fold_moments lse {headroom}", got["lse"][:4], (want.maximum + want.sum_exp.log())[:4], FLOAT32)


def check_summary():
    for dtype in (torch.int64, torch.int32):
        target = torch.randint(0, 1000, (9001,), dtype=dtype)
        target[::7] = -100
        summary, shown = torch.zeros(7, 4, dtype=torch.int64), target[1::2]
        x = torch.randn(300, len(shown)).t()  # and a transposed x
        x[0, 299], x[7], x[14, 3] = torch.nan, -20.0, torch.inf
        assert [int(shown[row]) for row in (3, 10, 17)] == [-100] * 3 and -100 not in shown[[0, 7, 14]].tolist()
        for spoilt in ([], [3], [3, 10, 17]):
            bad = x.clone()
            bad[spoilt, 299] = torch.nan
            triton_kernels.summarize_targets(shown, -100, bad, 16.0, summary)
            got = _total(summary)
            valid = shown[shown != -100]
            assert got == (len(valid), int(valid.min()), int(valid.max()), len(spoilt)), got
        x[3, 5] = torch.inf
        x[10, 0] = -16.5
        x[17, 256] = 16.0
        triton_kernels.summarize_targets(shown, -100, x, 16.0, summary)
        assert _total(summary)[3] == 2
    triton_kernels.summarize_targets(torch.full((10,), 5), 5, torch.zeros(10, 3, dtype=torch.bfloat16), 1.0, summary)
    assert summary[:, 0].sum() == 0 and summary[:, 3].sum() == 0
    print("ok summarize_targets")


def check_scale():
    triton_kernels.MOST_PROGRAMS = 2  # each has several blocks
    dtypes = (torch.float32, torch.float16, torch.float32)
    for sizes in ((50000,), (50000, 70000), (9000, 20000, 1), (30000, 3)):
        data = [torch.randn(n).to(dtype) for n, dtype in zip(sizes, dtypes, strict=False)]
        kept = [v.clone() for v in data]
        triton_kernels.scale_in_place(data, torch.tensor(1.0))
        assert all(map(torch.equal, data, kept))
        triton_kernels.scale_in_place(data, torch.tensor(-0.5))
        assert all(torch.equal(v, before * -0.5) for v, before in zip(data, kept, strict=True))
    print("ok scale_in_place")


def check_sum_parts():
    for dtype, beta in itertools.product((torch.float32, torch.float16), (0.0, 1.0, 0.5)):
        parts, out = torch.randn(5, 37, 41), torch.randn(37, 41).to(dtype)
        want = 0.25 * parts.double().sum(0) + (beta * out.double() if beta else 0.0)
        if not beta:
            out.fill_(torch.nan)
        triton_kernels.sum_parts(parts, out, 0.25, beta)
        close(f"sum_parts {dtype} {beta}", out, want, FLOAT32 if dtype == torch.float32 else 2.0**-11)
    print("ok sum_parts")


def check_fold_plain():
    """Against PyTorch's own row values: rows that are certain, of every target, without one, −inf and NaN."""
    tiles, n = 700, 6
    for headroom, ignore_index in ((0, None), (15, None), (0, -100), (0, 2**40)):
        maxima, sums = torch.randn(n, tiles) * 5, torch.rand(n, tiles) * 5 + 1
        lse = (maxima.double() + sums.double().log()).logsumexp(1)
        target_logit = (lse - torch.tensor([1e-6, 1e-3, 0.3, 0.6, 12.0, 200.0], dtype=torch.float64)).float()
        target = torch.arange(n).repeat_interleave(2)[::2]
        if ignore_index is not None:
            target[2], target_logit[2] = ignore_index, -torch.inf
        rows = torch.full((4, n + 3), torch.nan)[:, :n]
        plain = cross_entropy.Plain(rows, 0.75, 1 / 64, ignore_index)
        triton_folds.fold_plain(maxima, sums * 2.0**headroom, headroom, target_logit, target, plain)
        exact = torch.full((4, n), torch.nan, dtype=torch.float64)
        stats = RowStatistics(lse=rows[0].double(), target_logit=target_logit.double())
        plain._replace(rows=exact).write(stats, target)
        close(f"fold_plain lse {headroom}", rows[0], lse, FLOAT32)
        for name, got, want in zip(("a", "fix", "loss"), rows[1:], exact[1:], strict=True):
            assert ((got.double() - want).abs() <= 1e-6 * want.abs()).all(), (name, got, want)
    maxima[1], maxima[3], target_logit[3] = torch.nan, -torch.inf, -torch.inf
    triton_folds.fold_plain(maxima, sums, 0, target_logit, target, plain)
    assert rows[0, 1].isnan() and rows[2, 1].isnan() and rows[3, 1].isnan() and rows[0, 3] == -torch.inf
    print("ok fold_plain")


def check_dz(options, dtype, with_vectors, vocab=5000, tokens=6):
    """dz from exponentials: the same exponentials scaled by the kernel and by the torch engine's formulas."""
    vectors = (torch.randn(vocab), torch.rand(vocab) + 0.5) if with_vectors else (None, None)
    target = torch.randint(0, vocab, (tokens,))
    problem = Problem(
        torch.randn(tokens, 16).to(dtype),
        torch.randn(vocab, 16).to(dtype),
        target,
        *vectors,
        LossOptions(**options),
        True,
    )
    engine = TorchEngine(dz_dtype=dtype)
    e = torch.empty(tokens, vocab + 8, dtype=dtype)[:, :vocab]
    stats, maxima, _ = engine.exp_chunk(problem, out=e)
    scale = torch.tensor(4096.0 if dtype == torch.float16 else 1.0)
    upstream = cross_entropy.LossOutput(scale)
    coefficients = cross_entropy.coefficients(stats, row_weights(problem), problem, upstream, 1.0)
    check_dz_of(problem, engine, e, stats, maxima, coefficients, f"{dtype} {options}")


def check_entropy_dz(dtype, vocab=5000, tokens=6):
    """The same with an entropy's gradient, temperature and exponentials that are 0."""
    x, weight = torch.randn(tokens, 16).to(dtype), torch.randn(vocab, 16).to(dtype) * 8
    options = LogProbOptions(temperature=1.5, return_entropy=True)
    problem = Problem(x, weight, torch.randint(0, vocab, (tokens,)), options=options, dense=True)
    engine = TorchEngine(dz_dtype=dtype)
    e = torch.empty(tokens, vocab + 8, dtype=dtype)[:, :vocab]
    stats, maxima, _ = engine.exp_chunk(problem, out=e)
    stats = stats.finished()
    by = RowDerivatives(torch.randn(tokens), h=torch.randn(tokens))
    coefficients = row_coefficients(stats, row_weights(problem), options, by)
    check_dz_of(problem, engine, e, stats, maxima, coefficients, f"{dtype} entropy")


def check_dz_of(problem, engine, e, stats, maxima, coefficients, what):
    dtype, tokens, target = e.dtype, problem.tokens, problem.target
    want = e.clone()
    want_sums = engine.scale_chunk(problem, want, maxima, stats.lse, coefficients, True)
    headroom = 15 if dtype == torch.float16 else 0
    exponentials, arguments = e.clone(), (maxima, stats.lse, coefficients, engine.exp_tile(problem), headroom)
    assert triton_kernels.dz_of_exp(problem, e, *arguments, column_sums=False) is None
    # both are rounded once to the dtype; a value next to a rounding boundary may fall either way
    close(f"dz_of_exp {what}", e, want, max(torch.finfo(dtype).eps / 8, FLOAT32))
    assert torch.equal(e[torch.arange(tokens), target], coefficients.fix.to(dtype))
    sums = triton_kernels.dz_of_exp(problem, exponentials, *arguments, column_sums=True)
    assert torch.equal(exponentials, e)
    # of a few rows, each rounded to the dtype in one of the two
    close(f"column sums {what}", sums, want_sums, max(torch.finfo(dtype).eps, FLOAT32))


torch.manual_seed(0)
check_folds()
check_moments()
check_summary()
check_scale()
check_sum_parts()
check_fold_plain()
for dtype in (torch.float32, torch.float16):  # the interpreter truncates to bf16 where a GPU rounds
    check_dz({}, dtype, False)
    check_dz(dict(softcap=5.0), dtype, True)  # in the exponentials already
    check_dz(dict(label_smoothing=0.1), dtype, False)
    check_entropy_dz(dtype)
    check_dz(dict(label_smoothing=0.1, lse_square_scale=1e-3, use_token_scaling=True), dtype, True)
check_dz(dict(softcap=5.0, use_token_scaling=True), torch.float32, True)

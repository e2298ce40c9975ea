"""Kernels executed on the CPU, in a process of its own for each architecture (PTX_ARCH), which test_ptx.py starts:
plain tests are those of `make test`, those marked `blackwell` take many minutes."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import pytest
import torch

from ptx.launches import Executed, prepare

ARCH = os.environ["PTX_ARCH"]
prepare(ARCH)

from ptx import cases, mutants, package  # noqa: E402
from ptx.cases import CASES, LONG, Case, run  # noqa: E402
from ptx.faults import FAULTS  # noqa: E402
from ptx.package import DTYPES, Flags  # noqa: E402

torch.set_num_threads(1)
# on sm_103a, whose kernels differ from sm_100a's in little, fewer
SHORT = {"forward ragged", "exp rows ragged", "exp all", "backward all", "backward fp16"}
SHARE = [name for name in CASES if name not in LONG and (ARCH == "sm_100a" or name in SHORT)]
# a share of the long tests, so that several processes do them: "0/4" is the first of four
PART, PARTS = (int(number) for number in os.environ.get("PTX_PART", "0/1").split("/"))
WIDTHS = (1, 2, 31, 32, 33, 127, 128, 129, 224, 255)


@pytest.fixture(scope="module")
def gpu():
    torch.use_deterministic_algorithms(True)  # and so memory that nobody wrote is NaN
    with Executed() as executed:
        yield executed


def check(gpu: Executed, case: Case, seed: int | None = None, compare_engine: bool = False) -> None:
    gpu.seed, gpu.clusters = seed, case.clusters
    errors = run(case, compare_engine)
    gpu.launches.clear()
    assert all(share <= 1 for share in errors.values()), errors


def test_one_dtype_after_the_other(gpu):
    """One process compiles for bf16, then for fp16, and each keeps the constant of its own; then in the other order."""
    bf16 = Case("exp", 40, 16, 300, "bf16")
    fp16 = replace(bf16, dtype="fp16")
    for case in (bf16, fp16, bf16):
        check(gpu, case)
    bf16, fp16 = (replace(case, flags=cases.BIAS_ARGMAX) for case in (bf16, fp16))
    for case in (fp16, bf16, fp16):
        check(gpu, case)


@pytest.mark.parametrize("name", SHARE)
def test_against_float64_and_the_torch_engine(gpu, name):
    """In two orders of warps and queues."""
    for seed in (None, 1):
        check(gpu, CASES[name], seed, compare_engine=seed is None)


def tile_of(kernel: str) -> int:
    return package.tile_columns(kernel, cases.make(Case(kernel, 1, 8, 1)))


@pytest.mark.parametrize("kernel", ["forward", "exp"])
def test_widths_of_the_last_tile(gpu, kernel):
    if ARCH != "sm_100a":
        pytest.skip("these kernels are the same on sm_103a: with -m blackwell")
    for width in WIDTHS:
        check(gpu, mutants.width_case(kernel, width, tile_of(kernel)))


@pytest.mark.parametrize("kernel", ["forward", "exp"])
def test_a_target_in_every_column(gpu, kernel):
    tile = tile_of(kernel)
    assert tile == mutants.TILE
    targets = tuple(random.Random(1).sample(range(2 * tile), 2 * tile))
    check(gpu, Case(kernel, 2 * tile, 8, 2 * tile, targets=targets))


@pytest.mark.parametrize("n, vocab, hidden", [(200, 300, 272), (1, 515, 16), (70, 257, 304)])
def test_a_sum_in_two_parts(gpu, n, vocab, hidden):
    """Three products with factors, one after the other, in two orders of warps and queues; and nothing else is written.

    The sum may be off by what two_part_sum.py says, its upper part by a rounding, both by the product, whose parts
    are summed in float32: a 16th of n of them one after the other, and a few more."""
    g = torch.Generator().manual_seed(n)
    dz = torch.randn(n, -(-vocab // 8) * 8, generator=g).bfloat16()[:, :vocab]
    x = torch.randn(n, hidden, generator=g).bfloat16()
    for seed in (None, 1):
        gpu.seed, gpu.clusters = seed, 2
        total, other = (package.sum_of_zero(vocab, hidden) for _ in range(2))
        for alpha, beta in ((1.0, 1.0), (1.25, 1.0), (-0.5, 0.25)):
            before = total.value().double()
            package.run_sum(dz, x, total, alpha, beta)
            package.run_sum(dz, x, other, alpha, beta, torch_engine=True)
            exact = alpha * dz.double().T @ x.double() + beta * before
            size = abs(alpha) * dz.double().abs().T @ x.double().abs() + abs(beta) * before.abs()
            of_product = size * cases.U * (n / 16 + 20)
            errors = {
                "sum": cases.share(total.value(), exact, exact.abs() * 2.0**-16 + of_product),
                "upper part": cases.share(total.high, exact, exact.abs() * 2.0**-8 + of_product),
            }
            assert all(share <= 1 for share in errors.values()), errors
            same = (total.high == other.high).double().mean()
            assert same > 0.99, f"{same} of the upper parts are the torch engine's"
    gpu.launches.clear()


@pytest.mark.parametrize("kernel", ["forward", "exp"])
def test_a_nan_stays_in_its_row(gpu, kernel):
    """Its row's results are NaN, the others' the very bits of a run without it."""
    problem = cases.make(Case(kernel, 140, 64, 509))
    clean, clean_e = _statistics(gpu, kernel, problem)
    problem.x[5, 3] = math.nan
    found, e = _statistics(gpu, kernel, problem)
    others = torch.arange(140) != 5
    assert torch.isnan(found.lse[5])
    assert torch.equal(found.lse[others], clean.lse[others])
    assert torch.equal(found.target_logit[others], clean.target_logit[others])
    if kernel == "exp":
        assert torch.equal(e[others], clean_e[others])


def _statistics(gpu, kernel: str, problem):
    gpu.seed = None
    out = torch.empty(problem.tokens, 512, dtype=problem.x.dtype)[:, : problem.vocab]
    with package.exact_folds():
        stats = package.run_forward(problem) if kernel == "forward" else package.run_exp(problem, out)[0]
    return stats, out


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_noticed(gpu, fault):
    """By each of its cases, with the seeds of make test."""
    if ARCH != "sm_100a":
        pytest.skip("on sm_100a")
    for name in FAULTS[fault]:
        kernel, _ = mutants.kernel_of(gpu, CASES[name])
        planted = fault(kernel)
        assert planted, f"the fault's place was not found in {name}"
        original = list(kernel.code)
        for mutant in planted:
            kernel.code[mutant.index] = mutant.code
        try:
            assert any(mutants.verdict(gpu, CASES[name], seed) for seed in (None, 1)), f"{name} does not notice"
        finally:
            kernel.code[:] = original


# ------------------------------------------------------------------------------------------------- with -m blackwell


def share_of(parameters) -> list:
    return list(parameters)[PART::PARTS]


@pytest.mark.blackwell
@pytest.mark.parametrize("name, kernel, dtype, flags, ragged", share_of(package.variants()))
def test_every_variant(gpu, name, kernel, dtype, flags, ragged):
    """At an odd size, in a random order of warps and queues."""
    rng = random.Random(name)
    vocab = rng.choice((257, 300, 509, 765)) if ragged or kernel == "backward" else rng.choice((768, 1536))
    n, hidden = rng.choice((3, 129, 200, 256, 300)), rng.choice((8, 64, 136, 520))
    check(gpu, Case(kernel, n, hidden, vocab, dtype, flags, clusters=rng.choice((1, 2))), rng.randrange(1000), True)


@pytest.mark.blackwell
@pytest.mark.parametrize("kernel", share_of(["forward", "exp"]))
def test_every_width_of_the_last_tile(gpu, kernel):
    for width in range(1, tile_of(kernel)):
        check(gpu, mutants.width_case(kernel, width, tile_of(kernel)), seed=width)


@pytest.mark.blackwell
@pytest.mark.parametrize("name", share_of(CASES))
def test_random_schedules(gpu, name):
    for seed in range(2, 4 if name == "forward raster" else 12):
        check(gpu, CASES[name], seed, compare_engine=seed == 2)


@pytest.mark.blackwell
@pytest.mark.parametrize("kernel", share_of(["exp", "forward"]))
def test_targets_far_from_a_tile(gpu, kernel):
    """Indices are compared as 16 bits within a tile: those 2¹⁵ and 2¹⁶ columns away must match none."""
    vocab = 2**16 + 2**15 + 7
    targets = (0, 2**15, 2**15 - 1, 2**16, 2**16 + 1, vocab - 1)
    check(gpu, Case(kernel, 6, 8, vocab, targets=targets))


@pytest.mark.blackwell
@pytest.mark.parametrize("seed", share_of(range(40)))
def test_random_cases(gpu, seed):
    """Any flags, dtype, size and schedule."""
    rng = random.Random(seed)
    kernel = rng.choice(package.KERNELS)
    smoothing = rng.random() < 0.5
    flags = Flags(
        bias=rng.random() < 0.5,
        softcap=rng.random() < 0.5 and not (kernel == "exp" and smoothing),  # there is no such kernel
        ce_weight=smoothing and rng.random() < 0.5,
        smoothing=smoothing,
        argmax=kernel != "backward" and rng.random() < 0.5,
    )
    case = Case(
        kernel,
        n=rng.randrange(1, 600),
        hidden=8 * rng.randrange(1, 40),
        vocab=rng.randrange(1, 1500),
        dtype=rng.choice(list(DTYPES)),
        flags=flags,
        clusters=rng.choice((1, 2, 3, 5)),
        seed=seed,
    )
    check(gpu, case, seed)

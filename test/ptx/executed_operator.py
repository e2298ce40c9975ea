"""Calls of the whole operator with executed kernels, in a process of its own for each dtype (PTX_DTYPE), which
test_ptx.py starts: both schedules, kept columns, ragged vocabularies, every option at once, a vocabulary split over two
ranks."""

from __future__ import annotations

import os

import pytest
import torch

from liger_cutedsl import LossOptions, explain, fused_linear_cross_entropy, fused_linear_log_probs
from liger_cutedsl.schedules import dw_sum, single_pass
from ptx import package
from ptx.package import DTYPES
from reference import GRADIENT_BOUND, Case, assert_close, check_case, reference
from reference_log_probs import LOGITS
from reference_log_probs import check as check_log_probs
from reference_log_probs import expected as expected_log_probs

DTYPE = DTYPES[os.environ["PTX_DTYPE"]]
FP16 = os.environ["PTX_DTYPE"] == "fp16"
# schedule, workspace_mb: recompute keeps all exponentials, those that dW's memory holds (bf16), or none
SINGLE_PASS, KEPT, TILED = ("single_pass", None), ("recompute", None), ("recompute", 0.001)
EVERYTHING = dict(softcap=20.0, label_smoothing=0.1, lse_square_scale=1e-3, use_token_scaling=True)
# fp16 single_pass refuses these together, for reasons of accuracy (single_pass.obstacle)
COMMON = dict(label_smoothing=0.1) if FP16 else EVERYTHING
CALLS = {
    "single_pass": (SINGLE_PASS, {}, 200, 509),
    "single_pass, full tiles": (SINGLE_PASS, {}, 129, 512),
    "single_pass, chunks": (("single_pass", 0.01), {}, 600, 300),
    "single_pass, sum": (SINGLE_PASS, dict(reduction="sum"), 3, 257),
    "single_pass, every option": (SINGLE_PASS, COMMON, 140, 300),
    "kept": (KEPT, {}, 200, 509),
    "kept, none": (KEPT, dict(reduction="none"), 40, 765),
    "tiled": (TILED, {}, 200, 509),
    "tiled, one row": (TILED, {}, 1, 257),
    "tiled, two tiles": (TILED, {}, 5, 3300),
    "tiled, every option": (TILED, EVERYTHING, 140, 509),
    "kept, every option": (KEPT, EVERYTHING, 140, 300),
    "tiled, every option, none": (TILED, dict(EVERYTHING, reduction="none"), 37, 301),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name):
    (schedule, workspace_mb), options, tokens, vocab = CALLS[name]
    vectors = len(options) > 2
    ce_weight = vectors and not (FP16 and schedule == "single_pass")
    case = Case(tokens, 64, vocab, DTYPE, bias=vectors, ce_weight=ce_weight, options=options)
    # of a handful of elements each may be rounded by nearly a whole unit, as exponential and as dz
    bound = GRADIENT_BOUND[DTYPE] * (2 if tokens < 8 else 1)
    check_case(case, engine="cute", schedule=schedule, workspace_mb=workspace_mb, gradient_bound=bound)


@pytest.mark.skipif(FP16, reason="whose gradients wait in float32")
def test_dw_summed_in_two_parts(monkeypatch):
    """Of nine chunks, where that fits and float32 does not: as accurate as of one."""
    case = Case(144, 64, 300, DTYPE, ignored=0.0)
    x, weight, target, *_ = case.tensors()
    monkeypatch.setattr(single_pass, "SMALLEST_CHUNK", 16)
    monkeypatch.setattr(dw_sum, "ROUNDED_AS_OFTEN", 0)  # all of them in two parts
    call = dict(engine="cute", schedule="single_pass")
    smallest = explain(x, weight, target, workspace_mb=0.001, **call)
    fitting = (smallest.workspace_bytes + 300 * 64) / 2**20
    route = explain(x, weight, target, workspace_mb=fitting, **call)
    assert (route.chunk, route.dw_sum, route.dw_low_bytes) == (16, torch.bfloat16, 300 * 64)
    _, (_, exact, _) = reference(x, weight, target, None, None, LossOptions())
    loss = fused_linear_cross_entropy(x, weight, target, workspace_mb=fitting, **call)
    (found,) = torch.autograd.grad(loss, weight)
    assert (
        float((found.double() - exact).norm() / exact.norm()) < 2.5e-3
    )  # two roundings, dz's and dW's, of 1.7e-3 each


@pytest.mark.parametrize("logits", ["plain", "cap, temperature and scale"])
@pytest.mark.parametrize("workspace_mb", [None, 0.001], ids=["kept", "tiled"])
def test_log_probs(workspace_mb, logits):
    """Every per-token value, with the gradients of all that have one; fp16 and capped entropies keep nothing."""
    case = Case(70, 64, 510, DTYPE, bias=True)
    check_log_probs(case, LOGITS[logits], engine="cute", workspace_mb=workspace_mb)


def test_vectors_at_any_address():
    """An odd number of rows and three sums a row: what is folded of them lies at addresses that kernels do not take."""
    x, weight, target, *_ = Case(35, 64, 300, DTYPE, ignored=0).tensors()
    got = fused_linear_log_probs(x, weight, target, return_entropy=True, engine="cute", workspace_mb=0.001)
    (got.entropy.sum() + got.log_probs.sum()).backward()
    leaves = [v.detach().double().requires_grad_() for v in (x, weight)]
    want = expected_log_probs(*leaves, target, None)
    (want.entropy.sum() + want.log_probs.sum()).backward()
    for leaf, exact in zip((x, weight), leaves, strict=True):
        assert_close(leaf.grad, exact.grad, 2 * GRADIENT_BOUND[DTYPE], "gradient")
    problem = package.make_problem(x, weight, target, None, None, package.Flags(), 1.0, 0.0)
    row = torch.ones(36)[1:]
    package.run_backward(problem, row, package.coefficients(row, None), torch.empty(35, 304, dtype=DTYPE)[:, :300])


def test_a_vocabulary_split_over_two_ranks(tmp_path):
    """Two processes forked off this one, which find its kernels compiled."""
    import multiprocessing

    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, tmp_path / "store")) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=300)
    assert [rank.exitcode for rank in ranks] == [0, 0]


def _rank(rank: int, store) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    import torch.distributed as dist

    import vocab_parallel_worker as worker

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    worker.ON_GPU = True  # whose tolerances are 16 bits' rounding of dz
    for options, workspace_mb in (({}, None), (EVERYTHING, None), (EVERYTHING, 0.001)):
        vectors = dict(bias=bool(options), ce_weight=bool(options))
        case = worker.Case(40, 64, 580, DTYPE, options=options, **vectors)
        worker.check(case, [0, 301, 580], workspace_mb=workspace_mb, engine="cute")
    single_pass.SMALLEST_CHUNK = 16  # two chunks
    case = worker.Case(30, 64, 300, DTYPE, options=dict(accum_dtype=torch.float32))
    worker.check(case, [0, 151, 300], workspace_mb=0.001, engine="cute", schedule="single_pass")
    dist.barrier()
    dist.destroy_process_group()

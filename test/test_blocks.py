"""`recompute` in blocks of rows: when, how many, what they take of memory, and how far their gradients are off. That
every option is right in them, every numeric test says that runs in the place "torch-cpu-blocks"."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import liger_cutedsl
from liger_cutedsl import LossOptions, fused_linear_cross_entropy, fused_linear_log_probs, routing, testing
from liger_cutedsl.call import TENSORS, Problem, WantedGradients
from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.route import Settings
from liger_cutedsl.saved_state import put_together
from liger_cutedsl.schedules import blocks, gradient_sink, recompute
from liger_cutedsl.schedules.schedule import Task
from liger_cutedsl.split import PlannedShare
from reference import GRADIENT_BOUND, Case, assert_close, check_case, on_a_gpu, reference
from test_footprint import check as check_footprint
from test_vocab_parallel import launch
from test_weight_grad_buffer import failing_at

MIB = 2**20
LLAMA = (4096, 128256)  # H, V of Llama 3 8B's head
SMALL = dict(schedule="recompute", workspace_mb=0.04)


def planned(h200, tokens, workspace_mb=None, options=None, wanted=(True, True), split=None):
    problem = on_a_gpu(tokens, *LLAMA, torch.bfloat16, dict(options=options or {}), wanted)
    settings = Settings(schedule="recompute", workspace_mb=workspace_mb)
    task = Task(problem, WantedGradients.of(problem), settings, *(() if split is None else (split,)))
    return recompute.plan(h200, task, "")


@pytest.mark.parametrize("tokens, width, kept", [(1024, 12672, 128256), (8192, 12672, 42624), (16384, 9408, 25536)])
def test_a_batch_that_fits_is_one_block(h200, tokens, width, kept):
    """As wide as before there were blocks, and as many exponentials kept: the same products, and so the same bits."""
    route = planned(h200, tokens)
    assert (route.row_block, route.tile_width, route.kept) == (0, width, kept)
    assert "blocks" not in str(route)


@pytest.mark.parametrize("tokens, count", [(20000, 1), (24576, 2), (32768, 2), (40001, 3), (65536, 4), (131072, 8)])
def test_a_long_batch_has_wide_tiles_within_the_budget(h200, tokens, count):
    route = planned(h200, tokens)
    assert route.tile_width >= 8192 and route.workspace_bytes <= 560 * MIB
    if count == 1:
        assert route.row_block == 0
        return
    assert f"blocks of {route.row_block} tokens" in str(route)
    assert -(-tokens // route.row_block) == count and route.row_block % 128 == 0
    # dW's memory holds so many columns' exponentials of the first block
    assert 0.98 < route.kept * (4096 + route.row_block) / (4096 * 128256) <= 1
    assert route.gemms == 4 - route.kept / 128256 * route.row_block / tokens


def test_dw_is_rounded_eight_times_at_most(h200):
    """However long the batch, or small the budget: what does not fit then is beyond the budget, in tiles of 3072."""
    for tokens, workspace_mb in ((2**18, None), (2**20, None), (32768, 1.0)):
        route = planned(h200, tokens, workspace_mb)
        assert -(-tokens // route.row_block) == 8 and route.tile_width == 3072


def test_where_there_are_no_blocks(h200):
    assert planned(h200, 65536, wanted=(False, True)).row_block == 0, "no dX, no sum of it"
    assert planned(h200, 65536, options=dict(accum_dtype=torch.float32)).row_block == 0, "dW is to be rounded once"
    assert planned(h200, 4000, workspace_mb=1.0).row_block == 0, "blocks of fewer than 2048 rows"
    assert planned(h200, 65536, wanted=(True, False)).row_block > 0


def test_ranks_of_a_split_vocabulary_take_the_same_blocks(h200):
    """Whatever each of them was given, and has of the vocabulary, and keeps."""
    split, found = PlannedShare(), set()
    for engine, workspace_mb in ((h200, None), (h200, 64), (h200, 10**6), (TorchEngine(torch.bfloat16), 300)):
        for vocab in (0, 100, 128256):
            problem = on_a_gpu(65536, 4096, vocab, torch.bfloat16, {})
            task = Task(problem, WantedGradients.of(problem), Settings(workspace_mb=workspace_mb), split)
            found.add(recompute.plan(engine, task, "").row_block)
    assert found == {16384}


@pytest.mark.parametrize("tokens", [31, 32, 33, 47, 48, 49, 129, 300])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_blocks_of_any_length(small_blocks, tokens, dtype):
    """The last one of one row, too, and of all."""
    for options in ({}, dict(reduction="none", softcap=5.0, label_smoothing=0.1)):
        case = Case(tokens=tokens, dtype=dtype, bias=True, ignored=0.0, options=options)
        count = min(8, tokens // 16)
        block = -(-tokens // count // 16) * 16
        x, weight, target, bias, _ = case.tensors()
        route = liger_cutedsl.explain(x, weight, target, bias=bias, **SMALL, **options)
        assert route.row_block == (block if block < tokens else 0)
        check_case(case, **SMALL)


def with_blocks(x, weight, target, count, width=256, dtype=torch.bfloat16, wanted=None, **call):
    """dX and dW of the mean loss in so many blocks, of the torch engine with dz in `dtype`."""
    problem = Problem(x.detach(), weight.detach(), target, dense=True, options=LossOptions(**call))
    wanted = wanted or WantedGradients(x.dtype, weight.dtype)
    engine, task = TorchEngine(dtype), Task(problem, wanted, Settings(schedule="recompute", workspace_mb=0.01))
    block = 0 if count == 1 else -(-len(x) // count)
    route = recompute.plan(engine, task, "")
    kept = recompute.kept_columns(engine, blocks.first_of(problem, block), wanted, 0)
    route = replace(route, row_block=block, tile_width=width, kept=kept)
    with torch.no_grad():
        output, state = recompute.forward(engine, task, route)
        assert (state.kept is None) == (kept == 0)
        return recompute.backward(engine, task, route, state, type(output)(torch.ones_like(output[0])))


def test_errors_grow_with_the_number_of_blocks_as_stated():
    """blocks.MOST_BLOCKS says by how much: dW's with the square root of its roundings, whose sums are smaller at first;
    dX's not at all. float32 is rounded at 2⁻²⁴."""
    x, weight, target, *_ = Case(4096, 128, 1000, dtype=torch.bfloat16, ignored=0.0, scale=1.0).tensors()
    _, (dx, dw, _) = reference(x, weight, target, None, None, LossOptions())

    def errors(count, **changes):
        found = with_blocks(x, weight, target, count, **changes)
        return [float((g.double() - w).norm() / w.norm()) for g, w in ((found.x, dx), (found.weight, dw))]

    once = errors(1)
    assert once[0] < 2e-3 and once[1] < 2e-3
    for count, most in ((2, 2.3e-3), (4, 2.85e-3), (8, 3.7e-3)):
        of_dx, of_dw = errors(count)
        assert of_dx < 1.02 * once[0]
        assert 1.05 * once[1] < of_dw < most
    wide = WantedGradients(torch.bfloat16, torch.float32)
    narrow_dz = errors(8, wanted=wide)[1]
    assert narrow_dz < once[1]
    assert errors(8, dtype=None, wanted=wide)[1] < GRADIENT_BOUND[torch.float32]


def test_a_buffer_of_float32_and_accum_dtype_round_no_more_often(small_blocks):
    case = Case(400, 32, 700, dtype=torch.bfloat16, ignored=0.0)
    x, weight, target, *_ = case.tensors()
    _, (_, want, _) = reference(x, weight, target, None, None, LossOptions())
    buffer = torch.zeros(weight.shape)
    assert liger_cutedsl.explain(x, weight, target, weight_grad_buffer=buffer, **SMALL).row_block
    fused_linear_cross_entropy(x, weight, target, weight_grad_buffer=buffer, **SMALL).backward()
    # 16-bit inputs are exact, and all else is float32
    assert_close(buffer, want, GRADIENT_BOUND[torch.float32], "dW in float32")
    found, once = (
        torch.autograd.grad(fused_linear_cross_entropy(x, weight, target, **call), weight)[0]
        for call in (dict(SMALL, accum_dtype=torch.float32), dict(schedule="recompute"))
    )
    error, one = (float((g.double() - want).norm()) for g in (found, once))
    assert error < 1.02 * one


def test_kept_exponentials_are_the_first_blocks(small_blocks):
    x, weight, target, *_ = Case(tokens=100, hidden=64, vocab=1000, dtype=torch.float32, ignored=0.0).tensors()
    route = liger_cutedsl.explain(x, weight, target, **SMALL)
    assert route.row_block == 32 and route.kept == 576  # of 1000·64/(32 + 64), in tiles of 192; 384 of all 100 rows
    loss = fused_linear_cross_entropy(x, weight, target, **SMALL)
    kept = put_together(loss.grad_fn.state, loss.grad_fn.saved_tensors[len(TENSORS) + 1 :]).kept
    memory = kept.weight_gradient.data_ptr()
    assert kept.e.shape == (32, 576) and kept.maxima.shape == (32, 3)
    logits = x.detach()[:32] @ weight.detach().t()
    largest = logits[:, 192:384].amax(dim=1, keepdim=True)
    torch.testing.assert_close(kept.e[:, 192:384], torch.exp(logits[:, 192:384] - largest))
    del kept
    loss.backward()
    assert weight.grad.data_ptr() == memory, "the gradient was copied on its way to weight.grad"


def test_backward_twice_and_under_checkpointing(small_blocks):
    x, weight, target, *_ = Case(tokens=100, dtype=torch.float64).tensors()
    _, grads = reference(x, weight, target, None, None, LossOptions())
    loss = fused_linear_cross_entropy(x, weight, target, **SMALL)
    for retain in (True, True, False):
        found = torch.autograd.grad(loss, (x, weight), retain_graph=retain)
        for name, got, want in zip(("dx", "dW"), found, grads, strict=False):
            assert_close(got, want, 1e-9, f"{name}, retain_graph={retain}")
    loss = checkpoint(lambda x: fused_linear_cross_entropy(x * 1.0, weight, target, **SMALL), x, use_reentrant=False)
    for name, got, want in zip(("dx", "dW"), torch.autograd.grad(loss, (x, weight)), grads, strict=False):
        assert_close(got, want, 1e-9, f"{name}, checkpointed")


def test_float16_with_a_loss_scale(small_blocks):
    """dW of each block goes through float32 and is added in float16: eight roundings, far from its smallest number."""
    x, weight, target, *_ = Case(400, 32, 700, dtype=torch.float16, ignored=0.0).tensors()
    upstream = torch.tensor(2.0**14)
    _, (dx, dw, _) = reference(x, weight, target, None, None, LossOptions(), upstream)
    loss = fused_linear_cross_entropy(x, weight, target, **SMALL)
    loss.backward(upstream)
    assert_close(x.grad, dx, GRADIENT_BOUND[torch.float16], "dx")
    assert_close(weight.grad, dw, GRADIENT_BOUND[torch.float16], "dW")


SITUATIONS = {
    "plain": {},
    "bias": dict(bias=True),
    "row losses": dict(bias=True, options=dict(reduction="none")),
    "ignored": dict(share=0.4),
}


@pytest.mark.parametrize("wanted", [(True, True), (True, False)], ids=["all", "frozen W"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_bytes_are_as_promised(monkeypatch, situation, dtype, wanted):
    """Of the torch engine, in three blocks, the last of them short; and within the budget."""
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 512)
    testing.reset()
    options = dict(SITUATIONS[situation])
    share = options.pop("share", 0.0)
    case = Case(1801, 128, 8192, dtype=dtype, ignored=0.0, **options)
    mb = 10 if share else 16
    call = dict(schedule="recompute", workspace_mb=mb)
    x, weight, target, *_ = case.tensors()
    target[: int(share * 1801)] = -100
    bias = None if not case.bias else torch.zeros(8192, dtype=dtype)
    route = liger_cutedsl.explain(x, weight, target, bias=bias, **call, **case.options)
    assert route.row_block and -(-(1801 - int(share * 1801)) // route.row_block) >= 2
    assert route.workspace_bytes - route.copied_bytes <= 1.01 * mb * MIB  # dz has eight spare columns
    check_footprint(case, share, None, wanted, **call)
    testing.reset()


def test_log_probabilities_of_selected_columns(small_blocks):
    """Their dz is added to each block's dX, and once to dW."""
    x, weight, target, *_ = Case(tokens=100, dtype=torch.float64, ignored=0.0).tensors()
    ids = torch.tensor([3, 300, 3, 0])
    found = fused_linear_log_probs(x, weight, target, selected_token_ids=ids, workspace_mb=0.04)
    scale = torch.linspace(-1, 1, 400, dtype=torch.float64).view(100, 4)
    total = found.log_probs.sum() + (found.selected_log_probs * scale).sum()
    got = torch.autograd.grad(total, (x, weight))
    log_p = torch.log_softmax(x @ weight.t(), dim=1)
    want = torch.autograd.grad(log_p.gather(1, target[:, None]).sum() + (log_p[:, ids] * scale).sum(), (x, weight))
    for name, one, other in zip(("dx", "dW"), got, want, strict=True):
        assert_close(one, other, 1e-9, name)


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, KernelFailure])
def test_a_buffer_of_a_backward_that_failed_gets_the_rest(small_blocks, monkeypatch, error):
    """In any block: the second attempt counts by the blocks of the first, though it would take others."""
    x, weight, target, bias, _ = Case(tokens=100, vocab=700, bias=True, ignored=0.0).tensors()
    _, (dx, dw, db) = reference(x, weight, target, bias, None, LossOptions())
    owner, name = (gradient_sink, "matmul") if error is not KernelFailure else (TorchEngine, "dz_tile")
    before = torch.linspace(-1, 1, dw.numel(), dtype=torch.float64).view_as(dw)
    for nth in range(1, 100, 3):
        testing.reset()
        buffer = before.clone()
        x.grad = bias.grad = None
        loss = fused_linear_cross_entropy(x, weight, target, bias=bias, weight_grad_buffer=buffer, **SMALL)
        with monkeypatch.context() as planted:
            planted.setattr(owner, name, failing_at(nth, getattr(owner, name), error))
            planted.setattr(blocks, "SMALLEST_BLOCK", 50)
            routing._plans.clear()
            try:
                loss.backward()
            except torch.cuda.OutOfMemoryError:
                loss.backward()
            else:
                if testing.kernel_failure() is None:
                    break
        assert_close(buffer - before, dw, 1e-9, f"dW, {nth}")
        assert_close(x.grad, dx, 1e-9, "dx")
        assert_close(bias.grad, db, 1e-9, "db")
    assert nth > 10


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_a_split_vocabulary_in_blocks(world):
    worker = Path(__file__).parent / "vocab_parallel_blocks_worker.py"
    for rank, (status, output) in enumerate(launch(world, "options", "sums", "failing_kernels", worker=worker)):
        assert status == 0 and f"rank {rank} done" in output, output[-3000:]

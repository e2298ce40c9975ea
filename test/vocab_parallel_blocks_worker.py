"""One rank of the tests of `recompute` in blocks over a split vocabulary, run as vocab_parallel_worker.py is."""

import contextlib
import itertools

import torch
import torch.distributed as dist

from liger_cutedsl import LossOptions, testing
from liger_cutedsl import vocab_parallel_fused_linear_cross_entropy as head
from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.schedules import blocks
from reference import GRADIENT_BOUND, Case, assert_close, reference
from vocab_parallel_worker import OPTIONS, RANK, WORLD, as_on_a_gpu, check, main, refused, shards

# one rank keeps all exponentials, others have tiles as narrow as they get: blocks are the same
CALL = dict(schedule="recompute", workspace_mb=None if RANK == 0 else 0.01)
LAST = WORLD - 1

blocks.SMALLEST_BLOCK = blocks.TILE_QUANTUM = 16
blocks.DEFAULT_WORKSPACE_MB = 0.01


@contextlib.contextmanager
def sums():
    """[numbers] of the sums over ranks that begin."""
    sent, reduce = [], dist.all_reduce

    def counted(tensor, **how):
        sent.append(tensor.numel())
        return reduce(tensor, **how)

    dist.all_reduce = counted
    yield sent
    dist.all_reduce = reduce


def suite_options():
    """Every option, over equal shards, uneven ones, and one of nothing but padding."""
    for options, vectors in itertools.product(OPTIONS, (False, True)):
        dtype = torch.float32 if vectors else torch.float64
        case = Case(100, vocab=300, dtype=dtype, bias=vectors, ce_weight=vectors, options=options)
        for kind in ("equal", "single column"):
            check(case, shards(case.vocab, kind), **CALL)
    check(case, [0] + [300] * WORLD, padding=5, **CALL)


def suite_sums():
    """Of each block's dX, on every rank; 16-bit dX is rounded behind them."""
    case = Case(100, vocab=300 // WORLD * WORLD, dtype=torch.bfloat16, ignored=0.0)
    with sums() as sent:
        check(case, shards(case.vocab, "equal"), **CALL)
    assert sent == [32 * 24, 32 * 24, 32 * 24, 4 * 24], sent


def suite_failing_kernels():
    """On one rank, in any block: the others go on with NaN from it on, and wait for nobody."""
    case = Case(100, vocab=300 // WORLD * WORLD, dtype=torch.float64, ignored=0.0)
    x, weight, target, *_ = case.tensors()
    start = case.vocab // WORLD * RANK
    shard = weight.detach()[start : start + case.vocab // WORLD].clone().requires_grad_()
    _, (dx, dw, _) = reference(x, weight, target, None, None, LossOptions())
    call = dict(CALL, workspace_mb=0.01)
    dz_tile, seen = TorchEngine.dz_tile, []

    def failing(engine, problem, *arguments, **options):
        if problem.x.data_ptr() not in seen:
            seen.append(problem.x.data_ptr())
        if RANK == LAST and len(seen) == at + 1:
            raise KernelFailure("planted")
        return dz_tile(engine, problem, *arguments, **options)

    with as_on_a_gpu():
        for at in range(4):
            for _ in range(2):  # the first call of its kind reads what the ranks say
                loss = head(x, shard, target, **call)
                found = torch.autograd.grad(loss, (x, shard))
                assert_close(found[0], dx, GRADIENT_BOUND[torch.float64], "dx")
                assert_close(found[1], dw[start : start + len(shard)], GRADIENT_BOUND[torch.float64], "dW")
            loss, TorchEngine.dz_tile = head(x, shard, target, **call), failing
            seen.clear()
            if RANK == LAST:
                refused(lambda loss=loss: torch.autograd.grad(loss, x), "failed on this rank", error=RuntimeError)
            else:
                (found,) = torch.autograd.grad(loss, x)
                assert found[32 * at :].isnan().all()
                assert_close(found[: 32 * at], dx[: 32 * at], GRADIENT_BOUND[torch.float64], "dx before it")
            TorchEngine.dz_tile = dz_tile
    testing.reset()


if __name__ == "__main__":
    main(globals())

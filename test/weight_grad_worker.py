"""One rank of test_weight_grad_buffer.py::test_over_ranks: RANK RANKS FOLDER as arguments; gloo, CPU."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from liger_cutedsl import (
    LossOptions,
    fused_linear_cross_entropy,
    vocab_parallel_fused_linear_cross_entropy,
    vocab_parallel_fused_linear_log_probs,
    vocab_parallel_fused_linear_loss,
)
from reference import GRADIENT_BOUND, Case, assert_close, reference

RANK, RANKS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
BOUND, PADDING = GRADIENT_BOUND[torch.float64], 5


def shard(case: Case):
    """x, targets and this rank's rows, padding behind the last one's; the float64 gradients of all."""
    x, weight, target, *_ = case.tensors()
    per_rank = -(-(case.vocab + PADDING) // RANKS)
    padded = torch.cat([weight.detach(), weight.new_full((per_rank * RANKS - case.vocab, case.hidden), float("nan"))])
    own = torch.nn.Parameter(padded[RANK * per_rank : (RANK + 1) * per_rank].clone())
    valid = max(0, min(per_rank, case.vocab - RANK * per_rank))
    return x, own, target, slice(RANK * per_rank, RANK * per_rank + valid), weight


def check(buffer, before, want, rows, dx, dx_want):
    """Rows of padding are what they were, bit for bit."""
    valid = rows.stop - rows.start
    assert_close(buffer[:valid] - before[:valid], want[rows], 4 * BOUND, "dW", size=float(want.norm()))
    assert torch.equal(buffer[valid:], before[valid:]), "padding got a gradient"
    assert_close(dx, dx_want, BOUND, "dx")


def plain():
    case = Case(vocab=301)
    x, own, target, rows, weight = shard(case)
    options = LossOptions(reduction="none", label_smoothing=0.1)
    upstream = torch.linspace(0.5, 1.5, case.tokens, dtype=torch.float64)
    _, (dx, want, _) = reference(x, weight, target, None, None, options, upstream)
    own.main_grad, own.grad_added_to_main_grad = torch.full_like(own, 0.25).detach(), False
    before = own.main_grad.clone()
    call = dict(vocab_size=case.vocab, gradient_accumulation_fusion=True, workspace_mb=0.05)
    for step in (1, 2):
        x.grad = None
        loss = vocab_parallel_fused_linear_cross_entropy(x, own, target, reduction="none", label_smoothing=0.1, **call)
        loss.backward(upstream)
        check(own.main_grad, before, step * want, rows, x.grad, dx)
        assert own.grad is None and own.grad_added_to_main_grad


def others():
    """Log-probabilities, and a loss of one's own."""
    case = Case(vocab=301, ignored=0.0)
    x, own, target, rows, weight = shard(case)
    _, (dx, want, _) = reference(x, weight, target, None, None, LossOptions(reduction="sum"))
    for use in (
        lambda **more: -vocab_parallel_fused_linear_log_probs(x, own, target, **more).sum(),
        lambda **more: vocab_parallel_fused_linear_loss(
            x, own, target, lambda values: -values.log_prob, reduction="sum", **more
        ),
    ):
        x.grad, buffer = None, torch.full_like(own, 0.25).detach()
        before = buffer.clone()
        use(vocab_size=case.vocab, weight_grad_buffer=buffer).backward()
        check(buffer, before, want, rows, x.grad, dx)
        assert own.grad is None


def in_forward():
    """dW is not added there where the vocabulary is split: refused on every rank."""
    x, own, target, *_ = shard(Case(vocab=301))
    for name, call in (
        ("weight_grad_buffer", dict(weight_grad_buffer=torch.zeros_like(own).detach())),
        ("weight.main_grad", dict(gradient_accumulation_fusion=True)),
    ):
        own.main_grad = torch.zeros_like(own).detach()
        try:
            vocab_parallel_fused_linear_cross_entropy(x, own, target, vocab_size=301, schedule="single_pass", **call)
        except RuntimeError as error:
            assert f"{name} gets its gradient in backward where the vocabulary is split" in str(error), error
        else:
            raise AssertionError("not refused")


def dtensors():
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    case = Case(vocab=300)
    x, weight, target, *_ = case.tensors()
    _, (dx, want, _) = reference(x, weight, target, None, None, LossOptions())
    per_rank = 300 // RANKS
    rows = slice(RANK * per_rank, (RANK + 1) * per_rank)
    sharded = torch.nn.Parameter(DTensor.from_local(weight.detach()[rows].clone(), mesh, [Shard(0)]))
    local = torch.full((per_rank, case.hidden), 0.25, dtype=torch.float64)
    placed = DTensor.from_local(local.clone(), mesh, [Shard(0)])
    for buffer in (local.clone(), placed):
        x.grad = None
        fused_linear_cross_entropy(x, sharded, target, weight_grad_buffer=buffer).backward()
        found = buffer.to_local() if isinstance(buffer, DTensor) else buffer
        check(found, local, want, rows, x.grad, dx)
        assert sharded.grad is None
    replicated = torch.nn.Parameter(DTensor.from_local(weight.detach().clone(), mesh, [Replicate()]))
    by_rows = DTensor.from_local(x.detach()[:36], mesh, [Replicate()]).redistribute(placements=[Shard(0)])
    for words, arguments, buffer in (
        ("must be placed as weight", (x, sharded, target), DTensor.from_local(local, mesh, [Replicate()])),
        ("must have weight's shape", (x, sharded, target), torch.zeros(300, case.hidden, dtype=torch.float64)),
        ("weight_grad_buffer goes with a weight", (by_rows, replicated, target[:36]), torch.zeros(300, case.hidden)),
        ("weight_grad_buffer is a DTensor", (x, weight, target), placed),
    ):
        try:
            fused_linear_cross_entropy(*arguments, weight_grad_buffer=buffer)
        except (TypeError, ValueError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")
    whole = torch.zeros(300, case.hidden, dtype=torch.float64)
    fused_linear_cross_entropy(x, replicated, target, weight_grad_buffer=whole).backward()
    assert_close(whole, want, BOUND, "dW of a replicated weight")


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=RANKS)
    plain()
    others()
    in_forward()
    dtensors()
    dist.destroy_process_group()
    print(f"rank {RANK} done")

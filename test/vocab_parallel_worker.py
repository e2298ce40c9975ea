"""One rank of the vocabulary-parallel tests: RANK, WORLD_SIZE and STORE, a new file's name, in the environment.

python test/vocab_parallel_worker.py SUITE     prints "rank R done" when everything held

DEVICE=cuda: on GPU number RANK, over NCCL (suites "options" and "shards"); else on the CPU, over gloo.
"""

import itertools
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import liger_cutedsl
from liger_cutedsl import LossOptions, vocab_parallel_fused_linear_cross_entropy
from reference import GRADIENT_BOUND, LOSS_BOUND, LOSS_BOUND_FLOAT32, Case, assert_close, check_predictions, reference

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ON_GPU = os.environ.get("DEVICE") == "cuda"
DEVICE = f"cuda:{RANK}" if ON_GPU else "cpu"
# what the case's tensors are placed and computed in: real sizes where 16 bits are
SIZES = dict(device=DEVICE, **(dict(tokens=700, hidden=256) if ON_GPU else {}))
DTYPES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float64, torch.float32)
METRICS = dict(return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True)
OPTIONS = [
    {},
    dict(reduction="sum", softcap=3.0),
    dict(reduction="none", label_smoothing=0.2),
    dict(lse_square_scale=1e-2, use_token_scaling=True, ignore_index=7),
    dict(softcap=3.0, label_smoothing=0.1, lse_square_scale=1e-2, use_token_scaling=True),
    dict(softcap=3.0, label_smoothing=0.1, lse_square_scale=1e-2, use_token_scaling=True, reduction="none"),
]


def shards(vocab, kind):
    """Row boundaries of the ranks' shards."""
    if kind == "equal":
        return [vocab * r // WORLD for r in range(WORLD + 1)]
    if kind == "single column":  # the first rank holds one entry
        return [0, 1, *(1 + (vocab - 1) * r // (WORLD - 1) for r in range(1, WORLD))]
    return [0, *(min(vocab, vocab // 2 + 13 * r) for r in range(WORLD - 1)), vocab]


def check(case: Case, bounds, vocab_size=None, padding=0, **call):
    """The ranks' results against the whole problem in float64."""
    options = LossOptions(**case.options)
    x, weight, target, bias, ce_weight = case.tensors()
    start, stop = bounds[RANK], bounds[RANK + 1]

    def shard(v):
        if v is None:
            return None
        rows = v.detach()[start:stop]
        if padding:  # rows that belong to no entry: NaN, so that touching them shows
            pad = rows.new_full((padding if RANK == WORLD - 1 else 0, *rows.shape[1:]), float("nan"))
            rows = torch.cat([rows, pad])
        return rows.clone().requires_grad_(v.requires_grad)

    parts = [shard(v) for v in (weight, bias, ce_weight)]
    xs = x.detach().clone().requires_grad_()
    out = vocab_parallel_fused_linear_cross_entropy(
        xs,
        parts[0],
        target,
        bias=parts[1],
        ce_weight=parts[2],
        vocab_start=start,
        vocab_size=case.vocab,
        **case.options,
        **METRICS,
        **call,
    )
    upstream = None
    if options.reduction == "none":
        upstream = torch.linspace(0.5, 1.5, case.tokens, dtype=out.loss.dtype, device=DEVICE)
    out.loss.backward(upstream)
    expected, grads = reference(x, weight, target, bias, ce_weight, options, upstream)
    # the bounds of one process: the ranks' sums are only added in another order
    bound, loss_bound = GRADIENT_BOUND[case.dtype], LOSS_BOUND.get(case.dtype, LOSS_BOUND_FLOAT32)
    for name in ("loss", "z_loss"):
        assert_close(getattr(out, name), expected[name], loss_bound, name, size=expected["loss_size"])
    check_predictions(out, expected, expected["logits"], case.dtype)
    assert_close(xs.grad, grads[0], bound, "dx")
    valid = stop - start
    for name, got, want in (
        ("dW", parts[0].grad, grads[1]),
        ("db", None if parts[1] is None else parts[1].grad, grads[2]),
    ):
        if want is not None:
            twice = 2 if name == "db" and ON_GPU else 1  # as in reference.py
            assert_close(got[:valid], want[start:stop], twice * bound, name, size=float(want.norm()))
            assert torch.count_nonzero(got[valid:]) == 0, "padding got a gradient"
    everyone = [torch.empty_like(xs.grad) for _ in range(WORLD)]
    dist.all_gather(everyone, xs.grad)
    assert all(torch.equal(everyone[0], other) for other in everyone), "dx differs between ranks"


def suite_options():
    for options, vectors in itertools.product(OPTIONS, ((False, False), (True, True))):
        # all exponentials kept, as many as dW's memory holds, and narrow tiles
        for dtype, workspace_mb in itertools.product(DTYPES, (None, 0.01)):
            vocab = 5000 if ON_GPU else 300
            vectors_of = dict(bias=vectors[0], ce_weight=vectors[1])
            case = Case(vocab=vocab // WORLD * WORLD, dtype=dtype, options=options, **vectors_of, **SIZES)
            check(case, shards(case.vocab, "equal"), workspace_mb=workspace_mb)


def suite_shards():
    for kind in ("single column", "uneven"):
        case = Case(vocab=301, dtype=DTYPES[0], bias=True, ce_weight=True, options=OPTIONS[4], **SIZES)
        check(case, shards(301, kind))
    case = Case(vocab=301, dtype=DTYPES[0], bias=True, options=OPTIONS[2], **SIZES)
    check(case, shards(301, "uneven"), padding=11)
    if ON_GPU:
        return
    # all targets in one rank's shard, ties across ranks, and a rank of nothing but padding
    x, whole = torch.ones(9, 24), torch.ones(40, 24)  # small integers: the logits are exactly equal
    bounds = shards(40, "equal")
    part = whole[bounds[RANK] : bounds[RANK + 1]].clone().requires_grad_()
    out = vocab_parallel_fused_linear_cross_entropy(
        x, part, torch.full((9,), 39), vocab_start=bounds[RANK], vocab_size=40, return_predicted_tokens=True
    )
    assert out.predicted_tokens.tolist() == [0] * 9, "ties go to the first index of the first rank"
    empty = [0, *[40] * WORLD]
    check(Case(vocab=40, bias=True, ce_weight=True, options=OPTIONS[4]), empty, padding=3)
    check(Case(vocab=WORLD, tokens=5), shards(WORLD, "equal"))  # one entry a rank
    check(Case(tokens=20, vocab=60, ignored=1.1, bias=True, options=OPTIONS[4]), shards(60, "equal"))


def suite_bytes():
    """A few numbers a row forward, one dX backward, and nothing else."""
    sent = []
    gather, reduce = dist.all_gather_into_tensor, dist.all_reduce

    def counted_gather(out, packed, **k):
        sent.append(("gather", packed.numel() * packed.element_size()))
        return gather(out, packed, **k)

    def counted_reduce(tensor, **k):
        sent.append(("reduce", tensor.numel() * tensor.element_size()))
        return reduce(tensor, **k)

    dist.all_gather_into_tensor, dist.all_reduce = counted_gather, counted_reduce
    n, h = 50, 24
    x = torch.randn(n, h, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(60, h).requires_grad_()
    target = torch.arange(n)
    for options, numbers in (({}, 2), (dict(label_smoothing=0.1, return_predicted_tokens=True), 5)):
        sent.clear()
        out = vocab_parallel_fused_linear_cross_entropy(x, weight, target, **options)
        (out if torch.is_tensor(out) else out.loss).backward()
        assert sent == [("gather", 4 * (numbers * n + 4)), ("reduce", 4 * n * h)], sent
    sent.clear()
    frozen = vocab_parallel_fused_linear_cross_entropy(x.detach(), weight, target)
    frozen.backward()
    assert [kind for kind, _ in sent] == ["gather"], "dX is not reduced where nobody wants it"


def suite_errors():
    x, weight, target = torch.randn(5, 8), torch.randn(10 + RANK, 8), torch.arange(5)
    try:  # unequal shards, said to be equal
        vocab_parallel_fused_linear_cross_entropy(x, weight, target)
        raise SystemExit("unequal shards were accepted")
    except ValueError as error:
        assert "without gaps" in str(error), error
    try:
        vocab_parallel_fused_linear_cross_entropy(x, torch.randn(10, 8), target + 10 * WORLD)
        raise SystemExit("a target beyond the vocabulary was accepted")
    except ValueError as error:
        assert f"[0, {10 * WORLD})" in str(error), error


def suite_dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    case = Case(tokens=24, vocab=301, bias=True, ce_weight=True, options=OPTIONS[4])
    x, weight, target, bias, ce_weight = case.tensors()
    options = LossOptions(**case.options)
    expected, grads = reference(x, weight, target, bias, ce_weight, options)
    for placement in (Replicate(), Shard(0)):
        dx = distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
        dw = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
        db = distribute_tensor(bias.detach(), mesh, [Shard(0)]).requires_grad_()
        loss = liger_cutedsl.fused_linear_cross_entropy(dx, dw, target, bias=db, ce_weight=ce_weight, **case.options)
        loss.backward()
        assert_close(loss, expected["loss"], 1e-9, "loss")
        assert dx.grad.placements == (placement,) and dw.grad.placements == (Shard(0),)
        for name, got, want in (("dx", dx, grads[0]), ("dW", dw, grads[1]), ("db", db, grads[2])):
            assert_close(got.grad.full_tensor(), want, 1e-9, name)
    function = liger_cutedsl.LigerFusedLinearCrossEntropyFunction
    replicated = DTensor.from_local(x.detach(), mesh, [Replicate()])
    plain, _ = reference(x, weight, target, None, None, LossOptions())
    assert_close(function.apply(replicated, dw.detach(), target)[0], plain["loss"], 1e-9, "through Liger's class")
    for bad, message in (
        (lambda: liger_cutedsl.fused_linear_cross_entropy(x.detach(), dw, target), "FSDP2"),
        (lambda: liger_cutedsl.fused_linear_cross_entropy(replicated, weight, target), "weight is not"),
        (
            lambda: liger_cutedsl.fused_linear_cross_entropy(
                replicated, distribute_tensor(weight.detach(), mesh, [Shard(1)]), target
            ),
            r"Shard(0) over one mesh dimension",
        ),
    ):
        try:
            bad()
            raise SystemExit(f"accepted what must be refused: {message}")
        except (TypeError, ValueError) as error:
            assert message in str(error), error


def suite_failure():
    """The last rank fails alone, where all are connected; the others are told by its connection's end."""
    if RANK == WORLD - 1:
        os._exit(3)
    try:
        vocab_parallel_fused_linear_cross_entropy(torch.randn(5, 8), torch.randn(10, 8), torch.arange(5))
    except RuntimeError:
        return
    raise SystemExit("the collective succeeded without a rank")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if ON_GPU:
        torch.cuda.set_device(RANK)
    # A file outlives any rank, and nobody else can take it, as a port.
    store = dist.FileStore(os.environ["STORE"], WORLD)
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD, timeout=timedelta(seconds=120))
    for suite in sys.argv[1:]:
        globals()[f"suite_{suite}"]()
    print(f"rank {RANK} done", flush=True)
    if sys.argv[1] != "failure":
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)

"""One rank of the vocabulary-parallel tests: RANK, WORLD_SIZE and STORE, a new file's name, in the environment.

python test/vocab_parallel_worker.py SUITE     prints "rank R done" when everything held

DEVICE=cuda: on GPU number RANK, over NCCL (suites "options" and "shards"); else on the CPU, over gloo.
"""

import contextlib
import itertools
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import liger_cutedsl
from liger_cutedsl import (
    LogProbs,
    LossOptions,
    fused_linear_log_probs,
    fused_linear_loss,
    vocab_parallel_fused_linear_cross_entropy,
    vocab_parallel_fused_linear_log_probs,
    vocab_parallel_fused_linear_loss,
)
from reference import GRADIENT_BOUND, LOSS_BOUND, LOSS_BOUND_FLOAT32, Case, assert_close, check_predictions, reference
from reference_log_probs import EVERYTHING, LOGITS
from reference_log_probs import expected as expected_log_probs
from reference_row_loss import expected as expected_row_loss

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ON_GPU = os.environ.get("DEVICE") == "cuda"
DEVICE = f"cuda:{RANK}" if ON_GPU else "cpu"
# what the case's tensors are placed and computed in: real sizes where 16 bits are
SIZES = dict(device=DEVICE, **(dict(tokens=700, hidden=256) if ON_GPU else {}))
DTYPES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float64, torch.float32)
METRICS = dict(return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True)
FLOAT32 = 1e-5  # transformers computes its loss in float32
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


def check(case: Case, bounds, padding=0, **call):
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
        **case.options,
        **METRICS,
        **{"vocab_start": start, "vocab_size": case.vocab, **call},
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
    same_everywhere(dx=xs.grad, **{name: value for name, value in out._asdict().items() if value is not None})


def same_everywhere(**tensors):
    """The same bits on every rank."""
    for name, tensor in tensors.items():
        everyone = [torch.empty_like(tensor) for _ in range(WORLD)]
        dist.all_gather(everyone, tensor.detach().contiguous())
        assert all(torch.equal(everyone[0], other) for other in everyone), f"{name} differs between ranks"


def suite_options():
    for options, vectors in itertools.product(OPTIONS, ((False, False), (True, True))):
        # all exponentials kept, as many as dW's memory holds, and narrow tiles
        for dtype, workspace_mb in itertools.product(DTYPES, (None, 0.01)):
            vocab = 5000 if ON_GPU else 300
            vectors_of = dict(bias=vectors[0], ce_weight=vectors[1])
            case = Case(vocab=vocab // WORLD * WORLD, dtype=dtype, options=options, **vectors_of, **SIZES)
            check(case, shards(case.vocab, "equal"), workspace_mb=workspace_mb)


def suite_log_probs():
    """Per-token values and their gradients, over shards of all kinds, one of them a DTensor's."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cuda" if ON_GPU else "cpu", (WORLD,), mesh_dim_names=("tp",))
    for logits, dtype, kind in itertools.product(LOGITS.values(), DTYPES[:1], ("equal", "uneven", "dtensor")):
        case = Case(vocab=300 // WORLD * WORLD, dtype=dtype, bias=True, **SIZES)
        bounds = shards(case.vocab, "equal" if kind == "dtensor" else kind)
        rows = slice(bounds[RANK], bounds[RANK + 1])
        x, weight, target, bias, _ = case.tensors()
        selected = torch.tensor([case.vocab - 1, 0, 7, 0], device=DEVICE)
        own = [v.detach()[rows].clone().requires_grad_() for v in (weight, bias)]
        call = dict(selected_token_ids=selected, **logits, **EVERYTHING)
        if kind == "dtensor":
            heads = [DTensor.from_local(v, mesh, [Shard(0)]) for v in own]
            got = fused_linear_log_probs(x, heads[0], target, bias=heads[1], **call)
        else:
            got = vocab_parallel_fused_linear_log_probs(x, own[0], target, bias=own[1], workspace_mb=0.01, **call)
        leaves = [v.detach().double().requires_grad_() for v in (x, weight, bias)]
        want = expected_log_probs(leaves[0], leaves[1], target, leaves[2], selected, **logits)
        bound, loss_bound = GRADIENT_BOUND[dtype], LOSS_BOUND.get(dtype, LOSS_BOUND_FLOAT32)
        assert torch.equal(got.is_top1, want.is_top1)
        for name in LogProbs._fields[:-1]:
            assert_close(getattr(got, name), getattr(want, name), loss_bound, name, size=30 * case.tokens**0.5)
        losses = [sum((v * (i + 1)).square().sum() for i, v in enumerate(values[:3])) for values in (got, want)]
        losses[0].backward()
        grads = torch.autograd.grad(losses[1], leaves)
        wanted = (grads[0], grads[1][rows], grads[2][rows])
        for name, leaf, grad in zip(("dx", "dW", "db"), (x, *own), wanted, strict=True):
            twice = 2 if ON_GPU else 1
            assert_close(leaf.grad, grad, twice * bound, name, size=float(grad.norm()))


def suite_row_losses():
    check_row_losses(workspace_mb=0.01)


def check_row_losses(**how):
    """A loss of the caller's own and all of its gradients, over shards of all kinds, one of them a DTensor's."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cuda" if ON_GPU else "cpu", (WORLD,), mesh_dim_names=("tp",))

    def row_loss(values, advantage, scale):
        gain = values.log_prob * advantage + scale * values.entropy + 0.1 * values.mean_logit
        return gain + 0.01 * values.lse**2, values.argmax

    for logits, kind in itertools.product(LOGITS.values(), ("equal", "uneven", "dtensor", "sequence")):
        case = Case(vocab=300 // WORLD * WORLD, dtype=DTYPES[0], bias=True, **SIZES)
        bounds = shards(case.vocab, kind if kind == "uneven" else "equal")
        mine = slice(bounds[RANK], bounds[RANK + 1])
        x, weight, target, bias, _ = case.tensors()
        draws = torch.randn(case.tokens + 1, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        rows = [v.clone().requires_grad_() for v in (draws[:-1], draws[-1])]
        own = [v.detach()[mine].clone().requires_grad_() for v in (weight, bias)]
        xs, labels = x, target
        if kind == "sequence":  # x and the targets sharded by rows, row tensors whole
            xs, labels = (distribute_tensor(v.detach(), mesh, [Shard(0)]) for v in (x, target))
            xs.requires_grad_()
        if kind in ("dtensor", "sequence"):
            heads = [DTensor.from_local(v, mesh, [Shard(0)]) for v in own]
            got = fused_linear_loss(xs, heads[0], labels, row_loss, *rows, bias=heads[1], **logits, **how)
        else:
            split = dict(bias=own[1], **logits, **how)
            got = vocab_parallel_fused_linear_loss(x, own[0], target, row_loss, *rows, **split)
        leaves = [v.detach().double().requires_grad_() for v in (x, weight, bias, *rows)]
        want, aux = expected_row_loss(*leaves[:2], target, row_loss, *leaves[3:], bias=leaves[2], **logits)
        bound = LOSS_BOUND.get(DTYPES[0], LOSS_BOUND_FLOAT32)
        assert_close(got.loss, want.detach(), bound, "loss", size=30.0)
        assert torch.equal(got.aux[0], aux[0])
        got.loss.backward()
        grads = torch.autograd.grad(want, leaves)
        wanted = (grads[0], grads[1][mine], grads[2][mine], *grads[3:])
        for leaf, grad in zip((xs, *own, *rows), wanted, strict=True):
            allowed = (2 if ON_GPU else 1) * GRADIENT_BOUND[leaf.dtype]
            found = leaf.grad.full_tensor() if isinstance(leaf, DTensor) else leaf.grad
            assert_close(found, grad, allowed, f"{tuple(leaf.shape)}", size=float(grad.norm()))


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


def suite_ignored():
    """Few ignored rows are masked on every rank, unless one of them holds what a zero coefficient does not undo."""
    for options in (OPTIONS[1], OPTIONS[3], OPTIONS[5]):
        case = Case(tokens=200, vocab=301, dtype=DTYPES[0], bias=True, ignored=0.0, options=options)
        x, weight, target, bias, ce_weight = case.tensors()
        ignore_index = options.get("ignore_index", -100)
        target[target == ignore_index] += 1
        target[[0, 77, 199]] = ignore_index
        case.tensors = lambda found=(x, weight, target, bias, ce_weight): found
        check(case, shards(301, "uneven"))
        bounds = shards(301, "uneven")
        part = weight.detach()[bounds[RANK] : bounds[RANK + 1]].clone().requires_grad_()
        found = []
        for value in (0.5, float("nan"), float("inf")):
            leaf = x.detach().clone()
            leaf[77, 3] = value
            leaf.requires_grad_()
            loss = vocab_parallel_fused_linear_cross_entropy(leaf, part, target, vocab_size=301, **options)
            found.append(torch.autograd.grad(loss.sum(), (leaf, part)))
        for got, want in zip(found[1] + found[2], found[0] * 2, strict=True):
            assert_close(got, want, GRADIENT_BOUND[DTYPES[0]], "gradient")
            assert torch.count_nonzero(found[1][0][target == ignore_index]) == 0


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
        assert sent == [("gather", 4 * (numbers * n + 5)), ("reduce", 4 * n * h)], sent
    sent.clear()
    frozen = vocab_parallel_fused_linear_cross_entropy(x.detach(), weight, target)
    frozen.backward()
    assert [kind for kind, _ in sent] == ["gather"], "dX is not reduced where nobody wants it"


def suite_sizes():
    """Shards of any size in rank order, of which only their own ranks speak."""
    head = vocab_parallel_fused_linear_cross_entropy
    sizes = [5 + 7 * (rank % 2) + rank for rank in range(WORLD)]
    for total, sizes_now in ((sum(sizes), sizes), (sum(sizes) + 9, [9 + sizes[0], *sizes[1:]])):  # two heads, one after
        case = Case(tokens=33, vocab=total, bias=True, ce_weight=True, options=OPTIONS[4])
        bounds = [sum(sizes_now[:rank]) for rank in range(WORLD + 1)]
        for said in (dict(vocab_start=None, vocab_size=None), dict(vocab_start=None), dict(vocab_size=None), {}):
            for _ in range(2):  # the first call, and one that knows the sizes
                check(case, bounds, **said)
    check(Case(vocab=45, bias=True, options=OPTIONS[2]), [0, 40, *[45] * (WORLD - 1)], padding=8, vocab_start=None)
    first_columns_only(sizes)
    exchanged_once(head, sizes)


def first_columns_only(sizes):
    """A target within the guessed vocabulary of one rank and beyond another's, and one that is beyond all of them."""
    x, weight, total = torch.randn(3, 8), torch.randn(sizes[RANK] + 50, 8), sum(sizes) + 50 * WORLD
    head = vocab_parallel_fused_linear_cross_entropy
    assert torch.isfinite(head(x, weight, torch.tensor([0, 1, total - 1])))
    weight = torch.randn(sizes[RANK] + 60, 8)
    refused(lambda: head(x, weight, torch.tensor([0, 1, total + 10 * WORLD])), f"in [0, {total + 10 * WORLD})")


def exchanged_once(head, sizes):
    """Unequal shards gather twice in their first call, and once in later ones."""
    gather, count = dist.all_gather_into_tensor, [0]

    def counted(*arguments, **how):
        count[0] += 1
        return gather(*arguments, **how)

    dist.all_gather_into_tensor = counted
    weight = torch.randn(sizes[RANK] + 30, 8)
    for _ in range(3):
        head(torch.randn(4, 8), weight, torch.arange(4))
    assert count == [4], count
    dist.all_gather_into_tensor = gather


def refused(call, *words, error=(TypeError, ValueError)):
    """On every rank, and before anyone waits for another."""
    try:
        call()
    except error as raised:
        assert all(word in str(raised) for word in words), raised
    else:
        raise SystemExit(f"accepted what must be refused: {words}")


def suite_errors():
    x, weight, target = torch.randn(5, 8), torch.randn(10 + RANK, 8), torch.arange(5)
    head, total = vocab_parallel_fused_linear_cross_entropy, sum(10 + rank for rank in range(WORLD))
    # unequal shards, said to be equal
    refused(
        lambda: head(x, weight, target, vocab_start=RANK * len(weight), vocab_size=total), "rank order without gaps"
    )
    # ranks that contradict the shards, or each other
    refused(lambda: head(x, weight, target, vocab_size=total + 1), f"at most the {total} rows")
    got = str([(None, 10 + rank, total - rank) for rank in range(WORLD)])
    refused(lambda: head(x, weight, target, vocab_size=total - RANK), "vocab_size must be the same on all ranks", got)
    refused(lambda: head(x, weight, target, vocab_start=RANK), "without gaps", "[(0, 10, None), (1, 11, None)")
    refused(lambda: head(x, weight, target, vocab_start=1 if RANK else None), "without gaps", "[(None, 10, None), (1,")
    for wrong in (dict(vocab_start=-1), dict(vocab_start=True), dict(vocab_size=0), dict(vocab_size=2.0)):
        refused(lambda wrong=wrong: head(x, weight, target, **wrong), *wrong, "must be None or an int ≥ ")
    refused(lambda: head(x, torch.randn(10, 8), target + 10 * WORLD), f"[0, {10 * WORLD})")
    assert torch.isfinite(head(x, weight, target)), "what was refused leaves nothing behind"


def suite_changed_on_gpus():
    """Sizes are read in a shard's first call alone, and what changes on some ranks afterwards is not a wrong loss."""
    torch.manual_seed(0)  # x is the same on every rank
    head, bound = vocab_parallel_fused_linear_cross_entropy, LOSS_BOUND.get(torch.bfloat16, LOSS_BOUND_FLOAT32)
    x, target = (v.to(DEVICE) for v in (torch.randn(64, 64, dtype=torch.bfloat16), torch.arange(64)))
    weight = torch.randn(1000 + 8 * RANK, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    everyone = [torch.randn(1000 + 8 * rank, 64, dtype=torch.bfloat16, device=DEVICE) for rank in range(WORLD)]
    for rank, part in enumerate(everyone):
        dist.broadcast(part.copy_(weight.detach()) if rank == RANK else part, rank)
    expected = torch.nn.functional.cross_entropy(x.double() @ torch.cat(everyone).double().T, target)
    for _ in range(2):
        loss = head(x, weight, target)
        loss.backward()
        assert_close(loss, expected, bound, "loss")
    changed = weight.detach() if RANK else weight.detach()[:-8]
    if RANK == 0:
        refused(lambda: head(x, changed, target), "changed on some ranks only")
    else:
        assert torch.isnan(head(x, changed, target))
    assert_close(head(x, weight, target), expected, bound, "loss")


@contextlib.contextmanager
def as_on_a_gpu():
    """What ranks say of themselves is read to the host in the first call of its kind alone."""
    from liger_cutedsl import shards, testing

    on_cpu = shards._agreed

    class OnGpu(torch.Tensor):
        is_cuda = True

    def agreed(shard, headers):
        return on_cpu(shard, headers.as_subclass(OnGpu)).as_subclass(torch.Tensor)

    shards._agreed = agreed
    yield
    shards._agreed = on_cpu
    testing.reset()


def suite_changes():
    """As on a GPU, where the sizes are read in a shard's first call alone: what a later change on one rank does."""
    with as_on_a_gpu():
        x, target, head = torch.randn(5, 8), torch.arange(5), vocab_parallel_fused_linear_cross_entropy
        weight = torch.randn(10 + RANK, 8)
        for _ in range(3):
            assert torch.isfinite(head(x, weight, target))
        if RANK == WORLD - 1:
            refused(lambda: head(x, torch.randn(20, 8), target), "changed on some ranks only", "vocab_size tells apart")
        else:
            assert torch.isnan(head(x, weight, target))
        assert torch.isfinite(head(x, weight, target))
        # two heads that are equal on the first rank alone
        second = torch.randn(10 + 2 * RANK, 8)
        assert torch.isfinite(head(x, second, target, vocab_size=10 * WORLD + WORLD * (WORLD - 1)))
        assert torch.isfinite(head(x, weight, target))


def suite_failing_kernels():
    """All ranks do without a kernel that fails in the first call of its kind; later a failure is one rank's own."""
    from liger_cutedsl import testing

    broken = RANK == WORLD - 1
    case = Case(tokens=20, vocab=10 * WORLD, dtype=torch.float32, ignored=0.0)
    x, weight, target, *_ = case.tensors()
    shard = weight.detach()[10 * RANK : 10 * RANK + 10].clone().requires_grad_()
    expected, (dx, dw, _) = reference(x, weight, target, None, None, LossOptions())

    def failing(where):
        return testing.planted_kernel_failure(where, on_cpu=True) if broken else contextlib.nullcontext()

    def head():
        return vocab_parallel_fused_linear_cross_entropy(x, shard, target, workspace_mb=0.001)

    with as_on_a_gpu():
        with failing("forward"):
            loss = head()
            assert "could not be compiled" in testing.kernel_failure()
            found = torch.autograd.grad(loss, (x, shard))
        assert_close(loss, expected["loss"], LOSS_BOUND_FLOAT32, "loss")
        for name, got, want in zip(("dx", "dW"), found, (dx, dw[10 * RANK : 10 * RANK + 10]), strict=True):
            assert_close(got, want, GRADIENT_BOUND[torch.float32], name)
        with failing("forward"):
            if broken:
                refused(head, "failed on this rank", "planted", error=RuntimeError)
            else:
                assert torch.isnan(head())
        with failing("backward"):
            loss = head()
            assert_close(loss, expected["loss"], LOSS_BOUND_FLOAT32, "loss")
            if broken:
                refused(lambda: torch.autograd.grad(loss, x), "failed on this rank", "planted", error=RuntimeError)
            else:
                assert torch.autograd.grad(loss, x)[0].isnan().all()
        assert_close(head(), expected["loss"], LOSS_BOUND_FLOAT32, "loss")


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


def suite_replicated():
    """A weight that every rank has whole, as tensor parallelism leaves a head that no plan names."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    case = Case(tokens=25, vocab=301, bias=True, ce_weight=True, options=OPTIONS[4])
    x, weight, target, bias, ce_weight = case.tensors()
    expected, grads = reference(x, weight, target, bias, ce_weight, LossOptions(**case.options))

    def leaf(value, placement):
        value = value.detach().clone()
        return (distribute_tensor(value, mesh, [placement]) if placement else value).requires_grad_()

    everywhere = DTensor.from_local(target, mesh, [Replicate()])
    for of_x, of_bias, of_target in (
        (None, None, target),
        (None, Replicate(), everywhere),
        (Replicate(), Replicate(), target),
        (Shard(0), Replicate(), target),
        (Shard(0), None, distribute_tensor(target, mesh, [Shard(0)])),
    ):
        dx, dw, db = leaf(x, of_x), leaf(weight, Replicate()), leaf(bias, of_bias)
        loss = liger_cutedsl.fused_linear_cross_entropy(dx, dw, of_target, bias=db, ce_weight=ce_weight, **case.options)
        assert type(loss) is torch.Tensor
        loss.backward()
        assert_close(loss, expected["loss"], 1e-9, "loss")
        for name, got, want, placement in (
            ("dx", dx, grads[0], of_x),
            ("dW", dw, grads[1], Replicate()),
            ("db", db, grads[2], of_bias),
        ):
            assert placement is None or got.grad.placements == (placement,), name
            whole = got.grad.full_tensor() if placement else got.grad
            assert_close(whole, want, 1e-9, name)
            # what is called replicated is the same everywhere
            local = got.grad.to_local() if placement == Replicate() else whole
            assert_close(local, want, 1e-9, f"{name} on rank {RANK}")
    # batched, in sequence parallelism, through Liger's class too
    batched = distribute_tensor(x.detach().view(5, 5, -1), mesh, [Shard(1)]).requires_grad_()
    dw = leaf(weight, Replicate())
    loss = liger_cutedsl.fused_linear_cross_entropy(batched, dw, target.view(5, 5))
    plain, (want, *_) = reference(x, weight, target, None, None, LossOptions())
    assert_close(loss, plain["loss"], 1e-9, "batched loss")
    (got,) = torch.autograd.grad(loss, batched)
    assert_close(got.full_tensor().view(25, -1), want, 1e-9, "batched dx")
    function = liger_cutedsl.LigerFusedLinearCrossEntropyFunction
    assert_close(function.apply(x.detach(), dw, target)[0], plain["loss"], 1e-9, "Liger's class")
    partial = DTensor.from_local(x.detach(), mesh, [Partial()])
    refused(lambda: function.apply(partial, dw, target), "x must be replicated, or sharded by rows")
    refused(
        lambda: function.apply(x.detach(), dw, distribute_tensor(target, mesh, [Shard(0)])), "target must be replicated"
    )


def suite_named_mesh():
    """A plain x under tensor parallelism: a mesh of one dimension named "tp" says that it is the same on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    case = Case(tokens=25, vocab=301, bias=True, options=OPTIONS[4])
    x, weight, target, bias, _ = case.tensors()
    expected, grads = reference(x, weight, target, bias, None, LossOptions(**case.options))
    for names in (("tp",), ("fsdp",), None):
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=names)
        xs, db = (v.detach().clone().requires_grad_() for v in (x, bias))
        dw = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()

        def loss(xs=xs, dw=dw, db=db):
            return liger_cutedsl.fused_linear_cross_entropy(xs, dw, target, bias=db, **case.options)

        if names != ("tp",):
            refused(loss, "FSDP2", "mesh_dim_names=('tp',)")
            continue
        found = loss()
        found.backward()
        assert_close(found, expected["loss"], 1e-9, "loss")
        for name, got, want in (
            ("dx", xs.grad, grads[0]),
            ("dW", dw.grad.full_tensor(), grads[1]),
            ("db", db.grad, grads[2]),
        ):
            assert_close(got, want, 1e-9, f"{name} on rank {RANK}")


def suite_hugging_face():
    """A model that transformers splits by itself (tp_plan="auto"), patched by Liger, against the whole model."""
    import tempfile

    import transformers
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    from stacks import ONLY_THE_LOSS, SMALL

    liger_cutedsl.enable()
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    if RANK == 0:
        torch.manual_seed(0)
        sizes = {**SMALL, "num_attention_heads": WORLD, "num_key_value_heads": WORLD}
        transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=301, **sizes)).save_pretrained(folder[0])
    dist.barrier()
    whole = transformers.LlamaForCausalLM.from_pretrained(folder[0], dtype=torch.float64)
    split = transformers.LlamaForCausalLM.from_pretrained(folder[0], dtype=torch.float64, tp_plan="auto")
    assert split.lm_head.weight.placements[0].dim == 0
    ids = torch.randint(1, 301, (2, 17), generator=torch.Generator().manual_seed(1))
    expected = whole(input_ids=ids, labels=ids).loss
    apply_liger_kernel_to_llama(**ONLY_THE_LOSS, model=split.train())
    loss = split(input_ids=ids, labels=ids).loss
    for each in (expected, loss):
        each.backward()
    assert "FusedLinearCrossEntropy" in type(loss.grad_fn).__name__, "the patched model runs our operator"
    assert_close(loss, expected, FLOAT32, "loss")
    for (name, a), b in zip(whole.named_parameters(), split.parameters(), strict=True):
        got = b.grad.full_tensor() if hasattr(b.grad, "full_tensor") else b.grad
        assert_close(got, a.grad, FLOAT32, name)


def suite_failure():
    """The last rank fails alone, where all are connected; the others are told by its connection's end."""
    if RANK == WORLD - 1:
        os._exit(3)
    try:
        vocab_parallel_fused_linear_cross_entropy(torch.randn(5, 8), torch.randn(10, 8), torch.arange(5))
    except RuntimeError:
        return
    raise SystemExit("the collective succeeded without a rank")


def main(suites: dict) -> None:
    """The suites named on the command line, as functions of a module's globals."""
    torch.set_num_threads(1)
    if ON_GPU:
        torch.cuda.set_device(RANK)
    # A file outlives any rank, and nobody else can take it, as a port.
    store = dist.FileStore(os.environ["STORE"], WORLD)
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD, timeout=timedelta(seconds=120))
    for suite in sys.argv[1:]:
        suites[f"suite_{suite}"]()
    print(f"rank {RANK} done", flush=True)
    if sys.argv[1] != "failure":
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main(globals())

"""One rank of the tests of `single_pass` over a split vocabulary, run as vocab_parallel_worker.py is."""

import contextlib
import functools
import itertools
import os

import torch
import torch.distributed as dist

import liger_cutedsl
from liger_cutedsl import LossOptions, engines, fused_linear_cross_entropy, rounds, testing
from liger_cutedsl import vocab_parallel_fused_linear_cross_entropy as head
from liger_cutedsl.schedules import single_pass
from reference import GRADIENT_BOUND, LOSS_BOUND_FLOAT32, Case, assert_close, reference
from vocab_parallel_worker import (
    DTYPES,
    ON_GPU,
    OPTIONS,
    RANK,
    SIZES,
    WORLD,
    as_on_a_gpu,
    check,
    check_row_losses,
    main,
    refused,
    same_everywhere,
    shards,
)

SUMS = [options for options in OPTIONS if options.get("reduction") != "none"]
# smoothing without a softcap, and class weights that a mean divides by, whichever chunk they are in
SUMS += [dict(label_smoothing=0.2), dict(reduction="sum", temperature=0.7, logit_scale=2.0)]
SINGLE = dict(schedule="single_pass")
LAST = WORLD - 1
ROWS = 256 if ON_GPU else 16  # a chunk's where the workspace is small


@contextlib.contextmanager
def small_chunks():
    """Several chunks of few tokens."""
    kept = single_pass.SMALLEST_CHUNK
    single_pass.SMALLEST_CHUNK = ROWS
    yield dict(SINGLE, workspace_mb=0.01)
    single_pass.SMALLEST_CHUNK = kept


@contextlib.contextmanager
def counted():
    """[(kind, numbers)] of the collectives that begin."""
    sent, gather, reduce = [], dist.all_gather_into_tensor, dist.all_reduce

    def counted_gather(out, packed, **how):
        sent.append(("gather", packed.numel()))
        return gather(out, packed, **how)

    def counted_reduce(tensor, **how):
        sent.append(("sum", tensor.numel()))
        return reduce(tensor, **how)

    dist.all_gather_into_tensor, dist.all_reduce = counted_gather, counted_reduce
    yield sent
    dist.all_gather_into_tensor, dist.all_reduce = gather, reduce


def suite_options():
    """Every option, in several chunks and in one."""
    for options, vectors in itertools.product(SUMS, (False, True)):
        # 16-bit dW is summed in float32, or it would be rounded once a chunk; float16 takes few options
        options = dict(options, accum_dtype=torch.float32) if ON_GPU else options
        for dtype in DTYPES[:1] if ON_GPU or WORLD > 2 else DTYPES:
            case = Case(
                vocab=300 // WORLD * WORLD, dtype=dtype, bias=vectors, ce_weight=vectors, options=options, **SIZES
            )
            with small_chunks() as call:
                check(case, shards(case.vocab, "equal"), **call)
    check(case, shards(case.vocab, "equal"), **SINGLE)


def suite_dtypes():
    """16 bits, in one chunk and in several with dW's sum in float32; under autocast; a frozen x or weight."""
    for dtype, options in itertools.product((torch.bfloat16, torch.float16), ({}, SUMS[2])):
        vectors = dict(bias=True, ce_weight=True)
        case = Case(vocab=301, dtype=dtype, options=dict(options, accum_dtype=torch.float32), **vectors)
        with small_chunks() as call:
            check(case, shards(301, "uneven"), **call)
        check(Case(vocab=301, dtype=dtype, options=options, **vectors), shards(301, "uneven"), **SINGLE)
    case = Case(vocab=301, dtype=torch.float32)
    x, weight, target, *_ = case.tensors()
    bounds = shards(301, "uneven")
    own = slice(bounds[RANK], bounds[RANK + 1])
    _, (dx, dw, _) = reference(x, weight, target, None, None, LossOptions())
    for x_wanted, weight_wanted in ((True, False), (False, True)):
        leaf, part = x.detach().requires_grad_(x_wanted), weight.detach()[own].clone().requires_grad_(weight_wanted)
        with small_chunks() as call, counted() as sent:
            head(leaf, part, target, **call).backward()
        assert ("sum" in dict(sent)) == x_wanted, "dX is not summed where nobody wants it"
        wanted, exact = (leaf, dx) if x_wanted else (part, dw[own])
        assert_close(wanted.grad, exact, GRADIENT_BOUND[torch.float32], "gradient")
    part = weight.detach()[own].clone().requires_grad_()
    leaf = x.detach().requires_grad_()
    with small_chunks() as call, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(leaf, part, target, **call)
    loss.backward(torch.tensor(3.0))
    assert leaf.grad.dtype == part.grad.dtype == torch.float32
    # x and weight are rounded to 16 bits: each of the logits' terms is off by two roundings
    assert_close(leaf.grad, 3.0 * dx, 8 * torch.finfo(torch.bfloat16).eps, "dx under autocast")
    assert_close(part.grad, 3.0 * dw[own], 8 * torch.finfo(torch.bfloat16).eps, "dW under autocast")
    same_everywhere(dx=leaf.grad, loss=loss)


def suite_shards():
    """Shards of any size, padding, and a shard of nothing else, each in several chunks."""
    everything = dict(bias=True, ce_weight=True, options=dict(OPTIONS[4], accum_dtype=torch.float32), **SIZES)
    with small_chunks() as call:
        for kind in ("single column", "uneven"):
            check(Case(vocab=301, dtype=DTYPES[0], **everything), shards(301, kind), **call)
        check(Case(vocab=301, dtype=DTYPES[0], **everything), shards(301, "uneven"), padding=11, **call)
        if ON_GPU:
            return
        empty = [0, *[40] * WORLD]
        check(Case(vocab=40, **everything), empty, padding=3, **call)
        check(Case(vocab=40, bias=True, options=dict(accum_dtype=torch.float32)), empty, padding=3, **call)
        check(Case(vocab=WORLD, tokens=35), shards(WORLD, "equal"), **call)  # one entry a rank
        check(Case(tokens=40, vocab=60, ignored=1.1, bias=True, options=OPTIONS[4]), shards(60, "equal"), **call)
        sizes = [5 + 7 * (rank % 2) + rank for rank in range(WORLD)]
        bounds = [sum(sizes[:rank]) for rank in range(WORLD + 1)]
        for said in (dict(vocab_start=None, vocab_size=None), {}):
            for _ in range(2):  # the first call, and one that knows the sizes
                check(Case(tokens=33, vocab=sum(sizes), **everything), bounds, **call, **said)


def suite_ignored():
    """Few ignored rows are masked, in whichever chunk they lie; NaN in one of them drops them."""
    case = Case(tokens=200, vocab=301, dtype=DTYPES[0], bias=True, ignored=0.0, options=OPTIONS[1])
    x, weight, target, bias, ce_weight = case.tensors()
    target[[0, 77, 199]] = -100
    case.tensors = lambda found=(x, weight, target, bias, ce_weight): found
    bounds = shards(301, "uneven")
    with small_chunks() as call:
        check(case, bounds, **call)
        part = weight.detach()[bounds[RANK] : bounds[RANK + 1]].clone().requires_grad_()
        found = []
        for value in (0.5, float("nan")):
            leaf = x.detach().clone()
            leaf[77, 3] = value
            leaf.requires_grad_()
            loss = head(leaf, part, target, vocab_size=301, **call, **OPTIONS[1])
            found.append(torch.autograd.grad(loss, (leaf, part)))
    for got, want in zip(found[1], found[0], strict=True):
        assert_close(got, want, GRADIENT_BOUND[DTYPES[0]], "gradient")


def suite_row_losses():
    for mb in (0.01, None):
        with small_chunks():
            check_row_losses(schedule="single_pass", workspace_mb=mb)


def suite_dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    case = Case(tokens=48, vocab=301, bias=True, ce_weight=True, options=OPTIONS[4])
    x, weight, target, bias, ce_weight = case.tensors()
    expected, grads = reference(x, weight, target, bias, ce_weight, LossOptions(**case.options))
    for of_x, of_weight in ((Replicate(), Shard(0)), (Shard(0), Shard(0)), (Shard(0), Replicate())):
        leaves = []
        for value, placement in ((x, of_x), (weight, of_weight), (bias, of_weight)):
            leaves.append(distribute_tensor(value.detach(), mesh, [placement]).requires_grad_())
        dx, dw, db = leaves
        with small_chunks() as call, counted() as sent:
            loss = fused_linear_cross_entropy(dx, dw, target, bias=db, ce_weight=ce_weight, **case.options, **call)
            assert [kind for kind, _ in sent].count("sum") > 1, "in several chunks"
            loss.backward()
        assert_close(loss, expected["loss"], 1e-9, "loss")
        for name, got, want in zip(("dx", "dW", "db"), leaves, grads, strict=True):
            assert_close(got.grad.full_tensor(), want, 1e-9, name)


def run_once(x, shard, target, **call):
    leaf = x.detach().clone().requires_grad_()
    part = shard.detach().clone().requires_grad_()
    loss = head(leaf, part, target, **call)
    loss.backward()
    return loss.detach(), leaf.grad, part.grad


@contextlib.contextmanager
def no_reads():
    """Numbers are read to the host by what the inputs ask for alone: by none of the modules of a split vocabulary."""
    import sys

    names, tensor = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__"), torch.Tensor
    kept, found = {name: getattr(tensor, name) for name in names}, []
    ours = ("shards", "rounds", "split", "overlapped", "chunk_dz", "single_pass", "exponentials", "torch_engine")

    def watched(name):
        def read(self, *arguments):
            frame = sys._getframe(1)
            while frame is not None and "liger_cutedsl" not in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None and os.path.basename(frame.f_code.co_filename).removesuffix(".py") in ours:
                found.append((name, frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame))
            return kept[name](self, *arguments)

        return read

    for name in names:
        setattr(tensor, name, watched(name))
    yield found
    for name in names:
        setattr(tensor, name, kept[name])


def suite_collectives():
    """What is sent in a later call: for each chunk its statistics and its dX, in one order, and nothing is read."""
    n, h, smoothed = 37, 24, dict(label_smoothing=0.1)
    x = torch.randn(n, h, generator=torch.Generator().manual_seed(0))
    weight, target = torch.randn(30, h), torch.arange(n) % 30
    for options, numbers in (({}, 2), (smoothed, 3)):
        with small_chunks() as call, as_on_a_gpu():
            with counted() as first, no_reads() as read:
                run_once(x, weight, target, **options, **call)
            assert ("gather", 1) in first and read, "the first call asks whether all kernels ran"
            with counted() as sent, no_reads() as read:
                run_once(x, weight, target, **options, **call)
            flags = rounds.FLAGS
            assert sent == [
                ("gather", 5 + numbers * n),
                ("gather", numbers * 16),
                ("sum", flags + 16 * h),
                ("gather", numbers * 5),
                ("sum", flags + 16 * h),
                ("sum", flags + 5 * h),
            ], sent
            assert not read, read
            # another number of tokens is no first call, nor are more chunks
            with counted() as sent, no_reads() as read:
                run_once(
                    torch.randn(70, h, generator=torch.Generator().manual_seed(1)),
                    weight,
                    torch.arange(70) % 30,
                    **options,
                    **call,
                )
            assert [kind for kind, _ in sent].count("sum") == 5 and not read, (sent, read)
    same = [run_once(x, weight, target, **SINGLE) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*same, strict=True)), "the same bits from run to run"
    same_everywhere(loss=same[0][0], dx=same[0][1])


def equal_shards(tokens: int, rows: int):
    """x, this rank's rows of weight, target, and what holds (loss, dX, dW) against float64: float32, a mean."""
    x, weight, target, *_ = Case(tokens, vocab=rows * WORLD, dtype=torch.float32, ignored=0.0).tensors()
    own = slice(rows * RANK, rows * (RANK + 1))
    expected, (dx, dw, _) = reference(x, weight, target, None, None, LossOptions())

    def right(found):
        for name, got, want in zip(("loss", "dx", "dW"), found, (expected["loss"], dx, dw[own]), strict=True):
            assert_close(got, want, GRADIENT_BOUND[torch.float32], name)

    return x, weight.detach()[own], target, right


def suite_workspaces():
    """Ranks with unlike budgets take the chunks that fit the smallest."""
    x, shard, target, right = equal_shards(tokens=300, rows=40)
    kept = single_pass.SMALLEST_CHUNK
    single_pass.SMALLEST_CHUNK = 128
    for mb in ([50.0, 0.01, None, 1.0][RANK], [None, None, 0.01, 0.01][RANK] if WORLD > 2 else [0.01, 4][RANK]):
        for gpu in (False, True):
            with as_on_a_gpu() if gpu else contextlib.nullcontext():
                for call in range(3):
                    with counted() as sent:
                        right(run_once(x, shard, target, workspace_mb=mb, **SINGLE))
                    assert [size for kind, size in sent if kind == "sum"] == [64 + 128 * 24] * 2 + [64 + 44 * 24], sent
                    began_again = [kind for kind, _ in sent].count("gather") - 3 - (call == 0 or not gpu)
                    assert began_again == (call == 0), (call, sent)
                head(x, shard, target)  # by the other schedule; back again, the chunk is known
                with counted() as sent:
                    right(run_once(x, shard, target, workspace_mb=mb, **SINGLE))
                assert [kind for kind, _ in sent].count("gather") == 4, sent
            testing.reset()
    single_pass.SMALLEST_CHUNK = kept


def suite_disagreement():
    """Schedules that differ between ranks, and settings that change on one of them."""
    x, target = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).requires_grad_(), torch.arange(40) % 20
    weight = torch.randn(20, 8, generator=torch.Generator().manual_seed(RANK))
    other = {} if RANK == LAST else SINGLE
    for gpu in (False, True):
        with as_on_a_gpu() if gpu else contextlib.nullcontext():
            refused(lambda: head(x, weight, target, **other), "schedule must be the same", "'single_pass' on rank 0")
            each = functools.partial(head, x, weight, target, reduction="none")
            if RANK == LAST:  # cannot run what it was asked for
                refused(lambda each=each: each(**SINGLE), "knows its gradient", error=RuntimeError)
            else:
                refused(each, f"rank {LAST} cannot run what it was asked for")
            assert torch.isfinite(head(x, weight, target, **SINGLE))
        testing.reset()
    with as_on_a_gpu(), small_chunks() as call:
        assert torch.isfinite(head(x, weight, target))
        whole = head(x, weight, target, **call)
        # on the last rank alone: a schedule that all took before, another budget, another shard
        changes = ((weight, {}), (weight, dict(SINGLE, workspace_mb=3.0)), (weight[:-1].repeat(2, 1), call))
        for changed, how in changes:
            if RANK == LAST:
                refused(lambda changed=changed, how=how: head(x, changed, target, **how), "changed on some ranks only")
            else:
                assert torch.isnan(head(x, weight, target, **call))
            assert_close(head(x, weight, target, **call), whole, LOSS_BOUND_FLOAT32, "loss")
        assert_close(head(x, weight, target), whole, LOSS_BOUND_FLOAT32, "all change to the other schedule")
        assert_close(head(x, weight, target, **call), whole, LOSS_BOUND_FLOAT32, "and back")


@contextlib.contextmanager
def failing(primitive: str, at: int):
    """One kernel's launch, counted from 0, fails on the last rank."""
    if RANK != LAST:
        yield
        return

    def plant(engine, where):
        real, count = getattr(engine, primitive), itertools.count()

        def launch(*arguments, **options):
            if next(count) == at:
                raise engines.KernelFailure(testing.PLANTED)
            return real(*arguments, **options)

        setattr(engine, primitive, launch)

    kept, testing._break = testing._break, plant
    with testing.planted_kernel_failure(on_cpu=True):
        yield
    testing._break = kept


def suite_failing_kernels():
    """In the first chunk of a first call all ranks do without it; later it is one rank's own, and others get NaN."""
    x, shard, target, right = equal_shards(tokens=40, rows=10)

    def alone(**call):
        if RANK == LAST:
            refused(lambda: run_once(x, shard, target, **call), "failed on this rank", "planted", error=RuntimeError)
            return
        loss, dx, _ = run_once(x, shard, target, **call)
        assert loss.isnan() and dx.isnan().any(), (loss, dx)

    def first(primitive, at):
        """In a first call, of three chunks."""
        with as_on_a_gpu(), failing(primitive, at):
            if (primitive, at) == ("exp_chunk", 2) or (primitive == "scale_chunk" and at):
                alone(**call)
            else:
                right(run_once(x, shard, target, **call))
                if RANK == LAST:
                    assert "could not be compiled" in testing.kernel_failure()

    with small_chunks() as call:
        for primitive, at in itertools.product(("exp_chunk", "scale_chunk"), range(3)):
            first(primitive, at)
            with as_on_a_gpu():
                right(run_once(x, shard, target, **call))
                with failing(primitive, at):
                    alone(**call)
                right(run_once(x, shard, target, **call))
        with failing("exp_chunk", 0):  # as on a CPU, where every call reads
            right(run_once(x, shard, target, **call))


def suite_upstream():
    """Gradients do not depend on what earlier backwards were given, which ranks might remember differently."""
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight, target = torch.randn(20, 16).requires_grad_(), torch.arange(40) % 20
    with small_chunks() as call:
        found = []
        for _ in range(4):
            loss = head(x, weight, target, **call)
            found.append(torch.autograd.grad(loss, (x, weight), torch.tensor(0.37)))
    assert all(torch.equal(a, b) for later in found[1:] for a, b in zip(later, found[0], strict=True))


def suite_memory():
    """Two chunks' exponentials and dX's sum, as explain() says."""
    from test_autograd import peak_bytes

    tokens, hidden, vocab = 1536, 128, 8192
    x = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden, requires_grad=True)
    target = torch.randint(0, vocab * WORLD, (tokens,), generator=torch.Generator().manual_seed(0))
    dist.broadcast(x.detach(), 0)
    for mb in (30, None):
        call = dict(SINGLE, workspace_mb=mb)

        def step(call=call):
            head(x, weight, target, **call).backward()

        step()
        x.grad = weight.grad = None
        dist.barrier()
        peak = peak_bytes("cpu", step) - (x.numel() + weight.numel()) * 4
        x.grad = weight.grad = None
        route = liger_cutedsl.explain(x, weight, split=True, **call)
        assert route.schedule == "single_pass" and route.buffers == 2 and "two at a time" in str(route)
        assert (route.chunk, route.chunk_limit) == ((512, 512) if mb else (768, 1024)), route
        assert abs(peak - route.workspace_bytes) <= max(0.03 * peak, 2**20), (peak, route)


def suite_compiled():
    """Between two graphs, as recompute's."""
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight, target = torch.randn(20, 16).requires_grad_(), torch.arange(40)
    with small_chunks() as call:
        plain = torch.autograd.grad(head(2.0 * x, weight, target, **call), (x, weight))
        step = torch.compile(lambda: head(2.0 * x, weight, target, **call) * 1.0, backend="aot_eager")
        for got, want in zip(torch.autograd.grad(step(), (x, weight)), plain, strict=True):
            assert torch.equal(got, want)


if __name__ == "__main__":
    main(globals())

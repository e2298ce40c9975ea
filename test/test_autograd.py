"""How gradients are asked for: subsets, repeated backward, upstream gradients, AMP, memory."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import liger_cutedsl
from liger_cutedsl import LossOptions, fused_linear_cross_entropy
from liger_cutedsl.engines.torch_engine import TorchEngine
from reference import GRADIENT_BOUND, Case, assert_close, check_case, reference


class Recorder(TorchDispatchMode):
    """Records the operators that run and the largest tensor any of them made."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append(func.overloadpacket.__name__)
        given, made = (
            [v for v in torch.utils._pytree.tree_leaves(tree) if isinstance(v, torch.Tensor)]
            for tree in ((args, kwargs), result)
        )
        memory = {v.untyped_storage().data_ptr() for v in given}
        for value in made:
            if value.untyped_storage().data_ptr() not in memory:  # else it is a view, or was written in place
                self.largest = max(self.largest, value.numel())
        return result

    @property
    def products(self) -> int:
        return sum(name in ("mm", "addmm", "matmul", "bmm") for name in self.calls)


@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=3) if any(n)])
def test_any_subset_of_gradients(place, needs):
    dtype = place.dtypes[0]
    case = Case(dtype=dtype, device=place.device, bias=True)
    x, weight, target, bias, _ = case.tensors()
    leaves = [v.detach().requires_grad_(need) for v, need in zip((x, weight, bias), needs, strict=True)]
    with Recorder() as recorder:
        loss = fused_linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2], **place.call)
        loss.backward()
    _, expected = reference(x, weight, target, bias, None, LossOptions())
    for leaf, need, want in zip(leaves, needs, expected, strict=True):
        assert (leaf.grad is not None) == need
        if need:
            assert_close(leaf.grad, want, GRADIENT_BOUND[dtype], "gradient")
    if place.engine == "torch":  # one product for each of dx and dW and part: what is not needed is not computed
        tensors = (leaves[0], leaves[1], target)
        route = liger_cutedsl.explain(*tensors, bias=leaves[2], **place.call)
        kept = case.vocab if route.schedule == "single_pass" else route.kept
        tiles = -(-(case.vocab - kept) // max(route.tile_width, 1))
        logits = -(-kept // 192) + 2 * tiles  # exponentials once, what is recomputed twice
        assert recorder.products == logits + (tiles + (kept > 0)) * (needs[0] + needs[1])


def test_no_gradient_is_computed_without_need(place):
    case = Case(dtype=place.dtypes[0], device=place.device)
    x, weight, target, *_ = case.tensors()
    with torch.no_grad():
        assert not fused_linear_cross_entropy(x, weight, target, **place.call).requires_grad
    assert not fused_linear_cross_entropy(x.detach(), weight.detach(), target, **place.call).requires_grad


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_backward_gives_the_same_gradients(place, reduction):
    case = Case(dtype=place.dtypes[0], device=place.device, bias=True)
    x, weight, target, bias, _ = case.tensors()
    loss = fused_linear_cross_entropy(x, weight, target, bias=bias, reduction=reduction, **place.call)
    g = torch.full_like(loss, 3.0)
    first = torch.autograd.grad(loss, (x, weight, bias), g, retain_graph=True)
    kept = [v.clone() for v in first]
    second = torch.autograd.grad(loss, (x, weight, bias), g, retain_graph=True)
    third = torch.autograd.grad(loss, (x, weight, bias), 2 * g)
    for a, b, c, d in zip(first, kept, second, third, strict=True):
        assert torch.equal(a, b), "a later backward changed gradients already handed out"
        assert torch.equal(b, c)
        assert_close(d, 2 * b.double(), 2 * GRADIENT_BOUND[place.dtypes[0]], "twice the upstream gradient")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_is_not_the_last_layer(place, reduction):
    def upstream(loss):
        leaf = loss.detach().requires_grad_()
        return torch.autograd.grad((leaf * leaf).sum() * 0.25, leaf)[0]

    options = dict(reduction=reduction, label_smoothing=0.1)
    for dtype in place.dtypes:
        check_case(Case(dtype=dtype, device=place.device, options=options), upstream=upstream, **place.call)


def test_inputs_are_not_modified(place):
    case = Case(dtype=place.dtypes[-1], device=place.device, bias=True, ce_weight=True)
    tensors = case.tensors()
    before = [v.detach().clone() for v in tensors]
    x, weight, target, bias, ce_weight = tensors
    fused_linear_cross_entropy(x, weight, target, bias=bias, ce_weight=ce_weight, softcap=2.0, **place.call).backward()
    for v, b in zip(tensors, before, strict=True):
        assert torch.equal(v.detach(), b)


SUBSETS = [("x",), ("weight",), ("bias",), ("x", "weight"), ("x", "weight", "bias")]


def functional(name):
    """torch.autograd.functional's second derivatives, of one input of a loss at a time."""

    def ask(loss_of, leaves):
        function = getattr(torch.autograd.functional, name)
        for index, leaf in enumerate(leaves):

            def of_one(value, index=index):
                return loss_of(*leaves[:index], value, *leaves[index + 1 :])

            with pytest.raises(RuntimeError, match="no second derivative"):
                function(of_one, leaf.detach(), *(() if name == "hessian" else (torch.ones_like(leaf),)))

    return ask


def of_subsets(loss_of, leaves):
    """Gradients of some inputs, differentiated with the loss for any others: no node may lie off the way."""
    names = dict(zip(("x", "weight", "bias"), leaves, strict=True))
    for first, second in itertools.product(SUBSETS, SUBSETS):
        loss = loss_of(*leaves)
        grads = torch.autograd.grad(loss, [names[n] for n in first], create_graph=True)
        penalised = loss + sum(g.square().sum() for g in grads)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(penalised, [names[n] for n in second])


def of_chosen_inputs(loss_of, leaves):
    for leaf in leaves:
        loss = loss_of(*leaves)
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            (loss + sum(g.square().sum() for g in grads)).backward(inputs=[leaf])


def of_the_upstream_gradient(loss_of, leaves):
    """A product with the Jacobian, from two products with its transpose."""
    loss = loss_of(*leaves)
    upstream = torch.ones_like(loss).requires_grad_()
    grads = torch.autograd.grad(loss, leaves, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(grads[0].sum(), upstream)


WAYS = {f.__name__: f for f in (of_subsets, of_chosen_inputs, of_the_upstream_gradient)}
WAYS.update({name: functional(name) for name in ("hessian", "hvp", "vhp")})


def double_loss(place, reduction):
    """(a loss as a function of x, weight and bias, those leaves): x is not the operator's input itself."""
    case = Case(6, 16, 40, dtype=place.dtypes[0], device=place.device, bias=True)
    x, weight, target, bias, _ = case.tensors()

    def loss_of(x, weight, bias):
        loss = fused_linear_cross_entropy(torch.tanh(x), weight, target, bias=bias, reduction=reduction, **place.call)
        return loss.sum()

    return loss_of, (x, weight, bias)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_is_refused(place, reduction, way):
    WAYS[way](*double_loss(place, reduction))


@pytest.fixture
def one_rank():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("way", WAYS)
def test_double_backward_of_a_split_vocabulary_is_refused(one_rank, way):
    x, weight, target, bias, _ = Case(6, 16, 40, bias=True).tensors()

    def loss_of(x, weight, bias):
        split = liger_cutedsl.vocab_parallel_fused_linear_cross_entropy
        return split(torch.tanh(x), weight, target, bias=bias)

    WAYS[way](loss_of, (x, weight, bias))


def test_lost_memory_of_a_split_vocabulary_is_named(one_rank):
    x, weight, target, *_ = Case().tensors()
    loss = liger_cutedsl.vocab_parallel_fused_linear_cross_entropy(x, weight, target)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="weight's memory went away between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_first_gradients_under_create_graph(place, reduction):
    """Not differentiated again they are the gradients, writable in place, and the loss's own backward goes on."""
    loss_of, leaves = double_loss(place, reduction)
    expected = torch.autograd.grad(loss_of(*leaves), leaves)
    loss = loss_of(*leaves)
    found = torch.autograd.grad(loss, leaves, create_graph=True)
    loss.backward(create_graph=True)
    for leaf, got, want in zip(leaves, found, expected, strict=True):
        assert got.requires_grad
        # recomputed, where the first had kept exponentials: each is within GRADIENT_BOUND, db on a GPU within two
        bound = 4 * GRADIENT_BOUND[place.dtypes[0]]
        assert_close(got, want.double(), bound, "under create_graph=True")
        assert_close(leaf.grad, want.double(), bound, "backward(create_graph=True)")
        assert_close(got.mul_(2.0), 2 * want.double(), bound, "written in place")
    torch.nn.utils.clip_grad_norm_(leaves, 1e-3)
    assert float(torch.stack([leaf.grad.double().norm() for leaf in leaves]).norm()) < 1.1e-3


def test_a_batch_of_upstream_gradients_is_refused(place):
    case = Case(dtype=place.dtypes[0], device=place.device, options=dict(reduction="none"))
    x, weight, target, *_ = case.tensors()
    for reduction in ("mean", "none"):
        loss = fused_linear_cross_entropy(x, weight, target, reduction=reduction, **place.call)
        upstream = torch.ones(3, *loss.shape, dtype=loss.dtype, device=loss.device)
        with pytest.raises(RuntimeError, match="one upstream gradient at a time"):
            torch.autograd.grad(loss, (x, weight), upstream, is_grads_batched=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ce_weight", [False, True])
def test_token_gradients_of_ligers_function(monkeypatch, place, reduction, ce_weight):
    """token_grad_output weighs each token's share of the gradients, whatever the reduction, and not the loss."""
    from liger_cutedsl.liger.operators import fused_linear_cross_entropy_forward

    monkeypatch.setenv("LIGER_CUTEDSL_ENGINE", place.engine)
    monkeypatch.setenv("LIGER_CUTEDSL_SCHEDULE", place.schedule)
    monkeypatch.setenv("LIGER_CUTEDSL_WORKSPACE_MB", str(place.workspace_mb or ""))
    options = dict(reduction=reduction, label_smoothing=0.1, lse_square_scale=1e-2)
    for dtype in place.dtypes:
        case = Case(64, dtype=dtype, device=place.device, bias=True, ce_weight=ce_weight, options=options)
        token_gradients_are_right(fused_linear_cross_entropy_forward, case, 2 * GRADIENT_BOUND[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_token_gradients_by_ligers_operator(monkeypatch, reduction):
    from liger_cutedsl.liger.operators import fused_linear_cross_entropy_forward

    monkeypatch.setenv("LIGER_CUTEDSL_ENGINE", "triton")
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")
    options = dict(reduction=reduction, label_smoothing=0.1, lse_square_scale=1e-2)
    case = Case(64, dtype=torch.float32, device="cuda", bias=True, ce_weight=True, options=options)
    token_gradients_are_right(fused_linear_cross_entropy_forward, case, 1e-4)  # as in test_gpu.py


def token_gradients_are_right(forward, case, bound):
    x, weight, target, bias, ce_weight = case.tensors()
    upstream = torch.linspace(0.1, 2.0, case.tokens, device=case.device, dtype=torch.float64).to(torch.float32)
    found = forward(x, weight, target, ce_weight=ce_weight, bias=bias, token_grad_output=upstream, **case.options)
    loss, z_loss, accuracy, predicted, dx, dw, db = found  # as many as Liger's returns
    assert z_loss is None and accuracy is None and predicted is None
    options = LossOptions(**case.options)
    expected, _ = reference(x, weight, target, bias, ce_weight, options)
    # a mean's shares are those of "none" over its divisors, the z-loss's another than the cross entropy's
    summed = LossOptions(**{**case.options, "reduction": "none"})
    valid = (target != options.ignore_index).sum().double()
    share_ce = share_z = torch.ones((), dtype=torch.float64, device=case.device)
    if options.reduction == "mean":
        share_z = 1.0 / valid
        share_ce = share_z if ce_weight is None else 1.0 / ce_weight.double()[target[target >= 0]].sum()
    without_z = LossOptions(**{**case.options, "reduction": "none", "lse_square_scale": 0.0})
    both = [
        reference(x, weight, target, bias, ce_weight, o, upstream.double() * share)[1]
        for o, share in ((summed, share_z), (without_z, share_z), (without_z, share_ce))
    ]
    assert_close(loss, expected["loss"], 1e-5, "loss", size=float(expected["loss_size"]) + 1.0)
    for name, got, z, minus, ce in zip(("dx", "dW", "db"), (dx, dw, db), *both, strict=True):
        assert_close(got, z - minus + ce, bound, name)


@pytest.mark.parametrize("kind", ["storage", "data"])
@pytest.mark.parametrize("name", ["x", "weight", "target", "bias", "ce_weight"])
def test_memory_that_went_away_before_backward_is_named(name, kind):
    """A gather that ended: the storage is empty, or the parameter another tensor."""
    case = Case(bias=True, ce_weight=True)
    for call in (dict(reduction="none"), dict(schedule="recompute"), dict(schedule="recompute", workspace_mb=0.01)):
        x, weight, target, bias, ce_weight = tensors = case.tensors()
        loss = fused_linear_cross_entropy(x, weight, target, bias=bias, ce_weight=ce_weight, **call).sum()
        lost = dict(zip(("x", "weight", "target", "bias", "ce_weight"), tensors, strict=True))[name]
        if kind == "storage":
            lost.untyped_storage().resize_(0)
        else:
            lost.data = lost.data.new_empty(0)
        with pytest.raises(RuntimeError, match=f"{name}'s memory went away between forward and backward.*Gather"):
            loss.backward()


def test_gradients_that_are_there_need_no_memory():
    """What the message says: after single_pass, backward reads no weight."""
    x, weight, target, *_ = Case().tensors()
    _, want = torch.autograd.grad(fused_linear_cross_entropy(x, weight, target), (x, weight))
    loss = fused_linear_cross_entropy(x, weight, target, schedule="single_pass")
    weight.untyped_storage().resize_(0)
    assert torch.equal(torch.autograd.grad(loss, weight)[0], want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_backward_that_failed_can_be_tried_again(monkeypatch, place, reduction):
    """Out of memory in the middle: the same gradients from the second try. Rows are ignored, so that dX is spread."""
    dtype = place.dtypes[0]
    case = Case(dtype=dtype, device=place.device, bias=True, options=dict(reduction=reduction))
    x, weight, target, bias, _ = case.tensors()
    upstream = None if reduction == "mean" else torch.linspace(0.5, 1.5, case.tokens, device=place.device)
    _, grads = reference(x, weight, target, bias, None, LossOptions(reduction=reduction), upstream)
    loss = fused_linear_cross_entropy(x, weight, target, bias=bias, reduction=reduction, **place.call)

    def failing(*_, **__):
        raise torch.cuda.OutOfMemoryError("planted")

    for place_of_failure in ("rows.Rows.spread", "schedules.gradient_sink.matmul"):
        with monkeypatch.context() as planted, pytest.raises(torch.cuda.OutOfMemoryError):
            planted.setattr(f"liger_cutedsl.{place_of_failure}", failing)
            loss.backward(upstream)
        if place.schedule == "auto" and reduction == "mean":
            break  # no product is left for backward
    loss.backward(upstream)
    for leaf, want in zip((x, weight, bias), grads, strict=True):
        assert_close(leaf.grad, want, 2 * GRADIENT_BOUND[dtype], "gradient of the second try")


def test_gradients_half_scaled_are_not_scaled_again(monkeypatch):
    """Where a failed backward had begun to write, the second says so instead of being wrong or an AttributeError."""
    x, weight, target, *_ = Case().tensors()
    loss = fused_linear_cross_entropy(x, weight, target, schedule="single_pass")

    def failing(matrices, factor):
        matrices[0].mul_(factor)
        raise torch.cuda.OutOfMemoryError("planted")

    monkeypatch.setattr("liger_cutedsl.schedules.kept.scale_in_place", failing)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        loss.backward(torch.tensor(3.0, dtype=loss.dtype))
    with pytest.raises(RuntimeError, match=r"handed over to an earlier backward.*run forward again"):
        loss.backward(torch.tensor(3.0, dtype=loss.dtype))


def test_a_second_backward_without_retain_graph_says_what_to_do():
    x, weight, target, *_ = Case(ignored=0.0).tensors()
    loss = fused_linear_cross_entropy(x, weight, target, schedule="single_pass")
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()


@pytest.mark.parametrize("amp_dtype", [torch.bfloat16, torch.float16])
def test_autocast_multiplies_in_its_dtype_and_returns_the_parameters_dtype(place, amp_dtype):
    case = Case(dtype=torch.float32, device=place.device, bias=True)
    x, weight, target, bias, _ = case.tensors()
    with torch.autocast(place.device, dtype=amp_dtype):
        loss = fused_linear_cross_entropy(x, weight, target, bias=bias, **place.call)
    loss.backward()
    assert loss.dtype == torch.float32
    # The operands are rounded to the autocast dtype before anything else: so is the reference's.
    rounded = [v.detach().to(amp_dtype) for v in (x, weight)]
    expected, grads = reference(*rounded, target, bias, None, LossOptions())
    assert_close(loss, expected["loss"], 1e-5, "loss")
    for leaf, want in zip((x, weight, bias), grads, strict=True):
        assert leaf.grad.dtype == torch.float32
        # Gradients are written in float32, so dz alone may be rounded to 16 bits.
        bound = GRADIENT_BOUND[torch.float32 if place.engine == "torch" else amp_dtype]
        assert_close(leaf.grad, want, bound, "gradient")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_leaves_float64_alone(place, reduction):
    """As torch's own products do."""
    if torch.float64 not in place.dtypes:
        pytest.skip("the engine multiplies 16-bit numbers")
    options = dict(reduction=reduction, label_smoothing=0.1)
    with torch.autocast(place.device, torch.bfloat16):
        assert torch.mm(*torch.ones(2, 3, 3, dtype=torch.float64, device=place.device)).dtype == torch.float64
        check_case(Case(bias=True, device=place.device, options=options), **place.call)
        x, weight, target, *_ = Case(device=place.device).tensors()
        with pytest.raises(TypeError, match=r"float64 and torch.float32.*autocast, which casts all but float64"):
            fused_linear_cross_entropy(x, weight.float(), target)
        assert liger_cutedsl.explain(x, weight, **place.call).dtype == torch.float64


def round_dz_to(monkeypatch, dtype):
    """Makes the torch engine store dz in 16 bits, as the GPU engine does."""
    monkeypatch.setattr("liger_cutedsl.routing.make_engine", lambda *_: TorchEngine(dz_dtype=dtype))


@pytest.mark.parametrize("amp_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1), dict(reduction="sum")], ids=str)
def test_rounding_dz_does_not_bias_a_mean(monkeypatch, place, amp_dtype, options):
    """1/384 and 0.9 lie between two numbers of 16 bits: all rows would be rounded to one side, by up to eps/2. In a
    unit in which the targets' entries are just above −1, they go to either side, by eps/(2·√12) (root mean square)."""
    if place.device == "cpu":
        round_dz_to(monkeypatch, amp_dtype)
    case = Case(384, 64, 2000, dtype=torch.float32, device=place.device, bias=True, scale=1.0, ignored=0.0)
    x, weight, target, bias, _ = case.tensors()
    with torch.autocast(place.device, amp_dtype):  # gradients come in float32, so that only dz's rounding shows
        fused_linear_cross_entropy(x, weight, target, bias=bias, **options, **place.call).backward()
    rounded = [v.detach().to(amp_dtype) for v in (x, weight)]
    _, grads = reference(*rounded, target, bias, None, LossOptions(**options))
    for name, leaf, want in zip(("dx", "dW", "db"), (x, weight, bias), grads, strict=True):
        assert_close(leaf.grad, want, torch.finfo(amp_dtype).eps / 6, name)


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16])
@pytest.mark.parametrize("reduction, schedule", [("mean", "recompute"), ("none", "recompute"), ("mean", "single_pass")])
def test_fp16_dz_does_not_underflow(monkeypatch, loss_scale, reduction, schedule):
    """p/N is about 2e-7/500 here, far below fp16's smallest number 6e-8: a scale keeps dz in its range."""
    round_dz_to(monkeypatch, torch.float16)
    case = Case(tokens=500, vocab=2000, dtype=torch.float32, bias=True, scale=1.0, ignored=0.1)
    case.options = dict(label_smoothing=0.1, reduction=reduction)
    # dz is rounded to fp16 once, and everything else happens in float32
    check_case(
        case,
        # single_pass rounds to fp16 twice: the exponentials, and dz
        gradient_bound=GRADIENT_BOUND[torch.float16] * (1.5 if schedule == "single_pass" else 1),
        schedule=schedule,
        upstream=lambda loss: torch.full_like(loss, loss_scale / (500 if reduction == "none" else 1)),
    )


def peak_bytes(device, run) -> int:
    """The most memory that was alive at once of what run() allocates."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("workspace_mb", [0.5, 64])
@pytest.mark.parametrize("name", ["plain", "all", "none"])
def test_nothing_of_the_size_of_the_logits_is_allocated(place, name, workspace_mb):
    """All that is alive at once, beyond inputs and gradients, is what explain() says; and that keeps to the budget but
    where no schedule does."""
    options = dict(softcap=9.0, label_smoothing=0.1, lse_square_scale=1e-3, use_token_scaling=True)
    metrics = dict(return_z_loss=True, return_predicted_tokens=True)
    options = {"plain": {}, "all": {**options, **metrics}, "none": {**options, "reduction": "none"}}[name]
    for dtype in place.dtypes:
        on_gpu = place.device == "cuda"
        tokens, hidden, vocab = (4096, 64, 32768) if on_gpu else (256, 32, 8192)
        budget = workspace_mb * (64 if on_gpu else 1)
        case = Case(tokens, hidden, vocab, dtype=dtype, device=place.device, ignored=0.0, bias=name != "plain")
        case.ce_weight = name == "all"
        x, weight, target, bias, ce_weight = case.tensors()
        call = dict(engine=place.engine, schedule=place.schedule, workspace_mb=budget)
        call.update(bias=bias, ce_weight=ce_weight, **options)

        def step(x=x, weight=weight, target=target, call=call):
            out = fused_linear_cross_entropy(x, weight, target, **call)
            loss = out if isinstance(out, torch.Tensor) else out.loss
            loss.sum().backward()

        step()  # compiles kernels, and makes what is made once
        for leaf in (x, weight, bias):
            if leaf is not None:
                leaf.grad = None
        peak = peak_bytes(place.device, step)
        gradients = sum(leaf.grad.numel() * leaf.grad.itemsize for leaf in (x, weight, bias) if leaf is not None)
        route = liger_cutedsl.explain(x, weight, target, **call)
        # Vectors of a few numbers a row are not counted, nor is what a GPU's allocator rounds up to.
        allowed = 1.1 * route.workspace_bytes + 48 * 2**20 if on_gpu else route.workspace_bytes + 40 * 4 * tokens
        assert peak - gradients <= allowed, f"{dtype}, {route}"
        leanest = route.schedule == "recompute" and route.kept < vocab
        assert route.workspace_bytes <= budget * 2**20 or leanest
        if workspace_mb == 0.5:  # and this can see the logits of one who stores them
            stored = peak_bytes(place.device, lambda x=x, weight=weight: (x @ weight.T).detach())
            assert stored >= tokens * vocab * dtype.itemsize > route.workspace_bytes


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_is_kept_alive(reduction):
    """Inputs and gradients go when their owner lets go of them, and a thousand calls leave no tensor behind."""
    import gc
    import weakref

    def tensors():
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    def step():
        x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
        loss = fused_linear_cross_entropy(x * 1.0, weight, torch.arange(6), reduction=reduction)
        loss.sum().backward()
        return weakref.ref(x), weakref.ref(weight), weakref.ref(weight.grad), weakref.ref(loss)

    before = tensors()
    for _ in range(1000):
        references = step()
    assert tensors() <= before
    assert all(reference() is None for reference in references)


def test_a_failed_call_leaves_nothing_behind():
    """An error in the middle of a call, such as a full memory, does not break the next one."""
    x, weight, target, *_ = Case(ignored=0.0).tensors()
    expected = fused_linear_cross_entropy(x, weight, target)
    original = TorchEngine.scale_chunk

    def failing(*_):
        raise torch.cuda.OutOfMemoryError("planted")

    TorchEngine.scale_chunk = failing
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            fused_linear_cross_entropy(x, weight, target)
    finally:
        TorchEngine.scale_chunk = original
    loss = fused_linear_cross_entropy(x, weight, target)
    loss.backward()
    assert torch.equal(loss, expected)
    assert x.grad is not None

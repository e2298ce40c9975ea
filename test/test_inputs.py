"""What comes in: shapes, dtypes, degenerate batches, and what is refused with which words."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liger_cutedsl import LigerFusedLinearCrossEntropyFunction, LossOptions, fused_linear_cross_entropy
from reference import GRADIENT_BOUND, Case, assert_close, check_case, reference

X = torch.randn(6, 8)
W = torch.randn(10, 8)
T = torch.arange(6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_batch_dimensions_are_flattened_in_the_keyword_function(reduction):
    x, target = torch.randn(2, 3, 8, requires_grad=True), torch.tensor([[1, 2, -100], [0, 9, 4]])
    out = fused_linear_cross_entropy(x, W, target, reduction=reduction, return_predicted_tokens=True)
    expected, grads = reference(x.flatten(0, 1), W, target.flatten(), None, None, LossOptions(reduction=reduction))
    assert out.predicted_tokens.shape == target.shape
    assert out.loss.shape == (target.shape if reduction == "none" else ())
    assert_close(out.loss.flatten(), expected["loss"].flatten(), 1e-5, "loss")
    out.loss.sum().backward()
    assert x.grad.shape == x.shape
    assert_close(x.grad.flatten(0, 1), grads[0], 1e-5, "dx")


@pytest.mark.parametrize("strides", ["columns", "rows", "transposed", "expanded"])
def test_strided_inputs(place, strides):
    dtype = place.dtypes[0]
    x, weight = torch.randn(33, 48, dtype=dtype), torch.randn(200, 48, dtype=dtype) * 0.2
    x, weight = x.to(place.device), weight.to(place.device)
    if strides == "columns":
        x, weight = x[:, 8:40], weight[:, 8:40]
    elif strides == "rows":
        x, weight = x[::2], weight[::3]
    elif strides == "transposed":
        x, weight = x.t().contiguous().t(), weight.t().contiguous().t()
    else:
        x = x[:1].expand(33, 48)
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    target = torch.randint(0, weight.shape[0], (x.shape[0],), device=place.device)
    fused_linear_cross_entropy(x, weight, target, **place.call).backward()
    _, grads = reference(x, weight, target, None, None, LossOptions())
    assert_close(x.grad, grads[0], GRADIENT_BOUND[dtype], "dx")
    assert_close(weight.grad, grads[1], GRADIENT_BOUND[dtype], "dW")


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, in memory as a caller's slices and transposes leave them."""
    if layout == "transposed" and values.dim() == 2:
        return values.t().contiguous().t()
    if layout == "offset":  # a storage offset that is no multiple of 16 bytes
        memory = values.new_zeros(values.numel() + 3)
        memory[3:] = values.flatten()
        return memory[3:].view(values.shape)
    if layout == "every second":
        memory = values.new_zeros(2 * values.shape[0], *values.shape[1:])
        memory[::2] = values
        return memory[::2]
    if layout == "columns" and values.dim() == 2:
        memory = values.new_zeros(values.shape[0], values.shape[1] + 5)
        memory[:, 2:-3] = values
        return memory[:, 2:-3]
    return values


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["contiguous", "offset", "every second"])
def test_target_dtypes(place, index_dtype, layout):
    x, weight, target, *_ = Case(dtype=place.dtypes[0], device=place.device).tensors()
    loss = fused_linear_cross_entropy(x, weight, laid_out(target.to(index_dtype), layout), **place.call)
    loss.backward()
    expected, grads = reference(x, weight, target, None, None, LossOptions())
    assert_close(loss, expected["loss"], 1e-6, "loss")
    assert_close(weight.grad, grads[1], 1e-2, "dW")


LAYOUTS = st.sampled_from(["contiguous", "transposed", "offset", "every second", "columns"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts=st.tuples(*[LAYOUTS] * 5), tokens=st.integers(1, 40), vocab=st.integers(9, 400), data=st.data())
def test_any_layout(place, layouts, tokens, vocab, data):
    """Every tensor of a call in its own layout: the numbers of contiguous ones."""
    dtype, index_dtype = (
        data.draw(st.sampled_from(place.dtypes)),
        data.draw(st.sampled_from([torch.int32, torch.int64])),
    )
    case = Case(tokens, 16, vocab, dtype=dtype, device=place.device, bias=True, ce_weight=True)
    tensors = [v.detach() for v in case.tensors()]
    tensors[2] = tensors[2].to(index_dtype)

    def run(values):
        x, weight, target, bias, ce_weight = values
        leaves = [v.detach().requires_grad_() for v in (x, weight, bias)]
        loss = fused_linear_cross_entropy(
            leaves[0], leaves[1], target, bias=leaves[2], ce_weight=ce_weight, label_smoothing=0.1, **place.call
        )
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    plain, other = run(tensors), run([laid_out(v, layout) for v, layout in zip(tensors, layouts, strict=True)])
    assert all(g.shape == v.shape for g, v in zip(other[1:], (tensors[0], tensors[1], tensors[3]), strict=True))
    for a, b in zip(plain, other, strict=True):
        # a CPU product of transposed matrices adds in another order
        assert_close(b, a.double(), GRADIENT_BOUND[dtype], "layout")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_empty_batch_has_loss_zero_and_zero_gradients(place, reduction):
    x = torch.empty(0, 8, dtype=place.dtypes[0], device=place.device, requires_grad=True)
    weight = torch.randn(10, 8, dtype=place.dtypes[0], device=place.device, requires_grad=True)
    bias = torch.randn(10, dtype=place.dtypes[0], device=place.device, requires_grad=True)
    target = torch.empty(0, dtype=torch.int64, device=place.device)
    out = fused_linear_cross_entropy(
        x,
        weight,
        target,
        bias=bias,
        reduction=reduction,
        return_z_loss=True,
        return_token_accuracy=True,
        return_predicted_tokens=True,
        lse_square_scale=0.1,
    )
    assert out.loss.shape == ((0,) if reduction == "none" else ())
    assert out.loss.sum().item() == out.z_loss.sum().item() == out.token_accuracy.sum().item() == 0.0
    assert out.predicted_tokens.shape == (0,)
    out.loss.sum().backward()
    assert x.grad.shape == (0, 8)
    assert weight.grad.abs().max() == bias.grad.abs().max() == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ce_weight", [False, True])
def test_all_targets_ignored_gives_loss_zero_and_zero_gradients(place, reduction, ce_weight):
    options = dict(
        reduction=reduction,
        label_smoothing=0.1,
        lse_square_scale=0.1,
        use_token_scaling=True,
        ignore_index=-1,
    )
    case = Case(
        dtype=place.dtypes[0],
        device=place.device,
        bias=True,
        ce_weight=ce_weight,
        ignored=1.1,
        options=options,
    )
    for grad in check_case(case, **place.call):
        assert torch.count_nonzero(grad) == 0


def test_zero_class_weights_of_all_targets_give_nan_as_in_torch():
    ce_weight = torch.zeros(10)
    got = fused_linear_cross_entropy(X, W, T, ce_weight=ce_weight)
    assert torch.isnan(got)
    assert torch.isnan(torch.nn.functional.cross_entropy(X @ W.T, T, weight=ce_weight))


REFUSED = {
    "x_rank": (dict(x=torch.randn(8)), ValueError, "target must have shape"),
    "x_dtype": (dict(x=X.long()), TypeError, "x must be bfloat16"),
    "x_type": (dict(x=[1.0]), TypeError, "x must be a torch.Tensor"),
    "weight_shape": (dict(weight=torch.randn(10, 9)), ValueError, r"weight must have shape \(V, H\).*H = 8"),
    "weight_empty": (dict(weight=torch.randn(0, 8)), ValueError, "V ≥ 1"),
    "weight_dtype": (dict(weight=W.bfloat16()), TypeError, "float32 and torch.bfloat16.*autocast"),
    "weight_device": (dict(weight=W.to("meta")), ValueError, "weight must be on x's device cpu, got meta"),
    "target_shape": (dict(target=torch.arange(5)), ValueError, r"target must have shape \(6,\)"),
    "target_dtype": (
        dict(target=torch.ones(6)),
        TypeError,
        "target must be int64 or int32, got torch.float32",
    ),
    "target_low": (
        dict(target=torch.tensor([0, 1, 2, 3, 4, -1])),
        ValueError,
        r"\[0, 10\).*ignore_index=-100, got -1",
    ),
    "target_high": (
        dict(target=torch.tensor([0, 1, 2, 3, 4, 10])),
        ValueError,
        "got 10 for a vocabulary of 10",
    ),
    "bias_length": (
        dict(bias=torch.randn(9)),
        ValueError,
        r"bias must have shape \(V,\) = \(10,\), got \(9,\)",
    ),
    "bias_dtype": (dict(bias=torch.ones(10).long()), TypeError, "bias must be floating point"),
    "ce_weight_length": (dict(ce_weight=torch.randn(10, 1)), ValueError, "ce_weight must have shape"),
    "reduction": (dict(reduction="avg"), ValueError, "reduction must be one of mean, sum, none, got 'avg'"),
    "softcap": (dict(softcap=0.0), ValueError, "softcap must be None or greater than 0, got 0.0"),
    "softcap_type": (dict(softcap="30"), TypeError, "softcap must be a finite number, got '30'"),
    "smoothing": (dict(label_smoothing=1.5), ValueError, r"label_smoothing must lie in \[0, 1\], got 1.5"),
    "z_loss": (dict(lse_square_scale=float("nan")), TypeError, "lse_square_scale must be a finite number"),
    "ignore_index": (dict(ignore_index=1.0), TypeError, "ignore_index must be an int, got 1.0"),
    "accum_dtype, a tensor": (dict(accum_dtype=torch.ones(2)), TypeError, "accum_dtype must be None or a floating"),
    "accum_dtype": (dict(accum_dtype=torch.int32), TypeError, "accum_dtype must be None or a floating"),
    "flag": (dict(return_z_loss=1), TypeError, "return_z_loss must be True or False, got 1"),
    "unknown": (dict(label_smothing=0.1), TypeError, "label_smothing"),
    "engine": (
        dict(engine="cuda"),
        ValueError,
        "engine must be one of cute, triton, torch or auto, got 'cuda'",
    ),
    "schedule": (dict(schedule="fast"), ValueError, "schedule must be one of .*recompute"),
    "workspace": (dict(workspace_mb=-1), ValueError, "workspace_mb must be a positive number of MiB, got -1"),
    "forced": (dict(engine="triton"), RuntimeError, "'triton' was asked for but cannot run.*needs a GPU"),
    "forced_cute": (dict(engine="cute"), RuntimeError, "'cute' was asked for but cannot run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, error, message = REFUSED[name]
    arguments = {**dict(x=X, weight=W, target=T), **changes}
    with pytest.raises(error, match=message):
        fused_linear_cross_entropy(**arguments)


def test_function_refuses_rank_3_with_a_hint():
    with pytest.raises(ValueError, match=r"x must have shape \(N, H\), got \(2, 3, 8\).*flatten"):
        LigerFusedLinearCrossEntropyFunction.apply(torch.randn(2, 3, 8), W, torch.zeros(2, 3).long())


def test_function_refuses_a_bad_chunk_mem_const():
    arguments = [
        X,
        W,
        T,
        None,
        None,
        -100,
        0.0,
        0.0,
        "mean",
        None,
        False,
        None,
        False,
        False,
        False,
        None,
        None,
    ]
    with pytest.raises(ValueError, match="chunk_mem_const must be a positive int, got 0"):
        LigerFusedLinearCrossEntropyFunction.apply(*arguments, 0)


@pytest.mark.parametrize("variable", ["ENGINE", "SCHEDULE", "WORKSPACE_MB"])
def test_bad_environment_variable_is_named(monkeypatch, variable):
    monkeypatch.setenv(f"LIGER_CUTEDSL_{variable}", "banana")
    with pytest.raises(ValueError, match=f"LIGER_CUTEDSL_{variable} must be .*, got 'banana'"):
        fused_linear_cross_entropy(X, W, T)


class Wrapping(torch.Tensor):
    """A tensor whose numbers are in another, as quantised weights are: no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda v: v.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


class OverItsOwnMemory(torch.Tensor):
    """A subclass that only watches what is done with it, as frameworks' tagged tensors do."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class TaggedParameter(torch.nn.Parameter):
    pass


@pytest.mark.parametrize("name", ["x", "weight", "target", "bias", "ce_weight"])
def test_what_has_no_memory_to_read_is_refused_by_name(monkeypatch, place, name):
    """Before anything is launched: a kernel would read address 0, and take the process with it."""
    monkeypatch.setattr("liger_cutedsl.routing.make_engine", lambda *_: pytest.fail("something was launched"))
    case = Case(bias=True, ce_weight=True, dtype=place.dtypes[0], device=place.device)
    tensors = dict(zip(("x", "weight", "target", "bias", "ce_weight"), case.tensors(), strict=True))
    freed = tensors[name].detach().clone()
    freed.untyped_storage().resize_(0)
    for bad, error, words in (
        (
            Wrapping(tensors[name].detach()),
            TypeError,
            f"{name} is a Wrapping, which keeps its numbers in other tensors",
        ),
        (freed, RuntimeError, f"{name} of shape .* has no memory: its storage was freed"),
        (tensors[name].detach().to_sparse(), TypeError, f"{name} must be a dense tensor, got .*sparse"),
    ):
        with pytest.raises(error, match=words):
            fused_linear_cross_entropy(**{**tensors, name: bad}, **place.call)


def test_an_ungathered_parameter_is_named():
    with pytest.raises(ValueError, match=r"weight must have shape .*got \(0,\).*must be gathered around forward and"):
        fused_linear_cross_entropy(X, torch.nn.Parameter(torch.empty(0)), T)


def test_subclasses_over_their_own_memory_are_read(place):
    case = Case(bias=True, dtype=place.dtypes[0], device=place.device)
    x, weight, target, bias, _ = case.tensors()
    expected = fused_linear_cross_entropy(x, weight, target, bias=bias, **place.call)
    wanted = torch.autograd.grad(expected, (x, weight, bias))
    storage = torch.cat([weight.detach().flatten(), bias.detach()])  # as FSDP lays parameters out
    flat = storage[: weight.numel()].view(weight.shape).requires_grad_()
    watched = tuple(v.detach().as_subclass(OverItsOwnMemory) for v in (x, weight, bias))
    for other in (
        *((watched,) if place.engine == "torch" else ()),  # what CuTe DSL takes is its own affair
        (x, TaggedParameter(weight.detach()), torch.nn.Parameter(bias.detach())),
        (x, flat, storage[weight.numel() :].requires_grad_()),
    ):
        leaves = [v.requires_grad_() for v in other]
        loss = fused_linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2], **place.call)
        assert torch.equal(torch.Tensor(loss), expected)
        for got, want in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
            assert torch.equal(got.as_subclass(torch.Tensor), want)


def test_dtensor_weight_says_what_to_pass():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        weight = distribute_tensor(W, init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(TypeError, match=r"weight is a DTensor.*FSDP2.*weight.full_tensor\(\)"):
            fused_linear_cross_entropy(X, weight, T)
        words = r"weight.full_tensor\(grad_placements=\[Partial\('avg'\)\]\).*the bias likewise.*head.unshard\(\)"
        with pytest.raises(TypeError, match=words):
            fused_linear_cross_entropy(X, weight, T)
        bias = distribute_tensor(torch.zeros(10), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(
            TypeError, match=r"bias is a DTensor.*bias.full_tensor\(grad_placements=\[Partial\('avg'\)\]"
        ):
            fused_linear_cross_entropy(X, W, T, bias=bias)
    finally:
        dist.destroy_process_group()

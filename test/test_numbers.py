"""Strange numbers: huge logits, masked vocabulary, NaN and infinities in the inputs, rows and columns of zeros."""

import pytest
import torch

from liger_cutedsl import LossOptions, fused_linear_cross_entropy
from reference import assert_close, reference

SCHEDULES = ["single_pass", "recompute"]


def make(place, tokens=24, hidden=16, vocab=450):
    dtype = torch.float64 if torch.float64 in place.dtypes else torch.bfloat16
    g = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, hidden, generator=g, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=g, dtype=torch.float64) * hidden**-0.5
    target = torch.randint(0, vocab, (tokens,), generator=g)
    return x.to(place.device, dtype), weight.to(place.device, dtype), target.to(place.device)


def check(place, x, weight, target, bias=None, bound=None, **options):
    leaves = [None if v is None else v.detach().clone().requires_grad_() for v in (x, weight, bias)]
    loss = fused_linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2], **place.call, **options)
    loss.sum().backward()
    expected, grads = reference(x, weight, target, bias, None, LossOptions(**options))
    # float64: the logits' own rounding, relative to their size. bf16 on a GPU: float32 logits, and dz and the
    # gradients rounded once each.
    bound = bound or (1e-9 if x.dtype == torch.float64 else 8e-3)
    assert_close(loss, expected["loss"], min(bound, 1e-4), "loss", size=expected["loss_size"])
    for name, leaf, want in zip(("dx", "dW", "db"), leaves, grads, strict=True):
        if want is not None:
            assert_close(leaf.grad, want, bound, name)
    return leaves


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_huge_logits(place, size, reduction):
    x, weight, target = make(place)
    if x.dtype != torch.float64:
        size = min(size, 1e2)  # float32 logits of 1e4 are known to 1e-3: nothing to compare
    check(place, x * size, weight, target, reduction=reduction)


def test_common_offset_of_all_logits(place):
    x, weight, target = make(place)
    x[:, 0], weight[:, 0] = 1000.0, 1.0
    check(place, x, weight, target, bound=None if x.dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_masked_vocabulary(place, reduction):
    """−inf in the bias takes entries out of the softmax, whole tiles and the last ones included."""
    x, weight, target = make(place)
    bias = torch.zeros(len(weight), dtype=x.dtype, device=x.device)
    bias[100:400] = -torch.inf
    bias[-1] = -torch.inf
    target = target % 100
    *_, bias = check(place, x, weight, target, bias, reduction=reduction)
    assert torch.count_nonzero(bias.grad[100:400]) == 0


def test_target_of_probability_zero(place):
    """Its loss is infinite, as torch's, and the other rows keep theirs."""
    x, weight, target = make(place)
    bias = torch.zeros(len(weight), dtype=x.dtype, device=x.device)
    bias[target[0]] = -torch.inf
    loss = fused_linear_cross_entropy(x, weight, target, bias=bias, reduction="none", **place.call)
    expected, _ = reference(x, weight, target, bias, None, LossOptions(reduction="none"), torch.ones(len(x)).to(loss))
    masked = target == target[0]
    assert torch.isposinf(loss[masked]).all()
    assert_close(loss[~masked], expected["loss"][~masked], 1e-4, "other rows")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_row_is_nan_and_the_others_are_untouched(place, value):
    x, weight, target = make(place)
    call = dict(reduction="none", return_predicted_tokens=True, **place.call)
    clean = fused_linear_cross_entropy(x.clone().requires_grad_(), weight, target, **call).loss
    x[5, 3] = value
    x.requires_grad_()
    out = fused_linear_cross_entropy(x, weight, target, **call)
    assert torch.isnan(out.loss[5])
    others = torch.arange(len(x), device=x.device) != 5
    assert torch.equal(out.loss[others], clean[others])
    out.loss[others].sum().backward()  # nothing of the bad row enters
    assert torch.isfinite(x.grad[others]).all()
    mean = fused_linear_cross_entropy(x, weight, target, **place.call)
    assert torch.isnan(mean)


def test_zero_inputs_and_equal_columns(place):
    x, weight, target = make(place)
    x[:4] = 0.0
    weight[10:200] = weight[10]
    check(place, x, weight, target)
    check(place, torch.zeros_like(x), weight, target)


def test_tiny_inputs(place):
    x, weight, target = make(place)
    info = torch.finfo(x.dtype)
    check(place, x * info.smallest_normal * 4, weight, target)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_vocabulary_of_one(place, softcap):
    x, weight, target = make(place, vocab=1)
    leaves = x.requires_grad_(), weight.requires_grad_()
    loss = fused_linear_cross_entropy(x, weight, torch.zeros_like(target), softcap=softcap, **place.call)
    loss.backward()
    assert abs(loss.item()) <= 1e-5
    for leaf in leaves:
        assert leaf.grad.abs().max() <= 1e-5

"""Loss, metrics and gradients against float64 PyTorch: every option alone, and options in random combination."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liger_cutedsl import LossOptions, fused_linear_cross_entropy
from reference import GRADIENT_BOUND, Case, assert_close, check_case, reference

ALL = dict(softcap=10.0, label_smoothing=0.1, lse_square_scale=1e-2, use_token_scaling=True)
OPTIONS = {
    "plain": {},
    "sum": dict(reduction="sum"),
    "none": dict(reduction="none"),
    "ignore_index": dict(ignore_index=7),
    "softcap": dict(softcap=8.0),
    "small_softcap": dict(softcap=3.0),
    "smoothing": dict(label_smoothing=0.2),
    "smoothing_one": dict(label_smoothing=1.0),
    "z_loss": dict(lse_square_scale=1e-2),
    "token_scaling": dict(use_token_scaling=True),
    "accum_dtype": dict(accum_dtype=torch.float32),
    "all": ALL,
    "all_none": dict(**ALL, reduction="none"),
}


@pytest.mark.parametrize("vectors", ["", "bias", "ce_weight", "bias ce_weight"])
@pytest.mark.parametrize("name", OPTIONS)
def test_option(place, name, vectors):
    for dtype in place.dtypes:
        case = Case(
            dtype=dtype,
            device=place.device,
            bias="bias" in vectors,
            ce_weight="ce_weight" in vectors,
            options=OPTIONS[name],
        )
        check_case(case, **place.call)


combinations = st.fixed_dictionaries(
    dict(
        reduction=st.sampled_from(["mean", "sum", "none"]),
        softcap=st.sampled_from([None, 1.0, 30.0]),
        label_smoothing=st.sampled_from([0.0, 0.1, 0.9]),
        lse_square_scale=st.sampled_from([0.0, 1e-4, 1e-1]),
        use_token_scaling=st.booleans(),
        ignore_index=st.sampled_from([-100, 0, 3]),
    )
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    options=combinations,
    bias=st.booleans(),
    ce_weight=st.booleans(),
    tokens=st.integers(1, 40),
    vocab=st.integers(1, 400),
    hidden=st.integers(1, 5),
    ignored=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_any_combination(place, options, bias, ce_weight, tokens, vocab, hidden, ignored, seed, data):
    case = Case(
        tokens=tokens,
        vocab=vocab,
        hidden=8 * hidden,
        dtype=data.draw(st.sampled_from(place.dtypes)),
        device=place.device,
        bias=bias,
        ce_weight=ce_weight,
        ignored=ignored,
        seed=seed,
        options=options,
    )
    # A gradient of a handful of elements may have all of them rounded by nearly the whole unit: twice the bound
    # that holds for the norm of many.
    bound = GRADIENT_BOUND[case.dtype] * (2 if case.dtype.itemsize == 2 else 1)
    workspace_mb = data.draw(st.sampled_from([0.05, 512.0]))  # recompute in narrow tiles, or single_pass
    check_case(case, **{**place.call, "workspace_mb": workspace_mb}, gradient_bound=bound, may_cancel=True)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129])
@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 257])
def test_tile_edges(place, tokens, vocab):
    for dtype in place.dtypes[:1]:
        case = Case(tokens=tokens, vocab=vocab, dtype=dtype, device=place.device, bias=True, ignored=0.1)
        # Of a handful of probabilities each may be rounded by nearly the whole unit, as exponential and as dz.
        bound = GRADIENT_BOUND[dtype] * (2 if dtype.itemsize == 2 and min(tokens, vocab) < 8 else 1)
        check_case(case, **{**place.call, "workspace_mb": 0.001}, gradient_bound=bound)


@pytest.mark.parametrize("logit_scale", [0.01, 30.0])
def test_large_and_small_logits(place, logit_scale):
    for dtype in place.dtypes:
        # |z| reaches about 100 at scale 30: its float32 rounding enters the exponent, hence 100 · 64 ulp
        bound = 100 * 64 * 1.2e-7 if dtype == torch.float32 else None
        case = Case(tokens=64, dtype=dtype, device=place.device, scale=logit_scale)
        check_case(case, **place.call, gradient_bound=bound)


def test_softcap_saturates_without_losing_the_gradient(place):
    # Logits of ±60 under a cap of 5: tanh is 1 up to 1e-10, and float64 resolves the slope left there.
    for dtype in place.dtypes[:1]:
        check_case(Case(dtype=dtype, device=place.device, scale=20.0, options=dict(softcap=5.0)), **place.call)


def test_argmax_takes_the_first_of_equal_logits(place):
    dtype = place.dtypes[-1]
    x = torch.ones(5, 8, dtype=dtype, device=place.device)
    weight = torch.zeros(700, 8, dtype=dtype, device=place.device)
    weight[[130, 131, 300, 699]] = 1.0
    target = torch.tensor([130, 131, 300, 0, -100], device=place.device)
    out = fused_linear_cross_entropy(
        x,
        weight,
        target,
        **{**place.call, "workspace_mb": 0.001},
        return_predicted_tokens=True,
        return_token_accuracy=True,
    )
    assert out.predicted_tokens.tolist() == [130, 130, 130, 130, -1]
    assert out.token_accuracy.item() == pytest.approx(1 / 4)


def test_confident_targets(place):
    """p_t → 1: A·p − B cancels there, and the target's element is computed so that it does not."""
    dtype = place.dtypes[-1] if place.engine != "torch" else torch.float32
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(500, 64, generator=generator)
    target = torch.randint(0, 500, (50,), generator=generator)
    x = weight[target] * 0.2  # z_t about 13, the rest about ±2
    x, weight = (v.to(place.device, dtype).requires_grad_() for v in (x, weight))
    target = target.to(place.device)
    fused_linear_cross_entropy(x, weight, target, **place.call).backward()
    expected, expected_grads = reference(x, weight, target, None, None, LossOptions())
    miss = -torch.expm1(-expected["loss"])  # the typical 1 − p_t, about 1e-3
    # z_t − lse is known to a few ulp of |z| ≈ 13, absolutely; relative to 1 − p_t that is
    lost = 4 * 13 * 1.2e-7 / float(miss)
    for name, got, want in zip(("dx", "dW"), (x.grad, weight.grad), expected_grads[:2], strict=True):
        assert_close(got, want, GRADIENT_BOUND[dtype] + lost, name)

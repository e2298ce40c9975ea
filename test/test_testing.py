"""liger_cutedsl.testing: kernels that fail where they are asked to, and nothing of it left behind."""

import warnings

import pytest
import torch

from liger_cutedsl import LossOptions, explain, fused_linear_cross_entropy, testing
from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.rows import TargetCheck
from reference import GRADIENT_BOUND, Case, assert_close, reference

# schedule, workspace_mb: gradients in forward; in backward with all exponentials kept, and with few
CALLS = {"single_pass": ("single_pass", None), "kept": ("recompute", None), "recompute": ("recompute", 0.05)}
FAIL_IN_FORWARD = {(where, call) for where in ("forward", "any") for call in CALLS}
FAIL_IN_BACKWARD = {("backward", "kept"), ("backward", "recompute")}


def inputs():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (40, 3000))
    return x, weight, torch.arange(40)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("where", testing.PLACES)
def test_a_failure_comes_where_it_was_planted(where, call):
    schedule, workspace_mb = CALLS[call]
    how = dict(engine="cute", schedule=schedule, workspace_mb=workspace_mb)
    with testing.planted_kernel_failure(where, on_cpu=True):
        if (where, call) in FAIL_IN_FORWARD:
            with pytest.raises(KernelFailure, match="planted"):
                fused_linear_cross_entropy(*inputs(), **how)
            return
        loss = fused_linear_cross_entropy(*inputs(), **how)
        if (where, call) in FAIL_IN_BACKWARD:
            with pytest.raises(KernelFailure, match="planted"):
                loss.backward()
        else:
            loss.backward()


def test_a_failure_is_forgotten_with_its_context():
    with pytest.raises(ZeroDivisionError), testing.planted_kernel_failure(on_cpu=True):
        assert explain(*inputs()).engine == "cute" and testing.kernel_failure() is None
        fused_linear_cross_entropy(*inputs()).backward()
        assert testing.kernel_failure() == testing.PLANTED and explain(*inputs()).engine == "torch"
        raise ZeroDivisionError
    assert testing.kernel_failure() is None and explain(*inputs()).engine == "torch"
    with pytest.raises(RuntimeError, match="'cute' was asked for"):
        fused_linear_cross_entropy(*inputs(), engine="cute")


def test_a_place_that_is_none_is_refused():
    with pytest.raises(ValueError, match="where must be one of forward, backward, any, got 'sideways'"):
        testing.planted_kernel_failure("sideways").__enter__()


def test_reset_forgets_failures_and_warnings():
    case = (torch.randn(64, 32, requires_grad=True), torch.randn(500, 32, requires_grad=True), torch.arange(64))
    testing.reset()
    for expected in (1, 0, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fused_linear_cross_entropy(*case, workspace_mb=1e-3)
        assert len([w for w in caught if "holds no schedule" in str(w.message)]) == expected
        if not expected:
            testing.reset()
    with testing.planted_kernel_failure(on_cpu=True):
        fused_linear_cross_entropy(*case)
        assert testing.kernel_failure()
        testing.reset()
        assert testing.kernel_failure() is None
    TargetCheck._dropped_last_time[torch.device("cpu")] = True
    testing.reset()
    assert not TargetCheck._dropped_last_time


@pytest.mark.gpu
@pytest.mark.parametrize("where", testing.PLACES)
def test_the_kernels_of_a_gpu_fail_too(where):
    testing.reset()
    tensors = Case(256, 64, 5000, dtype=torch.bfloat16, device="cuda").tensors()
    x, weight, target, *_ = tensors
    how = dict(schedule="recompute", workspace_mb=0.05)
    with testing.planted_kernel_failure(where), pytest.raises(KernelFailure, match="planted"):
        fused_linear_cross_entropy(x, weight, target, engine="cute", **how).backward()
    assert explain(x, weight, target).engine == "cute"
    with testing.planted_kernel_failure(where):
        found = torch.autograd.grad(fused_linear_cross_entropy(x, weight, target, **how), (x, weight))
        assert testing.kernel_failure() == testing.PLANTED
    _, expected = reference(*tensors, LossOptions())
    for name, got, want in zip(("dx", "dW"), found, expected, strict=False):
        assert_close(got, want, GRADIENT_BOUND[torch.bfloat16], name)
    assert explain(x, weight, target).engine == "cute"

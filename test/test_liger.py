"""Liger-Kernel on our operator: what enable() and disable() change, and what they leave alone."""

import copy

import pytest
import torch

import liger_cutedsl
from liger_cutedsl import LossOptions
from reference import assert_close, reference

X = torch.randn(20, 16)
W = torch.randn(50, 16)
T = torch.randint(0, 50, (20,))
FLOAT32 = 1e-5


@pytest.fixture
def enabled():
    liger_cutedsl.enable()
    yield
    liger_cutedsl.disable()


def leaves():
    return X.clone().requires_grad_(), W.clone().requires_grad_()


def check(loss, x, w, **options):
    loss.backward()
    expected, grads = reference(X, W, T, None, None, LossOptions(**options))
    assert_close(loss, expected["loss"], FLOAT32, "loss")
    assert_close(x.grad, grads[0], FLOAT32, "dx")
    assert_close(w.grad, grads[1], FLOAT32, "dW")


def test_module(enabled):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    x, w = leaves()
    module = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1, softcap=5.0, return_token_accuracy=True)
    out = module(w, x, T)
    assert out.token_accuracy is not None and out.z_loss is None
    check(out.loss, x, w, label_smoothing=0.1, softcap=5.0)


def test_functional(enabled):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    x, w = leaves()
    check(liger_fused_linear_cross_entropy(x, w, T, reduction="sum", chunk_mem_const=4), x, w, reduction="sum")


@pytest.mark.parametrize("name", ["nvidia-cutedsl", "cutedsl", None])
def test_second_dispatcher(enabled, name):
    from liger_kernel.functional import fused_linear_cross_entropy

    x, w = leaves()
    check(fused_linear_cross_entropy(x, w, T, impl=name)[0], x, w)


def test_second_dispatcher_refuses_an_unknown_mode(enabled):
    from liger_kernel.functional import fused_linear_cross_entropy

    with pytest.raises(ValueError, match="mode must be None or 'default'"):
        fused_linear_cross_entropy(X, W, T, impl="nvidia-cutedsl", mode="fast")


def test_forward_and_backward_functions():
    from liger_cutedsl.liger_ops import (
        fused_linear_cross_entropy_backward,
        fused_linear_cross_entropy_forward,
    )

    x, w = leaves()
    bias = torch.randn(50)
    loss, z_loss, accuracy, predicted, gx, gw, gb = fused_linear_cross_entropy_forward(
        x, w, T, bias=bias, return_z_loss=True, lse_square_scale=0.01
    )
    expected, grads = reference(X, W, T, bias, None, LossOptions(lse_square_scale=0.01))
    assert_close(loss, expected["loss"], FLOAT32, "loss")
    assert_close(z_loss, expected["z_loss"], FLOAT32, "z_loss")
    assert accuracy is None and predicted is None
    scaled = fused_linear_cross_entropy_backward(torch.tensor(3.0), gx, gw, gb)
    for once, tripled, want in zip((gx, gw, gb), scaled, grads, strict=True):
        assert_close(once, want, FLOAT32, "gradient")
        assert_close(tripled, 3 * want, FLOAT32, "scaled gradient")
    x_only = fused_linear_cross_entropy_forward(x, w, T, weight_requires_grad=False)
    assert x_only[5] is None and x_only[4] is not None
    assert fused_linear_cross_entropy_forward(X, W, T)[4] is None
    upstream = torch.linspace(0, 1, 20)
    gw = fused_linear_cross_entropy_forward(x, w, T, reduction="none", token_grad_output=upstream)[5]
    assert_close(gw, reference(X, W, T, None, None, LossOptions(reduction="none"), upstream)[1][1], 1e-5, "dW")


def test_disable_restores_liger():
    import liger_kernel.transformers.functional as functional
    from liger_kernel.backends import all_impls, available_impls

    import liger_kernel.ops

    op = "fused_linear_cross_entropy"
    before = (liger_kernel.ops.LigerFusedLinearCrossEntropyFunction, available_impls(op), all_impls(op))
    liger_cutedsl.enable()
    liger_cutedsl.enable()
    ours = liger_cutedsl.LigerFusedLinearCrossEntropyFunction
    assert liger_kernel.ops.LigerFusedLinearCrossEntropyFunction is ours
    assert functional.LigerFusedLinearCrossEntropyFunction is ours
    assert liger_kernel.ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction is not ours
    assert available_impls(op)[0] == "nvidia-cutedsl"
    liger_cutedsl.disable()
    liger_cutedsl.disable()
    after = (liger_kernel.ops.LigerFusedLinearCrossEntropyFunction, available_impls(op), all_impls(op))
    assert before == after
    assert functional.LigerFusedLinearCrossEntropyFunction is before[0]


def test_patched_hugging_face_llama(enabled):
    """A Llama patched by Liger computes the loss and gradients of the unpatched one."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    plain = LlamaForCausalLM(config)
    fused = copy.deepcopy(plain)
    apply_liger_kernel_to_llama(
        rope=False,
        swiglu=False,
        rms_norm=False,
        cross_entropy=False,
        fused_linear_cross_entropy=True,
        model=fused,
    )
    ids = torch.randint(0, 1000, (2, 17))
    labels = ids.clone()
    labels[0, :5] = -100
    losses = [model(input_ids=ids, labels=labels).loss for model in (plain, fused)]
    for loss in losses:
        loss.backward()
    assert_close(losses[1], losses[0].double(), FLOAT32, "loss")
    for (name, a), b in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert_close(b.grad, a.grad, FLOAT32, name)

"""Liger-Kernel on our operator: what enable() and disable() change, and what they leave alone."""

import copy

import pytest
import torch

import liger_cutedsl
from liger_cutedsl import LossOptions
from reference import assert_close, reference
from stacks import ONLY_THE_LOSS, SMALL, count_calls

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


SIZES = dict(**SMALL, vocab_size=1000, pad_token_id=0)
# family → (transformers' class prefix, what is particular about its head)
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", dict(final_logit_softcapping=5.0, tie_word_embeddings=True)),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
}


@pytest.mark.parametrize("num_items", [None, 17])
@pytest.mark.parametrize("family", FAMILIES)
def test_patched_hugging_face_models(enabled, family, num_items):
    """A model patched by Liger (on a CPU only its loss) has the loss and the gradients of the unpatched one."""
    import inspect

    import liger_kernel.transformers as patches
    import transformers

    prefix, particular = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**SIZES, **particular)
    plain = getattr(transformers, f"{prefix}ForCausalLM")(config)
    fused = copy.deepcopy(plain)
    patch = getattr(patches, f"apply_liger_kernel_to_{family}")
    flags = [p for p in inspect.signature(patch).parameters if p != "model"]
    patch(**{flag: flag == "fused_linear_cross_entropy" for flag in flags}, model=fused)
    ids = torch.randint(1, 1000, (2, 17))
    labels = ids.clone()
    labels[0, :5] = -100
    extra = {} if num_items is None else dict(num_items_in_batch=torch.tensor(num_items))
    with count_calls() as calls:
        losses = [model(input_ids=ids, labels=labels, **extra).loss for model in (plain, fused)]
    assert calls == [1], "the patched model, and only it, runs our operator"
    for loss in losses:
        loss.backward()
    assert_close(losses[1], losses[0].double(), FLOAT32, "loss")
    for (name, a), b in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert_close(b.grad, a.grad, FLOAT32, name)


def test_a_patched_model_compiles_into_one_graph(enabled):
    import transformers
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    apply_liger_kernel_to_llama(**ONLY_THE_LOSS, model=model)
    ids = torch.randint(1, 1000, (2, 17))
    # return_dict: else Liger's forward reads an option that makes transformers log, which breaks the graph
    call = dict(input_ids=ids, labels=ids, return_dict=True)
    expected = model(**call).loss
    torch._dynamo.reset()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(**call).loss
    assert_close(loss, expected.double(), FLOAT32, "loss")
    want = torch.autograd.grad(expected, model.lm_head.weight)[0]
    assert_close(torch.autograd.grad(loss, model.lm_head.weight)[0], want, FLOAT32, "dW")

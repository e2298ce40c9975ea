"""What is measured, each as a small adapter: a function of (x, weight, target) that runs forward or forward and
backward and leaves gradients in x.grad and weight.grad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import liger_cutedsl


@dataclass(frozen=True)
class Implementation:
    """name, what it is, and make() → run(x, weight, target) → loss or None. make raises where it cannot run here.

    plain: whether it computes the mean cross entropy of x, weight and target as they are, so that its gradient can be
    checked; not with options, other targets, or as bare matrix products.
    """

    name: str
    note: str
    make: Callable[[], Callable]
    plain: bool = True


def _autograd(loss_function):
    def run(x, weight, target):
        loss = loss_function(x, weight, target)
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    return run


def ours(**call):
    return lambda: _autograd(lambda x, w, t: liger_cutedsl.fused_linear_cross_entropy(x, w, t, **call))


def _liger_triton(softcap=None):
    def make():
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function

        rest = (None, None, -100, 0.0, 0.0, "mean", softcap)
        return _autograd(lambda x, w, t: function.apply(x, w, t, *rest)[0])

    return make


def _liger_cute_sm90():
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        LigerFusedLinearCrossEntropySM90Function as function,
    )

    def loss(x, w, t):
        result = function.apply(x, w, t)
        return result[0] if isinstance(result, tuple) else result

    return _autograd(loss)


def _quack(**call):
    def make():
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        return _autograd(lambda x, w, t: chunked_linear_cross_entropy(x, w, t, **call))

    return make


def _cce(implementation, softcap=None):
    def make():
        from cut_cross_entropy import linear_cross_entropy

        return _autograd(lambda x, w, t: linear_cross_entropy(x, w, t, impl=implementation, softcap=softcap))

    return make


def _plain(x, weight, target):
    return F.cross_entropy(F.linear(x, weight).float(), target)


def _torch_plain():
    return _autograd(_plain)


def _torch_compiled():
    return _autograd(torch.compile(_plain, dynamic=False))


def _torch_linear_cross_entropy():
    if not hasattr(F, "linear_cross_entropy"):
        raise RuntimeError(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    return _autograd(lambda x, w, t: F.linear_cross_entropy(x, w, t))


def _floor():
    """The GEMMs alone, through cuBLAS in chunks of 4096 rows: one forward, and one for each gradient wanted."""
    buffers = {}

    def run(x, weight, target):
        wants = x.requires_grad and torch.is_grad_enabled()
        wants_dw = weight.requires_grad
        x, weight = x.detach(), weight.detach()
        rows = min(4096, x.shape[0]) if wants else x.shape[0]
        logits = buffers.get("logits")
        if logits is None or logits.shape != (rows, weight.shape[0]):
            buffers.clear()
            logits = buffers["logits"] = torch.empty(rows, weight.shape[0], dtype=x.dtype, device=x.device)
        if not wants:
            torch.mm(x, weight.t(), out=logits)
            return
        dx, dw = torch.empty_like(x), torch.empty_like(weight)
        for start in range(0, x.shape[0], rows):
            chunk = x[start : start + rows]
            z = logits[: chunk.shape[0]]
            torch.mm(chunk, weight.t(), out=z)
            torch.mm(z, weight, out=dx[start : start + rows])
            if not wants_dw:
                continue
            if start:
                torch.addmm(dw, z.t(), chunk, out=dw)
            else:
                torch.mm(z.t(), chunk, out=dw)

    return run


OPTIONS = {
    "bias": {},
    "ce_weight": {},
    "softcap": dict(softcap=30.0),
    "smoothing": dict(label_smoothing=0.1),
    "z_loss": dict(lse_square_scale=1e-4),
    "token_scaling": dict(use_token_scaling=True),
    "metrics": dict(return_z_loss=True, return_token_accuracy=True),
}


def ours_with(options, **call):
    """Some of OPTIONS by name; the vectors are drawn once a vocabulary, the bias is trained."""

    def make():
        values = {name: value for option in options for name, value in OPTIONS[option].items()}
        vectors = {}

        def loss(x, w, t):
            if vectors.get("vocab") != w.shape[0]:
                bias = torch.randn(w.shape[0], device=x.device, dtype=x.dtype, requires_grad=True)
                vectors.update(vocab=w.shape[0], bias=bias, ce_weight=torch.rand(w.shape[0], device=x.device) + 0.5)
            vectors["bias"].grad = None
            used = {name: vectors[name] for name in ("bias", "ce_weight") if name in options}
            output = liger_cutedsl.fused_linear_cross_entropy(x, w, t, **used, **values, **call)
            return output if isinstance(output, torch.Tensor) else output.loss

        return _autograd(loss)

    return make


def ours_ignoring_half(**call):
    def loss(x, w, t):
        generator = torch.Generator(x.device).manual_seed(0)
        ignored = torch.rand(t.shape, device=t.device, generator=generator) < 0.5
        return liger_cutedsl.fused_linear_cross_entropy(x, w, torch.where(ignored, -100, t), **call)

    return lambda: _autograd(loss)


def ours_as_hugging_face(sequences=4):
    """Hugging Face's batch: the last target of each sequence ignored, a sum divided by the number of items. Such labels
    are made once a shape, as a data loader makes them."""

    def make():
        labels = {}

        def loss(x, w, t):
            if labels.get("shape") != t.shape:
                each, ignored = len(t) // sequences, t.clone()
                ignored[each - 1 :: each] = -100
                labels.update(shape=t.shape, ignored=ignored)
            found = liger_cutedsl.fused_linear_cross_entropy(x, w, labels["ignored"], reduction="sum")
            return found / (len(t) - sequences)

        return _autograd(loss)

    return make


def ours_into_buffer(dtype: torch.dtype | None, **call):
    """dW added to one buffer, of dtype (weight's if None), as training accumulates it: it is there before what is
    measured, so that a peak is what comes beside it."""

    def make():
        buffers = {}

        def loss(x, w, t):
            buffer = buffers.get("dw")
            if buffer is None or buffer.shape != w.shape:
                buffer = buffers["dw"] = torch.zeros(w.shape, dtype=dtype or w.dtype, device=w.device)
            return liger_cutedsl.fused_linear_cross_entropy(x, w, t, weight_grad_buffer=buffer, **call)

        return _autograd(loss)

    return make


RECOMPUTE = dict(schedule="recompute")
SINGLE_PASS = dict(schedule="single_pass")  # which adds to a buffer where it is asked for alone
IMPLEMENTATIONS = {
    i.name: i
    for i in (
        Implementation("floor", "cuBLAS, no loss: one GEMM forward, three for forward and backward", _floor, False),
        Implementation("single_pass", "ours, the default", ours()),
        Implementation("single_pass-288", "ours, a workspace of 288 MiB", ours(workspace_mb=288)),
        Implementation("single_pass-all", "ours, every option", ours_with(OPTIONS), False),
        Implementation("single_pass-half", "ours, half of the targets ignored at random", ours_ignoring_half(), False),
        Implementation("single_pass-hf", "ours, a Hugging Face batch", ours_as_hugging_face(), False),
        Implementation("recompute", "ours, schedule recompute", ours(**RECOMPUTE)),
        Implementation("recompute-all", "ours, recompute, every option", ours_with(OPTIONS, **RECOMPUTE), False),
        Implementation("recompute-half", "ours, recompute, half ignored", ours_ignoring_half(**RECOMPUTE), False),
        Implementation("buffer", "ours, dW into an fp32 buffer", ours_into_buffer(torch.float32)),
        Implementation(
            "buffer-single_pass", "ours, the same, single_pass", ours_into_buffer(torch.float32, **SINGLE_PASS)
        ),
        Implementation(
            "buffer-narrow", "ours, into one of W's dtype, single_pass", ours_into_buffer(None, **SINGLE_PASS)
        ),
        Implementation("liger-triton", "Liger-Kernel's Triton operator", _liger_triton()),
        Implementation("liger-cute-sm90", "Liger-Kernel's CuTe function for SM90", _liger_cute_sm90),
        Implementation("quack-base", "quack, base", _quack(use_scaled_exp=False, tuned=False)),
        Implementation("quack-exp-2048", "quack, scaled-exp, chunk 2048", _quack(chunk_size=2048)),
        Implementation("cce", "Cut Cross Entropy, default", _cce("cce")),
        Implementation("cce-exact", "Cut Cross Entropy, exact", _cce("cce_exact")),
        Implementation("torch", "plain PyTorch, logits stored", _torch_plain),
        Implementation("torch-compile", "torch.compile of the same", _torch_compiled),
        Implementation("torch-linear-ce", "torch.nn.functional.linear_cross_entropy", _torch_linear_cross_entropy),
        Implementation("liger-triton-softcap", "Liger-Kernel's Triton operator", _liger_triton(softcap=30.0), False),
        Implementation("cce-softcap", "Cut Cross Entropy, default", _cce("cce", softcap=30.0), False),
        *(Implementation(f"single_pass-{o}", f"ours, {o}", ours_with((o,)), False) for o in OPTIONS),
        *(Implementation(f"recompute-{o}", f"ours, {o}", ours_with((o,), **RECOMPUTE), False) for o in OPTIONS),
    )
}

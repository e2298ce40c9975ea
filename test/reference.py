"""The loss in plain float64 PyTorch, cases to run it on, and how far a dtype may be from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from liger_cutedsl import LossOptions, fused_linear_cross_entropy
from liger_cutedsl.call import Problem
from liger_cutedsl.compat import FakeTensorMode

EVERY_OPTION = dict(
    softcap=10.0,
    label_smoothing=0.1,
    lse_square_scale=1e-2,
    use_token_scaling=True,
    return_z_loss=True,
    return_token_accuracy=True,
    return_predicted_tokens=True,
)

# Bound on ‖ĝ − g‖/‖g‖. Inputs are exact in both computations, so what is left is
#   float64  sums of up to a few thousand terms: far below the project's 1e-9
#   float32  64 ulp: the logits' sums over H reach a few ulp and enter the exponent, magnified by |z| up to ~10
#   16-bit   the unit roundoff: a gradient rounded once to nearest is off by less in every element, by about half
#            of it in norm; dz, rounded too on GPUs, adds as much again in quadrature
GRADIENT_BOUND = {
    torch.float64: 1e-9,
    torch.float32: 64 * torch.finfo(torch.float32).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2,
    torch.float16: torch.finfo(torch.float16).eps / 2,
}
# Losses never leave the compute dtype, whatever the inputs' dtype.
LOSS_BOUND = {torch.float64: 1e-9}
LOSS_BOUND_FLOAT32 = 64 * torch.finfo(torch.float32).eps


@dataclass
class Case:
    """Inputs of one call. Every third-ish target is ignored unless ignored=0."""

    tokens: int = 37
    hidden: int = 24
    vocab: int = 301
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    bias: bool = False
    ce_weight: bool = False
    ignored: float = 0.3
    scale: float = 2.0
    seed: int = 0
    options: dict = field(default_factory=dict)

    def tensors(self):
        """(x, weight, target, bias, ce_weight); x, weight and bias require gradients."""
        g = torch.Generator().manual_seed(self.seed)

        def randn(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        x = self.scale * randn(self.tokens, self.hidden)
        weight = randn(self.vocab, self.hidden) * self.hidden**-0.5
        bias = randn(self.vocab) if self.bias else None
        ce_weight = torch.rand(self.vocab, generator=g, dtype=torch.float64) + 0.1 if self.ce_weight else None
        target = torch.randint(0, self.vocab, (self.tokens,), generator=g)
        drop = torch.rand(self.tokens, generator=g) < self.ignored
        target[drop] = self.options.get("ignore_index", -100)

        def place(v):
            return None if v is None else v.to(self.device, self.dtype)

        leaves = [v if v is None else place(v).requires_grad_() for v in (x, weight, bias)]
        return leaves[0], leaves[1], target.to(self.device), leaves[2], place(ce_weight)


def reference(x, weight, target, bias, ce_weight, options: LossOptions, grad_output=None):
    """(outputs by name, gradients of x, weight, bias) in float64, by torch's own cross entropy and autograd."""
    leaves = [None if v is None else v.detach().double().requires_grad_() for v in (x, weight, bias)]
    x, weight, bias = leaves
    ce_weight = None if ce_weight is None else ce_weight.detach().double()
    logits = options.logit_scale * F.linear(x, weight, bias)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    logits = logits / options.temperature
    valid = target != options.ignore_index
    safe = torch.where(valid, target, 0).long()
    lse = torch.logsumexp(logits, dim=-1)
    ce = F.cross_entropy(
        logits,
        target.long(),
        weight=ce_weight,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction="none",
    )
    z_loss = torch.where(valid, options.lse_square_scale * lse.square(), 0.0)
    n_valid = valid.sum().clamp(min=1)
    if options.reduction == "mean":
        denominator = n_valid if ce_weight is None else ce_weight[safe][valid].sum()
        ce = ce / denominator if valid.any() else ce
        z_loss = z_loss / n_valid
    if options.use_token_scaling:
        scale = torch.exp(logits.gather(1, safe[:, None])[:, 0] - lse).detach()
        ce, z_loss = ce * scale, z_loss * scale
    correct = (logits.argmax(dim=-1) == target) & valid
    outputs = {
        "logits": logits,
        # lse − z_t is a difference of numbers of this size, and exact to their rounding
        "loss_size": torch.where(valid, lse.abs().clamp(min=options.softcap or 0.0), 0.0),
        "loss": ce + z_loss,
        "z_loss": z_loss,
        "token_accuracy": correct.double(),
        "predicted_tokens": torch.where(valid, logits.argmax(dim=-1), -1),
    }
    if options.reduction != "none":
        per_row = ("logits", "loss_size", "predicted_tokens")
        outputs = {k: v if k in per_row else v.sum() for k, v in outputs.items()}
        outputs["token_accuracy"] = outputs["token_accuracy"] / n_valid
    sizes = outputs["loss_size"]
    total = {"mean": sizes.sum() / n_valid, "sum": sizes.sum(), "none": sizes.norm()}
    outputs["loss_size"] = float(total[options.reduction])
    g = torch.ones_like(outputs["loss"]) if grad_output is None else grad_output.double()
    wanted = [v for v in leaves if v is not None]
    grads = iter(torch.autograd.grad(outputs["loss"], wanted, g))
    outputs = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in outputs.items()}
    return outputs, [None if v is None else next(grads) for v in leaves]


def assert_close(got, expected, bound, what, size=0.0):
    """‖got − expected‖ ≤ bound · max(‖expected‖, size), plus half a spacing of got's subnormal numbers in each
    element (float16 gradients reach down to them: no output of that dtype could be closer)."""
    got, expected = got.detach(), expected.detach()
    info = torch.finfo(got.dtype)
    floor = 0.5 * info.smallest_normal * info.eps * got.numel() ** 0.5
    error, size = float((got.double() - expected.double()).norm()), max(float(expected.double().norm()), size)
    relative = error / size if size else error
    # NaN fails
    assert error <= bound * size + floor, f"{what}: relative error {relative:.2e} exceeds {bound:.2e}"


def cancelling_size(x, weight, target, bias, ce_weight, options: LossOptions, grad_output):
    """How large the terms are whose differences make up dx, dW, db: rounding errors are relative to these.

    dz_i has positive terms that sum to a_i and negative ones that sum to less; for a vocabulary of one or two
    entries nearly all of it cancels.
    """
    x, weight = x.detach().double(), weight.detach().double()
    lse = torch.logsumexp(F.linear(x, weight, None if bias is None else bias.detach().double()), dim=-1).abs()
    if options.softcap is not None:
        lse = lse.clamp(max=options.softcap + math.log(weight.shape[0]))
    valid = target != options.ignore_index
    n_valid, largest = valid.sum().clamp(min=1), 1.0 if ce_weight is None else float(ce_weight.max())
    share = largest + 2 * options.lse_square_scale * lse
    if options.reduction == "mean":
        share = share / (n_valid if ce_weight is None else ce_weight[target[valid].long()].double().sum().clamp(1e-30))
    a = torch.where(valid, share, 0.0) * (1.0 if grad_output is None else grad_output.double().abs())
    per_token = a * x.norm(dim=1)
    return float((a * weight.norm(dim=1).max()).norm()), float(per_token.sum()), float(a.sum())


def check_case(case: Case, *, gradient_bound: float | None = None, upstream=None, may_cancel=False, **call):
    """Runs a case and compares loss, metrics and gradients with the reference. Returns the gradients.

    may_cancel: allow, besides the bound, float32 (float64) rounding of the terms that cancel in the gradients; and that
    of 16-bit exponentials under label smoothing, which subtracts a constant from them.
    """
    x, weight, target, bias, ce_weight = case.tensors()
    options = LossOptions(**case.options)
    metrics = dict(return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True)
    output = fused_linear_cross_entropy(
        x, weight, target, bias=bias, ce_weight=ce_weight, **{**case.options, **metrics}, **call
    )
    grad_output = None
    if upstream is not None:
        grad_output = upstream(output.loss)
    elif options.reduction == "none":  # a different weight for each token, or the test could not fail
        grad_output = torch.linspace(0.5, 1.5, case.tokens, dtype=output.loss.dtype, device=case.device)
    output.loss.backward(grad_output)
    expected, expected_grads = reference(x, weight, target, bias, ce_weight, options, grad_output)

    loss_bound = LOSS_BOUND.get(case.dtype, LOSS_BOUND_FLOAT32)
    for name in ("loss", "z_loss"):
        assert_close(getattr(output, name), expected[name], loss_bound, name, size=expected["loss_size"])
    check_predictions(output, expected, expected.pop("logits"), case.dtype)
    bound = gradient_bound or GRADIENT_BOUND[case.dtype]
    grads = [None if v is None else v.grad for v in (x, weight, bias)]
    sizes = (0.0, 0.0, 0.0)
    rounds_dz = case.dtype.itemsize == 2 and call.get("engine") != "torch"
    if may_cancel:
        rounding = 1e-12 if case.dtype == torch.float64 else 32 * torch.finfo(torch.float32).eps
        if options.smoothing and rounds_dz:
            rounding = GRADIENT_BOUND[case.dtype]
        terms = cancelling_size(x, weight, target, bias, ce_weight, options, grad_output)
        sizes = [size * rounding / bound for size in terms]
    # Where rows weigh differently, a few of them dominate the gradients, and always db: both roundings, of dz and of
    # the gradient, may then be whole ones at once.
    uneven = gradient_bound is None and (options.use_token_scaling or ce_weight is not None)
    for name, got, want, size in zip(("dx", "dW", "db"), grads, expected_grads, sizes, strict=True):
        if want is not None:
            twice = 2 if rounds_dz and (uneven or name == "db") else 1
            assert_close(got, want, twice * bound, name, size=size)
    return grads


def check_predictions(output, expected, logits, dtype):
    """The predicted token is the argmax, up to logits that differ by less than the compute dtype resolves."""
    predicted, ignored = output.predicted_tokens, expected["predicted_tokens"] < 0
    assert predicted.dtype == torch.int64
    assert torch.equal(predicted < 0, ignored)
    if torch.equal(predicted, expected["predicted_tokens"]):
        assert_close(output.token_accuracy, expected["token_accuracy"], 1e-6, "token_accuracy")
        return
    best, chosen = (logits.gather(1, i.clamp(min=0)[:, None]) for i in (expected["predicted_tokens"], predicted))
    resolution = 1e-12 if dtype == torch.float64 else 1e-5
    assert (best - chosen).abs().max() <= resolution * logits.abs().max()


def on_a_gpu(tokens, hidden, vocab, dtype, case, wanted=(True, True)) -> Problem:
    """A problem of tensors that are nowhere."""
    with FakeTensorMode():
        x, weight = (torch.empty(n, hidden, dtype=dtype, device="cuda") for n in (tokens, vocab))
        bias = torch.empty(vocab, dtype=dtype, device="cuda") if case.get("bias") else None
        target = torch.empty(tokens, dtype=torch.int64, device="cuda")
    for leaf, wants in ((x, wanted[0]), (weight, wanted[1]), (bias, wanted[1])):
        if leaf is not None:
            leaf.requires_grad_(wants)
    return Problem(x, weight, target, bias, options=LossOptions(**case.get("options", {})), dense=True)

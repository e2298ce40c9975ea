"""Per-token values in plain float64 PyTorch, and how far a dtype may be from them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from liger_cutedsl import LogProbs, fused_linear_log_probs
from reference import GRADIENT_BOUND, LOSS_BOUND, LOSS_BOUND_FLOAT32, Case, assert_close

EVERYTHING = dict(return_entropy=True, return_log_sum_sq_probs=True, return_mean_logits=True, return_is_top1=True)
SELECTED = torch.tensor([7, 300, 7, 0, 191, 192])
ALONE = (("log_probs",), ("entropy",), ("selected_log_probs",), ("entropy", "selected_log_probs"))
LOGITS = {
    "plain": {},
    "temperature": dict(temperature=0.7),
    "scale": dict(logit_scale=-1.5, temperature=2),
    "cap": dict(softcap=5.0),
    "cap, temperature and scale": dict(softcap=5.0, temperature=1.3, logit_scale=0.4),
}


def expected(x, weight, target, bias, selected=None, softcap=None, temperature=1.0, logit_scale=1.0, ignore_index=-100):
    """LogProbs in float64, differentiable."""
    u = logit_scale * F.linear(x, weight, bias)
    z = (u if softcap is None else softcap * torch.tanh(u / softcap)) / temperature
    log_p = F.log_softmax(z, dim=-1)
    valid = target != ignore_index
    safe = torch.where(valid, target, 0).long()
    entropy = -(log_p.exp() * log_p.clamp(min=-1e300)).sum(dim=-1)
    masked = lambda v, fill=0.0: torch.where(valid.view(-1, *[1] * (v.dim() - 1)), v, fill)  # noqa: E731
    return LogProbs(
        masked(log_p.gather(1, safe[:, None])[:, 0]),
        masked(entropy),
        None if selected is None else masked(log_p[:, selected]),
        masked(torch.logsumexp(2 * log_p, dim=-1)),
        masked(z.mean(dim=-1)),
        (z.argmax(dim=-1) == target) & valid,
    )


def check(
    case: Case, logits: dict, upstreams=("log_probs", "entropy", "selected_log_probs"), selected=SELECTED, **call
):
    x, weight, target, bias, _ = case.tensors()
    selected = None if selected is None else selected.to(case.device)
    got = fused_linear_log_probs(
        x, weight, target, bias=bias, selected_token_ids=selected, **logits, **EVERYTHING, **call
    )
    leaves = [None if v is None else v.detach().double().requires_grad_() for v in (x, weight, bias)]
    want = expected(leaves[0], leaves[1], target, leaves[2], selected, **logits)
    bound = LOSS_BOUND.get(case.dtype, LOSS_BOUND_FLOAT32)
    # log p and the mean are differences and sums of logits of this size, and exact to their rounding
    size = 30.0 * case.tokens**0.5
    for name, value in zip(LogProbs._fields, got, strict=True):
        reference = getattr(want, name)
        if reference is None:
            assert value is None
        elif reference.dtype == torch.bool:
            assert torch.equal(value, reference), name
        else:
            assert value.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
            assert_close(value, reference, bound, name, size=size)
    g = torch.Generator().manual_seed(3)
    loss, reference_loss = 0.0, 0.0
    for name in upstreams:
        up = torch.randn(getattr(want, name).shape, generator=g, dtype=torch.float64).to(case.device)
        loss = loss + (getattr(got, name) * up.to(getattr(got, name).dtype)).sum()
        reference_loss = reference_loss + (getattr(want, name) * up).sum()
    present = [v for v in (x, weight, bias) if v is not None]
    grads = torch.autograd.grad(loss, present)
    wants = torch.autograd.grad(reference_loss, [v for v in leaves if v is not None])
    for name, grad, reference in zip(("dx", "dW", "db"), grads, wants, strict=False):
        # upstream gradients of random signs: a few rows dominate, so both roundings may be whole ones at once
        twice = 2 if case.dtype.itemsize == 2 else 1
        assert_close(grad, reference, twice * GRADIENT_BOUND[case.dtype], name)
    return got, grads

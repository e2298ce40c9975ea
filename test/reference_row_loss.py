"""A row loss on plain float64 logits, differentiable: the values that a function sees, and what a call returns."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F


def values_of(x, weight, target, bias=None, softcap=None, temperature=1.0, logit_scale=1.0, ignore_index=-100):
    """What row_function.RowValues has, from logits that are stored."""
    u = logit_scale * F.linear(x, weight, bias)
    z = (u if softcap is None else softcap * torch.tanh(u / softcap)) / temperature
    log_p = F.log_softmax(z, dim=-1)
    safe = torch.where(target == ignore_index, 0, target).long()
    return SimpleNamespace(
        log_prob=log_p.gather(1, safe[:, None])[:, 0],
        lse=torch.logsumexp(z, dim=-1),
        entropy=-(log_p.exp() * log_p).sum(dim=-1),
        mean_logit=z.mean(dim=-1),
        argmax=z.argmax(dim=-1),
    )


def expected(x, weight, target, row_loss, *rows, reduction="mean", ignore_index=-100, **logits):
    """(loss, aux) of the rows that count, 0 in the others' aux."""
    counts = target != ignore_index
    values = values_of(x, weight, target, ignore_index=ignore_index, **logits)
    kept = SimpleNamespace(**{name: v[counts] for name, v in vars(values).items()})
    found = row_loss(kept, *(r[counts] if isinstance(r, torch.Tensor) and r.dim() else r for r in rows))
    loss, *aux = found if isinstance(found, tuple) else (found,)
    divisor = max(int(counts.sum()), 1) if reduction == "mean" else 1
    spread = [torch.zeros(len(target), dtype=a.dtype, device=a.device).masked_scatter(counts, a.detach()) for a in aux]
    return loss.sum() / divisor, spread


def in_float64(value):
    """A leaf of a graph of its own with the same numbers; what is no floating-point tensor as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def grpo(values, old, reference, advantage, weight, clip=0.2, beta=0.04, bonus=0.01):
    """GRPO with a clip, a KL to a reference and an entropy bonus; aux: the KL, the ratio and what was clipped."""
    ratio = torch.exp(values.log_prob - old)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    kl = torch.exp(reference - values.log_prob) - (reference - values.log_prob) - 1
    loss = (-gain + beta * kl - bonus * values.entropy) * weight
    return loss, kl, ratio, (ratio - 1).abs() > clip

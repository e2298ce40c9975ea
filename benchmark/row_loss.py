"""A GRPO loss with clip, KL and entropy bonus: as a row loss, through log-probabilities and autograd, and Liger's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from benchmark.implementations import Implementation
from benchmark.measure import distribution_inputs, relative_error
from benchmark.per_token import trl_values
from liger_cutedsl import fused_linear_log_probs, fused_linear_loss

CLIP, BETA, BONUS = 0.2, 0.04, 0.01
SEQUENCES = 8  # of Liger's operator, which takes an advantage for each


def grpo(values, old, reference, advantage, weight):
    """Each token's loss, its KL, its ratio, whether that is clipped."""
    ratio = torch.exp(values.log_prob - old)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    distance = reference - values.log_prob
    kl = distance.exp() - distance - 1
    return (-gain + BETA * kl - BONUS * values.entropy) * weight, kl, ratio, (ratio - 1).abs() > CLIP


def row_tensors(target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Four (N,) vectors: old and reference log-probabilities near those of a uniform draw, advantages, weights."""
    generator = torch.Generator(target.device).manual_seed(3)
    draws = torch.randn(4, *target.shape, device=target.device, generator=generator)
    return draws[0] * 0.1 - 11.0, draws[1] * 0.1 - 11.0, draws[2], draws[3].abs()


def _ours(**call):
    return lambda: lambda x, w, t, rows: fused_linear_loss(x, w, t, grpo, *rows, **call).loss


def _through(values: Callable):
    """values(x, weight, target) → (log-probabilities, entropies), and autograd for the rest."""

    def loss(x, w, t, rows):
        log_probs, entropy = values(x, w, t)
        return grpo(SimpleNamespace(log_prob=log_probs, entropy=entropy), *rows)[0].mean()

    return loss


def _our_values(x, w, t):
    found = fused_linear_log_probs(x, w, t, return_entropy=True)
    return found.log_probs, found.entropy


def _liger():
    """Liger-Kernel's, which has no entropy bonus and no weight for each token: less work than the others do."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    operator = LigerFusedLinearGRPOLoss(beta=BETA, epsilon_low=CLIP, epsilon_high=CLIP, use_ref_model=False)

    def loss(x, w, t, rows):
        old, reference, advantage, _ = (v.view(SEQUENCES, -1) for v in rows)
        ids = t.view(SEQUENCES, -1)
        found = operator(
            x.view(*ids.shape, -1),
            w,
            ids,
            torch.ones_like(ids),
            advantage[:, 0].contiguous(),
            ref_per_token_logps=reference,
            old_per_token_logps=old,
        )
        return found[0]

    return loss


# name → (note, make() → loss(x, weight, target, row tensors))
LOSSES: dict[str, tuple[str, Callable]] = {
    "row-loss": ("ours, fused_linear_loss", _ours()),
    "row-loss-recompute": ("ours, fused_linear_loss, recompute", _ours(schedule="recompute")),
    "row-loss-log-probs": ("ours, log-probabilities and autograd", lambda: _through(_our_values)),
    "row-loss-trl": ("TRL's log-probabilities and autograd", lambda: _through(trl_values(True)())),
    "row-loss-liger": ("Liger-Kernel, LigerFusedLinearGRPOLoss, no entropy", _liger),
}


def _timed(make):
    def made():
        loss, kept = make(), {}

        def run(x, weight, target):
            if kept.get("shape") != target.shape:
                kept.update(shape=target.shape, rows=row_tensors(target))
            found = loss(x, weight, target, kept["rows"])
            if found.requires_grad:
                found.backward()

        return run

    return made


ROW_LOSS = {name: Implementation(name, note, _timed(make), plain=False) for name, (note, make) in LOSSES.items()}


def row_loss_errors(name: str, distribution: str, device="cuda", **sizes) -> dict[str, float]:
    """‖ĝ − g‖/‖g‖ of dX and dW of the GRPO loss against float64. Not of Liger's, which is another loss."""
    if name == "row-loss-liger":
        raise RuntimeError("Liger's loss has no entropy bonus and no weights")
    x, weight, target = distribution_inputs(distribution, device, **sizes)
    target = target.clamp(min=0)
    leaves = [v.detach().requires_grad_() for v in (x, weight)]
    rows = row_tensors(target)
    LOSSES[name][1]()(*leaves, target, rows).backward()
    wide = [v.detach().double().requires_grad_() for v in (x, weight)]

    def values(x, w, t):
        log_p = torch.log_softmax(x @ w.t(), dim=-1)
        return log_p.gather(1, t[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)

    _through(values)(*wide, target, [v.double() for v in rows]).backward()
    return {"dx": relative_error(leaves[0].grad, wide[0].grad), "dw": relative_error(leaves[1].grad, wide[1].grad)}

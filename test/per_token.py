"""Log-probabilities and entropy in plain float64 PyTorch, for tests of the drop-ins, and a call's peak of memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

# |got − want| ≤ 64 ulp of float32 times the logits' size: a logit is a sum over H, and a log-probability, an entropy or
# a gradient a difference of numbers of the logits' size.
FLOAT32 = 64 * torch.finfo(torch.float32).eps


class Reference(NamedTuple):
    log_probs: torch.Tensor
    entropy: torch.Tensor
    log_sum_sq_probs: torch.Tensor
    mean_logits: torch.Tensor
    is_top1: torch.Tensor
    all_log_probs: torch.Tensor


def reference(x, weight, target, bias=None, *, temperature=1.0, softcap=None, logit_scale=1.0):
    """In float64, differentiable."""
    logits = torch.nn.functional.linear(x, weight, bias) * logit_scale
    z = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    return Reference(
        log_p.gather(1, target.long()[:, None])[:, 0],
        -(p * log_p).sum(-1),
        p.square().sum(-1).log(),
        z.mean(-1),
        z.argmax(-1) == target,
        log_p,
    )


def in_float64(*tensors):
    """The same numbers as leaves of a graph of their own."""
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖."""
    return float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.detach().double() - want.detach().double()).abs().max())


def peak_of(function) -> int:
    """The most bytes of CPU memory that function() held at a time, beyond what was there before: results included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        kept = function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del kept
    return peak

"""Stands in for the core's log-probabilities until they are there: the same interface, plain. To be deleted."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import NamedTuple

import torch

from liger_cutedsl import call
from liger_cutedsl.checks import check_tensors
from liger_cutedsl.options import LossOptions


class LogProbs(NamedTuple):
    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    selected_log_probs: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


@dataclass(frozen=True)
class LogProbOptions(LossOptions):
    reduction: str = "none"
    temperature: float = 1.0
    logit_scale: float = 1.0
    return_entropy: bool = False
    return_log_sum_sq_probs: bool = False
    return_mean_logits: bool = False
    return_is_top1: bool = False

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, (int, float)):
            raise TypeError(f"temperature must be a finite number, got {self.temperature!r}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be greater than 0, got {self.temperature!r}")
        if (
            isinstance(self.logit_scale, bool)
            or not isinstance(self.logit_scale, (int, float))
            or self.logit_scale == float("inf")
        ):
            raise TypeError(f"logit_scale must be a finite number, got {self.logit_scale!r}")


@dataclass(frozen=True)
class Problem(call.Problem):
    options: LogProbOptions = LogProbOptions()
    selected_token_ids: torch.Tensor | None = None


def _values(x, weight, bias, problem, dtype):
    o, compute = problem.options, torch.float64 if dtype == torch.float64 else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        logits = x.to(dtype).to(compute) @ weight.to(dtype).to(compute).T
        logits = logits if bias is None else logits + bias.to(compute)
    z = logits * o.logit_scale
    z = (z if o.softcap is None else o.softcap * torch.tanh(z / o.softcap)) / o.temperature
    valid = ~problem.ignored()
    log_p = z.log_softmax(-1)
    target = torch.where(valid, problem.target, 0).long()
    p = log_p.exp()
    ids = problem.selected_token_ids
    mask = valid[:, None]
    return LogProbs(
        torch.where(valid, log_p.gather(1, target[:, None])[:, 0], 0.0),
        torch.where(valid, -(p * log_p).sum(-1), 0.0) if o.return_entropy else None,
        None if ids is None else torch.where(mask, log_p[:, ids], 0.0),
        torch.where(valid, (2 * log_p).logsumexp(-1), 0.0).detach() if o.return_log_sum_sq_probs else None,
        torch.where(valid, z.mean(-1), 0.0).detach() if o.return_mean_logits else None,
        ((z.argmax(-1) == target) & valid).detach() if o.return_is_top1 else None,
    )


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, problem, before_backward):
        ctx.set_materialize_grads(False)
        ctx.dtype = problem.gemm_dtype
        with torch.no_grad():
            values = _values(x, weight, bias, problem, ctx.dtype)
        ctx.save_for_backward(x, weight, bias)
        ctx.problem = (problem.target, problem.options, problem.selected_token_ids)
        ctx.before_backward = before_backward
        ctx.mark_non_differentiable(*(v for v in values[3:] if v is not None))
        return tuple(values)

    @staticmethod
    def backward(ctx, *upstream):
        with (ctx.before_backward or contextlib.nullcontext)():
            leaves = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
            target, options, ids = ctx.problem
            problem = Problem(leaves[0], leaves[1], target, leaves[2], options=options, selected_token_ids=ids)
            with torch.enable_grad():
                values = _values(*leaves, problem, ctx.dtype)
                total = sum((v * g).sum() for v, g in zip(values[:3], upstream[:3], strict=True) if g is not None)
            needed = [t for t, need in zip(leaves, ctx.needs_input_grad[:3], strict=True) if need]
            found = iter(torch.autograd.grad(total, needed))
        return *(next(found) if need else None for need in ctx.needs_input_grad[:3]), None, None


def run_log_probs(problem, settings, before_backward=None, split_of=None) -> LogProbs:
    check_tensors(problem)
    return LogProbs(*_Function.apply(problem.x, problem.weight, problem.bias, problem, before_backward))


def fused_linear_log_probs(
    x, weight, target, *, bias=None, softcap=None, temperature=1.0, logit_scale=1.0, ignore_index=-100,
    return_entropy=False, selected_token_ids=None, return_log_sum_sq_probs=False, return_mean_logits=False,
    return_is_top1=False, engine=None, schedule=None, workspace_mb=None,
):  # fmt: skip
    """Traceable."""
    logits = x.float() @ weight.to(x.dtype).float().T
    logits = logits if bias is None else logits + bias.float()
    z = logits * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    valid = target != ignore_index
    log_p = z.log_softmax(-1)
    safe = torch.where(valid, target, 0).long()
    values = LogProbs(
        torch.where(valid, log_p.gather(1, safe[:, None])[:, 0], 0.0),
        torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0.0) if return_entropy else None,
        None if selected_token_ids is None else log_p[:, selected_token_ids] * valid[:, None],
        torch.where(valid, (2 * log_p).logsumexp(-1), 0.0).detach() if return_log_sum_sq_probs else None,
        torch.where(valid, z.mean(-1), 0.0).detach() if return_mean_logits else None,
        ((z.argmax(-1) == safe) & valid).detach() if return_is_top1 else None,
    )
    return values if any(v is not None for v in values[1:]) else values.log_probs

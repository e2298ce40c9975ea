"""The entrances for per-token values: log-probabilities, entropy and what trainers log with them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from liger_cutedsl.autograd import run
from liger_cutedsl.call import Problem
from liger_cutedsl.entering import entered_log_probs, flattened
from liger_cutedsl.log_probs import LogProbs
from liger_cutedsl.options import LogProbOptions, suggesting
from liger_cutedsl.route import Settings
from liger_cutedsl.split import over_ranks
from liger_cutedsl.weight_grad_buffer import WeightGradBuffer


@suggesting
def fused_linear_log_probs(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    selected_token_ids: torch.Tensor | None = None,
    return_log_sum_sq_probs: bool = False,
    return_mean_logits: bool = False,
    return_is_top1: bool = False,
    weight_grad_buffer: torch.Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    engine: str | None = None,
    schedule: str | None = None,
    workspace_mb: float | None = None,
) -> torch.Tensor | LogProbs:
    """The targets' log-probabilities under a softmax of x @ weight.T + bias, without storing the logits.

    x: (..., H), bfloat16, float16, float32 or float64.  weight: (V, H), of x's dtype (or any under autocast).
    target: (...), int64 or int32, in [0, V) or ignore_index.  bias: (V,), floating point.
    softcap, temperature, logit_scale: logits are softcap · tanh(u / softcap) / temperature, or u / temperature for
        softcap=None, with u = logit_scale · (x @ weight.T + bias). temperature > 0; logit_scale any finite number.
    ignore_index: rows with this target are computed for nothing: their results are 0, and so are their gradients.
    return_entropy: −Σ_v p_v log p_v of each row, in nats.
    selected_token_ids: (K,) int64 in [0, V): columns whose log-probabilities are returned for every row, in this
        order, as often as they are there.
    return_log_sum_sq_probs: log Σ_v p_v².  return_mean_logits: Σ_v z_v / V of the logits z.  return_is_top1: whether
        the target is the first of the largest logits.
    weight_grad_buffer: (V, H), float32 or weight's dtype: dW is added to it, and weight gets no gradient.
        gradient_accumulation_fusion: the same with weight.main_grad, Megatron-Core's. See fused_linear_cross_entropy.
    engine, schedule, workspace_mb: see liger_cutedsl.route.Settings. The schedule is "recompute".

    Returns the log-probabilities in target's shape, float32 (float64 for float64 inputs); a LogProbs where anything
    else is asked for, None for what is not. log_probs, entropy and selected_log_probs are differentiable, alone and
    together: gradients reach x, weight and bias, each only if it requires one, in their own dtype.

    Raises TypeError or ValueError naming the argument; RuntimeError where a forced engine cannot run the call.
    """
    options = dict(
        ignore_index=ignore_index,
        softcap=softcap,
        temperature=temperature,
        logit_scale=logit_scale,
        return_entropy=return_entropy,
        return_log_sum_sq_probs=return_log_sum_sq_probs,
        return_mean_logits=return_mean_logits,
        return_is_top1=return_is_top1,
    )
    shape = getattr(target, "shape", None)
    x, target = flattened(x, target)
    tensors = (x, weight, target, bias, None, selected_token_ids)
    buffer = WeightGradBuffer.of(weight, weight_grad_buffer, gradient_accumulation_fusion)
    return entered_log_probs(tensors, options, engine, schedule, workspace_mb, buffer).result(shape)


@suggesting
def vocab_parallel_fused_linear_log_probs(
    x: torch.Tensor,
    weight_shard: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    selected_token_ids: torch.Tensor | None = None,
    return_log_sum_sq_probs: bool = False,
    return_mean_logits: bool = False,
    return_is_top1: bool = False,
    weight_grad_buffer: torch.Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    engine: str | None = None,
    workspace_mb: float | None = None,
) -> torch.Tensor | LogProbs:
    """fused_linear_log_probs with W's rows split over the ranks of a group.

    x: (..., H), target: (...) and selected_token_ids the same on every rank, indexing the whole vocabulary.
    weight_shard: (V_rank, H) and bias: (V_rank,), this rank's rows. group, vocab_start, vocab_size, weight_grad_buffer,
    gradient_accumulation_fusion, errors: as in vocab_parallel_fused_linear_cross_entropy. Results are the same on every
    rank; so is x's gradient.
    """
    options = LogProbOptions(
        ignore_index=ignore_index,
        softcap=softcap,
        temperature=temperature,
        logit_scale=logit_scale,
        return_entropy=return_entropy,
        return_log_sum_sq_probs=return_log_sum_sq_probs,
        return_mean_logits=return_mean_logits,
        return_is_top1=return_is_top1,
    )
    shape = getattr(target, "shape", None)
    x, target = flattened(x, target)
    problem = Problem(
        x,
        weight_shard,
        target,
        bias,
        options=options,
        selected_token_ids=selected_token_ids,
        weight_grad_buffer=WeightGradBuffer.of(weight_shard, weight_grad_buffer, gradient_accumulation_fusion),
    )

    return run(
        problem, Settings.resolve(engine, None, workspace_mb), over_ranks(group, vocab_start, vocab_size)
    ).result(shape)

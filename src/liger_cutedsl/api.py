"""The entrances for cross entropy: keyword functions with every option spelt out, and Liger-Kernel's autograd class."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from liger_cutedsl.autograd import run
from liger_cutedsl.call import Problem
from liger_cutedsl.cross_entropy import LossOutput
from liger_cutedsl.entering import entered, flattened
from liger_cutedsl.options import LossOptions, suggesting
from liger_cutedsl.route import Settings
from liger_cutedsl.split import over_ranks
from liger_cutedsl.weight_grad_buffer import WeightGradBuffer


@suggesting
def fused_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    use_token_scaling: bool = False,
    accum_dtype: torch.dtype | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    return_gradient_sampling: bool = False,
    weight_grad_buffer: torch.Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    gradient_sampling: float | None = None,
    engine: str | None = None,
    schedule: str | None = None,
    workspace_mb: float | None = None,
) -> torch.Tensor | LossOutput:
    """Cross entropy of the logits x @ weight.T + bias, without storing the logits.

    x: (..., H), bfloat16, float16, float32 or float64.  weight: (V, H), of x's dtype (or any under autocast).
    target: (...), int64 or int32, in [0, V) or ignore_index.  bias, ce_weight: (V,), floating point.
    ignore_index: rows with this target contribute neither loss nor gradient.
    lse_square_scale: λ of the z-loss λ·lse², added to the loss; not scaled by class weights.
    label_smoothing: ε in [0, 1], the share of the target mass spread over the vocabulary.
    reduction: "mean" (over rows, weighted by class weights as in torch), "sum" or "none" (one loss a row).
    softcap, temperature, logit_scale: logits are softcap · tanh(u / softcap) / temperature, or u / temperature for
        softcap=None, with u = logit_scale · (x @ weight.T + bias). Loss, z-loss and metrics are those of these logits.
    use_token_scaling: multiply each row's loss by its detached target probability.
    accum_dtype: dtype in which dW and db are summed where a schedule sums them piecewise.
    return_z_loss, return_token_accuracy, return_predicted_tokens: metrics to compute besides the loss.
    return_gradient_sampling: share_kept, noise_dw and noise_dx: see LossOutput.
    weight_grad_buffer: a tensor (V, H), float32 or weight's dtype, contiguous and without gradient, to which dW is
        added, once for each backward through the loss and times its upstream gradient; weight gets no gradient then.
        One of 16 bits is rounded as it is added to: once, in single_pass once a chunk. schedule="single_pass" has to
        be asked for, and adds in forward: for the upstream gradient that is likely, and in backward what another one
        needs, for which it reads one number from the device. Not inside torch.compile(fullgraph=True).
    gradient_accumulation_fusion: the same with weight.main_grad, as Megatron-Core has it, where
        weight.grad_added_to_main_grad is set to True if it is there.
    gradient_sampling: τ ≥ 0, None for LIGER_CUTEDSL_GRADIENT_SAMPLING, else 0. Above 0, gradients are computed from a
        sample of the softmax drawn with torch's generator: exact in the mean, with noise that grows with τ, and cheaper
        where most probability lies in few places. The loss stays exact. Where there can be no sample, or it would gain
        nothing, gradients are exact and the route says why.
    engine, schedule, workspace_mb: see liger_cutedsl.route.Settings.

    Returns the loss, float32 (float64 for float64 inputs): a scalar, or target's shape for reduction="none";
    a LossOutput where a metric is asked for (return_…).
    Gradients reach x, weight and bias, each only if it requires one; they come in their parameter's dtype.

    Raises TypeError or ValueError naming the argument; RuntimeError where a forced engine cannot run the call.
    """
    options = dict(
        ignore_index=ignore_index,
        lse_square_scale=lse_square_scale,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
        temperature=temperature,
        logit_scale=logit_scale,
        use_token_scaling=use_token_scaling,
        accum_dtype=accum_dtype,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        return_gradient_sampling=return_gradient_sampling,
    )
    shape = getattr(target, "shape", None)
    x, target = flattened(x, target)
    tensors = (x, weight, target, bias, ce_weight, None)
    buffer = WeightGradBuffer.of(weight, weight_grad_buffer, gradient_accumulation_fusion)
    beside = dict(weight_grad_buffer=buffer, gradient_sampling=gradient_sampling)
    return entered(tensors, options, engine, schedule, workspace_mb, **beside).result(shape)


@suggesting
def vocab_parallel_fused_linear_cross_entropy(
    x: torch.Tensor,
    weight_shard: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    use_token_scaling: bool = False,
    accum_dtype: torch.dtype | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    return_gradient_sampling: bool = False,
    weight_grad_buffer: torch.Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    gradient_sampling: float | None = None,
    engine: str | None = None,
    schedule: str | None = None,
    workspace_mb: float | None = None,
) -> torch.Tensor | LossOutput:
    """fused_linear_cross_entropy with W's rows split over the ranks of a group.

    x: (..., H) and target: (...) the same on every rank, targets indexing the whole vocabulary.
    weight_shard: (V_rank, H), this rank's rows; bias, ce_weight: (V_rank,), theirs.
    group: a torch.distributed process group, the default one if None.
    Shards may be of any size, in the order of the ranks. vocab_start: index of the shard's first row, None for the rows
        of the ranks before. vocab_size: entries of the whole vocabulary, None for the rows of all ranks; rows beyond it
        are padding (Megatron pads V to a multiple), which counts for nothing and gets zero gradients.
    weight_grad_buffer: (V_rank, H), or weight_shard.main_grad: rows of padding get nothing.
    gradient_sampling: a vocabulary over several ranks is not sampled, and the route says so.
    The other arguments are those of fused_linear_cross_entropy.

    Returns what fused_linear_cross_entropy returns, the same on every rank; so is x's gradient.
    Raises as that function does; ValueError, on every rank, where what the ranks say of their shards does not agree.
    The sizes come with the first call's numbers (whose forward runs again where shards are unequal), and are not waited
    for later: on a GPU, a call in which only some ranks' shards changed has a loss of NaN on the others. Two heads that
    are equal on one rank and not on another are told apart by vocab_size.
    schedule="single_pass" (or LIGER_CUTEDSL_SCHEDULE) on all ranks takes three products where "auto" takes four; chunks
    have the tokens that fit the budget of every rank. A schedule or workspace_mb that is another than in the last call
    is read on the host once; where that is so on some ranks only, they raise ValueError and the others get NaN.
    In the first call of a set of options and dtypes the ranks agree on an engine. A kernel that fails on one rank later
    raises there, and gives NaN on the others; a rank that fails otherwise leaves them to their group's timeout.
    """
    options = dict(
        ignore_index=ignore_index,
        lse_square_scale=lse_square_scale,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
        temperature=temperature,
        logit_scale=logit_scale,
        use_token_scaling=use_token_scaling,
        accum_dtype=accum_dtype,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        return_gradient_sampling=return_gradient_sampling,
    )
    shape = getattr(target, "shape", None)
    x, target = flattened(x, target)
    buffer = WeightGradBuffer.of(weight_shard, weight_grad_buffer, gradient_accumulation_fusion)
    problem = Problem(x, weight_shard, target, bias, ce_weight, LossOptions(**options), weight_grad_buffer=buffer)

    settings = Settings.resolve(engine, schedule, workspace_mb, gradient_sampling=gradient_sampling)
    return run(problem, settings, over_ranks(group, vocab_start, vocab_size)).result(shape)


class LigerResults(NamedTuple):
    """What Liger-Kernel's operator returns, in its order; None where not asked for."""

    loss: torch.Tensor
    z_loss: torch.Tensor | None
    token_accuracy: torch.Tensor | None
    predicted_tokens: torch.Tensor | None

    @classmethod
    def of(cls, output: LossOutput) -> LigerResults:
        """Without the metrics that are this package's own."""
        return cls(*(getattr(output, name) for name in cls._fields))


class LigerFusedLinearCrossEntropyFunction:
    """Liger-Kernel's class of this name: the same positional arguments, the same four results.

    apply(_input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
    softcap, return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
    ce_impl, ce_mode, chunk_mem_const) → LigerResults. _input is (N, H), weight (V, H), target (N,). ce_impl and ce_mode
    choose between Liger's own inner kernels and are ignored here; chunk_mem_const multiplies the workspace budget.
    """

    supports_inner_impl_dispatch = True

    @classmethod
    def apply(
        cls,
        _input,
        weight,
        target,
        bias=None,
        ce_weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        accum_dtype=None,
        use_token_scaling=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
        ce_impl=None,
        ce_mode=None,
        chunk_mem_const=1,
    ):
        options = dict(
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            use_token_scaling=use_token_scaling,
            accum_dtype=accum_dtype,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
        tensors = (_input, weight, target, bias, ce_weight, None)
        output = entered(tensors, options, chunk_mem_const=chunk_mem_const)
        return tuple(LigerResults.of(output))

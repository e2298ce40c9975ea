"""Cross entropy, the objective with all of Liger-Kernel's options: loss, metrics and coefficients per row.

For row i and vocabulary entry v, with class weights w_v, label smoothing ε, z-loss λ, token scale s_i and
upstream gradient g_i:

    lse_i = log Σ_v exp z_iv,   p_iv = exp(z_iv − lse_i)

    loss_i = s_i · { [ (1−ε)·w_t·(lse_i − z_t) + (ε/V)·(lse_i·Σ_v w_v − Σ_v w_v z_iv) ] / D  +  λ·lse_i² / Dz }

    dz_iv  = [ A_i·p_iv − B_i·[v = t_i] − C_i·w_v ] · (1 − (z_iv/softcap)²)
    A_i = g_i s_i { [ (1−ε)·w_t + (ε/V)·Σ_v w_v ] / D  +  2λ·lse_i / Dz }
    B_i = g_i s_i (1−ε)·w_t / D
    C_i = g_i s_i (ε/V) / D

"mean" divides by D = Σ_valid w_t and Dz = the number of valid rows; "sum" and "none" by 1. So every option
folds into three numbers a row and one vector over the vocabulary: no kernel knows what label smoothing is.
Class weights are torch's (torch.nn.CrossEntropyLoss); the z-loss, not scaled by them, is Liger-Kernel's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_cutedsl.call import Problem
from liger_cutedsl.objective import RowCoefficients, RowDerivatives, RowWeights, log_prob_and_slope, row_coefficients
from liger_cutedsl.options import LossOptions
from liger_cutedsl.row_statistics import RowStatistics


class LossOutput(NamedTuple):
    """loss, and the metrics that were asked for (else None).

    loss, z_loss: scalar, or (N,) for reduction="none"; z_loss is the part of loss that λ·lse² makes up.
    token_accuracy: share of valid rows whose argmax is the target, or (N,) of 0 and 1 for "none".
    predicted_tokens: (N,) int64 argmax of the logits, −1 in ignored rows, 0 in rows with NaN.
    share_kept: the share of all pairs of a token and 128 columns that gradients are computed from; 1 where they are
        exact.  noise_dw, noise_dx: √(mean ‖error‖²)/‖gradient‖ over draws, as estimated from the pairs that were kept:
        without bias for dW's numerator, and for dX's as if W's rows were orthogonal. 0 where gradients are exact, NaN
        for one that is not computed.
    """

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None
    share_kept: torch.Tensor | None = None
    noise_dw: torch.Tensor | None = None
    noise_dx: torch.Tensor | None = None

    def result(self, shape) -> torch.Tensor | LossOutput:
        """What a call returns: per-row values in its target's shape, and the loss alone without metrics."""
        shaped = LossOutput(*(v if v is None or v.dim() == 0 else v.view(shape) for v in self))
        return shaped.loss if all(metric is None for metric in shaped[1:]) else shaped


class Plain(NamedTuple):
    """Some rows of a loss without options, for the launch that folds what the GEMM's tiles left of them.

    rows: (4, n) uninitialised, its rows contiguous: lse, a, fix and the loss will be there. b: B of every row that
    counts. share: 1/D, what −log p is multiplied by. ignore_index: None where no target is ignored.
    """

    rows: torch.Tensor
    b: float
    share: float
    ignore_index: int | None

    def write(self, stats: RowStatistics, target: torch.Tensor) -> None:
        """results() and coefficients() where there are no options."""
        log_p = stats.target_logit - stats.lse
        found = torch.stack([torch.full_like(log_p, self.b), self.b * torch.expm1(log_p), -self.share * log_p])
        self.rows[0] = stats.lse
        self.rows[1:] = found if self.ignore_index is None else found.where(target != self.ignore_index, 0.0)

    @property
    def coefficients(self) -> RowCoefficients:
        return RowCoefficients(self.rows[1], None, self.rows[2])


def is_plain(problem: Problem) -> bool:
    """Whether the loss has no options that rows differ by, and the host is to know how many rows count."""
    options = problem.options
    return (
        type(options) is LossOptions
        and (problem.dense or problem.count is not None)
        and problem.ce_weight is None
        and options.softcap is None
        and options.reduction != "none"
        and not (options.smoothing or options.lse_square_scale or options.use_token_scaling)
        and not (options.return_z_loss or options.needs_argmax or options.return_gradient_sampling)
    )


SAMPLING_METRICS = ("share_kept", "noise_dw", "noise_dx")
DIFFERENTIABLE = ("loss",)
FILLS = LossOutput(0.0, 0.0, 0.0, -1)


def token_scale(log_p: torch.Tensor, options: LossOptions) -> torch.Tensor | float:
    """s_i: the detached probability of the target (Liger-Kernel's use_token_scaling), or 1."""
    return torch.exp(log_p) if options.use_token_scaling else 1.0


def _times(tensor: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """tensor · factor, without a pass over it where the factor is the number 1."""
    return tensor if isinstance(factor, float) and factor == 1.0 else tensor * factor


def results(stats: RowStatistics, rows: RowWeights, problem: Problem) -> LossOutput:
    """The loss and the metrics asked for, reduced as options.reduction says."""
    options = problem.options
    eps, (log_p, _) = options.label_smoothing, log_prob_and_slope(stats, options)
    scale = token_scale(log_p, options)
    loss, z_loss = -log_p * ((1.0 - eps) * rows.inverse_d * rows.target_weight), None
    if options.smoothing:
        uniform = stats.lse * rows.total_weight - stats.weighted_sum
        loss = loss + uniform * ((eps / rows.vocab) * rows.inverse_d)
    loss = _times(loss, scale)
    if options.lse_square_scale or options.return_z_loss:
        z_loss = _times(stats.lse.square() * (options.lse_square_scale * rows.inverse_dz), scale)
        loss = loss + z_loss

    def reduce(per_row):
        per_row = rows.mask(per_row)
        return per_row if options.reduction == "none" else per_row.sum()

    accuracy = predicted = argmax = None
    if (
        options.needs_argmax
    ):  # of a row with NaN, comparisons find anything: the first column then, as Liger and torch say
        argmax = stats.argmax.masked_fill(stats.lse.isnan(), 0)
    if options.return_token_accuracy:
        accuracy = reduce((argmax == problem.target).to(torch.float32))
        if options.reduction != "none":
            accuracy = accuracy / (
                max(problem.tokens, 1) if rows.ignored is None else (~rows.ignored).sum().clamp(min=1)
            )
    if options.return_predicted_tokens:
        predicted = rows.mask(argmax, -1)
    sampling = of_exact_gradients(loss.device) if options.return_gradient_sampling else ()
    return LossOutput(reduce(loss), reduce(z_loss) if options.return_z_loss else None, accuracy, predicted, *sampling)


def of_exact_gradients(device: torch.device) -> tuple[torch.Tensor, ...]:
    """SAMPLING_METRICS where nothing is sampled."""
    return tuple(torch.full((), value, dtype=torch.float32, device=device) for value in (1.0, 0.0, 0.0))


def coefficients(
    stats: RowStatistics, rows: RowWeights, problem: Problem, upstream: LossOutput, unit: float
) -> RowCoefficients:
    """A, C and the target's own gradient, for an upstream gradient of the loss of shape () or (N,)."""
    options = problem.options
    eps, (log_p, _) = options.label_smoothing, log_prob_and_slope(stats, options)
    g = _times(upstream.loss.to(stats.lse.dtype) * unit, token_scale(log_p, options))
    b, c, s = g * ((1.0 - eps) * rows.inverse_d * rows.target_weight), None, None  # () or (N,)
    if options.smoothing:
        c = g * ((eps / rows.vocab) * rows.inverse_d)
        s = c * rows.total_weight
    if options.lse_square_scale:
        from_z = g * (2.0 * options.lse_square_scale * rows.inverse_dz) * stats.lse
        s = from_z if s is None else s + from_z
    return row_coefficients(stats, rows, options, RowDerivatives(b, s, None, c))

"""The loss and its gradient per row, from a few numbers a row. Plain PyTorch on (N,) vectors.

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

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from liger_cutedsl.call import Problem
from liger_cutedsl.epilogues import EpilogueFlags, capped
from liger_cutedsl.options import LossOptions


@dataclass(frozen=True)
class RowStatistics:
    """What a forward pass over the vocabulary leaves behind, each (N,) in the compute dtype.

    lse: log Σ_v exp z_iv.  target_logit: u_it, before the softcap; −∞ in rows without a target in range.
    weighted_sum: Σ_v w_v z_iv, or None.  argmax: int64, the first v of the largest z_iv, or None.
    max_logit: that z_iv, where argmax is there.
    """

    lse: torch.Tensor
    target_logit: torch.Tensor
    weighted_sum: torch.Tensor | None = None
    argmax: torch.Tensor | None = None
    max_logit: torch.Tensor | None = None

    @staticmethod
    def names(options: LossOptions) -> tuple[str, ...]:
        """Those that a call with these options has."""
        return (
            ("lse", "target_logit")
            + ("weighted_sum",) * options.smoothing
            + ("argmax", "max_logit") * options.needs_argmax
        )

    @classmethod
    def of_no_columns(cls, problem: Problem) -> RowStatistics:
        """Those over an empty part of the vocabulary."""
        fills = {"weighted_sum": 0.0, "argmax": 0}
        vector = {"dtype": problem.compute_dtype, "device": problem.device}
        names = cls.names(problem.options)
        return cls(**{name: torch.full((problem.tokens,), fills.get(name, -torch.inf), **vector) for name in names})

    def there(self) -> dict[str, torch.Tensor]:
        return {name: value for name in FOLDS if (value := getattr(self, name)) is not None}


def _at_the_first_largest(parts: RowStatistics, values: torch.Tensor) -> torch.Tensor:
    """The first part of equals, and so the first column."""
    return values.gather(0, parts.max_logit.argmax(dim=0, keepdim=True))[0]


# How each statistic over the vocabulary comes from those over its parts (parts, N), in ascending order.
FOLDS = {
    "lse": lambda parts: torch.logsumexp(parts.lse, dim=0),
    "target_logit": lambda parts: parts.target_logit.amax(dim=0),
    "weighted_sum": lambda parts: parts.weighted_sum.sum(dim=0),
    "argmax": lambda parts: _at_the_first_largest(parts, parts.argmax).long(),
    "max_logit": lambda parts: _at_the_first_largest(parts, parts.max_logit),
}


def combined(pieces: list[RowStatistics], combine) -> RowStatistics:
    """Each field of the pieces through torch.cat, for those of slices of the rows, or torch.stack for over_parts."""
    return RowStatistics(**{name: combine([getattr(piece, name) for piece in pieces]) for name in pieces[0].there()})


def over_parts(parts: RowStatistics) -> RowStatistics:
    """The statistics over a vocabulary from those over its parts, in ascending order: each field (parts, N)."""
    return RowStatistics(**{name: FOLDS[name](parts) for name in parts.there()})


@dataclass(frozen=True)
class RowWeights:
    """The share of each row in the loss.

    ignored: (N,) bool, target = ignore_index; None where no row is.  target_weight: (N,) w_t, 0 where ignored; a
    plain 1 where all are.
    total_weight: Σ_v w_v.  inverse_d, inverse_dz: 1/D and 1/Dz, infinite when no row is valid (what is multiplied by
    them is then masked in every row).  vocab: V.
    """

    ignored: torch.Tensor | None
    target_weight: torch.Tensor | float
    total_weight: torch.Tensor | float
    inverse_d: torch.Tensor | float
    inverse_dz: torch.Tensor | float
    vocab: int

    def of(self, rows: slice) -> RowWeights:
        """The same for a slice of the rows."""

        def part(v):
            return v[rows] if isinstance(v, torch.Tensor) else v

        return replace(self, ignored=part(self.ignored), target_weight=part(self.target_weight))

    def with_classes(self, target_weight: torch.Tensor, total: torch.Tensor, options: LossOptions) -> RowWeights:
        """The same with class weights: the targets' (N,), and their sum over the vocabulary."""
        target_weight, mean = self.mask(target_weight), options.reduction == "mean"
        # weights that sum to zero over valid rows give 0/0 = NaN, as in torch
        inverse_d = target_weight.sum().reciprocal() if mean else 1.0
        return replace(self, target_weight=target_weight, total_weight=total, inverse_d=inverse_d)

    def mask(self, per_row: torch.Tensor, fill=0.0) -> torch.Tensor:
        return per_row if self.ignored is None else per_row.masked_fill(self.ignored, fill)


@dataclass(frozen=True)
class RowCoefficients:
    """dz_iv = [a_i·p_iv − c_i·w_v]·(1 − (z_iv/softcap)²) for v ≠ t_i; fix_i is the whole of dz at v = t_i.

    Each (N,); zero in ignored rows. c is None without label smoothing.
    """

    a: torch.Tensor
    c: torch.Tensor | None
    fix: torch.Tensor


class LossOutput(NamedTuple):
    """loss, and the metrics that were asked for (else None).

    loss, z_loss: scalar, or (N,) for reduction="none"; z_loss is the part of loss that λ·lse² makes up.
    token_accuracy: share of valid rows whose argmax is the target, or (N,) of 0 and 1 for "none".
    predicted_tokens: (N,) int64 argmax of the logits, −1 in ignored rows, 0 in rows with NaN.
    """

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None

    def result(self, shape) -> torch.Tensor | LossOutput:
        """What a call returns: per-row values in its target's shape, and the loss alone without metrics."""
        shaped = LossOutput(*(v if v is None or v.dim() == 0 else v.view(shape) for v in self))
        return shaped.loss if all(metric is None for metric in shaped[1:]) else shaped


def row_weights(problem: Problem) -> RowWeights:
    """RowWeights of a problem whose ce_weight is already in the compute dtype. Asks problem.count."""
    ignored, target_weight, inverse = None, 1.0, 1.0 / divisor(problem)
    valid = problem.valid_rows()
    if valid != problem.tokens:
        ignored = problem.ignored()
        target_weight = (~ignored).to(problem.compute_dtype)
        if valid is None and problem.options.reduction == "mean":
            inverse = target_weight.sum().reciprocal()
    weights = RowWeights(ignored, target_weight, float(problem.vocab), inverse, inverse, problem.vocab)
    if problem.ce_weight is None:
        return weights
    # Clamped: ignore_index may be any number.
    of_targets = problem.ce_weight[problem.target.long().clamp(0, problem.vocab - 1)]
    return weights.with_classes(of_targets, problem.ce_weight.sum(), problem.options)


def divisor(problem: Problem) -> int:
    """What a loss is divided by where the rows that count do so alike: their number for a mean, else 1. N where only
    the device knows that number."""
    if problem.options.reduction != "mean":
        return 1
    valid = problem.valid_rows()
    return max(problem.tokens if valid is None else valid, 1)


def dz_unit(problem: Problem, dz_dtype: torch.dtype) -> float:
    """u: 16-bit dz is stored times u, and what is computed from it divided by u.

    In all rows of a mean, dz at the target is close to −(1−ε)/N. Rounded to bf16 that is off by up to 2⁻⁸ and by the
    same in every row: not noise but a bias, which grows and shrinks with N. Times N/(1−ε) it is −1 + p, exact where p
    is small. (Not for ε above a half: dz stays below 2.) An upstream gradient or class weights that are only known on
    the device are rounded as they come.
    """
    if dz_dtype.itemsize > 2:
        return 1.0
    return divisor(problem) / max(1.0 - problem.options.label_smoothing, 0.5)


def log_prob_and_slope(stats: RowStatistics, options: LossOptions) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log p_it, dz_it/du_it) of the targets; the slope is None where it is 1.

    It comes from u: where the cap saturates, z no longer tells how far.
    """
    if options.softcap is None:
        return stats.target_logit - stats.lse, None
    scalars = {"softcap": options.softcap, "inverse_softcap": 1.0 / options.softcap}
    z, slope = capped(EpilogueFlags(softcap=True), stats.target_logit, scalars)
    return z - stats.lse, slope


def token_scale(log_p: torch.Tensor, options: LossOptions) -> torch.Tensor | float:
    """s_i: the detached probability of the target (Liger-Kernel's use_token_scaling), or 1."""
    return torch.exp(log_p) if options.use_token_scaling else 1.0


def _times(tensor: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """tensor · factor, without a pass over it where the factor is the number 1."""
    return tensor if isinstance(factor, float) and factor == 1.0 else tensor * factor


def loss_terms(stats: RowStatistics, rows: RowWeights, problem: Problem) -> LossOutput:
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
    return LossOutput(reduce(loss), reduce(z_loss) if options.return_z_loss else None, accuracy, predicted)


def row_coefficients(stats: RowStatistics, rows: RowWeights, options: LossOptions, grad_output) -> RowCoefficients:
    """A, C and the target's own gradient, for an upstream gradient of shape () or (N,)."""
    eps, (log_p, slope) = options.label_smoothing, log_prob_and_slope(stats, options)
    upstream = _times(grad_output.to(stats.lse.dtype), token_scale(log_p, options))
    b = upstream * ((1.0 - eps) * rows.inverse_d * rows.target_weight)  # () or (N,)
    # A·p − B cancels as p → 1; B·(p − 1) + (A − B)·p with expm1 does not.
    a, c, fix = b, None, b * torch.expm1(log_p)
    a_minus_b = None
    if options.smoothing:
        c = upstream * ((eps / rows.vocab) * rows.inverse_d)
        a_minus_b = c * rows.total_weight
        fix = fix - c * rows.target_weight
    if options.lse_square_scale:
        from_z = upstream * (2.0 * options.lse_square_scale * rows.inverse_dz) * stats.lse
        a_minus_b = from_z if a_minus_b is None else a_minus_b + from_z
    if a_minus_b is not None:
        a, fix = b + a_minus_b, fix + a_minus_b * torch.exp(log_p)
    if slope is not None:
        fix = fix * slope

    shape = stats.lse.shape

    def finished(v):
        return None if v is None else rows.mask(v.expand(shape)).contiguous()

    return RowCoefficients(finished(a), finished(c), finished(fix))

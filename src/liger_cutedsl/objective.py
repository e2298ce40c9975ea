"""Objectives: results and gradients per row, from a few numbers a row. Plain PyTorch on (N,) vectors.

Every result is a function of the target's log-probability log p_t = z_t − lse, of lse, of the entropy
H = −Σ_v p_v log p_v and of Σ_v w_v z_v, with w_v class weights or 1. With the derivatives

    B = −∂L/∂(log p_t),  S = ∂L/∂lse at fixed log p_t,  h = ∂L/∂H,  C = −∂L/∂(Σ_v w_v z_v)

    dz_v = [ p_v·(a − h·log p_v) − B·[v = t] − C·w_v ]·(1 − (z_v/softcap)²),   a = S + B − h·H

because ∂H/∂z_v = −p_v·(log p_v + H); at v = t, without cancellation,

    B·expm1(log p_t) + S·p_t − h·p_t·(log p_t + H) − C·w_t

So no kernel knows what a loss is made of: a row has four numbers, and the vocabulary one vector.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from liger_cutedsl.call import Problem
from liger_cutedsl.epilogues import LOWEST_MAXIMUM, EpilogueFlags, capped
from liger_cutedsl.options import LogitOptions
from liger_cutedsl.row_function import masked
from liger_cutedsl.row_statistics import RowStatistics


class Objective(Protocol):
    """A module with these names: what a call computes of each row's statistics. One is objectives.of(options).

    DIFFERENTIABLE: the results that have gradients.  FILLS: what an ignored row has of each result.
    """

    DIFFERENTIABLE: tuple[str, ...]
    FILLS: NamedTuple

    def results(self, stats: RowStatistics, rows: RowWeights, problem: Problem) -> NamedTuple:
        """What the caller gets; None for what was not asked for."""

    def coefficients(
        self, stats: RowStatistics, rows: RowWeights, problem: Problem, upstream: NamedTuple, unit: float
    ) -> RowCoefficients:
        """Those of dz times unit. upstream: gradients of the results, as the results, None where there is none."""


def flat(results: NamedTuple) -> tuple[torch.Tensor | None, ...]:
    """Results as a node of a graph returns them: a last one that is a tuple, as several."""
    *first, last = results
    return (*first, *last) if isinstance(last, tuple) else tuple(results)


def named(fills: NamedTuple, values: tuple) -> NamedTuple:
    """The opposite, for results of the kind of an objective's FILLS."""
    if not isinstance(fills[-1], tuple):
        return type(fills)(*values)
    first = len(fills) - 1
    return type(fills)(*values[:first], tuple(values[first:]))


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

    def with_classes(self, target_weight: torch.Tensor, total: torch.Tensor, options: LogitOptions) -> RowWeights:
        """The same with class weights: the targets' (N,), and their sum over the vocabulary."""
        target_weight, mean = self.mask(target_weight), options.reduction == "mean"
        # weights that sum to zero over valid rows give 0/0 = NaN, as in torch
        inverse_d = target_weight.sum().reciprocal() if mean else 1.0
        return replace(self, target_weight=target_weight, total_weight=total, inverse_d=inverse_d)

    def mask(self, per_row: torch.Tensor, fill=0.0) -> torch.Tensor:
        """Per-row values (N, …), fill in ignored rows."""
        return masked(per_row, self.ignored, fill)


@dataclass(frozen=True)
class RowCoefficients:
    """dz_iv = [p_iv·(a_i − h_i·log p_iv) − c_i·w_v]·(1 − (z_iv/softcap)²) for v ≠ t_i; at t_i it is fix_i.

    Each (N,); zero in ignored rows. c and h are None where they are zero in all rows.
    selected: (N, K), what is added to dz at the problem's selected columns, or None.
    """

    a: torch.Tensor
    c: torch.Tensor | None
    fix: torch.Tensor
    h: torch.Tensor | None = None
    selected: torch.Tensor | None = None

    def of(self, rows: slice) -> RowCoefficients:
        """The same for a slice of the rows."""
        return RowCoefficients(*(None if v is None else v[rows] for v in vars(self).values()))

    def times(self, factor) -> RowCoefficients:
        """Each of them times a number, or a () tensor."""
        return RowCoefficients(*(None if v is None else v * factor for v in vars(self).values()))


@dataclass(frozen=True)
class RowDerivatives:
    """B, S, h and C of the formula above, () or (N,); None for zero."""

    b: torch.Tensor
    s: torch.Tensor | None = None
    h: torch.Tensor | None = None
    c: torch.Tensor | None = None


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


def log_prob_and_slope(stats: RowStatistics, options: LogitOptions) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log p_it, dz_it/du_it) of the targets; the slope is None where it is 1.

    It comes from u: where the cap saturates, z no longer tells how far.
    """
    if options.softcap is None:
        return stats.target_logit - stats.lse, None
    z, slope = capped_logit(stats.target_logit, options)
    return z - stats.lse, slope


def capped_logit(u: torch.Tensor, options: LogitOptions) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(z, dz/du) of logits before the cap; the slope is None where it is 1."""
    scalars = {} if options.cap is None else {"softcap": options.cap, "inverse_softcap": 1.0 / options.cap}
    return capped(EpilogueFlags(softcap=options.cap is not None), u, scalars)


def row_coefficients(
    stats: RowStatistics, rows: RowWeights, options: LogitOptions, by: RowDerivatives, selected=None
) -> RowCoefficients:
    """RowCoefficients of derivatives. selected: (N, K), those by z of the selected columns at fixed lse, or None."""
    log_p, slope = log_prob_and_slope(stats, options)
    # A·p − B cancels as p → 1; B·(p − 1) + (A − B)·p with expm1 does not.
    a, fix = by.b, by.b * torch.expm1(log_p)
    if by.c is not None:
        fix = fix - by.c * rows.target_weight
    p = torch.exp(log_p) if by.s is not None or by.h is not None else None
    if by.s is not None:
        a, fix = a + by.s, fix + by.s * p
    if by.h is not None:
        a = torch.addcmul(a, by.h, stats.entropy, value=-1.0)
        fix = torch.addcmul(fix, by.h, p * (log_p.clamp(min=LOWEST_MAXIMUM) + stats.entropy), value=-1.0)
    if slope is not None:
        fix = fix * slope
    if selected is not None:
        _, slope = capped_logit(stats.selected, options)
        selected = rows.mask(selected if slope is None else selected * slope)
    shape = stats.lse.shape

    def finished(v):
        return None if v is None else rows.mask(v.expand(shape)).contiguous()

    return RowCoefficients(finished(a), finished(by.c), finished(fix), finished(by.h), selected)


# dz in fp16 is scaled so that its largest entry is near 2¹⁴: a quarter of fp16's largest number, while a
# probability of 1e-5 stays a normal number of it.
FP16_HEADROOM = 2.0**14


def scaled_for_fp16(coefficients: RowCoefficients, problem: Problem) -> tuple[RowCoefficients, torch.Tensor]:
    """The coefficients times a power of two that keeps dz inside fp16's range, and the inverse of that power.

    Computed on the device: 1/N would underflow fp16, and how large the upstream gradient is, nobody reads.
    """
    largest = coefficients.a.abs().amax() if problem.tokens else coefficients.a.new_zeros(())
    largest = torch.maximum(largest, coefficients.fix.abs().amax())
    for further in (coefficients.h, coefficients.selected):  # p·|log p| is below 1
        if further is not None and further.numel():
            largest = torch.maximum(largest, further.abs().amax())
    if coefficients.c is not None:
        per_class = 1.0 if problem.ce_weight is None else problem.ce_weight.abs().amax()
        largest = torch.maximum(largest, coefficients.c.abs().amax() * per_class)
    usable = (largest > 0) & largest.isfinite()
    exponent = torch.floor(torch.log2(FP16_HEADROOM / torch.where(usable, largest, FP16_HEADROOM)))
    scale = torch.exp2(exponent.clamp(-100, 100))
    return coefficients.times(scale), 1.0 / scale

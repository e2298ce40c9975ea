"""A loss of the caller's own, a sum or a mean over rows of a function of each row's values. As any other objective:

    B = −∂f/∂(log p_t),  S = ∂f/∂lse,  h = ∂f/∂H,  C = −∂f/∂(mean logit)/V,   each divided by D

with f's derivatives as autograd gives them, and D the number of rows that count for a mean, else 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from liger_cutedsl.call import Problem
from liger_cutedsl.objective import RowCoefficients, RowDerivatives, RowWeights, log_prob_and_slope, row_coefficients
from liger_cutedsl.row_statistics import RowStatistics


class RowLossOutput(NamedTuple):
    """loss: a scalar.  log_probs, entropy: in the target's shape, None where not asked for; 0 in ignored rows.

    aux: what the row loss returned behind its loss, in the target's shape; 0 (False) in ignored rows. The loss alone
    has a gradient.
    """

    loss: torch.Tensor
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    aux: tuple[torch.Tensor, ...] = ()

    def result(self, shape) -> torch.Tensor | RowLossOutput:
        """What a call returns: per-row values in its target's shape, and the loss alone where nothing else is."""
        log_probs, entropy = (v if v is None else v.view(shape) for v in self[1:3])
        aux = tuple(v.view(shape) for v in self.aux)
        if not aux and log_probs is None and entropy is None:
            return self.loss
        return RowLossOutput(self.loss, log_probs, entropy, aux)


DIFFERENTIABLE = ("loss",)
FILLS = RowLossOutput(0.0, 0.0, 0.0, ())


def evaluated(stats: RowStatistics, rows: RowWeights, problem: Problem) -> RowStatistics:
    """The statistics, with what the row loss gives for these rows. Raises NotComputed."""
    mean = None if stats.weighted_sum is None else stats.weighted_sum / rows.vocab
    argmax = None if stats.argmax is None else stats.argmax.masked_fill(stats.lse.isnan(), 0)
    values = dict(
        log_prob=log_prob_and_slope(stats, problem.options)[0],
        lse=stats.lse,
        entropy=stats.entropy,
        mean_logit=mean,
        argmax=argmax,
    )
    return replace(stats, evaluated=problem.row_loss.evaluated(values, rows.ignored))


def results(stats: RowStatistics, rows: RowWeights, problem: Problem) -> RowLossOutput:
    """aux: those of the function, and behind them the gradients of row tensors for an upstream gradient of 1."""
    options, found, inverse = problem.options, stats.evaluated, rows.inverse_d

    def weighed(gradient):
        if isinstance(inverse, torch.Tensor) and gradient.dim() == 0:  # infinite where no row counts
            return torch.where(inverse.isfinite(), gradient * inverse.to(gradient.dtype), torch.zeros_like(gradient))
        return rows.mask(gradient * inverse) if gradient.dim() else gradient * inverse

    log_p = rows.mask(log_prob_and_slope(stats, options)[0]) if options.return_log_probs else None
    entropy = rows.mask(stats.entropy).clone() if options.return_entropy else None
    gradients = tuple(weighed(g) for g in found.gradients)
    loss = rows.mask(found.loss * inverse) if isinstance(inverse, torch.Tensor) else found.loss * inverse
    return RowLossOutput(loss.sum(), log_p, entropy, (*found.aux, *gradients))


def coefficients(
    stats: RowStatistics, rows: RowWeights, problem: Problem, upstream: RowLossOutput, unit: float
) -> RowCoefficients:
    found, factor = stats.evaluated, upstream.loss.to(stats.lse.dtype) * (unit * rows.inverse_d)

    def scaled(derivative, by=1.0):
        return None if derivative is None else derivative * (factor if by == 1.0 else factor * by)

    of_log_prob = scaled(found.log_prob, -1.0)
    b = torch.zeros_like(stats.lse) if of_log_prob is None else of_log_prob
    by = RowDerivatives(b, scaled(found.lse), scaled(found.entropy), scaled(found.mean_logit, -1.0 / rows.vocab))
    return row_coefficients(stats, rows, problem.options, by)

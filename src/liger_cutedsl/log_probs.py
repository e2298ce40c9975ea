"""Log-probabilities, the objective of trainers that make a loss of their own: per-token values, differentiable.

For row i: log p_t, the entropy H = −Σ_v p_v log p_v, log p of columns that all rows share; and without gradient
log Σ_v p_v², the mean logit and whether the target is the first argmax. Their upstream gradients are (N,) vectors:

    B = −∂L/∂(log p_t),  h = ∂L/∂H,  S = −Σ_k ∂L/∂(log p_sk),  and ∂L/∂(log p_sk) is added to dz at column s_k
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_cutedsl.call import Problem
from liger_cutedsl.objective import (
    RowCoefficients,
    RowDerivatives,
    RowWeights,
    capped_logit,
    log_prob_and_slope,
    row_coefficients,
)
from liger_cutedsl.row_statistics import RowStatistics


class LogProbs(NamedTuple):
    """Per-token values in the target's shape, None where not asked for; 0 (False) in ignored rows.

    log_probs: log p of the target.  entropy: −Σ_v p_v log p_v, in nats.  selected_log_probs: (..., K), log p of
    selected_token_ids.  These three have gradients.
    log_sum_sq_probs: log Σ_v p_v².  mean_logits: Σ_v z_v / V, of the scaled and capped logits.
    is_top1: bool, whether the target is the first of the largest logits.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    selected_log_probs: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None

    def result(self, shape) -> torch.Tensor | LogProbs:
        """What a call returns: values in its target's shape, and the log-probabilities alone where nothing else is."""
        shaped = LogProbs(*(v if v is None else v.view(*shape, *v.shape[1:]) for v in self))
        return shaped.log_probs if all(other is None for other in shaped[1:]) else shaped


DIFFERENTIABLE = ("log_probs", "entropy", "selected_log_probs")
FILLS = LogProbs(0.0, 0.0, 0.0, 0.0, 0.0, False)


def results(stats: RowStatistics, rows: RowWeights, problem: Problem) -> LogProbs:
    options, selected, top1 = problem.options, None, None
    log_p, _ = log_prob_and_slope(stats, options)
    if stats.selected is not None:
        selected = rows.mask(capped_logit(stats.selected, options)[0] - stats.lse[:, None])
    if options.return_is_top1:
        top1 = rows.mask((stats.argmax == problem.target) & ~stats.lse.isnan(), False)
    return LogProbs(
        rows.mask(log_p),
        rows.mask(stats.entropy).clone() if options.return_entropy else None,  # backward reads the statistics
        selected,
        rows.mask(stats.log_sum_sq) if options.return_log_sum_sq_probs else None,
        rows.mask(stats.weighted_sum / rows.vocab) if options.return_mean_logits else None,
        top1,
    )


def coefficients(
    stats: RowStatistics, rows: RowWeights, problem: Problem, upstream: LogProbs, unit: float
) -> RowCoefficients:
    def scaled(gradient):
        return None if gradient is None else gradient.to(stats.lse.dtype) * unit

    of_log_probs, h, selected = (scaled(g) for g in upstream[:3])
    b = torch.zeros_like(stats.lse) if of_log_probs is None else -of_log_probs
    s = None if selected is None else -selected.sum(dim=1)
    return row_coefficients(stats, rows, problem.options, RowDerivatives(b, s, h), selected)

"""What a pass over the vocabulary leaves of a row: a few numbers, and how those of parts of it become those of all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from liger_cutedsl.call import Problem
from liger_cutedsl.epilogues import LOWEST_MAXIMUM, EpilogueFlags
from liger_cutedsl.row_function import Evaluated


@dataclass(frozen=True)
class RowStatistics:
    """What a forward pass over the vocabulary leaves behind, each (N,) in the compute dtype.

    lse: log Σ_v exp z_iv.  target_logit: u_it, before the softcap; −∞ in rows without a target in range.
    weighted_sum: Σ_v w_v z_iv, or None.  argmax: int64, the first v of the largest z_iv, or None.
    max_logit: that z_iv, where argmax is there.
    maximum m, sum_exp Σ_v e^(z−m), sum_exp_z Σ_v e^(z−m)·(z−m), sum_exp_sq Σ_v e^(2(z−m)): see EpilogueFlags.moments;
        None in what finished() returns, which has
    entropy: −Σ_v p_v log p_v.  log_sum_sq: log Σ_v p_v².
    selected: (N, K) u of the problem's selected columns, −∞ where they are not in this part of the vocabulary.
    evaluated: what a row loss gives, where objectives.evaluated() has called it.
    """

    lse: torch.Tensor | None = None
    target_logit: torch.Tensor | None = None
    weighted_sum: torch.Tensor | None = None
    argmax: torch.Tensor | None = None
    max_logit: torch.Tensor | None = None
    maximum: torch.Tensor | None = None
    sum_exp: torch.Tensor | None = None
    sum_exp_z: torch.Tensor | None = None
    sum_exp_sq: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    log_sum_sq: torch.Tensor | None = None
    evaluated: Evaluated | None = None

    @staticmethod
    def names(problem: Problem) -> tuple[str, ...]:
        """Those that a pass of this problem leaves, but for `selected`."""
        options = problem.options
        return (
            ("lse", "target_logit")
            + ("weighted_sum",) * options.needs_weighted_sum
            + ("argmax", "max_logit") * options.needs_argmax
            + EpilogueFlags.of(problem).moments
        )

    @classmethod
    def of_no_columns(cls, problem: Problem) -> RowStatistics:
        """Those over an empty part of the vocabulary."""
        fills = {"weighted_sum": 0.0, "argmax": 0, "sum_exp": 0.0, "sum_exp_z": 0.0, "sum_exp_sq": 0.0}
        vector = {"dtype": problem.compute_dtype, "device": problem.device}
        names = cls.names(problem)
        return cls(**{name: torch.full((problem.tokens,), fills.get(name, -torch.inf), **vector) for name in names})

    def there(self) -> dict[str, torch.Tensor]:
        return {name: value for name in FOLDS if (value := getattr(self, name)) is not None}

    def finished(self) -> RowStatistics:
        """Those of the whole vocabulary, with what the moments were for in their place.

        With S = Σ e^(z−m) and R = Σ e^(z−m)·(z−m): H = log S − R/S, whose terms have one sign, whatever m is.
        """
        if self.sum_exp is None:
            return self
        log_sum, entropy, log_sum_sq = self.sum_exp.log(), None, None
        if self.sum_exp_z is not None:
            entropy = log_sum - self.sum_exp_z / self.sum_exp
        if self.sum_exp_sq is not None:
            log_sum_sq = self.sum_exp_sq.log() - 2.0 * log_sum
        nothing = dict.fromkeys(("maximum", "sum_exp", "sum_exp_z", "sum_exp_sq"))
        return replace(self, **nothing, entropy=entropy, log_sum_sq=log_sum_sq)


def _at_the_first_largest(parts: RowStatistics, values: torch.Tensor) -> torch.Tensor:
    """The first part of equals, and so the first column."""
    return values.gather(0, parts.max_logit.argmax(dim=0, keepdim=True))[0]


def _below(parts: RowStatistics) -> torch.Tensor:
    """How far the maximum of each part lies below that of all: finite, so that nothing times it is nothing."""
    distance = parts.maximum - parts.maximum.amax(dim=0)
    # two infinities of one sign have no difference; NaN, which a sum is then too, stays in the sums
    return distance.clamp(min=LOWEST_MAXIMUM).nan_to_num(nan=0.0)


def _sum_exp_z(parts: RowStatistics) -> torch.Tensor:
    below = _below(parts)
    return ((parts.sum_exp_z + parts.sum_exp * below) * below.exp()).sum(dim=0)


# How each statistic over the vocabulary comes from those over its parts (parts, N), in ascending order.
FOLDS = {
    "lse": lambda parts: torch.logsumexp(parts.lse, dim=0),
    "target_logit": lambda parts: parts.target_logit.amax(dim=0),
    "weighted_sum": lambda parts: parts.weighted_sum.sum(dim=0),
    "argmax": lambda parts: _at_the_first_largest(parts, parts.argmax).long(),
    "max_logit": lambda parts: _at_the_first_largest(parts, parts.max_logit),
    "maximum": lambda parts: parts.maximum.amax(dim=0),
    "sum_exp": lambda parts: (parts.sum_exp * _below(parts).exp()).sum(dim=0),
    "sum_exp_z": _sum_exp_z,
    "sum_exp_sq": lambda parts: (parts.sum_exp_sq * (2.0 * _below(parts)).exp()).sum(dim=0),
    "selected": lambda parts: parts.selected.amax(dim=0),
}


def combined(pieces: list[RowStatistics], combine) -> RowStatistics:
    """Each field of the pieces through torch.cat, for those of slices of the rows, or torch.stack for over_parts."""
    names = [name for name in vars(pieces[0]) if isinstance(getattr(pieces[0], name), torch.Tensor)]
    parts = {name: combine([getattr(piece, name) for piece in pieces]) for name in names}
    if pieces[0].evaluated is not None:
        parts["evaluated"] = Evaluated.joined([piece.evaluated for piece in pieces])
    return RowStatistics(**parts)


def over_parts(parts: RowStatistics) -> RowStatistics:
    """The statistics over a vocabulary from those over its parts, in ascending order: each field (parts, N)."""
    return RowStatistics(**{name: FOLDS[name](parts) for name in parts.there()})

"""Which objective a call has: what its options are options of."""

from __future__ import annotations

from liger_cutedsl import cross_entropy, log_probs, row_loss
from liger_cutedsl.call import Problem
from liger_cutedsl.objective import Objective, RowWeights
from liger_cutedsl.options import LogitOptions, LogProbOptions, LossOptions, RowLossOptions
from liger_cutedsl.row_statistics import RowStatistics

_BY_OPTIONS = {LossOptions: cross_entropy, LogProbOptions: log_probs, RowLossOptions: row_loss}


def of(options: LogitOptions) -> Objective:
    return _BY_OPTIONS[type(options)]


def evaluated(stats: RowStatistics, rows: RowWeights, problem: Problem) -> RowStatistics:
    """Finished statistics of some rows, with what a row loss gives for them: its one call."""
    stats = stats.finished()
    return stats if problem.row_loss is None else row_loss.evaluated(stats, rows, problem)

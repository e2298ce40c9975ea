"""Which objective a call has: what its options are options of."""

from __future__ import annotations

from liger_cutedsl import cross_entropy, log_probs
from liger_cutedsl.objective import Objective
from liger_cutedsl.options import LogitOptions, LogProbOptions, LossOptions

_BY_OPTIONS = {LossOptions: cross_entropy, LogProbOptions: log_probs}


def of(options: LogitOptions) -> Objective:
    return _BY_OPTIONS[type(options)]

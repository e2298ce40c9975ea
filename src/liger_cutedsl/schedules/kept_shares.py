"""What share of its pairs a head kept when it was sampled last: one that keeps many is computed whole, for a while."""

from __future__ import annotations

from dataclasses import dataclass

from liger_cutedsl.call import Problem

MOST_KEPT = 1 / 3  # beyond it the products of packed pairs gain nothing over dense ones
TRY_AGAIN = 64  # calls
MOST_HEADS = 64  # that are remembered


@dataclass
class _Last:
    """share: expected, not drawn.  passed: calls since, that were not sampled."""

    share: float
    passed: int = 0


_last: dict[tuple, _Last] = {}


def note(problem: Problem, sampling: float, share: float) -> None:
    if len(_last) >= MOST_HEADS:
        _last.clear()
    _last[_head(problem, sampling)] = _Last(share)


def passed_over(problem: Problem, sampling: float) -> None:
    """A call that was to be sampled was computed whole."""
    last = _last.get(_head(problem, sampling))
    if last is not None:
        last.passed += 1


def known(problem: Problem, sampling: float) -> float | None:
    """The last share, None before the first call."""
    last = _last.get(_head(problem, sampling))
    return None if last is None else last.share


def too_large(problem: Problem, sampling: float) -> float | None:
    """The last share, where it is a reason not to sample this time."""
    last = _last.get(_head(problem, sampling))
    return None if last is None or last.share <= MOST_KEPT or last.passed >= TRY_AGAIN else last.share


def forget() -> None:
    _last.clear()


def _head(problem: Problem, sampling: float) -> tuple:
    """All calls with as large a weight, alike in what they compute."""
    return problem.device, sampling, type(problem.options), problem.options.reduction, *problem.weight.shape

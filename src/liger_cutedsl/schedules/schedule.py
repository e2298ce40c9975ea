"""What a schedule is: in what order tiles and chunks are computed, written once for all engines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from liger_cutedsl.call import Gradients, Problem, WantedGradients
from liger_cutedsl.route import Route, Settings
from liger_cutedsl.split import WHOLE, Split

if TYPE_CHECKING:
    from liger_cutedsl.engines.engine import Engine


@dataclass(frozen=True)
class Task:
    """What a schedule is to do: a problem of rows that count, with targets of the whole vocabulary; the gradients that
    will be asked for; what the user asked for; and the share of the vocabulary that this process computes.

    expected_upstream: what backward is likely to be given for the loss, asked behind the first GEMM; None for 1.
    dropped: how many rows of the caller's the problem leaves out.  beside: bytes of the copy that it is of the others.
    """

    problem: Problem
    wanted: WantedGradients
    settings: Settings
    split: Split = WHOLE
    expected_upstream: Callable[[Problem], float] | None = None
    dropped: int = 0
    beside: int = 0

    @functools.cached_property
    def local(self) -> Problem:
        """The problem over this process's columns; targets elsewhere are −1."""
        return self.split.local(self.problem)

    @property
    def returned(self) -> WantedGradients:
        """The gradients that are made and returned: not a dW that is added to the caller's buffer."""
        return self.wanted if self.problem.weight_grad_buffer is None else replace(self.wanted, weight=None)


class Schedule(Protocol):
    """A module with these names. It plans itself, and is one of schedules.IN_ORDER_OF_PREFERENCE."""

    NAME: str

    def obstacle(self, engine: Engine, task: Task) -> str | None:
        """Why this task, with gradients, cannot run here, or not accurately, or not fast; None where nothing is in the
        way. The last schedule in order of preference has none."""

    def plan(self, engine: Engine, task: Task, reason: str) -> Route:
        """How it would run within the budget, or in as little memory as there is a way: tiles, chunk, bytes, GEMMs."""

    def forward(self, engine: Engine, task: Task, route: Route) -> tuple[NamedTuple, object]:
        """The objective's results for the task's rows, and what backward needs: KeptGradients, or its own state."""

    def backward(self, engine: Engine, task: Task, route: Route, state, upstream: NamedTuple) -> Gradients:
        """The gradients for upstream gradients of the results, () or (n, …), from a state of its own."""


def gemms(all_of_them: float, wanted: WantedGradients) -> float:
    """Without dX or dW, a GEMM less each."""
    return all_of_them - (wanted.x is None) - (wanted.weight is None)

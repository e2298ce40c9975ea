"""What the drop-ins for per-token operators share: who runs a call, ours or the operator that it replaced, and why.

Ours runs where the CuTe engine does, where an engine is asked for by name, and where the original refuses what we can
compute. Everything else goes to the original with the arguments as they came, so that no call becomes slower, needs
more memory, or fails where it did not.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable

import torch

from liger_cutedsl.call import Problem, WantedGradients, autocast_dtype, planned_device
from liger_cutedsl.checks import check_tensors
from liger_cutedsl.compat import FakeTensorMode, constant_in_graphs
from liger_cutedsl.options import LogProbOptions
from liger_cutedsl.route import REPLACED, Route, Settings
from liger_cutedsl.routing import choose_route

_LOG = logging.getLogger(__name__)
_said: set[tuple[str, str]] = set()  # (operator, reason) that the log has
_in_place: dict[type, object] = {}  # our class → what enable() found in the place that it takes


def remember_originals(swaps: Iterable[tuple[object, object]]) -> None:
    """Of the swaps (original, ours) that enable() makes: what ours calls where it does not run itself."""
    _in_place.update({ours: original for original, ours in swaps if original is not ours})


def forget_originals() -> None:
    _in_place.clear()


def original_of(ours: type, module: str):
    """The operator that a class of ours takes the place of: what enable() found there, else the one of that name that
    the given module defines."""
    found = _in_place.get(ours)
    return getattr(importlib.import_module(module), ours.__name__) if found is None else found


def note(operator: str, reason: str) -> None:
    """Logs, once for an operator and a reason, that a call of it goes to the original."""
    if (operator, reason) not in _said:
        _said.add((operator, reason))
        _LOG.info("%s runs as it was before liger-cutedsl took its place: %s", operator, reason)


def forget_notes() -> None:
    _said.clear()


def decided(problem: Problem, settings: Settings) -> tuple[Route | None, str | None]:
    """The route of a call as ours, planned once for all of its rows; or None, and why it should go to the original.
    Neither where ours is to run it without a choice, by the route that it finds itself.

    Raises RuntimeError as choose_route does, and for tensors whose memory is gone.
    """
    if settings.engine != "auto" or not problem.tokens:
        return None, None
    try:
        check_tensors(problem)
    except (TypeError, ValueError) as error:
        return None, str(error)
    route = choose_route(problem, WantedGradients.of(problem), settings)
    if route.engine != "cute":
        return None, route.reason
    if settings.source == REPLACED and route.workspace_bytes - route.copied_bytes > settings.budget(0):
        return None, f"it needs less memory than ours, which takes {route.workspace_bytes / 2**20:.0f} MiB"
    return route, None


def traced_obstacle(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """The same while a graph is traced: for tensors of this kind, however many rows they have. Sizes are the weight's:
    a parameter's are numbers in any graph (dynamic=True)."""
    return _obstacle_of_kind(
        str(x.device), x.dtype, weight.dtype, weight.shape[1], weight.shape[0], autocast_dtype(x.device)
    )


@constant_in_graphs
def _obstacle_of_kind(device: str, x_dtype, weight_dtype, hidden: int, vocab: int, autocast) -> str | None:
    settings, kind = Settings.resolve(), planned_device(torch.device(device))
    with FakeTensorMode(), torch.autocast(kind.type, dtype=autocast, enabled=autocast is not None):
        x = torch.empty(1, hidden, dtype=x_dtype, device=kind)
        weight = torch.empty(vocab, hidden, dtype=weight_dtype, device=kind)
        target = torch.empty(1, dtype=torch.int64, device=kind)
        return decided(Problem(x, weight, target, options=LogProbOptions(), dense=True), settings)[1]

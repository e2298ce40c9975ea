"""A sign that it runs: one line of log a process, at level INFO, of the first call that was computed.

    logging.getLogger("liger_cutedsl").setLevel(logging.INFO)

shows its route, whose operator it stands in for, and how much of the logits is not stored.
"""

from __future__ import annotations

import logging
import sys
import threading

from liger_cutedsl.call import Problem
from liger_cutedsl.route import Route

# Where others find an operator by name, that this package takes the place of.
_SEATS = (
    ("liger_kernel.ops", "LigerFusedLinearCrossEntropyFunction"),
    ("liger_kernel.ops", "LigerFusedLinearScaledCrossEntropyFunction"),
    ("trl.kernels", "ChunkedLogProbFunction"),
)
_LOG = logging.getLogger("liger_cutedsl")
_lock = threading.Lock()
_said = False


def announce(route: Route, problem: Problem, with_gradients: bool) -> None:
    """Logs the first call of this process, where its log is read at INFO. problem: the caller's, with all rows."""
    global _said
    if _said or not problem.tokens or not _LOG.isEnabledFor(logging.INFO):
        return
    with _lock:
        first, _said = not _said, True
    if first:
        _LOG.info("%s; %s; %s", route, _in_place_of(), _logits(route, problem, with_gradients))


def forget() -> None:
    """The next call is the first one again."""
    global _said
    _said = False


def replaced() -> list[str]:
    """The names, in modules that are loaded, by which others find this package's operators: by enable() or by
    LIGER_KERNEL_IMPL=cutedsl."""
    found = []
    for module, name in _SEATS:
        value = vars(sys.modules[module]).get(name) if sys.modules.get(module) is not None else None
        if getattr(value, "__module__", "").split(".")[0] == __package__:
            found.append(f"{module}.{name}")
    return found


def _in_place_of() -> str:
    return f"in place of {', '.join(replaced()) or 'nothing: called by its own name'}"


def stored_at_a_time(route: Route, problem: Problem, with_gradients: bool) -> int:
    """How many numbers of the size of a logit a route stores at a time: exponentials, which turn into dz in place.

    A store-free forward of the CuTe engine has none. Of Liger-Kernel's operator it is not known.
    """
    rows = min(route.chunk or problem.tokens, problem.tokens)
    if route.schedule == "single_pass":
        return rows * problem.vocab
    if not with_gradients and route.engine == "cute":
        return 0
    return rows * min(max(route.kept, route.tile_width), problem.vocab)


def _logits(route: Route, problem: Problem, with_gradients: bool) -> str:
    tokens, vocab, size = problem.tokens, problem.vocab, route.dtype.itemsize / 2**20
    logits = f"{tokens * vocab * size:.4g} MiB of logits ({tokens} x {vocab}, {str(route.dtype)[6:]}) not stored"
    if route.engine == "triton":
        return f"{logits} but for Liger-Kernel's own chunks"
    return f"{logits}, {stored_at_a_time(route, problem, with_gradients) * size:.4g} MiB of exponentials at a time"

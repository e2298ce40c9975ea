"""For tests, ours and those of code that calls the loss: kernels that fail on purpose, and a process as if it were new.

    from liger_cutedsl import testing

    with testing.planted_kernel_failure():
        loss = fused_linear_cross_entropy(x, weight, target)  # computed without the CuTe kernels
        assert testing.kernel_failure() is not None

The only place that knows where the rest of the package keeps what it remembers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

import torch

from liger_cutedsl import engines, first_call, routing, row_check, rows, shards, upstream
from liger_cutedsl.compat import in_backward
from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.liger import drop_in
from liger_cutedsl.schedules import kept_shares
from liger_cutedsl.schedules.exponentials import Waiting

PLANTED = "a CuTe kernel could not be compiled or launched (planted)"
PLACES = ("forward", "backward", "any")


def kernel_failure() -> str | None:
    """Why this process computes without the CuTe kernels since one of them failed; None where none did."""
    return routing._kernel_failure


def reset() -> None:
    """Forgets what this process remembers of earlier calls: a kernel that failed, what was warned about and logged,
    whether rows were dropped, what backward was given, what share of its pairs a sample kept, which calls wait for
    their backward, which row losses were checked, and how the ranks of a group share a vocabulary (on all of them, or
    they disagree)."""
    routing._kernel_failure, routing._warned = None, False
    routing._small_budgets.clear()
    first_call.forget()
    routing._plans.clear()
    drop_in.forget_notes()
    row_check.forget()
    rows.TargetCheck._dropped_last_time.clear()
    upstream._histories.clear()
    kept_shares.forget()
    Waiting.forget()
    shards._known_shards.clear()


@contextlib.contextmanager
def planted_kernel_failure(where: str = "any", *, on_cpu: bool | None = None) -> Iterator[None]:
    """Within it, CuTe kernels fail as on a GPU whose driver is too old: with KernelFailure, when they are launched.

    where: "forward", the kernels that a call begins with; "backward", those that only a backward needs (of
        schedule="recompute"); "any", both.
    on_cpu: whether calls on a CPU take the CuTe engine for possible, and the torch engine stands in for it, on any
        device. None: where there is no GPU.

    A failure counts from here: one that came before does not, and one that comes within does not afterwards. For one
    thread at a time. Raises ValueError for another `where`.
    """
    if where not in PLACES:
        raise ValueError(f"where must be one of {', '.join(PLACES)}, got {where!r}")
    stands_in = not torch.cuda.is_available() if on_cpu is None else on_cpu
    make, choose = engines.make_engine, routing._choose_engine

    def failing(name: str, *arguments, **options):
        engine = make("torch" if name == "cute" and stands_in else name, *arguments, **options)
        if name == "cute":
            _break(engine, where)
        return engine

    def choosing(task):
        settings = task.settings
        if settings.engine == "cute" or (settings.engine == "auto" and kernel_failure() is None):
            return "cute", "planted"
        return choose(task)

    with contextlib.ExitStack() as stack:
        for module in _importers_of("make_engine", make):
            stack.enter_context(mock.patch.object(module, "make_engine", failing))
        if stands_in:
            stack.enter_context(mock.patch.object(routing, "_choose_engine", choosing))
        stack.enter_context(mock.patch.object(routing, "_kernel_failure", None))
        yield


def _break(engine, where: str) -> None:
    """Makes an engine's primitives fail, those that launch a kernel."""

    def fail(*_, **__):
        raise KernelFailure(PLANTED)

    def fail_in_backward(*arguments, **options):
        return fail() if in_backward() else scale_chunk(*arguments, **options)

    scale_chunk = engine.scale_chunk
    if where != "backward":
        engine.row_statistics = engine.exp_chunk = fail
    if where != "forward":
        engine.dz_tile, engine.scale_chunk = fail, fail_in_backward


def _importers_of(name: str, value) -> list:
    """The modules of this package in which a name means a value."""
    ours = [module for key, module in list(sys.modules.items()) if key.split(".")[0] == "liger_cutedsl"]
    return [module for module in ours if vars(module).get(name) is value]

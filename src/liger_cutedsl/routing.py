"""Routing: from a call and the environment to a Route, the engine and schedule that will run and why."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from dataclasses import replace

import torch

from liger_cutedsl.call import Problem, WantedGradients, autocast_dtype
from liger_cutedsl.engines import KernelFailure, architectures, make_engine
from liger_cutedsl.epilogues import EXACT_INDICES
from liger_cutedsl.options import LossOptions
from liger_cutedsl.route import REPLACED, Route, Settings
from liger_cutedsl.schedules import IN_ORDER_OF_PREFERENCE, liger_triton, sampled
from liger_cutedsl.schedules.exponentials import Waiting
from liger_cutedsl.schedules.footprint import budget, budget_in_words
from liger_cutedsl.schedules.schedule import Task
from liger_cutedsl.split import WHOLE, Split
from liger_cutedsl.user_warnings import warn_user


def choose_route(problem: Problem, wanted: WantedGradients, settings: Settings, split: Split = WHOLE) -> Route:
    """The route of a call. Raises RuntimeError, with the reason, where a forced engine or schedule cannot run it."""
    return planned(Task(problem, wanted, settings, split))[1]


def planned(task: Task, after_first_launch=None, route: Route | None = None):
    """(engine, route) of a task: the call's one engine object, and what the preferred schedule makes of it.

    after_first_launch: see CuteEngine.  route: this one, planned before. Raises RuntimeError as choose_route does.
    """
    if route is not None:
        return make_engine(route.engine, after_first_launch), route
    name, reason = _choose_engine(task)
    engine = make_engine(name, after_first_launch)
    if name == "triton":
        reason += "; it makes the whole gradient, no sample" if task.settings.gradient_sampling else ""
        route = liger_triton.plan(engine, task, reason)
    else:
        route = _known_plan(engine, task, reason)
    if route.engine != name:  # another stands in for it (testing.py)
        route = replace(route, engine=name)
    if name != "cute" and task.problem.device.type == "cuda" and task.problem.tokens and task.local.vocab:
        route = replace(route, fallback=True)
    return engine, route


_plans: dict[tuple, Route] = {}
MOST_PLANS = 1024  # of some hundred bytes each


def _known_plan(engine, task: Task, reason: str) -> Route:
    """What _schedule makes of a task, once for all of the same outline: it takes a third of a small call's host time.

    Planned from the outline itself, so that nothing can enter a plan that is not in its key; but for a vocabulary over
    ranks, whose split knows more.
    """
    if task.split is not WHOLE or not isinstance(task.problem.tokens, int):  # a SymInt
        return _schedule(engine, task, reason)
    task = replace(task, problem=task.problem.outline(), expected_upstream=None)
    device, tiles = task.problem.device, os.environ.get(architectures.TILES_VARIABLE)
    key = engine.name, task, reason, autocast_dtype(device), Waiting.on(device), tiles
    if task.settings.gradient_sampling:
        key += sampled.circumstances(task)
    route = _plans.get(key)
    if route is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        route = _plans[key] = _schedule(engine, task, reason)
    return route


def _schedule(engine, task: Task, reason: str) -> Route:
    """What the first schedule makes of a task that can run it within the budget, or the last one in any case."""
    *preferred, last = IN_ORDER_OF_PREFERENCE
    settings, obstacle, allowed = task.settings, None, budget_in_words(engine, task)
    if task.wanted and task.problem.tokens:  # other calls store nothing, whatever the schedule
        if settings.gradient_sampling and settings.schedule not in ("auto", sampled.NAME):
            reason = f"{reason}; no sample of the gradient: schedule {settings.schedule!r} was asked for"
        for schedule in preferred:
            forced = settings.schedule == schedule.NAME
            if settings.schedule not in ("auto", schedule.NAME):
                continue
            if schedule is sampled and not (forced or settings.gradient_sampling):
                continue
            obstacle = schedule.obstacle(engine, task)
            if obstacle and forced:
                raise RuntimeError(
                    f"schedule {schedule.NAME!r} was asked for but cannot run this call: {obstacle}. "
                    f"Unset LIGER_CUTEDSL_SCHEDULE (or pass schedule='auto') to let the call take another route"
                )
            if not obstacle:
                route = schedule.plan(engine, task, reason)
                if forced or _fits(route, engine, task):
                    return replace(route, budget=allowed)
                obstacle = f"a chunk does not fit {round(budget(engine, task) / 2**20, 3):g} MiB"
            if schedule is sampled:
                reason = f"{reason}; no sample of the gradient: {obstacle}"
    route = last.plan(engine, task, f"{reason}; {obstacle}" if obstacle and obstacle not in reason else reason)
    if settings.source != REPLACED and not _fits(route, engine, task):
        _warn_about_budget(route, task, budget(engine, task) / 2**20)
    return replace(route, budget=allowed)


def _fits(route: Route, engine, task: Task) -> bool:
    beyond = route.dw_low_bytes if task.settings.workspace_mb is None else 0
    return route.workspace_bytes - route.copied_bytes - beyond <= budget(engine, task)


_warned = False


def warn_about_fallback(route: Route) -> None:
    """Says once per process that a GPU call runs without the CuTe engine, and why."""
    global _warned
    if route.fallback and not _warned:
        _warned = True
        warn_user(
            f"liger-cutedsl runs this loss on its {route.engine} engine: {route.reason}. "
            f"Said once; `python -m liger_cutedsl` shows what runs here."
        )


_small_budgets: set[tuple] = set()  # (V, H, MiB) that were warned about: the number of tokens changes with each batch


def _warn_about_budget(route: Route, task: Task, workspace_mb: float) -> None:
    head = (task.problem.vocab, task.problem.hidden, workspace_mb)
    if head not in _small_budgets:
        _small_budgets.add(head)
        needed = round((route.workspace_bytes - route.copied_bytes) / 2**20, 2)
        warn_user(
            f"a workspace of {round(workspace_mb, 3):g} MiB holds no schedule of this call: it takes the leanest, "
            f"which needs {needed:g} MiB (LIGER_CUTEDSL_WORKSPACE_MB, "
            f"or workspace_mb=). Said once for a head of this size"
        )


def _choose_engine(task: Task) -> tuple[str, str]:
    problem, forced = task.local, task.settings.engine
    if problem.vocab == 0:
        return "torch", "a shard of nothing but padding"
    if forced != "auto":
        obstacle = {"cute": cute_obstacle, "triton": triton_obstacle, "torch": lambda _: None}[forced](task)
        if obstacle:
            raise RuntimeError(
                f"engine {forced!r} was asked for but cannot run this call: {obstacle}. "
                f"Unset LIGER_CUTEDSL_ENGINE (or pass engine='auto') to let the call take another route"
            )
    if problem.tokens == 0:
        return "torch", "an empty batch needs no kernel"
    if forced != "auto":
        return forced, "asked for"
    if problem.device.type != "cuda":
        return "torch", f"{problem.device.type} tensors"
    obstacle = cute_obstacle(task)
    if not obstacle:
        return "cute", "16-bit inputs on a GPU with CuTe kernels"
    second = triton_obstacle(task)
    return ("torch", f"{obstacle}, and {second}") if second else ("triton", obstacle)


_kernel_failure: str | None = None


def give_up_on_cute(failure: KernelFailure, settings: Settings) -> None:
    """After a kernel failed, this process routes past the CuTe engine. Raises the failure where it was asked for."""
    global _kernel_failure
    if settings.engine == "cute":
        raise failure
    _kernel_failure = str(failure)


def cute_obstacle(task: Task) -> str | None:
    """Why the CuTe engine cannot run this call, or None."""
    problem, settings = task.local, task.settings
    if problem.device.type != "cuda":
        return f"the CuTe kernels need a GPU, and these are {problem.device.type} tensors"
    if torch.version.hip is not None:
        return "the CuTe kernels need an NVIDIA GPU"
    if not torch.cuda.is_initialized() and not torch.cuda.is_available():  # fake tensors
        return "the CuTe kernels need a GPU, and torch finds none here"
    capability = torch.cuda.get_device_capability(problem.device)
    if architectures.of(capability) is None:
        return "the CuTe kernels need {}, and this GPU is sm_{}{}".format(architectures.supported_names(), *capability)
    if problem.gemm_dtype not in (torch.bfloat16, torch.float16):
        return f"the CuTe kernels multiply bfloat16 or float16, not {str(problem.gemm_dtype).removeprefix('torch.')}"
    if problem.hidden % 8:
        return f"the CuTe kernels need H to be a multiple of 8, and it is {problem.hidden}"
    if problem.options.needs_argmax and problem.vocab > EXACT_INDICES:
        return f"the CuTe argmax holds indices up to {EXACT_INDICES}, and V is {problem.vocab}"
    if _kernel_failure and settings.engine != "cute":
        return _kernel_failure
    return _cute_import_error()


@functools.cache
def _cute_import_error() -> str | None:
    try:
        importlib.import_module("liger_cutedsl.engines.cute_engine")
    except Exception as error:  # a broken installation of quack or CuTe DSL fails in many ways
        return f"CuTe DSL or quack does not import ({type(error).__name__}: {error}); see python -m liger_cutedsl"
    return None


def triton_obstacle(task: Task) -> str | None:
    """Why Liger-Kernel's Triton operator cannot run this call, or None."""
    problem, settings = task.local, task.settings
    if problem.device.type != "cuda":
        return f"Liger's Triton operator needs a GPU, and these are {problem.device.type} tensors"
    if problem.gemm_dtype == torch.float64:
        return "Liger's Triton operator computes float64 inputs in float32"
    if task.split.sums_dx:
        return "Liger's Triton operator computes a whole vocabulary"
    if not isinstance(problem.options, LossOptions):
        return "Liger's Triton operator computes a loss of its own"
    if problem.options.scale != 1.0:
        return "Liger's Triton operator has no temperature and no logit scale"
    if problem.weight_grad_buffer is not None:
        return f"Liger's Triton operator adds nothing to {problem.weight_grad_buffer.name}"
    if settings.schedule != "auto":
        return f"Liger's Triton operator has its own schedule, not {settings.schedule!r}"
    if not _liger_is_installed():
        return "Liger-Kernel is not installed"
    return None


@functools.cache
def _liger_is_installed() -> bool:
    return importlib.util.find_spec("liger_kernel.ops.fused_linear_cross_entropy") is not None

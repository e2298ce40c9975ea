"""Routing: from a call and the environment to a Route, the engine and schedule that will run and why."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from dataclasses import dataclass, replace

import torch

from liger_cutedsl.engines import KernelFailure, architectures, make_engine
from liger_cutedsl.epilogues import EXACT_INDICES
from liger_cutedsl.problem import Problem, WantedGradients
from liger_cutedsl.schedules import recompute, single_pass
from liger_cutedsl.tiling import SPARE_COLUMNS, TILE_QUANTUM, fitting_width

ENGINES = ("cute", "triton", "torch")
SCHEDULES = ("recompute", "single_pass")
# Holds chunks of 2048 tokens of a vocabulary of 128k, with the partial results of every option (541 MiB).
DEFAULT_WORKSPACE_MB = 560.0


# single_pass reads and writes all of dW once a chunk. Chunks smaller than this cost more than the GEMM they save.
SMALLEST_CHUNK = 512


@dataclass(frozen=True)
class Route:
    """How one call runs.

    engine: "cute" (CuTe DSL GEMMs), "triton" (Liger-Kernel's own operator) or "torch".
    schedule: "recompute" or "single_pass"; "liger" is what the triton engine brings along.
    dtype: what x and weight are multiplied in.
    tile_width: columns of a vocabulary tile of recompute.  kept: columns whose exponentials it keeps until backward
        instead of recomputing them.  chunk: tokens of a chunk of single_pass.  dw_sum: what it sums dW in, if it does.
    gemms: large matrix products, forward and backward, of 2·N·V·H operations each.
    workspace_bytes: predicted memory beyond inputs, outputs and gradients; 0 where not known (triton).
    reason: why, in words.  fallback: whether a GPU call runs without the CuTe engine.
    """

    engine: str
    schedule: str
    dtype: torch.dtype
    reason: str
    tile_width: int = 0
    kept: int = 0
    chunk: int = 0
    dw_sum: torch.dtype | None = None
    gemms: float = 0
    workspace_bytes: int = 0
    fallback: bool = False

    def __str__(self) -> str:
        parts = [f"{self.engine} / {self.schedule}"]
        if self.schedule == "recompute":
            parts.append(f"tiles of {self.tile_width} columns")
            parts += [f"{self.kept} kept"] if self.kept else []
        if self.schedule == "single_pass":
            parts.append(f"chunks of {self.chunk} tokens")
        if self.workspace_bytes:
            parts += [f"{self.gemms:.3g} GEMMs", f"{self.workspace_bytes / 2**20:.0f} MiB workspace"]
        return f"{', '.join(parts)}: {self.reason}"


@dataclass(frozen=True)
class Settings:
    """What the user asked for: an argument, else its environment variable, else the default.

    engine (LIGER_CUTEDSL_ENGINE): one of ENGINES, or "auto".
    schedule (LIGER_CUTEDSL_SCHEDULE): one of SCHEDULES, or "auto".
    workspace_mb (LIGER_CUTEDSL_WORKSPACE_MB): MiB a call may use beyond inputs, outputs and gradients.
    """

    engine: str = "auto"
    schedule: str = "auto"
    workspace_mb: float = DEFAULT_WORKSPACE_MB

    @classmethod
    def resolve(cls, engine=None, schedule=None, workspace_mb=None, chunk_mem_const=1) -> Settings:
        """chunk_mem_const: Liger-Kernel's multiplier of the workspace, a positive int."""
        if isinstance(chunk_mem_const, bool) or not isinstance(chunk_mem_const, int) or chunk_mem_const < 1:
            raise ValueError(f"chunk_mem_const must be a positive int, got {chunk_mem_const!r}")
        budget = _positive("workspace_mb", workspace_mb, "LIGER_CUTEDSL_WORKSPACE_MB", DEFAULT_WORKSPACE_MB)
        return cls(
            _choice("engine", engine, "LIGER_CUTEDSL_ENGINE", ENGINES),
            _choice("schedule", schedule, "LIGER_CUTEDSL_SCHEDULE", SCHEDULES),
            budget * chunk_mem_const,
        )


def choose_route(problem: Problem, wanted: WantedGradients, settings: Settings) -> Route:
    """The route of a call. Raises RuntimeError, with the reason, where a forced engine cannot run it."""
    engine, reason = _choose_engine(problem, settings)
    fallback = problem.device.type == "cuda" and engine != "cute" and problem.tokens > 0
    if engine == "triton":
        return Route("triton", "liger", problem.gemm_dtype, reason, gemms=3, fallback=fallback)
    budget = int(settings.workspace_mb * 2**20)
    if problem.tokens == 0:
        return _recompute_route(engine, problem, wanted, budget, reason)
    obstacle = single_pass_obstacle(problem, make_engine(engine).dz_dtype(problem.gemm_dtype))
    if settings.schedule == "single_pass" and obstacle and wanted:
        raise RuntimeError(
            f"schedule 'single_pass' was asked for but cannot run this call: {obstacle}. "
            f"Unset LIGER_CUTEDSL_SCHEDULE (or pass schedule='auto') to let the call take another route"
        )
    if settings.schedule != "recompute" and wanted and not obstacle:
        route = _single_pass_route(engine, problem, wanted, budget, reason)
        if settings.schedule == "single_pass" or route.workspace_bytes <= budget:
            return replace(route, fallback=fallback)
        obstacle = f"a chunk does not fit {settings.workspace_mb:g} MiB"
    if wanted and settings.schedule == "auto":
        reason = f"{reason}; {obstacle}"
    route = _recompute_route(engine, problem, wanted, budget, reason)
    if route.workspace_bytes > budget:
        _warn_about_budget(route, settings.workspace_mb)
    return replace(route, fallback=fallback)


def single_pass_obstacle(problem: Problem, e_dtype: torch.dtype) -> str | None:
    """Why gradients in forward, from exponentials in e_dtype, are not possible or not accurate; or None."""
    options = problem.options
    if options.reduction == "none":
        return "reduction='none' knows its gradient's weights only in backward"
    if options.needs_slope_apart:
        return "stored exponentials hold the softcap's slope, and label smoothing needs both apart"
    if e_dtype == torch.float16:
        if options.reduction == "mean" and not problem.dense:  # while a CUDA graph is captured
            return "a float16 mean needs a scale from the number of valid rows, which only the device knows"
        if not single_pass.fp16_scale_fits(problem):
            return "float16 with class weights, token scaling or a z-loss needs a scale known only in backward"
    return None


def _single_pass_route(engine: str, problem: Problem, wanted: WantedGradients, budget: int, reason: str) -> Route:
    runner, sums = make_engine(engine), single_pass.sum_dtypes(problem, wanted)
    one, two = runner.chunk_bytes(problem, 1), runner.chunk_bytes(problem, 2)
    per_row, fixed = two - one, 2 * one - two
    fitting = (budget - single_pass.sums_bytes(problem, wanted, sums) - fixed) // per_row // TILE_QUANTUM * TILE_QUANTUM
    least = min(SMALLEST_CHUNK, problem.tokens)
    chunk = runner.chunk_size(problem, min(max(fitting, least), problem.tokens))
    beside = runner.chunk_bytes(problem, chunk)
    if single_pass.roundings(problem, sums, chunk) > single_pass.MOST_ROUNDINGS:
        wide = replace(sums, weight=problem.compute_dtype)
        if single_pass.sums_bytes(problem, wanted, wide) + beside <= budget:
            sums = wide
    return Route(
        engine,
        "single_pass",
        problem.gemm_dtype,
        reason,
        chunk=chunk,
        dw_sum=sums.weight,
        gemms=_gemms(3, wanted),
        workspace_bytes=single_pass.sums_bytes(problem, wanted, sums) + beside,
    )


def _recompute_route(engine: str, problem: Problem, wanted: WantedGradients, budget: int, reason: str) -> Route:
    runner = make_engine(engine)
    fixed, column = recompute.accumulator_bytes(problem, wanted), runner.column_bytes(problem)
    kept = recompute.kept_columns(runner, problem, wanted, budget)
    tiled = 0 if kept == problem.vocab else kept  # all are kept: tiles are for a second backward
    width = runner.tile_width(problem, fitting_width(problem.vocab - tiled, column, budget - fixed), tiled)
    if kept == problem.vocab:
        used = runner.chunk_bytes(problem, problem.tokens)
    else:
        backward = fixed + column * (width + SPARE_COLUMNS) if wanted else 0
        used = max(backward, runner.forward_bytes(problem, width, kept))
    return Route(
        engine,
        "recompute",
        problem.gemm_dtype,
        reason,
        tile_width=width,
        kept=kept,
        gemms=_gemms(4 - kept / problem.vocab, wanted) if wanted else 1,
        workspace_bytes=used,
    )


def _gemms(all_of_them: float, wanted: WantedGradients) -> float:
    """Without dX or dW, a GEMM less each."""
    return all_of_them - (wanted.x is None) - (wanted.weight is None)


_warned = False


def warn_about_fallback(route: Route) -> None:
    """Says once per process that a GPU call runs without the CuTe engine, and why."""
    global _warned
    if route.fallback and not _warned:
        _warned = True
        warnings.warn(
            f"liger-cutedsl runs this loss on its {route.engine} engine: {route.reason}. "
            f"Said once; `python -m liger_cutedsl` shows what runs here.",
            RuntimeWarning,
            stacklevel=6,
        )


@functools.cache
def _warn_about_budget(route: Route, workspace_mb: float) -> None:
    warnings.warn(
        f"a workspace of {workspace_mb:g} MiB holds no schedule of this call: it takes the leanest, which needs "
        f"{route.workspace_bytes / 2**20:.0f} MiB (LIGER_CUTEDSL_WORKSPACE_MB, or workspace_mb=). Said once a call of "
        f"this size",
        RuntimeWarning,
        stacklevel=7,
    )


def _choose_engine(problem: Problem, settings: Settings) -> tuple[str, str]:
    if settings.engine != "auto":
        obstacle = {"cute": cute_obstacle, "triton": triton_obstacle, "torch": lambda *_: None}[settings.engine](
            problem, settings
        )
        if obstacle:
            raise RuntimeError(
                f"engine {settings.engine!r} was asked for but cannot run this call: {obstacle}. "
                f"Unset LIGER_CUTEDSL_ENGINE (or pass engine='auto') to let the call take another route"
            )
    if problem.tokens == 0:
        return "torch", "an empty batch needs no kernel"
    if settings.engine != "auto":
        return settings.engine, "asked for"
    if problem.device.type != "cuda":
        return "torch", f"{problem.device.type} tensors"
    obstacle = cute_obstacle(problem, settings)
    if not obstacle:
        return "cute", "16-bit inputs on a GPU with CuTe kernels"
    second = triton_obstacle(problem, settings)
    return ("torch", f"{obstacle}, and {second}") if second else ("triton", obstacle)


_kernel_failure: str | None = None


def give_up_on_cute(failure: KernelFailure, settings: Settings) -> None:
    """After a kernel failed, this process routes past the CuTe engine. Raises the failure where it was asked for."""
    global _kernel_failure
    if settings.engine == "cute":
        raise failure
    _kernel_failure = str(failure)


def cute_obstacle(problem: Problem, settings: Settings) -> str | None:
    """Why the CuTe engine cannot run this call, or None."""
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


def triton_obstacle(problem: Problem, settings: Settings) -> str | None:
    """Why Liger-Kernel's Triton operator cannot run this call, or None."""
    if problem.device.type != "cuda":
        return f"Liger's Triton operator needs a GPU, and these are {problem.device.type} tensors"
    if problem.gemm_dtype == torch.float64:
        return "Liger's Triton operator computes float64 inputs in float32"
    if settings.schedule != "auto":
        return f"Liger's Triton operator has its own schedule, not {settings.schedule!r}"
    return None


def _choice(name: str, argument, variable: str, choices: tuple[str, ...]) -> str:
    value, source = (argument, name) if argument is not None else (os.environ.get(variable), variable)
    value = "auto" if value in (None, "") else value
    if value not in (*choices, "auto"):
        raise ValueError(f"{source} must be one of {', '.join(choices)} or auto, got {value!r}")
    return value


def _positive(name: str, argument, variable: str, default: float) -> float:
    value, source = (argument, name) if argument is not None else (os.environ.get(variable), variable)
    if value in (None, ""):
        return default
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{source} must be a positive number of MiB, got {value!r}")
    return number

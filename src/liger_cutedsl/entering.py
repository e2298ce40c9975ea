"""The ways into a call, for the entrances: traced as one node of a graph, over DTensors, or as it is."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_cutedsl.autograd import run
from liger_cutedsl.call import TENSORS, Problem, is_dtensor
from liger_cutedsl.cross_entropy import LossOutput
from liger_cutedsl.dtensor import run_dtensor
from liger_cutedsl.log_probs import LogProbs
from liger_cutedsl.options import LogProbOptions, LossOptions, python_scalar
from liger_cutedsl.route import Settings
from liger_cutedsl.torch_compile import run_compiled
from liger_cutedsl.torch_compile_log_probs import run_compiled_log_probs
from liger_cutedsl.weight_grad_buffer import WeightGradBuffer
from liger_cutedsl.without_data import shapes_only


def flattened(x, target):
    """x (N, H) and target (N,) of (..., H) and (...), where they are plain tensors."""
    plain = isinstance(x, torch.Tensor) and isinstance(target, torch.Tensor) and not is_dtensor(x)
    if not plain or x.dim() == 2:
        return x, target
    if x.shape[:-1] != target.shape:
        raise ValueError(
            f"target must have shape {tuple(x.shape[:-1])}, one target for each row of x "
            f"{tuple(x.shape)}, got {tuple(target.shape)}"
        )
    return x.reshape(-1, x.shape[-1]), target.reshape(-1)


def entered(
    tensors,
    options: dict,
    engine=None,
    schedule=None,
    workspace_mb=None,
    chunk_mem_const=1,
    weight_grad_buffer=None,
    gradient_sampling=None,
) -> LossOutput:
    """The call by the way its tensors need: DTensors, one node of a graph, or as it is."""
    # Asked here: torch.compile would compile a function of its own, and its answer, where this one runs between graphs.
    if not _is_distributed(tensors) and (torch.compiler.is_compiling() or shapes_only(*tensors)):
        numbers = dict(options, chunk_mem_const=chunk_mem_const, gradient_sampling=gradient_sampling)
        _check_traceable(numbers, weight_grad_buffer)
        return run_compiled(tensors, options, engine, schedule, workspace_mb, chunk_mem_const, gradient_sampling)
    named = dict(zip(TENSORS, tensors, strict=True))
    problem = Problem(**named, options=LossOptions(**options), weight_grad_buffer=weight_grad_buffer)
    how = (engine, schedule, workspace_mb, python_scalar(chunk_mem_const), gradient_sampling)
    return run_eager(problem, Settings.resolve(*how))


def entered_log_probs(
    tensors, options: dict, engine=None, schedule=None, workspace_mb=None, weight_grad_buffer=None, replaces=""
) -> LogProbs:
    """The same for log-probabilities. replaces: in a graph, the original that a drop-in takes the place of
    (replaced.py)."""
    if not _is_distributed(tensors) and (torch.compiler.is_compiling() or shapes_only(*tensors)):
        _check_traceable(options, weight_grad_buffer)
        return run_compiled_log_probs(tensors, options, engine, schedule, workspace_mb, replaces)
    named = dict(zip(TENSORS, tensors, strict=True))
    problem = Problem(**named, options=LogProbOptions(**options), weight_grad_buffer=weight_grad_buffer)
    return run_eager(problem, Settings.resolve(engine, schedule, workspace_mb))


def run_eager(problem: Problem, settings: Settings) -> NamedTuple:
    distributed = _is_distributed((problem.x, problem.weight))
    return run_dtensor(problem, settings) if distributed else run(problem, settings)


def _is_distributed(tensors) -> bool:
    x, weight, *_ = tensors
    return is_dtensor(x) or is_dtensor(weight)


def _check_traceable(options: dict, weight_grad_buffer: WeightGradBuffer | None) -> None:
    """Under torch.compile numpy's scalars are tensors, and a graph holds no option that is one, and no tensor that its
    backward writes: without fullgraph=True the error makes torch.compile run this call by itself, between two graphs.
    """
    if weight_grad_buffer is not None:
        raise TypeError(
            f"{weight_grad_buffer.name} takes no gradient inside torch.compile(fullgraph=True), nor of fake or meta "
            f"tensors: a graph holds no tensor that its backward writes"
        )
    for name, value in options.items():
        if value is not None and not isinstance(value, (bool, int, float, str, torch.dtype)):
            raise TypeError(
                f"{name} must be a Python number inside torch.compile(fullgraph=True), as numpy's .item() gives"
            )

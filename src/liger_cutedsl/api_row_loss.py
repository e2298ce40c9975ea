"""The entrances for a loss of the caller's own: a function of row values, at the price of cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from liger_cutedsl.autograd import run
from liger_cutedsl.call import Problem, gradients_needed, is_dtensor
from liger_cutedsl.checkpointing import between_graphs
from liger_cutedsl.entering import flattened, run_eager
from liger_cutedsl.options import RowLossOptions, python_scalar, suggesting
from liger_cutedsl.route import Settings
from liger_cutedsl.row_check import known_reads, read_by, reads_also
from liger_cutedsl.row_function import NotComputed, RowLoss
from liger_cutedsl.row_loss import RowLossOutput
from liger_cutedsl.row_tensors import with_gradients
from liger_cutedsl.split import over_ranks
from liger_cutedsl.weight_grad_buffer import WeightGradBuffer
from liger_cutedsl.without_data import refuse_without_data


@suggesting
def fused_linear_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    row_loss: Callable,
    *row_tensors,
    reduction: str = "mean",
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    return_log_probs: bool = False,
    return_entropy: bool = False,
    weight_grad_buffer: torch.Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    gradient_sampling: float | None = None,
    engine: str | None = None,
    schedule: str | None = None,
    workspace_mb: float | None = None,
) -> torch.Tensor | RowLossOutput:
    """A sum or mean over tokens of your own function of each token's values, without storing the logits.

    x: (..., H), bfloat16, float16, float32 or float64.  weight: (V, H), of x's dtype (or any under autocast).
    target: (...), int64 or int32, in [0, V) or ignore_index.  bias: (V,), floating point.
    row_loss: row_loss(values, *row_tensors) → (n,), or ((n,), *aux). It is called on some of the tokens at a time:
        values.log_prob, .lse, .entropy, .mean_logit (differentiable) and .argmax are (n,) of them, float32 (float64
        for float64 inputs); see row_function.RowValues. It must compute each row from that row's values alone, which
        is checked in the first call; what it does not read is not computed. It sees ignored rows or it does not: what
        it returns there is replaced by 0.
    row_tensors: tensors whose first dimensions are target's, of which it sees the same rows, (n, ...); () tensors and
        numbers as they are. Those that require a gradient get one.
    reduction: "mean" over the rows that are not ignored, or "sum". Any other weight is a row tensor.
    softcap, temperature, logit_scale: logits are softcap · tanh(u / softcap) / temperature, or u / temperature for
        softcap=None, with u = logit_scale · (x @ weight.T + bias).
    return_log_probs, return_entropy: those of each token, detached.
    weight_grad_buffer: (V, H), float32 or weight's dtype: dW is added to it, and weight gets no gradient.
        gradient_accumulation_fusion: the same with weight.main_grad, Megatron-Core's. See fused_linear_cross_entropy.
    gradient_sampling: as there; gradients of row_tensors are exact in any case.
    engine, schedule, workspace_mb: see liger_cutedsl.route.Settings.

    Returns the loss, a scalar in float32 (float64 for float64 inputs); a RowLossOutput where there are aux, which come
    back detached in target's shape, or anything else is asked for. Gradients reach x, weight, bias and row_tensors.

    Raises TypeError or ValueError naming the argument: for a row_loss that looks at other rows or draws at random, and
    for a parameter that it captures and that would get no gradient; RuntimeError where a forced engine cannot run it.
    """
    options = dict(
        reduction=reduction,
        softcap=softcap,
        temperature=temperature,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        return_log_probs=return_log_probs,
        return_entropy=return_entropy,
    )
    settings = Settings.resolve(engine, schedule, workspace_mb, gradient_sampling=gradient_sampling)
    buffer = WeightGradBuffer.of(weight, weight_grad_buffer, gradient_accumulation_fusion)

    def use(problem):
        return run_eager(replace(problem, weight_grad_buffer=buffer), settings)

    return _called((x, weight, target, bias), options, row_loss, row_tensors, use)


@suggesting
def vocab_parallel_fused_linear_loss(
    x: torch.Tensor,
    weight_shard: torch.Tensor,
    target: torch.Tensor,
    row_loss: Callable,
    *row_tensors,
    group: dist.ProcessGroup | None = None,
    reduction: str = "mean",
    bias: torch.Tensor | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    return_log_probs: bool = False,
    return_entropy: bool = False,
    weight_grad_buffer: torch.Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    gradient_sampling: float | None = None,
    engine: str | None = None,
    schedule: str | None = None,
    workspace_mb: float | None = None,
) -> torch.Tensor | RowLossOutput:
    """fused_linear_loss with W's rows split over the ranks of a group.

    x: (..., H), target: (...), row_loss and row_tensors the same on every rank, targets indexing the whole vocabulary.
    weight_shard: (V_rank, H) and bias: (V_rank,), this rank's rows.
    group, vocab_start, vocab_size, weight_grad_buffer, gradient_accumulation_fusion, gradient_sampling, schedule,
        errors: as in vocab_parallel_fused_linear_cross_entropy.
    Results are the same on every rank; so are the gradients of x and of row_tensors.
    """
    options = dict(
        reduction=reduction,
        softcap=softcap,
        temperature=temperature,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        return_log_probs=return_log_probs,
        return_entropy=return_entropy,
    )
    settings = Settings.resolve(engine, schedule, workspace_mb, gradient_sampling=gradient_sampling)
    split_of = over_ranks(group, vocab_start, vocab_size)
    tensors = (x, weight_shard, target, bias)
    buffer = WeightGradBuffer.of(weight_shard, weight_grad_buffer, gradient_accumulation_fusion)

    def use(problem):
        return run(replace(problem, weight_grad_buffer=buffer), settings, split_of)

    return _called(tensors, options, row_loss, row_tensors, use)


@between_graphs
def _called(tensors, options: dict, function: Callable, row_tensors: tuple, use: Callable):
    """use(problem), with the statistics that the function reads, and the row tensors' gradients."""
    x, weight, target, bias = tensors
    options, shape = RowLossOptions(**options), getattr(target, "shape", None)
    x, target = flattened(x, target)
    loss = row_loss_of(function, row_tensors, (x, weight, target, bias), shape)
    found = _used(use, Problem(x, weight, target, bias, options=options, row_loss=loss))
    count = len(found.aux) - sum(loss.wanted)
    own = tuple(v for v, wants in zip(loss.tensors, loss.wanted, strict=True) if wants)
    result = with_gradients(found.loss, own, found.aux[count:])
    shown = found._replace(loss=result, aux=found.aux[:count])
    return shown.result(shape)


def row_loss_of(function: Callable, row_tensors: tuple, tensors: tuple, shape) -> RowLoss:
    """A function with its row tensors, of a call with x, weight, target and bias. shape: of the caller's target.

    Raises TypeError or ValueError by name."""
    if not callable(function):
        raise TypeError(f"row_loss must be callable as row_loss(values, *row_tensors), got {type(function)}")
    x, weight, target, bias = tensors
    rows = tuple(_flat(i, value, target, shape) for i, value in enumerate(row_tensors))
    wanted = tuple(isinstance(v, torch.Tensor) and gradients_needed(v)[0] for v in rows)
    differentiated = any((*gradients_needed(*(_tensor(t) for t in (x, weight, bias))), *wanted))
    return RowLoss(function, rows, wanted, differentiated, torch.is_grad_enabled())


def _used(use: Callable, problem: Problem) -> RowLossOutput:
    """use(problem), whose options say what its function reads, as far as that is known, or can be found out."""
    for tensor in (problem.x, problem.weight, problem.target):
        if not isinstance(tensor, torch.Tensor):
            return use(problem)  # which refuses it by name
    read = reads_of(problem)
    while True:
        try:
            return use(replace(problem, options=problem.options.reading(read)))
        except NotComputed as missing:
            read = reads_also(problem.row_loss, missing.name) | read
        except RuntimeError as error:
            if isinstance(error.__cause__, NotComputed):  # after a part was added to the caller's buffer: the next time
                reads_also(problem.row_loss, error.__cause__.name)
            raise


def reads_of(problem: Problem) -> frozenset[str]:
    """Which statistics a problem's function reads: known of an earlier call, or asked now, which checks it. Raises
    ValueError for what is no loss of rows."""
    read = known_reads(problem.row_loss)
    if read is None:
        plain = replace(problem, x=_local(problem.x), weight=_local(problem.weight), target=_whole(problem), bias=None)
        refuse_without_data(plain)
        with torch.no_grad():
            read = read_by(plain)
    return read


def _whole(problem: Problem) -> torch.Tensor:
    """The targets; for a DTensor's, of which a rank may hold some, those of as many rows that count: all ranks look at
    the same rows."""
    if not is_dtensor(problem.target):
        return problem.target
    rows = problem.target.shape.numel()
    return torch.full((rows,), problem.options.ignore_index + 1, dtype=torch.int64, device=problem.target.device)


def _tensor(value):
    return value if isinstance(value, torch.Tensor) else None


def _local(value):
    return value.to_local() if is_dtensor(value) else value


def _flat(index: int, value, target, shape):
    """A row tensor as (N, ...), a () tensor or a number as it is. Raises TypeError or ValueError by its position."""
    name, dims = f"row_tensors[{index}]", 0 if shape is None else len(shape)
    if not isinstance(value, torch.Tensor):
        number = python_scalar(value)
        if not isinstance(number, (bool, int, float)):
            raise TypeError(f"{name} must be a tensor or a number, got {type(value)}")
        return number
    if is_dtensor(value):
        raise TypeError(f"{name} is a DTensor: pass {name}.full_tensor(), the same on every rank")
    if not isinstance(target, torch.Tensor) or not value.dim():
        return value
    if value.shape[:dims] != shape:
        raise ValueError(
            f"{name} must have target's shape {tuple(shape)}, or more dimensions behind it, got {tuple(value.shape)}: "
            f"expand what several rows share"
        )
    if value.device != target.device:
        raise ValueError(f"{name} must be on target's device {target.device}, got {value.device}")
    return value if dims == 1 else value.reshape(-1, *value.shape[dims:])

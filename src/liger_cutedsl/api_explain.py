"""What a call would do, without doing it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace

import torch

from liger_cutedsl.api_row_loss import reads_of, row_loss_of
from liger_cutedsl.call import TENSORS, Problem, WantedGradients, planned_device
from liger_cutedsl.checks import check_tensors
from liger_cutedsl.compat import FakeTensorMode
from liger_cutedsl.options import LogitOptions, LogProbOptions, LossOptions, RowLossOptions, suggesting
from liger_cutedsl.route import Route, Settings
from liger_cutedsl.routing import planned as planned_route
from liger_cutedsl.row_check import known_reads
from liger_cutedsl.row_function import OPTIONAL
from liger_cutedsl.rows import TargetCheck
from liger_cutedsl.sampling import tile_count
from liger_cutedsl.schedules import kept_shares, sampled
from liger_cutedsl.schedules.schedule import Task
from liger_cutedsl.split import WHOLE, PlannedShare, Split
from liger_cutedsl.weight_grad_buffer import WeightGradBuffer
from liger_cutedsl.without_data import planned, shapes_only

_OPERATORS = {
    LossOptions: "fused_linear_cross_entropy",
    LogProbOptions: "fused_linear_log_probs",
    RowLossOptions: "fused_linear_loss",
}


@suggesting
def explain(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor | None = None,
    *,
    row_loss: Callable | None = None,
    row_tensors: tuple = (),
    log_probs: bool = False,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    selected_token_ids: torch.Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    use_token_scaling: bool = False,
    accum_dtype: torch.dtype | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    return_gradient_sampling: bool = False,
    return_log_probs: bool = False,
    return_entropy: bool = False,
    return_log_sum_sq_probs: bool = False,
    return_mean_logits: bool = False,
    return_is_top1: bool = False,
    weight_grad_buffer: torch.Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    gradient_sampling: float | None = None,
    engine: str | None = None,
    schedule: str | None = None,
    workspace_mb: float | None = None,
    split: bool = False,
) -> Route:
    """The route a call would take with these arguments, without running anything: of fused_linear_cross_entropy; with
    log_probs=True, of fused_linear_log_probs; with a row_loss, of fused_linear_loss(x, weight, target, row_loss,
    *row_tensors), whose function is called on made-up values as in its first call.

    split: the route of the operator's vocab_parallel form, with weight, bias and ce_weight this rank's rows, if all
        ranks had as much room; Route.chunk_limit is what they would have to agree on. No process group is needed.

    Takes tensors without data too: fake ones, and meta ones, which are taken for the GPU's where there is one, else for
    the CPU's; a row_loss that was not called with such row tensors before is then taken to read every statistic. target
    may be left out, for one without ignored entries; a given one is read, as a call does. (While a CUDA graph is
    captured, it cannot be read, and a float16 mean takes `recompute`.)

    Raises TypeError for an option that the operator does not have, and as the operator does.
    """
    given = {name: value for name, value in locals().items() if name in _DEFAULTS}
    kind = RowLossOptions if row_loss is not None else LogProbOptions if log_probs else LossOptions
    options, shape = _options(kind, given), x.shape[:-1]
    x = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    dense = target is None
    if dense:
        with FakeTensorMode():  # nothing is allocated
            target = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    elif target.dim() != 1:
        target = target.reshape(-1)
    buffer = WeightGradBuffer.of(weight, weight_grad_buffer, gradient_accumulation_fusion)
    problem = Problem(x, weight, target, bias, ce_weight, options, dense, selected_token_ids=selected_token_ids)
    problem = replace(problem, weight_grad_buffer=buffer)
    check_tensors(problem)
    if row_loss is not None:
        problem = replace(problem, row_loss=row_loss_of(row_loss, row_tensors, (x, weight, target, bias), shape))
        problem = replace(problem, options=options.reading(_read(problem)))
    if log_probs and gradient_sampling is not None:
        raise TypeError("gradient_sampling is no argument of fused_linear_log_probs")
    settings = Settings.resolve(engine, schedule, workspace_mb, gradient_sampling=gradient_sampling)
    share = PlannedShare() if split else WHOLE
    route = _explained(planned(problem), WantedGradients.of(problem), settings, share)
    kept = kept_shares.known(problem, settings.gradient_sampling)
    if route.schedule == sampled.NAME and kept is not None:
        route = replace(route, expected_pairs=round(kept * problem.tokens * tile_count(problem.vocab)))
    if not x.is_meta:
        return route
    return replace(route, reason=f"{route.reason} (meta tensors, taken for {planned_device(x.device).type}'s)")


_TENSORS = ("x", "weight", "target", "bias")
_SETTINGS = ("engine", "schedule", "workspace_mb", "split")
_SETTINGS += ("weight_grad_buffer", "gradient_accumulation_fusion", "gradient_sampling")
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(explain).parameters.items()
    if name not in (*_TENSORS, *_SETTINGS)
}
# What belongs to one operator and is no field of its options.
_BESIDE = {
    LossOptions: ("ce_weight",),
    LogProbOptions: ("log_probs", "selected_token_ids"),
    RowLossOptions: ("row_loss", "row_tensors"),
}


def _options(kind: type[LogitOptions], given: dict) -> LogitOptions:
    """Those of the operator. Raises TypeError for what was given beside them."""
    names = [field.name for field in fields(kind) if field.name in given]
    for name, value in given.items():
        foreign = name not in (*names, *_BESIDE[kind])
        if foreign and value is not _DEFAULTS[name] and (isinstance(value, torch.Tensor) or value != _DEFAULTS[name]):
            raise TypeError(f"{name} is no argument of {_OPERATORS[kind]}")
    return kind(**{name: given[name] for name in names})


def _read(problem: Problem) -> frozenset[str]:
    """What the function reads, where rows can be looked at; else what is known of it, or everything."""
    if shapes_only(problem.x, problem.weight, None, problem.bias, None, None):
        read = known_reads(problem.row_loss)
        return frozenset(OPTIONAL) if read is None else read
    if problem.dense:
        counts = problem.options.ignore_index + 1
        problem = replace(
            problem, target=torch.full((problem.tokens,), counts, dtype=torch.int64, device=problem.device)
        )
    return reads_of(problem)


def _explained(problem: Problem, wanted: WantedGradients, settings: Settings, split: Split) -> Route:
    """The route that autograd.begun takes, of a checked problem: where no row is dropped, or as these targets say."""
    if problem.dense or shapes_only(*(getattr(problem, name) for name in TENSORS)):
        return planned_route(Task(replace(problem, dense=True), wanted, settings, split))[1]
    check = TargetCheck(problem, split.vocab)
    rows = check.rows()
    if not check.readable:
        part = replace(problem, dense=problem.tokens == 0, count=None)
    elif rows.keep is None:
        part = check.whole()
    else:
        part = replace(problem.of(slice(len(rows.keep))), dense=True)
    return planned_route(Task(part, wanted, settings, split, dropped=rows.dropped, beside=rows.bytes(problem)))[1]

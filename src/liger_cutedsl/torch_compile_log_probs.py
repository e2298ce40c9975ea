"""The log-probabilities inside torch.compile: custom ops that a graph holds as one node each, forward and backward.

Their upstream gradients are known in backward alone, so forward returns row statistics besides the results, and
backward computes the gradients from them (`recompute`), as torch_compile.py's ops do for reduction="none".
"""

from __future__ import annotations

from dataclasses import replace

import torch

from liger_cutedsl.autograd import Call, begun, forward_of, gradients_of, with_fallback
from liger_cutedsl.call import DIFFERENTIABLE, TENSORS, Gradients, WantedGradients
from liger_cutedsl.checks import check_tensors
from liger_cutedsl.custom_ops import (
    TENSORS_SCHEMA,
    Arguments,
    as_described,
    call_schema,
    call_values,
    defaults_of,
    define,
    empty_results,
)
from liger_cutedsl.derivatives import refuse_second_derivative
from liger_cutedsl.log_probs import DIFFERENTIABLE as DIFFERENTIABLE_RESULTS
from liger_cutedsl.log_probs import LogProbs
from liger_cutedsl.objective import row_weights
from liger_cutedsl.options import LogProbOptions
from liger_cutedsl.row_statistics import RowStatistics
from liger_cutedsl.schedules import recompute

_DEFAULTS, _CALL = defaults_of(LogProbOptions), call_schema(LogProbOptions)
SAVED = ("lse", "target_logit", "entropy", "selected")  # row statistics that backward reads


class _Arguments(Arguments):
    """The arguments of fllp."""

    def results(self) -> dict[str, tuple | None]:
        """(shape, dtype) of what fllp returns, None for what there is not: of the real results and of the fake ones."""
        problem, options, dtype = self.problem, self.problem.options, self.problem.compute_dtype
        rows, ids = tuple(problem.target.shape), problem.selected_token_ids
        selected = None if ids is None else ((*rows, ids.shape[0]), dtype)
        per_row, later = (rows, dtype), bool(self.wanted)
        return {
            "log_probs": per_row,
            "entropy": per_row if options.return_entropy else None,
            "selected_log_probs": selected,
            "log_sum_sq_probs": per_row if options.return_log_sum_sq_probs else None,
            "mean_logits": per_row if options.return_mean_logits else None,
            "is_top1": (rows, torch.bool) if options.return_is_top1 else None,
            "lse": per_row if later else None,
            "target_logit": per_row if later else None,
            "row_entropy": per_row if later and options.return_entropy else None,
            "selected": selected if later else None,
        }


def run_compiled_log_probs(tensors, options: dict, engine, schedule, workspace_mb, replaces="") -> LogProbs:
    """autograd.run for tensors in the order of TENSORS, written so that torch.compile can trace it. replaces: words for
    the original that a drop-in takes the place of: its workspace is that one's."""
    named = dict(zip(TENSORS, tensors, strict=True))
    values = call_values(_DEFAULTS | options, named, engine, schedule, workspace_mb, 1, replaces)
    log_probs, entropy, selected, log_sum_sq, mean, top1, *_ = FLLP(*tensors, *values)
    return LogProbs(
        log_probs,
        entropy if options.get("return_entropy") else None,
        None if named["selected_token_ids"] is None else selected,
        log_sum_sq if options.get("return_log_sum_sq_probs") else None,
        mean if options.get("return_mean_logits") else None,
        top1 if options.get("return_is_top1") else None,
    )


def _fllp(*arguments):
    """The results of _Arguments.results."""
    call = _Arguments.of(LogProbOptions, *arguments)
    with call.context(), torch.no_grad():
        check_tensors(call.problem)
        call = call.with_data()
        results, stats = with_fallback(call.settings, lambda: begun(_forward, call.problem, call.settings, call.wanted))
    return as_described(call.problem.x, call.results(), (*results, *stats))


def _forward(call: Call):
    rows, call = call.rows, replace(call, route=replace(call.route, kept=0)).with_task(wanted=WantedGradients())
    results, state = forward_of(call)
    saved = (getattr(state.stats, name) for name in SAVED)
    return results, [None if v is None else rows.spread(v, 0.0) for v in saved]


def _fllp_fake(*arguments):
    call = _Arguments.of(LogProbOptions, *arguments)
    with call.context():
        check_tensors(call.problem)
        return empty_results(call.problem.x, call.results())


def _fllp_backward(of_log_probs, of_entropy, of_selected, lse, target_logit, entropy, selected, *arguments):
    """(dx, dW, db) for the upstream gradients, each (N,), or (N, K) of the selected columns, or None."""
    call = _Arguments.of(LogProbOptions, *arguments)

    def use(begun_call: Call):
        task, rows = begun_call.task, begun_call.rows
        begun_call = replace(begun_call, route=replace(begun_call.route, kept=0))
        saved = (lse, target_logit, entropy, selected)
        stats = RowStatistics(**{n: None if v is None else rows.select(v) for n, v in zip(SAVED, saved, strict=True)})
        # nothing is divided by the number of rows that count: it need not be waited for
        weights = row_weights(replace(task.problem, count=None))
        upstream = LogProbs(of_log_probs, of_entropy, of_selected)
        return gradients_of(begun_call, recompute.RecomputeState(stats, weights), upstream)

    with call.context(), torch.no_grad():
        check_tensors(call.problem)
        call = call.with_data()
        found = begun(use, call.problem, call.settings, call.wanted)
        return as_described(call.problem.x, call.gradients(call.wanted), found)


def _fllp_backward_fake(of_log_probs, of_entropy, of_selected, lse, target_logit, entropy, selected, *arguments):
    call = _Arguments.of(LogProbOptions, *arguments)
    return empty_results(call.problem.x, call.gradients(call.wanted))


def _setup_context(ctx, inputs, output):
    call = _Arguments.of(LogProbOptions, *inputs)
    ctx.wanted, ctx.call = call.wanted, inputs[len(TENSORS) :]
    ctx.set_materialize_grads(False)
    found = dict(zip(call.results(), output, strict=True))
    there = {name for name, result in call.results().items() if result is not None}
    ctx.mark_non_differentiable(*(v for n, v in found.items() if n not in DIFFERENTIABLE_RESULTS or n not in there))
    saved = ("lse", "target_logit", "row_entropy", "selected")
    ctx.save_for_backward(*(found[name] if name in there else None for name in saved), *inputs[: len(TENSORS)])


def _backward(ctx, *upstream):
    computed = dict.fromkeys(TENSORS)
    if any(gradient is not None for gradient in upstream[:3]):
        gradients: Gradients = FLLP_BACKWARD(*upstream[:3], *ctx.saved_tensors, *ctx.call)
        wanted = zip(DIFFERENTIABLE, gradients, ctx.wanted, strict=True)
        computed |= {name: g for name, g, dtype in wanted if dtype is not None}
    return *computed.values(), *([None] * len(ctx.call))


FLLP = define(
    "fllp",
    f"({TENSORS_SCHEMA}, {_CALL}) -> ({', '.join(['Tensor'] * 10)})",
    _fllp,
    _fllp_fake,
    _backward,
    _setup_context,
)
FLLP_BACKWARD = define(
    "fllp_backward",
    "(Tensor? of_log_probs, Tensor? of_entropy, Tensor? of_selected, Tensor lse, Tensor target_logit, Tensor? entropy, "
    f"Tensor? selected, {TENSORS_SCHEMA}, {_CALL}) -> (Tensor, Tensor, Tensor)",
    _fllp_backward,
    _fllp_backward_fake,
    refuse_second_derivative,
)

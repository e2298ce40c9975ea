"""The entrances: Liger-Kernel's autograd class, and a keyword function for everyone else."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_cutedsl.autograd import run
from liger_cutedsl.objective import LossOutput
from liger_cutedsl.options import LossOptions, python_scalar
from liger_cutedsl.problem import Problem, check_tensors, is_dtensor, planned_device, wanted_gradients
from liger_cutedsl.routing import Route, Settings, choose_route
from liger_cutedsl.torch_compile import run_compiled
from liger_cutedsl.without_data import planned, shapes_only


def fused_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    engine: str | None = None,
    schedule: str | None = None,
    workspace_mb: float | None = None,
    **options,
) -> torch.Tensor | LossOutput:
    """Cross entropy of the logits x @ weight.T + bias, without storing the logits.

    x: (..., H), bfloat16, float16, float32 or float64.  weight: (V, H), of x's dtype (or any under autocast).
    target: (...), int64 or int32, in [0, V) or ignore_index.  bias, ce_weight: (V,), floating point.
    options: the fields of liger_cutedsl.LossOptions by name (reduction="mean", label_smoothing=0.0, …).
    engine, schedule, workspace_mb: see liger_cutedsl.routing.Settings.

    Returns the loss, float32 (float64 for float64 inputs): a scalar, or target's shape for reduction="none";
    a LossOutput where a metric is asked for (return_z_loss, return_token_accuracy, return_predicted_tokens).
    Gradients reach x, weight and bias, each only if it requires one; they come in their parameter's dtype.

    Raises TypeError or ValueError naming the argument; RuntimeError where a forced engine cannot run the call.
    """
    shape = getattr(target, "shape", None)
    plain = isinstance(x, torch.Tensor) and isinstance(target, torch.Tensor) and not is_dtensor(x)
    if plain and x.dim() != 2:
        if x.shape[:-1] != target.shape:
            raise ValueError(
                f"target must have shape {tuple(x.shape[:-1])}, one target for each row of x "
                f"{tuple(x.shape)}, got {tuple(target.shape)}"
            )
        x, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    route = dict(engine=engine, schedule=schedule, workspace_mb=workspace_mb)
    tensors = (x, weight, target, bias, ce_weight)
    if plain and not is_dtensor(weight) and (torch.compiler.is_compiling() or shapes_only(*tensors)):
        _check_traceable(options)
        return run_compiled(*tensors, **route, **options).result(shape)
    problem = Problem(*tensors, LossOptions(**options))
    return run(problem, Settings.resolve(**route)).result(shape)


class LigerFusedLinearCrossEntropyFunction:
    """Liger-Kernel's class of this name: the same positional arguments, the same four results.

    apply(_input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
    softcap, return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
    ce_impl, ce_mode, chunk_mem_const) → (loss, z_loss, token_accuracy, predicted_tokens), None where not asked
    for. _input is (N, H), weight (V, H), target (N,). ce_impl and ce_mode choose between Liger's own inner
    kernels and are ignored here; chunk_mem_const multiplies the workspace budget.
    """

    supports_inner_impl_dispatch = True

    @classmethod
    def apply(
        cls,
        _input,
        weight,
        target,
        bias=None,
        ce_weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        accum_dtype=None,
        use_token_scaling=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
        ce_impl=None,
        ce_mode=None,
        chunk_mem_const=1,
    ):
        options = dict(
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            use_token_scaling=use_token_scaling,
            accum_dtype=accum_dtype,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
        tensors = (_input, weight, target, bias, ce_weight)
        plain = not (is_dtensor(weight) or is_dtensor(_input))
        if plain and (torch.compiler.is_compiling() or shapes_only(*tensors)):
            _check_traceable(dict(options, chunk_mem_const=chunk_mem_const))
            return tuple(run_compiled(*tensors, chunk_mem_const=chunk_mem_const, **options))
        problem = Problem(*tensors, LossOptions(**options))
        return tuple(run(problem, Settings.resolve(chunk_mem_const=python_scalar(chunk_mem_const))))


def _check_traceable(options) -> None:
    """Under torch.compile numpy's scalars are tensors, and a graph holds no option that is one: without fullgraph=True
    the error makes torch.compile run this call by itself, between two graphs."""
    for name, value in options.items():
        if value is not None and not isinstance(value, (bool, int, float, str, torch.dtype)):
            raise TypeError(
                f"{name} must be a Python number inside torch.compile(fullgraph=True), as numpy's .item() gives"
            )


def explain(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    engine: str | None = None,
    schedule: str | None = None,
    workspace_mb: float | None = None,
    **options,
) -> Route:
    """The route fused_linear_cross_entropy would take with these arguments, without running anything.

    Takes tensors without data too: fake ones, and meta ones, which are taken for the GPU's where there is one, else for
    the CPU's. target may be left out. (While a CUDA graph is captured, targets cannot be read, and a float16 mean
    takes `recompute`.)
    """
    x = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    if target is None:
        with FakeTensorMode():  # nothing is allocated
            target = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    elif target.dim() != 1:
        target = target.reshape(-1)
    problem = Problem(x, weight, target, bias, ce_weight, LossOptions(**options), dense=True)
    check_tensors(problem)
    wanted, settings = wanted_gradients(problem), Settings.resolve(engine, schedule, workspace_mb)
    route = choose_route(planned(problem), wanted, settings)
    if not x.is_meta:
        return route
    return replace(route, reason=f"{route.reason} (meta tensors, taken for {planned_device(x.device).type}'s)")

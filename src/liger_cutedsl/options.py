"""The options of a call in one frozen object, checked once at the entrance: of the loss, or of log-probabilities."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import ParamSpec, TypeVar

import torch

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class LogitOptions:
    """What logits are, and which rows count; and what a call has that lacks an option of the loss.

    ignore_index: rows with this target contribute nothing.
    softcap, temperature T, logit_scale s: with u = s·(x·W + b), logits are (softcap/T)·tanh(u/softcap), or u/T for
        softcap=None. T > 0 divides last, as samplers do; s may be any finite number.

    numpy's scalars are taken for the Python numbers that they are.
    Raises TypeError or ValueError naming the option, what came and what is accepted.
    """

    ignore_index: int = -100
    softcap: float | None = None
    temperature: float = 1.0
    logit_scale: float = 1.0

    label_smoothing, lse_square_scale, use_token_scaling, accum_dtype = 0.0, 0.0, False, None
    reduction, return_gradient_sampling = "none", False

    def __post_init__(self):
        for name, value in list(vars(self).items()):
            if (plain := python_scalar(value)) is not value:
                object.__setattr__(self, name, plain)
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise TypeError(f"ignore_index must be an int, got {self.ignore_index!r}")
        if self.softcap is not None:
            _check_number("softcap", self.softcap)
            if self.softcap <= 0:
                raise ValueError(f"softcap must be None or greater than 0, got {self.softcap!r}")
        _check_number("temperature", self.temperature)
        if self.temperature <= 0:
            raise ValueError(f"temperature must be greater than 0, got {self.temperature!r}")
        _check_number("logit_scale", self.logit_scale)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise TypeError(f"{field.name} must be True or False, got {value!r}")

    @property
    def scale(self) -> float:
        """s/T: logits are scale·(x·W + b), capped at `cap`. The derivative of u/T by x·W, and so of products of dz."""
        return self.logit_scale / self.temperature

    @property
    def cap(self) -> float | None:
        """softcap/T: z = cap·tanh((u/T)/cap)."""
        return None if self.softcap is None else self.softcap / self.temperature

    @property
    def smoothing(self) -> bool:
        return self.label_smoothing > 0.0

    @property
    def needs_slope_apart(self) -> bool:
        """Whether dz takes the softcap's slope and the exponential apart, so that their product does not do."""
        return self.softcap is not None and (self.needs_weighted_sum or self.needs_entropy)

    @property
    def needs_weighted_sum(self) -> bool:
        """Σ_v w_v z_v."""
        return self.smoothing

    @property
    def needs_argmax(self) -> bool:
        return False

    @property
    def needs_entropy(self) -> bool:
        return False

    @property
    def needs_sum_sq(self) -> bool:
        """Σ_v p_v²."""
        return False

    @property
    def needs_moments(self) -> bool:
        """Whether the sums of a tile's exponentials are kept relative to its maximum, rather than their logarithm."""
        return self.needs_entropy or self.needs_sum_sq


@dataclass(frozen=True)
class LossOptions(LogitOptions):
    """Options of fused linear + cross entropy, under Liger-Kernel's names; and LogitOptions'.

    lse_square_scale: λ of the z-loss λ·lse², added to the loss; not scaled by class weights.
    label_smoothing: ε in [0, 1], the share of the target mass spread over the vocabulary.
    reduction: "mean" (over rows, weighted by class weights as in torch), "sum" or "none" (one loss a row).
    use_token_scaling: multiply each row's loss by its detached target probability.
    accum_dtype: dtype in which dW and db are summed where a schedule sums them piecewise.
    return_z_loss, return_token_accuracy, return_predicted_tokens, return_gradient_sampling: metrics to compute besides
        the loss.
    """

    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    use_token_scaling: bool = False
    accum_dtype: torch.dtype | None = None
    return_z_loss: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False
    return_gradient_sampling: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {self.reduction!r}")
        _check_number("lse_square_scale", self.lse_square_scale)
        _check_number("label_smoothing", self.label_smoothing)
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must lie in [0, 1], got {self.label_smoothing!r}")
        floating = isinstance(self.accum_dtype, torch.dtype) and self.accum_dtype.is_floating_point
        if self.accum_dtype is not None and not floating:
            raise TypeError(f"accum_dtype must be None or a floating torch.dtype, got {self.accum_dtype!r}")

    @classmethod
    def from_arguments(cls, arguments: Mapping) -> LossOptions:
        """Picks the options out of a function's arguments, such as its locals(); the default where one is missing."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls) if field.name in arguments})

    @property
    def needs_argmax(self) -> bool:
        return self.return_token_accuracy or self.return_predicted_tokens


@dataclass(frozen=True)
class LogProbOptions(LogitOptions):
    """Options of fused linear + log-probabilities: LogitOptions', and what to return besides."""

    return_entropy: bool = False
    return_log_sum_sq_probs: bool = False
    return_mean_logits: bool = False
    return_is_top1: bool = False

    @property
    def needs_weighted_sum(self) -> bool:
        return self.return_mean_logits

    @property
    def needs_argmax(self) -> bool:
        return self.return_is_top1

    @property
    def needs_entropy(self) -> bool:
        return self.return_entropy

    @property
    def needs_sum_sq(self) -> bool:
        return self.return_log_sum_sq_probs


@dataclass(frozen=True)
class RowLossOptions(LogitOptions):
    """Options of a loss of the caller's own: LogitOptions', how rows are summed, what to return besides.

    reduction: "mean" (over the rows that are not ignored) or "sum".
    reads_entropy, reads_mean_logit, reads_argmax: what its function looks at, beside log p and lse.
    """

    reduction: str = "mean"
    return_log_probs: bool = False
    return_entropy: bool = False
    reads_entropy: bool = False
    reads_mean_logit: bool = False
    reads_argmax: bool = False

    def reading(self, names: Collection[str]) -> RowLossOptions:
        """The same for a function that reads these statistics; the other options are not checked again."""
        other = copy.copy(self)
        vars(other).update({f"reads_{name}": True for name in names})
        return other

    def __post_init__(self):
        super().__post_init__()
        if self.reduction not in ("mean", "sum"):
            raise ValueError(
                f"reduction must be 'mean' or 'sum', got {self.reduction!r}: any other weight of a row is a row tensor "
                f"that row_loss multiplies by, and a value for each row comes from fused_linear_log_probs"
            )

    @property
    def needs_weighted_sum(self) -> bool:
        return self.reads_mean_logit

    @property
    def needs_argmax(self) -> bool:
        return self.reads_argmax

    @property
    def needs_entropy(self) -> bool:
        return self.return_entropy or self.reads_entropy


_Arguments, _Result = ParamSpec("_Arguments"), TypeVar("_Result")


def suggesting(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, with a TypeError for an unknown keyword that names the nearest known one."""
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*arguments, **keywords):
        for name in keywords:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
                raise TypeError(f"{function.__name__} has no argument {name!r}: did you mean {near[0]!r}?")
        return function(*arguments, **keywords)

    return checked


def python_scalar(value):
    """A numpy scalar (np.float32, np.int64, np.bool_, …) as the Python number it is; anything else as it came."""
    numpy = sys.modules.get("numpy")  # where it was never imported, nothing is one of its scalars
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _check_number(name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{name} must be a finite number, got {value!r}")

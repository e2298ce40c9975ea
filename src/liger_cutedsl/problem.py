"""Problem: the tensors and options of a call, checked against each other before anything is computed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from liger_cutedsl.options import LossOptions
from liger_cutedsl.readable import check_readable

TENSORS = ("x", "weight", "target", "bias", "ce_weight")
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Problem:
    """x (N, H), weight (V, H), target (N,) of int64 or int32, bias (V,) or None, ce_weight (V,) or None.

    dense: no target is ignored, known without looking at them.
    """

    x: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None = None
    ce_weight: torch.Tensor | None = None
    options: LossOptions = LossOptions()
    dense: bool = False

    @property
    def tokens(self) -> int:
        return self.x.shape[0]

    @property
    def hidden(self) -> int:
        return self.x.shape[1]

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of logits, losses and row vectors: float64 for float64 inputs, else float32."""
        return torch.float64 if self.x.dtype == torch.float64 else torch.float32

    def ignored(self) -> torch.Tensor:
        """(N,) bool: which targets are ignore_index. None is, where their dtype does not hold that number."""
        info = torch.iinfo(self.target.dtype)
        if not info.min <= self.options.ignore_index <= info.max:  # compared as it is, it would wrap around
            return torch.zeros_like(self.target, dtype=torch.bool)
        return self.target == self.options.ignore_index

    def of(self, rows: slice) -> Problem:
        """The same for a slice of the rows."""
        return replace(self, x=self.x[rows], target=self.target[rows])

    def of_columns(self, columns: slice) -> Problem:
        """The same for a slice of the vocabulary. A target elsewhere becomes −1, not an index past the slice's end: a
        kernel may take that for a column of its last, ragged tile."""
        start, stop, _ = columns.indices(self.vocab)
        return replace(
            self,
            weight=self.weight[columns],
            target=torch.where((self.target >= start) & (self.target < stop), self.target - start, -1),
            bias=None if self.bias is None else self.bias[columns],
            ce_weight=None if self.ce_weight is None else self.ce_weight[columns],
        )

    def for_kernels(self, dtype: torch.dtype) -> Problem:
        """The same problem as the kernels read it: x and weight in dtype, the vectors in the compute dtype."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        vectors = {
            name: vector.to(compute).contiguous()
            for name in ("bias", "ce_weight")
            if (vector := getattr(self, name)) is not None
        }
        if dtype == self.x.dtype == self.weight.dtype and not vectors:
            return self
        return replace(self, x=self.x.to(dtype), weight=self.weight.to(dtype), **vectors)

    @property
    def gemm_dtype(self) -> torch.dtype:
        """The dtype x and weight are multiplied in."""
        return product_dtype(self.x)


@dataclass(frozen=True)
class Gradients:
    """dx (N, H), dW (V, H), db (V,); None where not wanted."""

    x: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def each(self, change: Callable, wanted: WantedGradients) -> Gradients:
        """change(gradient, wanted dtype) of those that are there."""
        found, dtypes = (self.x, self.weight, self.bias), (wanted.x, wanted.weight, wanted.bias)
        return Gradients(*(None if g is None else change(g, d) for g, d in zip(found, dtypes, strict=True)))


@dataclass(frozen=True)
class WantedGradients:
    """Which gradients a call needs, as the dtypes they are returned in (their parameters'); None for not wanted."""

    x: torch.dtype | None = None
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None

    @classmethod
    def of(cls, problem: Problem, needs) -> WantedGradients:
        """needs: one flag each for x, weight and bias."""
        tensors = (problem.x, problem.weight, problem.bias)
        return cls(*(t.dtype if need and t is not None else None for t, need in zip(tensors, needs, strict=True)))

    def __bool__(self) -> bool:
        return any(dtype is not None for dtype in (self.x, self.weight, self.bias))

    def kept(self) -> WantedGradients:
        """The dtypes in which gradients wait for the upstream gradient: float16's in float32. They may be too small for
        float16 before a loss scale comes, or too large where a small upstream gradient would make them fit."""
        return WantedGradients(*(torch.float32 if d == torch.float16 else d for d in (self.x, self.weight, self.bias)))

    def allocate(self, problem: Problem) -> Gradients:
        """Uninitialised, contiguous gradients."""

        def empty(dtype, *shape):
            return None if dtype is None else torch.empty(shape, dtype=dtype, device=problem.device)

        return Gradients(
            empty(self.x, problem.tokens, problem.hidden),
            empty(self.weight, problem.vocab, problem.hidden),
            empty(self.bias, problem.vocab),
        )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast runs matrix products on this device, or None where it is off."""
    kind = planned_device(device).type
    if not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def planned_device(device: torch.device) -> torch.device:
    """The device itself; for meta tensors, which stand for what is to be: the GPU where there is one, else the CPU."""
    if device.type != "meta":
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def product_dtype(matrix: torch.Tensor) -> torch.dtype:
    """The dtype a matrix enters a product in: autocast's, where it is on, and float64 as it is, as in torch's linear.

    So a call computes in float64 exactly where x is float64, in whatever context its gradients are asked for.
    """
    if matrix.dtype == torch.float64:
        return torch.float64
    return autocast_dtype(matrix.device) or matrix.dtype


def wanted_gradients(problem: Problem) -> WantedGradients:
    """The gradients autograd will ask for, as seen at the entrance."""
    return WantedGradients.of(problem, gradients_needed(problem.x, problem.weight, problem.bias))


def gradients_needed(*tensors: torch.Tensor | None) -> list[bool]:
    enabled = torch.is_grad_enabled()
    return [enabled and t is not None and t.requires_grad for t in tensors]


def check_tensors(problem: Problem, empty_shard: bool = False) -> None:
    """Shapes, dtypes and devices, without reading device memory. Raises TypeError or ValueError.

    empty_shard: weight may have no rows, as a rank's share of a split vocabulary.
    """
    x, weight, target = problem.x, problem.weight, problem.target
    for name in TENSORS:
        _check_tensor(name, getattr(problem, name), optional=name in ("bias", "ce_weight"))
    if x.dim() != 2:
        raise ValueError(
            f"x must have shape (N, H), got {tuple(x.shape)}: flatten it with x.flatten(0, -2) and the "
            f"target with target.flatten(), or call liger_cutedsl.fused_linear_cross_entropy, which does"
        )
    if (
        weight.dim() != 2
        or weight.shape[1] != x.shape[1]
        or x.shape[1] == 0
        or (weight.shape[0] == 0 and not empty_shard)
    ):
        raise ValueError(
            f"weight must have shape (V, H) with V ≥ 1 and H = {x.shape[1]} ≥ 1 as in x, got {tuple(weight.shape)}"
            + (
                ": a parameter that is sharded (ZeRO-3) must be gathered around forward and backward"
                * (not weight.numel())
            )
        )
    if target.dim() != 1 or target.shape[0] != x.shape[0]:
        raise ValueError(f"target must have shape ({x.shape[0]},) as x has rows, got {tuple(target.shape)}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must be int64 or int32, got {target.dtype}")
    _check_dtypes(problem)
    for name in ("bias", "ce_weight"):
        vector = getattr(problem, name)
        if vector is not None and tuple(vector.shape) != (weight.shape[0],):
            raise ValueError(f"{name} must have shape (V,) = ({weight.shape[0]},), got {tuple(vector.shape)}")


def is_dtensor(value) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def _check_tensor(name, value, optional) -> None:
    if value is None and optional:
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor{' or None' if optional else ''}, got {type(value)}")
    if is_dtensor(value):
        raise TypeError(
            f"{name} is a DTensor, which only goes with a weight and an x that are: pass {name}.full_tensor(), of what "
            f"is trained under FSDP2 {name}.full_tensor(grad_placements=[Partial('avg')]), which sums over the ranks"
        )
    check_readable(name, value)


def _check_dtypes(problem: Problem) -> None:
    x, weight = problem.x, problem.weight
    for name, value in (("x", x), ("weight", weight)):
        if value.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} must be bfloat16, float16, float32 or float64, got {value.dtype}")
    if x.dtype != weight.dtype and weight.device == x.device and product_dtype(x) != product_dtype(weight):
        raise TypeError(
            f"x and weight must have one dtype, got {x.dtype} and {weight.dtype}: cast one of them, or call "
            f"under torch.autocast, which casts all but float64"
        )
    for name in ("weight", "target", "bias", "ce_weight"):
        value = getattr(problem, name)
        if value is None:
            continue
        if value.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {value.device}")
        if name in ("bias", "ce_weight") and not value.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {value.dtype}")

"""What travels: the problem of a call, the gradients it wants, how the user wants it run and the route it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from liger_cutedsl.options import LogitOptions, LossOptions
from liger_cutedsl.row_function import RowLoss
from liger_cutedsl.weight_grad_buffer import WeightGradBuffer

# What a call carries, with the axis that slices it: tokens or vocabulary. Slicing, compaction, casting, saving,
# checking and the custom op's schema follow from this.
TENSORS = {
    "x": "tokens",
    "weight": "vocabulary",
    "target": "tokens",
    "bias": "vocabulary",
    "ce_weight": "vocabulary",
    "selected_token_ids": "neither",
}
MATRICES, VECTORS = ("x", "weight"), ("bias", "ce_weight")
OPTIONAL = (*VECTORS, "selected_token_ids")
DIFFERENTIABLE = ("x", "weight", "bias")
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Outline:
    """What planning may know of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def numel(self) -> int:
        return self.shape.numel()

    def __getitem__(self, rows: slice) -> Outline:
        first, *others = self.shape
        return replace(self, shape=torch.Size([len(range(first)[rows]), *others]))


@dataclass(frozen=True)
class RowLossOutline:
    """That there is a loss of the caller's own."""

    def of(self, rows) -> RowLossOutline:
        return self


@dataclass(frozen=True)
class Problem:
    """x (N, H), weight (V, H), target (N,) of int64 or int32, bias (V,) or None, ce_weight (V,) or None.

    selected_token_ids: (K,) int64, columns whose logits are asked for in every row, or None.
    row_loss: a loss of the caller's own with its row tensors, where the options are RowLossOptions.
    weight_grad_buffer: what dW is added to instead of being returned, all of the weight that the caller passed.
    sampled: whether exponentials are taken a sample of: their tiles have sampling.TILE columns then.
    dense: no target is ignored, known without looking at them.
    count: gives how many targets count, once that has been read from the device, and may wait for it: asked behind the
        first GEMM. None where no target is ignored, or where the host is not to know (while a CUDA graph is captured).
    """

    x: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None = None
    ce_weight: torch.Tensor | None = None
    options: LogitOptions = LossOptions()
    dense: bool = False
    count: Callable[[], int] | None = None
    selected_token_ids: torch.Tensor | None = None
    row_loss: RowLoss | None = None
    weight_grad_buffer: WeightGradBuffer | None = None
    sampled: bool = False

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

    def valid_rows(self) -> int | None:
        """How many targets are not ignored; None where only the device knows."""
        if self.dense:
            return self.tokens
        return None if self.count is None else self.count()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are there, by name."""
        return {name: value for name in TENSORS if (value := getattr(self, name)) is not None}

    def outline(self) -> Problem:
        """What planning may know of it, hashable: Outlines for tensors; count and row_loss are there or not."""
        there = ((name, t) for name, t in vars(self).items() if isinstance(t, torch.Tensor))
        tensors = {name: Outline(t.shape, t.dtype, t.device) for name, t in there}
        buffer = self.weight_grad_buffer and self.weight_grad_buffer.outline()
        there = dict(count=self.count and True, row_loss=self.row_loss and RowLossOutline(), weight_grad_buffer=buffer)
        return replace(self, **tensors, **there)

    def of(self, rows: slice | torch.Tensor) -> Problem:
        """The same for some of the rows: a slice, or their indices."""
        if isinstance(rows, slice) and rows.indices(self.tokens) == (0, self.tokens, 1):
            return replace(self, count=None)
        part = {name: v[rows] for name, v in self.tensors().items() if TENSORS[name] == "tokens"}
        return replace(self, count=None, row_loss=self.row_loss and self.row_loss.of(rows), **part)

    def of_columns(self, columns: slice) -> Problem:
        """The same for a slice of the vocabulary. A target elsewhere becomes −1, not an index past the slice's end: a
        kernel may take that for a column of its last, ragged tile."""
        start, stop, _ = columns.indices(self.vocab)
        sliced = {name: v[columns] for name, v in self.tensors().items() if TENSORS[name] == "vocabulary"}

        def moved(ids):
            return None if ids is None else torch.where((ids >= start) & (ids < stop), ids - start, -1)

        return replace(self, **sliced, target=moved(self.target), selected_token_ids=moved(self.selected_token_ids))

    def columns_for_kernels(self, columns: slice, dtype: torch.dtype) -> Problem:
        """The same for a slice of the vocabulary, as the kernels read it that do not look at targets."""
        sliced = {name: v[columns] for name, v in self.tensors().items() if TENSORS[name] == "vocabulary"}
        return replace(self, **sliced).for_kernels(dtype)

    def casts_bytes(self, dtype: torch.dtype, columns: int) -> int:
        """What for_kernels allocates, with so many rows of weight at once."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        to = {**dict.fromkeys(MATRICES, dtype), **dict.fromkeys(VECTORS, compute)}
        cast = [(name, v.numel(), to[name]) for name, v in self.tensors().items() if name in to and v.dtype != to[name]]
        rows = min(columns, self.vocab)
        return sum((rows * self.hidden if name == "weight" else size) * dtype.itemsize for name, size, dtype in cast)

    def for_kernels(self, dtype: torch.dtype, but: tuple[str, ...] = ()) -> Problem:
        """The same problem as the kernels read it: x and weight in dtype, the vectors in the compute dtype.

        but: what stays as it is: a weight that is too large to be copied as a whole.
        """
        if dtype == self.x.dtype == self.weight.dtype and self.bias is None and self.ce_weight is None:
            return self
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        there = self.tensors()
        cast = {name: there[name].to(dtype) for name in MATRICES if name not in but}
        cast |= {name: there[name].to(compute).contiguous() for name in VECTORS if name in there}
        return replace(self, **cast)

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

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter((self.x, self.weight, self.bias))

    def each(self, change: Callable, wanted: WantedGradients) -> Gradients:
        """change(gradient, wanted dtype) of those that are there."""
        return Gradients(*(None if g is None else change(g, d) for g, d in zip(self, wanted, strict=True)))


@dataclass(frozen=True)
class WantedGradients:
    """Which gradients a call needs, as the dtypes they are returned in (their parameters', or that of a buffer to which
    dW is added); None for not wanted."""

    x: torch.dtype | None = None
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None

    @classmethod
    def of(cls, problem: Problem, needs=None) -> WantedGradients:
        """needs: one flag each for x, weight and bias; those that autograd will ask for, as seen now, if None."""
        tensors = [getattr(problem, name) for name in DIFFERENTIABLE]
        needs = gradients_needed(*tensors) if needs is None else needs
        wanted = cls(*(t.dtype if need and t is not None else None for t, need in zip(tensors, needs, strict=True)))
        if wanted.weight is None or problem.weight_grad_buffer is None:
            return wanted
        return replace(wanted, weight=problem.weight_grad_buffer.tensor.dtype)

    def __iter__(self) -> Iterator[torch.dtype | None]:
        return iter((self.x, self.weight, self.bias))

    def __bool__(self) -> bool:
        return any(dtype is not None for dtype in self)

    def kept(self) -> WantedGradients:
        """The dtypes in which gradients wait for the upstream gradient: float16's in float32. They may be too small for
        float16 before a loss scale comes, or too large where a small upstream gradient would make them fit."""
        return WantedGradients(*(torch.float32 if dtype == torch.float16 else dtype for dtype in self))

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


def gradients_needed(*tensors: torch.Tensor | None) -> list[bool]:
    enabled = torch.is_grad_enabled()
    return [enabled and t is not None and t.requires_grad for t in tensors]


def is_dtensor(value) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)

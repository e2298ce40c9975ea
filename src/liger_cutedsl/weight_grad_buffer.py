"""dW into a tensor of the caller's: what it is, how much of one backward it has got, and that nothing is added twice.

A backward that ran out of memory may be tried again, and one in which a kernel failed goes on without it. Each product
writes its rows of the buffer or raises before it does; so it is noted how many rows have theirs, and what comes after a
failure begins behind them, for the same upstream gradient.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass

import torch

from liger_cutedsl.compat import has_saved_tensor_hooks
from liger_cutedsl.readable import has_memory
from liger_cutedsl.user_warnings import warn_user


@dataclass(frozen=True)
class BufferOutline:
    """What planning may know of a buffer: its name, and why nothing may be added to it before backward, or None."""

    name: str
    not_in_forward: str | None

    def outline(self) -> BufferOutline:
        return self


class WeightGradBuffer:
    """tensor (V, H), shaped as weight, of float32 or weight's dtype: dW is added to it, and weight gets no gradient.

    name: what the caller calls it.  parameter: the weight, where its grad_added_to_main_grad says that it was added;
    else None.
    """

    def __init__(self, tensor: torch.Tensor, name: str, parameter: torch.Tensor | None = None):
        self.tensor, self.name, self.parameter = tensor, name, parameter
        self.forward_began = False
        self._begin(None)

    @classmethod
    def of(cls, weight, buffer, fusion: bool) -> WeightGradBuffer | None:
        """buffer: an entrance's weight_grad_buffer.  fusion: its gradient_accumulation_fusion, for weight.main_grad.

        Megatron-Core's optimizer reads weight.main_grad, and its data-parallel wrapper gives parameters a
        grad_added_to_main_grad, by which it sees that there is nothing to add. It is set where it is there.
        Raises TypeError or ValueError; what the tensors are is checked with the others.
        """
        if not isinstance(fusion, bool):
            raise TypeError(f"gradient_accumulation_fusion must be True or False, got {fusion!r}")
        if buffer is None and not fusion:
            return None
        if buffer is not None and fusion:
            raise ValueError(
                "weight_grad_buffer and gradient_accumulation_fusion=True name two places for one gradient: pass one"
            )
        if isinstance(weight, torch.Tensor) and not weight.requires_grad:
            raise ValueError(
                f"{'gradient_accumulation_fusion=True' if fusion else 'weight_grad_buffer'} is for a weight that "
                f"requires a gradient, and this one does not: nothing would be added"
            )
        if not fusion:
            return cls(buffer, "weight_grad_buffer")
        if getattr(weight, "main_grad", None) is None:
            raise ValueError(
                "gradient_accumulation_fusion=True adds dW to weight.main_grad, and this weight has none: pass the "
                "parameter itself, or weight_grad_buffer="
            )
        return cls(weight.main_grad, "weight.main_grad", weight if hasattr(weight, "grad_added_to_main_grad") else None)

    @property
    def not_in_forward(self) -> str | None:
        """Why this call must not add before backward, where it was asked to."""
        if has_saved_tensor_hooks():
            return (
                "would get its gradient twice where forward runs twice, and saved-tensor hooks are active, as "
                "activation checkpointing has them"
            )
        if isinstance(self.tensor, torch.Tensor) and self.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return (
                "gets its gradient in forward then, and whether that is all of it is read in backward, not in a CUDA "
                "graph"
            )
        return None

    def outline(self) -> BufferOutline:
        return BufferOutline(self.name, self.not_in_forward)

    def over(self, tensor: torch.Tensor) -> WeightGradBuffer:
        """The same for this rank's part of it."""
        return WeightGradBuffer(tensor, self.name, self.parameter)

    def begins(self, upstream) -> None:
        """A backward for these upstream gradients (tensors or None) begins, or goes on after a failure.

        Raises RuntimeError where another one left a part of its gradient here, or the memory is gone.
        """
        if not has_memory(self.tensor):
            raise RuntimeError(f"{self.name}'s memory went away between forward and backward: its storage is empty")
        if self.holds_a_part and not _same(self._upstream, upstream):
            raise RuntimeError(
                f"{self.name} holds a part of the gradient of a backward that failed, and this one has another "
                f"upstream gradient: zero it, and begin the accumulation again"
            )
        self._upstream = upstream

    def row_block(self, planned: int) -> int:
        """Tokens of a block of this backward, 0 for all: as planned, or as those of the attempt before this one, by
        which its progress is counted."""
        if not self.holds_a_part:
            self._row_block = planned
        return self._row_block

    def rest(self, start: int, stop: int) -> slice:
        """Which of rows [start, stop) have nothing of this backward yet. Of a backward in blocks of tokens, these are
        counted on: the second block's begin at V."""
        return slice(min(max(start, self._rows), stop), stop)

    def added(self, stop: int) -> None:
        """All rows below stop have theirs."""
        self._rows = max(self._rows, stop)

    @property
    def lacks_selected(self) -> bool:
        """Whether that of selected columns, which comes last, is still to be added."""
        return not self._selected

    def selected_added(self) -> None:
        self._selected = True

    def finished(self) -> None:
        """The backward came to its end; another one adds again."""
        self._begin(None)
        if self.parameter is not None:
            self.parameter.grad_added_to_main_grad = True

    def _begin(self, upstream) -> None:
        self._rows, self._selected, self._upstream, self._row_block = 0, False, upstream, 0

    @property
    def holds_a_part(self) -> bool:
        """Of a backward that did not come to its end."""
        return self._rows > 0 or self._selected


def _same(one, other) -> bool:
    """Read to the host, after a failure alone."""
    pairs = list(zip(one, other, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return False
    return all(a is None or torch.equal(a, b) for a, b in pairs)


@contextlib.contextmanager
def wholly_added(buffer: WeightGradBuffer | None):
    """A forward that may add to a buffer: where it fails after it began to, its error says so. It cannot be retried."""
    if buffer is not None:
        buffer.forward_began = False
    try:
        yield
    except Exception as error:
        if buffer is None or not buffer.forward_began:
            raise
        raise RuntimeError(
            f"{buffer.name} holds a part of the gradient of a forward that failed ({type(error).__name__}: {error}): "
            f"zero it, and begin the accumulation again. schedule='recompute' adds nothing before backward"
        ) from error


@contextlib.contextmanager
def added_once(buffer: WeightGradBuffer | None):
    """A backward that adds to a buffer. Where it fails half-way, that is said: by another forward all would be added on
    top of it."""
    try:
        yield
    except BaseException:
        if buffer is not None and buffer.holds_a_part:
            warn_user(
                f"{buffer.name} holds a part of the gradient of a backward that failed: the same backward, called "
                f"again, adds the rest; for anything else zero it, and begin the accumulation again"
            )
        raise
    if buffer is not None:
        buffer.finished()


def warn_unless_used(owner: object, buffer: WeightGradBuffer) -> weakref.finalize:
    """Warns when owner goes, unless what this returns is detached before."""
    message = (
        f"a loss was dropped without a backward, and {buffer.name} keeps its gradient: schedule='single_pass' adds it "
        f"in forward. Call it under torch.no_grad() where no gradient is wanted, or take schedule='recompute'"
    )
    promise = weakref.finalize(owner, warn_user, message)
    promise.atexit = False
    return promise

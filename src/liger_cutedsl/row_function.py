"""A loss of the user's own: a function of row values, called on some rows, with its derivatives by each of them.

    row_loss(values, *row_tensors) → (n,), or ((n,), *aux)

A sum over rows of what each row alone gives has a gradient that is known as soon as the row's values are: it is asked
for with torch.autograd.grad, on vectors, while the chunk's exponentials wait for their coefficients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from liger_cutedsl.captured import refuse_captured
from liger_cutedsl.checkpointing import unseen_by_saved_tensor_hooks

STATISTICS = ("log_prob", "lse", "entropy", "mean_logit")  # that have derivatives
OPTIONAL = ("entropy", "mean_logit", "argmax")  # that cost something, and are computed where they are read


class NotComputed(Exception):
    """A function reads a statistic that it did not read before; `name` says which. The call begins again with it."""

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class RowValues:
    """What a row loss sees of its rows, each (n,) in the compute dtype.

    log_prob: log p of the target.  lse: log Σ_v exp z_v.  entropy: −Σ_v p_v log p_v, in nats.  mean_logit: Σ_v z_v / V.
    argmax: int64, the first v of the largest z_v, without gradient.
    Logits z are scaled and capped.
    """

    def __init__(self, read: set[str] | None = None, **values: torch.Tensor | None):
        self._values, self._read = values, set() if read is None else read

    def __getattr__(self, name: str) -> torch.Tensor:
        values = self.__dict__.get("_values", {})
        if name not in (*STATISTICS, "argmax"):
            raise AttributeError(
                f"a row loss has values.log_prob, .lse, .entropy, .mean_logit and .argmax, and no {name!r}"
            )
        self.__dict__["_read"].add(name)
        if values.get(name) is None:
            raise NotComputed(name)
        self.__dict__[name] = values[name]  # which Python finds by itself the next time
        return values[name]


@dataclass(frozen=True)
class Evaluated:
    """What a row loss gives for some rows, 0 in ignored ones.

    loss: (n,).  log_prob, lse, entropy, mean_logit: ∂loss/∂ of each, (n,), or None where it is 0 in all rows; anything
    in ignored rows, whose coefficients objective.py masks.
    aux: (n,) each.  gradients: ∂Σ loss/∂ of each row tensor that wants one, shaped as it: (n, …) or ().
    """

    loss: torch.Tensor | None = None
    log_prob: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    mean_logit: torch.Tensor | None = None
    aux: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def joined(pieces: list[Evaluated]) -> Evaluated:
        """That of all rows, from those of slices of them."""

        def along_rows(parts):
            return sum(parts) if parts[0].dim() == 0 else torch.cat(parts)

        def each(name):
            return tuple(along_rows(parts) for parts in zip(*(getattr(p, name) for p in pieces), strict=True))

        def derivative(name):
            parts = [getattr(piece, name) for piece in pieces]
            if all(part is None for part in parts):
                return None
            zeros = (torch.zeros_like(piece.loss) for piece in pieces)
            return torch.cat([zero if part is None else part for part, zero in zip(parts, zeros, strict=True)])

        derivatives = {name: derivative(name) for name in STATISTICS}
        loss, aux, gradients = along_rows([p.loss for p in pieces]), each("aux"), each("gradients")
        return Evaluated(loss, **derivatives, aux=aux, gradients=gradients)

    def derivatives(self) -> Evaluated:
        """What a backward needs of it."""
        return replace(self, loss=None, aux=(), gradients=())


@dataclass(frozen=True)
class RowLoss:
    """A function and what it is called with beside the rows' values.

    tensors: (N, …), of which each row has its own; () tensors and Python numbers, which all share.
    wanted: whether each of them wants a gradient.  differentiated: whether anything wants one.  watched: whether a
    gradient by anything else must not vanish, because autograd is on.
    """

    function: Callable
    tensors: tuple
    wanted: tuple[bool, ...]
    differentiated: bool
    watched: bool

    def of(self, rows: slice | torch.Tensor) -> RowLoss:
        """The same for some of the rows."""
        if not self.tensors:
            return self
        return replace(self, tensors=tuple(t[rows] if is_per_row(t) else t for t in self.tensors))

    def evaluated(self, values: dict, ignored: torch.Tensor | None, read: set[str] | None = None) -> Evaluated:
        """values: by name, (n,) each, None where not computed.  ignored: (n,) bool, or None where no row is.
        read: takes the names of the values that the function reads.

        Raises NotComputed; TypeError or ValueError for what is no loss of rows.
        """
        with unseen_by_saved_tensor_hooks(), torch.set_grad_enabled(self.watched or self.differentiated):
            shared = any(wants and not is_per_row(t) for t, wants in zip(self.tensors, self.wanted, strict=True))
            shield = self._shield(ignored, shared)
            leaves = {name: self._leaf(shield(v), True) for name in STATISTICS if (v := values[name]) is not None}
            tensors = [self._leaf(shield(t), wants) for t, wants in zip(self.tensors, self.wanted, strict=True)]
            row_values = RowValues(read, **leaves, argmax=values["argmax"])
            result = self.function(row_values, *tensors)
            loss, aux = parted(result, values["lse"].shape)
            own = [t for t, wants in zip(tensors, self.wanted, strict=True) if wants]
            if loss.requires_grad:
                refuse_captured(self.function, loss, (*leaves.values(), *own))
            by_values, by_tensors = self._gradients(loss, leaves, own, ignored, shared)
        dtype = values["lse"].dtype
        return Evaluated(
            masked(loss.detach().to(dtype), ignored),
            **by_values,
            aux=tuple(a.detach().clone() if ignored is None else masked(a.detach(), ignored) for a in aux),
            gradients=by_tensors,
        )

    def _leaf(self, value, wants: bool):
        if not isinstance(value, torch.Tensor) or not (wants or value.requires_grad):
            return value
        return value.detach().requires_grad_(self.differentiated and wants)

    def _shield(self, ignored: torch.Tensor | None, shared: bool) -> Callable:
        """What puts a counted row's numbers in ignored rows, where all share a tensor that wants a gradient: NaN in
        padding would reach it, because 0·NaN is NaN. And where torch looks for NaN. Else the identity."""
        if ignored is None or not (shared or torch.is_anomaly_enabled()) or not len(ignored):
            return lambda value: value
        counted = (~ignored).to(torch.int32).argmax().view(1)  # as an index that nobody reads on the host

        def shielded(value):
            if not is_per_row(value):
                return value
            return torch.where(_beside(ignored, value), value.index_select(0, counted), value)

        return shielded

    def _gradients(self, loss, leaves: dict, own: list, ignored, shared: bool) -> tuple[dict, tuple]:
        if not (self.differentiated and loss.requires_grad):
            return {}, tuple(torch.zeros_like(t) for t in own)
        # a row's own numbers are masked behind it, each once
        ones = masked(torch.ones_like(loss), ignored if shared else None)
        found = torch.autograd.grad(loss, (*leaves.values(), *own), ones, allow_unused=True)
        by_values = dict(zip(leaves, found, strict=False))
        none_counts = ignored.all() if shared and ignored is not None else None

        def by_tensor(tensor, gradient):
            if gradient is None:
                return torch.zeros_like(tensor)
            if tensor.dim():
                return masked(gradient, ignored)
            return gradient if none_counts is None else gradient.masked_fill(none_counts, 0.0)

        return by_values, tuple(by_tensor(t, g) for t, g in zip(own, found[len(leaves) :], strict=True))


def is_per_row(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def parted(result, shape: torch.Size) -> tuple[torch.Tensor, tuple]:
    """(loss, aux) of what a function returned. Raises TypeError or ValueError."""
    loss, *aux = result if isinstance(result, (tuple, list)) else (result,)
    for name, value in (("a loss", loss), *(("aux", a) for a in aux)):
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            got = f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(type(value))
            raise ValueError(
                f"row_loss must return one number a row, here {name} of shape {tuple(shape)}, got {got}: how rows are "
                f"summed is reduction's to say, and a loss that needs other rows takes fused_linear_log_probs"
            )
    if not loss.is_floating_point():
        raise TypeError(f"row_loss must return a floating-point loss, got {loss.dtype}")
    return loss, tuple(aux)


def of_derivatives(evaluated: Evaluated) -> RowLoss:
    """A row loss that has these derivatives, whatever the rows' values: for a forward that is run again."""
    there = {f.name: g for f in fields(evaluated) if isinstance(g := getattr(evaluated, f.name), torch.Tensor)}

    def function(values, *derivatives):
        terms = (getattr(values, name) * g for name, g in zip(there, derivatives, strict=True))
        return sum(terms, torch.zeros_like(values.lse))

    return RowLoss(function, tuple(there.values()), (False,) * len(there), True, False)


def masked(value: torch.Tensor | None, ignored: torch.Tensor | None, fill=0) -> torch.Tensor | None:
    """Per-row values (n, …), fill in ignored rows (n,)."""
    if value is None or ignored is None:
        return value
    return value.masked_fill(_beside(ignored, value), fill)


def _beside(per_row: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(n,) with as many dimensions as value (n, …) has."""
    return per_row.view(-1, *[1] * (value.dim() - 1))

"""Gradients computed in forward: kept until backward knows the upstream gradient, or added to a buffer already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from liger_cutedsl.call import Gradients, WantedGradients
from liger_cutedsl.compat import graph_is_kept
from liger_cutedsl.gemm import scale_in_place
from liger_cutedsl.weight_grad_buffer import warn_unless_used

if TYPE_CHECKING:
    from liger_cutedsl.rows import Rows
    from liger_cutedsl.weight_grad_buffer import WeightGradBuffer


@dataclass
class KeptGradients:
    """Gradients for the upstream gradient that was expected, None from when they began to be handed over; the dtypes to
    return."""

    gradients: Gradients | None
    wanted: WantedGradients
    expected: float = 1.0

    @classmethod
    def of(cls, sums: Gradients, wanted: WantedGradients, expected: float) -> KeptGradients:
        """Gradients that may be wider than they are wanted: rounded now, but float16 when the upstream gradient is
        known, because what a loss scale makes of them may fit where they do not."""
        rounded = sums.each(lambda g, dtype: g if dtype == torch.float16 else g.to(dtype), wanted)
        return cls(rounded, wanted, expected)

    def for_upstream(self, upstream: torch.Tensor, rows: Rows) -> Gradients:
        """In their rows' places and handed over, scaled in place; or scaled copies, while the graph is kept for another
        backward. What takes memory comes first: where there is none, another backward finds everything as it was.
        """
        if self.gradients is None:
            raise RuntimeError(
                "the gradients of this loss were handed over to an earlier backward, whether or not it came to an end: "
                "run forward again, or call the earlier one with retain_graph=True"
            )
        kept, in_place = graph_is_kept(), self.gradients.each(lambda g, dtype: g.dtype == dtype, self.wanted)
        factor = upstream
        if self.expected != 1.0:  # exactly 1 where it came
            factor = torch.where(upstream == self.expected, torch.ones_like(upstream), upstream / self.expected)

        def copied(gradient, dtype):
            if gradient.dtype != dtype:  # rounded once, on the way
                return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
            return gradient * factor if kept else gradient

        gradients = rows.spread_gradients(self.gradients.each(copied, self.wanted))
        if not kept:
            self.gradients = None
            names = [name for name in ("weight", "x", "bias") if getattr(in_place, name)]
            scale_in_place([getattr(gradients, name) for name in names], factor)
        return gradients


class AddedInForward:
    """What waits for backward where dW, for the upstream gradient that was expected, was added to the caller's buffer.

    kept: dX and db.  rest: the state with which `recompute` adds dW for what the upstream gradient is beyond that.
    """

    def __init__(self, kept: KeptGradients, rest, buffer: WeightGradBuffer):
        self.kept, self.rest, self._there = kept, rest, kept.expected
        self._warning = warn_unless_used(self, buffer)

    def missing(self, upstream: torch.Tensor) -> torch.Tensor | None:
        """For how much of the upstream gradient () the buffer has no dW yet; None where it has all of it. Reads one
        number from the device: two GEMMs are run or left out for it."""
        return None if float(upstream) == self._there else upstream - self._there

    def for_upstream(self, upstream: torch.Tensor, rows: Rows) -> Gradients:
        """dX and db, once the buffer has all of dW. Another backward adds all of its own."""
        gradients = self.kept.for_upstream(upstream, rows)
        self._there = 0.0
        self._warning.detach()
        return gradients

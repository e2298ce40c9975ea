"""Gradients computed in forward and kept until backward knows the upstream gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_cutedsl.gemm import scale_in_place
from liger_cutedsl.problem import Gradients, WantedGradients


@dataclass
class KeptGradients:
    """The gradients for an upstream gradient of 1, None once they were handed over; the dtypes to return them in."""

    gradients: Gradients | None
    wanted: WantedGradients

    @classmethod
    def of(cls, sums: Gradients, wanted: WantedGradients) -> KeptGradients:
        """Gradients that may be wider than they are wanted: rounded now, but float16 when the upstream gradient is
        known, because what a loss scale makes of them may fit where they do not."""
        return cls(sums.each(lambda g, dtype: g if dtype == torch.float16 else g.to(dtype), wanted), wanted)

    def for_upstream(self, factor: torch.Tensor) -> Gradients:
        """Handed over, scaled in place; or scaled copies, while the graph is kept for another backward."""
        gradients, kept = self.gradients, graph_is_kept()
        if not kept:
            self.gradients = None

        def scaled(gradient, dtype):
            if gradient.dtype != dtype:  # rounded once, on the way
                return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
            if kept:
                return gradient * factor
            scale_in_place(gradient, factor)
            return gradient

        return gradients.each(scaled, self.wanted)


def graph_is_kept() -> bool:
    """Whether the running backward leaves the graph usable (retain_graph, create_graph). False outside of one."""
    running = torch._C._current_graph_task_id() != -1
    return running and torch._C._autograd._get_current_graph_task_keep_graph()

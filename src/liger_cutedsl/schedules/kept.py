"""Gradients computed in forward and kept until backward knows the upstream gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_cutedsl.gemm import scale_in_place
from liger_cutedsl.problem import Gradients


@dataclass
class KeptGradients:
    """The gradients for an upstream gradient of 1, times scale; None once they were handed over."""

    gradients: Gradients | None
    scale: float = 1.0

    def for_upstream(self, grad_output: torch.Tensor) -> Gradients:
        """Handed over, scaled in place; or scaled copies, while the graph is kept for another backward."""
        factor = grad_output if self.scale == 1.0 else grad_output / self.scale
        gradients = self.gradients
        if graph_is_kept():
            return gradients.scaled(factor)
        self.gradients = None
        for gradient in (gradients.x, gradients.weight, gradients.bias):
            if gradient is not None:
                scale_in_place(gradient, factor)
        return gradients


def graph_is_kept() -> bool:
    """Whether the running backward leaves the graph usable (retain_graph, create_graph). False outside of one."""
    running = torch._C._current_graph_task_id() != -1
    return running and torch._C._autograd._get_current_graph_task_keep_graph()

"""Gradients computed in forward and kept until backward knows the upstream gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from liger_cutedsl.gemm import scale_in_place
from liger_cutedsl.problem import Gradients

if TYPE_CHECKING:
    from liger_cutedsl.rows import Rows


@dataclass
class KeptGradients:
    """The gradients for an upstream gradient of 1, times scale; None from when they began to be handed over."""

    gradients: Gradients | None
    scale: float = 1.0

    def for_upstream(self, grad_output: torch.Tensor, rows: Rows) -> Gradients:
        """In their rows' places and handed over, scaled in place; or scaled copies, while the graph is kept for another
        backward. What takes memory comes first: where there is none, another backward finds everything as it was.
        """
        if self.gradients is None:
            raise RuntimeError(
                "the gradients of this loss were handed over to an earlier backward, whether or not it came to an end: "
                "run forward again, or call the earlier one with retain_graph=True"
            )
        factor = grad_output if self.scale == 1.0 else grad_output / self.scale
        if graph_is_kept():
            return rows.spread_gradients(self.gradients.scaled(factor))
        gradients = rows.spread_gradients(self.gradients)
        self.gradients = None
        for gradient in (gradients.x, gradients.weight, gradients.bias):
            if gradient is not None:
                scale_in_place(gradient, factor)
        return gradients


def graph_is_kept() -> bool:
    """Whether the running backward leaves the graph usable (retain_graph, create_graph). False outside of one."""
    running = torch._C._current_graph_task_id() != -1
    return running and torch._C._autograd._get_current_graph_task_keep_graph()

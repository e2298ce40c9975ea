"""Fused linear + cross entropy on CuTe DSL GEMMs: a drop-in backend for Liger-Kernel.

    from liger_cutedsl import fused_linear_cross_entropy
    loss = fused_linear_cross_entropy(hidden_states, lm_head.weight, labels)

LIGER_KERNEL_IMPL=cutedsl makes Liger-Kernel use it; liger_cutedsl.enable() does so without the variable.
"""

from liger_cutedsl.api import (
    LigerFusedLinearCrossEntropyFunction,
    fused_linear_cross_entropy,
    vocab_parallel_fused_linear_cross_entropy,
)
from liger_cutedsl.api_explain import explain
from liger_cutedsl.api_log_probs import fused_linear_log_probs, vocab_parallel_fused_linear_log_probs
from liger_cutedsl.api_row_loss import fused_linear_loss, vocab_parallel_fused_linear_loss
from liger_cutedsl.cross_entropy import LossOutput
from liger_cutedsl.liger.switch import disable, enable
from liger_cutedsl.log_probs import LogProbs
from liger_cutedsl.options import LossOptions
from liger_cutedsl.route import Route
from liger_cutedsl.row_loss import RowLossOutput
from liger_cutedsl.versions import warn_about_untested_versions

__all__ = [
    "LigerFusedLinearCrossEntropyFunction",
    "LogProbs",
    "LossOptions",
    "LossOutput",
    "Route",
    "RowLossOutput",
    "disable",
    "enable",
    "explain",
    "fused_linear_cross_entropy",
    "fused_linear_log_probs",
    "fused_linear_loss",
    "vocab_parallel_fused_linear_cross_entropy",
    "vocab_parallel_fused_linear_log_probs",
    "vocab_parallel_fused_linear_loss",
]
__version__ = "0.1.0"

warn_about_untested_versions()

"""Registers FLCE with Liger's second dispatcher, the one behind liger_kernel.functional. Imported by it.

What "nvidia-cutedsl" names changes to our operator: that is what impl="nvidia-cutedsl" and LIGER_KERNEL_IMPL=cutedsl
select. A call that names no implementation must find stock Liger, whose automatic choice on Hopper and Blackwell
is its own "nvidia-cutedsl"; so the stock one stays registered under a second name with its rank, and ours gets
a rank no automatic choice reaches (until liger_cutedsl.enable()).
"""

from __future__ import annotations

import contextlib
import importlib
import sys

from liger_kernel.backends import Capability, clear_available_cache, registry

from liger_cutedsl.api import LigerFusedLinearCrossEntropyFunction
from liger_cutedsl.compat import keep_liger_operator, liger_locations, restore_liger_operator

OP = "fused_linear_cross_entropy"
NAME = "nvidia-cutedsl"
STOCK_NAME = "nvidia-cutedsl-stock"
RANK_ON_REQUEST, RANK_ENABLED = 1000, 0


def fused_linear_cross_entropy_cutedsl(*args, mode=None):
    """Liger's 15 positional arguments → (loss, z_loss, token_accuracy, predicted_tokens)."""
    if mode not in (None, "default"):
        raise ValueError(f"mode must be None or 'default' for {NAME}, got {mode!r}")
    return LigerFusedLinearCrossEntropyFunction.apply(*args)


def _import_stock() -> None:
    """Has Liger's own implementations registered before ours, where its first call imports us before them.

    One that does not import is left to that call, which logs the reason.
    """
    for path in liger_locations(OP):
        if path not in sys.modules and path not in registry.get_discovery_failures():
            with contextlib.suppress(Exception):
                importlib.import_module(path)


def register(rank: int = RANK_ON_REQUEST) -> None:
    """Puts our operator in place of the stock one, which moves to STOCK_NAME."""
    keep_liger_operator(OP, NAME, STOCK_NAME, but=fused_linear_cross_entropy_cutedsl)
    registry.register_impl(
        OP,
        impl_name=NAME,
        capability=Capability(modules=["torch"]),
        modes=("default",),
        default_mode="default",
        preference_rank=rank,
        notes="liger-cutedsl: CuTe DSL GEMMs on Hopper and Blackwell, Triton on other GPUs, PyTorch on CPU.",
    )(fused_linear_cross_entropy_cutedsl)


def restore_stock() -> None:
    """Undoes register()."""
    restore_liger_operator(OP, NAME, STOCK_NAME)
    clear_available_cache()


_import_stock()
register()

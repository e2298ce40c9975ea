"""Engines: the few primitives a schedule needs (engine.py), on PyTorch or on CuTe DSL GEMMs."""

from __future__ import annotations

from liger_cutedsl.engines.engine import Engine, KernelFailure
from liger_cutedsl.engines.torch_engine import TorchEngine

__all__ = ["Engine", "KernelFailure", "make_engine"]


def make_engine(name: str, after_first_launch=None) -> Engine | None:
    """The engine of a Route; None for "triton", which is Liger-Kernel's operator and has no primitives of ours.

    after_first_launch: see CuteEngine; the torch engine has no use for it.
    """
    if name == "torch":
        return TorchEngine()
    if name == "cute":  # imports quack and CuTe DSL, which may be missing
        from liger_cutedsl.engines.cute_engine import CuteEngine

        return CuteEngine(after_first_launch=after_first_launch)
    return None

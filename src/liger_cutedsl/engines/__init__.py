"""Engines: the few primitives a schedule needs, on PyTorch or on CuTe DSL GEMMs."""

from __future__ import annotations


class KernelFailure(RuntimeError):
    """A kernel of the CuTe engine could not be compiled or launched."""


def make_engine(name: str, after_first_launch=None):
    """The engine of a Route; None for "triton", which is Liger-Kernel's operator and has no primitives of ours.

    after_first_launch: see CuteEngine; the torch engine has no use for it.
    """
    if name == "torch":
        from liger_cutedsl.engines.torch_engine import TorchEngine

        return TorchEngine()
    if name == "cute":
        from liger_cutedsl.engines.cute_engine import CuteEngine

        return CuteEngine(after_first_launch=after_first_launch)
    return None

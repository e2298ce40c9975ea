"""Selective activation checkpointing: its modes see an operator's outputs, not what happens inside."""

from __future__ import annotations

from liger_cutedsl.compat import checkpoint_modes, dispatch_modes, replace_dispatch_modes


def unseen_by_checkpoints(function, arguments):
    """function(*arguments), beneath the dispatch modes with which torch.utils.checkpoint saves operators' results.

    They keep what each operator returns and hand it out again instead of running it. That is only right where results
    are new tensors: a product written into a buffer (out=) would not be written the second time, and a buffer that is
    written again is refused ("has been mutated"). So the call as a whole is computed again. Other modes stay.
    """
    kinds, stack = checkpoint_modes(), dispatch_modes()
    others = [mode for mode in stack if not isinstance(mode, kinds)]
    if len(others) == len(stack):
        return function(*arguments)
    replace_dispatch_modes(others)
    try:
        return function(*arguments)
    finally:
        replace_dispatch_modes(stack)

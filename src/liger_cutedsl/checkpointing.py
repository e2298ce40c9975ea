"""Selective activation checkpointing: its modes see an operator's outputs, not what happens inside."""

from __future__ import annotations

import sys

from torch.utils import _python_dispatch


def unseen_by_checkpoints(function, arguments):
    """function(*arguments), beneath the dispatch modes with which torch.utils.checkpoint saves operators' results.

    They keep what each operator returns and hand it out again instead of running it. That is only right where results
    are new tensors: a product written into a buffer (out=) would not be written the second time, and a buffer that is
    written again is refused ("has been mutated"). So the call as a whole is computed again. Other modes stay.
    """
    kinds, stack = _checkpoint_modes(), _python_dispatch._get_current_dispatch_mode_stack()
    others = [mode for mode in stack if not isinstance(mode, kinds)]
    if len(others) == len(stack):
        return function(*arguments)
    _replace(stack, others)
    try:
        return function(*arguments)
    finally:
        _replace(others, stack)


def _replace(modes, others) -> None:
    for _ in modes:
        _python_dispatch._pop_mode()
    for mode in others:
        _python_dispatch._push_mode(mode)


def _checkpoint_modes() -> tuple[type, ...]:
    """The modes' classes; none where torch.utils.checkpoint was not imported: then none is active."""
    module = sys.modules.get("torch.utils.checkpoint")
    found = (getattr(module, f"_{word}TorchDispatchMode", None) for word in ("Caching", "Cached"))
    return tuple(kind for kind in found if kind is not None)

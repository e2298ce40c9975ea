"""Activation checkpointing and graphs: what of an operator they see, and what would be computed again in vain."""

from __future__ import annotations

import functools

import torch

from liger_cutedsl.compat import checkpoint_modes, dispatch_modes, has_dispatch_modes, replace_dispatch_modes


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


def between_graphs(function):
    """What torch_compile.py does not trace runs between two graphs: torch.compiler.disable, put off until something is
    being traced, because it imports torch._dynamo, which takes a second. And beneath the modes of activation
    checkpointing.
    """

    @functools.wraps(function)
    def eager(*arguments):
        if torch.compiler.is_compiling():
            return torch.compiler.disable(eager)(*arguments)
        if has_dispatch_modes():
            return unseen_by_checkpoints(function, arguments)
        return function(*arguments)

    return eager


def unseen_by_saved_tensor_hooks():
    """A context in which no tensor that is saved for backward is handed to the hooks around it.

    For a node whose gradients are computed in forward: it saves nothing but an empty tensor that leads to its inputs. A
    checkpoint that saw that would compute the whole loss again to have it, and hold both results meanwhile; so it stops
    before. (Detached, because an output that its own node held would never go; torch connects it again.)
    """
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)

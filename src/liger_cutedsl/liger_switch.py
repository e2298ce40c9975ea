"""enable() and disable(): Liger-Kernel on our operator without the environment variable, and back.

Liger's modules import the operator by name when they are first loaded, so registering it is not enough once
they are: the name is rebound in each of them. Liger's submodules of liger_kernel.ops keep their own.
"""

from __future__ import annotations

import importlib
import logging
import sys

_NAMES = (
    "LigerFusedLinearCrossEntropyFunction",
    "fused_linear_cross_entropy_forward",
    "fused_linear_cross_entropy_backward",
)
_originals: dict[str, object] = {}  # what liger_kernel.ops had before enable()


def enable() -> None:
    """Makes every user of Liger-Kernel in this process run our fused linear cross entropy.

    Works before or after Liger's modules and models were imported or patched, also with an editable install,
    which LIGER_KERNEL_IMPL=cutedsl does not find. A second call changes nothing.
    """
    operators = importlib.import_module("liger_kernel.ops")  # registers the stock implementations; ours follow
    from liger_kernel.backends import registry

    from liger_cutedsl import liger_dispatch, liger_ops

    if _originals:
        return
    _originals.update({name: getattr(operators, name) for name in _NAMES})
    _rebind({name: (_originals[name], getattr(liger_ops, name)) for name in _NAMES})
    _discover_stock(registry, liger_dispatch.OP)
    liger_dispatch.register(rank=liger_dispatch.RANK_ENABLED)


def disable() -> None:
    """Gives Liger-Kernel the operator back that it had before enable()."""
    from liger_cutedsl import liger_dispatch, liger_ops

    if not _originals:
        return
    _rebind({name: (getattr(liger_ops, name), original) for name, original in _originals.items()})
    _originals.clear()
    liger_dispatch.restore_stock()
    if "liger_kernel.ops.cutedsl_flce" in sys.modules:  # Liger found us by itself: back to "on request"
        liger_dispatch.register()


def _rebind(changes: dict[str, tuple[object, object]]) -> None:
    """In Liger's loaded modules, makes each name that is bound to the old object mean the new one.

    Not in the submodules of liger_kernel.ops: they define the operators, and our fallback uses them.
    """
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.split(".")[0] != "liger_kernel" or module_name.startswith("liger_kernel.ops."):
            continue
        for name, (old, new) in changes.items():
            if module.__dict__.get(name) is old:
                setattr(module, name, new)


def _discover_stock(registry, op: str) -> None:
    """Has Liger import its own implementations now, so that ours is registered after them.

    Quietly: Liger logs a warning for each one that does not import, such as Ascend's on every other machine.
    """
    log = logging.getLogger(registry.__name__)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        registry.list_registered(op)
    finally:
        log.setLevel(level)

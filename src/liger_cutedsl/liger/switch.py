"""enable() and disable(): Liger-Kernel and TRL on our operators without the environment variable, and back.

Modules import an operator by name when they are first loaded, its owner's and other people's, so registering ours is
not enough once they are: whatever is bound to it there is rebound. Modules that define an operator keep their own.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Iterator

from liger_cutedsl.liger import drop_in, trl
from liger_cutedsl.versions import TESTED, installed

_NAMES = (
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearScaledCrossEntropyFunction",
    "LigerFusedLinearScaledCrossEntropyTPFunction",
    "fused_linear_cross_entropy_forward",
    "fused_linear_cross_entropy_backward",
)
_swaps: list[tuple[object, object]] = []  # (what was in its place before enable(), ours)
_already_ours: set[tuple[str, str]] = set()  # (module, name) that meant ours before enable(): their owners' choice


def enable() -> None:
    """Makes every user of Liger-Kernel in this process run our fused linear cross entropy and our scaled cross entropy,
    and TRL's trainers (TRL 1.15 and later) our log-probabilities; leaves the rest of both as it is: for any machine.

    Works before or after their modules and models were imported or patched, also with an editable install, which
    LIGER_KERNEL_IMPL=cutedsl does not find; the variable does nothing for TRL. Imports trl.kernels where TRL is
    installed. Names that other modules imported an operator by, before, mean ours from then on: verl's among them.
    A second call changes nothing. Raises ImportError where there is no Liger-Kernel that it knows.
    """
    stock, registry = _liger()
    from liger_cutedsl.liger import dispatch, operators

    if _swaps:
        return
    found = [(getattr(stock, name), getattr(operators, name)) for name in _NAMES if hasattr(stock, name)]
    theirs = trl.find_original()
    found += [] if theirs is None else [(theirs, trl.ChunkedLogProbFunction)]
    ours = {id(new) for _, new in found}
    _already_ours.update(
        (module, name)
        for module, names in _loaded_modules()
        for name, value in list(names.items())
        if id(value) in ours
    )
    _swaps.extend(found)
    drop_in.remember_originals(_swaps)
    _rebind(_swaps)
    _discover_stock(registry, dispatch.OP)
    dispatch.register(rank=dispatch.RANK_ENABLED)


def disable() -> None:
    """Gives Liger-Kernel and TRL the operators back that they had before enable(), and every name that meant them then.

    Names that were bound to our operators since are theirs again too; those that meant ours before enable() stay.
    """
    if not _swaps:
        return
    from liger_cutedsl.liger import dispatch

    _rebind([(ours, original) for original, ours in _swaps], but=_already_ours)
    _swaps.clear()
    _already_ours.clear()
    drop_in.forget_originals()
    dispatch.restore_stock()
    if "liger_kernel.ops.cutedsl_flce" in sys.modules:  # Liger found us by itself: back to "on request"
        dispatch.register()


def _liger():
    """liger_kernel.ops, in which the stock implementations are registered, and the second dispatcher's registry."""
    try:
        # Without Liger-Kernel, liger_kernel.ops still imports, as the folder of our registration.
        registry = importlib.import_module("liger_kernel.backends.registry")
        return importlib.import_module("liger_kernel.ops"), registry
    except ImportError as error:
        version = installed("liger-kernel")
        found = f"{version}, which does not import here ({error})" if version else "none"
        raise ImportError(
            f"liger_cutedsl.enable() needs liger-kernel {TESTED['liger-kernel'][0]} or later, and found {found}: "
            f"pip install liger-kernel (on Linux), or call liger_cutedsl.fused_linear_cross_entropy, which does without"
        ) from error


def _loaded_modules() -> Iterator[tuple[str, dict[str, object]]]:
    """The name and namespace of each module that may hold an operator by a name of its own.

    Not the submodules of liger_kernel.ops, and not TRL's module of its kernel: they define the operators, and what
    falls back uses them. The namespace is read past the module's own attribute lookup, which imports things where a
    module is a lazy one.
    """
    for name, module in list(sys.modules.items()):
        if not issubclass(type(module), types.ModuleType) or name.startswith("liger_kernel.ops.") or name == trl.HOME:
            continue
        if name.split(".")[0] != "liger_cutedsl":
            yield name, object.__getattribute__(module, "__dict__")


def _rebind(changes: list[tuple[object, object]], but: set[tuple[str, str]] = frozenset()) -> None:
    """Makes each name that is bound to an old object mean the new one, except the (module, name) in `but`."""
    new_of = {id(old): new for old, new in changes}
    for module, names in _loaded_modules():
        for name, value in list(names.items()):
            new = new_of.get(id(value), value)
            if new is not value and (module, name) not in but:
                names[name] = new


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

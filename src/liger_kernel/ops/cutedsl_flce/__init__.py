"""Registers liger-cutedsl with Liger-Kernel. Runs for every Liger user: it imports nothing heavy, and raises nothing.

Liger visits the packages of ``liger_kernel.ops`` in alphabetical order and keeps the last registration of a
name: this one, after the stock ``cutedsl`` folder, decides what ``LIGER_KERNEL_IMPL=cutedsl`` loads. Nothing
changes for a process without that variable.
"""

import importlib as _importlib
import logging as _logging
import os as _os

_OP = "fused_linear_cross_entropy"
_DISPATCH = "liger_cutedsl.liger.dispatch"


def _register_operators():
    from liger_kernel.ops.backends.registry import ImplInfo, register_impl

    register_impl(ImplInfo(name="cutedsl", devices=("cuda", "cpu"), module_path="liger_cutedsl.liger.operators"))


def _register_with_dispatcher():
    """The second dispatcher (liger_kernel.functional) imports an operator's locations in order on its first call.

    Where that call is what imports liger_kernel.ops, and so this file, it already walks the list as it was: our
    location would come too late, and is imported now.
    """
    from liger_kernel.backends import registry

    registry.declare_op_locations(_OP, (*registry._DISCOVERY_MAP.get(_OP, ()), _DISPATCH))
    if registry._DISCOVERED.get(_OP):
        _importlib.import_module(_DISPATCH)


for _register in (_register_operators, _register_with_dispatcher):
    try:
        _register()
    except Exception as _error:  # a Liger that lacks a name used here goes on as if this package were not installed
        _asked_for = _os.environ.get("LIGER_KERNEL_IMPL", "").strip().lower() == "cutedsl"
        _logging.getLogger(__name__).log(
            _logging.WARNING if _asked_for else _logging.DEBUG,
            "liger-cutedsl could not register with this Liger-Kernel (%s: %s); see python -m liger_cutedsl",
            type(_error).__name__,
            _error,
        )

"""Registers liger-cutedsl with Liger-Kernel. Runs for every Liger user, so it imports nothing heavy.

Liger visits the packages of ``liger_kernel.ops`` in alphabetical order and keeps the last registration of a
name: this one, after the stock ``cutedsl`` folder, decides what ``LIGER_KERNEL_IMPL=cutedsl`` loads. Nothing
changes for a process without that variable.
"""

from liger_kernel.backends import registry as _dispatcher
from liger_kernel.ops.backends.registry import ImplInfo, register_impl

register_impl(ImplInfo(name="cutedsl", devices=("cuda", "cpu"), module_path="liger_cutedsl.liger_ops"))

# The second dispatcher (liger_kernel.functional) imports an operator's locations in order on its first call.
_op = "fused_linear_cross_entropy"
_dispatcher.declare_op_locations(_op, (*_dispatcher._DISCOVERY_MAP.get(_op, ()), "liger_cutedsl.liger_dispatch"))

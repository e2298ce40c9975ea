"""Private names of torch, Liger-Kernel and TRL that this package uses, all of them and nowhere else, under our own.

What has no public name is used here, and PRIVATE says for what: a version that drops one breaks what is written there,
and a test that tells so by name. (The registration below liger_kernel/ has its own: it has to import nothing.)
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch

_LIGER = "liger_kernel.backends.registry"

# name → what stops working without it
_BATCHES = "torch.func transforms and batched upstream gradients, refused by name"
_HANDED_OVER = "kept gradients and exponentials, handed over unless the graph is kept (retain_graph=True)"
_IN_FORWARD = "schedule='single_pass' with weight_grad_buffer, refused under activation checkpointing"
_FAKES = "calls and explain() with fake and meta tensors"
_CHECKPOINTS = "selective activation checkpointing"
_GRAPHS = "drop-ins for per-token operators under torch.compile"
_TRL = "TRL's fused head on a CPU, which is TRL's own where that has one"
_SWITCH = "enable() and disable(), and Liger's own operator as impl='nvidia-cutedsl-stock'"
PRIVATE = {
    "torch._C._functorch.is_functorch_wrapped_tensor": _BATCHES,
    "torch._C._functorch.is_legacy_batchedtensor": _BATCHES,
    "torch._C._current_graph_task_id": _HANDED_OVER,
    "torch._C._autograd._get_current_graph_task_keep_graph": _HANDED_OVER,
    "torch._C._autograd._top_saved_tensors_default_hooks": _IN_FORWARD,
    "torch._C._get_dispatch_mode": _FAKES,
    "torch._C._TorchDispatchModeKey.FAKE": _FAKES,
    "torch._subclasses.fake_tensor.FakeTensor": _FAKES,
    "torch._subclasses.fake_tensor.FakeTensorMode": _FAKES,
    "torch._C._len_torch_dispatch_stack": _CHECKPOINTS,
    "torch._dynamo.decorators.justknobs_check._dynamo_marked_constant": _GRAPHS,
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": _CHECKPOINTS,
    "torch.utils._python_dispatch._pop_mode": _CHECKPOINTS,
    "torch.utils._python_dispatch._push_mode": _CHECKPOINTS,
    "torch.utils.checkpoint._CachedTorchDispatchMode": _CHECKPOINTS,
    "torch.utils.checkpoint._CachingTorchDispatchMode": _CHECKPOINTS,
    "trl.kernels.chunked_logprob._use_triton": _TRL,
    f"{_LIGER}._DISCOVERY_MAP": "liger_kernel.functional with impl='nvidia-cutedsl'",
    f"{_LIGER}._REGISTRY": _SWITCH,
    f"{_LIGER}._REGISTRY_LOCK": _SWITCH,
}


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is inside a torch.func transform, or stands for a batch of them (is_grads_batched=True)."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def graph_is_kept() -> bool:
    """Whether the running backward leaves the graph usable (retain_graph, create_graph). False outside of one."""
    return in_backward() and torch._C._autograd._get_current_graph_task_keep_graph()


def has_saved_tensor_hooks() -> bool:
    """Whether tensors that are saved for backward are handed to hooks, as activation checkpointing has them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def fake_mode() -> FakeTensorMode | None:
    """The FakeTensorMode that is active."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def has_dispatch_modes() -> bool:
    """Whether any TorchDispatchMode is active."""
    return torch._C._len_torch_dispatch_stack() > 0


def dispatch_modes() -> list:
    """The TorchDispatchModes that are active, the innermost last."""
    return _python_dispatch._get_current_dispatch_mode_stack()


def replace_dispatch_modes(others: list) -> None:
    """Makes others the active TorchDispatchModes."""
    for _ in dispatch_modes():
        _python_dispatch._pop_mode()
    for mode in others:
        _python_dispatch._push_mode(mode)


def checkpoint_modes() -> tuple[type, ...]:
    """The classes of torch.utils.checkpoint's modes that save operators' results and hand them out again. None where
    it was not imported: none is active then."""
    module = sys.modules.get("torch.utils.checkpoint")
    found = (getattr(module, name, None) for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode"))
    return tuple(kind for kind in found if kind is not None)


def constant_in_graphs(function):
    """A function of Python values that torch.compile calls once while it traces, and whose result is a constant of the
    graph. As torch.compiler.assume_constant_result, but without its import of torch._dynamo, which takes a second."""
    function._dynamo_marked_constant = True
    return function


def trl_runs_on(device: torch.device) -> bool:
    """Whether TRL's fused head runs there: before TRL 1.16 it was Triton's alone."""
    module = importlib.import_module("trl.kernels.chunked_logprob")
    return hasattr(module, "_use_triton") or device.type in ("cuda", "xpu")


def liger_locations(op: str) -> tuple[str, ...]:
    """The modules that Liger-Kernel's second dispatcher imports for an operator."""
    return _liger_registry()._DISCOVERY_MAP.get(op, ())


def keep_liger_operator(op: str, name: str, new_name: str, but) -> None:
    """Has what Liger's second dispatcher knows under a name registered under another one too: unless there is none, or
    its forward is `but`. Unlike the dispatcher's own functions it imports nothing."""
    registry = _liger_registry()
    with registry._REGISTRY_LOCK:
        found = registry._REGISTRY.get((op, name))
        if found is not None and found.forward is not but:
            registry._REGISTRY[(op, new_name)] = replace(found, impl_name=new_name)


def restore_liger_operator(op: str, name: str, new_name: str) -> None:
    """Undoes keep_liger_operator: what it kept has its own name again, which means nothing where it kept none."""
    registry = _liger_registry()
    with registry._REGISTRY_LOCK:
        kept = registry._REGISTRY.pop((op, new_name), None)
        registry._REGISTRY.pop((op, name), None)
        if kept is not None:
            registry._REGISTRY[(op, name)] = replace(kept, impl_name=name)


def _liger_registry():
    return importlib.import_module(_LIGER)

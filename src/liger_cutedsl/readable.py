"""Whether a tensor's numbers lie where a kernel reads them: refused by name before any launch where they do not."""

from __future__ import annotations

import torch

from liger_cutedsl.compat import is_fake, is_transformed

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def check_readable(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor that holds its numbers elsewhere, RuntimeError for one whose memory is gone.

    Subclasses over memory of their own are read as what they are; fake tensors and meta tensors are never read.
    """
    if is_transformed(tensor):
        raise RuntimeError(
            f"{name} is inside a torch.func transform (grad, vmap, jacrev, ...), which fused linear cross entropy "
            "does not support: use torch.autograd.grad, and reduction='none' for one loss a row"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one of layout {tensor.layout}: pass {name}.to_dense()")
    if type(tensor) not in _PLAIN and _wraps_others(tensor):
        kind = type(tensor).__name__
        raise TypeError(
            f"{name} is a {kind}, which keeps its numbers in other tensors: kernels read memory, and it has none. Pass "
            f"a plain tensor, such as {name}.dequantize() of a quantised one or {name}.wait() of a pending collective"
        )
    if not has_memory(tensor):
        raise RuntimeError(
            f"{name} of shape {tuple(tensor.shape)} has no memory: its storage was freed, as a sharding framework does "
            f"with a parameter that it has not gathered. Keep it gathered around forward and backward"
        )


def check_still_readable(shapes: dict[str, torch.Size], tensors: dict[str, torch.Tensor | None]) -> None:
    """Raises RuntimeError where a tensor that forward saved under a name is not what it was then."""
    for name, tensor in tensors.items():
        if tensor is None or (tensor.shape == shapes[name] and has_memory(tensor)):
            continue
        freed = tensor.shape == shapes[name]
        raise RuntimeError(
            f"{name}'s memory went away between forward and backward: it had shape {tuple(shapes[name])}, and now "
            f"{'its storage is empty' if freed else f'it has {tuple(tensor.shape)}'}. Gather it again before backward, "
            f"or keep it gathered until then (ZeRO-3: deepspeed.zero.GatheredParameters around both)"
            + (f"; or take schedule='single_pass', whose backward of a mean or sum reads no {name}" if freed else "")
        )


def has_memory(tensor: torch.Tensor) -> bool:
    return not tensor.numel() or type(tensor) not in _PLAIN or tensor.untyped_storage().nbytes() > 0


def _wraps_others(tensor: torch.Tensor) -> bool:
    if is_fake(tensor) or tensor.device.type == "meta" or not tensor.numel():
        return False
    try:
        return tensor.data_ptr() == 0
    except RuntimeError:  # what a wrapper's storage answers
        return True

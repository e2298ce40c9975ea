"""The tensors of a call checked against each other before anything is computed, without reading device memory."""

from __future__ import annotations

import torch

from liger_cutedsl.call import FLOAT_DTYPES, OPTIONAL, TENSORS, VECTORS, Problem, is_dtensor, product_dtype
from liger_cutedsl.compat import is_fake
from liger_cutedsl.readable import check_readable


def check_tensors(problem: Problem, empty_shard: bool = False) -> None:
    """Shapes, dtypes and devices, without reading device memory. Raises TypeError or ValueError.

    empty_shard: weight may have no rows, as a rank's share of a split vocabulary.
    """
    x, weight, target = problem.x, problem.weight, problem.target
    for name in TENSORS:
        _check_tensor(name, getattr(problem, name), optional=name in OPTIONAL)
    if x.dim() != 2:
        raise ValueError(
            f"x must have shape (N, H), got {tuple(x.shape)}: flatten it with x.flatten(0, -2) and the "
            f"target with target.flatten(), or call liger_cutedsl.fused_linear_cross_entropy, which does"
        )
    if (
        weight.dim() != 2
        or weight.shape[1] != x.shape[1]
        or x.shape[1] == 0
        or (weight.shape[0] == 0 and not empty_shard)
    ):
        raise ValueError(
            f"weight must have shape (V, H) with V ≥ 1 and H = {x.shape[1]} ≥ 1 as in x, got {tuple(weight.shape)}"
            + (
                ": a parameter that is sharded (ZeRO-3) must be gathered around forward and backward"
                * (not weight.numel())
            )
        )
    if target.dim() != 1 or target.shape[0] != x.shape[0]:
        raise ValueError(f"target must have shape ({x.shape[0]},) as x has rows, got {tuple(target.shape)}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must be int64 or int32, got {target.dtype}")
    _check_dtypes(problem)
    if problem.weight_grad_buffer is not None:
        _check_buffer(problem.weight_grad_buffer.name, problem.weight_grad_buffer.tensor, problem)
    for name in VECTORS:
        vector = getattr(problem, name)
        if vector is not None and tuple(vector.shape) != (weight.shape[0],):
            raise ValueError(f"{name} must have shape (V,) = ({weight.shape[0]},), got {tuple(vector.shape)}")
    selected = problem.selected_token_ids
    if selected is not None and (selected.dim() != 1 or selected.dtype != torch.int64):
        raise ValueError(
            f"selected_token_ids must be int64 of shape (K,), shared by all rows, got {selected.dtype} of shape "
            f"{tuple(selected.shape)}"
        )


def _check_tensor(name, value, optional) -> None:
    if value is None and optional:
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor{' or None' if optional else ''}, got {type(value)}")
    if is_dtensor(value):
        raise TypeError(
            f"{name} is a DTensor, which only goes with a weight and an x that are: pass {name}.full_tensor(), of what "
            f"is trained under FSDP2 {name}.full_tensor(grad_placements=[Partial('avg')]), which sums over the ranks"
        )
    check_readable(name, value)


def _check_buffer(name: str, buffer, problem: Problem) -> None:
    """What dW is added to."""
    weight = problem.weight
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(buffer)}")
    if is_dtensor(buffer):
        raise TypeError(f"{name} is a DTensor, which only goes with a weight that is: pass {name}.to_local()")
    check_readable(name, buffer)
    if buffer.shape != weight.shape:
        raise ValueError(f"{name} must have weight's shape {tuple(weight.shape)}, got {tuple(buffer.shape)}")
    accepted = {weight.dtype} if weight.dtype == torch.float64 else {torch.float32, weight.dtype}
    if buffer.dtype not in accepted:
        names = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in accepted))
        raise TypeError(f"{name} must be {names} for a weight of {weight.dtype}, got {buffer.dtype}")
    if buffer.device != problem.x.device:
        raise ValueError(f"{name} must be on x's device {problem.x.device}, got {buffer.device}")
    if not buffer.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got strides {buffer.stride()}: products are written into its rows"
        )
    if buffer.requires_grad:
        raise ValueError(f"{name} must not require a gradient: it is written in place. Pass {name}.detach()")
    for other, value in problem.tensors().items():
        if _overlap(buffer, value):
            raise ValueError(f"{name} shares memory with {other}, which the call reads")


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bytes from the first to the last number of two tensors do."""
    if any(t.is_meta or is_fake(t) or not t.numel() for t in (one, other)) or one.device != other.device:
        return False
    (start, stop), (first, last) = (_bytes(one), _bytes(other))
    return start < last and first < stop


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _check_dtypes(problem: Problem) -> None:
    x, weight = problem.x, problem.weight
    for name, value in (("x", x), ("weight", weight)):
        if value.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} must be bfloat16, float16, float32 or float64, got {value.dtype}")
    if x.dtype != weight.dtype and weight.device == x.device and product_dtype(x) != product_dtype(weight):
        raise TypeError(
            f"x and weight must have one dtype, got {x.dtype} and {weight.dtype}: cast one of them, or call "
            f"under torch.autocast, which casts all but float64"
        )
    for name in TENSORS:
        value = getattr(problem, name)
        if value is None:
            continue
        if value.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {value.device}")
        if name in VECTORS and not value.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {value.dtype}")

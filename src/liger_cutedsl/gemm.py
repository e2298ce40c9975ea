"""Plain operations on matrices: products by cuBLAS through torch, summed in at least fp32 and rounded once."""

from __future__ import annotations

import torch


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False, alpha: float = 1.0
) -> torch.Tensor:
    """out = alpha · a @ b, or out += alpha · a @ b. out may be wider than a and b: they are then multiplied as they
    are where the device has such a product (16-bit into fp32 on CUDA), and widened first elsewhere."""
    one_dtype = a.dtype == b.dtype
    mixed = one_dtype and out.dtype == torch.float32 and a.is_cuda and a.dtype.itemsize == 2
    if mixed or (one_dtype and a.dtype == out.dtype):
        extra = {"out_dtype": torch.float32} if mixed else {}
        if accumulate or alpha != 1.0:
            return torch.addmm(out, a, b, beta=float(accumulate), alpha=alpha, out=out, **extra)
        return torch.mm(a, b, out=out, **extra)
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), out.dtype)
    if wide == out.dtype:
        return matmul(a.to(wide), b.to(wide), out=out, accumulate=accumulate, alpha=alpha)
    product = torch.mm(a.to(wide), b.to(wide)).mul_(alpha)
    return out.add_(product) if accumulate else out.copy_(product)


def scale_in_place(matrix: torch.Tensor, factor: torch.Tensor) -> None:
    """matrix *= factor, a scalar tensor. Where it is 1, memory is not touched; on a GPU nothing is read to the host."""
    if matrix.is_cuda:
        from liger_cutedsl.engines import triton_kernels

        triton_kernels.scale_in_place(matrix, factor)
    elif factor.item() != 1.0:
        matrix.mul_(factor)

"""Plain matrix products: cuBLAS through torch, products summed in at least fp32 and rounded once."""

from __future__ import annotations

import torch


def matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """out = a @ b, or out += a @ b. out may be wider than a and b: they are then multiplied as they are
    where the device has such a product (16-bit into fp32 on CUDA), and widened first elsewhere."""
    if a.dtype == b.dtype == out.dtype:
        return torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    if a.dtype == b.dtype and out.dtype == torch.float32 and a.is_cuda and a.dtype.itemsize == 2:
        if accumulate:
            return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), out.dtype)
    if wide == out.dtype:
        return matmul(a.to(wide), b.to(wide), out=out, accumulate=accumulate)
    product = torch.mm(a.to(wide), b.to(wide))
    return out.add_(product) if accumulate else out.copy_(product)

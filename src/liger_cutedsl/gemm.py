"""Plain operations on matrices: products by cuBLAS through torch, summed in at least fp32 and rounded once."""

from __future__ import annotations

import functools
import math

import torch

# Where an output has too few blocks of 128 × 256 for each multiprocessor, cuBLAS splits the sum, and for one such shape
# in a hundred it leaves out the last terms: up to 128 of them, in sums of 2561 terms and more (torch 2.11, CUDA 13.0,
# an H200; benchmark/NOTES.md). Such sums are split here instead: a batch of equal parts, and the rest apart. 26 000
# products that were tried so were right; cuBLAS alone had 265 of them wrong.
LONG_SUM = 2048
MOST_PARTS = 16  # so that the rest is shorter than 1040 terms


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False, alpha: float = 1.0
) -> torch.Tensor:
    """out = alpha · a @ b, or out += alpha · a @ b. out may be wider than a and b: they are then multiplied as they
    are where the device has such a product (16-bit into fp32 on CUDA), and widened first elsewhere."""
    parts = _parts(a, out)
    if parts > 1:
        total = _sum_of_parts(a, b, parts)
        return out.add_(total, alpha=alpha) if accumulate else torch.mul(total, alpha, out=out)
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
    # out= here too: autocast would multiply in its own dtype what is not written into a given matrix
    product = torch.empty(out.shape, dtype=wide, device=out.device)
    torch.mm(a.to(wide), b.to(wide), out=product).mul_(alpha)
    return out.add_(product) if accumulate else out.copy_(product)


def column_sums(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Σ_i matrix[i] in dtype, as wide as the matrix or wider. Of 16 bits on a GPU by a product with ones: torch.sum
    takes more memory than the matrix has there (120 MiB for 4096 × 3840)."""
    if not matrix.is_cuda or matrix.dtype.itemsize > 2:
        return matrix.sum(dim=0, dtype=dtype)
    sums = torch.empty(1, matrix.shape[1], dtype=dtype, device=matrix.device)
    return matmul(matrix.new_ones(1, matrix.shape[0]), matrix, out=sums)[0]


def _parts(a: torch.Tensor, out: torch.Tensor) -> int:
    """Into how many parts the sum of a 16-bit product is split here; 1 where cuBLAS does not split it."""
    if not a.is_cuda or a.dtype.itemsize > 2 or a.shape[1] < LONG_SUM:
        return 1
    available = multiprocessors(a.device)
    blocks = math.ceil(out.shape[0] / 128) * math.ceil(out.shape[1] / 128) / 2  # at most those of either orientation
    return 1 if blocks >= available else min(math.ceil(available / blocks), MOST_PARTS)


def _sum_of_parts(a: torch.Tensor, b: torch.Tensor, parts: int) -> torch.Tensor:
    """a @ b in float32."""
    (rows, terms), columns = a.shape, b.shape[1]
    each = terms // parts // 64 * 64
    rest = each * parts
    partial = torch.empty(parts + (rest < terms), rows, columns, dtype=torch.float32, device=a.device)
    batch = a[:, :rest].unflatten(1, (parts, each)).transpose(0, 1)
    torch.bmm(batch, b[:rest].unflatten(0, (parts, each)), out_dtype=torch.float32, out=partial[:parts])
    if rest < terms:
        torch.mm(a[:, rest:], b[rest:], out_dtype=torch.float32, out=partial[parts])
    return partial.sum(dim=0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def scale_in_place(matrix: torch.Tensor, factor: torch.Tensor) -> None:
    """matrix *= factor, a scalar tensor. Where it is 1, memory is not touched; on a GPU nothing is read to the host."""
    if matrix.is_cuda:
        from liger_cutedsl import triton_kernels

        triton_kernels.scale_in_place(matrix, factor)
    elif factor.item() != 1.0:
        matrix.mul_(factor)

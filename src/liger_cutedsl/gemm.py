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
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, beta: float = 0.0, alpha: float = 1.0
) -> torch.Tensor:
    """out = alpha · a @ b + beta · out, rounded once. out may be wider than a and b: they are then multiplied as they
    are where the device has such a product (16-bit into fp32 on CUDA), and widened first elsewhere."""
    parts = _parts(*a.shape, b.shape[1], a.dtype, a.device)
    if parts > 1:
        return _written_from_parts(_partial_sums(a, b, parts), out, beta, alpha)
    one_dtype = a.dtype == b.dtype
    mixed = one_dtype and out.dtype == torch.float32 and a.is_cuda and a.dtype.itemsize == 2
    if mixed or (one_dtype and a.dtype == out.dtype):
        extra = {"out_dtype": torch.float32} if mixed else {}
        if beta or alpha != 1.0:
            return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out, **extra)
        return torch.mm(a, b, out=out, **extra)
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), out.dtype)
    if wide == out.dtype:
        return matmul(a.to(wide), b.to(wide), out=out, beta=beta, alpha=alpha)
    # out= here too: autocast would multiply in its own dtype what is not written into a given matrix
    product = torch.empty(out.shape, dtype=wide, device=out.device)
    return _written(torch.mm(a.to(wide), b.to(wide), out=product).mul_(alpha), out, beta)


def _written(product: torch.Tensor, out: torch.Tensor, beta: float) -> torch.Tensor:
    """out = product + beta · out; product is as wide or wider, and may be overwritten."""
    if beta == 1.0:
        return out.add_(product)
    return out.copy_(product.add_(out, alpha=beta) if beta else product)


def column_sums(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Σ_i matrix[i] in dtype, as wide as the matrix or wider. Of 16 bits on a GPU by a product with ones: torch.sum
    takes more memory than the matrix has there (120 MiB for 4096 × 3840)."""
    if not matrix.is_cuda or matrix.dtype.itemsize > 2:
        return matrix.sum(dim=0, dtype=dtype)
    sums = torch.empty(1, matrix.shape[1], dtype=dtype, device=matrix.device)
    return matmul(matrix.new_ones(1, matrix.shape[0]), matrix, out=sums)[0]


def scratch_bytes(rows: int, terms: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """What matmul allocates for a product (rows × terms) @ (terms × columns) of matrices of this dtype."""
    parts = _parts(rows, terms, columns, dtype, device)
    if parts == 1:
        return 0
    rest = terms // parts // 64 * 64 * parts < terms
    return (parts + rest) * rows * columns * 4


def _parts(rows: int, terms: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """Into how many parts the sum of a 16-bit product is split here; 1 where cuBLAS does not split it."""
    if device.type != "cuda" or dtype.itemsize > 2 or terms < LONG_SUM:
        return 1
    available = multiprocessors(device)
    blocks = math.ceil(rows / 128) * math.ceil(columns / 128) / 2  # at most those of either orientation
    return 1 if blocks >= available else min(math.ceil(available / blocks), MOST_PARTS)


def _partial_sums(a: torch.Tensor, b: torch.Tensor, parts: int) -> torch.Tensor:
    """(parts or one more, rows, columns) in float32: their sum is a @ b."""
    (rows, terms), columns = a.shape, b.shape[1]
    each = terms // parts // 64 * 64
    rest = each * parts
    partial = torch.empty(parts + (rest < terms), rows, columns, dtype=torch.float32, device=a.device)
    batch = a[:, :rest].unflatten(1, (parts, each)).transpose(0, 1)
    torch.bmm(batch, b[:rest].unflatten(0, (parts, each)), out_dtype=torch.float32, out=partial[:parts])
    if rest < terms:
        torch.mm(a[:, rest:], b[rest:], out_dtype=torch.float32, out=partial[parts])
    return partial


def _written_from_parts(partial: torch.Tensor, out: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    if not out.is_contiguous():
        return _written(partial.sum(dim=0).mul_(alpha), out, beta)
    from liger_cutedsl import triton_kernels

    triton_kernels.sum_parts(partial, out, alpha, beta)
    return out


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def scale_in_place(matrices: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Each *= factor, a scalar tensor. Where it is 1, memory is not touched; on a GPU nothing is read to the host."""
    if not matrices:
        return
    if factor.is_cuda:
        from liger_cutedsl import triton_kernels

        triton_kernels.scale_in_place(matrices, factor)
    elif factor.item() != 1.0:
        for matrix in matrices:
            matrix.mul_(factor)

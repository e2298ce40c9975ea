"""Tensors as kernels read them: at multiples of 16 bytes, copied where they are not."""

from __future__ import annotations

import torch

ROW_ALIGNMENT = 16  # bytes: what the copy engine (TMA) wants of addresses and row strides


def tma_operand(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself where TMA can read it: rows contiguous, address and row stride multiples of 16 bytes. One row
    has the stride of its length, whatever it was cut out of."""
    size = matrix.element_size()
    row_stride = matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]
    readable = (
        matrix.stride(1) == 1
        and row_stride * size % ROW_ALIGNMENT == 0
        and row_stride >= matrix.shape[1]
        and matrix.data_ptr() % ROW_ALIGNMENT == 0
    )
    if not readable:
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix if matrix.stride(0) == row_stride else matrix.as_strided(matrix.shape, (row_stride, 1))


def vector_operand(vector: torch.Tensor) -> torch.Tensor:
    """The vector itself where its elements are contiguous and its address is a multiple of 16 bytes, as the kernels
    were compiled for; else a copy."""
    readable = vector.is_contiguous() and vector.data_ptr() % ROW_ALIGNMENT == 0
    return vector if readable else vector.clone(memory_format=torch.contiguous_format)

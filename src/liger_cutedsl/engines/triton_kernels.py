"""The memory-bound passes between the GEMMs, as Triton kernels: one launch and one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _fold_lse(partials, lse, tiles, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest, total = float("-inf"), 0.0
    for start in range(0, tiles, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(partials + row * stride + column, mask=column < tiles, other=float("-inf"))
        new = tl.maximum(largest, tl.max(value, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)  # −inf − (−inf) is NaN
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(value - shift), 0)
        largest = new
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(lse + row, tl.log(total) + shift)


def fold_lse(partials: torch.Tensor, lse: torch.Tensor) -> None:
    """lse[i] = log Σ_j exp partials[i, j]: (N, tiles) and (N,), float32. NaN partials give NaN."""
    n, tiles = partials.shape
    with torch.cuda.device(partials.device):
        block = min(1024, triton.next_power_of_2(tiles))
        _fold_lse[(n,)](partials, lse, tiles, partials.stride(0), BLOCK=block, num_warps=4)

"""A sum in bfloat16 and 8 bits more a number: for dW, where float32 does not fit and 16 bits alone round too often.

    high   (V, H) bfloat16, the sum rounded: dW itself, when the last product has been added
    low    (V, H) uint8, the next 8 bits of the sum as a float32

Of a float32, high has the upper 16 bits, rounded to the nearest, and low the next 8, cut off: as a signed number, what
rounding took off, 128 steps to either side. (Its last bit is set first, so that it never lies half-way, where rounding
takes off 128 steps upwards, too.) Read again, the last 8 bits are taken to be half of what they can be: each addition
is off by up to 2⁻¹⁶ of the sum, where bfloat16 alone would be off by up to 2⁻⁸.

As with the epilogues of the logits, one function is run by PyTorch and traced by CuTe: the sum goes through registers
once a product.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from liger_cutedsl.elementwise import plus_bits, with_last_bit
from liger_cutedsl.epilogue_identity import with_operands

ROW_MULTIPLE = 16  # low's rows start at multiples of 16 bytes, as the copy engine (TMA) wants
HALF_OF_THE_REST = 0x80  # of the 8 bits that neither part has


@dataclass(frozen=True)
class TwoPartSum:
    """high (V, H) bfloat16, low (V, H) uint8."""

    high: torch.Tensor
    low: torch.Tensor

    @classmethod
    def of(cls, high: torch.Tensor) -> TwoPartSum:
        """In the memory of high, contiguous: what it holds, and nothing more."""
        rows, columns = high.shape
        width = -(-columns // ROW_MULTIPLE) * ROW_MULTIPLE
        low = torch.zeros(rows, width, dtype=torch.uint8, device=high.device)
        return cls(high, low[:, :columns])

    @classmethod
    def zero(cls, high: torch.Tensor) -> TwoPartSum:
        """In the memory of high, contiguous."""
        return cls.of(high.zero_())

    def rows(self, rows: slice) -> TwoPartSum:
        return TwoPartSum(self.high[rows], self.low[rows])

    def value(self) -> torch.Tensor:
        """(V, H) float32."""
        return plus_bits(self.high.float(), self._low_word())

    def add(self, product: torch.Tensor, alpha: float, beta: float) -> None:
        """The sum = alpha · product + beta · the sum; product: (V, H) float32."""
        found = sum_epilogue()(product, c=self.high.float(), low=self._low_word(), alpha=alpha, beta=beta)
        self.high.copy_(found["D"])
        self.low.copy_(found["next_low"].view(torch.int32) >> 8 & 0xFF)

    def _low_word(self) -> torch.Tensor:
        """What low adds to the bits of high as a float32, and half of the rest."""
        return ((self.low.view(torch.int8).int() << 8) + HALF_OF_THE_REST).view(torch.float32)


def low_bytes(rows: int, columns: int) -> int:
    return rows * -(-columns // ROW_MULTIPLE) * ROW_MULTIPLE


@functools.cache
def sum_epilogue():
    """D, which is high's next value when it is rounded, and next_low, whose third 8 bits are low's; c is high."""

    def two_part_sum(acc, **operands):
        before = plus_bits(operands["c"], operands["low"])
        total = with_last_bit(acc * operands["alpha"] + before * operands["beta"])
        return {"D": total, "next_low": total}

    return with_operands(two_part_sum, ("c", "low", "alpha", "beta"))

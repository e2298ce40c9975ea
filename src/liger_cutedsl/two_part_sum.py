"""A sum in bfloat16 and 8 bits more a number: for dW, where float32 does not fit and 16 bits alone round too often.

    high   (V, H) bfloat16, the sum rounded: dW itself, when the last product has been added
    low    (V, H) uint8, what that rounding took off: the sum is high·(1 + (low − 128)·2⁻¹⁵)

bfloat16 holds 8 bits of a number, so rounding moves it by up to 2⁻⁸ of high: 128 steps of 2⁻¹⁵ to either side. Each
addition is off by up to half a step, 2⁻¹⁶ of the sum, where bfloat16 alone would be off by up to 2⁻⁸. high·(1 + …) has
24 bits, exact in float32. (The last step up is missing: a rounding by that much is off by a whole one.)

As with the epilogues of the logits, one function is run by PyTorch and traced by CuTe: the sum goes through registers
once a product.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from liger_cutedsl.elementwise import at_least, at_most, reciprocal, rounded_to_bfloat16
from liger_cutedsl.epilogue_identity import with_operands

MIDDLE = 128.0  # low's zero
STEP = 2.0**-15  # of high
ROW_MULTIPLE = 16  # low's rows start at multiples of 16 bytes, as the copy engine (TMA) wants


@dataclass(frozen=True)
class TwoPartSum:
    """high (V, H) bfloat16, low (V, H) uint8."""

    high: torch.Tensor
    low: torch.Tensor

    @classmethod
    def zero(cls, high: torch.Tensor) -> TwoPartSum:
        """In the memory of high, contiguous."""
        rows, columns = high.shape
        width = -(-columns // ROW_MULTIPLE) * ROW_MULTIPLE
        low = torch.full((rows, width), int(MIDDLE), dtype=torch.uint8, device=high.device)
        return cls(high.zero_(), low[:, :columns])

    def rows(self, rows: slice) -> TwoPartSum:
        return TwoPartSum(self.high[rows], self.low[rows])

    def value(self) -> torch.Tensor:
        """(V, H) float32."""
        return _value(self.high.float(), self.low.float())

    def add(self, product: torch.Tensor, alpha: float, beta: float) -> None:
        """The sum = alpha · product + beta · the sum; product: (V, H) float32."""
        found = sum_epilogue()(product, c=self.high.float(), low=self.low.float(), alpha=alpha, beta=beta)
        self.high.copy_(found["D"])
        self.low.copy_(found["next_low"].round())


def low_bytes(rows: int, columns: int) -> int:
    return rows * -(-columns // ROW_MULTIPLE) * ROW_MULTIPLE


def _value(high, low):
    return high * (low * STEP + (1.0 - MIDDLE * STEP))


@functools.cache
def sum_epilogue():
    """D, high's next value, and next_low, which is rounded to the nearest where it is stored; c is high."""

    def two_part_sum(acc, **operands):
        total = acc * operands["alpha"] + _value(operands["c"], operands["low"]) * operands["beta"]
        high = rounded_to_bfloat16(total)
        steps = (total - high) * reciprocal(high) * (1.0 / STEP)  # NaN of zero, which has none to lose
        return {"D": high, "next_low": at_most(at_least(steps + MIDDLE, 0.0), 255.0)}

    return with_operands(two_part_sum, ("c", "low", "alpha", "beta"))

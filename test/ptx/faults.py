"""Faults to plant into a kernel's PTX, each the kind of mistake that an epilogue or a pipeline may have."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from ptx.decoding import decode
from ptx.mutants import Mutant
from ptx.parsing import Instruction, Kernel

FIFTEEN, ZERO, MINUS_INFINITY = "0f41700000", "0f00000000", "0fFF800000"


def _replaced(kernel: Kernel, index: int, kind: str, op: str, operands: list[str]) -> Mutant:
    old = kernel.instructions[index]
    changed = Instruction(old.text, old.guard, op, operands)
    return Mutant(index, old.text, kind, decode(kernel.form(changed)))


def wrong_column_mask(kernel: Kernel) -> list[Mutant]:
    """One column beyond the vocabulary counts, in sums and maxima: ≥ for > in the comparisons that mask it."""
    return _masks(kernel, (MINUS_INFINITY, ZERO))


def wrong_mask_of_maxima(kernel: Kernel) -> list[Mutant]:
    """The same where only maxima are masked wrongly: shows where all logits are below that column's, which is 0."""
    return _masks(kernel, (MINUS_INFINITY,))


def _masks(kernel: Kernel, instead: tuple[str, ...]) -> list[Mutant]:
    """Of the comparisons whose predicate selects one of these values."""
    selects = [i.operands for i in kernel.instructions if i.op == "selp.f32"]
    predicates = {operands[3] for operands in selects if operands[2] in instead}
    return [
        _replaced(kernel, i, "mask", "setp.ge.s32", compare.operands)
        for i, compare in enumerate(kernel.instructions)
        if compare.op == "setp.gt.s32" and compare.operands[0] in predicates
    ]


def target_off_by_one(kernel: Kernel) -> list[Mutant]:
    """The column next to the target's is selected."""
    found = []
    for i, instruction in enumerate(kernel.instructions):
        if instruction.op.startswith("cvt.pack.sat.s16"):
            to, source, plus = kernel.instructions[i - 1].operands
            found.append(_replaced(kernel, i - 1, "target", "add.s32", [to, source, str(int(plus) + 1)]))
    return found


def dropped_fence(kernel: Kernel) -> list[Mutant]:
    """No fence.proxy.async between the first tile's stores to shared memory and TMA's."""
    store = _first(kernel, 0, lambda i: i.op.startswith("cp.async.bulk.tensor.2d.global"))
    fence = max(i for i in range(store) if kernel.instructions[i].op.startswith("fence.proxy.async"))
    return [Mutant(fence, kernel.instructions[fence].text, "fence", lambda warp: None)]


def missing_accumulator_wait(kernel: Kernel) -> list[Mutant]:
    """The epilogue reads tensor memory without waiting for the MMA."""
    load = _first(kernel, 0, lambda i: i.op.startswith("tcgen05.ld"))
    waits = (i for i in range(load) if "try_wait" in kernel.instructions[i].op)
    wait = max(i for i in waits if len(kernel.instructions[i].operands) > 3)
    passes = kernel.instructions[wait].operands[0]
    return [Mutant(wait, kernel.instructions[wait].text, "wait", lambda warp: warp.set(passes, np.asarray(True)))]


def headroom_of_the_other_dtype(kernel: Kernel) -> list[Mutant]:
    """fp16's exponentials are stored without their scale 2¹⁵."""
    found = []
    for i, instruction in enumerate(kernel.instructions):
        if any(FIFTEEN in operand for operand in instruction.operands):
            operands = [re.sub(FIFTEEN, ZERO, operand) for operand in instruction.operands]
            found.append(_replaced(kernel, i, "headroom", instruction.op, operands))
    return found


def _first(kernel: Kernel, start: int, fits: Callable) -> int:
    return next(i for i in range(start, len(kernel.instructions)) if fits(kernel.instructions[i]))


# fault → the cases of make test that must notice it
FAULTS = {
    wrong_column_mask: ("forward ragged", "exp rows ragged", "forward all", "exp all"),
    wrong_mask_of_maxima: ("forward negative", "exp negative"),
    target_off_by_one: ("forward tiny", "exp tiny"),
    dropped_fence: ("exp tiny", "backward tiny"),
    missing_accumulator_wait: ("forward tiny", "exp tiny", "backward tiny"),
    headroom_of_the_other_dtype: ("exp fp16",),
}

"""What `single_pass` sums dW in: its own dtype, float32, or bfloat16 with a second part of 8 bits (two_part_sum.py)."""

from __future__ import annotations

import math
from dataclasses import replace

from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.schedules import footprint
from liger_cutedsl.schedules.schedule import Task
from liger_cutedsl.tiling import ROW_MULTIPLE
from liger_cutedsl.two_part_sum import low_bytes

# dW may be rounded to 16 bits this often: its error is then some 2.5 times that of one rounding.
MOST_ROUNDINGS = 8

# A second part takes what the later roundings of many take off. The sum is small before: of k chunks the first m lose
# what m²/k roundings would, in all. So many are allowed: a chunk's product in two parts takes a tenth longer, or so.
ROUNDED_AS_OFTEN = 12

# Where it would be more often, and no budget was asked for, 8 bits more a number may take what is allowed to be there
# beside this share of inputs and gradients.
MOST_BESIDE = 0.35


def sum_dtypes(problem: Problem, wanted: WantedGradients) -> WantedGradients:
    """What dX, dW and db are summed in and kept until backward: dW in options.accum_dtype where that is wider."""
    kept, accum = wanted.kept(), problem.options.accum_dtype
    if problem.weight_grad_buffer is not None:
        return replace(kept, weight=wanted.weight, bias=wanted.bias and problem.compute_dtype)
    wider = kept.weight is not None and accum is not None and accum.itemsize > kept.weight.itemsize
    return replace(kept, weight=accum if wider else kept.weight, bias=wanted.bias and problem.compute_dtype)


def roundings(problem: Problem, sums: WantedGradients, chunk: int) -> int:
    """How often dW is rounded to 16 bits."""
    narrow = sums.weight is not None and sums.weight.itemsize == 2
    return -(-problem.tokens // chunk) if narrow else 0


def in_16_bits(chunks: int) -> int:
    """How many of so many chunks are added before the sum has a second part."""
    return min(math.isqrt(ROUNDED_AS_OFTEN * chunks), chunks)


def second_part(task: Task, sums: WantedGradients, chunk: int) -> int:
    """The bytes that a second part of dW's sum would take, where dW would be rounded often without; 0 where not, or
    where there is none: over a split vocabulary, and in the caller's buffer."""
    problem = task.local
    count = roundings(problem, sums, chunk)
    often = count > max(MOST_ROUNDINGS, in_16_bits(count))
    if not often or problem.weight_grad_buffer is not None or task.split.sums_dx:
        return 0
    if problem.hidden % ROW_MULTIPLE or problem.gemm_dtype != sums.weight:
        return 0
    return low_bytes(problem.vocab, problem.hidden)


def chosen(engine, task: Task, sums: WantedGradients, chunk: int, allowed: int) -> tuple[WantedGradients, int]:
    """(what gradients are summed in, bytes of a second part of dW's sum or 0); sums: as sum_dtypes says.

    Where dW would be rounded often: float32 where that fits the allowed bytes, else two parts where they do."""
    problem = task.local
    if roundings(problem, sums, chunk) <= MOST_ROUNDINGS or problem.weight_grad_buffer is not None:
        return sums, 0
    wide = replace(sums, weight=problem.compute_dtype)
    if footprint.single_pass_bytes(engine, task, wide, chunk) <= allowed:
        return wide, 0
    low = second_part(task, sums, chunk)
    if task.settings.workspace_mb is None:
        allowed = max(allowed, int(MOST_BESIDE * footprint.unavoidable_bytes(task)))
    fits = footprint.single_pass_bytes(engine, task, sums, chunk, low=low) <= allowed
    return sums, low if fits else 0

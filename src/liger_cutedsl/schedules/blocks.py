"""Blocks of rows in which `recompute` goes through a long batch: how many, and which."""

from __future__ import annotations

from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.route import DEFAULT_WORKSPACE_MB
from liger_cutedsl.schedules import footprint
from liger_cutedsl.schedules.schedule import Task
from liger_cutedsl.tiling import TILE_QUANTUM, WIDE_TILE, slices

# dW is rounded to its dtype once a block: an error of 2.4e-3 for two, 3.0e-3 for four and 3.6e-3 for eight, where one
# rounding leaves 1.7e-3 (bf16, benchmark/NOTES.md).
MOST_BLOCKS = 8
# Smaller ones read and write dW so often that it shows.
SMALLEST_BLOCK = 2048


def row_block(engine, task: Task, budget: int) -> int:
    """Rows of a block; 0 for all rows at once.

    The fewest blocks of equal size, in multiples of TILE_QUANTUM, whose sum of dX fits the budget (bytes) beside a wide
    tile's dz; MOST_BLOCKS where none are enough. One where dX is not wanted, or options.accum_dtype wants dW summed
    wider than it is.

    Ranks of a split vocabulary sum dX over them block by block, so theirs follow from what all of them know: the
    default budget, and not what one of them was given.
    """
    problem, wanted, shared = task.local, task.wanted, task.split.sums_dx
    accum = problem.options.accum_dtype
    if wanted.x is None or (accum is not None and accum.itemsize > problem.weight.dtype.itemsize):
        return 0
    budget = int(DEFAULT_WORKSPACE_MB * 2**20) if shared else budget
    most = min(MOST_BLOCKS, max(1, problem.tokens // SMALLEST_BLOCK))
    for count in range(1, most + 1):
        rows = -(-problem.tokens // count // TILE_QUANTUM) * TILE_QUANTUM
        block = first_of(problem, rows)
        dz = block.tokens * WIDE_TILE * problem.gemm_dtype.itemsize if shared else _of_a_wide_tile(engine, block)
        if dz <= _most_room(block, wanted, budget, count > 1):
            break
    return 0 if rows >= problem.tokens else rows


def room_for_dz(engine, block: Problem, wanted: WantedGradients, budget: int, in_blocks: bool) -> int:
    """Bytes of the budget for dz, beside dX's sum; where all rows are one block and that is less than a wide tile's,
    what dX in its own dtype will take when dz is gone."""
    beside = budget - footprint.accumulator_bytes(block, wanted)
    enough = beside >= _of_a_wide_tile(engine, block)
    return beside if enough else _most_room(block, wanted, budget, in_blocks)


def _most_room(block: Problem, wanted: WantedGradients, budget: int, in_blocks: bool) -> int:
    beside = budget - footprint.accumulator_bytes(block, wanted)
    later = 0 if in_blocks or beside < 0 or wanted.x in (None, block.compute_dtype) else wanted.x.itemsize
    return beside + block.tokens * block.hidden * later


def _of_a_wide_tile(engine, block: Problem) -> int:
    return engine.column_bytes(block) * min(engine.wide_tile, block.vocab)


def first_of(problem: Problem, rows: int) -> Problem:
    """The problem's first block of so many rows, for planning; 0 for all of them."""
    return problem.outline().of(slice(0, rows)) if 0 < rows < problem.tokens else problem


def blocks(tokens: int, rows: int) -> list[slice]:
    """All rows, as blocks of so many; 0 for one of all of them."""
    return list(slices(tokens, rows)) if rows else [slice(0, tokens)]

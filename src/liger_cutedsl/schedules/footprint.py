"""What a call allocates at its peak: in which phase of a schedule, and beyond inputs, outputs and gradients.

Each phase is what is alive in it, less all gradients as they are returned: those are counted once, and a phase that has
not made some of them yet has so much room. A dW that is added to a buffer of the caller's is none of them. Vectors of a
few numbers a row are left out.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from liger_cutedsl import gemm
from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.route import DEFAULT_CHUNK, DEFAULT_SPLIT_CHUNK
from liger_cutedsl.sampling import pair_bytes
from liger_cutedsl.schedules.schedule import Task
from liger_cutedsl.tiling import CAST_COLUMNS, SPARE_COLUMNS


def copied_bytes(task: Task, columns: int | None = None) -> int:
    """Copies that a schedule cannot do without: of the rows that count, and of inputs in another dtype, so many rows of
    weight at once; all of them if None."""
    problem = task.local
    return task.beside + problem.casts_bytes(problem.gemm_dtype, problem.vocab if columns is None else columns)


def gradient_bytes(problem: Problem, dtypes: WantedGradients, more_rows: int = 0) -> int:
    """dX, of so many more rows than problem has, dW and db."""
    rows = problem.tokens + more_rows
    sizes = (rows * problem.hidden, problem.vocab * problem.hidden, problem.vocab)
    return sum(size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True) if dtype is not None)


def unavoidable_bytes(task: Task) -> int:
    """x, W and the gradients that are returned."""
    problem = task.problem
    inputs = sum(matrix.numel() * matrix.dtype.itemsize for matrix in (problem.x, problem.weight))
    return inputs + gradient_bytes(problem, task.returned)


def accumulator_bytes(problem: Problem, wanted: WantedGradients) -> int:
    """Bytes of dX's sum in the compute dtype, where dX itself is narrower."""
    if wanted.x is None or wanted.x == problem.compute_dtype:
        return 0
    return problem.tokens * problem.hidden * problem.compute_dtype.itemsize


def budget(engine, task: Task) -> int:
    """Bytes that a schedule may take beside copied_bytes."""
    return task.settings.budget(_default_chunk(engine, task))


def budget_in_words(engine, task: Task) -> str:
    return task.settings.budget_in_words(_default_chunk(engine, task))


def _default_chunk(engine, task: Task) -> int:
    if task.local.vocab == 0:
        return 0
    sums = 0 if task.wanted.bias is None else task.local.vocab * task.problem.compute_dtype.itemsize
    one = chunk_bytes(engine, task.local, task.wanted, DEFAULT_CHUNK)
    if task.split.sums_dx and task.settings.single_pass:
        half = DEFAULT_SPLIT_CHUNK
        two = chunk_bytes(engine, task.local, task.wanted, half) + _second_chunk_bytes(engine, task, half, 2)
        return max(one, two) + sums
    return one + sums


def chunk_bytes(engine, problem: Problem, wanted: WantedGradients, rows: int) -> int:
    """A chunk's exponentials and, beside them, first what is made with them, then what turns them into gradients."""
    stored = _stored_bytes(engine, problem, rows)
    last = problem.tokens % rows or rows  # whose products, being smaller, may take more
    scratch = max(_scratch(engine, problem, wanted, n, problem.vocab) for n in (rows, last))
    return stored + max(exponentials_bytes(engine, problem, wanted, rows) - stored, scratch)


def _stored_bytes(engine, problem: Problem, rows: int) -> int:
    """The exponentials themselves."""
    return rows * problem.vocab * engine.dz_dtype(problem.gemm_dtype).itemsize


def exponentials_bytes(engine, problem: Problem, wanted: WantedGradients, rows: int) -> int:
    return engine.chunk_bytes(problem, rows) + _widened_bytes(engine, problem, wanted)


def _widened_bytes(engine, problem: Problem, wanted: WantedGradients) -> int:
    """What the products with all of W, or for all of dW, take where the engine widens them."""
    widens = wanted.x is not None or (wanted.weight is not None and wanted.weight.itemsize == 2)
    return engine.operand_bytes(problem) if widens else 0


def _scratch(engine, problem: Problem, wanted: WantedGradients, rows: int, columns: int, through: int = 0) -> int:
    """What the products of dz (rows × columns) allocate, dX's first, then dW's; through: bytes of each number of dW on
    its way to its dtype."""
    kind, hidden, dx, dw = (engine.dz_dtype(problem.gemm_dtype), problem.device), problem.hidden, 0, 0
    if wanted.x is not None:
        dx = gemm.scratch_bytes(rows, columns, hidden, *kind)
    if wanted.weight is not None:
        dw = gemm.scratch_bytes(columns, rows, hidden, *kind) + columns * hidden * through
    return max(dx, dw)


def buffers(task: Task, chunk: int) -> int:
    """How many chunks' exponentials single_pass holds at a time: a split vocabulary's next one are there already."""
    return 2 if task.split.sums_dx and chunk < task.problem.tokens else 1


def _second_chunk_bytes(engine, task: Task, chunk: int, held: int) -> int:
    """What a split vocabulary takes beside a chunk: another's exponentials and maxima, and dX's sum over the ranks."""
    problem = task.local
    if not task.split.sums_dx or problem.vocab == 0:
        return 0
    maxima = chunk * -(-problem.vocab // engine.exp_tile(problem)) * problem.compute_dtype.itemsize
    dx = 0 if task.wanted.x is None else chunk * problem.hidden * problem.compute_dtype.itemsize
    return (held - 1) * (_stored_bytes(engine, problem, chunk) + maxima) + dx


def sampled_bytes(engine, task: Task, sums: WantedGradients, chunk: int, pairs: int) -> int:
    """pairs: for which there is room.  task: of a sampled problem. A chunk beside the pairs, or these and their copies
    by tile; dX is summed in what the exponentials of a chunk took."""
    taken = pairs * pair_bytes(engine.dz_dtype(task.local.gemm_dtype))
    return max(single_pass_bytes(engine, task, sums, chunk, beside=taken), _of_sums(task, sums) + 2 * taken)


def fitting_pairs(engine, task: Task, sums: WantedGradients, chunk: int, allowed: int) -> int:
    """For how many the allowed bytes have room; below 0 where a chunk alone does not fit."""
    beside_chunk = allowed - single_pass_bytes(engine, task, sums, chunk)
    room = min(beside_chunk, (allowed - _of_sums(task, sums)) // 2)
    return room // pair_bytes(engine.dz_dtype(task.local.gemm_dtype))


def _of_sums(task: Task, sums: WantedGradients) -> int:
    """Copies, and what sums of gradients take beyond the gradients."""
    problem = task.local
    returned = gradient_bytes(problem, task.returned, task.dropped)
    return copied_bytes(task) + gradient_bytes(problem, sums) - returned


def single_pass_bytes(
    engine, task: Task, sums: WantedGradients, chunk: int, held: int | None = None, low: int = 0, beside: int = 0
) -> int:
    """sums: what gradients are summed in, as dw_sum.sum_dtypes says, until they are rounded.  held: buffers(),
    where another number is asked for.  low: bytes of the lower part of dW's sum (two_part_sum.py).  beside: what else
    is alive with a chunk."""
    problem, wanted, copies = task.local, task.returned, copied_bytes(task)
    sums = sums if wanted.weight is not None else replace(sums, weight=None)
    returned = gradient_bytes(problem, wanted, task.dropped)
    summed = gradient_bytes(problem, sums)
    second = _second_chunk_bytes(engine, task, chunk, buffers(task, chunk) if held is None else held)
    of_chunk = chunk_bytes(engine, problem, task.wanted, chunk)
    if low:
        of_chunk = max(of_chunk, _stored_bytes(engine, problem, chunk) + engine.add_product_bytes(problem))
    forward = copies + summed + of_chunk + second + low + beside - returned
    late = wanted.kept()  # float16's wait in float32
    changing = [final if final != kept else None for final, kept in zip(late, sums, strict=True)]
    rounding = copies + summed + gradient_bytes(problem, WantedGradients(*changing)) - returned
    changing = [final if final != kept else None for final, kept in zip(wanted, late, strict=True)]
    backward = gradient_bytes(problem, late) + gradient_bytes(problem, WantedGradients(*changing)) - returned
    if problem.weight_grad_buffer is not None:  # the rows that count, for what the buffer may lack
        backward += task.beside
    if task.dropped and wanted.x is not None:
        backward += (problem.tokens + task.dropped) * problem.hidden * wanted.x.itemsize  # dX in its rows' places
    return max(forward, rounding, backward, 0)


def recompute_bytes(engine, task: Task, width: int, kept: int, rows: int = 0, block: int = 0) -> int:
    """kept: columns whose exponentials wait for backward; V of them in memory of their own, fewer in dW's. rows: how
    many a forward alone takes at a time, 0 for all.  block: how many rows forward and backward do, 0 for all; only the
    first block has kept columns, where these are not all."""
    problem, copies = task.local, copied_bytes(task, CAST_COLUMNS)
    if not task.wanted:
        return copies + engine.forward_bytes(problem.of(slice(0, rows)) if rows else problem, width, 0)
    parts = _blocks(problem, block)
    forward = copies + max(engine.forward_bytes(parts[0], width, n) for n in {kept, 0 if block else kept})
    returned = gradient_bytes(problem, task.returned, task.dropped)
    exponentials = 0
    if kept == problem.vocab:
        exponentials = exponentials_bytes(engine, problem, task.wanted, problem.tokens)
        forward = copies + exponentials
    elif kept:
        forward += gradient_bytes(problem, WantedGradients(weight=task.wanted.weight))
    return max(forward - returned, *_recompute_backward(engine, task, width, kept, exponentials, parts), 0)


def _blocks(problem: Problem, block: int) -> list[Problem]:
    """The first block and, where it is another one, the last, whose products, being smaller, may take more."""
    if not block:
        return [problem]
    last = problem.tokens % block or block
    return [problem.outline().of(slice(0, n)) for n in (block, last)][: 1 + (last < block)]


def _recompute_backward(engine, task: Task, width: int, kept: int, exponentials: int, parts: list[Problem]):
    """The phases of backward: kept columns, tiles, dX in its own dtype, dX in its rows' places."""
    problem, wanted, part = task.local, task.wanted, parts[0]
    in_blocks = part is not problem
    returned = gradient_bytes(problem, task.returned, task.dropped)
    one_product = kept == problem.vocab and not task.split.sums_dx
    x_sum = wanted.x if one_product or in_blocks else wanted.x and problem.compute_dtype
    sums = gradient_bytes(problem, replace(task.returned, x=x_sum)) - returned
    if in_blocks:
        sums += accumulator_bytes(part, wanted)
    if kept:
        cast = 0 if wanted.x is None else min(kept, CAST_COLUMNS)  # of W, which dX alone takes
        scratch = _scratch(engine, problem, wanted, part.tokens, kept)
        column_sums = engine.column_sums_bytes(part, kept) if wanted.bias is not None else 0
        stored = _stored_bytes(engine, problem, problem.tokens) if exponentials else 0
        widened = exponentials or _widened_bytes(engine, problem, wanted) * kept // problem.vocab
        yield copied_bytes(task, cast) + sums + max(widened, stored + max(scratch, column_sums))
    if kept < problem.vocab:
        through = 4 if engine.dz_dtype(problem.gemm_dtype) == torch.float16 else 0  # which column_bytes counts, too
        dz = engine.column_bytes(part) * (width + SPARE_COLUMNS) - through * problem.hidden * width
        firsts = {kept, 0} if in_blocks else {kept}
        widths = {n for first in firsts for n in (min(width, problem.vocab - first), (problem.vocab - first) % width)}
        shapes = [(block.tokens, n) for block in parts for n in widths if n]
        for rows, n in shapes:
            yield copied_bytes(task, n) + sums + dz + _scratch(engine, problem, wanted, rows, n, through)
    if wanted.x is not None:
        dx = problem.tokens * problem.hidden * wanted.x.itemsize
        yield copied_bytes(task, 0) + sums + dx * (x_sum != wanted.x)
        if task.dropped:
            yield task.beside + gradient_bytes(problem, task.returned, task.dropped) + dx - returned

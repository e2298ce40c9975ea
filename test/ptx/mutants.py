"""Mutants: kernels with one instruction taken out, or one constant or comparison off by one, and whether the cases
notice. `python test/ptx mutate` runs them all and prints what is not noticed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from ptx.cases import CASES, Case, run
from ptx.decoding import decode
from ptx.launches import Executed
from ptx.package import Flags
from ptx.parsing import Instruction, Kernel
from ptx.values import LANES, U64

TILE = 256  # columns of every Blackwell kernel's tile
PLAIN = Flags()
GARBAGE = 0x5A5A5A5A5A5A5A5A

SYNCHRONISING = re.compile(
    r"bar\.sync|bar\.arrive|bar\.warp|try_wait|fence\.proxy|mbarrier\.arrive|commit|wait_group|wait::ld|"
    r"barrier\.cluster|dealloc"
)
OFF_BY_ONE = re.compile(r"(add|sub|and|shl|shr|mul\.lo)\.\w?\w?\d\d|mov\.b32|(st|ld)\.(shared|global)")
OTHER_COMPARISON = {"gt": "ge", "ge": "gt", "lt": "le", "le": "lt", "eq": "ne", "ne": "eq"}


@dataclass
class Mutant:
    """An instruction of a kernel, and what it becomes: a function of a warp."""

    index: int
    text: str
    kind: str
    code: object

    def __str__(self) -> str:
        return f"{self.index} {self.text}"


def without_synchronisation(kernel: Kernel, executed: np.ndarray) -> Iterator[Mutant]:
    """Each synchronising instruction that ran, left out. A wait that only looks (try_wait without a time to suspend
    for) saves time and guards nothing."""
    for i, instruction in enumerate(kernel.instructions):
        if not executed[i] or not SYNCHRONISING.search(instruction.op):
            continue
        kind = instruction.op.split(".shared")[0].split(".cta_group")[0].split(".sync.aligned")[0]
        if "try_wait" not in instruction.op:
            yield Mutant(i, instruction.text, kind, lambda warp: None)
        elif len(instruction.operands) > 3:
            passes = instruction.operands[0]
            yield Mutant(i, instruction.text, kind, lambda warp, p=passes: warp.set(p, np.asarray(True)))


def off_by_one(kernel: Kernel, executed: np.ndarray) -> Iterator[Mutant]:
    """Each integer comparison, constant and address offset that ran, off by one: < for ≤, c + 1 for c."""
    for i, instruction in enumerate(kernel.instructions):
        if not executed[i]:
            continue
        for op, operands in _changed(instruction):
            changed = Instruction(instruction.text, instruction.guard, op, operands)
            text = f"{instruction.text}  →  {op} {', '.join(operands)}"
            yield Mutant(i, text, op.split(".")[0], decode(kernel.form(changed)))


def _changed(instruction: Instruction) -> Iterator[tuple[str, list[str]]]:
    op, operands = instruction.op, instruction.operands
    comparison = re.match(r"setp\.(gt|ge|lt|le|eq|ne)\.([sub]32)", op)
    if comparison:
        yield op.replace(comparison[1], OTHER_COMPARISON[comparison[1]], 1), operands
    if not OFF_BY_ONE.match(op):
        return
    for j, operand in enumerate(operands):
        address = re.fullmatch(r"\[(%\w+)(?:\+(\d+))?\]", operand)
        if re.fullmatch(r"-?\d+", operand):
            changed = str(int(operand) + 1)
        elif address and op[:2] in ("st", "ld"):
            changed = f"[{address[1]}+{int(address[2] or 0) + _width(op)}]"
        else:
            continue
        yield op, [*operands[:j], changed, *operands[j + 1 :]]


def _width(op: str) -> int:
    """Bytes of the access: what an index off by one is off by."""
    vector = re.search(r"\.v(\d)\.", op)
    return int(vector[1] if vector else 1) * int(re.search(r"(\d+)$", op)[1]) // 8


# What a warp may still do after a wait whose only effect is that the warp ends later.
HARMLESS = re.compile(
    r"(mbarrier\.(try|test)_wait|bra|setp|selp|mov|add|sub|xor|and|or|not|shl|shr|mul|mad|ret|exit|elect)"
)


def harmless(kernel: Kernel, index: int, last_waits: set[int]) -> str:
    """Why nothing can come of leaving an instruction out, or "". Two reasons are looked for:

    a wait after which its warp does nothing but wait, reckon and end: it keeps the CTA's shared memory for others'
    arrivals, which the CTA's other warps do as well;
    synchronisation of stores in a kernel that stores nothing: groups of TMA stores, and the fence and barriers there.
    """
    instructions = kernel.instructions
    if index in last_waits:
        return "its warp only ends after it"
    if any(i.op.startswith("cp.async.bulk.tensor.2d.global") for i in instructions):
        return ""
    near = [i.op for i in instructions[max(0, index - 3) : index + 1]]
    groups = any(op.startswith("cp.async.bulk.") and "group" in op for op in near)
    if groups and re.match(r"cp\.async\.bulk|bar\.sync|fence\.proxy", instructions[index].op):
        return "there is no TMA store to order"
    return ""


def last_waits(gpu: Executed, kernel: Kernel, case: Case) -> set[int]:
    """The waits after which no warp that came to them, in a run of the case, did anything but wait, reckon and end."""
    traces: dict[int, list[int]] = {}
    original = list(kernel.code)

    def traced(index, code):
        def step(warp):
            traces.setdefault(id(warp), []).append(index)
            return code(warp)

        return step

    kernel.code[:] = [traced(i, code) for i, code in enumerate(original)]
    try:
        verdict(gpu, case, None)
    finally:
        kernel.code[:] = original
    others, found = set(), set()
    for trace in traces.values():
        ending = True
        for index in reversed(trace):  # from the end: as long as nothing else was met
            op = kernel.instructions[index].op
            if "try_wait" in op:
                (found if ending else others).add(index)
            ending = ending and HARMLESS.match(op) is not None
    return found - others


@contextmanager
def planted(kernel: Kernel, mutant: Mutant):
    original, kernel.code[mutant.index] = kernel.code[mutant.index], mutant.code
    try:
        yield
    finally:
        kernel.code[mutant.index] = original


def verdict(gpu: Executed, case: Case, seed: int | None) -> str:
    """What a run of a case says: "" where nothing is wrong."""
    gpu.seed, gpu.clusters = seed, case.clusters
    try:
        errors = run(case)
    except Exception as error:  # whatever a mutant brings about
        return str(error.__cause__ or error).split("\n")[0][:90]
    wrong = [what for what, share in errors.items() if not share <= 1]
    return f"wrong {', '.join(wrong)}" if wrong else ""


def kernel_of(gpu: Executed, case: Case) -> tuple[Kernel, np.ndarray]:
    """(kernel, how often each instruction ran) of a case, which has to be right."""
    wrong = verdict(gpu, case, None)
    if wrong:
        raise AssertionError(f"{case} is wrong without a mutant: {wrong}")
    launched = gpu.launches[-1]
    return launched.kernel, launched.counts.sum(axis=0)


def noticed(gpu: Executed, kernel: Kernel, mutant: Mutant, runs: Iterable[tuple[Case, int | None]]) -> str:
    """How one of the runs, of a case with a seed, notices a mutant, or ""."""
    with planted(kernel, mutant):
        for case, seed in runs:
            found = verdict(gpu, case, seed)
            gpu.launches.clear()
            if found:
                return f"seed {seed}: {found}"
    return ""


def valueless(gpu: Executed, kernel: Kernel, mutant: Mutant, runs: list[tuple[Case, int | None]]) -> str:
    """Why a constant that is off by one changes nothing in the runs, or "": the instruction gives the same value, or it
    does not matter which value it gives."""
    instruction, original = kernel.instructions[mutant.index], kernel.code[mutant.index]
    name = instruction.operands[0] if instruction.operands else ""
    if not name.startswith("%") or instruction.op[:2] in ("st", "ld"):
        return ""
    differs = []

    def both(warp):
        original(warp)
        value = warp.regs[name]
        mutant.code(warp)
        differs.append(not np.array_equal(value, warp.regs[name]))

    def garbage(warp):
        mutant.code(warp)
        value = warp.regs[name]
        warp.regs[name] = ~value if value.dtype == bool else np.full(LANES, GARBAGE, U64).astype(value.dtype)

    noticed(gpu, kernel, replace(mutant, code=both), runs)
    if not any(differs):
        return "the value is the same"
    return "" if noticed(gpu, kernel, replace(mutant, code=garbage), runs) else "the value goes nowhere"


def width_case(kernel: str, width: int, tile: int, flags: Flags = PLAIN) -> Case:
    """One row block, and a last tile of `width` columns. All logits are negative, so that a column beyond the
    vocabulary, which is 0, would be the largest."""
    targets = (tile + width - 1, width - 1, tile, tile - 1)
    return Case(kernel, 4, 8, tile + width, "bf16", flags, scale=0.02, negative=True, targets=targets, seed=width)


def other_cases(case: Case, instruction: Instruction) -> Iterator[Case]:
    """More of the set's cases for the same kernel: one with several tiles of every kind, and more along H than there
    are buffers; some that end within a tile; those as wide as a comparison's constant says (within the tile or one of
    its parts of 32 columns); a target in every column."""
    yield replace(case, n=600, hidden=520, vocab=case.vocab + 2 * TILE, clusters=5)
    if case.vocab % TILE == 0 or case.dtype != "bf16":
        return
    widths, constant = [33, 100, 129], instruction.operands[-1]
    if instruction.op.startswith("setp") and re.fullmatch(r"\d+", constant) and int(constant) < TILE:
        first = int(constant) % 32
        widths += [int(constant) + extra for extra in (0, 1)] + [w for w in range(TILE) if w % 32 in (first, first + 1)]
    for width in dict.fromkeys(widths):
        if 0 < width < TILE:
            yield width_case(case.kernel, width, TILE, case.flags)
    if case.kernel != "backward":
        columns = random.Random(1).sample(range(2 * TILE - 1), 2 * TILE - 1)
        yield Case(case.kernel, 2 * TILE - 1, 8, 2 * TILE - 1, case.dtype, case.flags, targets=tuple(columns))


def sample(mutants: list[Mutant], count: int | None, seed: int = 1) -> list[Mutant]:
    if count is None or count >= len(mutants):
        return mutants
    return sorted(random.Random(seed).sample(mutants, count), key=lambda mutant: mutant.index)


def report(arch: str, names: list[str], seeds: list[int | None], which: str, count: int | None) -> None:
    """Prints a line for each mutant that is not noticed, and the shares."""
    make = {"sync": without_synchronisation, "values": off_by_one}[which]
    with Executed() as gpu:
        for name in names:
            case = CASES[name]
            kernel, executed = kernel_of(gpu, case)
            lasts = last_waits(gpu, kernel, case) if which == "sync" else set()
            tally: dict[str, list[int]] = {}
            equal = 0
            for mutant in sample(list(make(kernel, executed)), count):
                runs = [(case, seed) for seed in seeds]
                if which == "values":
                    others = other_cases(case, kernel.instructions[mutant.index])
                    runs += [(other, None if i else 0) for i, other in enumerate(others)]
                found = noticed(gpu, kernel, mutant, runs)
                reason = ""
                if not found:
                    sync = which == "sync"
                    reason = harmless(kernel, mutant.index, lasts) if sync else valueless(gpu, kernel, mutant, runs)
                equal += bool(reason)
                if not found:
                    print(f"{arch} {name}: not noticed: {mutant}{' — ' * bool(reason)}{reason}", flush=True)
                if not reason:
                    hits = tally.setdefault(mutant.kind, [0, 0])
                    hits[0], hits[1] = hits[0] + bool(found), hits[1] + 1
            print(f"{arch} {name}: {which}: {_shares(tally, equal)}", flush=True)


def _shares(tally: dict[str, list[int]], equal: int) -> str:
    hit, total = (sum(column) for column in zip(*tally.values(), strict=True))
    kinds = ", ".join(f"{kind} {a}/{b}" for kind, (a, b) in sorted(tally.items()))
    without = f", {equal} more change nothing" if equal else ""
    return f"{hit} of {total} noticed ({hit / total:.1%}){without}: {kinds}"

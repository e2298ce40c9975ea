"""What each warp of a Blackwell kernel does a tile, against the time of the tile's MMAs: is the epilogue hidden?

    python test/ptx count

Executed instructions are counted by the interpreter: two runs that differ in tiles, two that differ in H. The
epilogue's machine code is read off the cubin between its loads of tensor memory, and counted as often as the PTX there
runs; what goes to the MUFU is the same in both.

Assumed of a B200 (stated in benchmark/NOTES.md): 2250 TFLOP/s of dense bf16 and 148 multiprocessors, 8192 operations a
clock and multiprocessor, so 1.86 GHz and 8·H clocks for the 2·256·256·H operations of a pair's tile. Each of an
epilogue's four warps has a scheduler of its own, which issues one instruction a clock; for 32 lanes, of these units
    MUFU (ex2, rcp, lg2)                              8 clocks    16 lanes a clock and multiprocessor
    compare, select, min, max, integer, conversion    2 clocks    64 lanes
    FFMA, FADD, FMUL                                  1 clock     128 lanes; 2 where packed (FFMA2: two values a lane)
(CUDA C++ Programming Guide, arithmetic instruction throughput). The largest of these sums bounds the time from below:
waits on memory, barriers and dependencies come on top.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, replace

from ptx import package
from ptx.cases import Case, make, run
from ptx.launches import Executed, Launched
from ptx.package import Flags

HIDDEN = (576, 1024, 2048, 4096, 8192)
CLOCKS_PER_HIDDEN = 8  # of a tile's MMAs
EVERYTHING = Flags(bias=True, softcap=True, ce_weight=True, smoothing=True, argmax=True)
KERNELS = {
    "forward, plain": Case("forward", 256, 64, 512),
    "forward, plain, ragged": Case("forward", 256, 64, 509),
    "forward, softcap": Case("forward", 256, 64, 512, flags=Flags(softcap=True)),
    "forward, argmax": Case("forward", 256, 64, 512, flags=Flags(argmax=True)),
    "forward, every option, ragged": Case("forward", 256, 64, 509, flags=EVERYTHING),
    "exponentials, plain": Case("exp", 256, 64, 512),
    "exponentials, plain, ragged": Case("exp", 256, 64, 509),
    "exponentials, softcap": Case("exp", 256, 64, 512, flags=Flags(softcap=True)),
    "exponentials, every option, ragged": Case("exp", 256, 64, 509, flags=EVERYTHING),
    "dz, plain": Case("backward", 256, 64, 512),
    "dz, every option": Case("backward", 256, 64, 512, flags=replace(EVERYTHING, argmax=False)),
}
MUFU = re.compile(r"(ex2|rcp|lg2)\.")
PACKED = re.compile(r"F(FMA|ADD|MUL)2")
FLOAT = re.compile(r"F(FMA|ADD|MUL)|IMAD")
HALF_RATE = re.compile(
    r"FMNMX|FSEL|FSETP|HSETP2|ISETP|SEL|LOP3|SHF|IADD3|VIADD|IMNMX|VIMNMX|PRMT|F2F|I2F|F2I|LEA|PLOP3|FCHK"
)
SPILL = re.compile(r"STL|LDL")


@dataclass
class Work:
    """Of an epilogue warp a tile: PTX instructions, machine instructions by kind, and the clocks they need at least."""

    ptx: float
    sass: float
    spills: float
    clocks: dict[str, float]

    @property
    def least(self) -> float:
        return max(self.clocks.values())


def launched(gpu: Executed, case: Case) -> Launched:
    gpu.seed, gpu.clusters = None, 1
    errors = run(case)
    if not all(share <= 1 for share in errors.values()):
        raise AssertionError(f"{case}: {errors}")
    return gpu.launches[-1]


def per_tile(gpu: Executed, case: Case):
    """(counts (warps, instructions) a tile and CTA, the launch): a run of six tiles less one of two, by four."""
    tile = package.tile_columns(case.kernel, make(case))
    few, many = launched(gpu, case), launched(gpu, replace(case, vocab=case.vocab + 4 * tile))
    return (many.counts - few.counts) / 4 / 2, many


def roles(launch: Launched) -> dict[str, list[int]]:
    """Role → warps: by what they execute."""
    marks = {
        "epilogue": "tcgen05.ld",
        "MMA": "tcgen05.mma",
        "loads": "cp.async.bulk.tensor.2d.shared",
        "scheduler": "st.async",
    }
    found: dict[str, list[int]] = {}
    for warp, counts in enumerate(launch.counts):
        ops = {i.op for i, count in zip(launch.kernel.instructions, counts, strict=True) if count}
        role = next((role for role, mark in marks.items() if any(op.startswith(mark) for op in ops)), "idle")
        found.setdefault(role, []).append(warp)
    return found


def machine_code(cubin: bytes) -> list[str]:
    """The opcodes of a cubin's SASS, in order, with their suffixes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([package.find_nvdisasm(), file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE)


def region(ops: list[str], load: str) -> range:
    """From the first load of tensor memory to the last, and as far again as the last is from the one before it."""
    at = [i for i, op in enumerate(ops) if op.startswith(load)]
    return range(at[0], min(len(ops), 2 * at[-1] - at[-2]))


def epilogue(counts, launch: Launched) -> Work:
    ptx_ops = [i.op for i in launch.kernel.instructions]
    sass_ops = machine_code(launch.compiled.__cubin__)
    ptx_region, sass_region = region(ptx_ops, "tcgen05.ld"), region(sass_ops, "LDTM")
    executed = sum(counts[i] for i in ptx_region)
    share = executed / len(
        ptx_region
    )  # what is skipped, as a target that lies elsewhere, is skipped in machine code too
    sass = Counter(sass_ops[i] for i in sass_region)

    def number(kind) -> float:
        return share * sum(count for op, count in sass.items() if kind.match(op))

    total = share * len(sass_region)
    clocks = {
        "issue": total,
        "MUFU": 8 * sum(count for op, count in zip(ptx_ops, counts, strict=True) if MUFU.match(op)),
        "half rate": 2 * number(HALF_RATE),
        "float": number(FLOAT) + number(PACKED),  # PACKED is of FLOAT's names: counted twice
    }
    return Work(float(counts.sum()), total, number(SPILL), clocks)


def report() -> None:
    """Prints a table in Markdown, the epilogue against the MMAs, and what the other warps execute."""
    columns = ["kernel", "PTX; SASS", "spills", "clocks: issue, MUFU, half rate, float", "hidden from H"]
    columns += [f"H={hidden}" for hidden in HIDDEN]
    print(_row(columns))
    print(_row(["---"] * len(columns)))
    others = {}
    with Executed() as gpu:
        for name, case in KERNELS.items():
            counts, launch = per_tile(gpu, case)
            warps = roles(launch)
            work = epilogue(counts[warps["epilogue"][0]], launch)
            clocks = ", ".join(f"{value:.0f}" for value in work.clocks.values())
            shares = [f"{work.least / (CLOCKS_PER_HIDDEN * hidden):.2f}" for hidden in HIDDEN]
            hidden_from = f"{work.least / CLOCKS_PER_HIDDEN:.0f}"
            print(
                _row([name, f"{work.ptx:.0f}; {work.sass:.0f}", f"{work.spills:.0f}", clocks, hidden_from, *shares]),
                flush=True,
            )
            if name.endswith(", plain"):
                others[name] = _other_warps(gpu, case, counts, launch, warps)
            gpu.launches.clear()
    print("\nPTX instructions a tile of the other warps:")
    for name, text in others.items():
        print(f"{name}: {text}")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _other_warps(gpu: Executed, case: Case, counts, launch: Launched, warps: dict[str, list[int]]) -> str:
    """PTX instructions a tile of the other warps: a constant, and for each 64 of H."""
    deeper, _ = per_tile(gpu, replace(case, hidden=case.hidden + 4 * 64))
    text = []
    for role, members in warps.items():
        if role not in ("epilogue", "idle"):
            now, then = (float(c[members].sum()) for c in (counts, deeper))
            step = (then - now) / 4
            text.append(f"{role} {now - step:.0f} + {step:.1f}·H/64")
    return ", ".join(text)

"""python -m liger_cutedsl compile: every CuTe kernel for an architecture, compiled on a machine without a GPU.

The compiled kernels land in quack's on-disk cache (QUACK_CACHE_DIR), where a run on that architecture finds them,
so a container build can ship them. Each one's machine code is disassembled and checked: a kernel must multiply with
its architecture's matrix instruction (architectures.py), and the forward must store no matrix.

quack and CuTe DSL read their target architecture when they are imported, so each architecture is compiled in
processes of its own (this module run as a script); they print one JSON line a kernel.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from liger_cutedsl.call import Problem
from liger_cutedsl.engines import architectures
from liger_cutedsl.kernel_variants import DTYPES, Variant, all_variants, options_of
from liger_cutedsl.objective import RowCoefficients
from liger_cutedsl.tiling import Tile
from liger_cutedsl.two_part_sum import TwoPartSum


@dataclass
class Compiled:
    """What came of a variant. spilled_words: 32-bit words stored to local memory by spill instructions.

    matrix_instruction: the tensor-core instruction found, with its count. tma_stores: bulk tensor stores (the way
    an output matrix leaves). error: why the variant failed, or "".
    """

    arch: str
    name: str
    tile: str = ""
    registers: int = 0
    spilled_words: int = 0
    matrix_instruction: str = ""
    tma_stores: int = 0
    seconds: float = 0.0
    error: str = ""


def compile_architecture(arch: str, variants: list[Variant], jobs: int) -> list[Compiled]:
    """Compiles the variants in `jobs` processes. Results come in the variants' order."""
    chosen = {variant.name for variant in variants}
    order = [variant.name for variant in all_variants() if variant.name in chosen]
    shares = [order[i::jobs] for i in range(jobs) if order[i::jobs]]
    with ThreadPoolExecutor(len(shares)) as pool:
        done = itertools.chain.from_iterable(pool.map(lambda names: _run_worker(arch, names), shares))
    by_name = {compiled.name: compiled for compiled in done}
    return [by_name[name] for name in order]


def target_environment(arch: str) -> dict[str, str]:
    """The environment of a process that compiles for an architecture, and sees no GPU."""
    major, minor = architectures.of_target(arch).capability
    return {"QUACK_ARCH": f"{major}{minor}", "CUTE_DSL_ARCH": arch, "CUDA_VISIBLE_DEVICES": ""}


def _run_worker(arch: str, names: list[str]) -> list[Compiled]:
    environment = {**os.environ, **target_environment(arch)}
    command = [sys.executable, "-m", "liger_cutedsl.ahead_of_time", arch]
    worker = subprocess.run(command, env=environment, input="\n".join(names), capture_output=True, text=True)
    lines = [line for line in worker.stdout.splitlines() if line.startswith('{"arch"')]
    results = [Compiled(**json.loads(line)) for line in lines]
    missing = names[len(results) :]
    reason = f"the compiling process ended with {worker.returncode}: {worker.stderr.strip()[-500:]}"
    return results + [Compiled(arch, name, error=reason) for name in missing]


def _work(arch: str) -> None:
    """The worker: variant names on standard input, JSON lines on standard output."""
    import quack.gemm_runtime.host as host

    import liger_cutedsl.engines.cute_engine  # noqa: F401  (which settles where kernels are kept)

    # The one question a compilation asks the driver; its answer sizes launches and is not compiled in.
    host.get_max_active_clusters = lambda *_: 1
    wanted = set(sys.stdin.read().split())
    for variant in all_variants():
        if variant.name in wanted:
            print(json.dumps(asdict(_compile(arch, variant))), flush=True)


def _compile(arch: str, variant: Variant) -> Compiled:
    import quack.cache
    from quack.cache import get_cache_path

    result = Compiled(arch, variant.name)
    start = time.perf_counter()
    final = get_cache_path()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            quack.cache.CACHE_DIR = scratch  # so that the object compiled now is the only one there
            result.tile = str(_trace(variant))
            result.seconds = round(time.perf_counter() - start, 2)
            (compiled,) = Path(scratch).rglob("*.o")
            _describe(result, compiled.read_bytes())
            folder = final / compiled.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f"{compiled.name}.{os.getpid()}"
            temporary.write_bytes(compiled.read_bytes())
            temporary.replace(folder / compiled.name)
        result.error = check(result)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
    finally:
        quack.cache.CACHE_DIR = str(final)
    return result


def _trace(variant: Variant):
    """Runs the engine on small CPU tensors without launching: the very path of a real call. Returns the tile."""
    from liger_cutedsl.engines.cute_engine import CuteEngine, exp_kind, tile_of

    flags, n, hidden = variant.flags, 128, 64
    options = options_of(flags)
    here, wide = {"device": "cpu"}, {"dtype": torch.float32, "device": "cpu"}
    kernel = exp_kind(options) if variant.kernel == "exp" else variant.kernel
    tile = tile_of(kernel, torch.empty(1, **wide))
    vocab = 2 * tile.tile_n - variant.ragged
    x = torch.zeros(n, hidden, dtype=DTYPES[variant.dtype], **here)
    vector = torch.zeros(vocab, **wide)
    problem = Problem(
        x,
        torch.zeros(vocab, hidden, dtype=x.dtype, **here),
        torch.zeros(n, dtype=torch.int64, **here),
        vector if flags.bias else None,
        vector if flags.ce_weight else None,
        options=options,
    )
    engine, row = CuteEngine(launch=False), torch.zeros(n, **wide)
    out = torch.empty(n, 2 * tile.tile_n, dtype=x.dtype, **here)[:, :vocab]
    if variant.kernel == "forward":
        engine.row_statistics(problem, vocab)
    elif variant.kernel == "exp":
        engine.exp_chunk(problem, out)
    elif variant.kernel == "dw-sum":
        engine.add_product(out, problem.x, TwoPartSum.zero(problem.weight), 1.0, 1.0)
    else:
        c, h = row if flags.smoothing else None, row if flags.entropy else None
        engine.dz_tile(problem, row, RowCoefficients(row, c, row, h), Tile(0, vocab), out)
    return tile


def _describe(result: Compiled, compiled: bytes) -> None:
    """Reads registers, spills, matrix instructions and TMA stores off the machine code."""
    sass = disassemble(compiled)
    registers = re.findall(r"EIATTR_REGCOUNT.*?\.word\s+0x([0-9a-f]+)", sass, re.DOTALL)
    result.registers = max((int(count, 16) for count in registers), default=0)
    # STL, STL.64 and STL.128 store 1, 2 and 4 words of a thread to local memory.
    widths = re.findall(r"\bSTL(?:\.(\d+))?(?=[\s.])", sass)
    result.spilled_words = sum(int(width or 32) // 32 for width in widths)
    instructions = Counter(re.findall(r"\b([A-Z]+MMA(?:\.2CTA)?)\b", sass))
    if instructions:
        expected = architectures.of_target(result.arch).matrix_instruction
        found = expected if expected in instructions else max(instructions, key=instructions.get)
        result.matrix_instruction = f"{instructions[found]} {found}"
    result.tma_stores = len(re.findall(r"\bUTMASTG\b", sass))


def disassemble(compiled: bytes) -> str:
    """The SASS of the GPU code inside a compiled kernel's object file. Raises RuntimeError without nvdisasm."""
    start = compiled.find(b"\x7fELF", 4)  # the first is the object file itself
    if start < 0:
        raise RuntimeError("the compiled object holds no GPU code")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled[start:])
        cubin.flush()
        done = subprocess.run([find_nvdisasm(), cubin.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed: {done.stderr.strip()[:300]}")
    return done.stdout


@functools.cache
def find_nvdisasm() -> str:
    """The newest nvdisasm there is: the nvidia-cuda-nvdisasm package's, the PATH's, else triton's (which knows no
    sm_103a in triton 3.6). Raises RuntimeError."""
    for package, pattern in (("nvidia", "*/bin/nvdisasm"), (None, None), ("triton", "backends/nvidia/bin/nvdisasm")):
        if package is None:
            found = [shutil.which("nvdisasm")]
        else:
            spec = importlib.util.find_spec(package)
            folders = spec.submodule_search_locations if spec else ()
            found = [str(path) for folder in folders for path in sorted(Path(folder).glob(pattern), reverse=True)]
        if found and found[0]:
            return found[0]
    raise RuntimeError("nvdisasm was not found: `pip install nvidia-cuda-nvdisasm` brings it")


def check(result: Compiled) -> str:
    """What is wrong with a compiled kernel, or ""."""
    if not result.matrix_instruction:
        return "no tensor-core instruction"
    row = architectures.of_target(result.arch)
    if row.matrix_instruction not in result.matrix_instruction.split():
        return f"no {row.instruction_kind} matrix instruction, only {result.matrix_instruction}"
    if result.name.startswith("forward") and result.tma_stores:
        return f"the store-free forward has {result.tma_stores} TMA stores"
    return ""


def table(results: list[Compiled]) -> str:
    header = ("arch", "kernel", "tile", "registers", "spilled words", "matrix instruction", "TMA stores", "seconds")
    rows = [
        (
            r.arch,
            r.name,
            r.tile,
            r.registers,
            r.spilled_words,
            r.matrix_instruction,
            r.tma_stores,
            f"{r.seconds:.1f}" + (f"  FAILED: {r.error}" if r.error else ""),
        )
        for r in results
    ]
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(str(v)) for v in column[:-1] or column) for column in columns]
    return "\n".join(
        "  ".join(str(v).ljust(w) for v, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)
    )


if __name__ == "__main__":
    _work(sys.argv[1])

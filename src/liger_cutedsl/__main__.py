"""python -m liger_cutedsl: what runs on this machine, on which path, and why.

python -m liger_cutedsl --check      runs a small call here, through Liger-Kernel's entrance too, and says who answered
python -m liger_cutedsl --version    the version alone
python -m liger_cutedsl compile      builds the kernels ahead of time
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch

from liger_cutedsl import __version__, ahead_of_time, explain, kernel_variants, self_check
from liger_cutedsl.compat import FakeTensorMode
from liger_cutedsl.engines import architectures
from liger_cutedsl.kernel_cache import chosen_folder, obstacle_of
from liger_cutedsl.versions import TESTED, installed, is_untested, tested

PACKAGES = (
    "liger-cutedsl",
    "liger-kernel",
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "transformers",
    "trl",
)
# (name, tokens, H, V, dtype) of a few heads people train.
TYPICAL = (
    ("Llama-3 8B", 8192, 4096, 128256, torch.bfloat16),
    ("Qwen3 0.6B", 8192, 1024, 151936, torch.bfloat16),
    ("Gemma 2 2B", 8192, 2304, 256000, torch.bfloat16),
    ("float32 head", 4096, 2048, 32000, torch.float32),
)


def report() -> None:
    print("versions")
    for package in PACKAGES:
        print(f"  {package:20} {_version(package)}")
    print("device")
    for line in _device_lines():
        print(f"  {line}")
    print("compiled kernels")
    folder = chosen_folder(os.environ.get("QUACK_CACHE_DIR"))
    print(f"  {folder}: {obstacle_of(folder) or 'kept from run to run'}")
    print("Liger-Kernel")
    for line in _liger_lines():
        print(f"  {line}")
    print("routes (forward and backward)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, *head in TYPICAL:
        print(f"  {name:13} {_sizes(*head)}: {_route(device, *head)}")
    name, *head = TYPICAL[0]
    print(f"  {name:13} log-probabilities and entropy: {_route(device, *head, log_probs=True, return_entropy=True)}")
    print(f"  {name:13} a row loss of every statistic: {_route(device, *head, row_loss=_every_statistic)}")
    advice = list(_advice())
    if advice:
        print("for more")
        for line in advice:
            print(f"  {line}")


def _version(package: str) -> str:
    if package in TESTED and is_untested(package):
        return f"{installed(package)}, not tested: {tested(package)} was"
    return installed(package) or "not installed"


def _device_lines():
    if not torch.cuda.is_available():
        yield "no GPU: the torch engine runs on the CPU"
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield f"cuda:{index} {torch.cuda.get_device_name(index)}, sm_{major}{minor}"


def _liger_lines():
    chosen = os.environ.get("LIGER_KERNEL_IMPL", "")
    yield f"LIGER_KERNEL_IMPL={chosen or '(not set)'}"
    if not installed("liger-kernel"):
        yield "not installed: this package runs without it"
        return
    try:
        from liger_kernel.ops.backends.registry import IMPL_REGISTRY

        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction as selected
    except Exception as error:
        yield f"liger_kernel.ops does not import: {error}"
        return
    yield f"FLCE comes from {selected.__module__}"
    path = IMPL_REGISTRY["cutedsl"].module_path if "cutedsl" in IMPL_REGISTRY else "nothing"
    yield f"LIGER_KERNEL_IMPL=cutedsl loads {path}"


def _sizes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> str:
    return f"N={tokens} H={hidden} V={vocab}"


def _every_statistic(values):
    return values.lse - values.log_prob - values.entropy - values.mean_logit * values.argmax


def _route(device: str, tokens: int, hidden: int, vocab: int, dtype: torch.dtype, **operator):
    with FakeTensorMode():  # shapes and devices without memory
        x = torch.empty(tokens, hidden, dtype=dtype, device=device, requires_grad=True)
        weight = torch.empty(vocab, hidden, dtype=dtype, device=device, requires_grad=True)
        try:
            return explain(x, weight, **operator)
        except (RuntimeError, ValueError) as error:  # what the environment asks for cannot be, or not here
            return error


def _advice():
    if not installed("quack-kernels") or not installed("nvidia-cutlass-dsl"):
        yield "pip install 'liger-cutedsl[cu13]' brings the CuTe kernels (Linux, a Hopper or Blackwell GPU, CUDA 13)"
    if not installed("transformers"):
        yield "pip install transformers for Liger's apply_liger_kernel_to_* functions"
    if _registered_elsewhere():
        yield _registered_elsewhere()


def _registered_elsewhere() -> str | None:
    """Why LIGER_KERNEL_IMPL=cutedsl does not load this package in a process that has Liger-Kernel, or None."""
    try:
        from liger_kernel.ops.backends.registry import IMPL_REGISTRY

        import liger_kernel
    except Exception:  # there is none; or the report says that it does not import
        return None
    selected = IMPL_REGISTRY.get("cutedsl")
    if selected is not None and selected.module_path == "liger_cutedsl.liger.operators":
        return None
    ours, liger = _registration(), Path(liger_kernel.__file__).parent
    if ours is None:
        return (
            "Liger does not find this package (an editable install puts no file into Liger's folder): install it "
            "with a plain `pip install`, or call liger_cutedsl.enable()"
        )
    return (
        f"Liger does not find this package: Liger is {liger}, and what registers it there was installed as {ours}. "
        f"Install both into one folder, or call liger_cutedsl.enable()"
    )


def _registration() -> Path | None:
    """The file that Liger-Kernel's discovery is to find, as it was installed; None in an editable install."""
    files = metadata.files("liger-cutedsl") or () if installed("liger-cutedsl") else ()
    found = [f for f in files if f.as_posix() == "liger_kernel/ops/cutedsl_flce/__init__.py"]
    return Path(found[0].locate()) if found else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m liger_cutedsl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"liger-cutedsl {__version__}")
    parser.add_argument("--check", action="store_true", help="run a small call; exit status 1 where one is wrong")
    commands = parser.add_subparsers(dest="command", metavar="compile")
    compiling = commands.add_parser("compile", help="compile the CuTe kernels; needs no GPU")
    compiling.add_argument("--arch", action="append", choices=architectures.TARGETS, help="may be given more than once")
    compiling.add_argument("--typical", action="store_true", help="a representative few instead of every kernel")
    compiling.add_argument("--dtype", action="append", choices=kernel_variants.DTYPES, help="those of one dtype alone")
    compiling.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    compiling.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    if chosen.command == "compile":
        return run_compile(chosen)
    if chosen.check:
        return run_check()
    report()
    return 0


def run_check() -> int:
    lines, right = self_check.check()
    print(*lines, sep="\n")
    return int(not right)


def run_compile(chosen) -> int:
    """Compiles, prints, and returns 1 where a kernel failed or is not what it should be."""
    variants = kernel_variants.typical_variants() if chosen.typical else kernel_variants.all_variants()
    variants = [variant for variant in variants if variant.dtype in (chosen.dtype or kernel_variants.DTYPES)]
    results = []
    for arch in chosen.arch or architectures.SUPPORTED_TARGETS:
        results += ahead_of_time.compile_architecture(arch, variants, max(1, chosen.jobs))
    print(json.dumps([asdict(r) for r in results], indent=1) if chosen.json else ahead_of_time.table(results))
    return int(any(r.error for r in results))


if __name__ == "__main__":
    sys.exit(main())

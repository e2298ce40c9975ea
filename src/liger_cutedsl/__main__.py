"""python -m liger_cutedsl: what runs on this machine, on which path, and why. With `compile`: build the kernels."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

import torch

from liger_cutedsl import compile_kernels, explain
from liger_cutedsl.kernel_cache import chosen_folder, obstacle_of
from liger_cutedsl.versions import installed

PACKAGES = (
    "liger-cutedsl",
    "liger-kernel",
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "transformers",
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
        print(f"  {package:20} {installed(package) or 'not installed'}")
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
    for name, tokens, hidden, vocab, dtype in TYPICAL:
        print(f"  {name:13} N={tokens} H={hidden} V={vocab}: {_route(device, tokens, hidden, vocab, dtype)}")
    advice = list(_advice())
    if advice:
        print("for more")
        for line in advice:
            print(f"  {line}")


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
    try:
        from liger_kernel.ops.backends.registry import IMPL_REGISTRY

        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction as selected
    except Exception as error:
        yield f"liger_kernel.ops does not import: {error}"
        return
    yield f"FLCE comes from {selected.__module__}"
    path = IMPL_REGISTRY["cutedsl"].module_path if "cutedsl" in IMPL_REGISTRY else "nothing"
    yield f"LIGER_KERNEL_IMPL=cutedsl loads {path}"


def _route(device: str, tokens: int, hidden: int, vocab: int, dtype: torch.dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # shapes and devices without memory
        x = torch.empty(tokens, hidden, dtype=dtype, device=device, requires_grad=True)
        weight = torch.empty(vocab, hidden, dtype=dtype, device=device, requires_grad=True)
        try:
            return explain(x, weight)
        except RuntimeError as error:  # an engine forced by the environment that cannot run here
            return error


def _advice():
    if not installed("quack-kernels") or not installed("nvidia-cutlass-dsl"):
        yield "pip install 'liger-cutedsl[cu13]' brings the CuTe kernels (Linux, a Hopper or Blackwell GPU, CUDA 13)"
    if not installed("transformers"):
        yield "pip install transformers for Liger's apply_liger_kernel_to_* functions"
    from liger_kernel.ops.backends.registry import IMPL_REGISTRY

    if "cutedsl" in IMPL_REGISTRY and IMPL_REGISTRY["cutedsl"].module_path != "liger_cutedsl.liger_ops":
        yield (
            "Liger does not find this package (an editable install puts no file into Liger's folder): install it "
            "with a plain `pip install`, or call liger_cutedsl.enable()"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m liger_cutedsl", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="compile")
    compiling = commands.add_parser("compile", help="compile the CuTe kernels; needs no GPU")
    compiling.add_argument(
        "--arch", action="append", choices=compile_kernels.ARCHITECTURES, help="may be given more than once"
    )
    compiling.add_argument("--typical", action="store_true", help="a representative few instead of every kernel")
    compiling.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    compiling.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    if chosen.command == "compile":
        return run_compile(chosen)
    report()
    return 0


def run_compile(chosen) -> int:
    """Compiles, prints, and returns 1 where a kernel failed or is not what it should be."""
    variants = compile_kernels.typical_variants() if chosen.typical else compile_kernels.all_variants()
    results = []
    for arch in chosen.arch or compile_kernels.ARCHITECTURES:
        results += compile_kernels.compile_architecture(arch, variants, max(1, chosen.jobs))
    print(json.dumps([asdict(r) for r in results], indent=1) if chosen.json else compile_kernels.table(results))
    return int(any(r.error for r in results))


if __name__ == "__main__":
    sys.exit(main())

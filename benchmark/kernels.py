"""Where a call's time goes: GPU time by kernel, and the host's, of forward + backward with the default.

python -m benchmark kernels [--model NAME]    heads of the sweep "heads", in a table next to the products alone
"""

from __future__ import annotations

import collections
import statistics
import time

import torch

from benchmark.implementations import IMPLEMENTATIONS
from benchmark.measure import Shape
from benchmark.sweeps import HEADS

# Kernels by what their names contain, in this order.
KINDS = {
    "products": ("nvjet", "gemm_", "cutlass", "splitK", "cublas"),
    "exponentials": ("kernel_cutlass", "Gemm"),
    "scaling": ("dz_of_exp",),
    "folds": ("fold_",),
    "targets": ("summarize",),
}
CALLS = 10


def kind_of(name: str) -> str:
    """exponentials before products: a CuTe kernel's name has cutlass in it, too."""
    if name.startswith(KINDS["exponentials"]):
        return "exponentials"
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def gpu_times(call) -> tuple[dict[str, float], float, int]:
    """(ms a call by kind of kernel, ms a call between kernels, launches a call)."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kinds, spans = collections.Counter(), sorted((e.time_range.start, e.time_range.end) for e in kernels)
    for event in kernels:
        kinds[kind_of(event.name)] += event.time_range.elapsed_us() / 1e3 / CALLS
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy, reached = busy + max(0.0, end - max(start, reached)), max(reached, end)
    gaps = (reached - spans[0][0] - busy) / 1e3 / CALLS
    return dict(kinds), gaps, len(kernels) // CALLS


def host_ms(call, calls: int = 50) -> float:
    """What the host takes for a warm call that nothing holds up: the queue is empty before each."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def table(heads, implementations=("floor", "single_pass", "quack-base"), tokens=8192) -> str:
    lines = [f"{'head':14} {'':12} {'host ms':>8} {'gaps':>6} {'launches':>8}  ms by kernel"]
    for model, hidden, vocab in heads:
        x, weight, target = Shape(tokens, vocab, hidden).inputs("cuda")
        for name in implementations:
            run = IMPLEMENTATIONS[name].make()

            def call(run=run, x=x, weight=weight, target=target):
                x.grad = weight.grad = None
                run(x, weight, target)

            kinds, gaps, launches = gpu_times(call)
            shown = ", ".join(f"{kind} {ms:.3f}" for kind, ms in sorted(kinds.items(), key=lambda item: -item[1]))
            lines.append(f"{model:14} {name:12} {host_ms(call):8.3f} {gaps:6.2f} {launches:8}  {shown}")
    return "\n".join(lines)


def main(models: list[str] | None = None) -> int:
    if not torch.cuda.is_available():
        print("python -m benchmark kernels needs an NVIDIA GPU")
        return 2
    heads = [head for head in HEADS if not models or head[0] in models]
    print(table(heads))
    print("\nN = 256, V = 32000, H = 1024, where the host is all there is:")
    print(table([("small", 1024, 32000)], tokens=256))
    return 0

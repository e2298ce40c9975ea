"""Host time of warm calls on the CuTe engine where there is no GPU: all that Python does, and no launch.

quack prepares each GEMM and does not launch it; Triton passes, plain products and streams are left out; numbers are
undefined. Processor time of one thread, so that other processes do not count. What Triton, cuBLAS and the driver take
for a launch on a GPU comes on top, and is the same before and after a change of ours.
"""

from __future__ import annotations

import contextlib
import statistics
import time

import torch

from ptx import package
from ptx.launches import Executed

TOKENS, VOCAB, HIDDEN = 256, 32000, 1024
CALLS = 300


class _Event:
    """One that has happened."""

    def record(self) -> None:
        pass

    synchronize = record

    def query(self) -> bool:
        return True


def report() -> None:
    torch.set_num_threads(1)
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.Event = _Event
    torch.Tensor.is_cuda = True
    package.leave_out_kernels()
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, HIDDEN, generator=generator).bfloat16().requires_grad_() for n in (TOKENS, VOCAB))
    target = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    print(f"processor time of forward + backward, N={TOKENS}, V={VOCAB}, H={HIDDEN}, bf16, no launch, {CALLS} calls")
    with Executed():
        for name, operator in package.OPERATORS.items():
            median, least = _milliseconds(lambda operator=operator: operator(x, weight, target), (x, weight))
            print(f"{name:40} {median:6.3f} ms, at least {least:6.3f}")


def _milliseconds(call, leaves) -> tuple[float, float]:
    def once() -> float:
        start = time.process_time()
        torch.autograd.grad(call(), leaves)  # backward() would add dW to the last one
        return 1e3 * (time.process_time() - start)

    for _ in range(20):  # compiles, and until an upstream gradient is expected
        once()
    times = [once() for _ in range(CALLS)]
    return statistics.median(times), min(times)

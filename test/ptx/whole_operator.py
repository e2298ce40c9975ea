"""The whole operator as a Blackwell GPU would run it, on CPU tensors, in a process of its own: importing this replaces
what needs a GPU.

    the engine's GEMMs     executed from their PTX (launches.py)
    Triton passes          in Triton's interpreter, which is made to round to bf16 instead of truncating
    plain products         by torch in float32, NaN put into what they write: a GEMM may write before it has read
    streams and events     none
    fresh memory           NaN

Tensors say that they are CUDA tensors where code asks is_cuda, and their device stays the CPU.
"""

from __future__ import annotations

import contextlib
import os

os.environ["TRITON_INTERPRET"] = "1"
ARCH = os.environ.get("PTX_ARCH", "sm_100a")

from ptx.launches import Executed, prepare  # noqa: E402

prepare(ARCH)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
import triton.runtime.interpreter as interpreter  # noqa: E402

from ptx import package  # noqa: E402
from ptx.arithmetic import bf16_bits  # noqa: E402

B200_MULTIPROCESSORS = 148


class _NoEvent:
    def record(self) -> None:
        pass

    synchronize = record


def _matmul(a, b, *, out, beta=0.0, alpha=1.0):
    old = beta * out.float() if beta else 0.0
    out.fill_(float("nan"))
    return out.copy_(alpha * (a.float() @ b.float()) + old)


_truncating_cast = interpreter.InterpreterBuilder.cast_impl


def _rounding_cast(self, source, to):
    if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
        data = np.ascontiguousarray(source.data, np.float32)
        bits = bf16_bits(data.reshape(-1)).astype(np.uint16).reshape(data.shape)
        return interpreter.TensorHandle(bits, to.scalar)
    return _truncating_cast(self, source, to)


def install() -> Executed:
    """Replaces it all, for good. Returns the launches, opened."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote is NaN
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.Event = _NoEvent
    torch.Tensor.is_cuda = True
    interpreter.InterpreterBuilder.cast_impl = _rounding_cast
    package.replace_gpu(_matmul, B200_MULTIPROCESSORS)
    return Executed(seed=1).__enter__()

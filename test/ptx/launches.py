"""Launches without a GPU: the CuTe engine's kernels on CPU tensors, their PTX executed.

The compiled host function runs as it is, on tensors that claim to be a GPU's: it makes the TMA descriptors, the grid
and the parameters. The shim hands its launch over, and the kernel's PTX, which CuTe DSL keeps with the compiled
function, is run on them. The kernel's name in the launch must be that of the PTX.

    prepare("sm_100a")          # before quack and CuTe DSL are imported: they read their architecture then
    with Executed(seed=1) as gpu:
        CuteEngine().row_statistics(problem, vocab)
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import struct
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np

from ptx.machine import Launch
from ptx.memory import GlobalMemory, Window
from ptx.parsing import Kernel
from ptx.shim import LAUNCH, load
from ptx.values import PtxError

CLUSTER_ATTRIBUTE = 4  # cudaLaunchAttributeClusterDimension
ATTRIBUTE_BYTES = 72
CUDA_DEVICE = 2  # DLPack's kDLCUDA


def prepare(arch: str, keep: str = "ptx") -> None:
    """Sets the environment that quack and CuTe DSL read when they are imported. Nothing is kept on disk.

    keep: what CuTe DSL keeps with a compiled function, "ptx,cubin" for its machine code too.
    """
    if "cutlass" in sys.modules:
        raise RuntimeError("CuTe DSL is imported already, for an architecture of its own")
    folder = tempfile.mkdtemp(prefix="ptx-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    load()
    os.environ.update(
        QUACK_ARCH=arch[3:].rstrip("a"),
        CUTE_DSL_ARCH=arch,
        CUDA_VISIBLE_DEVICES="",
        QUACK_CACHE_ENABLED="0",
        CUTE_DSL_KEEP=keep,
        CUTE_DSL_DUMP_DIR=folder,
    )


@dataclass
class Launched:
    """One launch that was executed. counts: how often each warp executed each instruction (see Launch.run).
    compiled: CuTe DSL's compiled function."""

    kernel: Kernel
    compiled: object
    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    counts: np.ndarray
    seconds: float


class Executed:
    """While it is open, quack's launches are executed here.

    seed: of the order in which warps and queues go on; None for a fixed one. clusters: how many a GPU would hold.
    launches: what ran.  kernels: by the text of their PTX; a caller may change a Kernel's code (see mutate.py).
    """

    def __init__(self, seed: int | None = None, clusters: int = 1):
        self.seed, self.clusters = seed, clusters
        self.launches: list[Launched] = []
        self.kernels: dict[str, Kernel] = {}
        self._error: BaseException | None = None
        self._callback = LAUNCH(self._on_launch)

    def __enter__(self) -> Executed:
        import quack.gemm_runtime.host as host

        load().shim_on_launch(self._callback)
        self._host, self._before = host, (host.get_max_active_clusters, host.launch_gemm)
        host.get_max_active_clusters = lambda *_: self.clusters
        host.launch_gemm = self._launch_gemm
        return self

    def __exit__(self, *_) -> None:
        self._host.get_max_active_clusters, self._host.launch_gemm = self._before

    def _launch_gemm(self, plan, *arguments) -> None:
        text = plan.compiled_fn.__ptx__
        if not text:
            raise PtxError("CuTe DSL kept no PTX with the compiled function: was prepare() called before its import?")
        if text not in self.kernels:
            self.kernels[text] = Kernel(text)
        self._kernel, self._compiled, self._memory = self.kernels[text], plan.compiled_fn, GlobalMemory()
        arguments = [self._on_device(argument) for argument in arguments]
        plan.compiled_fn(*arguments, *[None] * (9 - len(arguments)))  # trailing: scale factors, which we have none of
        if self._error:
            error, self._error = self._error, None
            raise error

    def _on_device(self, value):
        """Tensors as CUDA tensors at their CPU addresses, noting which memory the kernel may touch."""
        import torch
        import tvm_ffi

        if isinstance(value, torch.Tensor):
            self._memory.windows.append(_window(value))
            return tvm_ffi.from_dlpack(_Relabelled(value.detach()))
        if isinstance(value, tuple):
            members = [self._on_device(member) for member in value]
            return type(value)._make(members) if hasattr(value, "_make") else tuple(members)
        return value

    def _on_launch(self, config: int, name: bytes, arguments) -> int:
        try:
            if name.decode() != self._kernel.name:
                raise PtxError(f"{name.decode()} is launched, and the PTX is of {self._kernel.name}")
            grid, cluster = _geometry(config)
            params = bytearray(self._kernel.param_bytes)
            for i, (at, size) in enumerate(self._kernel.params.values()):
                params[at : at + size] = ctypes.string_at(arguments[i], size)
            start = time.perf_counter()
            counts = Launch(self._kernel, bytes(params), self._memory, grid, cluster).run(self.seed)
            seconds = time.perf_counter() - start
            self.launches.append(Launched(self._kernel, self._compiled, grid, cluster, counts, seconds))
        except BaseException as error:  # must not cross the C code: it is raised behind it
            self._error = error
        return 0


def _geometry(config: int) -> tuple[tuple, tuple]:
    """(grid, cluster) of a cudaLaunchConfig_t: grid, block, shared bytes, stream, attributes and their number."""
    *sizes, _shared, _stream, attributes, count = struct.unpack("6I Q Q Q I", ctypes.string_at(config, 52))
    cluster = (1, 1, 1)
    for i in range(count):
        raw = ctypes.string_at(attributes + ATTRIBUTE_BYTES * i, ATTRIBUTE_BYTES)
        if struct.unpack("i", raw[:4])[0] == CLUSTER_ATTRIBUTE:
            cluster = struct.unpack("3I", raw[8:20])
    return tuple(sizes[:3]), cluster


def _window(tensor) -> Window:
    """A tensor's memory; of a matrix in a wider one, its rows."""
    size = tensor.element_size()
    spans = [(s, t) for s, t in zip(tensor.shape, tensor.stride(), strict=True) if s > 1 and t > 0]
    count = sum((s - 1) * t for s, t in spans) + 1 if tensor.numel() else 0
    view = np.frombuffer((ctypes.c_uint8 * (count * size)).from_address(tensor.data_ptr()), np.uint8)
    if len(spans) == 2 and spans[1][1] == 1:
        return Window(tensor.data_ptr(), view, spans[1][0] * size, spans[0][1] * size)
    return Window(tensor.data_ptr(), view, max(count * size, 1), max(count * size, 1))


class _Relabelled:
    """DLPack of a CPU tensor that claims to lie on CUDA device 0."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return (CUDA_DEVICE, 0)

    def __dlpack__(self, **_):
        capsule = self.tensor.__dlpack__()
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(pointer_of(capsule, b"dltensor") + 8).value = CUDA_DEVICE
        return capsule

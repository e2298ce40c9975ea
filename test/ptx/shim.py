"""The shim between compiled host functions and the interpreter: built with the C compiler, put before CuTe DSL's own
runtime library in CUTE_DSL_LIBS, where the JIT linker looks for the CUDA calls of a host function. No preload."""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))


def obstacle() -> str | None:
    """Why kernels cannot be executed here, or None."""
    if not all(importlib.util.find_spec(name) for name in ("quack", "nvidia_cutlass_dsl")):
        return "quack or CuTe DSL is not installed"
    if _compiler() is None:
        return "no C compiler was found (CC, cc, gcc, clang)"
    return None


def _compiler() -> str | None:
    candidates = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def _own_runtime() -> Path:
    """CuTe DSL's library for the newest CUDA installed: what it takes itself where there is no driver."""
    (root,) = importlib.util.find_spec("nvidia_cutlass_dsl").submodule_search_locations
    found = sorted(Path(root).glob("cu*/lib/libcute_dsl_runtime.so"), key=lambda path: int(path.parts[-3][2:]))
    if not found:
        raise RuntimeError(f"CuTe DSL's runtime library is not below {root}")
    return found[-1]


@functools.cache
def load() -> ctypes.CDLL:
    """The shim, built and loaded, and CUTE_DSL_LIBS naming it: call it before CuTe DSL is imported, which reads that.
    Raises RuntimeError where obstacle() says why."""
    if reason := obstacle():
        raise RuntimeError(reason)
    folder = tempfile.mkdtemp(prefix="ptx-shim-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # not before: each kernel's linker opens it again
    library = Path(folder) / "libshim.so"
    subprocess.run([_compiler(), "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True)
    os.environ["CUTE_DSL_LIBS"] = os.pathsep.join((str(library), str(_own_runtime())))
    return ctypes.CDLL(str(library))

"""What quack has to know of an epilogue: its operands, and a name that no other epilogue has."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import astuple, is_dataclass
from pathlib import Path

from liger_cutedsl import elementwise


def with_operands(function, names):
    """Give the function the signature (acc, *names) by which quack, and a reader, learn its operands; and its name the
    identity by which quack tells compiled kernels apart."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in ("acc", *names)])
    identity = _identity(function)
    function.__name__, function.__qualname__ = (f"{n}_{identity}" for n in (function.__name__, function.__qualname__))
    return function


def _identity(function) -> str:
    """A hash of everything that decides what an epilogue computes: its file and elementwise.py, and the values it
    closes over.

    quack reads a function's code and closure only where it lies outside of site-packages; of an installed one it knows
    the name. Two functions of one name would share a compiled kernel, in memory and on disk.
    """
    sources = b"".join(Path(name).read_bytes() for name in (function.__code__.co_filename, elementwise.__file__))
    source = hashlib.sha256(sources).digest()
    closed_over = {name: _plain(name, value) for name, value in inspect.getclosurevars(function).nonlocals.items()}
    return hashlib.sha256(source + repr(sorted(closed_over.items())).encode()).hexdigest()[:16]


def _plain(name: str, value):
    """The value, where its repr says all there is to it. Raises TypeError else: it could not be told from another."""
    if is_dataclass(value):
        return type(value).__qualname__, tuple(_plain(name, field) for field in astuple(value))
    if value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"an epilogue may close over numbers, names and dataclasses of them, and {name} is {value!r}")
    return value

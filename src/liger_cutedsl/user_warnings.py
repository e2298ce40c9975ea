"""Warnings that point at the line of the user's code that called this package, by whichever road."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import warnings
import weakref
from pathlib import Path

import torch

_OURS = tuple(str(Path(module.__file__).parent) + os.sep for module in (sys.modules[__package__], torch))
_BETWEEN = (contextlib.__file__, functools.__file__, weakref.__file__)  # finalizers run where the last name goes


def warn_user(message: str) -> None:
    frame, level = inspect.currentframe().f_back, 2
    while frame.f_back is not None and _is_between(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _is_between(file: str) -> bool:
    """Whether a frame of this file lies between the user's call and the warning: ours, torch's, a compiled graph's."""
    return file.startswith((*_OURS, "<eval_with_key")) or file in _BETWEEN or f"{os.sep}torchinductor_" in file

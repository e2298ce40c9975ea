"""Instruction → function of a warp. The families of instructions each have a module; this one asks them in turn.

The function gives None (go on), EXIT, YIELD (a good place to let others go on), a tuple (label, lanes) to branch, or a
function without arguments that says whether the warp may go on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx import arithmetic, barriers, control, copies, memory, packed, tcgen05, tma, wgmma
from ptx.values import Form, PtxError, read_operand

# The first prefix that fits decides; decoders give None for what they do not know.
DECODERS = {
    **control.DECODERS,
    **barriers.DECODERS,
    **tma.DECODERS,
    **copies.DECODERS,
    **memory.DECODERS,
    **tcgen05.DECODERS,
    **wgmma.DECODERS,
    **packed.DECODERS,
    "": arithmetic.decode,
}


def decode(form: Form) -> Callable:
    """Where an instruction is unknown, a function that raises PtxError with its text: kernels may hold code that they
    never reach."""
    try:
        run = next(
            (found for prefix, decoder in DECODERS.items() if form.op.startswith(prefix) and (found := decoder(form))),
            None,
        )
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise PtxError(f"cannot decode {form.text}: {type(error).__name__} {error}") from error
    if run is None:
        return lambda warp: _unknown(form.text)
    if form.guard is None or form.op.startswith("bra"):  # a branch reads its guard itself
        return run
    return _guarded(run, form)


def _unknown(text: str):
    raise PtxError(f"unknown instruction {text}")


def _guarded(run: Callable, form: Form) -> Callable:
    """Runs for the lanes whose predicate holds."""
    negated = form.guard.startswith("!")
    predicate = read_operand(form.guard.lstrip("!"), np.bool_, form.params)

    def guarded(warp):
        before, lanes = warp.partial, predicate(warp) ^ negated
        lanes = lanes if before is None else lanes & before
        if not lanes.any():
            return None
        warp.partial = None if lanes.all() else lanes
        result = run(warp)
        warp.partial = before
        return result

    return guarded

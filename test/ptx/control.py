"""Branches, the end of a thread, and instructions without an effect that shows here."""

from __future__ import annotations

import numpy as np

from ptx.values import LANE, LANES, U32, Form, lanes_of, read_operand

EXIT, YIELD = object(), object()


def _branch(form: Form):
    label = form.operands[0]
    if form.guard is None:
        everybody = np.ones(LANES, bool)
        return lambda warp: (label, everybody)
    negated = form.guard.startswith("!")
    predicate = read_operand(form.guard.lstrip("!"), np.bool_, form.params)
    return lambda warp: (label, predicate(warp) ^ negated)


def nothing(_form: Form):
    return lambda warp: None


def _elect(form: Form):
    """elect.sync lane|p, mask: one lane of the warp, here lane 0 (the ISA leaves the choice)."""
    lane, predicate = form.operands[0].split("|")

    def elect(warp):
        warp.whole(form.op)
        warp.set(predicate, LANE == 0)
        if lane != "_":
            warp.set(lane, np.zeros(LANES, U32))

    return elect


def _shuffle(form: Form):
    """shfl.sync over the whole warp (a clamp of 31 or 0): a lane beyond the warp's ends reads itself."""
    value, lane = form.source(1, U32), form.source(2, U32)
    mode, destination = form.parts[2], form.operands[0].split("|")[0]

    def shuffle(warp):
        warp.whole(form.op)
        other = lanes_of(lane(warp)).astype(int)
        source = {"idx": other, "bfly": LANE ^ other, "down": LANE + other, "up": LANE - other}[mode]
        source = np.where((source < 0) | (source >= LANES), LANE, source)
        warp.set(destination, lanes_of(value(warp))[source])

    return shuffle


DECODERS = {
    "bra": _branch,
    "ret": lambda form: lambda warp: EXIT,
    "exit": lambda form: lambda warp: EXIT,
    "elect.sync": _elect,
    "shfl.sync": _shuffle,
    # hints, programmatic dependent launch (nothing else is launched), registers per warp, a pause
    **dict.fromkeys(("prefetch", "griddepcontrol", "setmaxnreg", "nanosleep"), nothing),
}

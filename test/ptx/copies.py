"""cp.async, the copies that a thread waits for by groups of its own (PTX ISA: cp.async)."""

from __future__ import annotations

import numpy as np

from ptx.control import YIELD
from ptx.memory import shared_at
from ptx.values import LANES, U32, Form, lanes_of


def _copy(form: Form):
    """cp.async.ca.shared.global [to], [from], size, source size: what the source lacks is zeros. It takes place as late
    as it may: at the wait for its group."""
    to, source, size = form.address(0), form.address(1), int(form.operands[2])
    given = form.source(3, U32) if len(form.operands) > 3 else None

    def copy(warp):
        targets, sources = to(warp), source(warp)
        counts = np.full(LANES, size) if given is None else lanes_of(given(warp))
        warp.copies.append((warp.active, targets, sources, counts, size))

    return copy


def _perform(warp, lanes, targets, sources, counts, size: int):
    for lane in lanes:
        count, data = int(counts[lane]), np.zeros(size, np.uint8)
        if count:
            start = int(sources[lane])
            window = warp.cluster.memory.find(start, start + count, "cp.async")
            data[:count] = window.view[start - window.address :][:count]
        shared, offset = shared_at(warp.cluster, targets[lane], size, "cp.async")
        shared.bytes[offset : offset + size] = data


def _commit(form: Form):
    def commit(warp):
        warp.copy_groups.append(warp.copies)
        warp.copies = []

    return commit


def _wait(form: Form):
    keep = int(form.operands[0])

    def wait(warp):
        while len(warp.copy_groups) > keep:
            for copy in warp.copy_groups.pop(0):
                _perform(warp, *copy)
        return YIELD

    return wait


DECODERS = {
    "cp.async.ca": _copy,
    "cp.async.commit_group": _commit,
    "cp.async.wait_group": _wait,
}

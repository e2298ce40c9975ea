"""mbarriers, named barriers, cluster barriers: where a warp waits for others (PTX ISA: Parallel Synchronization and
Communication Instructions)."""

from __future__ import annotations

import numpy as np

from ptx.control import YIELD
from ptx.memory import shared_at
from ptx.values import LANES, U32, Form, PtxError, lanes_of


class Barrier:
    """An mbarrier: a phase ends when its arrivals and its bytes are complete (PTX ISA: mbarrier, phases)."""

    def __init__(self, count: int):
        self.count = self.pending = count
        self.transactions = self.phase = 0

    def arrive(self, count: int = 1, transactions: int = 0) -> None:
        self.transactions += transactions
        self.pending -= count
        if self.pending < 0:
            raise PtxError("more arrivals at an mbarrier than it was initialised for")
        self._turn()

    def complete(self, transactions: int) -> None:
        self.transactions -= transactions
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        """Of a phase of this parity. Hardware looks at the lowest bit: quack's Hopper kernels count on beyond 1."""
        return (self.phase ^ parity) & 1 == 1


def _try_wait(form: Form):
    """With a time to suspend for, the fourth operand, it waits as long as it takes; without, it only looks."""
    predicate, address, parity = form.operands[0], form.address(1), form.source(2, U32)
    may_suspend = len(form.operands) > 3

    def try_wait(warp):
        barrier, wanted = warp.cluster.barrier(warp.uniform(address(warp))), warp.uniform(parity(warp))
        if barrier.passed(wanted) or not may_suspend:
            return warp.set(predicate, np.asarray(barrier.passed(wanted)))
        warp.set(predicate, np.asarray(True))
        return lambda: barrier.passed(wanted)

    return try_wait


def _init(form: Form):
    address, count = form.address(0), form.source(1, U32)

    def init(warp):
        addresses, counts = address(warp), lanes_of(count(warp))
        for lane in warp.active:
            shared_at(warp.cluster, addresses[lane], 8, form.op)
            if addresses[lane] % 8:
                raise PtxError("an mbarrier at an address that is no multiple of 8")
            warp.cluster.barriers[int(addresses[lane])] = Barrier(int(counts[lane]))
        return YIELD

    return init


def _arrive(form: Form):
    """arrive of a count, 1 if none is given, and arrive.expect_tx of a number of bytes."""
    address, expect = form.address(1), "expect_tx" in form.parts
    number = form.source(2, U32) if len(form.operands) > 2 else lambda warp: np.array(1, U32)
    if not expect and "complete_tx" in form.parts:
        return None

    def arrive(warp):
        addresses, numbers = address(warp), lanes_of(number(warp))
        for lane in warp.active:
            barrier, n = warp.cluster.barrier(addresses[lane]), int(numbers[lane])
            barrier.arrive(1, n) if expect else barrier.arrive(n)
        return YIELD

    return arrive


def _warp_barrier(form: Form):
    """bar.warp.sync: the lanes meet, which orders their accesses to memory."""

    def meet(warp):
        warp.whole(form.op)
        warp.accesses.unsynced.clear()

    return meet


def _named_barrier(form: Form):
    """bar.sync, bar.arrive number, threads."""
    number = form.source(0, U32)
    threads = int(form.operands[1]) if len(form.operands) > 1 else form.threads

    def barrier(warp):
        warp.whole(form.op)
        warp.accesses.unsynced.clear()
        state = warp.cta.named.setdefault(warp.uniform(number(warp)), [0, 0])  # threads arrived, generation
        generation = state[1]
        state[0] += LANES
        if state[0] == threads:
            state[:] = 0, generation + 1
        elif state[0] > threads:
            raise PtxError("more threads at a named barrier than it waits for")
        return None if form.parts[1] == "arrive" else lambda: state[1] != generation

    return barrier


def _cluster_barrier(form: Form):
    def arrive(warp):
        warp.whole(form.op)
        cluster = warp.cluster
        warp.cluster_generation = cluster.cluster_generation
        cluster.cluster_arrived += 1
        if cluster.cluster_arrived == len(cluster.warps):
            cluster.cluster_arrived, cluster.cluster_generation = 0, cluster.cluster_generation + 1

    def wait(warp):
        return lambda: warp.cluster.cluster_generation != warp.cluster_generation

    return {"arrive": arrive, "wait": wait}.get(form.parts[2])


DECODERS = {
    "mbarrier.try_wait": _try_wait,
    "mbarrier.test_wait": _try_wait,
    "mbarrier.init": _init,
    "mbarrier.arrive": _arrive,
    "barrier.cluster": _cluster_barrier,
    "bar.warp.sync": _warp_barrier,
    "bar.sync": _named_barrier,
    "bar.arrive": _named_barrier,
}

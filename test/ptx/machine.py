"""Warps, CTAs, clusters, and who goes next.

A warp is a coroutine over registers of 32 lanes; it gives way where it has to wait. Asynchronous work (TMA, st.async,
tcgen05) waits in queues. Who goes on, a warp or a queue, is drawn by a random generator, so that a missing wait shows
as a wrong result, or as an error, in some run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from ptx.control import EXIT, YIELD
from ptx.memory import Accesses, GlobalMemory, SharedMemory
from ptx.parsing import Kernel
from ptx.values import CTA_SHIFT, LANE, LANES, OFFSET_MASK, POISON32, U32, U64, PtxError, lanes_of

TMEM_LANES, TMEM_COLUMNS = 128, 512
POISON64 = 0xDEADBEEFDEADBEEF
NEVER = 1 << 30


class Cta:
    def __init__(self, cluster: Cluster, rank: int):
        self.cluster, self.rank = cluster, rank
        self.shared = SharedMemory()
        self.tmem = np.full((TMEM_LANES, TMEM_COLUMNS), POISON32, U32)
        self.tmem_allocated = 0  # columns
        self.running = cluster.kernel.threads // LANES  # warps
        self.named: dict[int, list[int]] = {}  # named barrier → [threads arrived, generation]


class Warp:
    """partial: None, or the mask of the lanes that execute now.  ready: None, or what it waits for.

    copies, copy_groups: cp.async not yet committed, and committed groups.  stores: the same of TMA stores.
    loads: of tensor memory, under way.  open, groups: wgmmas not yet committed, and committed groups.
    """

    def __init__(self, cta: Cta, index: int):
        self.cta, self.index, self.cluster = cta, index, cta.cluster
        self.regs, self.partial, self.pc, self.done, self.ready = {}, None, 0, False, None
        self.accesses, self.cluster_generation = Accesses(), 0
        self.copies, self.copy_groups, self.stores, self.store_groups = [], [], [], []
        self.loads, self.open, self.groups = [], [], []
        self.counts = [0] * len(self.cluster.kernel.code)
        self.coroutine = self._run()

    def get(self, name: str, dtype) -> np.ndarray:
        value = self.regs[name]
        try:
            return value if value.dtype == dtype else value.view(dtype)
        except AttributeError:  # of a tcgen05.ld that is still under way: machine code waits for a register it reads
            value()
            return self.get(name, dtype)

    def set(self, name: str, value: np.ndarray) -> None:
        if self.partial is not None:
            old = self._old(name, value.dtype)
            value = np.where(self.partial, value, old)
        elif value.shape != (LANES,) and value.shape != (2 * LANES,):
            value = lanes_of(value).copy()
        self.regs[name] = value

    def _old(self, name: str, dtype) -> np.ndarray:
        """What a register holds in the lanes that are not written now."""
        bits = np.dtype(bool if dtype.kind == "b" else f"u{dtype.itemsize}")
        old = self.get(name, bits) if name in self.regs else np.full(LANES, POISON64, U64).astype(bits)
        return old.view(dtype)

    @property
    def active(self) -> np.ndarray:
        return LANE if self.partial is None else np.flatnonzero(self.partial)

    def uniform(self, values) -> int:
        values = lanes_of(values)[self.active]
        if (values != values[0]).any():
            raise PtxError("an operand that must be the same in a warp is not")
        return int(values[0])

    def whole(self, what: str) -> None:
        if self.partial is not None:
            raise PtxError(f"{what} by a part of a warp")

    def _run(self):
        code, counts = self.cluster.kernel.code, self.counts
        groups = [(0, None)]  # (pc, mask), the lowest pc first: divergent lanes meet again at the join
        while groups:
            pc, mask = self._next_group(groups)
            meeting = groups[0][0] if groups else NEVER
            while pc < meeting:
                self.pc = pc
                counts[pc] += 1
                result = code[pc](self)
                pc += 1
                if result is None:
                    continue
                if result is EXIT:
                    break
                if isinstance(result, tuple):
                    pc = self._branch(*result, pc, mask, groups)
                    if pc is None:
                        break
                elif result is YIELD:
                    if self.cluster.random is not None:
                        yield
                elif groups:
                    raise PtxError("a wait in divergent code")
                else:
                    self.ready = result
                    while not result():
                        yield
                    self.ready = None
            else:
                groups.append((pc, np.ones(LANES, bool) if mask is None else mask))
        self._end()

    def _next_group(self, groups: list) -> tuple:
        groups.sort(key=lambda group: group[0])
        pc, mask = groups.pop(0)
        while groups and groups[0][0] == pc:
            mask = mask | groups.pop(0)[1]
        self.partial = mask = None if mask is None or mask.all() else mask
        return pc, mask

    def _branch(self, label: str, taken, pc: int, mask, groups: list) -> int | None:
        """Where the lanes go on together, or None where they are in `groups` now."""
        target = self.cluster.kernel.labels[label]
        lanes = taken if mask is None else taken & mask
        if not lanes.any():
            return pc
        rest = ~lanes if mask is None else mask & ~lanes
        if rest.any():
            groups += [(target, lanes), (pc, rest)]
            return None
        if groups:
            groups.append((target, mask))
            return None
        return target

    def _end(self) -> None:
        if self.stores or self.store_groups or self.copies or self.open or self.groups:
            raise PtxError("the warp ends before its copies, TMA stores or wgmmas")
        self.done = True
        self.cta.running -= 1


class Cluster:
    """One cluster of a launch: its CTAs, warps and queues.

    size: CTAs in x, y, z.  grid: of the launch, in CTAs.  random: None for a fixed order.
    tensor_queue, copy_queue: asynchronous actions; the first go in order, the second in any.
    """

    def __init__(self, launch: Launch, cluster_id: tuple, rng: random.Random | None):
        self.kernel, self.params, self.memory = launch.kernel, launch.params, launch.memory
        self.size, self.grid, self.cluster_id, self.random = launch.cluster, launch.grid, cluster_id, rng
        self.barriers: dict = {}
        self.count = self.size[0] * self.size[1] * self.size[2]
        self.ctas = [Cta(self, rank) for rank in range(self.count)]
        self.warps = [Warp(cta, i) for cta in self.ctas for i in range(self.kernel.threads // LANES)]
        self.tensor_queue, self.copy_queue, self.priorities = [], [], {}
        self.cluster_arrived = self.cluster_generation = 0
        # how often priorities change: rarely in some runs, which leave someone far behind for long
        self.restlessness = 10 ** rng.uniform(-3.5, -1) if rng else 0.0

    def run(self) -> None:
        """Runs to the end. Raises PtxError, of a deadlock too."""
        while True:
            choices = [w for w in self.warps if not w.done and (w.ready is None or w.ready())]
            choices += self.tensor_queue[:1] + self.copy_queue
            if not choices:
                break
            chosen = choices[-1] if self.random is None else self._draw(choices)
            if isinstance(chosen, Warp):
                self._go_on(chosen)
            else:
                (self.tensor_queue if chosen in self.tensor_queue[:1] else self.copy_queue).remove(chosen)
                chosen()
        stuck = [self._place(w) for w in self.warps if not w.done]
        if stuck:
            raise PtxError("deadlock:\n" + "\n".join(stuck))
        if any(cta.tmem_allocated for cta in self.ctas):
            raise PtxError("tensor memory was not freed")

    def _go_on(self, warp: Warp) -> None:
        try:
            next(warp.coroutine, None)
        except KeyError as error:
            raise PtxError(f"{self._place(warp)}: {error} was never written") from error
        except (PtxError, IndexError, ValueError) as error:
            raise PtxError(f"{self._place(warp)}: {type(error).__name__} {error}") from error

    def _draw(self, choices: list):
        """The choice of the highest priority. Priorities are random and change now and then: so each warp and queue
        is now far ahead of the others, now far behind."""
        if self.random.random() < self.restlessness:
            self.priorities.clear()
        for choice in choices:
            if choice not in self.priorities:
                self.priorities[choice] = self.random.random()
        return max(choices, key=self.priorities.__getitem__)

    def _place(self, warp: Warp) -> str:
        return f"CTA {warp.cta.rank} warp {warp.index} at `{self.kernel.instructions[warp.pc].text[:160]}`"

    def barrier(self, address):
        self.alive(int(address) >> CTA_SHIFT)
        try:
            return self.barriers[int(address)]
        except KeyError:
            raise PtxError(f"no mbarrier at {int(address):#x}") from None

    def pair(self, cta: Cta) -> list[Cta]:
        return self.ctas[cta.rank & ~1 :][:2]

    def alive(self, rank: int) -> None:
        if rank < self.count and self.ctas[rank].running == 0:
            raise PtxError(f"an access to shared memory of CTA {rank}, which has ended")

    def arrive_in(self, address: int, mask: int) -> None:
        """An arrival at the mbarrier of this offset in each CTA of a mask."""
        for rank in range(self.count):
            if mask >> rank & 1:
                self.barrier(address & OFFSET_MASK | rank << CTA_SHIFT).arrive()


@dataclass
class Launch:
    """params: the kernel's parameters as bytes.  memory: what it may touch.  grid, cluster: CTAs in x, y, z."""

    kernel: Kernel
    params: bytes
    memory: GlobalMemory
    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]

    def run(self, seed: int | None = None) -> np.ndarray:
        """Runs every cluster, one after the other. Returns how often each warp of a CTA executed each instruction,
        (warps, instructions), summed over CTAs. Raises PtxError."""
        counts = np.zeros((self.kernel.threads // LANES, len(self.kernel.code)), np.int64)
        rng = None if seed is None else random.Random(seed)
        clusters = [
            (x, y, z)
            for z in range(self.grid[2] // self.cluster[2])
            for y in range(self.grid[1] // self.cluster[1])
            for x in range(self.grid[0] // self.cluster[0])
        ]
        with np.errstate(all="ignore"):
            for place in rng.sample(clusters, len(clusters)) if rng else clusters:
                cluster = Cluster(self, place, rng)
                cluster.run()
                for warp in cluster.warps:
                    counts[warp.index] += np.array(warp.counts)
        return counts

"""Global, shared and parameter memory: ld, st, st.async, stmatrix, and the fence between generic and async accesses.

Global memory is the tensors of the launch and nothing else. Shared memory keeps book of what was stored or read there
by ordinary instructions ("the generic proxy") since the warp's last fence.proxy.async: TMA and tensor cores ("the async
proxy") may not read the former nor overwrite the latter (PTX ISA: Proxies; membar, fence).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ptx.control import YIELD
from ptx.values import (
    CTA_SHIFT,
    DYNAMIC_SHARED_AT,
    LANES,
    OFFSET_MASK,
    PARAMS_AT,
    TYPES,
    U32,
    Form,
    PtxError,
    lanes_of,
    members,
)

SHARED_BYTES = 228 * 1024 + 1024


@dataclass
class Window:
    """A tensor of the launch: bytes at an address, in rows of row_bytes every pitch bytes.

    written: for each byte, whether the launch has written it. No kernel here writes a result twice: one that does has
    computed a tile twice.
    """

    address: int
    view: np.ndarray
    row_bytes: int
    pitch: int

    def __post_init__(self):
        self.written = np.zeros(self.view.size, np.uint8)

    def holds(self, low: int, high: int) -> bool:
        """Whether [low, high) lies within the tensor's bytes; what is between rows (a larger tensor's) does not count
        where it is a single row's access."""
        if not self.address <= low or not high <= self.address + self.view.size:
            return False
        at = (low - self.address) % self.pitch
        return high - low > self.row_bytes or at + high - low <= self.row_bytes


@dataclass
class GlobalMemory:
    windows: list[Window] = field(default_factory=list)

    def find(self, low: int, high: int, what: str) -> Window:
        for window in self.windows:
            if window.holds(low, high):
                return window
        raise PtxError(f"{what}: [{low:#x}, {high:#x}) lies in no tensor of the launch")

    def at(self, addresses: np.ndarray, size: int, what: str) -> tuple[Window, np.ndarray]:
        """(tensor, offsets) of one access of `size` bytes a lane: all in one tensor, each within a row of it."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        window = next((w for w in self.windows if w.address <= low and high <= w.address + w.view.size), None)
        if window is None:
            raise PtxError(f"{what}: [{low:#x}, {high:#x}) lies in no tensor of the launch")
        offsets = addresses - window.address
        if (offsets % window.pitch + size > window.row_bytes).any():
            raise PtxError(f"{what}: between the rows of a tensor")
        return window, offsets


def mark_written(written: np.ndarray, what: str) -> np.ndarray:
    """What these bytes become when they are written: 1, where they were 0."""
    if written.any():
        raise PtxError(f"{what} over what this launch has written already")
    return np.ones_like(written)


class SharedMemory:
    """Of a CTA. stored: for each byte, 1 + the warp that wrote it and has executed no fence.proxy.async since, or 0."""

    def __init__(self):
        self.bytes = np.full(SHARED_BYTES, 0xFF, np.uint8)  # poison: a NaN in every float format
        self.halves = self.bytes.view(np.uint16)
        self.stored = np.zeros(SHARED_BYTES, np.uint8)


@dataclass
class Accesses:
    """What a warp did to shared memory by ordinary instructions that it has not yet fenced, or synchronised.

    stores: (stored, index) to be cleared.  unfenced, unsynced: (CTA, first, last + 1) byte ranges that were read since
    the last fence.proxy.async, and since the lanes last met: another lane may not yet have read what one lane hands on.
    """

    stores: list = field(default_factory=list)
    unfenced: list = field(default_factory=list)
    unsynced: list = field(default_factory=list)

    def read(self, rank: int, low: int, high: int) -> None:
        self.unfenced.append((rank, low, high))
        self.unsynced.append((rank, low, high))

    def wrote(self, warp, shared: SharedMemory, index) -> None:
        shared.stored[index] = warp.index + 1
        self.stores.append((shared.stored, index, warp.index + 1))

    def fence(self) -> None:
        for stored, index, owner in self.stores:
            part = stored[index]
            stored[index] = np.where(part == owner, 0, part)
        self.stores.clear()
        self.unfenced.clear()


def check_overwrite(cluster, rank: int, low: int, high: int, what: str) -> None:
    """An asynchronous write to [low, high) of a CTA's shared memory: whoever read there must have fenced since."""
    for warp in cluster.warps:
        for ranges, missing in (
            (warp.accesses.unfenced, "fence.proxy.async"),
            (warp.accesses.unsynced, "bar.warp.sync"),
        ):
            if any(r == rank and start < high and low < stop for r, start, stop in ranges):
                raise PtxError(f"{what} overwrites what warp {warp.index} read without {missing} since")


def check_fenced(shared: SharedMemory, index, what: str) -> None:
    if shared.stored[index].any():
        raise PtxError(f"{what} of shared memory that was written without fence.proxy.async since")


def locate(warp, space: str, addresses: np.ndarray, size: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, offsets of the active lanes) of an access of `size` bytes a lane."""
    active = addresses[warp.active]
    if (active % size).any():
        raise PtxError(f"{what}: misaligned")
    if space == "global":
        window, offsets = warp.cluster.memory.at(active, size, what)
        if what.startswith("st."):
            index = offsets[:, None] + np.arange(size)
            window.written[index] = mark_written(window.written[index], what)
        return window.view, offsets
    if space == "param":
        return np.frombuffer(warp.cluster.params, np.uint8), active - PARAMS_AT
    low, high = int(active.min()), int(active.max()) + size
    shared, _ = shared_at(warp.cluster, low, size, what)
    shared_at(warp.cluster, high - size, size, what)
    return shared.bytes, active & OFFSET_MASK


def shared_at(cluster, address: int, size: int, what: str) -> tuple[SharedMemory, int]:
    """(shared memory, offset) of a shared::cluster address."""
    rank, offset = int(address) >> CTA_SHIFT, int(address) & OFFSET_MASK
    if rank >= cluster.count or not DYNAMIC_SHARED_AT <= offset <= SHARED_BYTES - size:
        raise PtxError(f"{what} outside shared memory: {int(address):#x}")
    cluster.alive(rank)
    return cluster.ctas[rank].shared, offset


def _load(form: Form):
    space, dtype = form.parts[1], np.dtype(TYPES[form.parts[-1]])
    names, address, size = members(form.operands[0]), form.address(1), dtype.itemsize
    if space not in ("global", "shared", "param"):
        return None

    def load(warp):
        addresses = address(warp)
        view, at = locate(warp, space, addresses, size * len(names), form.op)
        for i, name in enumerate(names):
            value = np.zeros(LANES, dtype)
            index = at[:, None] + np.arange(i * size, (i + 1) * size)
            value[warp.active] = view[index].view(dtype)[:, 0]
            # a register is at least as wide as its name says: bytes are loaded into 16-bit registers
            warp.set(name, value.astype(np.uint16) if size == 1 else value)
        if space == "shared":
            rank = int(addresses[warp.active][0]) >> CTA_SHIFT
            warp.accesses.read(rank, int(at.min()), int(at.max()) + size * len(names))
        return YIELD if space != "param" else None

    return load


def _store(form: Form):
    space, dtype = form.parts[1], np.dtype(TYPES[form.parts[-1]])
    register = np.uint16 if dtype.itemsize == 1 else dtype  # as in _load
    address, values, size = form.address(0), form.sources(form.operands[1], register), dtype.itemsize
    if space not in ("global", "shared"):
        return None

    def store(warp):
        addresses = address(warp)
        view, at = locate(warp, space, addresses, size * len(values), form.op)
        for i, value in enumerate(values):
            given = lanes_of(value(warp))[warp.active].view(register).astype(dtype)
            data = np.ascontiguousarray(given).view(np.uint8).reshape(-1, size)
            view[at[:, None] + np.arange(i * size, (i + 1) * size)] = data
        if space == "shared":
            shared = warp.cluster.ctas[int(addresses[warp.active][0]) >> CTA_SHIFT].shared
            warp.accesses.wrote(warp, shared, at[:, None] + np.arange(size * len(values)))
        return YIELD

    return store


def _store_async(form: Form):
    """st.async (PTX ISA: st.async): a copy into a CTA of the cluster that completes bytes at an mbarrier there."""
    address, barrier = form.address(0), form.address(2)
    values = form.sources(form.operands[1], U32)
    size = 4 * len(values)

    def store(warp):
        addresses, barriers = address(warp), barrier(warp)
        data = np.stack([lanes_of(value(warp)) for value in values], 1)
        for lane in warp.active:
            shared_at(warp.cluster, addresses[lane], size, form.op)
            warp.cluster.copy_queue.append(lambda lane=lane: perform(warp.cluster, addresses, barriers, data, lane))
        return YIELD

    def perform(cluster, addresses, barriers, data, lane):
        shared, offset = shared_at(cluster, addresses[lane], size, form.op)
        check_overwrite(cluster, int(addresses[lane]) >> CTA_SHIFT, offset, offset + size, form.op)
        shared.bytes[offset : offset + size] = data[lane].view(np.uint8)
        cluster.barrier(barriers[lane]).complete(size)

    return store


def _store_matrix(form: Form):
    """stmatrix.m8n8 (PTX ISA: stmatrix): lane l gives the address of row l % 8 of matrix l // 8; a register holds two
    neighbours of row lane // 4."""
    address, values = form.address(0), form.sources(form.operands[1], U32)
    if "trans" in form.parts or "m8n8" not in form.parts:
        return None

    def store(warp):
        warp.whole(form.op)
        rows = address(warp)
        for i, value in enumerate(values):
            data = np.ascontiguousarray(value(warp)).view(np.uint8).reshape(8, 16)
            for row in range(8):
                shared, offset = shared_at(warp.cluster, rows[8 * i + row], 16, form.op)
                shared.bytes[offset : offset + 16] = data[row]
                warp.accesses.wrote(warp, shared, slice(offset, offset + 16))
        return YIELD

    return store


def _load_matrix(form: Form):
    """ldmatrix.m8n8 of 16 bits (PTX ISA: ldmatrix): stmatrix the other way round."""
    names, address = members(form.operands[0]), form.address(1)
    if "trans" in form.parts or "m8n8" not in form.parts or "b16" not in form.parts:
        return None

    def load(warp):
        warp.whole(form.op)
        rows = address(warp)
        for i, name in enumerate(names):
            data = np.empty((8, 16), np.uint8)
            for row in range(8):
                shared, offset = shared_at(warp.cluster, rows[8 * i + row], 16, form.op)
                data[row] = shared.bytes[offset : offset + 16]
                warp.accesses.read(int(rows[8 * i + row]) >> CTA_SHIFT, offset, offset + 16)
            warp.regs[name] = data.reshape(-1).view(U32)
        return YIELD

    return load


DECODERS = {
    "ld.": _load,
    "st.async": _store_async,
    "st.": _store,
    "stmatrix.": _store_matrix,
    "ldmatrix.": _load_matrix,
    "fence.proxy.async": lambda form: lambda warp: warp.accesses.fence(),
    # of mbarrier initialisation and the like: see README.md, "not modelled"
    "fence.": lambda form: lambda warp: None,
}

"""TMA: tensor maps, swizzles, bulk tensor loads and stores (PTX ISA: Tensors; cp.async.bulk.tensor)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from ptx.control import YIELD
from ptx.memory import GlobalMemory, check_fenced, check_overwrite, mark_written, shared_at
from ptx.values import CTA_SHIFT, I32, OFFSET_MASK, PARAMS_AT, U64, Form, PtxError, lanes_of, read_operand, split

ITEM_SIZES = {0: 1, 6: 2, 10: 2}  # by the map's element type: uint8, float16, bfloat16


@dataclass
class TensorMap:
    """A tiled two-dimensional map of 8-bit or 16-bit elements, decoded from its 128 bytes (which are undocumented:
    learnt from maps whose contents were known; a wrong guess would show in every result).

    shape, box: elements, the fastest dimension first.  stride: bytes between rows.
    swizzle: bits of a 16-byte unit's index that are mixed: 0, 1, 2, 3 for none, 32, 64, 128 bytes.
    """

    address: int
    shape: tuple[int, int]
    stride: int
    box: tuple[int, int]
    swizzle: int
    itemsize: int

    @classmethod
    def decode(cls, raw: bytes) -> TensorMap:
        words = struct.unpack("16I", raw)
        rank, kind = (words[2] >> 4 & 7) + 1, words[2] >> 7 & 15
        if rank != 2 or kind not in ITEM_SIZES:
            raise PtxError(f"a tensor map of rank {rank} and element type {kind}: not modelled")
        box = (words[13] >> 24) + 1, (words[14] & 255) + 1
        shape = words[8] + 1, words[9] + 1
        return cls(words[0] | words[1] << 32, shape, words[3] << 4, box, words[2] >> 13 & 3, ITEM_SIZES[kind])

    @property
    def dtype(self) -> type:
        return np.uint8 if self.itemsize == 1 else np.uint16

    def elements(self, shared, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(shared memory as elements of the map, their indices) of offsets in bytes."""
        return (shared.bytes, offsets) if self.itemsize == 1 else (shared.halves, offsets >> 1)

    def offsets(self, base: int) -> np.ndarray:
        """Where the box's elements lie in shared memory (rows, columns), in bytes, from an offset there."""
        row_bytes = self.box[0] * self.itemsize
        linear = base + np.arange(self.box[1])[:, None] * row_bytes + np.arange(self.box[0]) * self.itemsize
        return swizzled(linear, self.swizzle)

    def window(self, memory: GlobalMemory, x: int, y: int, store: bool = False):
        """(the part of the tensor that the box at (x, y) covers, its slices within the box), or (None, None)."""
        x0, x1 = max(x, 0), min(x + self.box[0], self.shape[0])
        y0, y1 = max(y, 0), min(y + self.box[1], self.shape[1])
        if x0 >= x1 or y0 >= y1:
            return None, None
        low = self.address + y0 * self.stride + x0 * self.itemsize
        for row in (y0, y1 - 1):  # of the tensors of the launch, not only of the map
            start = self.address + row * self.stride
            memory.find(start + x0 * self.itemsize, start + x1 * self.itemsize, "a TMA access")
        tensor = memory.find(low, low + (y1 - 1 - y0) * self.stride + (x1 - x0) * self.itemsize, "a TMA access")

        def strided(array: np.ndarray) -> np.ndarray:
            first = array[low - tensor.address :][: self.itemsize].view(self.dtype)
            return np.lib.stride_tricks.as_strided(first, (y1 - y0, x1 - x0), (self.stride, self.itemsize))

        if store:
            written = strided(tensor.written)
            written[...] = mark_written(written, "a TMA store")
        return strided(tensor.view), (slice(y0 - y, y1 - y), slice(x0 - x, x1 - x))


def swizzled(address, bits: int):
    """The swizzle of 2^bits 16-byte units: address bits 4 and up, xor bits 7 and up."""
    return address ^ ((address >> 7 & ((1 << bits) - 1)) << 4)


def tensor_map_at(cluster, address: int) -> TensorMap:
    at = address - PARAMS_AT
    if not 0 <= at <= len(cluster.params) - 128:
        raise PtxError("a tensor map outside the kernel's parameters: not modelled")
    return TensorMap.decode(cluster.params[at : at + 64])


def _tensor_operand(form: Form, index: int):
    """[map, {x, y}] → functions of the warp that give each a value a lane."""
    tensor, coordinates = split(form.operands[index][1:-1])
    reads = [read_operand(tensor, U64, form.params), *form.sources(coordinates, I32)]
    return [lambda warp, read=read: lanes_of(read(warp)) for read in reads]


def _tensor_copy(form: Form):
    if form.parts[4] != "2d" or "tile" not in form.parts:
        return None
    return _load(form) if form.parts[5] == "shared" else _store(form)


def _load(form: Form):
    """Into shared memory, of several CTAs with .multicast::cluster; completes bytes at each one's mbarrier."""
    to, (tensor, x, y), barrier = form.address(0), _tensor_operand(form, 1), form.address(2)
    multicast = form.source(3, np.uint16) if "multicast" in form.parts else None

    def load(warp):
        values = [read(warp) for read in (tensor, x, y, to, barrier)]
        masks = None if multicast is None else lanes_of(multicast(warp))
        for lane in warp.active:
            arguments = [int(value[lane]) for value in values]
            _enqueue_load(warp.cluster, *arguments, None if masks is None else int(masks[lane]))
        return YIELD

    return load


def _enqueue_load(cluster, tensor: int, x: int, y: int, to: int, barrier: int, ranks: int | None) -> None:
    tensor_map, base = tensor_map_at(cluster, tensor), to & OFFSET_MASK
    if base % 128:
        raise PtxError("a TMA load to a misaligned address")
    offsets = tensor_map.offsets(base)
    targets = [to >> CTA_SHIFT] if ranks is None else [r for r in range(cluster.count) if ranks >> r & 1]

    def perform(rank: int) -> None:
        box = np.zeros(tensor_map.box[::-1], tensor_map.dtype)  # what lies outside the tensor is zero
        part, where = tensor_map.window(cluster.memory, x, y)
        if part is not None:
            box[where] = part
        check_overwrite(cluster, rank, base, base + box.nbytes, "a TMA load")
        shared, _ = shared_at(cluster, base | rank << CTA_SHIFT, box.nbytes, "a TMA load")
        memory, at = tensor_map.elements(shared, offsets)
        memory[at] = box
        at = barrier if ranks is None else barrier & OFFSET_MASK | rank << CTA_SHIFT
        cluster.barrier(at).complete(box.nbytes)

    cluster.copy_queue += [lambda rank=rank: perform(rank) for rank in targets]


def _store(form: Form):
    """From shared memory. It reads as late as it may: when its group is waited for. quack's epilogue lets all lanes of
    a warp issue the same store; the machine code issues it once, and so is it here."""
    (tensor, x, y), source = _tensor_operand(form, 0), form.address(1)

    def store(warp):
        values = [read(warp) for read in (tensor, x, y, source)]
        for arguments in dict.fromkeys(tuple(int(value[lane]) for value in values) for lane in warp.active):
            warp.stores.append(_prepared_store(warp.cluster, *arguments))
        return YIELD

    return store


def _prepared_store(cluster, tensor: int, x: int, y: int, source: int):
    tensor_map = tensor_map_at(cluster, tensor)
    shared, base = shared_at(cluster, source, 0, "a TMA store")
    offsets = tensor_map.offsets(base)
    check_fenced(shared, offsets, "a TMA store")

    def perform() -> None:
        part, where = tensor_map.window(cluster.memory, x, y, store=True)
        if part is not None:
            memory, at = tensor_map.elements(shared, offsets)
            part[...] = memory[at][where]

    return perform


def _commit(form: Form):
    """The groups are the elected thread's, which is lane 0: others' are empty and would wait for nothing."""

    def commit(warp):
        if warp.partial is None or warp.partial[0]:
            warp.store_groups.append(warp.stores)
            warp.stores = []

    return commit


def _wait(form: Form):
    keep = int(form.operands[0])

    def wait(warp):
        if warp.partial is not None and not warp.partial[0]:
            return
        while len(warp.store_groups) > keep:
            for perform in warp.store_groups.pop(0):
                perform()

    return wait


DECODERS = {
    "cp.async.bulk.tensor": _tensor_copy,
    "cp.async.bulk.commit_group": _commit,
    "cp.async.bulk.wait_group": _wait,
}

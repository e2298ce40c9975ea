"""Traces a kernel for an architecture and prints, as JSON, which tile element each register of each thread holds.

    python test/layout_probe.py sm_100a forward/bf16/plain

The CuTe layouts that say so are static, so they are evaluated while the kernel is traced, on any machine. For every
thread: the (row, column) of its registers in the order in which the epilogue visits them, and the columns that the
reductions (argmax, target selection, the mask of a ragged last tile) compute for the same registers.
"""

import json
import os
import sys

from liger_cutedsl.ahead_of_time import _trace, all_variants, target_environment

arch, wanted = sys.argv[1:]
os.environ.update(target_environment(arch), QUACK_CACHE_ENABLED="0")

import cutlass.cute as cute  # noqa: E402
import quack.epilogue.ops as ops  # noqa: E402
import quack.gemm_runtime.host as host  # noqa: E402
from quack.sm90_utils import partition_for_epilogue  # noqa: E402

from liger_cutedsl.engines.cute_ops import _column_offsets  # noqa: E402

found = []


def probe(context):
    from_tmem = context.tiled_copy_t2r is not None
    tile = (context.tile_M, context.tile_N)
    held, columns = [], []
    for thread in range(context.num_epi_threads):
        coords = partition_for_epilogue(
            cute.make_identity_tensor(tile),
            epi_tile=context.epi_tile,
            tiled_copy=context.tiled_copy_t2r if from_tmem else context.tiled_copy_r2s,
            tidx=thread,
            reference_src=not from_tmem,
        )
        # The fragment the epilogue function visits is laid out for the copy to shared memory.
        visited = context.tiled_copy_r2s.retile(coords) if from_tmem else coords
        held.append([tuple(visited[i]) for i in range(cute.size(visited))])
        computed = []
        epi_m, epi_n = (cute.size(coords, mode=[mode]) for mode in (3, 4))
        for n in range(epi_n):
            for m in range(epi_m):
                part = coords[None, None, None, m, n]
                offsets = _column_offsets(tile, part)
                computed += [part[0][1] + cute.crd2idx(i, offsets) for i in range(cute.size(part))]
        columns.append(computed)
    found.append({"tile": tile, "held": held, "columns": columns})


original = ops.EpiContext.__init__


def patched(self, *arguments, **keywords):
    original(self, *arguments, **keywords)
    if not found:
        probe(self)


ops.EpiContext.__init__ = patched
host.get_max_active_clusters = lambda *_: 1
_trace(next(variant for variant in all_variants() if variant.name == wanted))
print(json.dumps(found[0]))

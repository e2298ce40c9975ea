"""What differs between GPU architectures: a row of ROWS each. Importable where there is no GPU, quack or CuTe DSL.

A new architecture is a new row, enabled=False until its kernels have run: `python -m liger_cutedsl compile --arch`
knows it then, and calls do not.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from liger_cutedsl.sampling import TILE
from liger_cutedsl.tiling import H200, Calibration

# What has a tile of its own; see cute_kernels.py.
KERNELS = ("forward", "backward", "exp", "exp-options", "exp-sampled", "dw-sum")
TILES_VARIABLE = "LIGER_CUTEDSL_TILES"


@dataclass(frozen=True)
class GemmTile:
    """Tile and cluster of a GEMM: rows (tokens) × columns (vocabulary); of dW vocabulary × H."""

    tile_m: int
    tile_n: int
    cluster_m: int = 2
    cluster_n: int = 1
    pingpong: bool = False

    def arguments(self) -> dict:
        return dict(
            tile_M=self.tile_m,
            tile_N=self.tile_n,
            cluster_M=self.cluster_m,
            cluster_N=self.cluster_n,
            pingpong=self.pingpong,
        )

    def __str__(self) -> str:
        pingpong = "/pingpong" if self.pingpong else ""
        return f"{self.tile_m}x{self.tile_n}/{self.cluster_m}x{self.cluster_n}{pingpong}"


@dataclass(frozen=True, eq=False)
class Architecture:
    """capability: compute capability, (major, minor).  target: what CuTe DSL compiles for (CUTE_DSL_ARCH).

    matrix_instruction: what every kernel must multiply with, as nvdisasm prints it.  instruction_kind: that in words.
    tiles: of each of KERNELS.  calibration: what planning takes the GPU to do.
    enabled: whether calls take the CuTe engine there; False for a row whose kernels compile and have never run.
    """

    capability: tuple[int, int]
    target: str
    matrix_instruction: str
    instruction_kind: str
    tiles: Mapping[str, GemmTile]
    calibration: Calibration = H200
    enabled: bool = True

    @property
    def name(self) -> str:
        return "sm_{}{}".format(*self.capability)

    def tile(self, kernel: str) -> GemmTile:
        """The tile of a kernel, or the one that LIGER_CUTEDSL_TILES sets for experiments: for instance
        forward=128x256/2x1,backward=128x192/2x1/pingpong. Raises ValueError where it says something else."""
        return _tile_overrides(os.environ.get(TILES_VARIABLE, "")).get(kernel) or self.tiles[kernel]


# Measured on an H200 at N=8192, V=128256, H=4096 where it says so.
_HOPPER_TILES = {
    # Two warpgroups take turns, one's epilogue under the other's MMAs. Forward alone 12.5 ms; 128x128 12.6,
    # cooperative 128x256 14.0 and 256x128 14.1, other clusters 13.1 to 14.0.
    "forward": GemmTile(128, 192, 2, 1, pingpong=True),
    # Whole call, in one run: 49.7 ms with 128x192, 52.1 with 128x128, 52.9 with cooperative 128x256.
    "backward": GemmTile(128, 192, 2, 1, pingpong=True),
    "exp": GemmTile(128, 192, 2, 1, pingpong=True),
    # With any option the epilogue of 128x192 runs out of registers (685 spilled words with all of them).
    "exp-options": GemmTile(128, 128, 2, 1, pingpong=True),
    "dw-sum": GemmTile(128, 192, 2, 1, pingpong=True),
    "exp-sampled": GemmTile(128, 128, 2, 1, pingpong=True),  # sampling.TILE columns, as on every architecture
}
# The widest 2-SM tile: two CTAs share one 256 × 256 tcgen05 MMA. Not measured (no Blackwell GPU).
_BLACKWELL_TILES = dict.fromkeys(KERNELS, GemmTile(256, 256, 2, 1)) | {"exp-sampled": GemmTile(256, 128, 2, 1)}
# Warp-level MMAs, no clusters; no word spilled with any option. Not measured.
_GEFORCE_TILES = dict.fromkeys(KERNELS, GemmTile(128, 128, 1, 1))

ROWS = (
    Architecture((9, 0), "sm_90a", "HGMMA", "warpgroup", _HOPPER_TILES),
    Architecture((10, 0), "sm_100a", "UTCHMMA.2CTA", "2-CTA", _BLACKWELL_TILES),
    Architecture((10, 3), "sm_103a", "UTCHMMA.2CTA", "2-CTA", _BLACKWELL_TILES),
    Architecture((12, 0), "sm_120a", "HMMA", "warp", _GEFORCE_TILES, enabled=False),
)
TARGETS = tuple(row.target for row in ROWS)
SUPPORTED_TARGETS = tuple(row.target for row in ROWS if row.enabled)
_BY_CAPABILITY = {row.capability: row for row in ROWS}
_BY_TARGET = {row.target: row for row in ROWS}


def of(capability: tuple[int, int]) -> Architecture | None:
    """The row of a GPU on which calls take the CuTe engine; None for others."""
    row = _BY_CAPABILITY.get(capability)
    return row if row is not None and row.enabled else None


def to_compile_for(capability: tuple[int, int]) -> Architecture:
    """The row of an architecture, enabled or not. Raises RuntimeError where there is none."""
    row = _BY_CAPABILITY.get(capability)
    if row is None:
        raise RuntimeError("the CuTe kernels know {}, not sm_{}{}".format(_listed(ROWS), *capability))
    return row


def of_target(target: str) -> Architecture:
    """The row of a compile target, one of TARGETS."""
    return _BY_TARGET[target]


def supported_names() -> str:
    """The architectures on which calls take the CuTe engine, in words: "sm_90, sm_100 or sm_103"."""
    return _listed([row for row in ROWS if row.enabled])


def _listed(rows) -> str:
    *first, last = (row.name for row in rows)
    return f"{', '.join(first)} or {last}" if first else last


@functools.cache
def _tile_overrides(text: str) -> dict[str, GemmTile]:
    overrides = {}
    for entry in filter(None, text.split(",")):
        match = re.fullmatch(r"([\w-]+)=(\d+)x(\d+)/(\d+)x(\d+)(/pingpong)?", entry.strip())
        if not match or match[1] not in KERNELS:
            raise ValueError(
                f"{TILES_VARIABLE} must be a list of KERNEL=MxN/CLUSTERMxCLUSTERN[/pingpong] with KERNEL one of "
                f"{', '.join(KERNELS)}, got {entry!r}"
            )
        if match[1] == "exp-sampled" and int(match[3]) != TILE:
            raise ValueError(f"{TILES_VARIABLE}: exp-sampled takes tiles of {TILE} columns, got {entry!r}")
        overrides[match[1]] = GemmTile(*(int(match[i]) for i in (2, 3, 4, 5)), pingpong=bool(match[6]))
    return overrides

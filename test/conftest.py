"""Where tests run: every numeric test takes `place`, an engine and a device, so one test covers all engines."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import liger_cutedsl
from liger_cutedsl import gemm, testing
from liger_cutedsl.engines import architectures
from liger_cutedsl.schedules import blocks

sys.path.insert(0, str(Path(__file__).parent))  # reference.py, for the tests

# quack identifies the functions of an installed package otherwise than those of src/: what users run is what is tested.
if not {"site-packages", "dist-packages"} & set(Path(liger_cutedsl.__file__).parts):
    raise pytest.UsageError(f"tests run against the installed package, and liger_cutedsl is {liger_cutedsl.__file__}")


@dataclass(frozen=True)
class Place:
    """An engine on a device; schedule "auto" is single_pass wherever its gradients are possible.

    in_blocks: of recompute: whether it goes through every batch in blocks of few rows.
    """

    engine: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    schedule: str = "auto"
    workspace_mb: float | None = None
    in_blocks: bool = False

    @property
    def call(self) -> dict:
        return dict(engine=self.engine, schedule=self.schedule, workspace_mb=self.workspace_mb)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CUTE_DTYPES = (torch.bfloat16, torch.float16)
PLACES = [
    pytest.param(Place("torch", "cpu", DTYPES), id="torch-cpu"),
    # recompute in tiles as narrow as they get, or with all exponentials kept
    pytest.param(Place("torch", "cpu", DTYPES, "recompute", 0.05), id="torch-cpu-recompute"),
    pytest.param(Place("torch", "cpu", DTYPES, "recompute"), id="torch-cpu-kept"),
    # but for float16, whose subnormal numbers have no bits to be rounded eight times
    pytest.param(Place("torch", "cpu", DTYPES[:3], "recompute", 0.04, in_blocks=True), id="torch-cpu-blocks"),
    pytest.param(Place("torch", "cuda", DTYPES), id="torch-cuda", marks=pytest.mark.gpu),
    pytest.param(Place("cute", "cuda", CUTE_DTYPES), id="cute", marks=pytest.mark.gpu),
    pytest.param(Place("cute", "cuda", CUTE_DTYPES, "recompute", 0.05), id="cute-recompute", marks=pytest.mark.gpu),
    pytest.param(Place("cute", "cuda", CUTE_DTYPES, "recompute"), id="cute-kept", marks=pytest.mark.gpu),
    pytest.param(
        Place("cute", "cuda", CUTE_DTYPES[:1], "recompute", 0.04, in_blocks=True),
        id="cute-blocks",
        marks=pytest.mark.gpu,
    ),
]
EXECUTED = os.environ.get("PTX_DTYPE")  # a process of test_ptx.py: the CuTe engine on CPU tensors, its kernels executed
if EXECUTED:
    from ptx import whole_operator

    launches = whole_operator.install()
    executed = tuple(whole_operator.package.DTYPES[name] for name in EXECUTED.split(","))
    PLACES = [
        pytest.param(Place("cute", "cpu", executed), id="executed"),
        pytest.param(Place("cute", "cpu", executed, "recompute", 0.05), id="executed-recompute"),
        pytest.param(Place("cute", "cpu", executed, "recompute"), id="executed-kept"),
    ]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):  # not item.keywords, which hold the names of folders too
            item.add_marker(skip)


@pytest.fixture
def small_blocks(monkeypatch):
    """recompute goes through a batch in blocks of 16 rows, or up to eight, where a budget is as small as it gets."""
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 16)
    monkeypatch.setattr(blocks, "TILE_QUANTUM", 16)
    testing.reset()  # plans are remembered
    yield
    testing.reset()


@pytest.fixture(params=PLACES)
def place(request) -> Place:
    if request.param.in_blocks:
        request.getfixturevalue("small_blocks")
    return request.param


@pytest.fixture
def enabled():
    liger_cutedsl.enable()
    yield
    liger_cutedsl.disable()


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    """Tests decide their route themselves."""
    for name in ("ENGINE", "SCHEDULE", "WORKSPACE_MB"):
        monkeypatch.delenv(f"LIGER_CUTEDSL_{name}", raising=False)


@pytest.fixture
def h200(monkeypatch):
    """The CuTe engine as it plans on an H200, which need not be there."""
    cute_engine = pytest.importorskip("liger_cutedsl.engines.cute_engine")
    monkeypatch.setattr(cute_engine, "architecture_of", lambda _: architectures.of((9, 0)))
    monkeypatch.setattr(cute_engine, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(gemm, "multiprocessors", lambda _: 132)
    return cute_engine.CuteEngine()

"""Where tests run: every numeric test takes `place`, an engine and a device, so one test covers all engines."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # reference.py, for the tests


@dataclass(frozen=True)
class Place:
    engine: str
    device: str
    dtypes: tuple[torch.dtype, ...]


TORCH_CPU = Place("torch", "cpu", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
TORCH_CUDA = Place("torch", "cuda", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
CUTE = Place("cute", "cuda", (torch.bfloat16, torch.float16))
PLACES = [
    pytest.param(TORCH_CPU, id="torch-cpu"),
    pytest.param(TORCH_CUDA, id="torch-cuda", marks=pytest.mark.gpu),
    pytest.param(CUTE, id="cute", marks=pytest.mark.gpu),
]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=PLACES)
def place(request) -> Place:
    return request.param


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    """Tests decide their route themselves."""
    for name in ("ENGINE", "SCHEDULE", "WORKSPACE_MB"):
        monkeypatch.delenv(f"LIGER_CUTEDSL_{name}", raising=False)

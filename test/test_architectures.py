"""The table of GPU architectures: what a row must hold, who asks it, and that asking needs no CuTe DSL."""

import re
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_cutedsl import explain
from liger_cutedsl.engines import architectures
from liger_cutedsl.engines.architectures import KERNELS, ROWS, GemmTile


def test_a_row_is_whole():
    for row in ROWS:
        assert row.target == f"{row.name}a" and row.name == "sm_{}{}".format(*row.capability)
        assert set(row.tiles) == set(KERNELS) and row.matrix_instruction and row.instruction_kind
        assert architectures.of_target(row.target) is architectures.to_compile_for(row.capability) is row
        assert architectures.of(row.capability) is (row if row.enabled else None)
    assert len({row.capability for row in ROWS}) == len({row.target for row in ROWS}) == len(ROWS)


def test_unknown_and_untried_architectures():
    assert architectures.supported_names() == "sm_90, sm_100 or sm_103"
    assert {row.name for row in ROWS if not row.enabled} == {"sm_120"}
    for capability in ((8, 0), (10, 1), (12, 0), (12, 1)):
        assert architectures.of(capability) is None
    with pytest.raises(RuntimeError, match="know sm_90, sm_100, sm_103 or sm_120, not sm_101"):
        architectures.to_compile_for((10, 1))


@pytest.mark.parametrize("capability", [(8, 6), (10, 1), (12, 0)])
def test_a_gpu_without_a_row_is_told_which_have_one(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    with FakeTensorMode():
        x = torch.empty(64, 32, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(500, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        reason = explain(x, weight).reason
    assert "need sm_90, sm_100 or sm_103, and this GPU is sm_{}{}".format(*capability) in reason


def test_tiles_can_be_overridden_for_experiments(monkeypatch):
    hopper = architectures.of((9, 0))
    monkeypatch.setenv("LIGER_CUTEDSL_TILES", "forward=128x256/2x1,exp-options=128x128/1x2/pingpong")
    assert hopper.tile("forward") == GemmTile(128, 256, 2, 1)
    assert hopper.tile("exp-options") == GemmTile(128, 128, 1, 2, pingpong=True)
    assert hopper.tile("backward") == hopper.tiles["backward"]
    monkeypatch.setenv("LIGER_CUTEDSL_TILES", "forwards=128x256/2x1")
    with pytest.raises(ValueError, match=r"KERNEL one of forward, backward, exp.*got 'forwards=128x256/2x1'"):
        hopper.tile("forward")
    monkeypatch.setenv("LIGER_CUTEDSL_TILES", "exp-sampled=128x192/2x1")  # a pair has as many columns as its tile
    with pytest.raises(ValueError, match="exp-sampled takes tiles of 128 columns, got 'exp-sampled=128x192/2x1'"):
        hopper.tile("exp-sampled")


def test_the_table_needs_neither_cute_dsl_nor_a_gpu():
    program = """
import sys
for name in ("quack", "cutlass", "triton"):
    sys.modules[name] = None
import torch
torch.cuda.is_available = torch.cuda.get_device_capability = torch.cuda.init = None  # asking would be an error
from liger_cutedsl.engines import architectures
print(architectures.of((10, 3)).tile("forward"), architectures.supported_names())
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(r"256x256/2x1 sm_90, sm_100 or sm_103\n", done.stdout)

"""The CuTe kernels on a machine without a GPU: they compile, their machine code is what it should be, and on
Blackwell each element of a tile belongs to exactly one register, at the column the reductions take it for."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import liger_cutedsl
from liger_cutedsl import ahead_of_time
from liger_cutedsl.__main__ import main
from liger_cutedsl.ahead_of_time import Compiled, check
from liger_cutedsl.epilogues import Epilogue

pytest.importorskip("quack", reason="quack is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """The kernels compiled here stay here."""
    patch = pytest.MonkeyPatch()
    patch.setenv("QUACK_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
    yield
    patch.undo()


def test_kernels_compile_for_every_architecture(capsys):
    status = main(["compile", "--typical", "--json"])
    kernels = [Compiled(**row) for row in json.loads(capsys.readouterr().out)]
    assert status == 0, [k for k in kernels if k.error]
    assert {k.arch for k in kernels} == set(ahead_of_time.ARCHITECTURES)
    for k in kernels:
        assert k.registers > 0 and k.seconds > 0
        if k.arch != "sm_90a":
            assert "UTCHMMA.2CTA" in k.matrix_instruction, k
            # what the README claims of Blackwell: a few spilled words at most, except with everything at once
            assert k.spilled_words <= (16 if "argmax" not in k.name else 160), k
        else:
            assert "HGMMA" in k.matrix_instruction, k
        assert (k.tma_stores == 0) == k.name.startswith("forward"), k


def test_compile_prints_a_table_and_fails_where_a_kernel_does(monkeypatch, capsys):
    good = Compiled("sm_100a", "forward/bf16/plain", "256x256/2x1", 200, 0, "4 UTCHMMA.2CTA", 0, 2.0)
    monkeypatch.setattr(ahead_of_time, "compile_architecture", lambda *_: [good])
    assert main(["compile", "--arch", "sm_100a"]) == 0
    assert "UTCHMMA.2CTA" in capsys.readouterr().out
    bad = Compiled("sm_100a", "forward/bf16/plain", error="broken")
    monkeypatch.setattr(ahead_of_time, "compile_architecture", lambda *_: [good, bad])
    assert main(["compile", "--arch", "sm_100a"]) == 1
    assert "FAILED: broken" in capsys.readouterr().out


def test_check_refuses_what_a_kernel_must_not_be():
    def of(arch="sm_100a", name="forward/bf16/plain", instruction="4 UTCHMMA.2CTA", stores=0):
        return check(Compiled(arch, name, "", 200, 0, instruction, stores))

    assert of() == ""
    assert "no 2-CTA" in of(instruction="4 UTCHMMA")
    assert "no tensor-core" in of(instruction="")
    assert "8 TMA stores" in of(stores=8)
    assert of(name="backward/bf16/plain", stores=8) == ""
    assert of(arch="sm_90a", instruction="16 HGMMA") == ""


def test_tiles_can_be_overridden_for_experiments(monkeypatch):
    from liger_cutedsl.engines.cute_kernels import GEMM_TILES, GemmTile, gemm_tile

    monkeypatch.setenv("LIGER_CUTEDSL_TILES", "forward=128x256/2x1,exp-options=128x128/1x2/pingpong")
    assert gemm_tile("forward", 9) == GemmTile(128, 256, 2, 1)
    assert gemm_tile("exp-options", 9) == GemmTile(128, 128, 1, 2, pingpong=True)
    assert gemm_tile("backward", 9) == GEMM_TILES[9]["backward"]
    monkeypatch.setenv("LIGER_CUTEDSL_TILES", "forwards=128x256/2x1")
    with pytest.raises(ValueError, match=r"KERNEL one of forward, backward, exp.*got 'forwards=128x256/2x1'"):
        gemm_tile("forward", 9)


def test_argmax_keys_are_read_as_they_are_written():
    """OnlineArgmax writes a value's ordered bits over its column; decoded() reads the largest value, first column."""
    import torch

    from liger_cutedsl.engines.cute_ops import OnlineArgmax

    values = torch.tensor([[-3.5, 7.0, 7.0], [-1e30, -2.0, -torch.inf], [0.0, -1.0, -1e-38]])
    bits = values.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    columns = torch.tensor([[5, 200, 300], [1, 129, 257], [64, 3, 2]])
    largest, column = OnlineArgmax.decoded((ordered << 32) | (0xFFFFFFFF - columns))
    assert largest.tolist() == [7.0, -2.0, 0.0]
    assert column.tolist() == [200, 129, 64]


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("kernel", ["forward", "backward", "exp"])
def test_every_element_of_a_blackwell_tile_has_one_owner(arch, kernel):
    probe = Path(__file__).parent / "layout_probe.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", probe, arch, f"{kernel}/bf16/plain"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    layout = json.loads(done.stdout.splitlines()[-1])
    rows, columns = layout["tile"]
    assert (rows, columns) == (128, 256)  # each CTA of the pair holds half of the 256 × 256 tile
    held = [tuple(element) for thread in layout["held"] for element in thread]
    assert len(held) == rows * columns
    assert set(held) == set(itertools.product(range(rows), range(columns)))
    for elements, computed in zip(layout["held"], layout["columns"], strict=True):
        assert [column for _, column in elements] == computed


def cached_kernels(folder, arch, *dtypes, path="") -> dict:
    """What kernel_identity_probe.py finds in a cache folder after one process: {(dtype, with headroom): file}."""
    probe = Path(__file__).parent / "kernel_identity_probe.py"
    environment = {**os.environ, "QUACK_CACHE_DIR": str(folder), "PYTHONPATH": str(path)}
    command = [sys.executable, "-W", "ignore", probe, arch, *dtypes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    return {(dtype, headroom == "True"): file for dtype, headroom, file in rows}


BOTH = {("bf16", False), ("fp16", True)}  # (dtype, whether its exponentials carry float16's headroom)


@pytest.fixture(scope="module")
def bf16_then_fp16(tmp_path_factory):
    return cached_kernels(tmp_path_factory.mktemp("order"), "sm_90a", "bf16", "fp16")


def test_each_dtype_has_a_kernel_with_its_own_constants(bf16_then_fp16, tmp_path):
    """The headroom is a value in the epilogue's closure alone: the first dtype's kernel must not serve the second."""
    assert set(bf16_then_fp16) == BOTH
    assert cached_kernels(tmp_path, "sm_90a", "fp16", "bf16") == bf16_then_fp16


def test_compile_and_later_processes_share_kernels_but_not_those_of_another_dtype(tmp_path, monkeypatch):
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "compiled"))
    variants = [ahead_of_time.Variant("exp", Epilogue(), dtype) for dtype in ("bf16", "fp16")]
    compiled = ahead_of_time.compile_architecture("sm_100a", variants, jobs=1)
    assert not any(kernel.error for kernel in compiled)
    found = cached_kernels(tmp_path / "compiled", "sm_100a")
    assert set(found) == BOTH
    assert set(cached_kernels(tmp_path / "kernels", "sm_100a", "fp16")) == {("fp16", True)}
    assert cached_kernels(tmp_path / "kernels", "sm_100a", "bf16") == found


def test_a_kernel_of_other_sources_is_not_found_again(bf16_then_fp16, tmp_path):
    # an upgrade, installed where quack knows functions by their names alone
    upgraded = tmp_path / "site-packages"
    shutil.copytree(Path(liger_cutedsl.__file__).parent, upgraded / "liger_cutedsl")
    formulas = upgraded / "liger_cutedsl" / "epilogues.py"
    formulas.write_text(formulas.read_text() + "\n# another formula\n")
    old = bf16_then_fp16["bf16", False]
    new = cached_kernels(tmp_path / "kernels", "sm_90a", "bf16", path=upgraded)["bf16", False]
    assert old.split("/")[0] != new.split("/")[0]  # the folder: a hash of all sources
    assert old.split("/")[1] != new.split("/")[1]  # the file: a hash of the epilogue


def test_an_epilogue_cannot_close_over_what_its_identity_does_not_show():
    from liger_cutedsl.epilogues import _with_operands

    def epilogue_over(value):
        return _with_operands(lambda acc: {"D": acc * value}, ())

    assert epilogue_over(1.0).__qualname__ != epilogue_over(2.0).__qualname__
    assert epilogue_over(1.0).__qualname__ == epilogue_over(1.0).__qualname__
    with pytest.raises(TypeError, match="may close over"):
        epilogue_over(object())

"""The interpreter's sm_90a kernels against what a Hopper GPU gave (recorded/sm_90a.json), in a process of its own."""

from __future__ import annotations

import json

import pytest
import torch

from ptx.launches import Executed, prepare

prepare("sm_90a")

from ptx import recording  # noqa: E402
from ptx.cases import CASES  # noqa: E402

SHARE = ("forward all", "exp rows ragged", "exp all", "backward fp16")

torch.set_num_threads(1)
RECORDED = json.loads(recording.FILE.read_text())["cases"] if recording.FILE.exists() else {}


@pytest.fixture(scope="module")
def gpu():
    torch.use_deterministic_algorithms(True)
    with Executed() as executed:
        yield executed


def check(gpu, name: str) -> None:
    if not RECORDED:
        pytest.skip("no recording: `python test/ptx record FILE` on a Hopper GPU makes it")
    gpu.clusters = CASES[name].clusters
    found = recording.compare(name, RECORDED[name], recording.run(CASES[name], "cpu"))
    print(
        name, {output: f"{same:.0%} the same bits, {share:.3f} of the bound" for output, (same, share) in found.items()}
    )
    assert all(share <= 1 for _, share in found.values()), found


@pytest.mark.parametrize("name", SHARE)
def test_as_recorded(gpu, name):
    check(gpu, name)


@pytest.mark.blackwell
@pytest.mark.parametrize("name", [name for name in RECORDED if name not in SHARE])
def test_all_as_recorded(gpu, name):
    check(gpu, name)


def test_a_difference_is_noticed(gpu):
    """Of one unit in the last place of every value beyond the bound, of other inputs, of an output that is missing."""
    done = recording.run(CASES["backward fp16"], "cpu")
    recorded = {"inputs": done.inputs, "outputs": recording.described(done.outputs)}
    assert recording.compare("itself", recorded, done) == {"D": (1.0, 0.0)}
    done.outputs["D"] = done.outputs["D"] * (1 + 4 * torch.finfo(torch.float16).eps)
    same, share = recording.compare("scaled", recorded, done)["D"]
    assert same < 0.1 and share > 1
    for broken in ({"inputs": "other"}, {"outputs": {}}):
        with pytest.raises(ValueError):
            recording.compare("broken", {**recorded, **broken}, done)

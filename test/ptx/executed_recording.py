"""The interpreter's sm_90a kernels against what a Hopper GPU gave (recorded/sm_90a.json), in a process of its own."""

from __future__ import annotations

import json
from dataclasses import replace

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


def test_logits_are_hoppers_sums():
    """Why logits differ from a GPU's in the last bits: the same bits come of products summed as wgmma sums them."""
    tried = missed = rounded = 0
    for name, case in recording.recorded_cases().items():
        recorded = RECORDED.get(name, {"outputs": {}})["outputs"].get("target_logit")
        if recorded is None:
            continue
        problem = recording.make(case, recording.portable_normal)
        rows = recording.places(problem.target)
        target, theirs = problem.target[rows], torch.tensor(recorded["values"])
        valid = (target >= 0) & (target < problem.vocab)
        rows, target, theirs = rows[valid], target[valid], theirs[valid]
        bias = 0.0 if problem.bias is None else problem.bias[target]
        x, weight = problem.x[rows], problem.weight[target]
        tried += len(rows)
        missed += int((recording.hopper_sums(x, weight) + bias != theirs).sum())
        rounded += int(((x.double() * weight.double()).sum(dim=1).float() + bias != theirs).sum())
    if not RECORDED:
        pytest.skip("no recording")
    assert tried > 1000 and missed <= 3, (tried, missed)
    assert rounded > tried / 10  # so it does tell


def test_a_difference_is_noticed(gpu):
    """Of four units in the last place of every value, of other inputs, of an output that is missing; equal zeros,
    whose bound is 0, are none."""
    done = recording.run(CASES["backward fp16"], "cpu")
    recorded = {"inputs": done.inputs, "outputs": recording.described(done.outputs)}
    assert recording.compare("itself", recorded, done) == {"D": (1.0, 0.0)}
    done.outputs["D"] = (done.outputs["D"].view(torch.int16) + 4).view(torch.float16)
    same, share = recording.compare("moved", recorded, done)["D"]
    assert same == 0 and share > 1
    zeros = torch.zeros(1, 3)
    recorded = {"inputs": done.inputs, "outputs": recording.described({"sum_exp": -zeros})}
    found = recording.compare("zeros", recorded, replace(done, outputs={"sum_exp": zeros}))
    assert found == {"sum_exp": (1.0, 0.0)}
    for broken in ({"inputs": "other"}, {"outputs": {}}):
        with pytest.raises(ValueError):
            recording.compare("broken", {**recorded, **broken}, done)

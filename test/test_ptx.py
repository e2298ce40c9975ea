"""Blackwell kernels executed on a CPU by the interpreter in ptx/: each kernel alone, and the whole operator.

quack reads its architecture once in a process, and the whole operator replaces what needs a GPU for good: so each job
is a pytest of its own, two at a time. `pytest -m blackwell test/test_ptx.py` runs the long ones: every variant that
`python -m liger_cutedsl compile` makes, every width of a last tile, random schedules, the project's own numeric tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ptx.shim import obstacle

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(obstacle() is not None, reason=f"kernels cannot be executed here: {obstacle()}"),
]
KERNELS, OPERATOR, RECORDING = (f"ptx/executed_{name}.py" for name in ("kernels", "operator", "recording"))
RECORDED = HERE / "ptx" / "recorded" / "sm_90a.json"
SHARE, LONG = ("-m", "not blackwell"), ("-m", "blackwell")
# name → (environment, arguments of pytest, tests that must have passed)
JOBS = {
    "kernels sm_100a": (dict(PTX_ARCH="sm_100a"), (KERNELS, *SHARE), 35),
    "operator bf16": (dict(PTX_ARCH="sm_100a", PTX_DTYPE="bf16"), (OPERATOR,), 15),
    "operator fp16": (dict(PTX_ARCH="sm_100a", PTX_DTYPE="fp16"), (OPERATOR,), 14),
    "kernels sm_103a": (dict(PTX_ARCH="sm_103a"), (KERNELS, *SHARE), 10),
    "dW's sum sm_90a": (dict(PTX_ARCH="sm_90a"), (KERNELS, "-k", "sum_in_two_parts"), 3),
    "recording sm_90a": ({}, (RECORDING, *SHARE), 5),
}
# What the project's own tests do with an engine. Not those that count on the torch engine on a CPU, on autocast of CPU
# tensors, or that need minutes each; for fp16, not those that take bf16 anyway, or options that it refuses.
OWN_TESTS = (
    "executed and not any_combination and not autocast and not rounding_dz and not nothing_of_the_size "
    "and not wide_accumulator"
)
OWN_JOBS = {
    "bf16": ("test_arithmetic.py", "test_numbers.py", "test_schedules.py", "test_autograd.py", "-k", OWN_TESTS),
    "fp16": ("test_arithmetic.py", "test_schedules.py", "test_autograd.py", "-k", f"{OWN_TESTS} and not chunks_of"),
}
LONG_JOBS = {
    f"every kernel {arch}, {part + 1} of 12": (dict(PTX_ARCH=arch, PTX_PART=f"{part}/12"), (KERNELS, *LONG), 80)
    for arch in ("sm_100a", "sm_103a")
    for part in range(12)
}
LONG_JOBS["recording sm_90a, all"] = ({}, (RECORDING, *LONG), 15)
LONG_JOBS |= {
    f"own tests {dtype}": (dict(PTX_ARCH="sm_100a", PTX_DTYPE=dtype), OWN_JOBS[dtype], 200)
    for dtype in ("bf16", "fp16")
}
LONG_JOBS |= {
    f"any combination {dtype}": (
        dict(PTX_ARCH="sm_100a", PTX_DTYPE=dtype),
        ("test_arithmetic.py", "-k", "executed and any_combination"),
        3,
    )
    for dtype in ("bf16", "fp16")
}
LONG_JOBS |= {
    f"operator {dtype} sm_103a": (dict(PTX_ARCH="sm_103a", PTX_DTYPE=dtype), (OPERATOR,), 14)
    for dtype in ("bf16", "fp16")
}


@pytest.fixture(scope="module")
def jobs(request):
    """The selected jobs, under way: two at a time, whatever the number of cores."""
    selected = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = [spec.params["job"] for spec in selected if spec and "job" in spec.params]
    names = [name for name in names if RECORDED.exists() or not name.startswith("recording")]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(_run, name) for name in names}


def _run(name: str) -> tuple[subprocess.CompletedProcess, int]:
    variables, arguments, least = {**JOBS, **LONG_JOBS}[name]
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "pytest", "-W", "ignore", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True), least


def _check(name: str, jobs) -> None:
    if name.startswith("recording") and not RECORDED.exists():
        pytest.skip("no recording of a Hopper GPU's results: see ptx/README.md")
    done, least = jobs[name].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    passed = next(
        int(word) for word, what in zip(summary.split(), summary.split()[1:], strict=False) if "passed" in what
    )
    assert passed >= least, f"only {summary}"


@pytest.mark.parametrize("job", JOBS)
def test_executed(job, jobs):
    _check(job, jobs)


@pytest.mark.blackwell
@pytest.mark.parametrize("job", LONG_JOBS)
def test_executed_at_length(job, jobs):
    _check(job, jobs)

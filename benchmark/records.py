"""Results files, one JSON line a row: where they lie, their names, their first line, and how they are read."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import torch

from liger_cutedsl.versions import installed

RESULTS = Path(__file__).parent / "results"
H200, X2 = RESULTS / "h200.json", RESULTS / "h200-x2.json"
PER_TOKEN, ROW_LOSS = RESULTS / "h200-per-token.json", RESULTS / "h200-row-loss.json"
DENSITY, TRAINING = RESULTS / "smollm2-density.json", RESULTS / "h200-train.json"
PACKAGES = ("torch", "triton", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "cut-cross-entropy")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def slug(device: str, quick: bool = False) -> str:
    """The name of a results file: the GPU's."""
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return name.lower().replace("nvidia ", "").replace(" ", "-") + ("-quick" if quick else "")


def environment(device: str, command: str) -> dict:
    """Everything a reader needs to judge the rows that follow it."""
    found = {"kind": "environment", "command": command, "device": device}
    found["versions"] = {"python": platform.python_version()}
    found["versions"] |= {package: installed(package) or "not installed" for package in PACKAGES}
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        query = "power.limit,clocks.sm,clocks.max.sm,driver_version"
        answer = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True)
        names = ("power_limit", "sm_clock", "max_sm_clock", "driver")
        found.update(zip(names, answer.stdout.decode().strip().split("\n")[0].split(", "), strict=False))
    return found

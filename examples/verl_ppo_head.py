"""verl's FusedLinearForPPO with its Liger backend, on our operator, and a policy-gradient step with an entropy bonus.

    python examples/verl_ppo_head.py            on a CPU, in under a minute

verl itself needs Ray, so this loads the one file of it that holds the head: from an installed verl, or out of the wheel
of verl 0.9.1, which pip downloads. verl binds Liger's operator when it is imported, under a name of its own: enable()
finds it there, before or after.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

import liger_cutedsl

VERSION, FILE = "0.9.1", "verl/utils/experimental/torch_functional.py"


def verl_file(folder: str | Path) -> Path:
    """verl's file: an installed verl's, or the one of verl's wheel, put into the folder."""
    installed = importlib.util.find_spec("verl")
    if installed is not None and installed.origin is not None:
        return Path(installed.origin).parents[1] / FILE
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"verl=={VERSION}"]
    subprocess.run(download, check=True, capture_output=True)
    (wheel,) = Path(folder).glob("verl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(FILE, folder))


def load(file: Path):
    """verl's module, without the package around it."""
    name = "verl_torch_functional"
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    os.environ["LIGER_CUTEDSL_ENGINE"] = "torch"  # on a CPU Liger's own operator would run; on a GPU leave this out
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        verl = load(verl_file(folder))
    liger_cutedsl.enable()
    head = verl.FusedLinearForPPO(impl_backend="liger")
    hidden = torch.randn(4, 32, 64)
    weight = (0.2 * torch.randn(1000, 64)).requires_grad_()
    tokens, advantages = torch.randint(0, 1000, (4, 32)), torch.randn(4, 32)
    optimizer = torch.optim.SGD([weight], lr=20.0)
    with torch.no_grad():
        old_log_probs, _ = head(hidden, weight, tokens, temperature=0.9)
    for step in range(5):
        log_probs, entropy = head(hidden, weight, tokens, temperature=0.9)
        ratio = (log_probs - old_log_probs).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = -gain.mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss:.5f}, entropy {entropy.mean():.4f}")


if __name__ == "__main__":
    main()

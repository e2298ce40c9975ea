"""Training stacks people use, on the CPU: Hugging Face's Trainer, TRL, peft, AMP. See training_worker.py."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "training_worker.py"
WAYS = (
    "trainer",
    "gemma2",
    "lora_frozen_head",
    "lora_trained_head",
    "amp_fp16",
    "bf16_master_weights",
    "tied_embeddings",
)
pytestmark = pytest.mark.slow


def run_worker(*ways, path=None, worker=WORKER) -> str:
    """What the worker printed. path: a folder whose packages come before the installed ones."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-W", "ignore", worker, *ways]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def stacks():
    for package in ("trl", "peft", "accelerate", "datasets"):
        pytest.importorskip(package)


@pytest.fixture(scope="module")
def output(stacks):
    return run_worker()


@pytest.mark.parametrize("way", WAYS)
def test_losses_follow_plain_pytorch(output, way):
    assert f"ok {way}" in output.splitlines()


def test_the_last_trl_that_takes_ligers_loss(stacks, tmp_path):
    """TRL 1.14 in a folder of its own, in front of the installed one. test_trl.py has what later ones take."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path, "trl==1.14.2"]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ok sft" in run_worker("sft", path=tmp_path).splitlines()


TRAINERS = ("sft", "dpo", "kto", "grpo", "rloo")


@pytest.fixture(scope="module")
def trl_output(stacks):
    pytest.importorskip("trl.kernels", reason="TRL 1.15 or later is not installed")
    return run_worker(worker=WORKER.with_name("trl_worker.py"))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trls_trainers_follow_its_own_head(trl_output, trainer):
    """Losses and gradients, in float32, for both ways in which TRL calls its head. See trl_worker.py."""
    assert f"ok {trainer}" in trl_output.splitlines()


def test_trls_grpo_with_its_loss_in_the_models_forward(stacks):
    """Losses, gradients and what is logged, by TRL's own _compute_loss; and what is refused. See
    trl_row_loss_worker.py."""
    pytest.importorskip("trl.kernels", reason="TRL 1.15 or later is not installed")
    assert run_worker(worker=WORKER.with_name("trl_row_loss_worker.py")).count("ok ") == 9


def test_the_oldest_transformers_that_liger_accepts(stacks, tmp_path):
    """transformers 5.0 in a folder of its own, in front of the installed one: the patched models, and the Trainer."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", tmp_path, "transformers==5.0.0"]
    install.append(f"numpy=={metadata.version('numpy')}")
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = run_worker("trainer", "gemma2", "lora_frozen_head", "amp_fp16", path=tmp_path)
    assert printed.count("ok ") == 4
    # those that a version of transformers has to do with
    tests = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", WORKER.parent / "test_liger.py", "-k", "patched"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(tests, env=environment, capture_output=True, text=True, cwd=WORKER.parent)
    assert done.returncode == 0, done.stdout[-2000:]

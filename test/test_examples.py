"""The examples for trainers, run as they are."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def last_line(example: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", EXAMPLES / example], capture_output=True, text=True)
    if done.returncode and "pip" in done.stderr.splitlines()[-1]:
        pytest.skip("what the example downloads is not there")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_log_probs():
    assert last_line("log_probs.py").startswith("step 9: loss -0.")


def test_grpo():
    line = last_line("grpo.py")
    assert line.startswith("step 9: loss -0.")
    # float32: a sum of 192 tokens' losses of size 1/192, of logits that are summed in another order
    assert float(line.split("by ")[1].split(",")[0]) < 1e-5


@pytest.mark.slow
def test_hugging_faces_trainer():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    step, loss = last_line("hf_trainer.py").split(", loss ")
    assert step == "step 12" and float(loss) < 7.0  # it starts at log 2000 = 7.6


@pytest.mark.slow
def test_verls_head():
    assert last_line("verl_ppo_head.py").startswith("step 4: loss -0.")


@pytest.mark.slow
def test_trls_grpo_with_a_row_loss():
    if find_spec("trl") is None:
        pytest.skip("TRL is not installed")
    line = last_line("trl_grpo_row_loss.py")
    assert line.startswith("step 60.0000, reward 0.") and float(line.split()[3].strip(",")) > 0.08  # from 0.03


@pytest.mark.slow
def test_trls_trainers():
    if find_spec("trl") is None:
        pytest.skip("TRL is not installed")
    line = last_line("trl_sft_and_grpo.py")
    assert line.startswith("step 15.0000, reward 0.") and float(line.split()[3].strip(",")) > 0.2

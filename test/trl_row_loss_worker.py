"""Trains a tiny model with TRL's GRPOTrainer and with the one of examples/trl_grpo_row_loss.py; prints "ok NAME" for
each of the settings below, whose losses, gradients and all that is logged are the same, up to float32's rounding.

python test/trl_row_loss_worker.py
"""

import sys
from pathlib import Path
from unittest import mock

import torch
import transformers
import trl
import trl.trainer.utils as utils

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import trl_grpo_row_loss as example
from trl_worker import STEPS, WORDS, Gradients, arguments, common, reward, rows

# Sums of logits in another order, in float32, of which Adam's quotients of small gradients make more in the second
# step: one run in eight was beyond 1e-4.
BOUND = 1e-3
SETTINGS = {
    "dapo": dict(beta=0.1),
    "grpo again": dict(loss_type="grpo", beta=0.1, num_iterations=2, delta=1.5, epsilon_high=0.3),
    "bnpo, entropy": dict(loss_type="bnpo", entropy_coef=0.05),
    "dr_grpo, accumulated": dict(loss_type="dr_grpo", gradient_accumulation_steps=2),
    "luspo, adaptive": dict(loss_type="luspo", use_adaptive_entropy=True, entropy_target=9.0, entropy_coef=0.1),
    "cispo": dict(loss_type="cispo", epsilon_high=1.001, num_iterations=2),
    "sapo, corrected": dict(loss_type="sapo", beta=0.1, use_bias_correction_kl=True, num_iterations=2),
}
REFUSED = {
    "importance_sampling_level": dict(importance_sampling_level="sequence", loss_type="grpo"),
    "loss_type": dict(loss_type="vespo"),
    "off_policy_mask_threshold": dict(off_policy_mask_threshold=0.5),
    "top_entropy_quantile": dict(top_entropy_quantile=0.2),
    "cast_lm_head_to_fp32": dict(cast_lm_head_to_fp32=True),
}
SAMPLED = "importance_sampling_ratio"
TIMES = ("train_runtime", "step_time", "seconds", "epoch", "_time")


def made(kind, **particular):
    settings = arguments(trl.GRPOConfig, max_completion_length=6, num_generations=4, temperature=0.9, **particular)
    return kind(reward_funcs=reward, args=settings, **common(rows(prompt=WORDS)))


class Corrected:
    """As if another engine had sampled: importance ratios that are known before."""

    def _generate_and_score_completions(self, inputs):
        found = super()._generate_and_score_completions(inputs)
        mask = found["completion_mask"]
        ratio = torch.linspace(0.5, 1.5, mask.numel()).view(mask.shape)
        self.use_vllm, self.vllm_importance_sampling_correction = True, True
        return found | {SAMPLED: ratio}

    def _compute_loss(self, model, inputs):
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.use_vllm = False


def trained(trainer):
    gradients = Gradients()
    trainer.add_callback(gradients)
    trainer.remove_callback(transformers.PrinterCallback)
    losses, computed = [], trainer.compute_loss

    def compute_loss(*args, **kwargs):
        losses.append(computed(*args, **kwargs))
        return losses[-1]

    trainer.compute_loss = compute_loss
    trainer.train()
    logged = [e for e in trainer.state.log_history if "loss" in e]
    return [float(loss.detach()) for loss in losses], gradients.steps, logged


def compare(name: str, theirs: type, ours: type, **setting) -> None:
    calls = []
    losses, gradients, logged = trained(made(theirs, **setting))
    trainer = made(ours, **setting)  # not before: a trainer seeds what draws its completions
    trainer.model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    our_losses, our_gradients, our_logged = trained(trainer)
    with_rows = [kwargs for kwargs in calls if "row_loss" in kwargs]
    assert len(with_rows) == len(losses) and all(len(kwargs["row_tensors"]) == 6 for kwargs in with_rows)
    assert len(losses) == len(our_losses) and len(gradients) == len(our_gradients) == len(logged) == STEPS
    assert all(any(g.norm() > 0.01 for g in step.values()) for step in gradients)
    for a, b in zip(losses, our_losses, strict=True):
        assert abs(a - b) <= BOUND * max(abs(a), 0.1), (name, losses, our_losses)
    for a, b in zip(gradients, our_gradients, strict=True):
        assert a.keys() == b.keys() and "lm_head.weight" in a
        size = max(g.norm() for g in a.values())
        for parameter, gradient in a.items():
            difference = (b[parameter] - gradient).norm()
            assert difference <= BOUND * max(gradient.norm(), 0.1 * size), (name, parameter, difference, size)
    for a, b in zip(logged, our_logged, strict=True):
        assert a.keys() == b.keys(), (name, a.keys() ^ b.keys())
        for key, value in a.items():
            if isinstance(value, float) and not any(word in key for word in TIMES):
                assert abs(value - b[key]) <= BOUND * max(abs(value), 0.1), (name, key, value, b[key])


def check_refusals() -> None:
    for name, setting in REFUSED.items():
        try:
            made(example.RowLossGRPOTrainer, **setting)
        except ValueError as error:
            assert str(error).startswith(f"{name}="), error
        else:
            raise AssertionError(f"{name} was taken")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, setting in SETTINGS.items():
        with mock.patch.object(utils, "_use_triton", lambda device: True):  # positions that count alone, as on a GPU
            compare(name, trl.GRPOTrainer, example.RowLossGRPOTrainer, **setting)
        print("ok", name, flush=True)
    kinds = [type("Corrected", (Corrected, kind), {}) for kind in (trl.GRPOTrainer, example.RowLossGRPOTrainer)]
    compare("sampled", *kinds, beta=0.1)
    print("ok sampled", flush=True)
    check_refusals()
    print("ok refused", flush=True)

"""Trains tiny models with TRL's trainers, with TRL's own fused head and with ours; prints "ok NAME" for each.

python test/trl_worker.py NAME...      of the trainers below; all of them without a name

In float32 and for both of TRL's ways to call its head, of positions that count (as on a GPU) and of all: losses and
gradients are the same, up to rounding.
"""

import os
import sys
import tempfile
from unittest import mock

import datasets
import torch
import transformers
import trl
import trl.trainer.utils as utils

import liger_cutedsl
from liger_cutedsl.liger import trl as ours
from training_worker import LINES, TOKENIZER, tiny

STEPS = 2
transformers.logging.disable_progress_bar()
# Losses and gradients of two right float32 kernels differ by the rounding of the logits' sums, which two steps of
# training carry on. A policy gradient's loss is a sum of terms of size ten that cancel: off by 1e-5 at the most.
BOUND = 1e-4
WORDS = [" ".join(line.split()[:8]) for line in LINES if len(line.split()) >= 8][:16]
SAVED = tempfile.mkdtemp()  # from where the trainers load a reference model
tiny().save_pretrained(SAVED)


def arguments(kind, **particular):
    return kind(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        seed=0,
        **particular,
    )


class Gradients(transformers.TrainerCallback):
    """Of every optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def trained(trainer):
    """(losses and entropies that were logged, gradients of each step)."""
    gradients = Gradients()
    trainer.add_callback(gradients)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    logged = [
        [entry[key] for key in ("loss", "entropy", "grad_norm") if key in entry]
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return logged, gradients.steps


def rows(**columns):
    return datasets.Dataset.from_dict(columns)


def common(dataset):
    model = transformers.AutoModelForCausalLM.from_pretrained(SAVED, dtype=torch.float32)
    return dict(model=model, train_dataset=dataset, processing_class=TOKENIZER)


def sft():
    dataset = rows(text=WORDS)
    return trl.SFTTrainer(args=arguments(trl.SFTConfig, max_length=24), **common(dataset))


def dpo():
    dataset = rows(prompt=WORDS[:8], chosen=WORDS[8:], rejected=WORDS[4:12])
    return trl.DPOTrainer(args=arguments(trl.DPOConfig, max_length=24), **common(dataset))


def kto():
    dataset = rows(prompt=WORDS[:8], completion=WORDS[8:], label=[True, False] * 4)
    return trl.KTOTrainer(args=arguments(trl.KTOConfig, max_length=24), **common(dataset))


def reward(completions, **_):
    return [float(len(set(text.split()))) + 0.1 * len(text) for text in completions]


def online(trainer, config):
    settings = arguments(config, max_completion_length=6, num_generations=4, temperature=0.9, beta=0.1)
    return trainer(reward_funcs=reward, args=settings, **common(rows(prompt=WORDS)))


def grpo():
    return online(trl.GRPOTrainer, trl.GRPOConfig)


def rloo():
    return online(trl.RLOOTrainer, trl.RLOOConfig)


def compare(make, compact):
    """make() a trainer twice, the second time with our head in TRL's place. compact: TRL scores what counts."""
    found = []
    with mock.patch.object(utils, "_use_triton", lambda device: compact):
        found.append(trained(make()))
        with mock.patch.object(ours, "run", wraps=ours.run) as calls:
            liger_cutedsl.enable()
            found.append(trained(make()))
            liger_cutedsl.disable()
    assert calls.call_count >= STEPS, calls.call_count
    (logged, gradients), (ours_logged, ours_gradients) = found
    assert len(logged) == len(gradients) == len(ours_gradients) == STEPS, (logged, len(gradients))
    for theirs, mine in zip(logged, ours_logged, strict=True):
        assert len(theirs) >= 2
        for a, b in zip(theirs, mine, strict=True):
            assert abs(a - b) <= BOUND * max(abs(a), 0.1), (make.__name__, compact, logged, ours_logged)
    for theirs, mine in zip(gradients, ours_gradients, strict=True):
        assert theirs.keys() == mine.keys() and "lm_head.weight" in theirs
        size = max(g.norm() for g in theirs.values())
        for name, gradient in theirs.items():
            assert (mine[name] - gradient).norm() <= BOUND * max(gradient.norm(), 0.1 * size), (make.__name__, name)


TRAINERS = (sft, dpo, kto, grpo, rloo)

if __name__ == "__main__":
    torch.set_num_threads(2)
    os.environ["LIGER_CUTEDSL_ENGINE"] = "torch"
    for trainer in TRAINERS:
        if trainer.__name__ in sys.argv[1:] or len(sys.argv) == 1:
            for compact in (False, True):
                compare(trainer, compact)
            print("ok", trainer.__name__, flush=True)

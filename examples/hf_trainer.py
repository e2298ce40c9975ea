"""Hugging Face's Trainer with Liger-Kernel's patches on our operator, and the line that says that it runs.

    python examples/hf_trainer.py               on a CPU, in seconds, with a tiny model made on the spot

Two lines matter: enable(), and use_liger_kernel=True. LIGER_KERNEL_IMPL=cutedsl in place of enable() brings Liger's
other CuTe operators along, where they run.
"""

from __future__ import annotations

import logging
import tempfile

import torch
import transformers

import liger_cutedsl

SEQUENCES, LENGTH, VOCAB = 64, 32, 2000


def dataset() -> list[dict[str, torch.Tensor]]:
    """Sequences that count up from a random number, so that there is something to learn."""
    starts = torch.randint(0, VOCAB - LENGTH, (SEQUENCES,), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": ids, "labels": ids} for ids in starts[:, None] + torch.arange(LENGTH)]


def tiny_llama() -> transformers.LlamaForCausalLM:
    transformers.set_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, head_dim=32)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **sizes))


def main() -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("liger_cutedsl").setLevel(logging.INFO)
    liger_cutedsl.enable()
    on_gpu = torch.cuda.is_available()
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        use_liger_kernel=True,
        # Liger's other operators are Triton kernels, which need a GPU
        liger_kernel_config=None if on_gpu else dict(rope=False, swiglu=False, rms_norm=False),
        per_device_train_batch_size=16,
        max_steps=12,
        learning_rate=1e-2,
        logging_steps=4,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not on_gpu,
        bf16=on_gpu,
    )
    trainer = transformers.Trainer(tiny_llama(), arguments, train_dataset=dataset())
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}, loss {float(entry['loss']):.3f}")


if __name__ == "__main__":
    main()

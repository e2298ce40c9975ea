"""TRL's SFT and GRPO trainers on our operator.

    python examples/trl_sft_and_grpo.py         on a CPU, in about a minute, with a tiny model made on the spot

The one line that matters is enable(): TRL 1.15 and later compute per-token log-probabilities with a fused head of their
own, and it is then ours. LIGER_KERNEL_IMPL does nothing for TRL, and neither does use_liger_kernel.
"""

from __future__ import annotations

import itertools
import os
import tempfile

import datasets
import tokenizers
import transformers
import trl

import liger_cutedsl

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
LINES = [" ".join(NUMBERS[start : start + 6]) for start in range(7)] * 8


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A word a token."""
    words = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", *NUMBERS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def tiny_llama(vocab: int) -> transformers.LlamaForCausalLM:
    transformers.set_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocab, pad_token_id=0, **sizes))


def settings(kind, **particular):
    return kind(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        **particular,
    )


def counts_up(completions, **_) -> list[float]:
    """GRPO's reward: the share of words that are followed by the next number."""
    rewards = []
    for text in completions:
        words = [NUMBERS.index(word) for word in text.split() if word in NUMBERS]
        rewards.append(sum(b == a + 1 for a, b in itertools.pairwise(words)) / 5)
    return rewards


def logged(trainer, *names) -> None:
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(", ".join(f"{name} {float(entry[name]):.4f}" for name in ("step", *names) if name in entry))


def main() -> None:
    os.environ["LIGER_CUTEDSL_ENGINE"] = "torch"  # on a CPU TRL's own head would run; on a GPU leave this out
    liger_cutedsl.enable()
    words = tokenizer()
    model = tiny_llama(len(words))
    print("SFT")
    text = datasets.Dataset.from_dict({"text": LINES})
    arguments = settings(trl.SFTConfig, max_steps=20, max_length=8)
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=text, processing_class=words)
    logged(trainer, "loss", "entropy", "mean_token_accuracy")
    print("GRPO")
    prompts = datasets.Dataset.from_dict({"prompt": NUMBERS[:8] * 4})
    arguments = settings(trl.GRPOConfig, max_steps=15, max_completion_length=5, num_generations=8, temperature=1.2)
    trainer = trl.GRPOTrainer(trainer.model, counts_up, args=arguments, train_dataset=prompts, processing_class=words)
    logged(trainer, "reward", "entropy", "loss")


if __name__ == "__main__":
    main()

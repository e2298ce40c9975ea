"""Trains tiny models the ways people do, plain and through our operator, in one process; prints "ok NAME" a way.

python test/training_worker.py NAME...      of the functions below; all but sft without a name

Only the loss is patched: Liger's other kernels need a GPU. The text is Python's own licence.
"""

# ruff: noqa: E402
import builtins
import copy
import importlib.util
import os
import sys
import tempfile
import warnings
from pathlib import Path

LIGER = Path(importlib.util.find_spec("liger_kernel").submodule_search_locations[0])
INSTALLED = (LIGER / "ops" / "cutedsl_flce").exists()  # by an ordinary installation, not by an editable one
if INSTALLED:
    os.environ["LIGER_KERNEL_IMPL"] = "cutedsl"
os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")

import datasets
import tokenizers
import torch
import transformers
from liger_kernel.transformers import apply_liger_kernel_to_llama

import liger_cutedsl
from stacks import ONLY_THE_LOSS, SMALL, count_calls

if not INSTALLED:
    liger_cutedsl.enable()
datasets.disable_progress_bars()
transformers.logging.set_verbosity_error()

# Losses of the two ways differ by float32 rounding of the logits, which six steps of training carry on.
FLOAT32, SIXTEEN_BIT = 1e-4, 2e-2


def text_and_tokenizer():
    lines = [line for line in str(builtins.license).splitlines() if line.strip()] or [str(builtins.license)]
    import this  # whose text is in rot13

    lines += ["".join(this.d.get(c, c) for c in line) for line in this.s.splitlines() if line]
    lines += [line for line in transformers.Trainer.__doc__.splitlines() if line.strip()]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>", "<eos>"])
    words.train_from_iterator(lines, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )
    return lines, tokenizer


LINES, TOKENIZER = text_and_tokenizer()


def tiny(kind="Llama", **particular):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(TOKENIZER),
        **SMALL,
        pad_token_id=TOKENIZER.pad_token_id,
        **particular,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def arguments(fused, cls=transformers.TrainingArguments, **particular):
    kernels = dict(use_liger_kernel=True, liger_kernel_config=ONLY_THE_LOSS) if fused else {}
    return cls(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=6,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        seed=0,
        **kernels,
        **particular,
    )


def logged_losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def compare(name, train, bound=FLOAT32):
    """train(fused) → losses, step by step."""
    with count_calls() as none:
        plain = train(False)
    with count_calls() as calls:
        fused = train(True)
    assert none == [0] and calls[0] >= len(fused) > 3, (none, calls, len(fused))
    for a, b in zip(plain, fused, strict=True):
        assert abs(a - b) <= bound * abs(a), (name, plain, fused)
    assert plain[-1] < plain[0], (name, plain, "nothing was learned")


def tokenized():
    tokens = [TOKENIZER(line, truncation=True, max_length=24)["input_ids"] for line in LINES]
    return datasets.Dataset.from_dict({"input_ids": [t for t in tokens if len(t) > 2][:64]})


def batch():
    return torch.tensor([t[:10] for t in tokenized()["input_ids"] if len(t) >= 10][:8])


def with_trainer(fused, model, **particular):
    collator = transformers.DataCollatorForLanguageModeling(TOKENIZER, mlm=False)
    settings = arguments(fused, **particular)
    return logged_losses(transformers.Trainer(model, settings, data_collator=collator, train_dataset=tokenized()))


def trainer():
    """Hugging Face's Trainer with gradient accumulation: num_items_in_batch reaches the loss."""
    compare("trainer", lambda fused: with_trainer(fused, tiny()))


def gemma2():
    """A softcap on the logits and an embedding that is the head."""
    particular = dict(final_logit_softcapping=10.0, tie_word_embeddings=True)

    def train(fused):
        return with_trainer(fused, tiny("Gemma2", **particular))

    # Gemma's activation has a flag of its own
    ONLY_THE_LOSS.update(geglu=ONLY_THE_LOSS.pop("swiglu"))
    try:
        compare("gemma2", train)
    finally:
        ONLY_THE_LOSS.update(swiglu=ONLY_THE_LOSS.pop("geglu"))


def sft():
    """TRL's SFTTrainer, which takes Liger's fused loss up to TRL 1.14."""
    import trl

    def train(fused):
        rows = datasets.Dataset.from_dict({"text": [line for line in LINES if len(line) > 20][:64]})
        settings = arguments(fused, trl.SFTConfig, max_length=24, bf16=False)
        return logged_losses(trl.SFTTrainer(tiny(), args=settings, train_dataset=rows, processing_class=TOKENIZER))

    compare("sft", train)


def lora(**particular):
    import peft

    def train(fused):
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM", **particular)
        return with_trainer(fused, peft.get_peft_model(tiny(), config))

    compare("lora", train)


def lora_frozen_head():
    lora()


def lora_trained_head():
    lora(modules_to_save=["lm_head"])


def loop(fused, model, step, dtype=None):
    """A training loop of one's own: step(loss, model) updates the parameters."""
    if fused:
        apply_liger_kernel_to_llama(**ONLY_THE_LOSS, model=model)
    ids, losses = batch(), []
    for _ in range(8):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(input_ids=ids, labels=ids).loss
        step(loss, model)
        losses.append(float(loss))
    return losses


def amp_fp16():
    """float16 autocast with a GradScaler over float32 parameters."""

    def train(fused):
        model = tiny()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.5), torch.amp.GradScaler("cpu")

        def step(loss, model):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        losses = loop(fused, model, step, torch.float16)
        assert scaler.get_scale() >= 2.0**12, "gradients overflowed"
        return losses

    compare("amp_fp16", train, SIXTEEN_BIT)


def bf16_master_weights():
    """bfloat16 parameters, updated from a float32 copy."""

    def train(fused):
        model = tiny().to(torch.bfloat16)
        masters = [p.detach().float() for p in model.parameters()]

        def step(loss, model):
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters, strict=True):
                    master -= 0.5 * parameter.grad.float()
                    parameter.copy_(master)

        return loop(fused, model, step)

    compare("bf16_master_weights", train, SIXTEEN_BIT)


def tied_embeddings():
    """One parameter that is embedding and head: both gradients reach it."""
    model = tiny(tie_word_embeddings=True)
    fused = copy.deepcopy(model)
    apply_liger_kernel_to_llama(**ONLY_THE_LOSS, model=fused)
    ids = batch()
    for m in (model, fused):
        m(input_ids=ids, labels=ids).loss.backward()
    assert fused.lm_head.weight is fused.model.embed_tokens.weight
    torch.testing.assert_close(fused.lm_head.weight.grad, model.lm_head.weight.grad)


WAYS = (trainer, gemma2, sft, lora_frozen_head, lora_trained_head, amp_fp16, bf16_master_weights, tied_embeddings)

if __name__ == "__main__":
    torch.set_num_threads(2)
    for way in WAYS:
        if way.__name__ in sys.argv[1:] or (len(sys.argv) == 1 and way is not sft):
            way()
            print("ok", way.__name__, flush=True)

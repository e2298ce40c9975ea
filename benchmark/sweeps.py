"""What is measured: sweeps of shapes, each with the implementations worth comparing there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmark.implementations import OPTIONS
from benchmark.measure import Shape
from benchmark.per_token import PER_TOKEN
from benchmark.row_loss import ROW_LOSS

PEERS = ("floor", "single_pass", "recompute", "liger-triton", "quack-base", "quack-exp-2048", "cce", "torch")
OURS = ("floor", "single_pass", "recompute")
ALL = (
    "floor",
    "single_pass",
    "single_pass-288",
    "single_pass-all",
    "single_pass-half",
    "recompute",
    "recompute-all",
    "recompute-half",
    "liger-triton",
    "liger-cute-sm90",
    "quack-base",
    "quack-exp-2048",
    "cce",
    "cce-exact",
    "torch",
    "torch-compile",
    "torch-linear-ce",
)
BUFFERS = ("buffer", "buffer-single_pass", "buffer-narrow")
SOFTCAPPED = ("Gemma 2 2B",)  # models whose head caps its logits, at 30

# (model, H, V) of heads people train.
MODELS = (
    ("Llama-3 8B", 4096, 128256),
    ("Llama-3 70B", 8192, 128256),
    ("Qwen3 0.6B", 1024, 151936),
    ("Qwen2.5 7B", 3584, 152064),
    ("Gemma 2 2B", 2304, 256000),
    ("Gemma 3 27B", 5376, 262208),
    ("Mistral 7B v0.3", 4096, 32768),
    ("DeepSeek-V3", 7168, 129280),
    ("Phi-4", 5120, 100352),
    ("gpt-oss 20B", 2880, 201088),
)

# Smaller ones too, where what is not a product shows.
HEADS = (
    ("Llama 3 8B", 4096, 128256),
    ("Llama 3.2 1B", 2048, 128256),
    ("Qwen3 4B", 2560, 151936),
    ("Qwen2.5 7B", 3584, 152064),
    ("gpt-oss 20B", 2880, 201088),
    ("Gemma 2 2B", 2304, 256000),
    ("Qwen3 0.6B", 1024, 151936),
    ("Qwen2.5 0.5B", 896, 151936),
    ("SmolLM2 135M", 576, 49152),
)


@dataclass(frozen=True)
class Measurement:
    """One shape of a sweep: label names it in tables."""

    sweep: str
    label: str
    shape: Shape
    implementations: tuple[str, ...]
    rounds: int = 5


REFERENCE = Shape(8192, 128256, 4096)


def gpu_sweeps() -> list[Measurement]:
    found = [
        Measurement("reference", "forward + backward", REFERENCE, ALL, 9),
        Measurement("reference", "forward", replace(REFERENCE, forward_only=True), PEERS, 7),
        Measurement("reference", "W frozen", replace(REFERENCE, frozen_weight=True), PEERS, 5),
    ]
    for vocab in (32000, 102400, 128256, 152064, 201088, 262144):
        found.append(Measurement("vocabulary", f"V={vocab}", Shape(8192, vocab, 4096), PEERS))
    for tokens in (1024, 2048, 4096, 8192, 16384, 32768, 65536):
        few = PEERS if tokens <= 8192 else tuple(p for p in PEERS if p not in ("torch", "cce"))
        found.append(Measurement("tokens", f"N={tokens}", Shape(tokens, 128256, 4096), few, 5 if tokens < 32768 else 3))
    for model, hidden, vocab in MODELS:
        compared = (*OURS[1:], "liger-triton", "cce")
        if model in SOFTCAPPED:
            model, compared = f"{model}, softcap", tuple(f"{name}-softcap" for name in compared)
        found.append(Measurement("models", model, Shape(8192, vocab, hidden), ("floor", *compared), 3))
    for share in (0.25, 0.5, 0.75, 0.9):
        shape, label = replace(REFERENCE, ignored=share), f"{share:.0%} ignored"
        found.append(Measurement("ignored", label, shape, (*OURS, "liger-triton", "quack-base", "cce"), 3))
    alone = tuple(f"{schedule}-{option}" for schedule in OURS[1:] for option in OPTIONS)
    found.append(Measurement("options", "forward + backward", REFERENCE, (*OURS, *alone), 5))
    for dtype in (torch.float16, torch.float32):
        shape = Shape(4096, 32000, 2048, dtype)
        ours = OURS if dtype.itemsize == 2 else OURS[:2]  # float32 runs on Liger's Triton operator
        found.append(Measurement("dtypes", str(dtype).removeprefix("torch."), shape, (*ours, "liger-triton")))
    found += per_token_sweep()
    found += row_loss_sweep()
    found += heads_sweep()
    found.append(Measurement("grad buffer", "forward + backward", REFERENCE, (*OURS, *BUFFERS), 9))
    # the first shape once more, at the other end of the run
    found.append(Measurement("repeat", "forward + backward", REFERENCE, (*PEERS[:6], "single_pass-288"), 9))
    return found


def heads_sweep() -> list[Measurement]:
    """Heads with the default, next to quack's; and the batches that Hugging Face's trainer makes of the first."""
    compared = ("floor", "single_pass", "quack-base")
    found = [
        Measurement(
            "heads",
            model,
            Shape(8192, vocab, hidden),
            (*compared, *(("single_pass-softcap",) if model in SOFTCAPPED else ())),
            9 if hidden < 2048 else 7,
        )
        for model, hidden, vocab in HEADS
    ]
    for tokens in (8192, 1024):
        shape = replace(REFERENCE, tokens=tokens)
        found.append(Measurement("batches", f"N={tokens}", shape, (*compared[:2], "single_pass-hf"), 15))
    return found


def per_token_sweep() -> list[Measurement]:
    heads = (
        ("Llama-3 8B", REFERENCE),
        ("Qwen3 4B", Shape(8192, 151936, 2560)),
        ("Qwen2.5 0.5B", Shape(8192, 151936, 896)),
        ("Llama-3 8B, N=2048", replace(REFERENCE, tokens=2048)),
    )
    compared = ("floor", *PER_TOKEN)
    return [
        Measurement("per token", f"{label}, {kind}", replace(shape, forward_only=forward), compared)
        for label, shape in heads
        for kind, forward in (("forward", True), ("forward + backward", False))
    ]


def row_loss_sweep() -> list[Measurement]:
    """A GRPO loss, at the reference shape and where host time is all there is: plain cross entropy is next to it."""
    shapes = (("reference", REFERENCE, 9), ("N=256, V=32000, H=1024", Shape(256, 32000, 1024), 15))
    compared = ("floor", "single_pass", *ROW_LOSS)
    return [Measurement("row loss", f"{label}, forward + backward", shape, compared, r) for label, shape, r in shapes]


def quick_sweeps() -> list[Measurement]:
    return [Measurement("quick", "forward + backward", Shape(8192, 32000, 4096), PEERS, 5)]


def cpu_sweeps() -> list[Measurement]:
    shape = Shape(64, 1000, 32, torch.float32)
    return [
        Measurement("cpu", "per token", shape, ("floor", *PER_TOKEN), 3),
        Measurement("cpu", "row loss", shape, ("floor", *ROW_LOSS), 3),
        Measurement("cpu", "grad buffer", shape, ("floor", *BUFFERS), 3),
        Measurement(
            "cpu", "forward + backward", shape, ("floor", "single_pass", "recompute", "liger-triton", "torch"), 3
        ),
        Measurement("cpu", "forward", Shape(64, 1000, 32, torch.float32, forward_only=True), ("floor", "recompute"), 3),
    ]

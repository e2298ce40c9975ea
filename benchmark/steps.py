"""Whole training steps of Hugging Face models, made from their configurations with random weights: what the loss is
worth in them.

python -m benchmark steps                       every model in every way, each in a process of its own
python -m benchmark steps --model "Qwen3 0.6B"  one of them        --cpu    a tiny one, to try the harness

    plain      transformers as it is
    liger      patched by Liger-Kernel's apply_liger_kernel_to_…, its own Triton loss
    enable     the same, with liger_cutedsl.enable(): the loss alone is ours
    variable   the same, with LIGER_KERNEL_IMPL=cutedsl: Liger's other CuTe operators too (RMSNorm, RoPE, SwiGLU)

A step is forward, backward and a fused AdamW over bf16 weights, 4 sequences of 2048 tokens, a tenth of the labels
ignored and the loss divided by the number of the others, as Hugging Face's Trainer does. head_ms is the time of the
same model with its layers left out: lm_head, loss and their backward.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmark.records import RESULTS, environment, read, slug

ROOT = Path(__file__).parent.parent
WAYS = ("plain", "liger", "enable", "variable")


@dataclass(frozen=True)
class Model:
    """A decoder's configuration, as its model card's config.json has it. checkpoint: its layers are computed again in
    backward, because their activations do not fit beside the weights and AdamW's state."""

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocab: int
    tied: bool
    checkpoint: bool = False
    sequences: int = 4
    tokens: int = 2048

    def build(self, device: str, dtype: torch.dtype):
        import transformers

        kinds = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM)}
        kinds["qwen3"] = (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)
        config_of, model_of = kinds[self.family]
        config = config_of(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.tokens,
            tie_word_embeddings=self.tied,
            use_cache=False,
        )
        torch.manual_seed(0)
        with torch.device(device):
            model = model_of(config).to(dtype)
        if self.checkpoint:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        return model.train()


MODELS = {
    "Qwen3 0.6B": Model("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "Llama 3.2 1B": Model("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "Llama 3 8B": Model("llama", 4096, 14336, 32, 32, 8, 128, 128256, False, checkpoint=True),
}
TINY = {"tiny": Model("llama", 32, 64, 2, 4, 2, 8, 300, True, sequences=2, tokens=24)}


def patch(way: str, family: str, device: str) -> None:
    """Before the model is made. On a CPU Liger's kernels do not run, and only the loss is patched."""
    if way == "plain":
        return
    from liger_kernel import transformers as liger

    apply = {"llama": liger.apply_liger_kernel_to_llama, "qwen3": liger.apply_liger_kernel_to_qwen3}[family]
    without = {} if device == "cuda" else dict(rope=False, rms_norm=False, swiglu=False)
    if way == "enable":
        import liger_cutedsl

        liger_cutedsl.enable()
    apply(cross_entropy=False, fused_linear_cross_entropy=True, **without)


class Step:
    """A training step, and the head's share of one."""

    def __init__(self, model: Model, device: str):
        self.device, self.hidden = device, model.hidden
        self.model = model.build(device, torch.bfloat16 if device == "cuda" else torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        generator = torch.Generator(device).manual_seed(0)
        shape = (model.sequences, model.tokens)
        self.ids = torch.randint(0, model.vocab, shape, device=device, generator=generator)
        ignored = torch.rand(shape, device=device, generator=generator) < 0.1
        self.labels = torch.where(ignored, -100, self.ids)
        self.items = (self.labels[:, 1:] != -100).sum()

    def loss(self) -> torch.Tensor:
        return self.model(input_ids=self.ids, labels=self.labels, num_items_in_batch=self.items).loss

    def __call__(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def head(self):
        """A function that runs lm_head, the loss and their backward on hidden states that are there."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        dtype = self.model.lm_head.weight.dtype
        states = torch.randn(*self.ids.shape, self.hidden, device=self.device, dtype=dtype, requires_grad=True)
        self.model.model.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=states)

        def run():
            self.loss().backward()
            states.grad = self.model.lm_head.weight.grad = None

        return run


def median_ms(run, rounds: int, device: str) -> tuple[float, float, float]:
    """(median, least, greatest) of a call's wall time: the host's work counts where it is what a step waits for."""
    times = []
    for _ in range(rounds):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), min(times), max(times)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measured(name: str, way: str, device: str, rounds: int) -> dict:
    """One row: a model in one way, in this process."""
    model = {**MODELS, **TINY}[name]
    patch(way, model.family, device)
    step = Step(model, device)
    losses = [float(step()) for _ in range(3)]  # compiles kernels, and makes AdamW's state
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms, least, greatest = median_ms(step, rounds, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    head = step.head()
    for _ in range(3):
        head()
    head_ms, *_ = median_ms(head, rounds, device)
    tokens = model.sequences * model.tokens
    return {
        "ms": round(ms, 3),
        "least_ms": round(least, 3),
        "greatest_ms": round(greatest, 3),
        "peak_gib": peak and round(peak, 2),
        "tokens_a_second": round(1e3 * tokens / ms),
        "head_ms": round(head_ms, 3),
        "head_share": round(head_ms / ms, 3),
        "losses": [round(loss, 5) for loss in losses],
    }


def row_of(name: str, way: str, device: str, rounds: int) -> dict:
    """One row from a process of its own; the reason where there is none."""
    variables = {key: value for key, value in os.environ.items() if key != "LIGER_KERNEL_IMPL"}
    if way == "variable":
        variables["LIGER_KERNEL_IMPL"] = "cutedsl"
    command = [sys.executable, "-W", "ignore", "-m", "benchmark.steps", name, way, device, str(rounds)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    row = {"kind": "step", "model": name, "way": way, **asdict({**MODELS, **TINY}[name]), "skipped": ""}
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {**row, "skipped": reason[:300]}
    return {**row, **json.loads(done.stdout.strip().splitlines()[-1])}


def table(rows: list[dict]) -> str:
    heads = ("model", "way", "ms a step", "peak GiB", "tokens a second", "head ms (share)")
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---"] * len(heads)) + " |"]
    for row in rows:
        if row["skipped"]:
            cells = (row["model"], row["way"], f"– ({row['skipped'][:80]})", "–", "–", "–")
        else:
            peak = "–" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
            share = f"{row['head_ms']:.1f} ({100 * row['head_share']:.0f}%)"
            cells = (row["model"], row["way"], f"{row['ms']:.1f}", peak, f"{row['tokens_a_second']:.0f}", share)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(cpu: bool = False, models: list[str] | None = None, out: str | None = None, rounds: int = 10) -> int:
    device = "cpu" if cpu else "cuda"
    if not cpu and not torch.cuda.is_available():
        print("python -m benchmark steps needs an NVIDIA GPU; --cpu runs the harness without one", file=sys.stderr)
        return 2
    path = Path(out) if out else RESULTS / f"{slug(device)}-steps.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = models or list(TINY if cpu else MODELS)
    with path.open("w") as file:
        file.write(json.dumps(environment(device, "python -m benchmark steps" + " --cpu" * cpu)) + "\n")
        for name in names:
            for way in WAYS:
                file.write(json.dumps(row_of(name, way, device, 2 if cpu else rounds)) + "\n")
                file.flush()
    print(table([row for row in read(path) if row["kind"] == "step"]))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmark.steps", description="one row, for `benchmark steps`")
    for argument in ("model", "way", "device", "rounds"):
        parser.add_argument(argument)
    chosen = parser.parse_args()
    print(json.dumps(measured(chosen.model, chosen.way, chosen.device, int(chosen.rounds))))

"""Trains a small Llama with a large vocabulary twice, through plain PyTorch and through the fused loss, and compares.

The text is the Python standard library's own source; a token is a pair of bytes, so the vocabulary has 65,536
entries. Liger-Kernel patches the second model, as in real training; on a CPU only its fused linear cross entropy.

    python examples/finetune_tiny_llama.py [--steps 20] [--tokens 512]
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import weakref
from pathlib import Path

import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import liger_cutedsl

VOCABULARY = 2**16
SEQUENCE = 128


class PeakMemory(TorchDispatchMode):
    """Largest sum of bytes of the tensors made inside and still alive. Counts on any device."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen and size:
            self.seen.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key, size):
        self.seen.discard(key)
        self.live -= size


def batches(steps: int, tokens: int, device: str):
    """steps batches of (rows, SEQUENCE) token ids from the standard library's sources."""
    wanted = 2 * steps * tokens
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= wanted:
            break
    pairs = torch.frombuffer(bytearray(text[:wanted]), dtype=torch.uint8).long().view(-1, 2)
    return (pairs[:, 0] * 256 + pairs[:, 1]).view(steps, -1, SEQUENCE).to(device)


def make_model(device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)).to(device)


def train(model, data, name: str) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    losses = []
    with tqdm(data, desc=f"{name:>13}", unit="step") as bar:
        for ids in bar:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


def plain_head(model, hidden, ids):
    return model.loss_function(model.lm_head(hidden), ids, VOCABULARY)


def fused_head(model, hidden, ids):
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    return liger_cutedsl.fused_linear_cross_entropy(hidden, model.lm_head.weight, shifted)


def head_memory(model, head, ids) -> float:
    """Peak MB of head and loss alone, forward and backward, gradients included."""
    hidden = model.model(input_ids=ids).last_hidden_state.detach().requires_grad_()
    with PeakMemory() as memory:
        head(model, hidden, ids).backward()
    model.zero_grad()
    return memory.peak / 1e6


def gradients(model, ids) -> dict[str, torch.Tensor]:
    model(input_ids=ids, labels=ids).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512, help="tokens a step, a multiple of 128")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.tokens < SEQUENCE or arguments.tokens % SEQUENCE:
        parser.error(f"--steps must be at least 1 and --tokens a multiple of {SEQUENCE}")
    logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = batches(arguments.steps, arguments.tokens, device)

    plain = make_model(device)
    fused = copy.deepcopy(plain)
    liger_cutedsl.enable()
    on_gpu = device == "cuda"
    apply_liger_kernel_to_llama(
        rope=on_gpu,
        swiglu=on_gpu,
        rms_norm=on_gpu,
        cross_entropy=False,
        fused_linear_cross_entropy=True,
        model=fused,
    )
    expected, found = gradients(plain, data[0]), gradients(fused, data[0])
    worst = max(float((found[n] - g).norm() / g.norm()) for n, g in expected.items())
    plain_mb, fused_mb = head_memory(plain, plain_head, data[0]), head_memory(fused, fused_head, data[0])
    hidden = torch.empty(arguments.tokens, fused.config.hidden_size, device=device)
    print(f"the fused loss runs on {liger_cutedsl.explain(hidden, fused.lm_head.weight)}")
    losses = {name: train(model, data, name) for name, model in (("plain PyTorch", plain), ("liger-cutedsl", fused))}

    print("step   plain PyTorch   liger-cutedsl")
    for step in sorted({*range(0, arguments.steps, max(1, arguments.steps // 5)), arguments.steps - 1}):
        print(f"{step:4d}   {losses['plain PyTorch'][step]:13.5f}   {losses['liger-cutedsl'][step]:13.5f}")
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    print(f"largest difference of the losses      {apart:.1e}")
    print(f"largest difference of a gradient      {worst:.1e} of its norm, in the first step")
    print(
        f"peak memory of head and loss          {plain_mb:.0f} MB plain, {fused_mb:.0f} MB fused (gradients included)"
    )


if __name__ == "__main__":
    main()

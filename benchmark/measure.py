"""How things are measured: interleaved rounds and medians for time, peak allocation for memory, float64 for error."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field

import torch

from benchmark.implementations import Implementation


@dataclass(frozen=True)
class Shape:
    tokens: int
    vocab: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16
    forward_only: bool = False
    frozen_weight: bool = False
    ignored: float = 0.0

    def inputs(self, device, seed=0):
        """x ~ N(0, 1), W ~ N(0, 1/H): logits of standard deviation 1. Targets uniform, a share of them ignored."""
        g = torch.Generator(device).manual_seed(seed)
        x = torch.randn(self.tokens, self.hidden, device=device, generator=g).to(self.dtype)
        w = (torch.randn(self.vocab, self.hidden, device=device, generator=g) * self.hidden**-0.5).to(self.dtype)
        target = torch.randint(0, self.vocab, (self.tokens,), device=device, generator=g)
        if self.ignored:
            target[torch.rand(self.tokens, device=device, generator=g) < self.ignored] = -100
        backward = not self.forward_only
        return x.requires_grad_(backward), w.requires_grad_(backward and not self.frozen_weight), target


@dataclass
class Row:
    """One implementation at one shape. ms: median; peak_mb: inputs, gradients and workspace, in MB of 10⁶ bytes;
    dx_error: ‖ĝ − g‖/‖g‖ of a sample of dX's rows against float64, NaN where there is none."""

    implementation: str
    ms: float = float("nan")
    spread_ms: tuple[float, float] = (float("nan"), float("nan"))
    peak_mb: float = float("nan")
    compile_s: float = float("nan")
    dx_error: float = float("nan")
    skipped: str = ""
    times: list[float] = field(default_factory=list)


def measure(implementations: list[Implementation], shape: Shape, rounds: int, device="cuda") -> dict[str, Row]:
    """Every implementation at one shape, their rounds interleaved and shuffled: drift of clocks and power hits all
    alike."""
    x, weight, target = shape.inputs(device)
    rows, runs, sample = {}, {}, None
    if not shape.forward_only:
        sample = sampled_dx(x, weight, target)

    def call(run):
        x.grad = weight.grad = None
        with torch.set_grad_enabled(not shape.forward_only):
            run(x, weight, target)

    for implementation in implementations:
        row = rows[implementation.name] = Row(implementation.name)
        try:
            start = time.perf_counter()
            run = implementation.make()
            call(run)
            call(run)
            _synchronize(device)
            row.compile_s = time.perf_counter() - start
            if implementation.plain and sample is not None:
                row.dx_error = relative_error(x.grad[sample[0]], sample[1])
            row.peak_mb = peak_mb(lambda run=run: call(run), (x, weight), device)
            runs[implementation.name] = run
        except Exception as error:
            row.skipped = f"{type(error).__name__}: {error}"[:200]
        x.grad = weight.grad = None
        _empty_cache(device)
    order = random.Random(0)
    for _ in range(rounds):
        # In another order each round: a GPU at its power limit is faster after a call that drew less.
        for name, run in order.sample(list(runs.items()), len(runs)):
            # An untimed call first: after the pause of a synchronisation a GPU runs a few ms at clocks that its
            # power limit does not sustain, which flatters whatever is short.
            call(run)
            rows[name].times.append(time_ms(lambda run=run: call(run), device))
    for row in rows.values():
        if row.times:
            row.ms = statistics.median(row.times)
            row.spread_ms = (min(row.times), max(row.times))
    return rows


@torch.no_grad()
def sampled_dx(x, weight, target, count=64, width=8192) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, dX of these rows in float64): a sample of those whose target counts, the vocabulary slice by slice."""
    valid = (target >= 0).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(1)
    rows = valid[torch.randperm(len(valid), generator=generator)[:count].to(valid.device)]
    part, lse = x[rows].double(), torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=x.device)
    for start in range(0, len(weight), width):
        lse = torch.logaddexp(lse, torch.logsumexp(part @ weight[start : start + width].double().t(), dim=1))
    dx = -weight[target[rows]].double()
    for start in range(0, len(weight), width):
        slice_of_weight = weight[start : start + width].double()
        dx += torch.exp(part @ slice_of_weight.t() - lse[:, None]) @ slice_of_weight
    return rows, dx / len(valid)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def time_ms(function, device) -> float:
    if device == "cpu":
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def peak_mb(function, inputs, device) -> float:
    """MB of 10⁶ bytes that a call needs at its peak, its inputs counted in, without gradients from an earlier call."""
    if device == "cpu":
        return float("nan")
    for value in inputs:
        value.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    size = sum(v.numel() * v.element_size() for v in inputs)
    return (torch.cuda.max_memory_allocated() - before + size) / 1e6


def _synchronize(device):
    if device != "cpu":
        torch.cuda.synchronize()


def _empty_cache(device):
    if device != "cpu":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Distribution:
    """Of logits. std: of x; offset: common to all logits; confident: x points at its target's row; ignored: so many
    targets are (1/2048 is a number of bf16, and 1/2040 lies halfway between two)."""

    std: float
    offset: float = 0.0
    confident: bool = False
    ignored: int = 0


# On which 16-bit losses differ.
DISTRIBUTIONS = {
    "std 1": Distribution(1.0),
    "std 5": Distribution(5.0),
    "std 20": Distribution(20.0),
    "confident": Distribution(1.0, confident=True),
    "std 5, offset 200": Distribution(5.0, offset=200.0),
    "std 1, 8 targets ignored": Distribution(1.0, ignored=8),
}


def distribution_inputs(name: str, device, tokens=2048, vocab=32000, hidden=1024):
    """bf16 inputs of a named distribution: x, W, target."""
    distribution = DISTRIBUTIONS[name]
    torch.manual_seed(0)
    x = (torch.randn(tokens, hidden, device=device) * distribution.std).bfloat16()
    weight = (torch.randn(vocab, hidden, device=device) * hidden**-0.5).bfloat16()
    target = torch.randint(0, vocab, (tokens,), device=device)
    if distribution.offset:  # one hidden feature is constant
        x[:, 0], weight[:, 0] = distribution.offset, 1.0
    if distribution.confident:
        x = (weight[target].float() * 12 + 0.3 * torch.randn(tokens, hidden, device=device)).bfloat16()
    target[: distribution.ignored] = -100
    return x, weight, target


def gradient_errors(implementation: Implementation, name: str, device="cuda", **sizes) -> dict[str, float]:
    """‖ĝ − g‖/‖g‖ of dX and dW, and the loss's relative error where it returns one, against float64."""
    x, weight, target = distribution_inputs(name, device, **sizes)
    x64, w64 = x.double(), weight.double()
    logits = x64 @ w64.t()
    lse = torch.logsumexp(logits, dim=1)
    rows = (target >= 0).nonzero()[:, 0]
    loss = (lse[rows] - logits[rows, target[rows]]).mean()
    dz = logits.sub_(lse[:, None]).exp_()
    dz[rows, target[rows]] -= 1
    dz[target < 0] = 0
    dz /= len(rows)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    got = implementation.make()(x, weight, target)
    found = {"dx": (x.grad, dz @ w64), "dw": (weight.grad, dz.t() @ x64), "loss": (got, loss)}
    return {name: relative_error(*pair) for name, pair in found.items() if pair[0] is not None}

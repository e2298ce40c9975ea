"""Per-token values: log-probabilities with and without the entropy, ours and those of trainers' own heads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmark.implementations import Implementation
from benchmark.measure import distribution_inputs, relative_error
from liger_cutedsl import fused_linear_log_probs


def _ours(entropy: bool):
    def make():
        def values(x, w, t):
            found = fused_linear_log_probs(x, w, t, return_entropy=entropy)
            return (found.log_probs, found.entropy) if entropy else (found,)

        return values

    return make


def trl_values(entropy: bool):
    def make():
        from trl.kernels import ChunkedLogProbFunction as function

        outputs = ("entropy",) if entropy else ()
        return lambda x, w, t: function.apply(x, w, None, t, 1.0, 32768, None, 1.0, outputs)[: 1 + entropy]

    return make


def _liger(entropy: bool, module="fused_linear_scaled_cross_entropy"):
    def make():
        import importlib

        function = importlib.import_module(f"liger_kernel.ops.{module}").LigerFusedLinearScaledCrossEntropyFunction

        def values(x, w, t):
            found = function.apply(x, w, t, 1.0, -100, 1, entropy)
            return (-found[0], found[1]) if entropy else (-(found[0] if isinstance(found, tuple) else found),)

        return values

    return make


def _verl():
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda x, w, t: linear_cross_entropy(x, w, t, 1.0)


# name → (note, make() → values(x, weight, target) → (log_probs,) or (log_probs, entropy))
VALUES: dict[str, tuple[str, Callable]] = {
    "log-probs": ("ours, log-probabilities", _ours(False)),
    "entropy": ("ours, log-probabilities and entropy", _ours(True)),
    "trl": ("TRL, ChunkedLogProbFunction", trl_values(False)),
    "trl-entropy": ("TRL, with entropy", trl_values(True)),
    "liger-scaled": ("Liger-Kernel, scaled cross entropy", _liger(False)),
    "liger-scaled-entropy": ("Liger-Kernel, with entropy", _liger(True)),
    "liger-cutile-entropy": (
        "Liger-Kernel, cuTile, with entropy",
        _liger(True, "cutile.ops.fused_linear_scaled_cross_entropy"),
    ),
    "verl-entropy": ("verl, Triton, with entropy", _verl),
}


def _timed(make):
    """make() → run(x, weight, target), which leaves gradients for random upstream gradients, where they are wanted."""

    def made():
        values, upstream = make(), {}

        def run(x, weight, target):
            found = values(x, weight, target)
            if not found[0].requires_grad:
                return None
            if upstream.get("shape") != target.shape:
                generator = torch.Generator(x.device).manual_seed(2)
                draws = torch.randn(2, *target.shape, device=x.device, generator=generator)
                upstream.update(shape=target.shape, draws=draws.unbind())
            torch.autograd.backward(found, [g.to(v.dtype) for g, v in zip(upstream["draws"], found, strict=False)])

        return run

    return made


PER_TOKEN = {name: Implementation(name, note, _timed(make), plain=False) for name, (note, make) in VALUES.items()}


def per_token_errors(name: str, distribution: str, device="cuda", **sizes) -> dict[str, float]:
    """The largest errors of log-probabilities and entropies, and ‖ĝ − g‖/‖g‖ of dX and dW, against float64: for random
    upstream gradients of both, or of the log-probabilities alone where there is no entropy."""
    x, weight, target = distribution_inputs(distribution, device, **sizes)
    target = target.clamp(min=0)
    leaves = [v.detach().requires_grad_() for v in (x, weight)]
    found = VALUES[name][1]()(*leaves, target)
    draws = torch.randn(2, *target.shape, device=device, generator=torch.Generator(device).manual_seed(2))
    torch.autograd.backward(found, [g.to(v.dtype) for g, v in zip(draws, found, strict=False)])
    x64, w64 = x.double(), weight.double()
    log_p = torch.log_softmax(x64 @ w64.t(), dim=-1)
    p, rows = log_p.exp(), torch.arange(len(target), device=device)
    entropy = -(p * log_p).sum(dim=1)
    result = {"log_probs": float((found[0].double() - log_p[rows, target]).abs().max())}
    g = draws.double()
    dz = -g[0][:, None] * p
    dz[rows, target] += g[0]
    if len(found) > 1:
        result["entropy"] = float((found[1].double() - entropy).abs().max())
        dz -= g[1][:, None] * p * (log_p + entropy[:, None])
    result["dx"] = relative_error(leaves[0].grad, dz @ w64)
    result["dw"] = relative_error(leaves[1].grad, dz.t() @ x64)
    return result

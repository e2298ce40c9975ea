"""What each implementation is called in tables and plots, and in which colour it is drawn, everywhere the same."""

from __future__ import annotations

NAMES = {
    "floor": "cuBLAS GEMMs alone, no loss (floor)",
    "single_pass": "**liger-cutedsl, default**",
    "single_pass-288": "**liger-cutedsl, workspace 288 MiB**",
    "single_pass-all": "**liger-cutedsl, every option on**",
    "single_pass-half": "**liger-cutedsl, half of the targets ignored**",
    "recompute": "**liger-cutedsl, `recompute`**",
    "recompute-all": "**liger-cutedsl, `recompute`, every option on**",
    "recompute-half": "**liger-cutedsl, `recompute`, half ignored**",
    "liger-triton": "Liger-Kernel, Triton",
    "liger-cute-sm90": "Liger-Kernel, CuTe SM90",
    "quack-base": "quack, base",
    "quack-exp-2048": "quack, scaled-exp, chunk 2048",
    "cce": "Cut Cross Entropy",
    "cce-exact": "Cut Cross Entropy, exact",
    "torch": "PyTorch, logits stored",
    "torch-compile": "PyTorch, torch.compile",
    "torch-linear-ce": "torch.nn.functional.linear_cross_entropy",
    # per-token values
    "log-probs": "**liger-cutedsl**",
    "entropy": "**liger-cutedsl, with entropy**",
    "trl": "TRL",
    "trl-entropy": "TRL, with entropy",
    "liger-scaled": "Liger-Kernel",
    "liger-scaled-entropy": "Liger-Kernel, with entropy",
    "liger-cutile-entropy": "Liger-Kernel, cuTile, with entropy",
    "verl-entropy": "verl, with entropy",
    # a GRPO loss
    "row-loss": "**liger-cutedsl, `fused_linear_loss`**",
    "row-loss-recompute": "**the same, `recompute`**",
    "row-loss-log-probs": "**liger-cutedsl, log-probabilities and autograd**",
    "row-loss-trl": "TRL's log-probabilities and autograd",
    "row-loss-liger": "Liger-Kernel's LigerFusedLinearGRPOLoss, no entropy",
}
OURS, OURS_LEAN, FLOOR = "#0b66c3", "#6aaee6", "#e3e3e3"
GREYS = {"liger-triton": "#2b2b2b", "liger-cute-sm90": "#4f4f4f", "quack-base": "#6a6a6a", "cce": "#858585"}
OTHER_GREY = "#a0a0a0"


def plain(name: str) -> str:
    """The name without marks of a table."""
    return NAMES[name].replace("*", "").replace("`", "")


def is_ours(name: str) -> bool:
    return NAMES[name].startswith("**")


def colour(name: str) -> str:
    """Ours blue, the lean schedule a light blue, and a grey for each peer."""
    if is_ours(name):
        return OURS_LEAN if name.startswith("recompute") else OURS
    return GREYS.get(name, OTHER_GREY)

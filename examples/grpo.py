"""GRPO at the price of cross entropy: clip, KL to a reference and entropy bonus as a function of each token's values.

    python examples/grpo.py                on a CPU, in seconds

The loss is next to the same function of plain logits in every step. What an RL trainer logs comes back as aux.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from liger_cutedsl import fused_linear_log_probs, fused_linear_loss

SEQUENCES, LENGTH, HIDDEN, VOCAB, IGNORED = 8, 32, 64, 2000, -100
TEMPERATURE, CLIP, BETA, BONUS = 0.9, 0.2, 0.04, 0.001


def grpo(values, old, reference, advantage, weight):
    """Each token's loss, and behind it what is logged: KL, ratio, whether the ratio was clipped."""
    ratio = torch.exp(values.log_prob - old)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    distance = reference - values.log_prob
    kl = distance.exp() - distance - 1
    loss = (-gain + BETA * kl - BONUS * values.entropy) * weight
    return loss, kl, ratio, (ratio - 1).abs() > CLIP


def plain(x, head, tokens, *rows) -> torch.Tensor:
    """The same of logits that are stored, a (tokens, vocabulary) matrix."""
    log_p = torch.log_softmax(x @ head.t() / TEMPERATURE, dim=-1)
    of_tokens = log_p.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    values = SimpleNamespace(log_prob=of_tokens, entropy=-(log_p.exp() * log_p).sum(dim=-1))
    return torch.where(tokens == IGNORED, 0.0, grpo(values, *rows)[0]).sum()


def main() -> None:
    torch.manual_seed(0)
    body, head = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    x, tokens = torch.randn(SEQUENCES, LENGTH, HIDDEN), torch.randint(0, VOCAB, (SEQUENCES, LENGTH))
    tokens[:, :8] = IGNORED  # the prompt
    counted = tokens != IGNORED
    rewards = (tokens % 2 == 0).float().mul(counted).sum(dim=1)
    advantage = ((rewards - rewards.mean()) / rewards.std())[:, None].expand(tokens.shape)
    # a mean over sequences of a mean over each one's tokens is a weight: "sum" divides by nothing
    weight = (1.0 / (counted.sum(dim=1) * SEQUENCES))[:, None].expand(tokens.shape)
    with torch.no_grad():
        old = fused_linear_log_probs(torch.tanh(body(x)), head.weight, tokens, temperature=TEMPERATURE)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)
    for step in range(10):
        hidden, rows = torch.tanh(body(x)), (old, old, advantage, weight)
        found = fused_linear_loss(
            hidden, head.weight, tokens, grpo, *rows, reduction="sum", temperature=TEMPERATURE, return_entropy=True
        )
        optimizer.zero_grad()
        found.loss.backward()
        with torch.no_grad():
            difference = abs(float(found.loss.detach() - plain(hidden, head.weight, tokens, *rows)))
        optimizer.step()
        kl, _, clipped = (aux[counted].float().mean() for aux in found.aux)
        entropy = found.entropy[counted].mean()
        print(
            f"step {step}: loss {found.loss:.4f}, off plain logits by {difference:.0e}, KL {kl:.4f}, "
            f"clipped {clipped:.2f}, entropy {entropy:.3f}"
        )


if __name__ == "__main__":
    main()

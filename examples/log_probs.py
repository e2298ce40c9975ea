"""Log-probabilities and entropy in a training loop of one's own: a policy gradient with an entropy bonus.

    python examples/log_probs.py                on a CPU, in seconds

The logits of a step are (tokens, vocabulary) numbers, and never exist. Ignored tokens have log-probability and entropy
0.
"""

from __future__ import annotations

import torch

from liger_cutedsl import fused_linear_log_probs

TOKENS, HIDDEN, VOCAB, IGNORED = 256, 64, 2000, -100
TEMPERATURE, CLIP, BONUS = 0.9, 0.2, 0.001


def main() -> None:
    torch.manual_seed(0)
    body, head = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    x, tokens = torch.randn(TOKENS, HIDDEN), torch.randint(0, VOCAB, (TOKENS,))
    tokens[::4] = IGNORED  # the prompt
    good = tokens % 2 == 0  # tokens that are rewarded
    advantages, count = torch.where(good, 1.0, -1.0), (tokens != IGNORED).sum()
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)

    def policy(**asked):
        return fused_linear_log_probs(torch.tanh(body(x)), head.weight, tokens, temperature=TEMPERATURE, **asked)

    with torch.no_grad():
        old = policy()
    for step in range(10):
        found = policy(return_entropy=True, return_is_top1=True)
        ratio = (found.log_probs - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        loss = -(gain + BONUS * found.entropy)[tokens != IGNORED].sum() / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        entropy, top1 = found.entropy.sum() / count, found.is_top1.sum() / count
        print(f"step {step}: loss {loss:.4f}, entropy {entropy:.3f}, most likely {top1:.3f}")


if __name__ == "__main__":
    main()

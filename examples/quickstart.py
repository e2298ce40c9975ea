"""Fused linear + cross entropy in ten lines: runs on a GPU or on the CPU."""

import torch

from liger_cutedsl import explain, fused_linear_cross_entropy

device = "cuda" if torch.cuda.is_available() else "cpu"
hidden = torch.randn(512, 256, device=device, dtype=torch.bfloat16, requires_grad=True)  # (tokens, H)
lm_head = torch.randn(32000, 256, device=device, dtype=torch.bfloat16, requires_grad=True)  # (V, H)
labels = torch.randint(0, 32000, (512,), device=device)
loss = fused_linear_cross_entropy(hidden, lm_head, labels, label_smoothing=0.1)
loss.backward()
print(f"loss {loss.item():.4f}, |dW| {lm_head.grad.norm().item():.4f}, ran on {explain(hidden, lm_head)}")

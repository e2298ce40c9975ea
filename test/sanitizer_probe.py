"""A few small calls with odd sizes, for NVIDIA's memory checker; needs a GPU.

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 7 python test/sanitizer_probe.py

(With API errors, the checker also counts libraries that ask the driver for functions it does not have.)
"""

import torch

from liger_cutedsl import fused_linear_cross_entropy

EVERY_OPTION = dict(softcap=9.0, label_smoothing=0.1, lse_square_scale=1e-3, use_token_scaling=True)
TOKENS, VOCAB, HIDDEN = 257, 385, 72


def call(options, **route):
    """One forward and backward pass, a third of the targets ignored."""
    torch.manual_seed(0)
    x, weight = (
        torch.randn(n, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (TOKENS, VOCAB)
    )
    target = torch.randint(0, VOCAB, (TOKENS,), device="cuda")
    target[::3] = -100
    vectors = {}
    if options:
        bias = torch.randn(VOCAB, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        vectors = dict(bias=bias, ce_weight=torch.rand(VOCAB, device="cuda"), return_predicted_tokens=True)
    output = fused_linear_cross_entropy(x, weight, target, engine="cute", **vectors, **options, **route)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    torch.cuda.synchronize()
    print(route, "every option" if options else "plain", float(loss), flush=True)


if __name__ == "__main__":
    for options in ({}, EVERY_OPTION):
        # single_pass; exponentials of all columns kept; of some, in dW's memory, and tiles
        call(options, schedule="single_pass")
        call(options, schedule="recompute")
        call(options, schedule="recompute", workspace_mb=0.05)

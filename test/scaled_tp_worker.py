"""One rank of test_scaled_tp.py: python test/scaled_tp_worker.py RANK RANKS FOLDER   prints "rank R done" if all held

Liger's scaled cross entropy with a vocabulary over the ranks (gloo, CPU), through liger_kernel.ops and its functional
form: results the same on every rank, the input's gradient summed over them, the weight's of the rank's own rows.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from liger_kernel.transformers import functional

import liger_cutedsl
import liger_kernel.ops as ops
from liger_cutedsl.liger import scaled
from per_token import FLOAT32, error, in_float64, largest_error, reference

RANK, RANKS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
NAME = "LigerFusedLinearScaledCrossEntropyTPFunction"
TOKENS, HIDDEN, SHARE, TEMPERATURE, IGNORED = 61, 16, 40, 0.8, -100


def inputs():
    g = torch.Generator().manual_seed(5)
    x, w = torch.randn(TOKENS, HIDDEN, generator=g), torch.randn(SHARE * RANKS, HIDDEN, generator=g)
    target = torch.randint(0, SHARE * RANKS, (TOKENS,), generator=g)
    target[::7] = IGNORED
    return x, w, target


def check(call, group):
    x, w, target = inputs()
    own = slice(RANK * SHARE, (RANK + 1) * SHARE)
    x, share = x.requires_grad_(), w[own].clone().requires_grad_()
    nll, entropy = call(x, share, target, group, TEMPERATURE, IGNORED, 2, True)
    of_nll, of_entropy = torch.linspace(0.25, 1.0, TOKENS), torch.linspace(-0.2, 0.3, TOKENS)
    torch.autograd.backward((nll, entropy), (of_nll, of_entropy))
    (x64, w64), valid = in_float64(x, w), target != IGNORED
    want = reference(x64, w64, target.clamp(min=0), temperature=TEMPERATURE)
    nll64, entropy64 = -want.log_probs * valid, want.entropy * valid
    torch.autograd.backward((nll64, entropy64), (of_nll.double(), of_entropy.double()))
    assert nll.dtype == entropy.dtype == torch.float32 and nll.shape == entropy.shape == (TOKENS,)
    assert max(largest_error(nll, nll64), largest_error(entropy, entropy64)) <= FLOAT32 * 40
    assert error(x.grad, x64.grad) <= FLOAT32 * 40 and error(share.grad, w64.grad[own]) <= FLOAT32 * 40
    alone = call(x, share, target, group)
    assert isinstance(alone, torch.Tensor) and not alone[::7].any()


def main():
    store = dist.FileStore(os.path.join(FOLDER, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=120))
    liger_cutedsl.enable()
    assert getattr(ops, NAME) is getattr(functional, NAME) is getattr(scaled, NAME)
    for engine in ("", "torch"):  # Liger's own takes no CPU tensors
        os.environ["LIGER_CUTEDSL_ENGINE"] = engine
        check(getattr(ops, NAME).apply, None)
        check(functional.liger_fused_linear_scaled_cross_entropy_tp, dist.group.WORLD)
    print(f"rank {RANK} done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    os._exit(0)

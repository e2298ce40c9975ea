"""One rank of test_trl_fsdp.py: python test/trl_fsdp_worker.py RANK RANKS FOLDER   prints "rank R done" when all held

TRL's fused head on a small model under FSDP2 (gloo, CPU), by TRL's own kernel and by ours: the gradients of plain
PyTorch where the head lies in the root's group or in accelerate's tail group. Where it is a group of its own its
gradient is lost with either: TRL's head takes the weight's full_tensor(), which does not sum over the ranks.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import transformers
import trl.trainer.utils as utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import liger_cutedsl
from liger_cutedsl.liger import trl as ours
from per_token import error
from stacks import SMALL

RANK, RANKS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
VOCAB, BOUND = 128, 1e-5  # float32 sums in another order


def model():
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, pad_token_id=0, **SMALL))
    utils.add_fused_lm_head(made, temperature=0.7, outputs=("log_probs", "entropy"))
    return made


def batch(rank):
    ids = torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(rank))
    return dict(input_ids=ids, labels=ids.masked_fill(torch.arange(12) < 4, -100))


def loss_of(made, rank):
    out = made(**batch(rank), fused_lm_head=True)
    return -(out.log_probs.sum() + 0.1 * out.entropy.sum())


def in_the_root(made, **options):
    for layer in made.model.layers:
        fully_shard(layer, **options)
    return fully_shard(made, **options)


def in_the_tail(made, **options):
    """As accelerate does, for which the last norm and the head are one group that stays gathered after forward."""
    for layer in made.model.layers:
        fully_shard(layer, **options)
    fully_shard(made.model.embed_tokens, **options)
    fully_shard([made.model.norm, made.lm_head], reshard_after_forward=False, **options)
    return fully_shard(made, **options)


def alone(made, **options):
    fully_shard(made.lm_head, **options)
    return in_the_root(made, **options)


def gradients(shard, mesh):
    made = shard(model(), mesh=mesh)
    loss_of(made, RANK).backward()
    return {name: p.grad.full_tensor() for name, p in made.named_parameters()}


def check(head, mesh, expected):
    for shard in (in_the_root, in_the_tail):
        found = gradients(shard, mesh)
        for name, gradient in expected.items():
            assert error(found[name], gradient) <= BOUND, (head, shard.__name__, name)
    lost = gradients(alone, mesh)["lm_head.weight"]
    assert error(lost, expected["lm_head.weight"]) > 0.1, (
        f"{head}: the head alone is right now: say so in docs/recipes.md"
    )
    return lost


def main():
    store = dist.FileStore(os.path.join(FOLDER, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=120))
    plain = model()
    (sum(loss_of(plain, rank) for rank in range(RANKS)) / RANKS).backward()
    expected, mesh = {name: p.grad for name, p in plain.named_parameters()}, init_device_mesh("cpu", (RANKS,))
    theirs = check("TRL's", mesh, expected)
    os.environ["LIGER_CUTEDSL_ENGINE"] = "torch"
    liger_cutedsl.enable()
    assert utils._ChunkedLogProbFunction is ours.ChunkedLogProbFunction
    mine = check("ours", mesh, expected)
    assert error(mine, theirs) <= BOUND
    print(f"rank {RANK} done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    os._exit(0)

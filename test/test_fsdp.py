"""FSDP2: what the error about a sharded weight advises, against plain PyTorch, over two ranks (gloo, CPU)."""

from ranks import run_ranks


def test_the_advice_for_a_sharded_weight_is_right(tmp_path):
    run_ranks("fsdp_worker", tmp_path)

"""TRL's fused head under FSDP2, by TRL's kernel and by ours, over two ranks (gloo, CPU). See trl_fsdp_worker.py."""

import pytest

from ranks import run_ranks


@pytest.mark.slow
def test_gradients_are_right_where_trls_own_are(tmp_path):
    pytest.importorskip("trl.kernels", reason="TRL 1.15 or later is not installed")
    run_ranks("trl_fsdp_worker", tmp_path)

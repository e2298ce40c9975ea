"""What the tests of Liger-patched models share."""

import contextlib

SMALL = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
)
# Liger's other kernels need a GPU.
ONLY_THE_LOSS = dict(rope=False, rms_norm=False, swiglu=False, cross_entropy=False, fused_linear_cross_entropy=True)


@contextlib.contextmanager
def count_calls():
    """Counts calls of our operator while it is open, in the one element of a list."""
    import liger_cutedsl.entering as module

    original, calls = module.run, [0]

    def counted(*arguments):
        calls[0] += 1
        return original(*arguments)

    module.run = counted
    try:
        yield calls
    finally:
        module.run = original

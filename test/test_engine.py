"""Engines keep the contract that is written in one place."""

import inspect

import pytest
import torch

from liger_cutedsl.engines import Engine, KernelFailure, make_engine
from liger_cutedsl.engines.architectures import GemmTile
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.rows import TooManyIgnored


def engine_class(name):
    if name == "torch":
        return TorchEngine
    pytest.importorskip("quack", reason="quack is not installed")
    from liger_cutedsl.engines.cute_engine import CuteEngine

    return CuteEngine


def contract() -> dict:
    return {name: method for name, method in vars(Engine).items() if inspect.isfunction(method) and name[0] != "_"}


@pytest.mark.parametrize("name", ["torch", "cute"])
def test_an_engine_has_what_the_protocol_says(name):
    engine, methods = engine_class(name), contract()
    assert len(methods) == 24 and all(method.__doc__ for method in methods.values())
    assert engine.name == name
    for method, promised in methods.items():
        assert inspect.signature(getattr(engine, method)) == inspect.signature(promised), method
    public = {attribute for kind in engine.__mro__[:-1] for attribute in vars(kind) if attribute[0] != "_"}
    assert public == {*methods, "name", "wide_tile"}, "a schedule may ask an engine for nothing else"


@pytest.mark.parametrize("offset", [0, 3])
def test_one_row_has_the_stride_of_its_length(offset):
    """Kernels take strides in multiples of 16 bytes, and a single row may have been cut out of anything."""
    pytest.importorskip("quack", reason="quack is not installed")
    from liger_cutedsl.engines.cute_operands import tma_operand

    matrix = torch.randn(3, 19, dtype=torch.float32).bfloat16()[:, offset : offset + 16]
    for rows in (matrix[:1], matrix[:1].t().contiguous().t()):
        found = tma_operand(rows)
        assert found.stride() == (16, 1) and found.data_ptr() % 16 == 0 and torch.equal(found, rows)
    assert tma_operand(matrix[:1]).data_ptr() == matrix.data_ptr() or offset, "no copy where the address will do"


def test_liger_s_operator_is_no_engine_of_ours():
    assert isinstance(make_engine("torch"), TorchEngine)
    assert make_engine("triton") is None


def test_a_kernel_that_fails_in_a_call_that_began_early_asks_for_its_targets_first():
    """Ranks of a split vocabulary find ignored targets together; one that told of its kernel before would be alone."""
    cute_engine = pytest.importorskip("liger_cutedsl.engines.cute_engine", reason="quack is not installed")

    class Broken:
        def gemm(self, *_, **__):
            raise ValueError("planted")

    def ask():
        raise TooManyIgnored

    matrix = torch.zeros(8, 8, dtype=torch.bfloat16)
    launch = (Broken(), matrix, matrix, None, {}, GemmTile(128, 128))
    engine = cute_engine.CuteEngine(after_first_launch=ask)
    with pytest.raises(TooManyIgnored):
        engine._run(*launch)
    with pytest.raises(KernelFailure, match="planted"):  # asked once
        engine._run(*launch)

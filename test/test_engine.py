"""Engines keep the contract that is written in one place."""

import inspect

import pytest

from liger_cutedsl.engines import Engine, make_engine
from liger_cutedsl.engines.torch_engine import TorchEngine


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
    assert len(methods) == 12 and all(method.__doc__ for method in methods.values())
    assert engine.name == name
    for method, promised in methods.items():
        assert inspect.signature(getattr(engine, method)) == inspect.signature(promised), method
    public = {attribute for attribute in vars(engine) if attribute[0] != "_"}
    assert public == {*methods, "name"}, "a schedule may ask an engine for nothing else"


def test_liger_s_operator_is_no_engine_of_ours():
    assert isinstance(make_engine("torch"), TorchEngine)
    assert make_engine("triton") is None

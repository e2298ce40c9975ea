"""Private names of torch and Liger-Kernel: all in compat.py, and each one there in the versions that are installed."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch

from liger_cutedsl import compat, fused_linear_cross_entropy
from liger_cutedsl.call import is_dtensor


def resolved(name):
    """What a dotted name means. Raises ImportError for its module, AttributeError for what lies in it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # what the module itself imports
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def missing(names):
    """A sentence for each name that the installed versions do not have."""
    for name, use in names.items():
        package = name.split(".")[0]
        try:
            resolved(name)
        except (ImportError, AttributeError):
            yield f"{package} {versions(package)} has no {name} any more, on which depends: {use}"


def versions(package):
    from liger_cutedsl.versions import installed

    return installed(package.replace("_", "-"))


@pytest.mark.parametrize("package", ["torch", "liger_kernel", "trl"])
def test_private_names_are_there(package):
    needed = {"liger_kernel": "liger_kernel.backends", "trl": "trl.kernels"}
    if package in needed:
        pytest.importorskip(needed[package])
    names = {name: use for name, use in compat.PRIVATE.items() if name.startswith(f"{package}.")}
    assert len(names) >= 3 or package == "trl"
    assert not list(missing(names))


def test_a_private_name_that_went_away_is_named_with_what_depends_on_it():
    gone = {"torch._C._no_such_function": "one thing", "torch.utils.no_such_module.name": "another"}
    first, second = missing(gone | {"torch._C._current_graph_task_id": "a third"})
    assert "torch._C._no_such_function" in first and first.endswith("on which depends: one thing")
    assert torch.__version__.split("+")[0] in first and "no_such_module" in second


def test_every_private_name_is_listed():
    """Those that compat.py uses are those that it says it uses."""
    listed = {part for name in compat.PRIVATE for part in name.split(".") if part.startswith("_")}
    own = {node.name for node in ast.walk(tree()) if isinstance(node, ast.FunctionDef)}
    own |= {n.id for node in tree().body if isinstance(node, ast.Assign) for n in node.targets}
    used = set()
    for node in ast.walk(tree()):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            used.update(part for alias in node.names for part in alias.name.split("."))
            used.update((getattr(node, "module", None) or "").split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"_\w+", node.value):
            used.add(node.value)
    used = {name for name in used if re.match(r"_[A-Za-z]", name)} - own
    assert used == listed - {"_dynamo"}  # on the way to an attribute that is set without importing it
    assert {"_pop_mode", "_DISCOVERY_MAP", "_CachedTorchDispatchMode"} <= used, "this test sees all three kinds"


def tree():
    return ast.parse(Path(compat.__file__).read_text())


def test_a_class_that_is_only_called_dtensor_is_none():
    class DTensor(torch.Tensor):
        pass

    own = torch.randn(4, 8).as_subclass(DTensor)
    assert not is_dtensor(own)
    assert torch.isfinite(fused_linear_cross_entropy(own, torch.randn(9, 8), torch.arange(4)))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_a_dtensor_is_one_whatever_its_class_is_called():
    from torch.distributed.tensor import DTensor

    class Renamed(DTensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_subclass(cls, torch.zeros(3))

        def __init__(self):
            pass

    assert is_dtensor(Renamed())
    assert not is_dtensor(torch.zeros(3)) and not is_dtensor(None)

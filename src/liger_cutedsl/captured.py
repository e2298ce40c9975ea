"""Parameters that a function captures: where it is differentiated by others, their gradients would vanish."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator

import torch


def refuse_captured(function: Callable, result: torch.Tensor, known: tuple[torch.Tensor, ...]) -> None:
    """Raises ValueError, by name, for a leaf of result's graph that wants a gradient and is none of those known."""
    ours = {id(leaf) for leaf in known}
    for leaf in _leaves(result):
        if id(leaf) not in ours:
            raise ValueError(
                f"row_loss captures {name_in(function, leaf)}, which requires a gradient and would get none: pass it "
                f"as a row tensor (fused_linear_loss(x, weight, target, row_loss, …, it)), or detach() it"
            )


def _leaves(result: torch.Tensor) -> Iterator[torch.Tensor]:
    """What requires a gradient in the graph of a tensor, and has no history."""
    if result.grad_fn is None:
        yield result
        return
    ahead, seen = [result.grad_fn], {None, result.grad_fn}
    while ahead:
        node = ahead.pop()
        inputs = node.next_functions
        if not inputs and hasattr(node, "variable"):
            yield node.variable
        for following, _ in inputs:
            if following not in seen:
                seen.add(following)
                ahead.append(following)


def name_in(function: Callable, tensor: torch.Tensor) -> str:
    """What a function knows a tensor as, in words."""
    kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    held = [(name, value) for name, value in named(function) if isinstance(value, torch.Tensor)]
    for name, value in held:
        if value is tensor:
            return f"{name!r} {kind}"
    for name, value in held:
        if value.requires_grad and any(leaf is tensor for leaf in _leaves(value)):
            return f"{name!r}, a function of a parameter {kind}"
    return f"a tensor {kind}"


def named(function: Callable) -> Iterator[tuple[str, object]]:
    """What a function holds beside its arguments: (name, value), modules' parameters and what objects hold included."""
    seen, ahead = set(), [("", function)]
    while ahead:
        name, value = ahead.pop(0)
        if id(value) in seen or len(seen) > 1000:
            continue
        seen.add(id(value))
        if name:
            yield name, value
        ahead += [(f"{name}.{inner}" if name and inner else name or inner, v) for inner, v in _held(value)]


def _held(value) -> list[tuple[str, object]]:
    if isinstance(value, functools.partial):
        arguments = [(f"argument {i}", v) for i, v in enumerate(value.args)]
        return [("", value.func), *arguments, *value.keywords.items()]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("", value.__func__)]
    if isinstance(value, types.FunctionType):
        return _held_by_function(value)
    if isinstance(value, torch.nn.Module):
        return [*value.named_parameters(), *value.named_buffers(), ("", type(value).forward)]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", v) for i, v in enumerate(value)]
    if isinstance(value, dict):
        return [(f"[{key!r}]", v) for key, v in value.items()]
    if isinstance(value, (torch.Tensor, type, types.ModuleType, str, bytes, int, float)) or value is None:
        return []
    call = vars(type(value)).get("__call__")
    return [*getattr(value, "__dict__", {}).items(), *([("", call)] if isinstance(call, types.FunctionType) else [])]


def _held_by_function(function: types.FunctionType) -> list[tuple[str, object]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = [(name, contents(cell)) for name, cell in cells]
    held += [("a default", value) for value in function.__defaults__ or ()]
    held += list((function.__kwdefaults__ or {}).items())
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    return held + [(name, function.__globals__[name]) for name in names]


def contents(cell):
    """What a closure's cell holds; None for nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None

"""Tensors without data, fake and meta: what stands for tensors while a model is planned, traced or sharded.

A call of theirs goes through the custom op of torch_compile.py, whose fake knows the shapes of results and gradients;
explain() routes it. Neither launches anything, or makes what a call with data would use later.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from liger_cutedsl.call import TENSORS, Problem, planned_device
from liger_cutedsl.compat import FakeTensorMode, fake_mode, is_fake


def _has_no_data(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or is_fake(tensor)


def shapes_only(*tensors: torch.Tensor | None) -> bool:
    """Whether a call with these tensors, in the order of TENSORS, can only give shapes.

    Raises TypeError, by name, for a tensor with data among others without, or under a FakeTensorMode.
    """
    there = [(name, t) for name, t in zip(TENSORS, tensors, strict=True) if isinstance(t, torch.Tensor)]
    mode = fake_mode()
    if mode is None and not any(_has_no_data(t) for _, t in there):
        return False
    if len({t.device for _, t in there}) > 1:  # refused by check_tensors
        return False
    for name, tensor in there:
        if not _has_no_data(tensor) and not (mode and mode.allow_non_fake_inputs):
            raise TypeError(
                f"{name} is a tensor with data among fake ones, or under FakeTensorMode: pass "
                f"FakeTensorMode().from_tensor({name}), or call outside of it"
            )
    return True


def refuse_without_data(problem: Problem) -> None:
    """Raises TypeError where the call would have to read what is not there."""
    if shapes_only(*(getattr(problem, name) for name in TENSORS)):
        raise TypeError(
            "x, weight and target are fake or meta tensors, without data: fused_linear_cross_entropy, Liger-Kernel's "
            "class of it and explain() take these, and nothing else here does"
        )


def planned(problem: Problem) -> Problem:
    """A problem of meta tensors as one of fake tensors on the device they are planned for; any other as it is."""
    if not problem.x.is_meta:
        return problem
    device = planned_device(problem.device)
    with FakeTensorMode():
        fakes = {
            name: torch.empty(value.shape, dtype=value.dtype, device=device)
            for name in TENSORS
            if (value := getattr(problem, name)) is not None
        }
    return replace(problem, **fakes)

"""A schedule's state as autograd holds it: its tensors saved, so that hooks on saved tensors see them (activation
checkpointing frees them and has them computed again), the rest beside them."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace

import torch


@dataclass(frozen=True)
class _Saved:
    """Stands for the tensor at a position."""

    position: int


def taken_apart(state, tensors: list[torch.Tensor]):
    """The state without its tensors, in fields of dataclasses within dataclasses: they are appended to tensors."""
    if isinstance(state, torch.Tensor):
        tensors.append(state)
        return _Saved(len(tensors) - 1)
    if is_dataclass(state):
        return replace(state, **{f.name: taken_apart(getattr(state, f.name), tensors) for f in fields(state)})
    return state


def put_together(state, tensors):
    """The opposite, of a copy. The tensors may be written to: it is the state that knows whether they were, so they are
    taken without the counter by which autograd refuses saved tensors that were written."""
    if isinstance(state, _Saved):
        return tensors[state.position].data
    if is_dataclass(state):
        return replace(state, **{f.name: put_together(getattr(state, f.name), tensors) for f in fields(state)})
    return state

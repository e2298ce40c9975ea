"""What the custom ops share by which torch.compile holds a call as one node: arguments, results, definition.

Options go through as numbers and names, because a custom op takes no objects; environment variables count as they are
when the graph is traced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch

from liger_cutedsl.call import (
    DIFFERENTIABLE,
    OPTIONAL,
    TENSORS,
    Problem,
    WantedGradients,
    autocast_dtype,
    gradients_needed,
    planned_device,
)
from liger_cutedsl.options import LogitOptions
from liger_cutedsl.replaced import replacing
from liger_cutedsl.route import Settings, sampling

_TYPES = {"torch.dtype": "ScalarType"}  # of the schema, where it has another word than Python
TENSORS_SCHEMA = ", ".join(f"Tensor{'?' * (name in OPTIONAL)} {name}" for name in TENSORS)


def call_schema(options: type[LogitOptions]) -> str:
    """The arguments of an op behind its tensors."""
    annotations = [(field.name, *field.type.split(" | ")) for field in fields(options)]
    return ", ".join(
        [f"{_TYPES.get(kind, kind)}{'?' * bool(optional)} {name}" for name, kind, *optional in annotations]
        + [
            "str engine, str schedule, float? workspace_mb, int chunk_mem_const, float? gradient_sampling",
            "str replaces, ScalarType? autocast",
        ]
        + [f"bool needs_{name}" for name in DIFFERENTIABLE]
    )


def defaults_of(options: type[LogitOptions]) -> dict:
    """Option → default, in the order of call_schema."""
    return {field.name: field.default for field in fields(options)}


def call_values(
    options: dict, named: dict, engine, schedule, workspace_mb, multiple, replaces="", gradient_sampling=None
) -> list:
    """The values of call_schema's arguments. options: all of them, in its order. named: tensors by name."""
    return [
        *options.values(),
        (os.environ.get("LIGER_CUTEDSL_ENGINE") or "auto") if engine is None else engine,
        (os.environ.get("LIGER_CUTEDSL_SCHEDULE") or "auto") if schedule is None else schedule,
        workspace_mb,
        multiple,
        sampling(gradient_sampling),
        replaces,
        autocast_dtype(named["x"].device),
        *gradients_needed(*(named[name] for name in DIFFERENTIABLE)),
    ]


class Arguments(NamedTuple):
    """The arguments of an op, as everything else in this package knows them.

    replaces: words for the original that a drop-in takes the place of, or "".
    """

    problem: Problem
    settings: Settings
    needs: tuple[bool, ...]
    autocast: torch.dtype | None
    replaces: str

    @classmethod
    def of(cls, options: type[LogitOptions], *arguments) -> Arguments:
        tensors, rest, count = arguments[: len(TENSORS)], arguments[len(TENSORS) :], len(fields(options))
        engine, schedule, workspace_mb, chunk_mem_const, sampling, replaces, autocast, *needs = rest[count:]
        settings = Settings.resolve(engine, schedule, workspace_mb, chunk_mem_const, sampling)
        problem = Problem(**dict(zip(TENSORS, tensors, strict=True)), options=options(*rest[:count]))
        return cls(problem, settings, tuple(needs), autocast, replaces)

    def with_data(self) -> Arguments:
        """The same where tensors have data, and so sizes, in context(): with the workspace of a drop-in."""
        if not self.replaces:
            return self
        problem, settings = replacing(self.problem, self.settings, self.wanted, self.replaces)
        return self._replace(problem=problem, settings=settings)

    def context(self) -> contextlib.AbstractContextManager:
        """The autocast the graph was traced under."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(planned_device(self.problem.device).type, dtype=self.autocast)

    @property
    def wanted(self) -> WantedGradients:
        return WantedGradients.of(self.problem, self.needs)

    def gradients(self, wanted: WantedGradients) -> dict[str, tuple | None]:
        """(shape, dtype) of each gradient, None for one that is not wanted."""
        shapes = {name: tuple(value.shape) for name, value in self.problem.tensors().items()}
        return {n: d and (shapes[n], d) for n, d in zip(DIFFERENTIABLE, wanted, strict=True)}


def empty_results(like: torch.Tensor, described: dict) -> tuple[torch.Tensor, ...]:
    """An op returns tensors, contiguous ones: as described, and empty ones for what there is not."""
    return tuple(
        like.new_empty(0) if result is None else like.new_empty(result[0], dtype=result[1])
        for result in described.values()
    )


def as_described(like: torch.Tensor, described: dict, values) -> tuple[torch.Tensor, ...]:
    results = []
    for (name, result), value in zip(described.items(), values, strict=True):
        if result is not None and tuple(value.shape) != result[0]:
            raise RuntimeError(
                f"{name} has shape {tuple(value.shape)}, and {result[0]} was announced: a defect of ours"
            )
        results.append(like.new_empty(0) if result is None else value.to(result[1]).contiguous())
    return tuple(results)


# torch keeps compiled graphs on disk and finds them again by the names of their ops: of a version whose ops return
# other things, an upgraded package must not find any.
_SOURCES = ("torch_compile.py", "torch_compile_log_probs.py", "custom_ops.py", "call.py", "options.py")
_IDENTITY = hashlib.sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in _SOURCES)).hexdigest()[:12]


def define(name: str, schema: str, function, fake, backward, setup_context=None):
    """A custom op, as torch.ops has it."""
    name = f"{name}_{_IDENTITY}"
    op = torch.library.custom_op(f"liger_cutedsl::{name}", function, mutates_args=(), schema=schema)
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup_context)
    return getattr(torch.ops.liger_cutedsl, name)

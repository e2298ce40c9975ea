"""What the operators take that a drop-in takes the place of: its workspace where the user names none, in eager mode and
as a node of a graph, which knows an original by the words that name it there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.route import REPLACED, Settings
from liger_cutedsl.tiling import CAST_COLUMNS

_LEAST_MB = 16.0  # less than one of the blocks that torch's allocator takes of a GPU: of a call that small, nobody asks


@dataclass(frozen=True)
class Original:
    """An operator that ours takes the place of.

    bytes_of: (problem, wanted, numbers…) → what it takes in the same call, beside inputs, results and gradients.
    dense: it comes with targets that all count, which nobody looks at.
    """

    bytes_of: Callable[..., int]
    dense: bool = False


_originals: dict[str, Original] = {}


def register(name: str, original: Original) -> None:
    _originals[name] = original


def settings_within(problem: Problem, settings: Settings, original_bytes: int) -> Settings:
    """The user's settings; where they name no workspace, what the original takes in the same call is the budget, less
    what ours copies of its inputs, which is counted beside it."""
    if settings.workspace_mb is not None:
        return settings
    rest = original_bytes - problem.casts_bytes(problem.gemm_dtype, min(problem.vocab, CAST_COLUMNS))
    return replace(settings, workspace_mb=max(rest / 2**20, _LEAST_MB), source=REPLACED)


def replacing(problem: Problem, settings: Settings, wanted: WantedGradients, words: str) -> tuple[Problem, Settings]:
    """The problem and settings of a call in the place of an original. words: its name, and numbers of its own."""
    name, *numbers = words.split()
    original = _originals[name]
    size = original.bytes_of(problem, wanted, *map(int, numbers))
    return replace(problem, dense=original.dense), settings_within(problem, settings, size)

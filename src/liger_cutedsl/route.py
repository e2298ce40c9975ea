"""How a call is to run, as its user wants it (Settings), and how it does (Route)."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from liger_cutedsl.options import python_scalar
from liger_cutedsl.sampling import TILE

GRADIENT_SAMPLING = "LIGER_CUTEDSL_GRADIENT_SAMPLING"

ENGINES = ("cute", "triton", "torch")
SCHEDULES = ("recompute", "single_pass", "sampled")
# Holds chunks of 2048 tokens of a vocabulary of 128k, with the partial results of every option (541 MiB). Where a
# larger vocabulary needs more for such a chunk, that is the default.
DEFAULT_WORKSPACE_MB = 560.0
# Of the heads measured on an H200, each was within 3% of its best chunk at this width, and up to 8% off below it.
DEFAULT_CHUNK = 2048
# Of a split vocabulary, which has two chunks at a time: together they hold what one process's does.
DEFAULT_SPLIT_CHUNK = DEFAULT_CHUNK // 2

REPLACED = "what the operator takes that this one replaces"  # a source of Settings: no wish of the user's


@dataclass(frozen=True)
class Route:
    """How one call runs.

    engine: "cute" (CuTe DSL GEMMs), "triton" (Liger-Kernel's own operator) or "torch".
    schedule: "recompute", "single_pass" or "sampled"; "liger" is what the triton engine brings along.
    dtype: what x and weight are multiplied in.
    tile_width: columns of a vocabulary tile of recompute.  kept: columns whose exponentials it keeps until backward
        instead of recomputing them.  row_block: tokens of a block, of which it takes one after another; 0 for all at
        once. Only the first one's exponentials are kept.
    chunk: tokens of a chunk of single_pass or sampled, or of a forward alone that takes some at a time; 0 for all at
        once.
    buffers: how many chunks single_pass holds at a time.  chunk_limit: of a split vocabulary, the tokens of a chunk for
        which all its ranks have room.  dw_sum: what single_pass sums dW in, if it does.
    dw_low_bytes: what its sum takes for 8 bits more a number (two_part_sum.py), where it has them: beyond the budget,
        where that is the default.
    pairs: of a row and a tile, for which sampled has room at a time.  expected_pairs: how many a batch of this size has
        if it keeps the share that the head's last one kept; None where none was. Known to explain() alone.
    gemms: large matrix products, forward and backward, of 2·N·V·H operations each; the most that sampled takes.
    workspace_bytes: predicted memory beyond inputs, outputs and gradients; 0 where not known (triton).
    copied_bytes: what of it are copies that no schedule can do without: of x and weight in another dtype, of the rows
        that count.  budget: what the rest may take, and who said so.
    reason: why, in words.  fallback: whether a GPU call runs without the CuTe engine.
    """

    engine: str
    schedule: str
    dtype: torch.dtype
    reason: str
    tile_width: int = 0
    kept: int = 0
    row_block: int = 0
    chunk: int = 0
    buffers: int = 1
    chunk_limit: int = 0
    dw_sum: torch.dtype | None = None
    dw_low_bytes: int = 0
    pairs: int = 0
    expected_pairs: int | None = None
    gemms: float = 0
    workspace_bytes: int = 0
    copied_bytes: int = 0
    budget: str = ""
    fallback: bool = False

    def __str__(self) -> str:
        parts = [f"{self.engine} / {self.schedule}"]
        if self.schedule == "recompute":
            parts.append(f"tiles of {self.tile_width} columns")
            parts += [f"{self.kept} kept"] if self.kept else []
            parts += [f"blocks of {self.row_block} tokens"] if self.row_block else []
            parts += [f"{self.chunk} tokens at a time"] if self.chunk else []
        if self.schedule == "single_pass":
            parts.append(f"chunks of {self.chunk} tokens{', two at a time' if self.buffers == 2 else ''}")
            parts += [f"dW summed in {self._dw_sum_in_words()}"] if self.dw_sum else []
        if self.schedule == "sampled":
            parts += [f"chunks of {self.chunk} tokens", f"room for {self.pairs} pairs of a token and {TILE} columns"]
            parts += [] if self.expected_pairs is None else [f"{self.expected_pairs} expected as in the last call"]
        if self.workspace_bytes:
            parts += [f"{self.gemms:.3g} GEMMs", f"{self.workspace_bytes / 2**20:.0f} MiB workspace"]
            copied = self.copied_bytes / 2**20
            parts[-1] += f" ({copied:.0f} of it copies of inputs)" if copied >= 0.5 else ""
        parts += [f"budget {self.budget}"] if self.budget else []
        return f"{', '.join(parts)}: {self.reason}"

    def _dw_sum_in_words(self) -> str:
        name = str(self.dw_sum).removeprefix("torch.")
        return f"{name} and 8 bits ({self.dw_low_bytes / 2**20:.0f} MiB)" if self.dw_low_bytes else name

    def __repr__(self) -> str:
        """For a notebook: the sentence, and not a dozen fields of which half are 0."""
        return f"<Route {self}>"


@dataclass(frozen=True)
class Settings:
    """What the user asked for: an argument, else its environment variable, else the default.

    engine (LIGER_CUTEDSL_ENGINE): one of ENGINES, or "auto".
    schedule (LIGER_CUTEDSL_SCHEDULE): one of SCHEDULES, or "auto".
    gradient_sampling (LIGER_CUTEDSL_GRADIENT_SAMPLING): τ ≥ 0. Above 0 a loss's gradients are computed from a sample of
        the softmax, without bias (schedules/sampled.py); 0 for all of it.
    workspace_mb (LIGER_CUTEDSL_WORKSPACE_MB): MiB a call may use beyond inputs, outputs and gradients, and copies of
        its inputs (Route.copied_bytes). None for the larger of 560 and what a chunk of 2048 tokens takes.
    times: a multiplier of that.  source: who set workspace_mb, in words.
    """

    engine: str = "auto"
    schedule: str = "auto"
    workspace_mb: float | None = None
    times: int = 1
    source: str = "workspace_mb"
    gradient_sampling: float = 0.0

    @classmethod
    def resolve(
        cls, engine=None, schedule=None, workspace_mb=None, chunk_mem_const=1, gradient_sampling=None
    ) -> Settings:
        """chunk_mem_const: Liger-Kernel's multiplier of the workspace, a positive int."""
        if isinstance(chunk_mem_const, bool) or not isinstance(chunk_mem_const, int) or chunk_mem_const < 1:
            raise ValueError(f"chunk_mem_const must be a positive int, got {chunk_mem_const!r}")
        budget, source = _positive("workspace_mb", workspace_mb, "LIGER_CUTEDSL_WORKSPACE_MB")
        return cls(
            _choice("engine", engine, "LIGER_CUTEDSL_ENGINE", ENGINES),
            _choice("schedule", schedule, "LIGER_CUTEDSL_SCHEDULE", SCHEDULES),
            budget,
            chunk_mem_const,
            source,
            sampling(gradient_sampling),
        )

    @property
    def single_pass(self) -> bool:
        """Whether that schedule was asked for, which goes by chunks of tokens."""
        return self.schedule == "single_pass"

    def budget(self, chunk_bytes: int) -> int:
        """Bytes, where a chunk of DEFAULT_CHUNK tokens takes chunk_bytes."""
        if self.workspace_mb is None:
            return max(int(DEFAULT_WORKSPACE_MB * 2**20), chunk_bytes) * self.times
        return int(self.workspace_mb * self.times * 2**20)

    def budget_in_words(self, chunk_bytes: int) -> str:
        source = self.source
        if self.workspace_mb is None:
            larger = chunk_bytes > DEFAULT_WORKSPACE_MB * 2**20
            source = f"default: a chunk of {DEFAULT_CHUNK} tokens" if larger else "default"
        source += f", times {self.times}" if self.times != 1 else ""
        return f"{round(self.budget(chunk_bytes) / 2**20, 3):g} MiB ({source})"


def _choice(name: str, argument, variable: str, choices: tuple[str, ...]) -> str:
    value, source = (argument, name) if argument is not None else (os.environ.get(variable), variable)
    value = "auto" if value in (None, "") else value
    if value not in (*choices, "auto"):
        raise ValueError(f"{source} must be one of {', '.join(choices)} or auto, got {value!r}")
    return value


def sampling(argument) -> float:
    """τ: the argument, else the variable, else 0."""
    if argument is None:
        text = os.environ.get(GRADIENT_SAMPLING)
        if not text:
            return 0.0
        try:
            value, source = float(text), GRADIENT_SAMPLING
        except ValueError:
            raise ValueError(f"{GRADIENT_SAMPLING} must be a number of at least 0, got {text!r}") from None
    else:
        value, source = python_scalar(argument), "gradient_sampling"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"gradient_sampling must be a number of at least 0, got {argument!r}")
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{source} must be a finite number of at least 0, got {value!r}")
    return float(value)


def _positive(name: str, argument, variable: str) -> tuple[float | None, str]:
    """The number and where it comes from; None where neither is set."""
    value, source = (argument, name) if argument is not None else (os.environ.get(variable), variable)
    if value in (None, ""):
        return None, source
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{source} must be a positive number of MiB, got {value!r}")
    return number, source

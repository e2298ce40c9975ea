"""The upstream gradient that backward is likely to be given, for gradients that are computed in forward.

A sum divided by the number of items, as Hugging Face has it, would have all of dW read, scaled and rounded a second
time. So each call notes what it was given, and the next one computes its gradients for what two calls in succession
foretell: the same number again, or the same share of the number of rows that count. Where another comes, gradients are
scaled by the quotient, as those computed for 1 are by all of it.

What is expected never changes more than where a gradient is rounded: what comes of a wrong guess, as of none, is within
one unit in the last place of what a right one gives, which is rounded once. Under
torch.use_deterministic_algorithms(True) nothing is expected.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from liger_cutedsl.call import Problem, WantedGradients

MOST_HEADS = 64  # that are remembered
MOST_PROCESSES = 64  # by whose number a framework multiplies what it divides by that of all tokens
LARGEST_SHARE = 2.0**-6  # any larger number is rather a weight of the loss
# Beyond these, what is kept for a wrong guess could leave the range of 16 bits.
LEAST, GREATEST = 2.0**-24, 2.0**24


@dataclass
class _Note:
    """What one backward was given, of a call in which so many rows counted: a number, or page-locked memory that holds
    it as soon as ready, an event of the device, has come."""

    valid: int
    dtype: torch.dtype
    host: float | torch.Tensor
    ready: object | None = None

    def value(self) -> float | None:
        return float(self.host) if self.ready is None or self.ready.query() else None


@dataclass
class History:
    """The notes of a head's last two backwards, the later one last."""

    notes: list[_Note] = field(default_factory=list)
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note(self, valid: int | None, upstream: torch.Tensor) -> None:
        """upstream: (), of a call in which so many rows counted. Nothing is waited for."""
        if valid is None or (upstream.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        with self._one_at_a_time:  # the memory of a note is another one's after it
            # another list, since other threads may be reading this one
            self.notes = [*self.notes, self._noted(valid, upstream)][-2:]

    def _noted(self, valid: int, upstream: torch.Tensor) -> _Note:
        old = self.notes[0] if len(self.notes) == 2 else None
        if not upstream.is_cuda:
            return _Note(valid, upstream.dtype, float(upstream))
        fits = old is not None and old.dtype == upstream.dtype and old.ready is not None
        host = old.host if fits else torch.empty((), dtype=upstream.dtype, device="cpu", pin_memory=True)
        host.copy_(upstream.detach(), non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return _Note(valid, upstream.dtype, host, ready)

    def expected(self, problem: Problem) -> float:
        """1 where nothing is foretold."""
        valid, notes = problem.valid_rows(), self.notes
        if valid is None or len(notes) < 2:
            return 1.0
        (before, earlier), (last, later) = ((note, note.value()) for note in notes)
        if earlier is None or later is None:
            return 1.0
        for rule in (_share, _same):
            if rule(earlier, before, last.valid) == later:
                found = rule(later, last, valid)
                return found if LEAST <= abs(found) <= GREATEST else 1.0
        return 1.0


def _share(value: float, note: _Note, valid: int) -> float | None:
    """A small number of times the inverse of how many rows count, if that was the value; as the device rounds it."""
    times = round(value * note.valid) if abs(value) < LARGEST_SHARE else 0
    if not 1 <= times <= MOST_PROCESSES or _rounded(times / note.valid, note) != value:
        return None
    return _rounded(times / max(valid, 1), note)


def _same(value: float, note: _Note, valid: int) -> float:
    return value


def _rounded(value: float, note: _Note) -> float:
    return torch.tensor(value, dtype=note.dtype, device="cpu").item()


_histories: dict[tuple, History] = {}


def history_of(problem: Problem, wanted: WantedGradients) -> History | None:
    """The head's, that of all calls with as large a weight; None where nothing is to be expected of its backward: it is
    given a number for each row, or gradients wait in another dtype anyway."""
    if problem.options.reduction == "none" or not wanted or tuple(wanted.kept()) != tuple(wanted):
        return None
    if torch.are_deterministic_algorithms_enabled():
        return None
    key = (problem.device, problem.options.reduction, *problem.weight.shape)
    if key not in _histories and len(_histories) >= MOST_HEADS:
        _histories.clear()
    return _histories.setdefault(key, History())

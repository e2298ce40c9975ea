"""Whether a function is a loss of rows: what it gives for a row depends on that row alone, and is no draw of chance.

Asked once per function, on at most 64 rows with their own row tensors and made-up statistics: the same rows in slices
of odd sizes must give the same, a change in one row must change that row alone, values and derivatives.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import replace

import torch

from liger_cutedsl.call import Problem
from liger_cutedsl.captured import contents
from liger_cutedsl.row_function import OPTIONAL, STATISTICS, Evaluated, RowLoss, is_per_row

MOST_ROWS = 64
MOST_FUNCTIONS = 256  # that are remembered

# Vector units round the ends of a vector otherwise: in the dtype of the call a difference of near equals may be off by
# this much of its terms. In float64 too, because a function may ask for float32.
TOLERANCE, TOLERANCE_NARROW = 1e-5, 1e-3

_reads: dict[tuple, frozenset[str]] = {}  # what function → which of OPTIONAL it reads


def known_reads(loss: RowLoss) -> frozenset[str] | None:
    """Which of OPTIONAL a function reads that was asked before; else None."""
    return _reads.get(_key_of(loss))


def read_by(problem: Problem) -> frozenset[str]:
    """Which of OPTIONAL the row loss of a problem reads, which is asked now; all of them where it cannot be: while a
    CUDA graph is captured, and without a row that counts. Raises ValueError for what is no loss of rows."""
    if problem.x.is_cuda and torch.cuda.is_current_stream_capturing():
        return frozenset(OPTIONAL)
    counted = (~problem.ignored()).nonzero()[:MOST_ROWS, 0]
    if not len(counted):
        return frozenset(OPTIONAL)
    if len(_reads) >= MOST_FUNCTIONS:
        _reads.clear()
    loss = replace(problem.row_loss.of(counted), differentiated=problem.row_loss.watched)
    key = _key_of(problem.row_loss)
    _reads[key] = _checked(loss, _made_up(problem, len(counted)), problem.compute_dtype)
    return _reads[key]


def reads_also(loss: RowLoss, name: str) -> frozenset[str]:
    """The same, of a function that was asked before, and has now read this one too."""
    key = _key_of(loss)
    _reads[key] = _reads.get(key, frozenset()) | {name}
    return _reads[key]


def forget() -> None:
    _reads.clear()


def _checked(loss: RowLoss, values: dict[str, torch.Tensor], dtype: torch.dtype) -> frozenset[str]:
    """In float64, where hardly a difference is rounding; as it will be called, for a function that takes no float64."""
    wide = tuple(t.double() if is_per_row(t) and t.is_floating_point() else t for t in loss.tensors)
    try:
        return _Check(replace(loss, tensors=wide), values, TOLERANCE).reads()
    except RuntimeError:
        narrow = {name: v.to(dtype) if name in STATISTICS else v for name, v in values.items()}
        return _Check(loss, narrow, TOLERANCE_NARROW).reads()


class _Check:
    """Calls of a function on some rows, compared with each other."""

    def __init__(self, loss: RowLoss, values: dict[str, torch.Tensor], tolerance: float):
        self.loss, self.values, self.tolerance, self.read = loss, values, tolerance, set()

    def reads(self) -> frozenset[str]:
        """Which of OPTIONAL it reads. Raises ValueError where the calls do not agree."""
        count = len(self.values["lse"])
        every = slice(0, count)
        whole = self._at(every)
        self._compare(whole, self._at(every), "gives other numbers when it is called again: it draws at random")
        for rows in _odd_slices(count):
            self._compare(_rows_of(whole, rows), self._on_fewer(rows), "gives other numbers for fewer rows")
        if count > 1:
            others = slice(1, count)
            self.values = {name: torch.cat([v[:1] + (name != "argmax"), v[1:]]) for name, v in self.values.items()}
            changed = _rows_of(self._at(every), others)
            self._compare(_rows_of(whole, others), changed, "gives other numbers for a row when another row changes")
        return frozenset(self.read & set(OPTIONAL))

    def _at(self, rows: slice) -> Evaluated:
        return self.loss.of(rows).evaluated({name: v[rows] for name, v in self.values.items()}, None, self.read)

    def _on_fewer(self, rows: slice) -> Evaluated:
        try:
            return self._at(rows)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"row_loss fails for {rows.stop - rows.start} of the rows that it was computed for together ({error}): "
                f"a tensor that it captures and that has a value for each row must be a row tensor"
            ) from error

    def _compare(self, want: Evaluated, got: Evaluated, what: str) -> None:
        pairs = [("its loss", want.loss, got.loss)]
        pairs += [(f"∂loss/∂{name}", getattr(want, name), getattr(got, name)) for name in STATISTICS]
        pairs += [("aux", *both) for both in zip(want.aux, got.aux, strict=True)]
        gradients = [tuple(g for g in found.gradients if g.dim()) for found in (want, got)]
        pairs += [("a row tensor's gradient", *both) for both in zip(*gradients, strict=True)]
        for name, a, b in pairs:
            if not _same(a, b, self.tolerance):
                raise ValueError(
                    f"row_loss {what} ({name} differs). It must compute each row from that row's values alone: a loss "
                    f"that needs other rows (a sequence's ratio, a pair's difference, a batch's mean) takes "
                    f"fused_linear_log_probs and sums by itself; what is known beforehand is a row tensor"
                )


def _made_up(problem: Problem, count: int) -> dict[str, torch.Tensor]:
    """Statistics of rows in float64, the same in every call and on every rank."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(4, count, generator=generator, dtype=torch.float64, device="cpu").to(problem.device)
    values = dict(zip(STATISTICS, (-3.0 * draws[0] - 0.01, 10.0 + draws[1], 3.0 * draws[2], draws[3]), strict=True))
    return values | {"argmax": (draws[1] * problem.vocab).long()}


def _odd_slices(count: int) -> list[slice]:
    found, start = [], 0
    for size in (1, 7, 3, 17, count):
        if start < count > 1:
            found.append(slice(start, min(start + size, count)))
            start += size
    return found


def _rows_of(found: Evaluated, rows: slice) -> Evaluated:
    vectors = {name: v if (v := getattr(found, name)) is None else v[rows] for name in ("loss", *STATISTICS)}
    gradients = tuple(g[rows] for g in found.gradients if g.dim())
    return Evaluated(**vectors, aux=tuple(a[rows] for a in found.aux), gradients=gradients)


def _same(a: torch.Tensor | None, b: torch.Tensor | None, tolerance: float) -> bool:
    if a is None or b is None:
        there = a if b is None else b
        return there is None or not bool(there.any())
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    largest = torch.where(a.isfinite(), a.abs(), 0.0).max().clamp(max=1.0)
    return torch.allclose(a, b, rtol=tolerance, atol=float(0.1 * tolerance * largest), equal_nan=True)


def _key_of(loss: RowLoss) -> tuple:
    """The function, and the row tensors' dtypes and trailing dimensions."""
    tensors = tuple((t.shape[1:], t.dtype) if is_per_row(t) else None for t in loss.tensors)
    return _key(loss.function), tensors, loss.wanted, loss.watched


def _key(function: Callable) -> tuple:
    """What tells a function from another: its code, and what the code holds."""
    if isinstance(function, functools.partial):
        held = (*function.args, *function.keywords.values())
        return ("partial", _key(function.func), tuple(_described(v) for v in held))
    if isinstance(function, types.MethodType):
        return (_key(function.__func__), type(function.__self__))
    if isinstance(function, types.FunctionType):
        held = [contents(cell) for cell in function.__closure__ or ()]
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return (function.__code__, tuple(_described(v) for v in held))
    return (type(function),)


def _described(value):
    """Tensors by shape and dtype, functions by their code, switches by what they say; numbers may change freely."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, tuple):
        return tuple(_described(part) for part in value)
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return _key(value)
    return type(value)

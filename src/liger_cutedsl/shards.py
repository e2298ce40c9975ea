"""Where a rank's shard lies in a vocabulary split over ranks, as their sizes say that travel with the first call; and
what the ranks tell each other."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.epilogues import EpilogueFlags
from liger_cutedsl.options import python_scalar

_Said = tuple[int | None, int, int | None]


class OtherShards(Exception):
    """The ranks' sizes put the shards elsewhere than was guessed, or make chunks shorter than this rank would: begin
    again. Raised on every rank alike."""


class FailedSomewhere(KernelFailure):
    """In a first call, a kernel failed on some rank: all begin again, without it. Raised on every rank alike."""

    def __init__(self, ranks: list[int]):
        where = ", ".join(str(rank) for rank in ranks)
        super().__init__(f"a CuTe kernel could not be compiled or launched on rank {where}")


class ChangedAlone(ValueError):
    """What the ranks agreed on changed on this one, and others go on with what they know. chunk_limit: theirs."""

    def __init__(self, message: str, chunk_limit: int):
        super().__init__(message)
        self.chunk_limit = chunk_limit


# In place of a chunk_limit: this rank cannot run the schedule or the engine that it was asked for.
REFUSED = -1


@dataclass(frozen=True)
class VocabShard:
    """Rows [start, start + valid) of a vocabulary of `vocab` entries; rows of the shard beyond them are padding.

    said: the caller's vocab_start, the shard's rows, the caller's vocab_size; None for what the caller left out.
    kernels: what tells the kernels of a call from those of another; in their first call the ranks agree on an engine.
    kind: how they are put to use. Where it is not that of their last call, the ranks agree again on how many tokens a
        chunk has.
    reads: whether this call reads what the other ranks say on the host; until the first one that did, start and vocab
        may be a guess.
    chunk_limit: the tokens of a chunk that fit every rank's budget, as an earlier call of these kernels found; 0 for a
        schedule without chunks; None before.
    """

    group: dist.ProcessGroup | None
    start: int
    valid: int
    vocab: int
    said: _Said
    kernels: tuple = ()
    kind: tuple = ()
    reads: bool = True
    chunk_limit: int | None = None

    @classmethod
    def of(cls, problem, group, vocab_start: int | None, vocab_size: int | None, kind: tuple = ()) -> VocabShard:
        """Where an earlier call found this shard to lie; else as if all were equal, where the caller says nothing.

        kind: what decides beside the kernels how a call is computed, of one rank or of all.
        """
        group = dist.group.WORLD if group is None else group
        rows, device = problem.vocab, problem.device
        said = _checked("vocab_start", vocab_start, 0), rows, _checked("vocab_size", vocab_size, 1)
        kernels = (EpilogueFlags.of(problem), problem.gemm_dtype, problem.hidden)
        key = _key(group, said, device)
        if key in _known_shards:
            known = _known_shards[key]
            limit = known.chunk_limits.get((kernels, kind))
            reads = known.shard.reads or known.kinds.get(kernels) != kind or kernels not in known.headers
            return replace(known.shard, group=group, kernels=kernels, kind=kind, reads=reads, chunk_limit=limit)
        guess = _placed(said, rows * dist.get_rank(group), rows * dist.get_world_size(group))
        return replace(guess, group=group, kernels=kernels, kind=kind)

    def header(self, chunk_limit: int = 0, failed: bool = False) -> list[float]:
        """What the other ranks are told: start, rows, vocab, chunk_limit.

        In place of n, −1 − n: a start or vocab that is not the caller's word, the rows of a rank that reads headers.
        NaN in place of all of them where a kernel failed.
        """
        if failed:
            return [math.nan] * 4
        start, rows, vocab = self.said
        return [
            _signed(self.start, start is None),
            _signed(rows, self.reads),
            _signed(self.vocab, vocab is None),
            chunk_limit,
        ]

    def begin(
        self, numbers: torch.Tensor, total: torch.Tensor, chunk_limit: int = 0, failed=False, at_once=False
    ) -> Callable:
        """Begins the one all-gather that a call has, or its first. numbers (k, N) and total () of this rank.

        chunk_limit: as this rank has room, or as was agreed on; 0 for none; REFUSED.  failed: the numbers are none, a
        kernel failed here.  at_once: it will be waited for in the next line.

        Returns what waits for it and gives (agreed () bool, totals (ranks,), numbers of all ranks (ranks, k, N)); that
        raises as _agreed does.
        """
        header = _on_device(tuple(self.header(chunk_limit, failed)), numbers.dtype, numbers.device)
        packed = torch.cat([header, total.to(numbers.dtype)[None], numbers.flatten()])
        arrived = self.gather(packed, at_once)

        def finish():
            everyone = arrived()
            agreed = _agreed(self, everyone[:, : len(header)])
            totals, rest = everyone[:, len(header)], everyone[:, len(header) + 1 :]
            return agreed, totals, rest.unflatten(1, numbers.shape)

        return finish

    def gather(self, numbers: torch.Tensor, at_once: bool = False) -> Callable:
        """Begins an all-gather of a contiguous tensor; what is returned waits for it and gives (ranks, numbers)."""
        world = dist.get_world_size(self.group)
        everyone = numbers.new_empty(world * numbers.numel())
        work = dist.all_gather_into_tensor(everyone, numbers, group=self.group, async_op=not at_once)

        def arrived(sent=numbers):  # held until then
            if work is not None:
                work.wait()
            return everyone.view(world, -1)

        return arrived

    def agree_again(self, device: torch.device) -> None:
        """The next call of these kernels is as their first."""
        _known_shards[_key(self.group, self.said, device)].headers.pop(self.kernels)

    def sum_over_ranks(self, matrix: torch.Tensor):
        """Begins an all-reduce in place; wait() ends it."""
        return dist.all_reduce(matrix, group=self.group, async_op=True)


@functools.lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copied once: a copy to a GPU makes the host wait for it."""
    return torch.tensor(numbers, dtype=dtype, device=device)


@dataclass
class _Known:
    """shard: where one lies.  By the kernels of a call: kinds: that of the last agreement; headers: all ranks' in later
    calls, on the device.  chunk_limits: what they agreed on, by kernels and kind."""

    shard: VocabShard
    kinds: dict[tuple, tuple] = field(default_factory=dict)
    chunk_limits: dict[tuple, int] = field(default_factory=dict)
    headers: dict[tuple, torch.Tensor] = field(default_factory=dict)


# by what a rank says of its shard
_known_shards: dict[tuple, _Known] = {}


def _agreed(shard: VocabShard, headers: torch.Tensor) -> torch.Tensor:
    """Whether the ranks' headers (ranks, 4) are those that put this shard where it lies: a () bool tensor.

    They are read to the host in the first call of a shard and of a set of kernels, on a CPU in every one. Raises, on
    every rank, because all of them read the same: ValueError where they contradict each other, FailedSomewhere,
    OtherShards where a rank's guess was wrong. ChangedAlone where other ranks do not read.
    """
    key = _key(shard.group, shard.said, headers.device)
    if not shard.reads:
        return (headers == _known_shards[key].headers[shard.kernels]).all()
    told = [None if math.isnan(row[0]) else [int(n) for n in row] for row in headers.tolist()]
    there = [row for row in told if row is not None]
    said, going_on = [_unsigned(row) for row in there], [limit for _, rows, _, limit in there if rows >= 0]
    if going_on:
        raise ChangedAlone(
            f"weight_shard: the shards, the schedule or its workspace changed on some ranks only, or the shards of two "
            f"heads are equal on some ranks only, which vocab_size tells apart: {_got(said)}",
            max(going_on),
        )
    failed = [rank for rank, row in enumerate(told) if row is None]
    if failed:
        raise FailedSomewhere(failed)
    shards, limit = _shards_of(said), _chunk_limit_of([limit for *_, limit in told])
    later = [replace(other, reads=not headers.is_cuda) for other in shards]
    own = later[dist.get_rank(shard.group)]
    if key not in _known_shards or _known_shards[key].shard != own:
        _known_shards[key] = _Known(own)
    known = _known_shards[key]
    known.kinds[shard.kernels], known.chunk_limits[shard.kernels, shard.kind] = shard.kind, limit
    known.headers.pop(shard.kernels, None)
    if told != [other.header(limit) for other in shards]:
        raise OtherShards
    _on_device(tuple(own.header(limit)), headers.dtype, headers.device)  # a later call may be captured
    known.headers[shard.kernels] = headers.new_tensor([other.header(limit) for other in later])
    return headers.new_ones((), dtype=torch.bool)


def _chunk_limit_of(told: list[int]) -> int:
    """What all ranks take. Raises ValueError where some go by chunks and others do not."""
    refused = [str(rank) for rank, limit in enumerate(told) if limit == REFUSED]
    chunked = [str(rank) for rank, limit in enumerate(told) if limit]
    if refused:
        raise ValueError(
            f"schedule or engine: rank {', '.join(refused)} cannot run what it was asked for, as its own error says"
        )
    if 0 < len(chunked) < len(told):
        raise ValueError(
            f"schedule must be the same on all ranks of a split vocabulary (schedule=, or LIGER_CUTEDSL_SCHEDULE), got "
            f"'single_pass' on rank {', '.join(chunked)} and 'recompute' on the others"
        )
    return min(told)


def _got(said: list[_Said]) -> str:
    return f"got (vocab_start, rows, vocab_size) {said}, None where left out"


def _shards_of(said: list[_Said]) -> list[VocabShard]:
    """All ranks' shards: in rank order, without gaps."""
    got = _got(said)
    rows, sizes = [n for _, n, _ in said], {vocab for _, _, vocab in said if vocab is not None}
    if len(sizes) > 1 or max(sizes, default=1) > sum(rows):
        raise ValueError(
            f"weight_shard: vocab_size must be the same on all ranks, and at most the {sum(rows)} rows that their "
            f"shards hold: {got}"
        )
    starts = [sum(rows[:rank]) for rank in range(len(rows))]
    shards = [_placed(own, start, max(sizes, default=sum(rows))) for own, start in zip(said, starts, strict=True)]
    if any(shard.valid and shard.start != start for shard, start in zip(shards, starts, strict=True)):
        raise ValueError(
            f"weight_shard: the shards must cover the vocabulary in rank order without gaps; leave vocab_start out, or "
            f"pass the number of rows on the ranks before: {got}"
        )
    return shards


def _placed(said: _Said, start: int, vocab: int) -> VocabShard:
    """A shard with the start and the vocabulary given here where its caller named none."""
    start = start if said[0] is None else said[0]
    vocab = max(vocab, 1) if said[2] is None else said[2]
    return VocabShard(None, start, max(0, min(said[1], vocab - start)), vocab, said)


def _signed(number: int, negative: bool) -> int:
    return -1 - number if negative else number


def _unsigned(header: list[int]) -> _Said:
    """What the caller of a header's rank said."""
    start, rows, vocab, _ = header
    return None if start < 0 else start, _signed(rows, rows < 0), None if vocab < 0 else vocab


def _key(group, said: _Said, device: torch.device) -> tuple:
    return tuple(dist.get_process_group_ranks(group)), said, device


def _checked(name: str, value, least: int) -> int | None:
    value = python_scalar(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name} must be None or an int ≥ {least}, got {value!r}")
    return value

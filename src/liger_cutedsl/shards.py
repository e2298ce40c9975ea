"""Where a rank's shard lies in a vocabulary split over ranks, as their sizes say that travel with the first call; and
what the ranks tell each other."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from liger_cutedsl.engines import KernelFailure
from liger_cutedsl.epilogues import EpilogueFlags
from liger_cutedsl.options import python_scalar

_Said = tuple[int | None, int, int | None]


class OtherShards(Exception):
    """The ranks' sizes put the shards elsewhere than was guessed: begin again. Raised on every rank alike."""


@dataclass(frozen=True)
class VocabShard:
    """Rows [start, start + valid) of a vocabulary of `vocab` entries; rows of the shard beyond them are padding.

    said: the caller's vocab_start, the shard's rows, the caller's vocab_size; None for what the caller left out.
    kernels: what tells the kernels of a call from those of another; in their first call the ranks agree on an engine.
    reads: whether this call reads what the other ranks say on the host; until the first one that did, start and vocab
        may be a guess.
    """

    group: dist.ProcessGroup | None
    start: int
    valid: int
    vocab: int
    said: _Said
    kernels: tuple = ()
    reads: bool = True

    @classmethod
    def of(cls, problem, group, vocab_start: int | None, vocab_size: int | None) -> VocabShard:
        """Where an earlier call found this shard to lie; else as if all were equal, where the caller says nothing."""
        group = dist.group.WORLD if group is None else group
        rows, device = problem.vocab, problem.device
        said = _checked("vocab_start", vocab_start, 0), rows, _checked("vocab_size", vocab_size, 1)
        kernels = (EpilogueFlags.of(problem), problem.gemm_dtype, problem.hidden)
        key = _key(group, said, device)
        if key in _known_shards:
            known, agreed_kernels, _ = _known_shards[key]
            return replace(known, group=group, kernels=kernels, reads=known.reads or kernels not in agreed_kernels)
        guess = _placed(said, rows * dist.get_rank(group), rows * dist.get_world_size(group))
        return replace(guess, group=group, kernels=kernels)

    def header(self, failed: bool = False) -> list[float]:
        """What the other ranks are told: start, rows, vocab.

        In place of n, −1 − n: a start or vocab that is not the caller's word, the rows of a rank that reads headers.
        NaN in place of all of them where a kernel failed.
        """
        if failed:
            return [math.nan] * 3
        start, rows, vocab = self.said
        return [_signed(self.start, start is None), _signed(rows, self.reads), _signed(self.vocab, vocab is None)]

    def gathered(self, numbers: torch.Tensor, total: torch.Tensor, failed: bool = False):
        """One all-gather. numbers (k, n) and total () of this rank; failed: they are none, a kernel failed here.

        Returns (agreed () bool, totals (ranks,), numbers of all ranks (ranks, k, n)). Raises as _agreed does.
        """
        header = _on_device(tuple(self.header(failed)), numbers.dtype, numbers.device)
        packed = torch.cat([header, total.to(numbers.dtype)[None], numbers.flatten()])
        world = dist.get_world_size(self.group)
        everyone = packed.new_empty(world * packed.numel())
        dist.all_gather_into_tensor(everyone, packed, group=self.group)
        everyone = everyone.view(world, -1)
        agreed = _agreed(self, everyone[:, : len(header)])
        totals, rest = everyone[:, len(header)], everyone[:, len(header) + 1 :]
        return agreed, totals, rest.unflatten(1, numbers.shape)

    def sum_over_ranks(self, matrix: torch.Tensor):
        """Begins an all-reduce in place; wait() ends it."""
        return dist.all_reduce(matrix, group=self.group, async_op=True)


@functools.lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copied once: a copy to a GPU makes the host wait for it."""
    return torch.tensor(numbers, dtype=dtype, device=device)


# what a rank says of its shard → where it lies, the kernels that ran on all ranks, all ranks' headers in later calls
_known_shards: dict[tuple, tuple[VocabShard, set, torch.Tensor]] = {}


def _agreed(shard: VocabShard, headers: torch.Tensor) -> torch.Tensor:
    """Whether the ranks' headers (ranks, 3) are those that put this shard where it lies: a () bool tensor.

    They are read to the host in the first call of a shard and of a set of kernels, on a CPU in every one. Raises, on
    every rank, because all of them read the same: ValueError where they contradict each other, KernelFailure where a
    kernel failed, OtherShards where a rank's guess was wrong.
    """
    key = _key(shard.group, shard.said, headers.device)
    if not shard.reads:
        return (headers == _known_shards[key][2]).all()
    numbers = headers.tolist()
    failed = [str(rank) for rank, row in enumerate(numbers) if math.isnan(row[0])]
    if failed:
        raise KernelFailure(f"a CuTe kernel could not be compiled or launched on rank {', '.join(failed)}")
    told = [[int(n) for n in row] for row in numbers]
    shards = _shards_of([_unsigned(row) for row in told], all_read=all(rows < 0 for _, rows, _ in told))
    later = [replace(other, reads=not headers.is_cuda) for other in shards]
    own = later[dist.get_rank(shard.group)]
    kernels = _known_shards[key][1] if key in _known_shards and _known_shards[key][0] == own else set()
    _known_shards[key] = own, kernels, headers.new_tensor([other.header() for other in later])
    _on_device(tuple(own.header()), headers.dtype, headers.device)  # a later call may be captured
    if told != [other.header() for other in shards]:
        raise OtherShards
    kernels.add(shard.kernels)
    return headers.new_ones((), dtype=torch.bool)


def _shards_of(said: list[_Said], all_read: bool) -> list[VocabShard]:
    """All ranks' shards: in rank order, without gaps."""
    got = f"got (vocab_start, rows, vocab_size) {said}, None where left out"
    if not all_read:
        raise ValueError(
            f"weight_shard: the shards changed on some ranks only, or those of two heads are equal on some ranks only, "
            f"which vocab_size tells apart: {got}"
        )
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
    start, rows, vocab = header
    return None if start < 0 else start, _signed(rows, rows < 0), None if vocab < 0 else vocab


def _key(group, said: _Said, device: torch.device) -> tuple:
    return tuple(dist.get_process_group_ranks(group)), said, device


def _checked(name: str, value, least: int) -> int | None:
    value = python_scalar(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name} must be None or an int ≥ {least}, got {value!r}")
    return value

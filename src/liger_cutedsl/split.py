"""Where a rank's shard lies in a vocabulary split over ranks, as their sizes say that travel with the first call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from liger_cutedsl.options import python_scalar

_Said = tuple[int | None, int, int | None]


class OtherShards(Exception):
    """The ranks' sizes put the shards elsewhere than was guessed: begin again. Raised on every rank alike."""


@dataclass(frozen=True)
class VocabShard:
    """Rows [start, start + valid) of a vocabulary of `vocab` entries; rows of the shard beyond them are padding.

    said: the caller's vocab_start, the shard's rows, the caller's vocab_size; None for what the caller left out.
    reads: whether this call reads the other ranks' sizes on the host; until then start and vocab may be a guess.
    """

    group: dist.ProcessGroup | None
    start: int
    valid: int
    vocab: int
    said: _Said
    reads: bool = True

    @classmethod
    def of(cls, weight: torch.Tensor, group, vocab_start: int | None, vocab_size: int | None) -> VocabShard:
        """Where an earlier call found this shard to lie; else as if all were equal, where the caller says nothing."""
        group = dist.group.WORLD if group is None else group
        said = _checked("vocab_start", vocab_start, 0), weight.shape[0], _checked("vocab_size", vocab_size, 1)
        known = _known_shards.get(_key(group, said, weight.device))
        if known is not None:
            return replace(known[0], group=group)
        rows = said[1]
        return replace(_placed(said, rows * dist.get_rank(group), rows * dist.get_world_size(group)), group=group)

    def header(self) -> list[int]:
        """What the other ranks are told: start, rows, vocab.

        In place of n, −1 − n: a start or vocab that is not the caller's word, the rows of a rank that reads headers.
        """
        start, rows, vocab = self.said
        return [_signed(self.start, start is None), _signed(rows, self.reads), _signed(self.vocab, vocab is None)]


# what a rank says of its shard → where it lies, and the headers of all ranks in later calls
_known_shards: dict[tuple, tuple[VocabShard, torch.Tensor]] = {}


def agreed(shard: VocabShard, headers: torch.Tensor) -> torch.Tensor:
    """Whether the ranks' headers (ranks, 3) are those that put this shard where it lies: a () bool tensor.

    They are read to the host in the first call of a shard, on a CPU in every one. Raises ValueError where they
    contradict each other, OtherShards where a rank's guess was wrong: on every rank, because all of them read the same.
    """
    key = _key(shard.group, shard.said, headers.device)
    if not shard.reads:
        return (headers == _known_shards[key][1]).all()
    told = [[int(n) for n in row] for row in headers.tolist()]
    shards = _shards_of([_unsigned(row) for row in told], all_read=all(rows < 0 for _, rows, _ in told))
    later = [replace(other, reads=not headers.is_cuda) for other in shards]
    own = later[dist.get_rank(shard.group)]
    _known_shards[key] = own, headers.new_tensor([other.header() for other in later])
    if told != [other.header() for other in shards]:
        raise OtherShards
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

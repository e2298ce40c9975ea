"""What ranks tell each other in a call that goes by chunks of tokens: in one order on all of them, whatever fails.

Behind the first all-gather (shards.py), for each chunk c:

    gather   the statistics of chunk c + 1, if there is one
    confirm  in the first call of its kernels, behind the first chunk's last kernel: whether all ranks' kernels ran
    sum      dX of chunk c, where it is wanted, over the ranks

A rank on which something fails sits the rest out: it takes part in what is left with NaN, so that the others do not
wait for it, and find out.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable

import torch

from liger_cutedsl.call import Problem
from liger_cutedsl.row_statistics import RowStatistics
from liger_cutedsl.shards import FailedSomewhere, VocabShard
from liger_cutedsl.tiling import slices

# Numbers before dX's in what is summed: 0, or NaN once a rank failed, in a loss that had been combined by then. So many
# that dX begins at a multiple of 256 bytes.
FLAGS = 64


class Rounds:
    """The collectives of one call behind its first, each of them begun by the method of its name, in their order.

    problem: all rows, of any columns.  chunk: tokens of a chunk.  wants_dx: whether dX is summed.  confirms: whether
    this is the first call of its kernels.
    """

    def __init__(self, shard: VocabShard, problem: Problem, chunk: int, wants_dx: bool, confirms: bool):
        self._shard, self._problem = shard, problem
        self._left, self._flat, self._sum = deque(), None, None
        self._rows = [part.stop - part.start for part in slices(problem.tokens, chunk)]
        for c, (rows, following) in enumerate(itertools.zip_longest(self._rows, self._rows[1:])):
            if following is not None:
                self._left.append(("gather", following))
            if confirms and c == 0:
                self._left.append(("confirm", None))
            if wants_dx:
                self._left.append(("sum", rows))

    def gather(self, numbers: torch.Tensor) -> Callable:
        """Begins an all-gather of numbers (k, n) of the next chunk; what is returned waits for it and gives (ranks, k,
        n)."""
        self._left.popleft()
        arrived = self._shard.gather(numbers.contiguous().view(-1))
        return lambda: arrived().unflatten(1, numbers.shape)

    def confirm(self, failed: bool = False) -> None:
        """In the first call of a set of kernels, on every rank: raises FailedSomewhere where one failed on any."""
        if not self._left or self._left[0][0] != "confirm":
            return
        self._left.popleft()
        found = self._shard.gather(self._vector(1, math.nan if failed else 0.0), at_once=True)().isnan()[:, 0]
        ranks = [rank for rank, has in enumerate(found.tolist()) if has]
        if ranks:
            self._shard.agree_again(found.device)
            raise FailedSomewhere(ranks)

    def dx(self, rows: int) -> torch.Tensor:
        """(rows, H) in the compute dtype, for dX of the next chunk. Not before summed() has given the last one's."""
        if self._flat is None:
            self._flat = self._vector(FLAGS + self._rows[0] * self._problem.hidden)
            self._flat[:FLAGS].zero_()
        return self._flat[FLAGS : FLAGS + rows * self._problem.hidden].view(rows, -1)

    def sum(self, rows: int) -> None:
        """Begins the sum of dx(rows) over the ranks, in place."""
        self._left.popleft()
        self._sum = self._shard.sum_over_ranks(self._flat[: FLAGS + rows * self._problem.hidden])

    def summed(self) -> None:
        """Waits for the sum that was begun."""
        self._sum.wait()
        self._sum = None

    def flag(self) -> torch.Tensor | None:
        """(), behind the last sum: 0, or NaN where a rank failed on the way. None where nothing was summed."""
        return None if self._flat is None else self._flat[0]

    def sit_out(self) -> None:
        """What is left, with NaN. Raises FailedSomewhere as confirm() does on the others."""
        if self._sum is not None:
            self.summed()
        while self._left:
            turn, rows = self._left[0]
            if turn == "confirm":
                self.confirm(failed=True)
            elif turn == "gather":
                names = RowStatistics.names(self._problem)
                self.gather(self._vector(len(names) * rows, math.nan).view(-1, rows))()
            else:
                self.dx(rows)
                self._flat.fill_(math.nan)
                self.sum(rows)
                self.summed()

    def _vector(self, size: int, fill: float | None = None) -> torch.Tensor:
        vector = torch.empty(size, dtype=self._problem.compute_dtype, device=self._problem.device)
        return vector if fill is None else vector.fill_(fill)

"""A few columns of the vocabulary whose log-probabilities every row asks for: a product with K columns, not a pass.

Their dz comes on top of the softmax's (objective.py). A column that lies in another part of the vocabulary is −1.
"""

from __future__ import annotations

import torch

from liger_cutedsl.call import Gradients, Problem
from liger_cutedsl.epilogues import EpilogueFlags, biased, vocabulary_operands
from liger_cutedsl.gemm import matmul


def logits(engine, problem: Problem) -> torch.Tensor | None:
    """u (N, K) of problem.selected_token_ids, before the softcap; −∞ for a column that is not here."""
    if problem.selected_token_ids is None:
        return None
    ids, here = _places(problem)
    u = torch.empty(problem.tokens, len(ids), dtype=problem.compute_dtype, device=problem.device)
    if not len(ids) or not problem.vocab:
        return u.fill_(-torch.inf)
    flags = EpilogueFlags.of(problem)
    matmul(engine.gemm_operand(problem.x), _rows(engine, problem, ids).t(), out=u)
    u = biased(flags, u, vocabulary_operands(flags.uncapped_operands, problem, lambda vector: vector[ids]))
    return u.masked_fill(~here, -torch.inf)


def add_dx(engine, problem: Problem, dz: torch.Tensor, dx: torch.Tensor, alpha: float) -> None:
    """dx (N, H) += alpha · dz (N, K) · W[selected]."""
    ids, here = _places(problem)
    if len(ids):
        dz = torch.where(here, dz, 0.0).to(engine.dz_dtype(problem.x.dtype))
        matmul(dz, _rows(engine, problem, ids), out=dx, beta=1.0, alpha=alpha)


def add_dw(engine, problem: Problem, dz: torch.Tensor, gradients: Gradients, factor) -> None:
    """dW[selected] += factor · dzᵀ·x and db[selected] += factor · Σ_i dz, for dz (N, K) and a number or () tensor.

    A column may be selected more than once: each of its places writes the sum of all, in one rounding.
    """
    ids, here = _places(problem)
    if not len(ids) or not problem.vocab:
        return
    same = ((ids[:, None] == ids[None, :]) & here[None, :]).to(dz.dtype)  # (K, K)
    dz = dz @ same.t()
    if gradients.weight is not None:
        rows = torch.empty(len(ids), problem.hidden, dtype=dz.dtype, device=dz.device)
        narrow = dz.to(engine.dz_dtype(problem.x.dtype))
        matmul(narrow.t(), engine.gemm_operand(problem.x), out=rows)
        _add_rows(gradients.weight, ids, rows * factor)
    if gradients.bias is not None:
        _add_rows(gradients.bias, ids, dz.sum(dim=0) * factor)


def _rows(engine, problem: Problem, ids: torch.Tensor) -> torch.Tensor:
    """W[ids] as it is multiplied."""
    return engine.gemm_operand(problem.weight[ids].to(problem.x.dtype))


def _add_rows(matrix: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    matrix[ids] = (matrix[ids].to(rows.dtype) + rows).to(matrix.dtype)


def _places(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The selected columns as indices, and (K,) bool which of them are here; 0 stands for one that is not."""
    ids = problem.selected_token_ids
    here = (ids >= 0) & (ids < problem.vocab)
    return torch.where(here, ids, 0), here

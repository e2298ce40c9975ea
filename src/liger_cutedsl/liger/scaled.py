"""Liger-Kernel's scaled cross entropy on our operator: a loss for each token, entropy and chosen log-probabilities.

The classes of Liger's names and arguments, for one process and for a vocabulary over the ranks of a group. What they
take the place of decides by itself what it runs on: a CuTe kernel of its own on Hopper in bfloat16, chunks of plain
PyTorch elsewhere, cuTile where that was asked for.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import replace

import torch
import torch.distributed as dist

from liger_cutedsl.autograd import run
from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.entering import entered_log_probs
from liger_cutedsl.liger import drop_in
from liger_cutedsl.log_probs import LogProbs
from liger_cutedsl.options import LogProbOptions
from liger_cutedsl.replaced import Original, register, settings_within
from liger_cutedsl.route import Settings
from liger_cutedsl.routing import cute_obstacle
from liger_cutedsl.schedules.schedule import Task
from liger_cutedsl.split import over_ranks
from liger_cutedsl.without_data import shapes_only

HOME = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
NAME = "LigerFusedLinearScaledCrossEntropyFunction"
_CHUNK = 512  # tokens that Liger's plain PyTorch takes at a time
_WAVE, _WAVE_ROWS = 1024, 128  # tokens of dz that Liger's kernel for Hopper holds at a time, and their multiple
_HIDDEN_MULTIPLE, _VOCAB_MULTIPLE = 64, 8  # it copies what has another size
_CUTILE_BYTES = 256 * 2**20


class LigerFusedLinearScaledCrossEntropyFunction:
    """Liger-Kernel's class of this name: the same positional arguments, the same results.

    _input (N, H), weight (V, H), target (N,) in [0, V) or ignore_index. m_tiles_per_cluster means something to Liger's
    own kernels alone. Returns −log p of the targets at logits / temperature, (N,), and behind it, where asked for, the
    entropy (N,) and the log-probabilities of selected_token_ids (K,), (N, K): all float32, with gradients, 0 in ignored
    rows. A tuple, unless the first is all.
    """

    @classmethod
    def apply(
        cls,
        _input,
        weight,
        target,
        temperature=1.0,
        ignore_index=-100,
        m_tiles_per_cluster=1,
        return_entropy=False,
        selected_token_ids=None,
    ):
        _check_count("m_tiles_per_cluster", m_tiles_per_cluster)
        _check_flag("return_entropy", return_entropy)
        tensors = (_input, weight, target, selected_token_ids)
        options = dict(temperature=temperature, ignore_index=ignore_index, return_entropy=return_entropy)
        traced = torch.compiler.is_compiling() or shapes_only(_input, weight, target, None, None, selected_token_ids)
        found, reason = (_in_graph if traced else _run)(cls, tensors, options)
        if found is not None:
            return _results(found)
        if not torch.compiler.is_compiling():
            drop_in.note(cls.__name__, reason)
        selected = () if selected_token_ids is None else (selected_token_ids,)
        return drop_in.original_of(cls, HOME).apply(
            _input, weight, target, temperature, ignore_index, m_tiles_per_cluster, return_entropy, *selected
        )


class LigerFusedLinearScaledCrossEntropyTPFunction:
    """Liger-Kernel's class of this name: the same positional arguments, the same results.

    weight (V_rank, H), the rank's share of a vocabulary in equal shares, in the order of the ranks of tp_group; _input
    and target the same on every rank, targets indexing the whole vocabulary. tiles_per_reduce means something to
    Liger's own kernels alone. Returns −log p (N,), or (−log p, entropy), in float32; _input's gradient is summed over
    the ranks.
    """

    @classmethod
    def apply(
        cls,
        _input,
        weight,
        target,
        tp_group,
        temperature=1.0,
        ignore_index=-100,
        tiles_per_reduce=1,
        return_entropy=False,
    ):
        _check_count("tiles_per_reduce", tiles_per_reduce, (1, 2, 4))
        _check_flag("return_entropy", return_entropy)
        tensors, reason = (_input, weight, target), "torch.distributed is not initialized"
        options = dict(temperature=temperature, ignore_index=ignore_index, return_entropy=return_entropy)
        if dist.is_available() and dist.is_initialized():
            found, reason = _run_split(tensors, tp_group, options)
            if found is not None:
                return _results(found)
        drop_in.note(cls.__name__, reason)
        theirs = drop_in.original_of(cls, HOME)
        return theirs.apply(*tensors, tp_group, temperature, ignore_index, tiles_per_reduce, return_entropy)


def _results(found: LogProbs):
    """What Liger returns: no tuple of one."""
    values = [-found.log_probs, found.entropy, found.selected_log_probs]
    there = tuple(value.float() for value in values if value is not None)
    return there[0] if len(there) == 1 else there


def _run(cls, tensors, options: dict) -> tuple[LogProbs | None, str]:
    """The results, or None and why the original is to compute them."""
    x, weight, target, selected = tensors
    options, reason = _checked(options)
    if options is None:
        return None, reason
    problem = Problem(x, weight, target, options=options, selected_token_ids=selected)
    theirs = drop_in.original_of(cls, HOME)
    settings, route = settings_within(problem, Settings.resolve(), original_bytes(problem, theirs)), None
    if not refused(problem, theirs):
        route, reason = drop_in.decided(problem, settings)
    if reason is not None:
        return None, reason
    return run(problem, settings, None, contextlib.nullcontext, route), ""


def _run_split(tensors, tp_group, options: dict) -> tuple[LogProbs | None, str]:
    """The same over the ranks of a group. All of them decide alike: by what they share, and not by a kernel that failed
    on one of them."""
    options, reason = _checked(options)
    if options is None:
        return None, reason
    problem = Problem(*tensors, options=options)
    size = _bytes_in_chunks(problem, WantedGradients.of(problem), elements=3)
    settings = settings_within(problem, Settings.resolve(), size)
    task = Task(problem, WantedGradients.of(problem), replace(settings, engine="cute"))
    if settings.engine == "auto" and problem.x.is_cuda and not _differs_from_liger(problem):
        reason = cute_obstacle(task)
    if reason is not None:
        return None, reason
    return run(problem, settings, over_ranks(tp_group, None, None)), ""


def _in_graph(cls, tensors, options: dict) -> tuple[LogProbs | None, str]:
    """The same as one node of a graph, or with tensors without data."""
    x, weight, target, selected = tensors
    reason = drop_in.traced_obstacle(x, weight)
    if reason is not None:
        return None, reason
    return entered_log_probs((x, weight, target, None, None, selected), options, replaces=NAME), ""


def _checked(options: dict) -> tuple[LogProbOptions | None, str | None]:
    """Options as ours; None and why, where they are none: the original says so in its words."""
    try:
        return LogProbOptions(**options), None
    except (TypeError, ValueError) as error:
        if Settings.resolve().engine != "auto":
            raise
        return None, str(error)


def refused(problem: Problem, original) -> bool:
    """Whether the original raises an error for a call that ours can compute."""
    if _differs_from_liger(problem):
        return True
    if (
        problem.selected_token_ids is not None
        and "selected_token_ids" not in inspect.signature(original.apply).parameters
    ):
        return True  # liger-kernel 0.8.4
    return _is_frontend(original) and _on_hopper(problem.device) and problem.x.dtype != torch.bfloat16


def _differs_from_liger(problem: Problem) -> bool:
    return not problem.tokens or problem.target.dtype != torch.int64 or problem.x.dtype != problem.weight.dtype


def original_bytes(problem: Problem, original, wanted: WantedGradients | None = None) -> int:
    """What the original takes in the same call, beside its inputs, results and gradients."""
    wanted = WantedGradients.of(problem) if wanted is None else wanted
    if not _is_frontend(original):
        return min(problem.tokens * problem.vocab * problem.x.element_size(), _CUTILE_BYTES)
    return _bytes_on_hopper(problem, wanted) if _on_hopper(problem.device) else _bytes_in_chunks(problem, wanted, 6)


def _bytes_of_class(problem: Problem, wanted: WantedGradients) -> int:
    original = drop_in.original_of(LigerFusedLinearScaledCrossEntropyFunction, HOME)
    return original_bytes(problem, original, wanted)


register(NAME, Original(_bytes_of_class))


def _bytes_on_hopper(problem: Problem, wanted: WantedGradients) -> int:
    """A wave of dz, padded copies where a size is no multiple, and the gradient that nobody asked for: Liger's kernel
    computes both. A forward alone takes a few numbers a row; ours may take what backward would."""
    hidden, vocab = _rounded_up(problem.hidden, _HIDDEN_MULTIPLE), _rounded_up(problem.vocab, _VOCAB_MULTIPLE)
    elements = _rounded_up(min(problem.tokens, _WAVE), _WAVE_ROWS) * vocab
    x, weight = problem.tokens * hidden, vocab * hidden
    if hidden != problem.hidden:
        elements += x
    if hidden != problem.hidden or vocab != problem.vocab:
        elements += weight
    elements += x * (bool(wanted) and wanted.x is None) + weight * (bool(wanted) and wanted.weight is None)
    return 2 * elements


def _bytes_in_chunks(problem: Problem, wanted: WantedGradients, elements: int) -> int:
    """What chunks of plain PyTorch take: `elements` float32 numbers for each logit of a chunk at the widest point of
    backward; or, at its products, two of them, the gradient, and the chunk's share of dW before it is added."""
    logits, size = min(problem.tokens, _CHUNK) * problem.vocab, problem.weight.element_size()
    if not wanted:
        return 4 * 3 * logits
    return max(4 * elements * logits, (4 * 2 + size) * logits + size * problem.weight.numel())


def _is_frontend(original) -> bool:
    return original.__module__ == HOME


def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check_count(name: str, value, accepted: tuple[int, ...] | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1 or (accepted and value not in accepted):
        known = "at least 1" if accepted is None else f"one of {', '.join(map(str, accepted))}"
        raise ValueError(f"{name} must be {known}, got {value!r}")


def _check_flag(name: str, value) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")

"""TRL's fused LM head on our operator: ChunkedLogProbFunction, which its trainers call from version 1.15 on.

apply(hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs) → the five
results of TRL's class of this name, in its order. enable() puts ours in its place; TRL is imported by nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import weakref
from importlib.util import find_spec

import torch

from liger_cutedsl.autograd import run
from liger_cutedsl.call import Problem, WantedGradients, product_dtype
from liger_cutedsl.compat import trl_runs_on
from liger_cutedsl.entering import entered_log_probs
from liger_cutedsl.liger import drop_in
from liger_cutedsl.log_probs import LogProbs
from liger_cutedsl.options import LogProbOptions
from liger_cutedsl.replaced import Original, register, settings_within
from liger_cutedsl.route import Settings
from liger_cutedsl.user_warnings import warn_user
from liger_cutedsl.versions import installed
from liger_cutedsl.without_data import shapes_only

HOME = "trl.kernels.chunked_logprob"  # where TRL defines its class; what it holds there stays
NAME = "ChunkedLogProbFunction"
PARAMETERS = (
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
)
OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_TOKEN_CHUNK = 4096  # TRL's, where its module does not say
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_warned = False


class ChunkedLogProbFunction:
    """TRL's class of this name: the same positional arguments, the same five results.

    hidden (N, H), weight (V, H), bias (V,) or None, targets (N,) in [0, V), as TRL makes sure: nobody reads them to
    see. An id outside is no error, as in TRL's class, and no access out of bounds on any engine: it belongs to no
    column, and its row gets a log-probability of −∞, under a softcap that of the lowest logit there may be (on the CuTe
    engine, for an id less than a tile beyond V, or 2³² away, perhaps another number that means nothing) and the
    gradient of no target. weight and bias are cast to
    autocast's dtype where it is on, else to hidden's. chunk_size is TRL's tile of the vocabulary: it counts for the
    memory that a call may take. Returns (log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), each (N,):
    float32, the last bool; None for what outputs does not name. Gradients reach hidden, weight and bias through the
    first two.
    """

    @classmethod
    def apply(
        cls,
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk_size,
        final_logit_softcapping=None,
        logit_scale=1.0,
        outputs=OPTIONAL_OUTPUTS,
    ):
        options = dict(softcap=final_logit_softcapping, temperature=temperature, logit_scale=logit_scale)
        flags = {f"return_{name}": name in outputs for name in OPTIONAL_OUTPUTS}
        unknown = [name for name in outputs if name not in (*OPTIONAL_OUTPUTS, "log_probs")]
        tensors = (hidden, weight, bias, targets)
        if unknown:
            found, reason = None, f"an output that ours does not have: {', '.join(map(str, unknown))}"
        elif torch.compiler.is_compiling() or shapes_only(hidden, weight, targets, bias, None, None):
            found, reason = _in_graph(tensors, chunk_size, options | flags)
        else:
            found, reason = _run(tensors, chunk_size, options, flags)
        if found is None:
            arguments = (*tensors, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
            return _run_original(cls, reason, arguments)
        results = (found.log_probs, found.entropy, found.log_sum_sq_probs, found.mean_logits)
        return *(None if value is None else value.float() for value in results), found.is_top1


def _run_original(cls, reason: str, arguments):
    if not torch.compiler.is_compiling():
        drop_in.note(cls.__name__, reason)
    return drop_in.original_of(cls, HOME).apply(*arguments)


def _run(tensors, chunk_size, options: dict, flags: dict) -> tuple[LogProbs | None, str]:
    """The results, or None and why the original is to compute them."""
    hidden, weight, bias, targets = tensors
    try:
        options = LogProbOptions(**options, **flags)
    except (TypeError, ValueError) as error:
        if Settings.resolve().engine != "auto":
            raise
        return None, str(error)
    with _projecting_in(hidden, weight):
        problem = _problem(hidden, weight, bias, targets, options)
        settings = settings_within(problem, Settings.resolve(), original_bytes(problem, None, chunk_size))
        route, reason = drop_in.decided(problem, settings)
        if reason is not None and trl_runs_on(problem.device):
            return None, reason
        return run(problem, settings, None, _gathering(weight, bias), route), ""


def _problem(hidden, weight, bias, targets, options: LogProbOptions) -> Problem:
    """Targets come filtered: none is ignored, which a route may be planned for."""
    dtype = product_dtype(hidden)
    if product_dtype(weight) != dtype:  # a wider hidden state than autocast has a name for
        weight = weight.to(dtype)
    if bias is not None:
        bias = bias.to(dtype)
    return Problem(hidden, weight, targets, bias, options=options, dense=True)


def _projecting_in(hidden: torch.Tensor, weight: torch.Tensor):
    """Outside autocast TRL casts the weight to the hidden state's dtype: as if under an autocast of that dtype, so that
    no copy of the whole weight is made."""
    if hidden.dtype in _SIXTEEN_BIT and product_dtype(weight) != product_dtype(hidden):
        return torch.autocast(hidden.device.type, dtype=hidden.dtype)
    return contextlib.nullcontext()


def _in_graph(tensors, chunk_size, options: dict) -> tuple[LogProbs | None, str]:
    """The same as one node of a graph, or with tensors without data."""
    hidden, weight, bias, targets = tensors
    reason = "ZeRO-3, whose weight backward gathers again" if _zero3() else drop_in.traced_obstacle(hidden, weight)
    if reason is not None:
        return None, reason
    dtype = product_dtype(hidden)
    if product_dtype(weight) != dtype:
        weight = weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    tensors = (hidden, weight, targets, bias, None, None)
    return entered_log_probs(tensors, options, replaces=f"{NAME} {chunk_size}"), ""


def original_bytes(problem: Problem, wanted: WantedGradients | None, chunk_size: int) -> int:
    """What TRL's class takes in the same call, beside its inputs, results and gradients: a tile of logits, a cast chunk
    of weight and of hidden where they have another dtype, and float32 sums of gradients that have another."""
    dtype, rows = problem.gemm_dtype, min(problem.tokens, _token_chunk())
    casts = min(chunk_size, problem.vocab) * (problem.weight.dtype != dtype) + rows * (problem.x.dtype != dtype)
    wanted, sums = WantedGradients.of(problem) if wanted is None else wanted, 0
    for gradient, elements in zip(wanted, (problem.x.numel(), problem.weight.numel(), problem.vocab), strict=True):
        if gradient not in (None, torch.float32):
            sums += 4 * elements
    return (rows * chunk_size + casts * problem.hidden) * dtype.itemsize + sums


register(NAME, Original(original_bytes, dense=True))


def _token_chunk() -> int:
    return getattr(sys.modules.get(HOME), "TOKEN_CHUNK_SIZE", _TOKEN_CHUNK)


def _gathering(*parameters: torch.Tensor | None):
    """What backward enters before it reads a weight: TRL's own gathering of what ZeRO-3 has partitioned since.

    It holds nothing alive: backward has what was saved.
    """
    held = [weakref.ref(parameter) for parameter in parameters if parameter is not None]

    def gathered():
        utils = sys.modules.get("trl.trainer.utils")
        if utils is None and "deepspeed" in sys.modules:
            utils = importlib.import_module("trl.trainer.utils")
        there = [parameter for reference in held if (parameter := reference()) is not None]
        return contextlib.nullcontext() if utils is None else utils.maybe_gather_lm_head_ctx(*there)

    return gathered


def _zero3() -> bool:
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    return deepspeed is not None and deepspeed.is_deepspeed_zero3_enabled()


def find_original() -> type | None:
    """TRL's class, where TRL is installed and its class is the one we know; imports trl.kernels.

    None without TRL; None with a warning, given once, for a TRL whose class is another one.
    """
    if not _is_installed():
        return None
    try:
        module = importlib.import_module(HOME)
        importlib.import_module("trl.kernels")
        theirs = module.ChunkedLogProbFunction
        parameters = tuple(inspect.signature(theirs.forward).parameters)[1:]
        if parameters == PARAMETERS and module.OPTIONAL_OUTPUTS == OPTIONAL_OUTPUTS:
            return theirs
        _warn(f"takes {', '.join(parameters)} and has the optional outputs {', '.join(module.OPTIONAL_OUTPUTS)}")
    except ModuleNotFoundError as error:
        known = error.name in ("trl.kernels", HOME)
        _warn("is not there: it came with TRL 1.15" if known else f"does not import ({error})")
    except Exception as error:  # a broken installation fails in many ways
        _warn(f"does not import ({type(error).__name__}: {error})")
    return None


def _is_installed() -> bool:
    try:
        found = find_spec("trl")
    except ValueError:  # sys.modules says that there is none
        return False
    return found is not None and found.origin is not None  # a folder of that name is not TRL


def _warn(what: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warn_user(
            f"liger_cutedsl.enable() leaves TRL {installed('trl')} as it is: its {HOME}.ChunkedLogProbFunction {what}"
        )

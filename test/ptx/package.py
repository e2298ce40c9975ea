"""All that the interpreter's cases know of liger_cutedsl: one place to change when names there do. Importing it imports
quack and CuTe DSL, so ptx.launches.prepare() comes first."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace

import torch

import liger_cutedsl.engines.cute_engine as cute_engine
from liger_cutedsl import (
    ahead_of_time,
    fused_linear_cross_entropy,
    fused_linear_log_probs,
    fused_linear_loss,
    kernel_variants,
)
from liger_cutedsl.call import Problem
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.epilogues import EpilogueFlags, exp_headroom
from liger_cutedsl.objective import RowCoefficients
from liger_cutedsl.options import LogProbOptions, LossOptions
from liger_cutedsl.row_statistics import RowStatistics, over_parts
from liger_cutedsl.tiling import Tile
from liger_cutedsl.two_part_sum import TwoPartSum

TEMPERATURE, LOGIT_SCALE = 0.8, -1.25
KERNELS = ("forward", "exp", "backward")  # of passes over logits
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
headroom, find_nvdisasm = exp_headroom, ahead_of_time.find_nvdisasm


Flags = EpilogueFlags  # which parts of the epilogue a kernel has


def variants(typical: bool = False) -> list[tuple[str, str, str, Flags, bool]]:
    """(name, kernel, dtype, flags, ragged) of all kernels that `python -m liger_cutedsl compile` makes, or of those of
    its --typical."""
    listed = kernel_variants.typical_variants() if typical else kernel_variants.all_variants()
    return [(v.name, v.kernel, v.dtype, v.flags, v.ragged) for v in listed if v.kernel in KERNELS]


def make_problem(x, weight, target, bias, ce_weight, flags: Flags, softcap: float, smoothing: float) -> Problem:
    """A problem with these flags: with moments one of log-probabilities, which have neither class weights nor
    smoothing, and a mean logit instead. flags.scale: a temperature and a negative logit scale."""
    logits = {"softcap": softcap if flags.softcap else None}
    logits |= {"temperature": TEMPERATURE, "logit_scale": LOGIT_SCALE} if flags.scale else {}
    if flags.moments:
        options = LogProbOptions(
            **logits,
            return_entropy=flags.entropy,
            return_log_sum_sq_probs=flags.sum_sq,
            return_mean_logits=flags.smoothing,
            return_is_top1=flags.argmax,
        )
    else:
        smoothing = smoothing if flags.smoothing else 0.0
        options = LossOptions(**logits, label_smoothing=smoothing, return_predicted_tokens=flags.argmax)
    return Problem(x, weight, target, bias, ce_weight, options=options)


def tile_columns(kernel: str, problem: Problem) -> int:
    """Of the kernel's tile on the architecture at hand."""
    kind = cute_engine.exp_kind(problem.options) if kernel == "exp" else kernel
    return cute_engine.tile_of(kind, torch.empty(1)).tile_n


@contextmanager
def exact_folds():
    """Partial results folded by torch in float64 instead of by Triton kernels: these cases are about the GEMMs."""
    before = cute_engine.fold_lse, cute_engine.fold_exp, cute_engine.fold_moments
    cute_engine.fold_lse = lambda lse: lse.double().logsumexp(1)
    cute_engine.fold_exp = lambda maxima, sums, scale: (
        maxima.double() + sums.double().log() - scale * math.log(2)
    ).logsumexp(1)
    cute_engine.fold_moments = _exact_moments
    try:
        yield
    finally:
        cute_engine.fold_lse, cute_engine.fold_exp, cute_engine.fold_moments = before


def _exact_moments(moments: dict, headroom: int) -> dict:
    powers = {"maximum": 0, "sum_exp_sq": 2 * headroom}
    parts = {name: part.t().double() * 2.0 ** -powers.get(name, headroom) for name, part in moments.items()}
    folded = over_parts(RowStatistics(**parts)).there()
    return folded | {"lse": folded["maximum"] + folded["sum_exp"].log()}


def run_forward(problem: Problem):
    """Row statistics: lse, target_logit, weighted_sum, argmax."""
    return cute_engine.CuteEngine().row_statistics(problem, problem.vocab)


def run_exp(problem: Problem, out: torch.Tensor):
    """Exponentials into out; (row statistics, maxima of the tiles)."""
    return cute_engine.CuteEngine().exp_chunk(problem, out)[:2]


def coefficients(a: torch.Tensor, c: torch.Tensor | None, h: torch.Tensor | None = None) -> RowCoefficients:
    return RowCoefficients(a, c, torch.zeros_like(a), h)


def run_backward(problem: Problem, lse: torch.Tensor, rows: RowCoefficients, out: torch.Tensor) -> None:
    cute_engine.CuteEngine().dz_tile(problem, lse, rows, Tile(0, problem.vocab), out)


def sum_of_zero(rows: int, columns: int) -> TwoPartSum:
    return TwoPartSum.zero(torch.empty(rows, columns, dtype=torch.bfloat16))


def run_sum(
    dz: torch.Tensor, x: torch.Tensor, total: TwoPartSum, alpha: float, beta: float, torch_engine=False
) -> None:
    """total = alpha · dzᵀ·x + beta · total."""
    engine = TorchEngine() if torch_engine else cute_engine.CuteEngine()
    engine.add_product(dz, x, total, alpha, beta)


def on_torch_engine(kernel: str, problem: Problem, out: torch.Tensor, lse=None, rows=None):
    """The same call on the torch engine, in tiles of the same width. out: float32."""
    engine = TorchEngine()
    width = tile_columns(kernel, problem)
    engine.exp_tile = lambda _: width
    if kernel == "forward":
        return engine.row_statistics(problem, width), None
    if kernel == "exp":
        return engine.exp_chunk(problem, out)[:2]
    return engine.dz_tile(problem, lse, rows, Tile(0, problem.vocab), out), None


def replace_gpu(matmul, multiprocessors: int) -> None:
    """For whole_operator.py: the package's plain products, page-locked memory and questions about the GPU."""
    from liger_cutedsl import gemm, routing, rows
    from liger_cutedsl.schedules import forward_gradients, gradient_sink, selected

    slots = torch.zeros(rows.SLOTS, rows.PARTS, 4, dtype=torch.int64).unbind()
    rows._pinned_slots = lambda: slots
    routing.cute_obstacle = lambda *_: None
    cute_engine.multiprocessors = lambda _: multiprocessors
    gemm.matmul = gradient_sink.matmul = forward_gradients.matmul = selected.matmul = matmul


def _log_probs(*tensors):
    found = fused_linear_log_probs(*tensors, return_entropy=True, engine="cute")
    return (found.log_probs + found.entropy).sum()


def _own(*tensors):
    return fused_linear_loss(*tensors, lambda values: -values.log_prob - values.entropy, engine="cute")


# name → a call of (x, weight, target) that returns what is differentiated
OPERATORS = {
    "fused_linear_cross_entropy": lambda *tensors: fused_linear_cross_entropy(*tensors, engine="cute"),
    "fused_linear_log_probs, with entropy": _log_probs,
    "fused_linear_loss, with entropy": _own,
}


def leave_out_kernels() -> None:
    """For host_time.py: GEMMs are prepared and not launched, plain products and Triton passes give what is there."""
    from liger_cutedsl import triton_kernels
    from liger_cutedsl.schedules import kept

    replace_gpu(lambda a, b, *, out, beta=0.0, alpha=1.0: out, 132)
    empty = torch.empty
    torch.empty = lambda *sizes, pin_memory=False, **more: empty(*sizes, **more)

    def prepare(engine, kernel, x, weight, out, arguments, tile):
        x, weight = cute_engine.tma_operand(x), cute_engine.tma_operand(weight)
        kernel.gemm(x, weight, out, epi_args=arguments, _launch=False, **tile.arguments())
        engine._then()

    def summarize(target, ignored, x, largest, out):
        out.zero_()[0].copy_(torch.tensor([len(target), 0, 1, 0]))

    def fold(moments, headroom):
        return {name: part[:, 0] for name, part in {**moments, "lse": moments["maximum"]}.items()}

    cute_engine.CuteEngine._run = prepare
    cute_engine.dz_of_exp = lambda *_: None
    cute_engine.fold_exp = lambda maxima, *_: maxima[:, 0]
    cute_engine.fold_lse = lambda lse: lse[:, 0]
    cute_engine.fold_plain = lambda *_: None
    cute_engine.fold_moments = fold
    triton_kernels.summarize_targets, kept.scale_in_place = summarize, lambda *_: None


@contextmanager
def captured():
    """Yields a dict that fills with the outputs of each launch, as the kernels write them: name → tensor."""
    written: dict[str, torch.Tensor] = {}
    run = cute_engine.CuteEngine._run

    def recording(engine, kernel, x, weight, out, arguments, tile):
        run(engine, kernel, x, weight, out, arguments, tile)
        names = ("lse", "moments", "target_logit", "weighted_sum", "argmax", "sum_exp", "sum_exp_z", "sum_exp_sq")
        names += ("tile_max_out", "is_max")
        outputs = {name: arguments[name] for name in names if name in arguments and kernel_writes(name, arguments)}
        outputs |= {} if out is None else {"D": out}
        for name, value in outputs.items():
            if name == "argmax":
                written["largest"], written["column"] = cute_engine.OnlineArgmax.decoded(value)
            else:
                written[name] = value

    cute_engine.CuteEngine._run = recording
    try:
        yield written
    finally:
        cute_engine.CuteEngine._run = run


def kernel_writes(name: str, arguments: dict) -> bool:
    """lse is what forward writes and what backward reads."""
    return name != "lse" or "row_a" not in arguments


def on_device(problem: Problem, device: str) -> Problem:
    tensors = {
        name: value.to(device)
        for name in ("x", "weight", "target", "bias", "ce_weight")
        if (value := getattr(problem, name)) is not None
    }
    return replace(problem, **tensors)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("quack-kernels", "nvidia-cutlass-dsl")}

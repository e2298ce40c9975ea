"""The kernels there are, one Variant each: what `python -m liger_cutedsl compile` makes and the interpreter runs."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace

import torch

from liger_cutedsl.epilogues import EpilogueFlags
from liger_cutedsl.options import LogitOptions, LogProbOptions, LossOptions

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Variant:
    """One kernel: forward, backward, exp or dw-sum, its options, dtype, and whether the last tile is full."""

    kernel: str
    flags: EpilogueFlags
    dtype: str = "bf16"
    ragged: bool = False

    @property
    def options(self) -> str:
        names = [name for name, on in asdict(self.flags).items() if on] + ["ragged"] * self.ragged
        return "+".join(names) or "plain"

    @property
    def name(self) -> str:
        return f"{self.kernel}/{self.dtype}/{self.options}"


DW_SUM = Variant("dw-sum", EpilogueFlags())


def all_variants() -> list[Variant]:
    """Every kernel that a call of any operator can ask for."""
    variants = [DW_SUM]
    for bias, softcap, scale, dtype in itertools.product(*[(False, True)] * 3, DTYPES):
        logits = {"bias": bias, "softcap": softcap, "scale": scale}
        variants += [Variant("backward", replace(flags, **logits), dtype) for flags in _of_gradients()]
        for statistics, ragged in itertools.product(_of_statistics(), (False, True)):
            flags = replace(statistics, **logits)
            variants.append(Variant("forward", flags, dtype, ragged))
            if not (softcap and (flags.smoothing or flags.entropy)):  # such a call stores no exponentials
                variants.append(Variant("exp", flags, dtype, ragged))
    return variants


def _of_statistics() -> list[EpilogueFlags]:
    """What a call may want to know of its logits: a loss, log-probabilities, a row loss."""
    either = (False, True)
    losses = [EpilogueFlags(smoothing=True, ce_weight=True, argmax=argmax) for argmax in either]
    names = ("smoothing", "argmax", "entropy", "sum_sq")  # without the last, a row loss's
    chosen = (dict(zip(names, values, strict=True)) for values in itertools.product(*[either] * len(names)))
    return losses + [EpilogueFlags(**flags) for flags in chosen]


def _of_gradients() -> list[EpilogueFlags]:
    """What dz may have terms of: label smoothing or a mean logit, class weights with the former, an entropy."""
    plain = [EpilogueFlags(smoothing=mean, entropy=entropy) for mean in (False, True) for entropy in (False, True)]
    return [*plain, EpilogueFlags(smoothing=True, ce_weight=True)]


def typical_variants() -> list[Variant]:
    """A representative few: no option, what common models use, everything at once."""
    everything = EpilogueFlags(bias=True, softcap=True, ce_weight=True, smoothing=True)
    all_but_softcap = replace(everything, softcap=False, argmax=True)
    common = (EpilogueFlags(), EpilogueFlags(softcap=True), everything)
    variants = [DW_SUM, *(Variant("backward", flags) for flags in common)]
    variants += [Variant("forward", common[0]), Variant("forward", common[0], ragged=True)]
    variants += [Variant("exp", common[0]), Variant("exp", all_but_softcap, ragged=True)]
    variants += [Variant("exp", common[1], "fp16")]
    variants += [Variant("forward", replace(everything, argmax=True), dtype, ragged=True) for dtype in DTYPES]
    variants += [Variant("forward", replace(everything, argmax=True))]
    entropy = EpilogueFlags(entropy=True)
    per_token = EpilogueFlags(bias=True, scale=True, smoothing=True, argmax=True, entropy=True, sum_sq=True)
    variants += [Variant("forward", entropy), Variant("exp", per_token, "fp16", ragged=True)]
    variants += [Variant("forward", replace(per_token, softcap=True), ragged=True), Variant("backward", entropy)]
    variants += [Variant("backward", EpilogueFlags(bias=True, softcap=True, scale=True, entropy=True))]
    row_loss = EpilogueFlags(smoothing=True, argmax=True, entropy=True)
    variants += [Variant("forward", row_loss, ragged=True), Variant("exp", row_loss, ragged=True)]
    variants += [Variant("backward", replace(row_loss, argmax=False))]
    return variants


def options_of(flags: EpilogueFlags) -> LogitOptions:
    """Those of a call that has these flags."""
    logits = {"softcap": 1.0 if flags.softcap else None, "temperature": 2.0 if flags.scale else 1.0}
    if not flags.moments:
        smoothing = 0.1 if flags.smoothing else 0.0
        return LossOptions(**logits, label_smoothing=smoothing, return_predicted_tokens=flags.argmax)
    return LogProbOptions(
        **logits,
        return_entropy=flags.entropy,
        return_log_sum_sq_probs=flags.sum_sq,
        return_mean_logits=flags.smoothing,
        return_is_top1=flags.argmax,
    )

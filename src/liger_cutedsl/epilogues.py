"""The loss per element: what happens to one accumulator x_i·W_v of a GEMM before it leaves the registers.

Each epilogue is one plain function. The torch engine calls it with tensors, on any device; the CuTe engine
hands the same function to quack's ``gemm_epilogue``, which traces it with Float32 scalars (Hopper) or packed
pairs (Blackwell). So what CPU tests check is what the GPU kernels compile. Formulas: objective.py.

An epilogue takes ``acc`` and the operands its ``EpilogueFlags`` name, and returns its outputs by name:

    forward    lse: z_iv                           (the receiving reduction does log-sum-exp), or
               moments: z_iv                       (it sums e^(z−m), e^(z−m)·(z−m) and e^(2(z−m)), and finds m)
               target_logit: u_iv                  (before the cap, which loses where it saturates; v = t_i is selected)
               weighted_sum: z_iv·w_v              (as a pair of factors with class weights; summed over v)
               argmax: z_iv                        (largest z and its first v)
    backward   D: dz_iv at v ≠ t_i                 (the caller writes RowCoefficients.fix over v = t_i)

    exp        D: e_iv·z'_iv                       (e_iv = exp(z_iv − m)·2^headroom, m the row's maximum in the GEMM's
                                                   own vocabulary tile; z' = dz/du, the cap's slope)
               sum_exp: e_iv; sum_exp_z: e_iv·(z_iv − m); sum_exp_sq: e_iv²     (summed over the tile)
               is_max: z_iv − m                    (the first v where it is 0); argmax instead with a scale, which a
                                                   compiler may fuse with the sum on one side alone: no z_iv is m then
               target_logit, weighted_sum          (as above)
    dz_of_exp  dz_iv from D and m: what the pass between the GEMMs computes, in triton_kernels.py on a GPU

The slope is stored with the exponential, and not recovered from it afterwards: 16 bits of e hold z to 2⁻⁹, and where
the cap saturates the slope changes by more than itself within that. Under label smoothing, and for an entropy's
gradient, dz needs the slope apart from e: such calls store no exponentials.

Operands: rows over the vocabulary ``bias``, ``ce_weight``; columns over tokens ``lse``, ``row_a``, ``row_c``,
``row_h``, ``tile_max`` (of u); scalars ``scale``, ``softcap`` and ``inverse_softcap``.

Temperature T and logit scale s are one number here: with scale = s/T, bias·s/T and softcap/T the formulas are those
without either, u and z being what they are divided by T. The slope leaves the constant s/T out: products of dz have it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from liger_cutedsl.elementwise import LN_2, SMALLEST_EXPONENTIAL, at_least, at_most_one, exp2, reciprocal
from liger_cutedsl.epilogue_identity import with_operands

LOG2_E = 1.4426950408889634
LOWEST_MAXIMUM = -1e30  # stands for the maximum of a tile whose logits are all −inf: −inf − (−inf) is NaN
EXACT_INDICES = 2**24  # argmax carries column indices in float32, which holds integers exactly up to here


def exp_headroom(dtype) -> int:
    """h, where exponentials are stored times 2^h: 15 for fp16, so that they are normal numbers down to 2⁻²⁹."""
    return 15 if str(dtype) == "torch.float16" else 0


@dataclass(frozen=True)
class EpilogueFlags:
    """Which parts of the formula a call needs; the rest is not in the compiled kernel."""

    bias: bool = False
    softcap: bool = False
    ce_weight: bool = False
    smoothing: bool = False
    argmax: bool = False
    scale: bool = False
    entropy: bool = False
    sum_sq: bool = False

    @classmethod
    def of(cls, problem) -> EpilogueFlags:
        """What a problem needs. Class weights reach elements only through smoothing; else they are in the rows."""
        options = problem.options
        return cls(
            bias=problem.bias is not None,
            softcap=options.softcap is not None,
            ce_weight=problem.ce_weight is not None and options.smoothing,
            smoothing=options.needs_weighted_sum,
            argmax=options.needs_argmax,
            scale=options.scale != 1.0,
            entropy=options.needs_entropy,
            sum_sq=options.needs_sum_sq,
        )

    def for_gradients(self, coefficients) -> EpilogueFlags:
        """What dz needs, by the RowCoefficients that are there."""
        smoothing = coefficients.c is not None
        return replace(
            self,
            ce_weight=self.ce_weight and smoothing,
            smoothing=smoothing,
            argmax=False,
            entropy=coefficients.h is not None,
            sum_sq=False,
        )

    @property
    def moments(self) -> tuple[str, ...]:
        """Sums over a tile relative to its maximum, by the names of RowStatistics, or none."""
        wanted = ("sum_exp_z",) * self.entropy + ("sum_exp_sq",) * self.sum_sq
        return ("maximum", "sum_exp", *wanted) if wanted else ()

    @property
    def logit_operands(self) -> tuple[str, ...]:
        return self.uncapped_operands + ("softcap", "inverse_softcap") * self.softcap

    @property
    def uncapped_operands(self) -> tuple[str, ...]:
        return ("scale",) * self.scale + ("bias",) * self.bias

    @property
    def forward_operands(self) -> tuple[str, ...]:
        return self.logit_operands + ("ce_weight",) * self.ce_weight

    @property
    def exp_operands(self) -> tuple[str, ...]:
        return (*self.forward_operands, "tile_max")

    @property
    def backward_operands(self) -> tuple[str, ...]:
        smoothing = ("row_c",) * self.smoothing + ("ce_weight",) * self.ce_weight
        return (*self.logit_operands, "lse", "row_a", *(("row_h",) * self.entropy), *smoothing)


def vocabulary_operands(names, problem, of_tile) -> dict:
    """Operands that are no row's: scalars, and of_tile(vector) of each vector over the vocabulary."""
    options = problem.options
    values = {name: of_tile(getattr(problem, name)) for name in ("bias", "ce_weight") if name in names}
    if "scale" in names:
        values["scale"] = float(options.scale)
        if "bias" in names:
            values["bias"] = values["bias"] * values["scale"]
    if "softcap" in names:
        values.update(softcap=float(options.cap), inverse_softcap=1.0 / options.cap)
    return values


def biased(flags: EpilogueFlags, acc, operands):
    """u = scale·acc + bias: the logit before the cap. The cap is monotone, so a tile's maximum can be taken here."""
    u = acc * operands["scale"] if flags.scale else acc
    return u + operands["bias"] if flags.bias else u


def capped(flags: EpilogueFlags, u, operands):
    """(z, dz/du): z = softcap · tanh(u/softcap); dz/du is None where it is 1.

    tanh comes from r = 1/(1 + e^{2u}): tanh u = 1 − 2r and 1 − tanh²u = 4·r·(r·e^{2u}), which keeps its relative
    accuracy where the tanh saturates, on either side. (The hardware's tanh.approx is only good to 2⁻¹¹.)
    """
    if not flags.softcap:
        return u, None
    softcap = operands["softcap"]
    growth = exp2(u * (operands["inverse_softcap"] * (2.0 * LOG2_E)))
    r = reciprocal(growth + 1.0)
    # r·e^{2u} is 0·∞ beyond what a float32 holds, and 1 there
    return softcap - r * (softcap * 2.0), r * 4.0 * at_most_one(r * growth)


@functools.cache
def forward_epilogue(flags: EpilogueFlags):
    """The store-free forward: logits go to reductions, none to memory."""

    def forward(acc, **operands):
        u = biased(flags, acc, operands)
        z, _ = capped(flags, u, operands)
        outputs = {"moments" if flags.moments else "lse": z, "target_logit": u}
        if flags.smoothing:
            outputs["weighted_sum"] = (z, operands["ce_weight"]) if flags.ce_weight else z
        if flags.argmax:
            outputs["argmax"] = z
        return outputs

    return with_operands(forward, flags.forward_operands)


@functools.cache
def backward_epilogue(flags: EpilogueFlags):
    """dz of one tile of the vocabulary, recomputed from the accumulator and the row's lse.

    The difference z − lse comes first: it is small wherever p is not, so large logits cost no accuracy.
    """

    def backward(acc, **operands):
        z, slope = capped(flags, biased(flags, acc, operands), operands)
        if flags.entropy:
            log_p = z - operands["lse"]
            dz = exp2(log_p * LOG2_E) * _of_p(log_p, operands)
        else:
            dz = exp2((z - operands["lse"]) * LOG2_E) * operands["row_a"]
        if flags.smoothing:
            dz = dz - (operands["row_c"] * operands["ce_weight"] if flags.ce_weight else operands["row_c"])
        if flags.softcap:
            dz = dz * slope
        return {"D": dz}

    return with_operands(backward, flags.backward_operands)


def _of_p(log_p, operands):
    """What p is multiplied by in dz where an entropy has a gradient: a − h·log p."""
    return operands["row_a"] - operands["row_h"] * at_least(log_p, LOWEST_MAXIMUM)  # −∞·0 is NaN


@functools.cache
def exp_epilogue(flags: EpilogueFlags, headroom: int):
    """Exponentials relative to the tile's maximum: they keep bf16's relative precision whatever the logits' size,
    which stored logits do not. headroom: their scale 2^headroom, which keeps small ones normal numbers in fp16.

    Raises ValueError for a cap with label smoothing or an entropy, whose dz such exponentials do not hold."""
    if flags.softcap and (flags.smoothing or flags.entropy):
        raise ValueError("exponentials of a capped logit hold its slope: smoothing or an entropy needs both apart")

    def exponentials(acc, **operands):
        u = biased(flags, acc, operands)
        z, slope = capped(flags, u, operands)
        m, _ = capped(flags, operands["tile_max"], operands)
        e = exp2((z - m) * LOG2_E + float(headroom))
        outputs = {"D": e * slope if flags.softcap else e, "sum_exp": e, "target_logit": u}
        if flags.entropy:
            outputs["sum_exp_z"] = e * at_least(z - m, LOWEST_MAXIMUM)
        if flags.sum_sq:
            outputs["sum_exp_sq"] = e * e
        if flags.smoothing:
            outputs["weighted_sum"] = (z, operands["ce_weight"]) if flags.ce_weight else z
        if flags.argmax and flags.scale:
            outputs["argmax"] = z
        elif flags.argmax:
            outputs["is_max"] = z - m
        return outputs

    return with_operands(exponentials, flags.exp_operands)


@functools.cache
def exp_prepass(flags: EpilogueFlags):
    """u for the tile's maximum, before anything is stored."""

    def prepass(acc, **operands):
        return {"tile_max": biased(flags, acc, operands)}

    return with_operands(prepass, flags.uncapped_operands)


def dz_of_exp(flags: EpilogueFlags, headroom: int, e, operands):
    """dz at v ≠ t_i from the exponentials stored for it, which hold the cap's slope, and m, the tile's maximum of z."""
    from_lse = operands["m"] - operands["lse"]
    scale = exp2(from_lse * LOG2_E - float(headroom))
    if flags.entropy:  # no cap: log p is what e has kept of it
        log_p = e.clamp(min=SMALLEST_EXPONENTIAL).log() - headroom * LN_2 + from_lse
        dz = e * (scale * _of_p(log_p, operands))
    else:
        dz = e * (scale * operands["row_a"])
    if flags.smoothing:
        dz = dz - (operands["row_c"] * operands["ce_weight"] if flags.ce_weight else operands["row_c"])
    return dz

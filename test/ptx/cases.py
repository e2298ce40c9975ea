"""Calls of one kernel each, and how far their results may be from float64.

Bounds, with u = 2⁻²⁴ (float32) and per case the size S = max Σ_k |x_ik·w_vk| + |b_v|:
    z        (16 + H/16 + 1)·u·S: products of 16-bit numbers are exact in float32, sums of 16 come first and are added
             one after the other, then the bias. A cap adds 8u·softcap (an exponential, a sum, a reciprocal, a product).
    lse      z's, and 2u·|z|·log₂e of the exponents, and u for each of a tile's columns, whose positive terms are summed
    weighted Σ_v w_v·z_v: V terms, each z's bound times w and u·|w·z| of each of V sums
    e        relative: half a unit of its 16 bits, and e^δ − 1, δ being twice z's bound (element, maximum) and the
             exponents'. With a cap its slope 4r²e^{2u/cap} is a factor, whose exponent 2u/cap is off by 2/cap times
             u's bound and by its own rounding, and moves it by at most twice that; and 8u of its operations
    dz       half a unit of its 16 bits, and the same for p, of the size |A·p| + |C·w|
Results come as shares of these bounds: above 1 is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from ptx import package
from ptx.package import DTYPES, Flags

U = 2.0**-24
SOFTCAP, SMOOTHING = 5.0, 0.1
UNTOUCHED = 7.0  # what lies around an output matrix, and has to stay


@dataclass(frozen=True)
class Case:
    """kernel: forward, exp or backward.  clusters: how many the machine holds.  scale: of x.

    ties: every second vocabulary entry repeats the one before.  masked: columns whose bias is −inf, [start, stop).
    negative: all logits are, so that the zeros beyond the vocabulary's end would be the largest of all.
    targets: of the first rows; those not given lie at edges of tiles and out of range.
    """

    kernel: str
    n: int
    hidden: int
    vocab: int
    dtype: str = "bf16"
    flags: Flags = field(default_factory=Flags)
    clusters: int = 1
    scale: float = 0.5
    ties: bool = False
    negative: bool = False
    masked: tuple[tuple[int, int], ...] = ()
    targets: tuple[int, ...] = ()
    seed: int = 0


ALL = Flags(True, True, True, True, True)
# a call with both stores no exponentials
ALL_BUT_SOFTCAP, CAPPED = replace(ALL, softcap=False), Flags(bias=True, softcap=True, argmax=True)
PER_TOKEN = Flags(bias=True, softcap=True, smoothing=True, argmax=True, scale=True, entropy=True, sum_sq=True)
ROW_LOSS = Flags(smoothing=True, argmax=True, entropy=True)  # a mean logit, an argmax and an entropy together
# too long for `make test`
LONG = (
    "forward all full",
    "forward raster",
    "exp all full",
    "forward entropy",
    "forward entropy huge",
    "forward scaled",
    "exp per token fp16",
    "exp scaled",
    "exp softcap fp16",
    "exp row loss",
    "backward entropy",
    "backward entropy masked",
)
BIAS_ARGMAX = Flags(bias=True, argmax=True)
CASES = {
    "forward tiny": Case("forward", 256, 64, 512),
    "forward rows": Case("forward", 200, 64, 512),
    "forward two clusters": Case("forward", 300, 64, 1024, clusters=2),
    "forward deep": Case("forward", 130, 712, 768),
    "forward ragged": Case("forward", 256, 64, 509),
    "forward one column over": Case("forward", 3, 64, 257),
    "forward all": Case("forward", 200, 64, 509, flags=ALL),
    "forward all full": Case("forward", 200, 64, 1024, flags=ALL),
    "forward raster": Case("forward", 2500, 64, 2560, clusters=3),
    "forward masked ties": Case(
        "forward", 140, 64, 700, flags=BIAS_ARGMAX, ties=True, masked=((256, 512), (690, 700)), scale=1.0
    ),
    "forward huge": Case("forward", 140, 64, 700, flags=BIAS_ARGMAX, ties=True, scale=300.0),
    "forward negative": Case("forward", 30, 8, 270, negative=True),
    "exp negative": Case("exp", 30, 8, 270, negative=True),
    "exp tiny": Case("exp", 256, 64, 512),
    "exp rows ragged": Case("exp", 200, 64, 509),
    "exp fp16": Case("exp", 200, 64, 509, "fp16"),
    "exp all": Case("exp", 200, 64, 509, flags=ALL_BUT_SOFTCAP),
    "exp all full": Case("exp", 256, 136, 1024, flags=ALL_BUT_SOFTCAP),
    "exp softcap": Case("exp", 200, 64, 509, flags=CAPPED),
    "exp softcap fp16": Case("exp", 140, 64, 512, "fp16", flags=CAPPED),
    "exp three tiles a cluster": Case("exp", 300, 64, 760),
    "exp masked ties": Case(
        "exp", 140, 64, 700, flags=BIAS_ARGMAX, ties=True, masked=((256, 512), (690, 700)), scale=1.0
    ),
    "exp huge": Case("exp", 140, 64, 700, flags=BIAS_ARGMAX, ties=True, scale=300.0),
    "forward entropy": Case("forward", 256, 64, 512, flags=Flags(entropy=True)),
    "forward per token": Case("forward", 200, 64, 509, flags=PER_TOKEN),
    "forward entropy masked": Case(
        "forward", 140, 64, 700, flags=Flags(bias=True, entropy=True), masked=((256, 512), (690, 700)), scale=1.0
    ),
    "forward entropy huge": Case("forward", 140, 64, 700, flags=Flags(bias=True, entropy=True), scale=300.0),
    "forward scaled": Case("forward", 200, 64, 509, flags=Flags(bias=True, softcap=True, smoothing=True, scale=True)),
    "exp per token": Case("exp", 200, 64, 509, flags=replace(PER_TOKEN, softcap=False)),
    "exp per token fp16": Case("exp", 140, 64, 512, "fp16", flags=replace(PER_TOKEN, softcap=False)),
    "exp scaled": Case("exp", 200, 64, 509, flags=Flags(bias=True, softcap=True, argmax=True, scale=True)),
    "forward row loss": Case("forward", 140, 64, 509, flags=ROW_LOSS),
    "exp row loss": Case("exp", 140, 64, 509, flags=ROW_LOSS),
    "backward row loss": Case("backward", 140, 64, 509, flags=replace(ROW_LOSS, argmax=False)),
    "backward entropy": Case("backward", 300, 64, 509, flags=Flags(entropy=True)),
    "backward per token": Case(
        "backward", 300, 64, 509, flags=Flags(bias=True, softcap=True, scale=True, entropy=True)
    ),
    "backward entropy masked": Case(
        "backward", 140, 64, 700, flags=Flags(bias=True, entropy=True), masked=((256, 512), (690, 700)), scale=1.0
    ),
    "backward tiny": Case("backward", 256, 64, 512),
    "backward rows ragged": Case("backward", 200, 72, 509),
    "backward all": Case("backward", 300, 64, 509, flags=replace(ALL, argmax=False)),
    "backward fp16": Case("backward", 300, 64, 509, "fp16", Flags(bias=True)),
}


def make(case: Case, normal=torch.randn):
    """The case's Problem: every 17th target ignored, the first few at edges of tiles. normal: torch.randn, or alike."""
    g, flags = torch.Generator().manual_seed(case.seed), case.flags
    n, vocab, dtype = case.n, case.vocab, DTYPES[case.dtype]
    x = (normal(n, case.hidden, generator=g) * case.scale).to(dtype)
    weight = (normal(vocab, case.hidden, generator=g) * 0.5).to(dtype)
    if case.negative:
        x, weight = x.abs(), -weight.abs()
    bias = normal(vocab, generator=g) if flags.bias else None
    ce_weight = normal(vocab, generator=g).abs() + 0.5 if flags.ce_weight else None
    target = torch.randint(0, vocab, (n,), generator=g)
    target[::17] = -100
    edges = (case.targets or (0, vocab - 1, vocab // 2, min(255, vocab - 1), 2**31 - 1, -1))[:n]
    target[: len(edges)] = torch.tensor(edges)
    if case.ties:
        even = vocab // 2 * 2
        weight[1:even:2] = weight[0:even:2]
        if bias is not None:
            bias[1:even:2] = bias[0:even:2]
    for start, stop in case.masked:
        bias[start:stop] = -math.inf
    return package.make_problem(x, weight, target, bias, ce_weight, flags, SOFTCAP, SMOOTHING)


class Expected:
    """The case in float64, and the bounds. z (n, V), slope dz/du; z_bound: of one logit."""

    def __init__(self, problem):
        self.problem, x, weight = problem, problem.x.double(), problem.weight.double()
        bias = torch.zeros(problem.vocab).double() if problem.bias is None else problem.bias.double()
        options = problem.options
        u, cap = (x @ weight.T + bias) * options.scale, options.cap
        self.u, self.z = u, cap * torch.tanh(u / cap) if cap else u
        self.slope = torch.cosh(u / cap).square().reciprocal() if cap else torch.ones_like(u)
        finite = torch.where(bias.isfinite(), bias.abs(), 0.0)
        size = float((x.abs() @ weight.abs().T + finite).nan_to_num().max()) * abs(options.scale)
        self.u_bound = (17 + problem.hidden / 16) * U * size
        self.z_bound = self.u_bound + (8 * U * cap if cap else 0.0)
        of_exponent = 2 / cap * (self.u_bound + U * float(u.abs().max()) * 1.4427) if cap else 0.0
        self.slope_bound = 2 * of_exponent + 8 * U if cap else 0.0
        largest = float(self.z[self.z.isfinite()].abs().max())
        self.exponent = 2 * U * largest * 1.4427 + 8 * U
        self.weights = torch.ones(problem.vocab).double() if problem.ce_weight is None else problem.ce_weight.double()
        self.lse = self.z.logsumexp(1)
        log_p = self.z - self.lse[:, None]
        p = log_p.exp()
        self.entropy, self.log_sum_sq = -(p * log_p.clamp(min=-1e300)).sum(1), p.square().sum(1).log()
        valid = (problem.target >= 0) & (problem.target < problem.vocab)
        picked = self.u.gather(1, problem.target.clamp(0, problem.vocab - 1)[:, None])[:, 0]
        self.target_logit = torch.where(valid, picked, -math.inf)


def share(got, expected, bound) -> float:
    """The largest |got − expected| / bound; infinite where one is finite and the other is not, or another infinity."""
    got, expected = got.double(), expected.double()
    finite = expected.isfinite()
    same = torch.equal(got.isfinite(), finite) and torch.equal(
        got[~finite].nan_to_num(nan=7.0), expected[~finite].nan_to_num(nan=7.0)
    )
    if not same:
        return math.inf
    shares = ((got - expected).abs() / bound)[finite]
    return float(shares.max()) if shares.numel() else 0.0


def run(case: Case, compare_engine: bool = False) -> dict[str, float]:
    """Runs a case. Returns the errors as shares of their bounds, and infinity for what was written elsewhere.

    compare_engine: compare with the torch engine, too (its own error is allowed for: the bounds are twice as wide).
    """
    problem = make(case)
    before = [None if v is None else v.clone() for v in (problem.x, problem.weight, problem.bias, problem.target)]
    padded = torch.full((case.n + 8, -(-case.vocab // 8) * 8 + 16), UNTOUCHED, dtype=problem.x.dtype)
    out = padded[: case.n, : case.vocab]
    with package.exact_folds():
        expected = Expected(problem)
        errors = (_backward if case.kernel == "backward" else _statistics)(case, problem, expected, out, compare_engine)
    untouched = torch.ones_like(padded, dtype=torch.bool)
    if case.kernel != "forward":
        untouched[: case.n, : case.vocab] = False
    after = (problem.x, problem.weight, problem.bias, problem.target)
    kept = all(b is None or torch.equal(a, b) for a, b in zip(after, before, strict=True))
    if not (padded[untouched] == UNTOUCHED).all() or not kept:
        errors["written elsewhere"] = math.inf
    return errors


def _statistics(case: Case, problem, expected: Expected, out, compare_engine: bool) -> dict[str, float]:
    if case.kernel == "forward":
        (stats, maxima), tile = (package.run_forward(problem), None), None
    else:
        stats, maxima = package.run_exp(problem, out)
        tile = package.tile_columns("exp", problem)
    found = _compare(case, problem, expected, stats, maxima, out, tile)
    if not compare_engine:
        return found
    other_out = torch.empty(case.n, case.vocab)
    other, other_maxima = package.on_torch_engine(case.kernel, problem, other_out)
    lse_bound = _lse_bound(expected)
    found["lse, torch engine"] = share(stats.lse, other.lse, 2 * lse_bound)
    found["target, torch engine"] = share(stats.target_logit, other.target_logit, 2 * expected.z_bound)
    if case.kernel == "exp":
        found["m, torch engine"] = share(maxima, other_maxima, 2 * expected.z_bound + 1e-30)
        relative = unit(out.dtype) / 2 + math.expm1(4 * expected.z_bound + 2 * expected.exponent)
        relative += 2 * expected.slope_bound
        bound = other_out * relative + smallest(out.dtype)
        scale = 2.0 ** package.headroom(out.dtype)
        found["e, torch engine"] = share(out / scale, other_out, bound)
    return found


def unit(dtype) -> float:
    return torch.finfo(dtype).eps


def smallest(dtype) -> float:
    """What is lost near zero: float32's subnormal numbers, which the exponential flushes, or half of fp16's least."""
    info = torch.finfo(dtype)
    return max(2.0**-126, info.smallest_normal * info.eps / 2)


def _lse_bound(expected: Expected) -> float:
    return expected.z_bound + expected.exponent + 256 * U


def _compare(case: Case, problem, expected: Expected, stats, maxima, out, tile: int | None) -> dict[str, float]:
    z, errors = expected.z, {}
    errors["lse"] = share(stats.lse, expected.lse, _lse_bound(expected))
    errors["target"] = share(stats.target_logit, expected.target_logit, expected.u_bound)
    if tile:
        bounds = range(0, problem.vocab, tile)
        m = torch.stack([z[:, i : i + tile].amax(1) for i in bounds], 1)
        masked = m == -math.inf
        errors["m"] = share(maxima.double()[~masked], m[~masked], expected.z_bound)
        if not (maxima[masked] <= -1e29).all():  # stands for the maximum of nothing
            errors["m of a masked tile"] = math.inf
        shift = torch.where(masked, 0.0, m).repeat_interleave(tile, 1)[:, : problem.vocab]
        e = (z - shift).exp() * expected.slope * 2.0 ** package.headroom(out.dtype)
        relative = unit(out.dtype) / 2 + math.expm1(2 * expected.z_bound + expected.exponent) + expected.slope_bound
        errors["e"] = share(out, e, e * relative + smallest(out.dtype))
    if case.flags.smoothing:
        size = float((z.abs() * expected.weights).sum(1).max())
        bound = expected.z_bound * float(expected.weights.sum()) + problem.vocab * U * size
        errors["weighted"] = share(stats.weighted_sum, (z * expected.weights).sum(1), bound)
    if case.flags.moments:
        errors |= _moment_shares(case, problem, expected, stats.finished())
    if case.flags.argmax:
        errors["argmax"] = _argmax_share(case, expected, stats.argmax)
    return errors


def _moment_shares(case: Case, problem, expected: Expected, stats) -> dict[str, float]:
    """Of H = Σ p·(−log p), each of whose terms is off by δ·p·(1 + |log p|) where a logit's error and its exponent's are
    δ together, and by the rounding of a tile's sums; log Σ p² likewise by 2δ."""
    log_p = expected.z - expected.lse[:, None]
    p, finite = log_p.exp(), torch.where(log_p.isfinite(), log_p, 0.0)
    delta = 2 * expected.z_bound + expected.exponent + 256 * U
    found = {}
    if case.flags.entropy:
        found["entropy"] = share(stats.entropy, expected.entropy, delta * (p * (1 + finite.abs())).sum(1) + 8 * U)
    if case.flags.sum_sq:
        found["sum of squares"] = share(stats.log_sum_sq, expected.log_sum_sq, 4 * delta)
    return found


def _argmax_share(case: Case, expected: Expected, argmax) -> float:
    """How far below the maximum the chosen logit lies; with ties, which are exact, the first must be chosen."""
    if case.ties and (argmax % 2 == 1).any():
        return math.inf
    chosen = expected.z.gather(1, argmax[:, None])[:, 0]
    return float(((expected.z.amax(1) - chosen) / (2 * expected.z_bound)).max())


def _backward(case: Case, problem, expected: Expected, out, compare_engine: bool) -> dict[str, float]:
    g = torch.Generator().manual_seed(5)
    a = torch.rand(case.n, generator=g) + 0.5
    c = torch.rand(case.n, generator=g) * 0.01 if case.flags.smoothing else None
    h = torch.randn(case.n, generator=g) * 0.3 if case.flags.entropy else None
    rows, lse = package.coefficients(a, c, h), expected.lse.float()
    package.run_backward(problem, lse, rows, out)
    log_p = expected.z - lse.double()[:, None]
    of_p, of_p_bound = a.double()[:, None], 0.0
    if h is not None:
        of_entropy = h.double()[:, None] * torch.where(log_p.isfinite(), log_p, 0.0)
        # log p is as far off as the logit
        of_p, of_p_bound = of_p - of_entropy, log_p.exp() * h.double().abs()[:, None] * 2 * expected.z_bound
        of_p_bound = of_p_bound + 4 * U * log_p.exp() * (of_entropy.abs() + a.double()[:, None])
    p = log_p.exp() * of_p
    smoothed = torch.zeros_like(p) if c is None else c.double()[:, None] * expected.weights
    dz = (p - smoothed) * expected.slope
    cap = problem.options.cap
    slope_bound = 2 * expected.z_bound / cap + 8 * U if cap else 0.0
    size = (p.abs() + smoothed.abs()) * (expected.slope * 8 * U + slope_bound)
    bound = dz.abs() * unit(out.dtype) / 2 + smallest(out.dtype)
    bound = bound + size + (p.abs() * (expected.z_bound + expected.exponent) + of_p_bound) * expected.slope
    errors = {"dz": share(out, dz, bound)}
    if compare_engine:
        other = torch.empty(case.n, case.vocab)
        package.on_torch_engine("backward", problem, other, lse, rows)
        errors["dz, torch engine"] = share(out, other, 2 * bound)
    return errors

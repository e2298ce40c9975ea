"""Gradients from a sample of the softmax: right in the mean, as noisy as predicted, exact where nothing is sampled."""

import functools
import math
import types
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import liger_cutedsl
from liger_cutedsl import fused_linear_cross_entropy, fused_linear_log_probs, fused_linear_loss, sampling, testing
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.epilogues import exp_headroom
from liger_cutedsl.schedules import kept_shares, sampled, single_pass
from reference import assert_close

TILES, DRAWS = 5, 64
VOCAB = TILES * sampling.TILE - 37


@pytest.fixture(autouse=True)
def _one_thread_and_nothing_remembered():
    """Tensors of a few kB: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    testing.reset()
    yield
    testing.reset()
    torch.set_num_threads(threads)


@pytest.fixture
def any_share(monkeypatch):
    """However many pairs are kept, none are computed beside."""
    monkeypatch.setattr(sampled, "MOST_KEPT", 1.0)
    monkeypatch.setattr(kept_shares, "MOST_KEPT", 1.0)


@dataclass(frozen=True)
class Inputs:
    """peak: the logits' standard deviation."""

    tokens: int = 40
    hidden: int = 12
    peak: float = 3.0
    dtype: torch.dtype = torch.float64
    bias: bool = True
    ignored: int = 0

    def tensors(self, seed: int = 0):
        g = torch.Generator().manual_seed(seed)
        x, weight, bias = (
            torch.randn(*shape, generator=g, dtype=torch.float64)
            for shape in ((self.tokens, self.hidden), (VOCAB, self.hidden), (VOCAB,))
        )
        target = torch.randint(VOCAB, (self.tokens,), generator=g)
        target[: self.ignored] = -100
        weight *= self.peak * self.hidden**-0.5
        leaves = [v.to(self.dtype).requires_grad_() for v in (x, weight, bias)]
        return leaves[0], leaves[1], target, leaves[2] if self.bias else None


def gradients(inputs: Inputs, seed: int, loss=fused_linear_cross_entropy, tau=0.2, **call):
    """(loss, gradients of x, weight and bias) of one draw."""
    x, weight, target, bias = inputs.tensors()
    torch.manual_seed(seed)
    found = loss(x, weight, target, bias=bias, gradient_sampling=tau, **{"schedule": "sampled", **call})
    value = found if isinstance(found, torch.Tensor) else found.loss
    value.backward()
    return value.detach(), [v.grad for v in (x, weight, bias) if v is not None]


def reward(values):
    """An arbitrary loss of rows that reads all there is to differentiate."""
    return -values.log_prob.exp() * 3.0 - 0.3 * values.entropy + 0.05 * values.lse.square() + 0.2 * values.mean_logit


def plain_reward(logits, target):
    log_p = logits.log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    of_target = log_p.gather(1, target.clamp(min=0)[:, None])[:, 0]
    values = dict(log_prob=of_target, entropy=entropy, lse=logits.logsumexp(1), mean_logit=logits.mean(1))
    return reward(types.SimpleNamespace(**values))


WEIGHTS = torch.linspace(0.2, 2.0, VOCAB, dtype=torch.float64)
# (inputs, what the call takes, the same loss of logits, what of dz is uniform: C·w)
LOSSES = {
    "flat": (Inputs(peak=0.5), dict(tau=0.8), F.cross_entropy, 0.0),
    "peaked": (Inputs(peak=8.0, bias=False), {}, F.cross_entropy, 0.0),
    "ignored rows, a sum": (
        Inputs(ignored=12),
        dict(reduction="sum"),
        functools.partial(F.cross_entropy, reduction="sum"),
        0.0,
    ),
    "label smoothing": (
        Inputs(),
        dict(label_smoothing=0.3),
        functools.partial(F.cross_entropy, label_smoothing=0.3),
        0.3 / VOCAB / 40,
    ),
    "class weights": (
        Inputs(ignored=3),
        dict(ce_weight=WEIGHTS),
        functools.partial(F.cross_entropy, weight=WEIGHTS),
        0.0,
    ),
    "softcap and z-loss": (
        Inputs(),
        dict(softcap=4.0, lse_square_scale=0.05, temperature=0.7, tau=0.6),
        lambda z, t: _with_z_loss(4.0 * torch.tanh(z / 4.0) / 0.7, t),
        0.0,
    ),
}


def _with_z_loss(logits, target):
    return F.cross_entropy(logits, target) + 0.05 * logits.logsumexp(1).square().mean()


@dataclass
class Recorded:
    """q of one call (rows that count, tiles), and the exact gradients, with the variances that q gives them."""

    q: torch.Tensor
    gradients: list[torch.Tensor]
    variances: list[float]


def recorded(monkeypatch, inputs: Inputs, of_logits, uniform, loss=fused_linear_cross_entropy, **call) -> Recorded:
    """In float64 by autograd, but for the shares, which are those that the engine is asked to draw by."""
    draws, select = [], TorchEngine.select_pairs
    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "select_pairs", lambda self, draw: draws.append(draw) or select(self, draw))
        gradients(inputs, 0, loss, **call)
    (draw,) = draws
    q = sampling.shares(draw).double()
    x, weight, target, bias = inputs.tensors()
    logits = F.linear(x, weight, bias)
    leaves = [v for v in (x, weight, bias) if v is not None]
    dz, *exact = torch.autograd.grad(of_logits(logits, target), [logits, *leaves])
    counts = target >= 0 if len(q) < len(x) else torch.ones_like(target, dtype=torch.bool)  # the others are dropped
    beyond = TILES * sampling.TILE - VOCAB
    pairs = F.pad(dz[counts] + uniform, (0, beyond)).view(len(q), TILES, -1)
    tiles = F.pad(weight.detach(), (0, 0, 0, beyond)).view(TILES, sampling.TILE, -1)
    rest = torch.where(q > 0, 1.0 / q.clamp(min=1e-30) - 1.0, 0.0)
    squares = {
        "x": torch.einsum("ntc,tch->nth", pairs, tiles).square().sum(2),
        "weight": pairs.square().sum(2) * x.detach()[counts].square().sum(1)[:, None],
        "bias": pairs.square().sum(2),
    }
    return Recorded(q, exact, [float((rest * value).sum()) for value in squares.values()][: len(exact)])


def check_draws(found: Recorded, inputs: Inputs, **call) -> None:
    """DRAWS gradients: their mean approaches the exact one as 1/√n, and their variance is as predicted.

    n·‖mean − exact‖²/variance has mean 1, and a spread of √2 over the root of how many terms of like size it sums, some
    dozens. A bias of a quarter of the noise would make it 5. The mean of the draws' own squared errors is known better,
    by √n.
    """
    sums, squares = [torch.zeros_like(v) for v in found.gradients], [0.0] * len(found.gradients)
    for seed in range(DRAWS):
        _, drawn = gradients(inputs, seed, **call)
        for i, (got, exact) in enumerate(zip(drawn, found.gradients, strict=True)):
            sums[i] += got - exact
            squares[i] += float((got - exact).square().sum()) / DRAWS
    for name, total, square, variance in zip(("dX", "dW", "db"), sums, squares, found.variances, strict=False):
        assert variance > 0
        of_mean = float((total / DRAWS).square().sum()) * DRAWS / variance
        assert 0.3 < of_mean < 2.2, f"{name}: its mean is off by {math.sqrt(of_mean):.2f} of what n draws explain"
        assert 0.75 < square / variance < 1.33, f"{name}: {square / variance:.2f} of the predicted variance"


@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_of_draws_is_the_exact_gradient(monkeypatch, any_share, name):
    inputs, call, of_logits, uniform = LOSSES[name]
    found = recorded(monkeypatch, inputs, of_logits, uniform, **call)
    assert 0.05 < found.q.mean() < 0.9
    check_draws(found, inputs, **call)


def rewarded(x, weight, target, **call):
    return fused_linear_loss(x, weight, target, reward, **call)


def test_a_loss_of_rows_of_one_s_own_is_sampled(monkeypatch, any_share):
    """Its entropy's share of dz is h·log p, its mean logit's uniform; and rows differ in size and sign."""
    inputs = Inputs(tokens=24)
    uniform = -0.2 / VOCAB / 24  # −∂L/∂z by the mean logit
    found = recorded(monkeypatch, inputs, lambda z, t: plain_reward(z, t).mean(), uniform, rewarded)
    check_draws(found, inputs, loss=rewarded)


# ---- what is drawn


def draw_of(q_like, lse=None, seed=7, target=None, **changes) -> sampling.Draw:
    n, tiles = q_like.shape
    lse = torch.arange(n, dtype=torch.float32) if lse is None else lse
    target = torch.full((n,), -1, dtype=torch.int64) if target is None else target
    values = dict(
        maxima=lse[:, None].expand(n, tiles), sums=q_like, lse=lse, a=torch.ones(n), h=None, target=target,
        scale=torch.tensor(1.0), seed=torch.tensor([seed]),
    )  # fmt: skip
    return sampling.Draw(**values | changes)


def test_philox_is_philox():
    """The known answers of Random123, Philox's authors' library, for philox4x32 with 10 rounds."""
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), -1)
    assert sampling.philox(zero, (zero, 0, 0, 0)).item() == 0x6627E8D5
    assert sampling.philox(ones, (ones, -1, -1, -1)).item() == 0x408F276D
    pi = (torch.tensor([0x243F6A88]), 0x85A308D3, 0x13198A2E, 0x03707344)
    assert sampling.philox(torch.tensor([0x299F31D0 << 32 | 0xA4093822]), pi).item() == 0xD16CFE09


def test_shares_are_what_u_is_below_with_that_probability():
    q = torch.tensor([[1e-20, 0.3, 0.7, 1.5, 0.0]]).repeat(2, 1)
    q = torch.cat((q, torch.full((1, 5), torch.nan)))
    found = sampling.shares(draw_of(q, target=torch.tensor([-1, 2 * sampling.TILE, -1])))
    assert torch.equal(found * sampling.STEPS, (found * sampling.STEPS).round())
    assert torch.equal(found[0], torch.tensor([2.0**-24, 0.3, 0.7, 1.0, 0.0])) or (found[0] >= q[0].clamp(max=1)).all()
    assert found[0, 4] == 0 and found[1, 2] == 1 and (found[2] == 1).all(), "NaN must show in the gradient"
    assert (sampling.kept_pairs(draw_of(q), found)[2]).all()


def test_random_numbers_are_uniform_and_no_two_pairs_or_calls_share_them():
    like = torch.zeros(2000, 40)
    u = sampling.uniforms(draw_of(like))
    assert u.dtype == torch.float32 and u.min() >= 0 and u.max() < 1
    n = u.numel()
    assert abs(u.double().mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5  # four standard deviations
    assert torch.histc(u, 16, 0, 1).sub(n / 16).abs().max() < 5 * (n / 16) ** 0.5
    centred = u.double() - 0.5
    for other in (
        sampling.uniforms(draw_of(like, seed=8)),
        sampling.uniforms(draw_of(like, first_tile=40)),
        sampling.uniforms(draw_of(like, target=torch.zeros(2000, dtype=torch.int64))),
        u.roll(1, 0),
        u.roll(1, 1),
    ):
        assert abs((centred * (other.double() - 0.5)).mean()) < 5 / 12 / n**0.5
    assert torch.equal(sampling.uniforms(draw_of(like[:, 10:], first_tile=10)), u[:, 10:]), "by global number"


def test_more_than_there_is_room_for_is_drawn_hardly_ever():
    """Bernstein's inequality, for sums whose variance is at most their mean."""
    for expected in (0.0, 1.0, 50.0, 1e3, 1e6):
        beyond = sampling.capacity_needed(expected) - expected
        assert math.exp(-(beyond**2) / 2 / (expected + beyond / 3)) < 2e-8


def test_the_sums_that_shares_are_made_of():
    """Of exponentials in float16 too, which are stored times a power of two."""
    x, weight, target, bias = Inputs(dtype=torch.float32).tensors()
    problem = liger_cutedsl.call.Problem(x.detach(), weight.detach(), target, bias.detach(), sampled=True)
    z = F.linear(x, weight, bias).detach().double()
    for dtype in (torch.float32, torch.float16):
        stats, maxima, sums = TorchEngine(dtype).exp_chunk(problem, torch.empty(len(x), VOCAB, dtype=dtype))
        assert maxima.shape == sums.shape == (len(x), TILES)
        for tile in range(TILES):
            of_tile = z[:, tile * sampling.TILE : (tile + 1) * sampling.TILE]
            torch.testing.assert_close(maxima[:, tile].double(), of_tile.amax(1), rtol=1e-5, atol=1e-5)
            mass = sums[:, tile].double() * 2.0 ** -exp_headroom(dtype) * (maxima[:, tile].double() - stats.lse).exp()
            torch.testing.assert_close(mass, (of_tile.logsumexp(1) - z.logsumexp(1)).exp(), rtol=1e-4, atol=0)


# ---- exact, the same, in any order


@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.2), dict(softcap=3.0)], ids=str)
def test_the_smallest_tau_is_exact(any_share, options):
    """All pairs are kept, through the packed products: as exact as the others are."""
    for inputs in (Inputs(), Inputs(ignored=1)):
        _, exact = gradients(inputs, 0, tau=None, schedule="single_pass", **options)
        _, found = gradients(inputs, 0, tau=1e-30, **options)
        for got, want in zip(found, exact, strict=True):
            assert_close(got, want, 1e-12, "gradient")


def test_the_loss_is_exact_and_the_same_seed_draws_the_same(any_share):
    plain, _ = gradients(Inputs(), 0, tau=None, schedule="single_pass")
    results = [gradients(Inputs(), seed) for seed in (1, 1, 2)]
    assert all(abs(loss - plain) < 1e-12 for loss, _ in results)
    first, again, other = (found for _, found in results)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_rows_draw_the_same_wherever_they_lie(any_share):
    """In another order, and among rows that are ignored, which are dropped before anything is computed."""
    x, weight, target, _ = Inputs(bias=False).tensors()

    def of(rows, targets):
        torch.manual_seed(3)
        some, w = x.detach()[rows].requires_grad_(), weight.detach().requires_grad_()
        call = dict(reduction="sum", gradient_sampling=0.2, schedule="sampled")
        fused_linear_cross_entropy(some, w, targets, **call).backward()
        return some.grad, w.grad

    plain, order = torch.arange(len(x)), torch.randperm(len(x))
    dx, dw = of(plain, target)
    other_dx, other_dw = of(order, target[order])
    assert_close(other_dx, dx[order], 1e-12, "dX")
    assert_close(other_dw, dw, 1e-12, "dW")
    twice = torch.cat((plain, plain))
    more_dx, more_dw = of(twice, torch.cat((torch.full_like(target, -100), target)))
    assert_close(more_dx[len(x) :], dx, 1e-12, "dX")
    assert_close(more_dw, dw, 1e-12, "dW")
    assert not more_dx[: len(x)].any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_s_replay_draws_the_same(any_share, reentrant):
    x, weight, target, _ = Inputs(bias=False).tensors()
    _, (dx, dw) = gradients(Inputs(bias=False), 5)

    def loss(x, weight):
        return fused_linear_cross_entropy(x, weight, target, gradient_sampling=0.2, schedule="sampled")

    torch.manual_seed(5)
    checkpoint(loss, x, weight, use_reentrant=reentrant).backward()
    assert torch.equal(x.grad, dx) and torch.equal(weight.grad, dw)


# ---- dense chunks, full buffers, heads that keep too much


def with_room(monkeypatch, pairs=None, chunk=None):
    """Plans with room for so many pairs, and of chunks of so many tokens."""
    plan = sampled.plan

    def planned(*arguments):
        route = plan(*arguments)
        return replace(route, pairs=pairs or route.pairs, chunk=chunk or route.chunk)

    monkeypatch.setattr(sampled, "plan", planned)


def test_what_does_not_fit_is_exact(monkeypatch, any_share):
    """A buffer for fewer pairs than any chunk expects; and a draw beyond what was expected."""
    options = dict(label_smoothing=0.1)
    _, exact = gradients(Inputs(), 0, tau=None, schedule="single_pass", **options)
    with_room(monkeypatch, pairs=3, chunk=16)
    _, found = gradients(Inputs(), 1, **options)
    for got, want in zip(found, exact, strict=True):
        assert_close(got, want, 1e-12, "gradient")
    monkeypatch.setattr(sampled, "capacity_needed", lambda expected: 0)
    _, found = gradients(Inputs(), 1, **options)
    for got, want in zip(found, exact, strict=True):
        assert_close(got, want, 1e-12, "gradient")


def test_chunks_that_are_exact_and_those_that_are_not_sum_up(monkeypatch):
    """The first rows are flat, and computed whole; the others peaked; a full buffer becomes dW in between."""
    monkeypatch.setattr(kept_shares, "MOST_KEPT", 1.0)
    monkeypatch.setattr(sampled, "MOST_KEPT", 0.55)
    with_room(monkeypatch, pairs=150, chunk=10)
    x, weight, target, bias = Inputs(tokens=70, peak=6.0).tensors()
    with torch.no_grad():
        x[:10] *= 0.01
        x[40:50] *= 0.01
    calls = calls_of(monkeypatch, "dw_of_pairs", "scale_chunk")
    call = dict(bias=bias, label_smoothing=0.1, reduction="sum")
    leaves = (x, weight, bias)
    exact = torch.autograd.grad(fused_linear_cross_entropy(x, weight, target, **call), leaves)
    calls["scale_chunk"].clear()
    sums, squares, n = [torch.zeros_like(v) for v in leaves], [0.0] * 3, 24
    for _ in range(n):
        value = fused_linear_cross_entropy(x, weight, target, **call, gradient_sampling=0.4, schedule="sampled")
        # divided as a trainer divides, so that what backward is given is foretold from the third call on
        found = [70 * g for g in torch.autograd.grad(value / 70, leaves)]
        for i, (got, want) in enumerate(zip(found, exact, strict=True)):
            sums[i] += (got - want) / n
            squares[i] += float((got - want).square().sum()) / n
        assert_close(found[0][:10], exact[0][:10], 1e-12, "dX of exact rows")
        assert_close(found[0][40:50], exact[0][40:50], 1e-12, "dX of exact rows")
    assert len(calls["scale_chunk"]) == 2 * n and len(calls["dw_of_pairs"]) > n
    for total, square in zip(sums, squares, strict=True):
        assert square > 0
        assert float(total.square().sum()) * n < 2.2 * square, "as in check_draws"


def calls_of(monkeypatch, *primitives) -> dict[str, list]:
    """The calls of the engine's primitives from now on."""
    calls = {name: [] for name in primitives}
    for name, made in calls.items():
        original = getattr(TorchEngine, name)
        monkeypatch.setattr(
            TorchEngine, name, lambda *a, o=original, made=made, **k: made.append(a) or o(*a, **k)
        )  # fmt: skip
    return calls


def test_pairs_are_packed_before_their_number_is_known(monkeypatch):
    """From the second chunk on, and in the second call from the first; the results are the same."""
    monkeypatch.setattr(sampled, "MOST_KEPT", 0.9)
    with_room(monkeypatch, chunk=10)
    order = []
    wait, begin = sampled.PairCount.wait, TorchEngine.exp_chunk
    monkeypatch.setattr(sampled.PairCount, "wait", lambda self: order.append("wait") or wait(self))
    monkeypatch.setattr(TorchEngine, "exp_chunk", lambda *a, **k: order.append("product") or begin(*a, **k))
    first = gradients(Inputs(peak=9.0), 3, tau=0.5)[1]
    assert order == ["product", "wait", "product", "product", "wait", "product", "wait", "wait"]
    order.clear()
    second = gradients(Inputs(peak=9.0), 3, tau=0.5)[1]
    assert order == ["product", "product", "wait", "product", "wait", "product", "wait", "wait"]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1)], ids=str)
def test_a_chunk_with_more_pairs_than_were_foreseen_is_exact(monkeypatch, options):
    """It was packed already, and its exponentials are gone: they are computed again."""
    monkeypatch.setattr(kept_shares, "MOST_KEPT", 1.0)
    monkeypatch.setattr(sampled, "MOST_KEPT", 0.55)
    with_room(monkeypatch, chunk=10)
    x, weight, target, bias = Inputs(peak=20.0).tensors()
    with torch.no_grad():
        x[20:30] *= 0.001
        bias *= 0.1
    leaves, call = (x, weight, bias), dict(bias=bias, **options)
    exact = torch.autograd.grad(fused_linear_cross_entropy(x, weight, target, **call), leaves)
    calls = calls_of(monkeypatch, "exp_chunk", "scale_chunk", "pack_pairs")
    how = dict(gradient_sampling=0.3, schedule="sampled")
    for _ in range(3):
        for made in calls.values():
            made.clear()
        found = torch.autograd.grad(fused_linear_cross_entropy(x, weight, target, **call, **how), leaves)
        assert_close(found[0][20:30], exact[0][20:30], 1e-12, "dX of exact rows")
        assert {name: len(made) for name, made in calls.items()} == dict(exp_chunk=5, scale_chunk=1, pack_pairs=4)
        for got, want in zip(found, exact, strict=True):
            assert 0 < (got - want).norm() < 0.7 * want.norm()
    sums, n = [0.0] * 3, 48
    noise = 0.0
    for _ in range(n):
        found = torch.autograd.grad(fused_linear_cross_entropy(x, weight, target, **call, **how), leaves)
        sums = [total + (got - want) / n for total, got, want in zip(sums, found, exact, strict=True)]
        noise += float((found[1] - exact[1]).square().sum()) / n
    assert float(sums[1].square().sum()) * n < 2.2 * noise, "as in check_draws"


def route_of(inputs=None, **call):
    x, weight, target, bias = (inputs or Inputs()).tensors()
    return liger_cutedsl.explain(x, weight, target, **{"bias": bias, "gradient_sampling": 0.2, **call})


def test_a_head_that_keeps_most_is_computed_whole_for_a_while():
    flat = Inputs(peak=0.5)
    assert route_of(flat).schedule == "sampled"
    gradients(flat, 0, schedule=None)
    route = route_of(flat)
    assert route.schedule == "single_pass" and "sampling would keep 0." in route.reason
    assert route_of(flat, gradient_sampling=3.0).schedule == "sampled", "another τ is another question"
    for _ in range(kept_shares.TRY_AGAIN):
        assert route_of(flat).schedule == "single_pass"
        _, found = gradients(flat, 0, schedule=None)
    _, exact = gradients(flat, 0, tau=None, schedule="single_pass")
    assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
    assert route_of(flat).schedule == "sampled"
    gradients(flat, 0, schedule=None)
    assert route_of(flat).schedule == "single_pass"
    testing.reset()
    assert route_of(flat).schedule == "sampled"


# ---- options and routes


def test_zero_is_what_was_before(monkeypatch):
    state = torch.get_rng_state()
    found = [gradients(Inputs(), 0, tau=tau, schedule=None)[1] for tau in (None, 0, 0.0)]
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    torch.set_rng_state(state)
    assert str(route_of(gradient_sampling=0)) == str(route_of(gradient_sampling=None))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    gradients(Inputs(), 0, tau=0.0, schedule=None)
    assert torch.equal(before, torch.get_rng_state()), "nothing is drawn"
    monkeypatch.setenv("LIGER_CUTEDSL_GRADIENT_SAMPLING", "0.2")
    assert route_of(gradient_sampling=None).schedule == "sampled"
    assert route_of(gradient_sampling=0).schedule == "single_pass", "an argument goes before its variable"


@pytest.mark.parametrize(
    "value, error",
    [
        (True, TypeError),
        (torch.tensor(0.1), TypeError),
        ("0.1", TypeError),
        (-0.1, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
    ],
    ids=str,
)
def test_what_is_no_tau_is_refused(value, error):
    for function in (fused_linear_cross_entropy, rewarded, liger_cutedsl.explain):
        x, weight, target, _ = Inputs().tensors()
        with pytest.raises(error, match=r"gradient_sampling must be a .*number of at least 0, got"):
            function(x, weight, target, gradient_sampling=value)


def test_what_is_no_tau_in_the_environment_is_refused(monkeypatch):
    for text in ("much", "-1", "nan"):
        monkeypatch.setenv("LIGER_CUTEDSL_GRADIENT_SAMPLING", text)
        with pytest.raises(ValueError, match="LIGER_CUTEDSL_GRADIENT_SAMPLING must be"):
            route_of(gradient_sampling=None)


OBSTACLES = {
    "reduction='none'": dict(reduction="none"),
    "no product of two vectors": dict(softcap=3.0, label_smoothing=0.1),
    "weight_grad_buffer gets the whole gradient": dict(weight_grad_buffer=torch.zeros(VOCAB, 12, dtype=torch.float64)),
    "over ranks": dict(split=True),
    "was asked for": dict(schedule="single_pass"),
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_what_is_not_sampled_says_why(reason):
    call = OBSTACLES[reason]
    route = route_of(**call)
    assert route.schedule != "sampled"
    assert reason in route.reason.partition("; no sample of the gradient: ")[2]
    if "schedule" not in call:
        with pytest.raises(RuntimeError, match="schedule 'sampled' was asked for but cannot run this call: "):
            route_of(**call, schedule="sampled")


def test_more_that_is_not_sampled():
    with pytest.raises(RuntimeError, match="takes gradient_sampling=τ above 0"):
        route_of(gradient_sampling=None, schedule="sampled")
    torch.use_deterministic_algorithms(True)
    try:
        assert "use_deterministic_algorithms" in route_of().reason
    finally:
        torch.use_deterministic_algorithms(False)
    assert route_of().schedule == "sampled", "nothing is remembered of it"
    x, weight, target, _ = Inputs().tensors()
    with pytest.raises(TypeError, match="gradient_sampling is no argument of fused_linear_log_probs"):
        liger_cutedsl.explain(x, weight, target, log_probs=True, gradient_sampling=0.1)


def test_log_probabilities_are_as_they_were(monkeypatch):
    monkeypatch.setenv("LIGER_CUTEDSL_GRADIENT_SAMPLING", "0.2")
    x, weight, target, _ = Inputs().tensors()
    fused_linear_log_probs(x, weight, target).sum().backward()
    monkeypatch.delenv("LIGER_CUTEDSL_GRADIENT_SAMPLING")
    x2, weight2, *_ = Inputs().tensors()
    fused_linear_log_probs(x2, weight2, target).sum().backward()
    assert torch.equal(x.grad, x2.grad) and torch.equal(weight.grad, weight2.grad)


def test_metrics_and_what_is_expected_next(any_share):
    x, weight, target, bias = Inputs().tensors()
    call = dict(bias=bias, gradient_sampling=0.2, return_gradient_sampling=True)
    assert route_of().expected_pairs is None
    errors, found = [], []
    exact = fused_linear_cross_entropy(x, weight, target, bias=bias, schedule="single_pass")
    exact = torch.autograd.grad(exact, (x, weight))
    for _ in range(DRAWS):
        out = fused_linear_cross_entropy(x, weight, target, schedule="sampled", **call)
        drawn = torch.autograd.grad(out.loss / 3, (x, weight))
        errors.append([float((3 * a - b).norm() / b.norm()) for a, b in zip(drawn, exact, strict=True)])
        found.append([float(v) for v in (out.noise_dx, out.noise_dw, out.share_kept)])
    errors, found = (torch.tensor(v).square().mean(0).sqrt() for v in (errors, found))
    assert 0.9 < found[1] / errors[1] < 1.1, "without bias, and of 64 draws"
    assert 0.6 < found[0] / errors[0] < 1.6, "an estimate"
    pairs = 40 * TILES
    assert route_of().expected_pairs == pytest.approx(float(found[2]) * pairs, rel=0.05)
    assert f"room for {route_of().pairs} pairs of a token and 128 columns" in str(route_of())
    whole = fused_linear_cross_entropy(x, weight, target, schedule="single_pass", **call)
    assert [float(v) for v in whole[4:]] == [1.0, 0.0, 0.0]
    alone = fused_linear_cross_entropy(x.detach(), weight, target, schedule="sampled", **call)
    assert alone.noise_dx.isnan() and alone.noise_dw > 0


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_any_subset_of_gradients(any_share, wanted):
    _, exact = gradients(Inputs(), 4)
    x, weight, target, bias = Inputs().tensors()
    for leaf, wants in zip((x, weight, bias), wanted, strict=True):
        leaf.requires_grad_(wants)
    torch.manual_seed(4)
    fused_linear_cross_entropy(x, weight, target, bias=bias, gradient_sampling=0.2, schedule="sampled").backward()
    for leaf, wants, want in zip((x, weight, bias), wanted, exact, strict=True):
        assert (leaf.grad is None) == (not wants)
        if wants:
            assert_close(leaf.grad, want, 1e-12, "gradient")


def test_nan_shows(any_share):
    x, weight, target, _ = Inputs(bias=False).tensors()
    with torch.no_grad():
        x[3] = torch.inf
    loss = fused_linear_cross_entropy(x, weight, target, gradient_sampling=0.2, schedule="sampled")
    dx, dw = torch.autograd.grad(loss, (x, weight))
    assert loss.isnan() and dx[3].isnan().any() and dw.isnan().any()
    assert dx[4:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_and_autocast(any_share, dtype):
    """All pairs through the packed products: within both results' roundings of what single_pass finds."""
    bound = {torch.float32: 1e-5}.get(dtype, 2 * torch.finfo(dtype).eps)
    for inputs, cast in ((Inputs(dtype=dtype), None), (Inputs(dtype=torch.float32), dtype)):
        if cast == torch.float32:
            continue
        with torch.autocast("cpu", cast, enabled=cast is not None):
            _, exact = gradients(inputs, 0, tau=None, schedule="single_pass")
            _, found = gradients(inputs, 0, tau=1e-30)
        for got, want in zip(found, exact, strict=True):
            assert got.dtype == inputs.dtype
            assert_close(got, want.double(), bound, "gradient")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_in_a_graph(any_share, backend):
    torch._dynamo.reset()
    x, weight, target, bias = Inputs().tensors()

    def loss(x, weight, bias):
        call = dict(gradient_sampling=0.2, schedule="sampled", return_gradient_sampling=True)
        out = fused_linear_cross_entropy(x, weight, target, bias=bias, **call)
        return out.loss, out.share_kept

    value, share = torch.compile(loss, fullgraph=True, backend=backend)(x, weight, bias)
    assert 0 < share < 1
    torch.manual_seed(6)
    value, _ = torch.compile(loss, fullgraph=True, backend=backend)(x, weight, bias)
    value.backward()
    _, plain = gradients(Inputs(), 6)
    for got, want in zip((x.grad, weight.grad, bias.grad), plain, strict=True):
        assert_close(got, want, 1e-12, "gradient")


def test_the_variable_counts_as_it_is_when_a_graph_is_traced(any_share, monkeypatch):
    """It is in the graph, and not read while that runs."""
    torch._dynamo.reset()
    x, weight, target, _ = Inputs().tensors()
    monkeypatch.setenv("LIGER_CUTEDSL_GRADIENT_SAMPLING", "0.21875")
    arguments = []

    def backend(graph, _inputs):
        arguments.extend(argument for node in graph.graph.nodes for argument in node.args)
        return graph

    def share(x, weight):
        return fused_linear_cross_entropy(x, weight, target, return_gradient_sampling=True).share_kept

    assert torch.compile(share, fullgraph=True, backend=backend)(x, weight) < 1
    assert 0.21875 in [argument for argument in arguments if isinstance(argument, float)]


def test_calls_do_not_depend_on_those_before(any_share):
    first = gradients(Inputs(), 9)[1]
    gradients(Inputs(tokens=64, peak=9.0), 1, tau=0.7, label_smoothing=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = gradients(Inputs(), 9)[1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_single_pass_has_its_obstacles_here_too():
    """float16 mean with what only the device knows."""
    assert sampled.obstacle.__module__ == sampled.__name__ and single_pass.NAME in liger_cutedsl.route.SCHEDULES
    half = Inputs(dtype=torch.float16)
    assert route_of(half).schedule == "sampled", "the torch engine's dz is float32"


def test_targets_reach_the_kernels_contiguous(monkeypatch):
    """Of two that each token has: a stride that kernels do not know would lose the targets' tiles, in silence."""
    x, weight, target, _ = Inputs().tensors()
    pairs = torch.stack([target, target.flip(0)], dim=1)
    calls = calls_of(monkeypatch, "select_pairs")
    fused_linear_cross_entropy(x, weight, pairs[:, 0], gradient_sampling=0.2, schedule="sampled").backward()
    draws = [call[1] for call in calls["select_pairs"]]
    assert draws and not pairs[:, 0].is_contiguous() and all(draw.target.is_contiguous() for draw in draws)


def test_a_coefficient_without_bound_leaves_the_others_exact():
    x, weight, target, _ = Inputs().tensors()
    classes = torch.ones(len(weight), dtype=torch.float64)
    classes[target[3]] = torch.inf
    call = dict(ce_weight=classes, reduction="sum")
    exact, found = (
        torch.autograd.grad(fused_linear_cross_entropy(x, weight, target, **call, **how), x)[0]
        for how in ({}, dict(gradient_sampling=0.2, schedule="sampled"))
    )
    others = [row for row in range(len(x)) if target[row] != target[3] and target[row] >= 0]
    assert_close(found[others], exact[others], 1e-12, "dX")


def test_float16_has_no_room_for_rare_pairs(monkeypatch):
    half = Inputs(dtype=torch.float16)
    monkeypatch.setattr(TorchEngine, "dz_dtype", lambda engine, dtype: dtype)
    assert route_of(half, gradient_sampling=4.0).schedule == "sampled"
    assert "float16 with gradient_sampling above 4" in route_of(half, gradient_sampling=5.0).reason


@dataclass(frozen=True)
class OnGpu(Inputs):
    tokens: int = 700
    hidden: int = 256
    peak: float = 4.0
    dtype: torch.dtype = torch.bfloat16
    vocab: int = 3000

    def tensors(self, seed: int = 0):
        g = torch.Generator().manual_seed(seed)
        x, weight, bias = (torch.randn(*s, generator=g) for s in ((self.tokens, 256), (self.vocab, 256), (self.vocab,)))
        target = torch.randint(self.vocab, (self.tokens,), generator=g)
        target[: self.ignored] = -100
        weight *= self.peak / 16.0
        leaves = [v.to("cuda", self.dtype).requires_grad_() for v in (x, weight, bias)]
        return leaves[0], leaves[1], target.cuda(), leaves[2] if self.bias else None


GPU_OPTIONS = {
    "plain": (OnGpu(bias=False), {}),
    "bias, ignored": (OnGpu(ignored=5), {}),
    "half ignored": (OnGpu(ignored=350, bias=False), {}),
    "smoothing": (OnGpu(), dict(label_smoothing=0.1)),
    "softcap, z-loss": (OnGpu(bias=False), dict(softcap=20.0, lse_square_scale=1e-3)),
    "float16": (OnGpu(dtype=torch.float16, bias=False), {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_OPTIONS)
def test_kernels_of_all_pairs_find_what_single_pass_finds(any_share, name):
    """Within both results' roundings; in chunks, with the number of pairs known and not known when they are packed."""
    inputs, options = GPU_OPTIONS[name]
    _, exact = gradients(inputs, 0, tau=None, schedule="single_pass", engine="cute", **options)
    with pytest.MonkeyPatch.context() as patch:
        with_room(patch, chunk=256)
        for _ in range(3):
            _, found = gradients(inputs, 0, tau=1e-30, engine="cute", **options)
            for got, want in zip(found, exact, strict=True):
                assert_close(got, want.double(), 3 * torch.finfo(inputs.dtype).eps, "gradient")


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_OPTIONS)
def test_kernels_draws_are_right_in_the_mean(any_share, name):
    """Of 64 draws, whose noise is a hundred times a rounding: the mean's error is that of their number, and each one's
    is what is predicted."""
    inputs, options = GPU_OPTIONS[name]
    _, exact = gradients(inputs, 0, tau=None, schedule="single_pass", engine="cute", **options)
    sums, squares, predicted, n = [0.0] * 3, [0.0] * 3, 0.0, 64
    x, weight, target, bias = inputs.tensors()
    leaves = [v for v in (x, weight, bias) if v is not None]
    call = dict(bias=bias, gradient_sampling=0.1, schedule="sampled", engine="cute", return_gradient_sampling=True)
    with pytest.MonkeyPatch.context() as patch:
        with_room(patch, chunk=256)
        for _ in range(n):
            out = fused_linear_cross_entropy(x, weight, target, **call, **options)
            assert 0 < out.share_kept < 0.9
            predicted += float(out.noise_dw) ** 2 / n
            for i, (got, want) in enumerate(zip(torch.autograd.grad(out.loss, leaves), exact, strict=True)):
                sums[i] = sums[i] + (got.double() - want.double()) / n
                squares[i] += float((got.double() - want.double()).square().sum()) / n
    for i, want in enumerate(exact):
        rounding = float((torch.finfo(inputs.dtype).eps * want.double()).square().sum())
        assert float(sums[i].square().sum()) * n < 2.2 * squares[i] + n * rounding, f"gradient {i}"
    assert 0.7 < predicted * float(exact[1].double().square().sum()) / squares[1] < 1.4

"""Gradients for the upstream gradient that a call is likely to get: what is foretold, and that it changes little."""

import pytest
import torch

from liger_cutedsl import LossOptions, fused_linear_cross_entropy, testing, upstream
from liger_cutedsl.call import Problem, WantedGradients
from liger_cutedsl.engines.torch_engine import TorchEngine
from liger_cutedsl.schedules import kept
from liger_cutedsl.upstream import History
from reference import GRADIENT_BOUND, Case, assert_close, reference


@pytest.fixture(autouse=True)
def _forgotten():
    testing.reset()
    yield
    testing.reset()


def problem(valid):
    return Problem(torch.empty(valid, 8), torch.empty(5, 8), torch.zeros(valid, dtype=torch.int64), dense=True)


def float32(value):
    return torch.tensor(value, dtype=torch.float32)


def test_what_is_foretold():
    share, third = (lambda n: float(float32(1 / n))), float(float32(1 / 3))
    for given, valid, expected in (
        ([], 8188, 1.0),
        ([(8188, share(8188))], 8180, 1.0),  # one may be chance
        ([(8188, share(8188)), (8190, share(8190))], 8180, share(8180)),  # a sum over the number of items
        ([(8188, 8 * share(8188)), (8190, float(float32(8 / 8190)))], 4096, 8 / 4096),  # of eight processes
        ([(8188, third), (8190, third)], 8180, third),  # a weight
        ([(8188, 1.0), (8188, 1.0)], 20, 1.0),
        ([(20, 1.0), (20, 1.0)], 40, 1.0),  # and no 20 of 20 rows
        ([(8188, third), (8188, 1.0)], 8188, 1.0),
        ([(8188, 65536.0 * 1024), (8188, 65536.0 * 1024)], 8188, 1.0),  # out of range for what is kept
        ([(8188, 0.0), (8188, 0.0)], 8188, 1.0),
        ([(8188, float("nan")), (8188, float("nan"))], 8188, 1.0),
        ([(8188, -0.5), (10, 3.0), (11, 3.0)], 12, 3.0),
    ):
        history = History()
        for rows, value in given:
            history.note(rows, float32(value))
        assert history.expected(problem(valid)) == expected, (given, valid)


def test_nothing_is_expected_where_it_would_not_help(monkeypatch):
    wanted = WantedGradients(torch.bfloat16, torch.bfloat16)
    assert upstream.history_of(problem(5), wanted) is not None
    assert upstream.history_of(problem(5), WantedGradients(torch.float16, torch.float16)) is None
    assert upstream.history_of(problem(5), WantedGradients()) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert upstream.history_of(problem(5), wanted) is None


@pytest.mark.parametrize("workspace_mb", [None, 0.01])  # in one chunk, and in several
def test_an_expected_gradient_is_not_scaled_again(place, monkeypatch, workspace_mb):
    """From the third step of a loop that divides a sum by its items, whose number changes."""
    if place.schedule != "auto":
        pytest.skip("only single_pass computes gradients in forward")
    factors = []
    scale = kept.scale_in_place
    monkeypatch.setattr(kept, "scale_in_place", lambda g, factor: factors.append(float(factor)) or scale(g, factor))
    dtype = next(dtype for dtype in place.dtypes if dtype != torch.float16)
    call = dict(place.call, schedule="single_pass", workspace_mb=workspace_mb)
    for index, ignored in enumerate((3, 5, 4, 0, 5)):
        x, weight, target, bias, _ = Case(1100, 32, 400, dtype, place.device, bias=True, ignored=0.0).tensors()
        target[:ignored] = -100
        items, factors[:] = torch.tensor(1100 - ignored, device=place.device), []
        loss = fused_linear_cross_entropy(x, weight, target, bias=bias, reduction="sum", **call) / items
        loss.backward()
        expected = float(torch.ones((), dtype=loss.dtype) / (1100 - ignored))
        assert factors == [expected if index < 2 else 1.0]
        _, grads = reference(x, weight, target, bias, None, LossOptions())  # a mean
        for name, leaf, want in zip(("dx", "dW", "db"), (x, weight, bias), grads, strict=True):
            assert_close(leaf.grad, want, 2 * GRADIENT_BOUND[dtype], name)


def units_apart(a, b):
    """How many representable bf16 numbers lie between two, at most."""
    steps = [v.view(torch.int16).int() for v in (a, b)]
    ordered = [torch.where(v < 0, -32768 - v, v) for v in steps]  # −0 and 0 are one
    return int((ordered[0] - ordered[1]).abs().max())


@pytest.mark.parametrize("workspace_mb", [None, 0.01])
@pytest.mark.parametrize("dz_dtype", [None, torch.bfloat16])
def test_whatever_came_before_a_gradient_is_within_one_unit(monkeypatch, workspace_mb, dz_dtype):
    """Of what a right guess gives, in every element: rounded sums of all chunks but the last are the same bits."""
    monkeypatch.setattr("liger_cutedsl.routing.make_engine", lambda *_: TorchEngine(dz_dtype))
    tensors = Case(2048, 32, 400, torch.bfloat16, bias=True, ignored=0.0).tensors()
    x, weight, target, bias, _ = tensors

    def gradients(divisors):
        testing.reset()
        for divisor in divisors:
            loss = fused_linear_cross_entropy(
                x, weight, target, bias=bias, reduction="sum", schedule="single_pass", workspace_mb=workspace_mb
            )
            found = torch.autograd.grad(loss / divisor, (x, weight, bias))
        return found

    right = gradients([2040.0] * 3)
    guesses = {"none": [2040.0], "one": [1.0] * 3, "weight": [3.7] * 3, "share": [2048.0] * 3}
    different = 0
    for name, before in guesses.items():
        for got, want in zip(gradients([*before, 2040.0]), right, strict=True):
            assert units_apart(got, want) <= 1, name
            different += not torch.equal(got, want)
    assert different, "this can see another rounding"
    with monkeypatch.context() as deterministic:
        deterministic.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        one, other = gradients([2040.0]), gradients([3.7, 3.7, 3.7, 2040.0])
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_kept_graph_gives_the_same_gradients_twice(place):
    """With an upstream gradient that was expected, and another."""
    dtype = place.dtypes[0]
    x, weight, target, *_ = Case(300, 32, 400, dtype, place.device, ignored=0.0).tensors()

    def loss():
        return fused_linear_cross_entropy(x, weight, target, reduction="sum", **place.call)

    for _ in range(3):
        (loss() / 300).backward()
    value = loss()
    first = torch.autograd.grad(value, (x, weight), torch.ones_like(value) / 300, retain_graph=True)
    second = torch.autograd.grad(value, (x, weight), torch.ones_like(value) / 300, retain_graph=True)
    third = torch.autograd.grad(value, (x, weight), torch.ones_like(value) / 7)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert_close(c, b.double() * 300 / 7, 2 * GRADIENT_BOUND[dtype], "another upstream gradient")


@pytest.mark.gpu
def test_the_host_does_not_wait_for_what_it_is_given():
    from test_gpu import waits_of

    x, weight, target, *_ = Case(1024, 64, 5000, torch.bfloat16, "cuda", ignored=0.0).tensors()

    def run():
        (fused_linear_cross_entropy(x, weight, target, reduction="sum", engine="cute") / 1024).backward()

    for _ in range(4):
        run()
    assert len(waits_of(run)) <= 1
    (history,) = upstream._histories.values()
    torch.cuda.synchronize()
    assert history.expected(problem(512)) == float(float32(1 / 512))


def test_a_note_changes_nothing_that_another_thread_reads():
    history = History()
    for value in (1.0, 2.0):
        history.note(4, torch.tensor(value))
    seen = history.notes
    history.note(4, torch.tensor(3.0))
    assert [note.value() for note in seen] == [1.0, 2.0] and [note.value() for note in history.notes] == [2.0, 3.0]

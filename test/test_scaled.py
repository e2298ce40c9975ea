"""Liger-Kernel's scaled cross entropy on our operator, and what others reach through it, on the CPU."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import liger_cutedsl
from liger_cutedsl import routing, testing, torch_compile_log_probs
from liger_cutedsl.liger import drop_in, scaled
from per_token import FLOAT32, error, in_float64, largest_error, peak_of, reference

ops = pytest.importorskip("liger_kernel.ops")
NAME = "LigerFusedLinearScaledCrossEntropyFunction"
HOME = importlib.import_module(scaled.HOME)
EXAMPLES = Path(__file__).parent.parent / "examples"
TOKENS, HIDDEN, VOCAB = 521, 16, 77


@pytest.fixture
def ours(enabled, monkeypatch):
    monkeypatch.setenv("LIGER_CUTEDSL_ENGINE", "torch")
    found = getattr(ops, NAME)
    assert found is scaled.LigerFusedLinearScaledCrossEntropyFunction
    return found


def inputs(dtype=torch.float32, ignored=11, ignore_index=-100):
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(TOKENS, HIDDEN, generator=g), torch.randn(VOCAB, HIDDEN, generator=g)
    target = torch.randint(0, VOCAB, (TOKENS,), generator=g)
    if ignored:
        target[::ignored] = ignore_index
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), target


def expected(x, w, target, ids=None, temperature=0.7, ignore_index=-100):
    """(leaves, nll, entropy, selected) in float64, 0 in ignored rows."""
    leaves, valid = in_float64(x, w), target != ignore_index
    found = reference(*leaves, torch.where(valid, target, 0), temperature=temperature)
    selected = None if ids is None else torch.where(valid[:, None], found.all_log_probs[:, ids], 0.0)
    return leaves, torch.where(valid, -found.log_probs, 0.0), torch.where(valid, found.entropy, 0.0), selected


IDS = torch.tensor([5, 0, 76, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("ids", [None, IDS, IDS[:0]], ids=["", "selected", "none selected"])
def test_results_and_gradients(ours, dtype, entropy, ids):
    """In Liger's order, all float32: Liger's own entropy has the inputs' dtype."""
    x, w, target = inputs(dtype)
    found = ours.apply(x, w, target, 0.7, -100, 2, entropy, *([] if ids is None else [ids]))
    leaves, *want = expected(x, w, target, ids)
    want = [v for v, there in zip(want, (True, entropy, ids is not None), strict=True) if there]
    assert isinstance(found, torch.Tensor) == (len(want) == 1)
    found = (found,) if len(want) == 1 else found
    assert len(found) == len(want)
    loss, loss64 = 0.0, 0.0
    for n, (got, right) in enumerate(zip(found, want, strict=True)):
        assert got.dtype == torch.float32 and got.shape == right.shape and got.requires_grad
        assert not got.numel() or largest_error(got, right) <= FLOAT32 * 40
        upstream = torch.linspace(-0.5, 1.0 + n, got.numel()).view(got.shape)
        loss, loss64 = loss + (got * upstream).sum(), loss64 + (right * upstream).sum()
    loss.backward()
    loss64.backward()
    bound = torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else FLOAT32 * 40
    for leaf, leaf64 in zip((x, w), leaves, strict=True):
        assert leaf.grad.dtype == dtype and error(leaf.grad, leaf64.grad) <= bound


def test_defaults_and_another_ignore_index(ours):
    x, w, target = inputs(ignored=3, ignore_index=5)
    nll = expected(x, w, target, temperature=1.0, ignore_index=5)[1]
    found = ours.apply(x, w, target, 1, 5)
    assert largest_error(found, nll) <= FLOAT32 * 40 and not found[::3].any()
    plain = ours.apply(x, w, torch.where(target == 5, -100, target))
    assert torch.equal(plain, found)


def test_the_entropy_alone_has_a_gradient(ours):
    x, w, target = inputs()
    leaves, _, entropy, _ = expected(x, w, target)
    ours.apply(x, w, target, 0.7, -100, 1, True)[1].sum().backward()
    entropy.sum().backward()
    for leaf, leaf64 in zip((x, w), leaves, strict=True):
        assert error(leaf.grad, leaf64.grad) <= FLOAT32 * 40


def test_autocast(ours):
    x, w, target = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nll, entropy = ours.apply(x, w, target, 0.7, -100, 1, True)
    (nll.sum() + entropy.sum()).backward()
    leaves, nll64, entropy64, _ = expected(x.bfloat16(), w.bfloat16(), target)
    (nll64.sum() + entropy64.sum()).backward()
    assert largest_error(nll, nll64) <= FLOAT32 * 40 and largest_error(entropy, entropy64) <= FLOAT32 * 40
    for leaf, leaf64 in zip((x, w), leaves, strict=True):
        assert leaf.grad.dtype == torch.float32 and error(leaf.grad, leaf64.grad) <= torch.finfo(torch.bfloat16).eps / 2


def test_no_tokens(ours):
    """Which Liger refuses."""
    x, w, _ = inputs()
    nll, entropy = ours.apply(x[:0], w, torch.empty(0, dtype=torch.int64), 0.7, -100, 1, True)
    (nll.sum() + entropy.sum()).backward()
    assert nll.shape == entropy.shape == (0,) and w.grad is not None and not w.grad.any()


WRONG = {
    "m_tiles_per_cluster": [(0, ValueError), (1.0, TypeError), (True, TypeError)],
    "return_entropy": [(1, TypeError), (None, TypeError)],
    "temperature": [(0.0, ValueError), ("1", TypeError), (True, TypeError), (torch.tensor(1.0), TypeError)],
}


@pytest.mark.parametrize("engine", ["torch", ""])
@pytest.mark.parametrize("name,value,error", [(n, *case) for n, cases in WRONG.items() for case in cases])
def test_bad_values_are_refused_by_name(enabled, monkeypatch, engine, name, value, error):
    """With the exceptions that Liger raises."""
    monkeypatch.setenv("LIGER_CUTEDSL_ENGINE", engine)
    x, w, target = inputs()
    arguments = dict(temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False) | {name: value}
    with pytest.raises(error, match=name):
        getattr(ops, NAME).apply(x, w, target, *arguments.values())


def test_targets_out_of_range_are_refused(ours):
    x, w, target = inputs()
    target[3] = VOCAB
    with pytest.raises(ValueError, match="target"):
        ours.apply(x, w, target)


def test_compiled_it_is_one_graph(ours):
    x, w, target = inputs()

    def head(x, w, target):
        nll, entropy, selected = ours.apply(torch.tanh(x), w, target, 0.7, -100, 1, True, IDS)
        return nll.sum() + 0.5 * entropy.sum() + selected.sum()

    torch._dynamo.reset()
    loss = torch.compile(head, fullgraph=True)(x, w, target)
    loss.backward()
    (x64, w64), valid = in_float64(x, w), target != -100
    found = reference(torch.tanh(x64), w64, torch.where(valid, target, 0), temperature=0.7)
    want = (valid * (0.5 * found.entropy - found.log_probs)).sum() + (
        found.all_log_probs[:, IDS] * valid[:, None]
    ).sum()
    want.backward()
    assert error(loss, want) <= FLOAT32
    assert error(x.grad, x64.grad) <= FLOAT32 * 40 and error(w.grad, w64.grad) <= FLOAT32 * 40


# Who runs


def test_a_cpu_call_is_ligers_own(enabled, caplog):
    drop_in.forget_notes()
    x, w, target = inputs()
    with caplog.at_level("INFO", logger="liger_cutedsl"):
        for _ in range(2):
            nll, _ = getattr(ops, NAME).apply(x, w, target, 0.7, -100, 1, True)
    assert type(nll.grad_fn).__name__ == "_FusedLinearPPOFallbackFunctionBackward"
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(NAME) and "cpu tensors" in said


def test_what_liger_refuses_runs_on_ours(enabled):
    """int32 targets, and no tokens at all, without an engine that is asked for."""
    x, w, target = inputs()
    found = getattr(ops, NAME).apply(x, w, target.int(), 0.7)
    assert largest_error(found, expected(x, w, target)[1]) <= FLOAT32 * 40
    assert getattr(ops, NAME).apply(x[:0], w, target[:0]).shape == (0,)


def hopper(monkeypatch):
    """As on a Hopper GPU: what Liger runs there, and its CuTe engine for ours."""
    monkeypatch.setattr(scaled, "_on_hopper", lambda device: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_hopper_ours_runs_what_ligers_kernel_refuses(enabled, monkeypatch, dtype):
    hopper(monkeypatch)
    x, w, target = inputs(dtype)
    found = getattr(ops, NAME).apply(x, w, target, 0.7)
    assert type(found.grad_fn).__name__ == "NegBackward0", "of our log-probabilities"
    assert largest_error(found, expected(x, w, target)[1]) <= FLOAT32 * 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_hopper_ours_runs_where_the_kernels_do(enabled, monkeypatch, dtype):
    """bfloat16, and float32 under autocast, which Liger's kernel refuses."""
    hopper(monkeypatch)
    monkeypatch.setattr(HOME, "_resolve_implementation", lambda device: pytest.fail("ours was to run"))
    x, w, target = inputs(dtype)
    with testing.planted_kernel_failure("backward"), torch.autocast("cpu", dtype=torch.bfloat16):
        found = getattr(ops, NAME).apply(x, w, target, 0.7)
    assert largest_error(found, expected(x.bfloat16(), w.bfloat16(), target)[1]) <= FLOAT32 * 40


@pytest.mark.parametrize("ignored, plans", [(0, 1), (200, 1), (3, 2)])
def test_a_call_is_planned_once(enabled, monkeypatch, ignored, plans):
    """And again where rows are dropped: a call of fewer rows."""
    hopper(monkeypatch)
    x, w, target = inputs(torch.bfloat16, ignored=ignored)
    counted = mock.patch.object(routing, "_known_plan", wraps=routing._known_plan)
    with testing.planted_kernel_failure("backward"), counted as plan:
        getattr(ops, NAME).apply(x, w, target, 0.7)
    assert plan.call_count == plans


@pytest.mark.parametrize("frozen", [False, True])
def test_compiled_the_workspace_is_ligers_too(ours, monkeypatch, frozen):
    """And targets are read: some may be ignored."""
    monkeypatch.setattr(scaled, "original_bytes", lambda problem, original, wanted=None: budget_of(problem, wanted))

    def budget_of(problem, wanted):
        wanted = scaled.WantedGradients.of(problem) if wanted is None else wanted
        return (50 + 100 * (wanted.weight is None)) * 2**20 + problem.tokens

    x, w, target = inputs()
    w.requires_grad_(not frozen)
    torch._dynamo.reset()
    compiled = torch.compile(lambda: ours.apply(x, w, target, 0.7).sum(), fullgraph=True, backend="aot_eager")
    with mock.patch.object(torch_compile_log_probs, "begun", wraps=torch_compile_log_probs.begun) as begun:
        compiled().backward()
    with mock.patch.object(scaled, "run", wraps=scaled.run) as run:
        ours.apply(x, w, target, 0.7)
    eager = run.call_args.args[1]
    assert [call.args[2] for call in begun.call_args_list] == [eager] * 2
    assert int(eager.workspace_mb) == (150 if frozen else 50)
    assert not any(call.args[1].dense for call in begun.call_args_list)


class Older:
    """0.8.4's class, which knows no selected_token_ids."""

    __module__ = scaled.HOME
    calls = ()

    @staticmethod
    def apply(_input, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False):
        Older.calls += ((temperature, ignore_index, m_tiles_per_cluster, return_entropy),)
        return "theirs"


def test_the_signature_without_selected_token_ids(enabled, monkeypatch):
    """liger-kernel 0.8.4: such a call reaches it without the argument; one that has some is ours."""
    monkeypatch.setattr(HOME, NAME, Older)
    drop_in.forget_originals()
    x, w, target = inputs()
    assert getattr(ops, NAME).apply(x, w, target, 0.7, -1, 3, True) == "theirs"
    assert Older.calls == ((0.7, -1, 3, True),)
    nll, selected = getattr(ops, NAME).apply(x, w, target, 0.7, -100, 1, False, IDS)
    _, nll64, _, selected64 = expected(x, w, target, IDS)
    assert largest_error(nll, nll64) <= FLOAT32 * 40 and largest_error(selected, selected64) <= FLOAT32 * 40
    assert len(Older.calls) == 1


def test_what_enable_found_is_what_falls_back(monkeypatch):
    """LIGER_KERNEL_IMPL=cutile puts another class there than the one that Liger's module defines."""
    cutile = type("Cutile", (Older,), {"__module__": "liger_kernel.ops.cutile.ops.fused_linear_scaled_cross_entropy"})
    monkeypatch.setattr(ops, NAME, cutile)
    liger_cutedsl.enable()
    try:
        x, w, target = inputs()
        assert getattr(ops, NAME) is scaled.LigerFusedLinearScaledCrossEntropyFunction
        assert getattr(ops, NAME).apply(x, w, target) == "theirs"
    finally:
        liger_cutedsl.disable()
    assert getattr(ops, NAME) is cutile


@pytest.mark.parametrize("trained", ["both", "input", "neither"])
def test_the_budget_is_what_liger_takes(trained):
    """Of the peak of its chunks of plain PyTorch, beside results and gradients, and never more."""
    x = torch.randn(600, 64, requires_grad=trained != "neither")
    w = torch.randn(2000, 64, requires_grad=trained == "both")
    target, theirs = torch.randint(0, 2000, (600,)), HOME.LigerFusedLinearScaledCrossEntropyFunction

    def call():
        nll = theirs.apply(x, w, target, 0.7)
        return torch.autograd.grad(nll.sum(), [t for t in (x, w) if t.requires_grad]) if x.requires_grad else nll

    call()
    problem = scaled.Problem(x, w, target, options=scaled.LogProbOptions())
    budget = scaled.original_bytes(problem, theirs)
    results = sum(t.numel() * 4 for t in (x, w) if t.requires_grad)
    assert 4 * 3 * 512 * 2000 <= budget <= peak_of(call) - results


def test_the_budget_on_hopper(monkeypatch):
    """A wave of dz, and the weight's gradient, which Liger's kernel computes for a frozen weight too."""
    hopper(monkeypatch)
    theirs, options = HOME.LigerFusedLinearScaledCrossEntropyFunction, scaled.LogProbOptions()
    x, target = torch.empty(300, 128, dtype=torch.bfloat16, requires_grad=True), torch.zeros(300, dtype=torch.int64)
    w = torch.empty(1000, 128, dtype=torch.bfloat16, requires_grad=True)
    dz, dw = 2 * 384 * 1000, 2 * 1000 * 128
    assert scaled.original_bytes(scaled.Problem(x, w, target, options=options), theirs) == dz
    assert scaled.original_bytes(scaled.Problem(x, w.detach(), target, options=options), theirs) == dz + dw
    x, w = torch.empty(300, 70, dtype=torch.bfloat16), torch.empty(1001, 70, dtype=torch.bfloat16, requires_grad=True)
    copies = 2 * 128 * (300 + 1008)
    frozen_x = 2 * 300 * 128
    assert (
        scaled.original_bytes(scaled.Problem(x, w, target, options=options), theirs)
        == 2 * 384 * 1008 + copies + frozen_x
    )


# enable(), the variable, Liger's own tests, verl


def test_every_alias_is_rebound():
    import types

    theirs = getattr(ops, NAME)
    tp = f"{NAME.removesuffix('Function')}TPFunction"
    functional = importlib.import_module("liger_kernel.transformers.functional")
    user = types.ModuleType("somebodys_policy")
    user._LIGER_FUNCTION = theirs
    sys.modules[user.__name__] = user
    try:
        liger_cutedsl.enable()
        assert user._LIGER_FUNCTION is getattr(ops, NAME) is scaled.LigerFusedLinearScaledCrossEntropyFunction
        assert getattr(functional, tp) is getattr(ops, tp) is scaled.LigerFusedLinearScaledCrossEntropyTPFunction
        assert getattr(HOME, NAME) is theirs
    finally:
        liger_cutedsl.disable()
        del sys.modules[user.__name__]
    assert user._LIGER_FUNCTION is getattr(ops, NAME) is theirs
    assert getattr(functional, tp) is getattr(HOME, tp)


def test_signatures_are_ligers():
    for name in (NAME, f"{NAME.removesuffix('Function')}TPFunction"):
        theirs = inspect.signature(getattr(HOME, name).apply).parameters
        mine = inspect.signature(getattr(scaled, name).apply).parameters
        assert list(mine)[: len(theirs)] == list(theirs)
        assert [p.default for p in mine.values()][: len(theirs)] == [p.default for p in theirs.values()]


def test_ligers_second_dispatcher_does_not_have_it():
    """Where a later version registers it there, ours has to be registered too."""
    registry = importlib.import_module("liger_kernel.backends.registry")
    importlib.import_module("liger_kernel.functional")
    assert not [op for op in registry._DISCOVERY_MAP if "scaled" in op]


@pytest.mark.parametrize("way", ["variable", "enable"])
@pytest.mark.slow
def test_ligers_own_tests(way, tmp_path):
    """The behavioural ones of its file, on what liger_kernel.ops gives: its file itself takes the class from the module
    that defines it."""
    from liger_cutedsl.versions import installed

    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary=:all:"]
    download += ["-d", str(tmp_path), f"liger-kernel=={installed('liger-kernel')}"]
    if subprocess.run(download, capture_output=True).returncode:
        pytest.skip("Liger-Kernel's sources, which hold its tests, cannot be downloaded")
    (archive,) = tmp_path.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(tmp_path)], check=True)
    (file,) = tmp_path.glob("*/test/transformers/test_fused_linear_scaled_cross_entropy.py")
    (tmp_path / "through_ops.py").write_text(
        "import liger_cutedsl, liger_kernel.ops\n"
        + "liger_cutedsl.enable()\n" * (way == "enable")
        + "from liger_cutedsl.liger.scaled import LigerFusedLinearScaledCrossEntropyFunction as ours\n"
        "assert liger_kernel.ops.LigerFusedLinearScaledCrossEntropyFunction is ours\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        item.module._FRONTEND = liger_kernel.ops\n"
    )
    environment = {**os.environ, "LIGER_CUTEDSL_ENGINE": "torch", "PYTHONPATH": str(tmp_path)}
    environment |= dict(LIGER_KERNEL_IMPL="cutedsl") if way == "variable" else {}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "through_ops", "-c", os.devnull, str(file)]
    tests += ["-k", "frontend_fallback"]
    done = subprocess.run(tests, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout[-3000:]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("verl_ppo_head", EXAMPLES / "verl_ppo_head.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def verl(example, tmp_path):
    try:
        file = example.verl_file(tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip("verl's wheel cannot be downloaded, and verl is not installed")
    yield example.load(file)
    sys.modules.pop("verl_torch_functional", None)


@pytest.mark.parametrize("shape", [(521,), (4, 32)])
def test_verls_head(verl, shape, monkeypatch):
    """Its Liger backend on our operator, against its own backend in plain PyTorch, and float64."""
    theirs = verl._LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY
    monkeypatch.setenv("LIGER_CUTEDSL_ENGINE", "torch")
    liger_cutedsl.enable()
    try:
        assert verl._LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY is scaled.LigerFusedLinearScaledCrossEntropyFunction
        g = torch.Generator().manual_seed(0)
        hidden, tokens = torch.randn(*shape, HIDDEN, generator=g), torch.randint(0, VOCAB, shape, generator=g)
        found = {}
        for backend in ("liger", "torch"):
            x, w = hidden.clone().requires_grad_(), inputs()[1]
            log_probs, entropy = verl.FusedLinearForPPO(impl_backend=backend)(x, w, tokens, temperature=0.9)
            assert log_probs.shape == entropy.shape == shape
            (log_probs.sum() + 0.5 * entropy.sum()).backward()
            found[backend] = (log_probs, entropy, x.grad, w.grad)
    finally:
        liger_cutedsl.disable()
    assert verl._LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY is theirs
    x64, w64 = in_float64(hidden.view(-1, HIDDEN), inputs()[1])
    want = reference(x64, w64, tokens.view(-1), temperature=0.9)
    (want.log_probs.sum() + 0.5 * want.entropy.sum()).backward()
    for backend in found:
        for got, right in zip(found[backend], (want.log_probs, want.entropy, x64.grad, w64.grad), strict=True):
            assert error(got.flatten(), right.flatten()) <= FLOAT32 * 40, backend

"""What shows a user that it runs: the line of log of the first call, Route's repr, --version and --check."""

import logging
import re
import sys
import types

import pytest
import torch

import liger_cutedsl
from liger_cutedsl import __main__, explain, first_call, fused_linear_cross_entropy, self_check, testing
from liger_cutedsl.call import Problem
from liger_cutedsl.route import Route


@pytest.fixture
def log(caplog):
    """What the package logs at INFO in a process that has made no call."""
    testing.reset()
    with caplog.at_level(logging.INFO, "liger_cutedsl"):
        yield lambda: [r.getMessage() for r in caplog.records if r.name == "liger_cutedsl"]
    testing.reset()


def inputs(tokens=300, vocab=5000):
    x, weight = (torch.randn(n, 16, requires_grad=True) for n in (tokens, vocab))
    return x, weight, torch.arange(tokens)


def test_one_line_of_the_first_call(log):
    x, weight, target = inputs(1500)
    fused_linear_cross_entropy(x, weight, target, schedule="single_pass", workspace_mb=16)
    fused_linear_cross_entropy(x, weight, target)
    (line,) = log()
    route = explain(x, weight, schedule="single_pass", workspace_mb=16)
    assert 0 < route.chunk < 1500 and line.startswith(f"{route}; in place of nothing: called by its own name; ")
    # float32: 4 bytes
    whole, held = (1500 * 5000 * 4 / 2**20, route.chunk * 5000 * 4 / 2**20)
    expected = f"{whole:.4g} MiB of logits (1500 x 5000, float32) not stored, {held:.4g} MiB of exponentials at a time"
    assert line.endswith(expected)


def test_no_line_where_nobody_reads_the_log_and_the_next_call_says_it(log, caplog):
    caplog.set_level(logging.WARNING, "liger_cutedsl")
    fused_linear_cross_entropy(*inputs())
    assert not log()
    caplog.set_level(logging.INFO, "liger_cutedsl")
    with torch.no_grad():
        fused_linear_cross_entropy(*inputs(0))  # says nothing of calls to come
        assert not log()
        fused_linear_cross_entropy(*inputs())
    assert len(log()) == 1


def test_it_names_what_is_replaced(log, enabled):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    x, weight, target = inputs()
    liger_fused_linear_cross_entropy(x, weight, target)
    (line,) = log()
    assert "; in place of liger_kernel.ops.LigerFusedLinearCrossEntropyFunction" in line
    liger_cutedsl.disable()
    assert first_call.replaced() == []


def test_what_is_replaced_is_what_the_modules_say(monkeypatch):
    ours, theirs = type("F", (), {"__module__": "liger_cutedsl.liger.trl"}), type("F", (), {"__module__": "trl.x"})
    for value, found in ((ours, ["trl.kernels.ChunkedLogProbFunction"]), (theirs, [])):
        monkeypatch.setitem(sys.modules, "trl.kernels", types.SimpleNamespace(ChunkedLogProbFunction=value))
        assert first_call.replaced() == found


@pytest.mark.parametrize(
    "route,with_gradients,stored",
    [
        (dict(engine="cute", schedule="single_pass", chunk=2048), True, 2048 * 32000),
        (dict(engine="cute", schedule="single_pass", chunk=9000), True, 8192 * 32000),
        (dict(engine="cute", schedule="recompute", tile_width=4096, kept=0), True, 8192 * 4096),
        (dict(engine="cute", schedule="recompute", tile_width=4096, kept=9000), True, 8192 * 9000),
        (dict(engine="cute", schedule="recompute", tile_width=4096), False, 0),
        (dict(engine="torch", schedule="recompute", tile_width=40960), False, 8192 * 32000),
        (dict(engine="torch", schedule="recompute", tile_width=7296, chunk=4096), False, 4096 * 7296),
        (dict(engine="cute", schedule="recompute", tile_width=7296, chunk=4096), False, 0),
    ],
)
def test_what_is_stored_at_a_time(route, with_gradients, stored):
    made = Route(dtype=torch.bfloat16, reason="", **route)
    problem = Problem(torch.empty(8192, 8), torch.empty(32000, 8), torch.zeros(8192, dtype=torch.int64))
    assert first_call.stored_at_a_time(made, problem, with_gradients) == stored


def test_a_compiled_call_says_it_when_it_runs(log):
    """Not when it is traced."""
    x, weight, target = inputs()
    compiled = torch.compile(fused_linear_cross_entropy, backend="aot_eager", fullgraph=True)
    compiled(x, weight, target).backward()
    compiled(x, weight, target)
    (line,) = log()
    assert "(300 x 5000, float32) not stored" in line


def test_a_kernel_that_failed_is_not_what_ran(log):
    with testing.planted_kernel_failure(on_cpu=True):
        fused_linear_cross_entropy(*inputs())
    (line,) = log()
    assert line.startswith("torch / ")


def test_a_route_reads_as_a_sentence():
    route = explain(*inputs())
    assert repr(route) == f"<Route {route}>" and repr([route]) == f"[<Route {route}>]"
    assert "GEMMs" in repr(route) and "tile_width=" not in repr(route)


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        __main__.main(["--version"])
    assert done.value.code == 0 and capsys.readouterr().out == f"liger-cutedsl {liger_cutedsl.__version__}\n"


@pytest.mark.parametrize("sampling", ["", "0.3"])
def test_check(monkeypatch, capsys, sampling):
    """The noise of a sample, where the environment asks for one, is no error."""
    pytest.importorskip("liger_kernel")
    monkeypatch.setenv("LIGER_CUTEDSL_GRADIENT_SAMPLING", sampling)
    assert __main__.main(["--check"]) == 0
    printed = capsys.readouterr().out
    assert "answered by liger_cutedsl.api.LigerFusedLinearCrossEntropyFunction" in printed
    assert printed.count("    ok: loss off by ") == 2 and "WRONG" not in printed
    assert first_call.replaced() == [], "enable() is undone"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda *a: fused_linear_cross_entropy(*a) + 0.01,
        lambda *a: 1e-3 * fused_linear_cross_entropy(*a) + 0.999 * fused_linear_cross_entropy(*a).detach(),
        lambda *a: fused_linear_cross_entropy(*a) * torch.nan,
    ],
    ids=["loss", "gradients", "NaN"],
)
def test_check_notices_wrong_numbers(monkeypatch, capsys, wrong):
    monkeypatch.setattr(self_check, "fused_linear_cross_entropy", wrong)
    assert __main__.main(["--check"]) == 1 and capsys.readouterr().out.count("WRONG: loss off by ") == 1


def test_check_notices_another_class(monkeypatch, capsys):
    functional = pytest.importorskip("liger_kernel.transformers.functional")
    monkeypatch.setattr(self_check, "enable", lambda: None)
    assert __main__.main(["--check"]) == 1
    # Liger's own class answers: on a CPU Triton cannot run, and the reason is given
    assert re.search(r"answered by liger_kernel\.ops\.\S+\n    WRONG: ", capsys.readouterr().out)
    ours = liger_cutedsl.LigerFusedLinearCrossEntropyFunction
    theirs = type(self_check.CLASS, (ours,), {"__module__": "liger_kernel.ops"})  # right numbers, and not ours
    monkeypatch.setattr(functional, self_check.CLASS, theirs)
    assert __main__.main(["--check"]) == 1
    assert re.search(r"WRONG: loss off by \S+ of it, .*; not by this package", capsys.readouterr().out)


@pytest.mark.parametrize("variable, value", [("ENGINE", "cute"), ("ENGINE", "cutlass"), ("SCHEDULE", "two_pass")])
@pytest.mark.parametrize("command", [["--check"], []])
def test_what_the_environment_asks_for_and_cannot_be_is_said(monkeypatch, capsys, variable, value, command):
    monkeypatch.setenv(f"LIGER_CUTEDSL_{variable}", value)
    status = __main__.main(command)
    assert status == (1 if command else 0)
    assert value in capsys.readouterr().out


def test_check_without_liger(monkeypatch, capsys):
    monkeypatch.setattr(self_check, "installed", lambda package: None)
    assert __main__.main(["--check"]) == 0
    assert "liger-kernel is not installed" in capsys.readouterr().out

"""The benchmark: its harness on a CPU, its JSON, and that README and docs/figures.md show what it says."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmark import plots, report, roofline  # noqa: E402
from benchmark.__main__ import main  # noqa: E402
from benchmark.measure import relative_error  # noqa: E402
from benchmark.names import NAMES  # noqa: E402
from benchmark.records import H200, RESULTS, X2, read  # noqa: E402
from benchmark.sweeps import REFERENCE  # noqa: E402

measured = pytest.mark.skipif(not H200.exists(), reason="no committed results")


def test_cpu_run_writes_rows_and_resumes(tmp_path, capsys):
    path = tmp_path / "cpu.json"
    assert main(["--cpu", "--out", str(path)]) == 0
    rows = read(path)
    assert rows[0]["kind"] == "environment" and rows[0]["versions"]["torch"] != "not installed"
    times = {(r["label"], r["implementation"]): r for r in rows if r["kind"] == "time"}
    ours = times["forward + backward", "single_pass"]
    assert ours["ms"] > 0 and ours["least_ms"] <= ours["ms"] <= ours["greatest_ms"]
    floor = times["forward + backward", "floor"]
    assert floor["to_floor"] == 1.0 and ours["to_floor"] == pytest.approx(ours["ms"] / floor["ms"], rel=1e-3)
    assert ours["dx_error"] < 64 * torch.finfo(torch.float32).eps, "a sample of dX against float64"
    assert floor["dx_error"] is None and times["forward", "recompute"]["dx_error"] is None
    assert times["forward + backward", "liger-triton"]["skipped"], "Triton does not run on a CPU: a reason is given"
    errors = {(r["distribution"], r["implementation"]): r for r in rows if r["kind"] == "accuracy"}
    assert errors["std 1", "recompute"]["dx"] < 5e-3  # bf16 inputs, one rounding of the gradient
    assert "single_pass" in capsys.readouterr().out
    assert main(["--cpu", "--out", str(path)]) == 0
    again = read(path)
    assert len([r for r in again if r["kind"] == "time"]) == len(times), "rows that were there are not measured again"


def test_a_gpu_run_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--quick"]) == 2
    assert "--cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    "module,variables,says",
    [
        ("experiments", {}, "needs an NVIDIA GPU"),
        ("blocks", {}, "needs an NVIDIA GPU"),
        ("vocab_parallel", {}, "torchrun --nproc-per-node 2 -m benchmark.vocab_parallel"),
        (
            "vocab_parallel",
            {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"},
            "an NVIDIA GPU of its own, and here are 0",
        ),
    ],
)
def test_what_needs_gpus_or_torchrun_says_so_at_once(module, variables, says):
    clean = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", f"benchmark.{module}"]
    environment = {**clean, **variables, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.splitlines()) == 1 and not done.stdout


def test_experiments_compute_the_same_gradients():
    """Those that run on a CPU; the rest says why it does not."""
    from benchmark import experiments
    from benchmark.measure import Shape, measure

    rows = measure(experiments.experiments(), Shape(1500, 400, 16, torch.float32), 1, "cpu")
    for name, row in rows.items():
        if name.startswith(("two streams", "parallel", "dW reduce-add", "dX of exponentials")):
            assert row.skipped, name
        elif name != "floor":
            assert row.dx_error < 64 * torch.finfo(torch.float32).eps, name


class _NoStream:
    """In place of a CUDA stream: everything runs in its turn."""

    def wait_stream(self, other):
        pass


@pytest.mark.parametrize("name", ["two streams, chunks of 128", "parallel gradients"])
def test_an_experiments_step_runs_within_the_schedule(monkeypatch, name):
    """What the experiments with streams compute, on a CPU: three chunks, with exponentials in two buffers."""
    from benchmark import experiments

    monkeypatch.setattr(torch.cuda, "Stream", _NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", _NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    found = (experiments.with_two_streams(128), experiments.with_parallel_gradients())
    (experiment,) = (e for e in found if e.name == name)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (300, 500))
    target = torch.randint(0, 500, (300,), generator=generator)
    run, bound = experiment.make(), 64 * torch.finfo(torch.float32).eps
    for _ in range(2):
        loss = run(x, weight, target)
        expected = torch.nn.functional.cross_entropy(x.double() @ weight.double().T, target)
        grads = torch.autograd.grad(expected, (x, weight))
        for got, want in zip((loss, x.grad, weight.grad), (expected, *grads), strict=True):
            assert relative_error(got, want.double()) < bound


@measured
def test_documents_show_the_committed_results():
    for path, text in report.documents(read(H200)).items():
        assert text == path.read_text(), f"{path.name}: run `python -m benchmark report`"


@measured
def test_a_changed_result_changes_the_documents():
    rows = read(H200)
    shown = report.documents(rows)
    for row in rows:
        if (row.get("sweep"), row.get("label"), row.get("implementation")) == (
            "reference",
            "forward + backward",
            "single_pass",
        ):
            row["ms"] = 99.9
    changed = report.documents(rows)
    assert all("99.9" in changed[path] and changed[path] != shown[path] for path in (report.README, report.FIGURES))


@measured
def test_every_result_that_was_measured_is_shown():
    """Each sweep of each file by its labels, and every implementation by its name."""
    figures = report.FIGURES.read_text()
    for path in sorted(RESULTS.glob("*.json")):
        for row in (r for r in read(path) if r["kind"] == "time" and r["ms"] is not None and r["sweep"] != "repeat"):
            name = row["implementation"].removesuffix("-softcap")
            assert row["label"] in figures, (path.name, row["label"])
            option = row["sweep"] == "options" and "-" in name
            assert option or NAMES[name] in figures, (path.name, name)


@measured
def test_plots_are_drawn_of_the_committed_results(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = plots.draw(read(H200), tmp_path)
    # training.png is drawn of other results: test_sampling_study.py
    assert {path.name for path in drawn} == {path.name for path in RESULTS.glob("*.png")} - {"training.png"}
    assert all(path.stat().st_size > 10_000 for path in drawn)


def test_memory_beyond_inputs_and_gradients_is_above_the_floors():
    def row(name, peak, label="a"):
        return {"sweep": "s", "label": label, "implementation": name, "peak_mb": peak}

    rows = [row("floor", 10.0), row("torch", 35.0), row("floor", 20.0, "b"), row("torch", 50.0, "b")]
    assert [plots.extra_mb(rows, r) for r in rows] == [0.0, 25.0, 0.0, 30.0]


@measured
def test_two_measurements_of_the_reference_row_agree():
    """Within 5% in their ratio to the floor: the first shape of the run, and the same at its other end."""
    rows = [r for r in read(H200) if r["kind"] == "time" and r["label"] == "forward + backward"]
    first, again = (
        {r["implementation"]: r["to_floor"] for r in rows if r["sweep"] == sweep and r["ms"]}
        for sweep in ("reference", "repeat")
    )
    assert len(again) > 5
    for name, ratio in again.items():
        assert ratio == pytest.approx(first[name], rel=0.05), name


@measured
def test_roofline_agrees_with_the_measurements():
    """Within a fifth: the model knows operations and bytes, not how a small head fills the machine."""
    errors = roofline.check(read(H200))
    assert len(errors) > 20
    large = [error for _, _, _, ms, error in errors if ms > 5]
    assert max(map(abs, large)) < 0.2


def test_roofline_orders_the_schedules():
    for gpu in roofline.GPUS.values():
        times = [roofline.predict(s, REFERENCE, gpu)[0] for s in ("forward", "floor", "single_pass", "recompute")]
        assert times == sorted(times)


def test_missing_markers_are_reported():
    with pytest.raises(ValueError, match=r"x\.md needs one pair of markers for 'environment', it has 0"):
        report.filled("no markers", {"environment": "text"}, "x.md")


@measured
def test_results_are_json_lines_with_a_command():
    for line in (H200.read_text() + X2.read_text()).splitlines():
        json.loads(line)
    assert "torchrun" in read(X2)[0]["command"]
    assert any("python -m benchmark" in r.get("command", "") for r in read(H200))


def test_whole_steps_of_a_tiny_model(tmp_path, capsys):
    """Each way in its own process. On a CPU Liger's own loss does not run, and the reason is given."""
    pytest.importorskip("transformers")
    pytest.importorskip("liger_kernel")
    path = tmp_path / "steps.json"
    assert main(["steps", "--cpu", "--out", str(path)]) == 0
    rows = {row["way"]: row for row in read(path) if row["kind"] == "step"}
    assert list(rows) == ["plain", "liger", "enable", "variable"]
    assert rows["liger"]["skipped"]
    for way in ("enable", "variable"):
        row = rows[way]
        assert not row["skipped"], row
        # float32 rounding of the loss, which AdamW's steps of 1e-5 carry on
        assert row["losses"] == pytest.approx(rows["plain"]["losses"], rel=1e-4)
        assert row["ms"] > row["head_ms"] > 0 and row["head_share"] == pytest.approx(
            row["head_ms"] / row["ms"], abs=1e-3
        )
        assert row["tokens_a_second"] == pytest.approx(48e3 / row["ms"], rel=1e-2)
    shown = capsys.readouterr().out
    assert "| tiny | variable |" in shown and "| tiny | liger | – (" in shown

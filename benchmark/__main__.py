"""python -m benchmark: measures every implementation that is installed, one JSON line a row, and reports.

python -m benchmark                 every sweep, into benchmark/results/<gpu>.json; resumes where it stopped
python -m benchmark --quick         one shape, under two minutes        --cpu    the harness without a GPU
python -m benchmark report          writes README's table, docs/figures.md and the plots from the committed results
python -m benchmark steps           whole training steps of Hugging Face models    (--model NAME, --cpu, --out)
python -m benchmark density         what sampled gradients keep and lose on SmolLM2's logits    (--cpu, --out, --folder)
python -m benchmark train           SmolLM2 trained with them  (--cpu, --out, --folder, --steps, --seconds, --workers)
python -m benchmark kernels         where a call's time goes, by kernel and on the host    (--model NAME)
python -m benchmark roofline        predicted times, checked against the measured ones
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from benchmark import density, kernels, report, roofline, smollm2, steps, train
from benchmark.implementations import IMPLEMENTATIONS
from benchmark.measure import DISTRIBUTIONS, gradient_errors, measure
from benchmark.per_token import PER_TOKEN, per_token_errors
from benchmark.records import RESULTS, environment, read, slug
from benchmark.row_loss import ROW_LOSS, row_loss_errors
from benchmark.sweeps import HEADS, Measurement, cpu_sweeps, gpu_sweeps, quick_sweeps

COMMANDS = ("run", "report", "kernels", "roofline", "steps", "density", "train")
ACCURACY = ("recompute", "single_pass", "liger-triton", "quack-base", "quack-exp-2048", "cce", "torch")


def rows_of(measurement: Measurement, device: str):
    """JSON-ready rows of one shape, ratios to its floor included."""
    shape = measurement.shape
    chosen = [(IMPLEMENTATIONS | PER_TOKEN | ROW_LOSS)[name] for name in measurement.implementations]
    measured = measure(chosen, shape, measurement.rounds, device)
    floor = measured["floor"].ms if "floor" in measured else float("nan")
    for name, row in measured.items():
        yield {
            "kind": "time",
            "sweep": measurement.sweep,
            "label": measurement.label,
            "implementation": name,
            "tokens": shape.tokens,
            "vocab": shape.vocab,
            "hidden": shape.hidden,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "forward_only": shape.forward_only,
            "frozen_weight": shape.frozen_weight,
            "ignored": shape.ignored,
            "ms": _finite(row.ms),
            "least_ms": _finite(row.spread_ms[0]),
            "greatest_ms": _finite(row.spread_ms[1]),
            "to_floor": _finite(row.ms / floor),
            "peak_mb": _finite(row.peak_mb),
            "first_calls_s": _finite(row.compile_s),
            "dx_error": None if math.isnan(row.dx_error) else float(f"{row.dx_error:.3g}"),
            "skipped": row.skipped,
        }


def accuracy_rows(device: str, **sizes):
    for distribution in DISTRIBUTIONS:
        for name in ACCURACY:
            row = {"kind": "accuracy", "distribution": distribution, "implementation": name, "skipped": ""}
            try:
                row.update(gradient_errors(IMPLEMENTATIONS[name], distribution, device, **sizes))
            except Exception as error:
                row["skipped"] = f"{type(error).__name__}: {error}"[:200]
            yield row


def per_token_accuracy_rows(device: str, **sizes):
    for kind, names, errors in (
        ("per-token accuracy", PER_TOKEN, per_token_errors),
        ("row-loss accuracy", ROW_LOSS, row_loss_errors),
    ):
        for distribution, name in itertools.product(("std 1", "std 5"), names):
            row = {"kind": kind, "distribution": distribution, "implementation": name, "skipped": ""}
            try:
                row.update(errors(name, distribution, device, **sizes))
            except Exception as error:
                row["skipped"] = f"{type(error).__name__}: {error}"[:200]
            yield row


def _finite(value: float):
    return round(value, 4) if math.isfinite(value) else None


def run(chosen) -> int:
    device = "cpu" if chosen.cpu else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("python -m benchmark needs an NVIDIA GPU; --cpu runs the harness without one", file=sys.stderr)
        return 2
    sweeps = cpu_sweeps() if chosen.cpu else quick_sweeps() if chosen.quick else gpu_sweeps()
    if chosen.sweep:
        sweeps = [m for m in sweeps if m.sweep in chosen.sweep]
    path = Path(chosen.out) if chosen.out else RESULTS / f"{slug(device, chosen.quick)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["sweep"], r["label"]) for r in read(path) if r["kind"] == "time"} if path.exists() else set()
    with path.open("a") as out:
        words = [f"--{name}" for name in ("quick", "cpu") if getattr(chosen, name)]
        words += [f"--sweep {sweep}" for sweep in chosen.sweep or ()]
        out.write(json.dumps(environment(device, " ".join(["python -m benchmark", *words]))) + "\n")
        for measurement in tqdm([m for m in sweeps if (m.sweep, m.label) not in done], unit="shape"):
            for row in rows_of(measurement, device):
                out.write(json.dumps(row) + "\n")
            out.flush()
        if not chosen.quick and not chosen.sweep and not any(r["kind"] == "accuracy" for r in read(path)):
            sizes = dict(tokens=64, vocab=500, hidden=32) if chosen.cpu else {}
            for row in tqdm([*accuracy_rows(device, **sizes), *per_token_accuracy_rows(device, **sizes)]):
                out.write(json.dumps(row) + "\n")
    print(report.text_table(read(path)))
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = sorted({*steps.MODELS, *(model for model, _, _ in HEADS)})
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="run")
    parser.add_argument("--quick", action="store_true", help="one shape, under two minutes")
    parser.add_argument("--cpu", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--sweep", action="append", help="only this sweep; may be given more than once")
    parser.add_argument("--model", action="append", choices=models, help="for steps and kernels, likewise")
    parser.add_argument("--out", help="the JSON lines file to write, or to continue")
    parser.add_argument("--gpu", default="h200", choices=sorted(roofline.GPUS), help="for roofline")
    parser.add_argument("--folder", type=Path, default=smollm2.FOLDER, help="of SmolLM2, for density and train")
    parser.add_argument("--steps", type=int, default=train.STEPS, help="of a run, for train")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all runs, for train")
    parser.add_argument("--workers", type=int, default=6, help="processes on the GPU, for train")
    chosen = parser.parse_args(arguments)
    if chosen.command == "report":
        return report.main()
    if chosen.command == "kernels":
        return kernels.main(chosen.model)
    if chosen.command == "roofline":
        return roofline.main(chosen.gpu)
    if chosen.command == "steps":
        if unknown := {*(chosen.model or ())} - {*steps.MODELS}:
            parser.error(f"steps: no configuration of {sorted(unknown)}; there are {sorted(steps.MODELS)}")
        return steps.main(chosen.cpu, chosen.model, chosen.out)
    if chosen.command == "density":
        return density.main(chosen.cpu, chosen.out, chosen.folder)
    if chosen.command == "train":
        sizes = (chosen.steps, chosen.seconds, chosen.workers)
        return train.main(train.Chosen(chosen.cpu, chosen.out, chosen.folder, *sizes))
    return run(chosen)


if __name__ == "__main__":
    sys.exit(main())

"""README's one table, all tables of docs/figures.md and the plots, from the committed JSON lines."""

from __future__ import annotations

import re
from pathlib import Path

from benchmark import plots, roofline, sampling_report
from benchmark.measure import Shape
from benchmark.names import NAMES
from benchmark.records import DENSITY, H200, PER_TOKEN, RESULTS, ROW_LOSS, TRAINING, X2, read
from benchmark.sampling_report import markdown

ROOT = Path(__file__).parent.parent
README, FIGURES = ROOT / "README.md", ROOT / "docs" / "figures.md"
TRAINING_PLOT = "training.png"
# Of README's table: the default, the lean schedule, and what people use instead.
HEADLINE = ("single_pass", "recompute", "liger-triton", "quack-base", "cce", "torch")


def text_table(rows: list[dict]) -> str:
    lines = [f"{'sweep':11} {'label':20} {'implementation':18} {'ms':>9} {'x floor':>8} {'peak MB':>9} {'dX error':>9}"]
    for r in rows:
        if r["kind"] == "time":
            columns = (("ms", 3), ("to_floor", 3), ("peak_mb", 0))
            ms, ratio, peak = (f"{r[key]:.{digits}f}" if r[key] is not None else "-" for key, digits in columns)
            name = f"{r['sweep']:11} {r['label']:20} {r['implementation']:18}"
            error = "-" if r.get("dx_error") is None else f"{r['dx_error']:.1e}"
            lines.append(f"{name} {ms:>9} {ratio:>8} {peak:>9} {error:>9}  {r['skipped'][:60]}")
    return "\n".join(lines)


def _of(rows, sweep, label=None):
    return [r for r in rows if r["kind"] == "time" and r["sweep"] == sweep and label in (None, r["label"])]


def headline_table(rows: list[dict]) -> str:
    """What a reader wants first: time, memory beyond what there is anyway, and the gradient's error."""
    found, errors = _of(rows, "reference", "forward + backward"), _errors(rows, "std 5")
    times = {r["implementation"]: r for r in found}
    body = [(NAMES["floor"], f"{times['floor']['ms']:.1f}", "1", "–", "–")]
    for name in HEADLINE:
        row, ratio = times[name], f"{times[name]['to_floor']:.2f}"
        extra = f"{plots.extra_mb(found, row):.0f}"
        body.append((NAMES[name], f"{row['ms']:.1f}", ratio, extra, f"{errors[name]:.1e}"))
    return markdown(("forward + backward", "ms", "to the floor", "MB beyond inputs and gradients", "error of dX"), body)


def _errors(rows: list[dict], distribution: str) -> dict[str, float]:
    found = (r for r in rows if r["kind"] == "accuracy" and r["distribution"] == distribution and not r["skipped"])
    return {r["implementation"]: r["dx"] for r in found}


def whole_table(rows: list[dict], sweep: str, label: str) -> str:
    """All that was measured of one shape, a row an implementation."""
    body = []
    for r in _of(rows, sweep, label):
        if r["ms"] is not None:
            spread = f"{r['ms']:.1f} ({r['least_ms']:.1f} to {r['greatest_ms']:.1f})"
            body.append((NAMES[r["implementation"]], spread, f"{r['to_floor']:.3f}", f"{r['peak_mb']:.0f}"))
    return markdown((label, "ms, median (range)", "to the floor", "peak MB"), body)


def accuracy_table(rows: list[dict]) -> str:
    distributions = dict.fromkeys(r["distribution"] for r in rows if r["kind"] == "accuracy")
    errors = {distribution: _errors(rows, distribution) for distribution in distributions}
    names = list(dict.fromkeys(name for found in errors.values() for name in found))
    body = [(d, *(f"{found[n]:.1e}" for n in names)) for d, found in errors.items()]
    return markdown(("logits", *(NAMES[n] for n in names)), body)


def _common(implementation: str) -> str:
    """The name a softcapped head's implementation shares its column under."""
    return implementation.removesuffix("-softcap")


def _ms(rows: list[dict], row: dict) -> str:
    return f"{row['ms']:.1f}"


def _extra(rows: list[dict], row: dict) -> str:
    return f"{plots.extra_mb(rows, row):.0f}"


def _peak(rows: list[dict], row: dict) -> str:
    return f"{row['peak_mb']:.0f}"


def matrix_table(rows: list[dict], sweep: str, without: str = "", unit: str = "ms", value=_ms) -> str:
    """One row a label, one column an implementation, of each its latest measurement."""
    found = [r for r in _of(rows, sweep) if r["ms"] is not None and r["label"] != without]
    names = list(dict.fromkeys(_common(r["implementation"]) for r in found))
    body = []
    for label in dict.fromkeys(r["label"] for r in found):
        values = {_common(r["implementation"]): value(found, r) for r in found if r["label"] == label}
        body.append((label, *(values.get(n, "–") for n in names)))
    return markdown((unit, *(NAMES[n] for n in names)), body)


def options_table(rows: list[dict]) -> str:
    """Each option alone, relative to the call without options of the same run."""
    times = {r["implementation"]: r["ms"] for r in _of(rows, "options")}
    options = [name.removeprefix("single_pass-") for name in times if name.startswith("single_pass-")]
    body = [
        (f"`{schedule}`", *(f"{times[f'{schedule}-{option}'] / times[schedule]:.2f}" for option in options))
        for schedule in ("single_pass", "recompute")
    ]
    return markdown(("time to that without options", *options), body)


def split_table(rows: list[dict]) -> str:
    """The vocabulary split over GPUs, from the two-GPU results, next to what the roofline model predicts."""
    those = [r for r in rows if r["kind"] == "vocab_parallel" and r["tokens"] == 8192]
    body, found = [], {(r["vocab"], r["implementation"]): r for r in those}
    for vocab in dict.fromkeys(v for v, _ in found):
        shape = Shape(8192, vocab, 4096)
        whole, recompute, split, silent = (
            found[vocab, name] for name in ("whole, default", "whole, recompute", "split", "silent")
        )
        for ranks in (1, 2, 4, 8):
            ms, mb = roofline.predict_vocab_parallel(shape, roofline.GPUS["h200"], ranks)
            measured = {1: recompute, 2: split}.get(ranks)
            time, memory = ("–", "–") if measured is None else (f"{measured['ms']:.1f}", f"{measured['peak_mb']:.0f}")
            shows = f"{split['ms'] - silent['ms']:.1f}" if ranks == 2 else "–"
            body.append((str(vocab), str(ranks), time, f"{ms:.1f}", memory, f"{mb:.0f}", shows))
        body.append((str(vocab), "1, default", f"{whole['ms']:.1f}", "–", f"{whole['peak_mb']:.0f}", "–", "–"))
    header = ("V", "GPUs", "ms, measured", "predicted", "MB a GPU, measured", "predicted", "ms that communication adds")
    return markdown(header, body)


def spread_line(rows: list[dict]) -> str:
    """How far the several measurements of one shape in one run lie apart: what a ratio is good for."""
    reference = [
        r
        for r in rows
        if r["kind"] == "time"
        and (r["implementation"], r["tokens"], r["vocab"], r["hidden"]) == ("single_pass", 8192, 128256, 4096)
        and not (r["forward_only"] or r["frozen_weight"] or r["ignored"])
    ]
    ratios = sorted(r["to_floor"] for r in reference)
    if not ratios:
        return "Not measured."
    return (
        f"The default at the reference shape was measured {len(ratios)} times in this run, in different company: "
        f"{ratios[0]:.3f} to {ratios[-1]:.3f} of the floor, median {ratios[len(ratios) // 2]:.3f}."
    )


def environment_line(rows: list[dict]) -> str:
    e = next(r for r in rows if r["kind"] == "environment")
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items() if version != "not installed")
    machine = f"{e.get('gpu', 'CPU')}, {e.get('power_limit', '')}, driver {e.get('driver', '')}"
    return f"{machine}; {versions}; `{e['command'].strip()}`."


def sections(rows: list[dict]) -> dict[str, str]:
    """Marker name → what docs/figures.md shows between its markers."""
    extra, tokens, loss = {"unit": "MB", "value": _extra}, read(PER_TOKEN), read(ROW_LOSS)
    first, small = dict.fromkeys(r["label"] for r in loss if r["kind"] == "time")
    return {
        "environment": environment_line(rows),
        "reference": whole_table(rows, "reference", "forward + backward"),
        "accuracy": accuracy_table(rows),
        "spread": spread_line(rows),
        "cases": matrix_table(rows, "reference", without="forward + backward"),
        "models": matrix_table(rows, "models"),
        "models-memory": matrix_table(rows, "models", **extra),
        "tokens": matrix_table(rows, "tokens"),
        "tokens-memory": matrix_table(rows, "tokens", **extra),
        "vocabulary": matrix_table(rows, "vocabulary"),
        "vocabulary-memory": matrix_table(rows, "vocabulary", **extra),
        "ignored": matrix_table(rows, "ignored"),
        "options": options_table(rows),
        "dtypes": matrix_table(rows, "dtypes"),
        "per-token": matrix_table(tokens, "per token"),
        "per-token-memory": matrix_table(tokens, "per token", unit="peak MB", value=_peak),
        "row-loss": whole_table(loss, "row loss", first),
        "row-loss-small": whole_table(loss, "row loss", small),
        "split": split_table(read(X2)),
        **sampling_sections(),
    }


def sampling_sections() -> dict[str, str]:
    """Of sampled gradients, as far as they were measured."""
    found = {}
    if DENSITY.exists():
        found["density"] = sampling_report.density_table(read(DENSITY))
    if TRAINING.exists():
        found["training"] = sampling_report.training_section(read(TRAINING), f"../benchmark/results/{TRAINING_PLOT}")
    return found


def documents(rows: list[dict]) -> dict[Path, str]:
    """Each document that shows results, as it should read."""
    wanted = {README: {"headline": headline_table(rows)}, FIGURES: sections(rows)}
    return {path: filled(path.read_text(), found, path.name) for path, found in wanted.items()}


def filled(document: str, found: dict[str, str], name: str) -> str:
    """A document with what stands between its markers replaced. Raises ValueError for markers that are missing."""
    for marker, text in found.items():
        pattern = rf"(<!-- {marker}: .*?-->\n).*?(<!-- end {marker} -->)"
        document, count = re.subn(pattern, lambda m, text=text: m[1] + text + "\n" + m[2], document, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{name} needs one pair of markers for {marker!r}, it has {count}")
    return document


def main() -> int:
    rows = read(H200)
    for path, text in documents(rows).items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
    drawn = plots.draw(rows, RESULTS)
    if TRAINING.exists():
        drawn.append(sampling_report.draw_training(read(TRAINING), RESULTS / TRAINING_PLOT))
    for path in drawn:
        print(f"wrote {path.relative_to(ROOT)}")
    return 0

"""README's tables and the plots, from the committed JSON lines."""

from __future__ import annotations

import re
from pathlib import Path

from benchmark import roofline
from benchmark.measure import Shape
from benchmark.records import H200, RESULTS, X2, read

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
NAMES = {
    "floor": "cuBLAS GEMMs alone, no loss (floor)",
    "single_pass": "**liger-cutedsl, default**",
    "single_pass-288": "**liger-cutedsl, workspace 288 MiB**",
    "single_pass-all": "**liger-cutedsl, every option on**",
    "single_pass-half": "**liger-cutedsl, half of the targets ignored**",
    "recompute": "**liger-cutedsl, `recompute`**",
    "recompute-all": "**liger-cutedsl, `recompute`, every option on**",
    "recompute-half": "**liger-cutedsl, `recompute`, half ignored**",
    "liger-triton": "Liger-Kernel, Triton",
    "liger-cute-sm90": "Liger-Kernel, CuTe SM90",
    "quack-base": "quack, base",
    "quack-exp-2048": "quack, scaled-exp, chunk 2048",
    "cce": "Cut Cross Entropy",
    "cce-exact": "Cut Cross Entropy, exact",
    "torch": "PyTorch, logits stored",
    "torch-compile": "the same under torch.compile",
    "torch-linear-ce": "torch.nn.functional.linear_cross_entropy",
}


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


def _markdown(header, body) -> str:
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def reference_table(rows: list[dict]) -> str:
    body = []
    for r in _of(rows, "reference", "forward + backward"):
        if r["ms"] is not None:
            spread = f"{r['ms']:.1f} ({r['least_ms']:.1f} to {r['greatest_ms']:.1f})"
            body.append((NAMES[r["implementation"]], spread, f"{r['to_floor']:.3f}", f"{r['peak_mb']:.0f}"))
    return _markdown(("forward + backward", "ms, median (range)", "to the floor", "peak MB"), body)


def accuracy_table(rows: list[dict]) -> str:
    found = [r for r in rows if r["kind"] == "accuracy"]
    names = list(dict.fromkeys(r["implementation"] for r in found if not r["skipped"]))
    body = []
    for distribution in dict.fromkeys(r["distribution"] for r in found):
        errors = {r["implementation"]: r for r in found if r["distribution"] == distribution}
        body.append((distribution, *(f"{errors[n]['dx']:.1e}" for n in names)))
    return _markdown(("logits", *(NAMES[n] for n in names)), body)


def _common(implementation: str) -> str:
    """The name a softcapped head's implementation shares its column under."""
    return implementation.removesuffix("-softcap")


def matrix_table(rows: list[dict], sweep: str, without: str = "") -> str:
    """One row a label, one column an implementation, milliseconds."""
    found = [r for r in _of(rows, sweep) if r["ms"] is not None and r["label"] != without]
    names = list(dict.fromkeys(_common(r["implementation"]) for r in found))
    body = []
    for label in dict.fromkeys(r["label"] for r in found):
        times = {_common(r["implementation"]): f"{r['ms']:.1f}" for r in found if r["label"] == label}
        body.append((label, *(times.get(n, "–") for n in names)))
    return _markdown(("ms", *(NAMES[n] for n in names)), body)


def options_table(rows: list[dict]) -> str:
    """Each option alone, relative to the call without options of the same run."""
    times = {r["implementation"]: r["ms"] for r in _of(rows, "options")}
    options = [name.removeprefix("single_pass-") for name in times if name.startswith("single_pass-")]
    body = [
        (f"`{schedule}`", *(f"{times[f'{schedule}-{option}'] / times[schedule]:.2f}" for option in options))
        for schedule in ("single_pass", "recompute")
    ]
    return _markdown(("time to that without options", *options), body)


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
    return _markdown(header, body)


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
    """Marker name → what README shows between its markers."""
    return {
        "environment": environment_line(rows),
        "reference": reference_table(rows),
        "accuracy": accuracy_table(rows),
        "spread": spread_line(rows),
        "cases": matrix_table(rows, "reference", without="forward + backward"),
        "models": matrix_table(rows, "models"),
        "tokens": matrix_table(rows, "tokens"),
        "ignored": matrix_table(rows, "ignored"),
        "options": options_table(rows),
        "split": split_table(read(X2)),
    }


def filled(readme: str, rows: list[dict]) -> str:
    """README with its tables replaced. Raises ValueError for a marker that is missing."""
    for name, text in sections(rows).items():
        pattern = rf"(<!-- {name}: .*?-->\n).*?(<!-- end {name} -->)"
        readme, count = re.subn(pattern, lambda m, text=text: m[1] + text + "\n" + m[2], readme, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"README.md needs one pair of markers for {name!r}, it has {count}")
    return readme


def plots(rows: list[dict], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for sweep, axis in (("vocabulary", "vocab"), ("tokens", "tokens")):
        label = {"vocab": "vocabulary V", "tokens": "tokens N"}[axis]
        figure, (times, ratios) = plt.subplots(1, 2, figsize=(11, 4.5))
        for ax, value, unit, scale in ((times, "ms", "ms", "log"), (ratios, "to_floor", "time / floor", "linear")):
            _lines(ax, _of(rows, sweep), axis, value)
            ax.set(xlabel=label, ylabel=unit, xscale="log", yscale=scale)
        ratios.set_ylim(0.95, 2.0)
        times.legend(fontsize=7)
        times.set_title("time of forward + backward, bf16, H=4096")
        ratios.set_title("the same, to the floor (what is above 2 is off the plot)")
        _save(figure, plt, folder / f"{sweep}-ms.png")
        figure, ax = plt.subplots(figsize=(7, 4.5))
        _lines(ax, _of(rows, sweep), axis, "peak_mb")
        ax.set(xlabel=label, ylabel="MB", xscale="log", yscale="log")
        ax.legend(fontsize=7)
        ax.set_title("peak memory of forward + backward, bf16, H=4096")
        _save(figure, plt, folder / f"{sweep}-peak.png")
    _frontier(rows, folder, plt)


def _lines(ax, rows: list[dict], axis: str, value: str) -> None:
    """One line an implementation, ours thicker and the floor dashed."""
    found = [r for r in rows if r[value] is not None]
    for name in dict.fromkeys(r["implementation"] for r in found):
        points = sorted((r[axis], r[value]) for r in found if r["implementation"] == name)
        ours = name in ("single_pass", "recompute")
        style = dict(linewidth=2.5) if ours else dict(linewidth=1, linestyle="--" if name == "floor" else "-")
        ax.plot(*zip(*points, strict=True), marker="o", markersize=4, label=_plain(name), **style)
    ax.grid(alpha=0.3, which="both")


def _save(figure, plt, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


# Where a point's name stands, in points from it, where the usual place is taken.
_PLACES = {
    "liger-cute-sm90": (8, 8),
    "torch-compile": (-28, -16),
    "quack-exp-2048": (8, -12),
    "single_pass-288": (6, -12),
}


def _frontier(rows, folder, plt) -> None:
    errors = {
        r["implementation"]: r["dx"]
        for r in rows
        if r["kind"] == "accuracy" and r["distribution"] == "std 5" and not r["skipped"]
    }
    figure, ax = plt.subplots(figsize=(8, 5))
    for r in _of(rows, "reference", "forward + backward"):
        name = r["implementation"]
        if r["ms"] is None or name.endswith(("-all", "-half")) or name == "floor":
            continue
        error = errors.get(name.removesuffix("-288"))
        size = 40 if error is None else 40 + 25000 * error
        label = _plain(name) + (f", error {error:.1e}" if error else "")
        ax.scatter(r["ms"], r["peak_mb"], s=size, alpha=0.6, label=label)
        place = _PLACES.get(name, (6, 6))
        ax.annotate(name, (r["ms"], r["peak_mb"]), fontsize=7, xytext=place, textcoords="offset points")
    ax.set(xlabel="ms", ylabel="peak MB", yscale="log")
    ax.set_title("time, memory and gradient error (area: logits of std 5), reference shape", fontsize=10)
    ax.legend(fontsize=6, markerscale=0.4)
    ax.grid(alpha=0.3, which="both")
    _save(figure, plt, folder / "frontier.png")


def _plain(name: str) -> str:
    return NAMES[name].replace("*", "").replace("`", "")


def main() -> int:
    rows = read(H200)
    README.write_text(filled(README.read_text(), rows))
    plots(rows, RESULTS)
    print(f"wrote {README.name} and the plots in {RESULTS.relative_to(ROOT)}")
    return 0

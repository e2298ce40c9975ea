"""What docs/figures.md shows of sampled gradients: a table of density and noise, one of training runs, and their plot.
From the JSON lines of `python -m benchmark density` and `train`."""

from __future__ import annotations

from pathlib import Path

from benchmark.names import FLOOR, OURS, OURS_LEAN

SEEDS = 5  # that each τ is to be trained with

EXACT, FAILS = "#2b2b2b", "#b5523b"
DROPPED = "were the rest dropped: dX, dW (a bias)"
LESS, WITHIN = "less exact's of the same seed, mean (range)", "within exact's range"
BLUES = (OURS_LEAN, OURS, "#06335f")  # of small τ to large


def markdown(header, body) -> str:
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def density_table(rows: list[dict]) -> str:
    """A row for each τ."""
    header = ("τ", "pairs", "noise of dX, dW", "dW's as predicted", "a call: pairs; dX, dW", DROPPED)
    body = []
    for r in (r for r in rows if r["kind"] == "density"):
        noise, dropped = (f"{r['dx_' + name]:.1e}, {r['dw_' + name]:.1e}" for name in ("noise", "dropped"))
        call = f"{r['call_kept']:.3f}; {r['call_dx']:.1e}, {r['call_dw']:.1e}"
        body.append((f"{r['tau']:g}", f"{r['pairs']:.3f}", noise, f"{r['dw_predicted']:.1e}", call, dropped))
    (text,) = (r for r in rows if r["kind"] == "text")
    said = (
        f"{text['tokens']} tokens, loss {text['loss']:.2f}; dW of every other token is off by {text['dw_of_half']:.2f}."
    )
    return f"{markdown(header, body)}\n\n{said}"


def ended(row: dict) -> bool:
    return row["kind"] == "training" and not row["skipped"]


def by_tau(rows: list[dict]) -> dict[float, dict[int, dict]]:
    """τ → seed → the row of its latest run that ended, of as many steps as the last run has."""
    found: dict[float, dict[int, dict]] = {}
    runs = list(filter(ended, rows))
    steps = {r["steps"] for r in runs[-1:]}
    for row in sorted((r for r in runs if r["steps"] in steps), key=lambda r: r["tau"]):
        found.setdefault(row["tau"], {})[row["seed"]] = row
    return found


def final(row: dict) -> float:
    return row["held_out"][-1][1]


def named(tau: float) -> str:
    return f"{tau:g}" if tau else "exact"


def training_table(rows: list[dict]) -> str:
    """Held-out losses at the end, a row for each τ: over its seeds, and less those of `exact` with the same seeds."""
    header = ("τ", "seeds", "pairs kept", "noise of dX, dW", "final held-out loss, mean (range)", LESS, WITHIN)
    body, found = [], by_tau(rows)
    exact = {seed: final(row) for seed, row in found.get(0.0, {}).items()}
    for tau, runs in found.items():
        ends = {seed: final(row) for seed, row in runs.items()}
        apart = [ends[seed] - exact[seed] for seed in ends if seed in exact] if tau else []
        kept, dx, dw = (sum(r[key] for r in runs.values()) / len(runs) for key in ("pairs", "noise_dx", "noise_dw"))
        share = f"{kept:.3f}", f"{dx:.1e}, {dw:.1e}" if tau else "0"
        shown = [ranged(list(ends.values()), "{:.4f}")]
        shown += [ranged(apart, "{:+.4f}"), within(apart, list(exact.values()))] if apart else ["–", "–"]
        body.append((named(tau), str(len(runs)), *share, *shown))
    return markdown(header, body)


def within(apart: list[float], exact: list[float]) -> str:
    """Whether no run is further from the exact one of its seed than exact ones are from each other."""
    return "–" if len(exact) < 2 else "yes" if max(map(abs, apart)) <= max(exact) - min(exact) else "no"


def training_section(rows: list[dict], plot: str) -> str:
    runs = by_tau(rows)
    steps = next(iter(next(iter(runs.values())).values()))["steps"]
    gpu = next(r for r in rows if r["kind"] == "environment").get("gpu", "CPU")
    said = (
        f"SmolLM2-135M trained for {steps} steps of 2048 tokens with such gradients (`python -m benchmark train`, "
        f"{gpu}), each τ with the same seeds; a seed is an order of the text and what is drawn. The last τ is there to "
        "fail. The noise is the call's own estimate, to the noisy gradient's size."
    )
    if any(len(of_tau) < SEEDS for of_tau in runs.values()):
        said += f" Not all of the {SEEDS} seeds have run yet."
    return f"{said}\n\n![held-out losses of training runs]({plot})\n\n{training_table(rows)}"


def ranged(values: list[float], form: str) -> str:
    mean, least, greatest = (form.format(v) for v in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({least} to {greatest})"


def colours(taus: list[float]) -> dict[float, str]:
    """Exact black, the largest τ red, blues between."""
    between = [tau for tau in taus if tau][:-1]
    found = {tau: BLUES[min(k, len(BLUES) - 1)] for k, tau in enumerate(between)}
    return {tau: EXACT if not tau else found.get(tau, FAILS) for tau in taus}


def draw_training(rows: list[dict], path: Path) -> Path:
    """Two panels over the steps: held-out losses, and what they differ by from exact ones of the same seed; lines are
    means over seeds, bands their ranges. The largest τ, which is meant to fail, is on the left alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = by_tau(rows)
    colour, gpu = colours(list(found)), next(r for r in rows if r["kind"] == "environment").get("gpu", "CPU")
    curves = {
        tau: {seed: dict(map(tuple, row["held_out"])) for seed, row in runs.items()} for tau, runs in found.items()
    }
    figure, (losses, apart) = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    for tau, of_seeds in curves.items():
        _band(losses, list(of_seeds.values()), named(tau), colour[tau])
    exact = curves.get(0.0, {})
    if exact:
        spread = {step: sum(c[step] for c in exact.values()) / len(exact) for step in next(iter(exact.values()))}
        ends = [[pick(c[s] - spread[s] for c in exact.values()) for s in spread] for pick in (min, max)]
        apart.fill_between(list(spread), *ends, color=FLOOR, label="seeds of exact, to their mean")
    for tau, of_seeds in curves.items():
        pairs = [(c, exact[seed]) for seed, c in of_seeds.items() if seed in exact]
        if tau and colour[tau] != FAILS and pairs:
            _band(apart, [{s: c[s] - e[s] for s in c} for c, e in pairs], named(tau), colour[tau])
    _finished(losses, "held-out loss")
    _finished(apart, "held-out loss less exact's of the same seed")
    figure.suptitle(
        f"{gpu}: SmolLM2-135M trained with gradient_sampling = τ; bands are the range of seeds", fontsize=10.5
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _band(ax, curves: list[dict[int, float]], label: str, colour: str) -> None:
    """The mean of curves (step → value) as a line, and their range."""
    steps = list(curves[0])
    columns = [[curve[step] for curve in curves] for step in steps]
    ax.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.18, linewidth=0)
    ax.plot(steps, [sum(c) / len(c) for c in columns], color=colour, label=label, linewidth=1.6)


def _finished(ax, title: str) -> None:
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlabel("step")
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8.5, frameon=False)

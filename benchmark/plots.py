"""The plots, from the committed JSON lines: a headline of two panels, and what changes with N and with V."""

from __future__ import annotations

import math
from pathlib import Path

from benchmark.names import FLOOR, colour, is_ours, plain

PEERS = ("liger-triton", "liger-cute-sm90", "quack-base", "cce", "torch")
HEADLINE = ("single_pass", "recompute", *PEERS)
LINES = ("single_pass", "recompute", "liger-triton", "quack-base", "cce", "torch")
BELOW = ("cce",)  # whose name stands below its line where it ends early: another line passes above
RATIOS = (1, 1.25, 1.5, 2, 3, 5, 10)
MEGABYTES = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000)


def draw(rows: list[dict], folder: Path) -> list[Path]:
    """Writes the plots of an H200's rows into a folder."""
    import matplotlib

    matplotlib.use("Agg")
    times = [r for r in rows if r["kind"] == "time" and r["ms"] is not None]
    gpu = next(r for r in rows if r["kind"] == "environment").get("gpu", "CPU")
    return [
        _headline(times, gpu, folder / "headline.png"),
        _against(times, gpu, "tokens", "tokens", "tokens N, at V = 128256, H = 4096", folder / "tokens.png"),
        _against(times, gpu, "vocabulary", "vocab", "vocabulary V, at N = 8192, H = 4096", folder / "vocabulary.png"),
    ]


def extra_mb(rows: list[dict], row: dict) -> float:
    """MB beyond inputs and gradients, which are what the floor of the same shape takes."""
    (floor,) = (r for r in rows if (r["sweep"], r["label"], r["implementation"]) == (*_place(row), "floor"))
    return row["peak_mb"] - floor["peak_mb"]


def _place(row: dict) -> tuple[str, str]:
    return row["sweep"], row["label"]


def _headline(times: list[dict], gpu: str, path: Path) -> Path:
    import matplotlib.pyplot as plt

    found = [r for r in times if _place(r) == ("reference", "forward + backward")]
    chosen = {name: r for r in found if (name := r["implementation"]) in HEADLINE}
    figure, panels = plt.subplots(1, 2, figsize=(11, 3.9), layout="constrained")
    over = {name: 100 * (r["to_floor"] - 1) for name, r in chosen.items()}
    extra = {name: extra_mb(found, r) for name, r in chosen.items()}
    _bars(panels[0], over, "+{:.0f}%", "time over the floor: three cuBLAS products, no loss")
    _bars(panels[1], extra, "{:.0f} MB", "memory beyond inputs and gradients")
    figure.suptitle(
        f"{gpu}: linear + cross entropy, forward + backward, N = 8192, V = 128256, H = 4096, bf16. Lower is better.",
        fontsize=10.5,
    )
    return _save(figure, plt, path)


def _bars(ax, values: dict[str, float], form: str, title: str) -> None:
    """A bar for each, the least on top, with its value."""
    order = sorted(values, key=values.get, reverse=True)
    bars = ax.barh([plain(n) for n in order], [values[n] for n in order], color=[colour(n) for n in order], height=0.7)
    ax.bar_label(bars, [form.format(values[n]) for n in order], padding=4, fontsize=9)
    ax.set_xlim(0, 1.16 * max(values.values()))
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0, labelsize=9)
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    for label, name in zip(ax.get_yticklabels(), order, strict=True):
        label.set_fontweight("bold" if is_ours(name) else "normal")


def _against(times: list[dict], gpu: str, sweep: str, axis: str, label: str, path: Path) -> Path:
    """Two panels over one axis: time to the floor, and memory beyond inputs and gradients."""
    import matplotlib.pyplot as plt

    rows = [r for r in times if r["sweep"] == sweep]
    figure, (ratio, memory) = plt.subplots(1, 2, figsize=(12.5, 4.8), layout="constrained")
    floors = sorted((r for r in rows if r["implementation"] == "floor"), key=lambda r: r[axis])
    band = [[r[end] / r["ms"] for r in floors] for end in ("least_ms", "greatest_ms")]
    ratio.fill_between([r[axis] for r in floors], *band, color=FLOOR, label="spread of the floor's own runs")
    ratio.legend(fontsize=8.5, loc="upper right", frameon=False)
    for ax in (ratio, memory):
        ax.set(xscale="log" if axis == "tokens" else "linear", yscale="log", xlabel=label)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    _lines(ratio, {n: _points(rows, n, axis, lambda r: r["to_floor"]) for n in LINES}, RATIOS, at_start=True)
    _lines(memory, {n: _points(rows, n, axis, lambda r: extra_mb(rows, r)) for n in LINES}, MEGABYTES)
    places = [r[axis] for r in floors]
    for ax in (ratio, memory):
        ax.set_xticks(places, [f"{place // 1000}k" for place in places], fontsize=9)
        ax.minorticks_off()
    ratio.set_title("time, as a ratio to the floor: cuBLAS products alone", fontsize=10, loc="left")
    memory.set_title("memory beyond inputs and gradients, MB", fontsize=10, loc="left")
    figure.suptitle(f"{gpu}: linear + cross entropy, forward + backward, bf16. Lower is better.", fontsize=10.5)
    return _save(figure, plt, path)


def _points(rows: list[dict], name: str, axis: str, value) -> list[tuple[float, float]]:
    return sorted((r[axis], value(r)) for r in rows if r["implementation"] == name)


def _lines(ax, lines: dict[str, list[tuple[float, float]]], ticks, at_start: bool = False) -> None:
    """A line each, with its name at its end; at_start: where a line ends early, at its first point instead."""
    values = [y for points in lines.values() for _, y in points]
    low, high = min(values) / 1.2, max(values) * 1.2
    ax.set_ylim(low, high)
    ax.set_yticks([t for t in ticks if low <= t <= high], [f"{t:g}" for t in ticks if low <= t <= high], fontsize=9)
    last = max(x for points in lines.values() for x, _ in points)
    for name, points in lines.items():
        width = 2.6 if is_ours(name) else 1.3
        ax.plot(*zip(*points, strict=True), color=colour(name), linewidth=width, zorder=width, marker="o", markersize=4)
    whole = {name: points[-1][1] for name, points in lines.items() if points[-1][0] == last}
    heights = _apart(whole, (high / low) ** (1 / 19))
    for name, points in lines.items():
        (x, y), offset = points[0 if at_start and name not in whole else -1], (8, 0)
        style = {"color": colour(name), "fontsize": 9, "fontweight": "bold" if is_ours(name) else "normal"}
        if name in whole:
            arrow = {"arrowstyle": "-", "color": colour(name), "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
            place = ax.get_yaxis_transform()
            ax.annotate(
                plain(name), (x, y), (1.03, heights[name]), textcoords=place, va="center", arrowprops=arrow, **style
            )
        else:
            offset = (8, -3) if not at_start else (-2, -22) if name in BELOW else (-2, 7)
            ax.annotate(plain(name), (x, y), offset, textcoords="offset points", **style)


def _apart(heights: dict[str, float], factor: float) -> dict[str, float]:
    """The heights on a log axis, moved from each other until each is at least a factor above the one below."""
    names = sorted(heights, key=heights.get)
    logs, least = [math.log(heights[name]) for name in names], math.log(factor)
    for _ in range(200):
        for k in range(len(names) - 1):
            push = (least - (logs[k + 1] - logs[k])) / 2
            if push > 0:
                logs[k], logs[k + 1] = logs[k] - push, logs[k + 1] + push
    return dict(zip(names, map(math.exp, logs), strict=True))


def _save(figure, plt, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path

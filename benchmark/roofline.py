"""Predicted time and memory of each schedule, from operations, bytes and what was measured of a GPU's efficiency.

    time    = GEMMs · 2·N·V·H / matrix rate  +  bytes of the passes between them / bandwidth
    memory  = inputs + gradients + workspace

The H200's rates are measured (NOTES.md); the others scale the H200's share of the datasheet to theirs, and nothing
of them was measured here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from benchmark.measure import Shape
from benchmark.records import H200, read
from benchmark.sweeps import REFERENCE
from liger_cutedsl.route import DEFAULT_SPLIT_CHUNK, DEFAULT_WORKSPACE_MB
from liger_cutedsl.split import equal_chunk
from liger_cutedsl.tiling import DW_PASS_TOKENS

MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """dense bf16 TFLOP/s a GEMM reaches, and TB/s a pass over memory reaches (reads plus writes)."""

    name: str
    tflops: float
    tbytes: float
    measured: bool = False


_H200 = Gpu("H200", 700.0, 4.3, measured=True)  # of a datasheet's 990 and 4.8
_GEMM_SHARE, _COPY_SHARE = _H200.tflops / 990, _H200.tbytes / 4.8
GPUS = {
    "h200": _H200,
    "h100": Gpu("H100 SXM", 990 * _GEMM_SHARE, 3.35 * _COPY_SHARE),
    "b200": Gpu("B200", 2250 * _GEMM_SHARE, 8.0 * _COPY_SHARE),
    "b300": Gpu("B300", 2250 * _GEMM_SHARE, 8.0 * _COPY_SHARE),
}
# Reference shape on a B200, as Liger-Kernel's pull requests publish it: not measured here.
PUBLISHED_B200 = {"Liger-Kernel #1291": (25.7, 3714.0), "Liger-Kernel #1339": (17.51, 2415 * MIB / 1e6)}


BUDGET = DEFAULT_WORKSPACE_MB * MIB


def predict(schedule: str, shape: Shape, gpu: Gpu) -> tuple[float, float]:
    """(ms, peak MB of 10⁶ bytes) of "forward", "single_pass", "recompute" or "floor", bf16, with the default budget."""
    n, v, h = shape.tokens, shape.vocab, shape.hidden
    gemms = {"forward": 1, "single_pass": 3, "recompute": 4, "floor": 3}[schedule]
    inputs, gradients = 2 * (n * h + v * h), 2 * (n * h + v * h)
    moved, workspace, more_rows = 8 * n * v / 192, 4 * n * v / 192, 0
    row = 2 * v + 8 * v / 192  # a row's exponentials, and their tiles' maxima and sums
    if schedule == "single_pass":
        chunk = min(n, 4096, BUDGET // row // 128 * 128)
        moved += 4 * n * v  # exponentials, read and written once by the scaling pass
        more_rows = DW_PASS_TOKENS * -(-n // chunk)
        workspace = row * chunk
    elif schedule == "recompute":
        kept = v if n * row <= BUDGET else v * h / (n + h)
        blocks = 1
        while blocks < 8 and kept < v and 2 * (n / blocks) * (8192 + (h if blocks == 1 else 2 * h)) > BUDGET:
            blocks += 1
        rows = n / blocks
        kept = kept if kept == v else v * h / (rows + h)
        width = min(12672, max(3072, (BUDGET - 4 * rows * h) // (2 * rows)), v)
        gemms -= kept / v / blocks
        # the scaling pass over what is kept; dX's fp32 sum, read and written once a tile; dW, once a block more
        moved += 4 * rows * kept + 8 * n * h * -(-(v - kept / blocks) // width) + 4 * v * h * (blocks - 1)
        workspace = n * row if kept == v else 4 * rows * h + 2 * rows * width - 2 * n * h * (blocks == 1)
    elif schedule == "floor":
        moved, workspace = 0, 2 * min(4096, n) * v
    if schedule == "forward":
        gradients = 0
    operations = (gemms * n + more_rows) * 2 * v * h
    ms = operations / (gpu.tflops * 1e12) * 1e3 + moved / (gpu.tbytes * 1e12) * 1e3
    return ms, (inputs + gradients + workspace) / 1e6


# Bytes a second of an all-reduce between GPUs of one host (input size over time), from NVLink's 450 GB/s each way.
ALL_REDUCE_BYTES = 350e9


# Milliseconds from the beginning of a collective of a few numbers to its end: a guess.
COLLECTIVE_MS = 0.03


def predict_vocab_parallel(shape: Shape, gpu: Gpu, ranks: int, schedule: str = "recompute") -> tuple[float, float]:
    """(ms, peak MB of a rank) with the vocabulary split over ranks, for "recompute" or "single_pass".

    recompute: dX's all-reduce (N × H in fp32) runs under the last dW GEMM, of a vocabulary tile or of all; what does
    not fit under it is added.
    """
    part = replace(shape, vocab=-(-shape.vocab // ranks))
    if schedule == "single_pass" and ranks > 1:
        return _predict_overlapped(part, gpu)
    ms, mb = predict(schedule, part, gpu)
    if ranks > 1:
        reduce_ms = 4 * shape.tokens * shape.hidden / ALL_REDUCE_BYTES * 1e3
        hidden_ms = 2 * shape.tokens * min(part.vocab, 8000) * shape.hidden / (gpu.tflops * 1e12) * 1e3
        ms += max(0.0, reduce_ms - hidden_ms)
    return ms, mb


def _predict_overlapped(part: Shape, gpu: Gpu) -> tuple[float, float]:
    """`single_pass` over ranks, of which each has `part`, with the default budget: two chunks of exponentials, dX of a
    chunk in fp32. Added is what the collectives of a chunk take beyond the products that they run under: the gather
    beyond the next chunk's exponentials, which the last chunk lacks; dX's sum beyond dW. What they take from those
    products, multiprocessors and bandwidth, is left out."""
    n, v, h = part.tokens, part.vocab, part.hidden
    chunk = equal_chunk(DEFAULT_SPLIT_CHUNK, n)
    chunks = -(-n // chunk)
    operations = (3 * n + DW_PASS_TOKENS * chunks) * 2 * v * h
    # exponentials stored, read, written; dX's sum written, read and rounded. Where its blocks are fewer than the H200's
    # multiprocessors, it is computed in two parts that are added (gemm.py)
    in_parts = chunk / 128 * h / 256 < 132
    moved = 8 * n * v / 192 + 4 * n * v + (8 + 36 * in_parts) * n * h
    product_ms = 2 * chunk * v * h / (gpu.tflops * 1e12) * 1e3
    reduce_ms = 4 * chunk * h / ALL_REDUCE_BYTES * 1e3 + COLLECTIVE_MS
    shown_ms = COLLECTIVE_MS + (chunks - 1) * max(0.0, COLLECTIVE_MS - product_ms)
    shown_ms += chunks * max(0.0, reduce_ms - product_ms)
    ms = operations / (gpu.tflops * 1e12) * 1e3 + moved / (gpu.tbytes * 1e12) * 1e3 + shown_ms
    first = max(8 * v / 192 * chunk, 12 * chunk * h * in_parts)  # tiles' maxima and sums, then the two parts
    workspace = 2 * v * chunk + first + (2 * v + 4 * v / 192) * chunk * (chunks > 1) + 4 * chunk * h
    return ms, (4 * (n * h + v * h) + workspace) / 1e6


def check(rows: list[dict]) -> list[tuple[str, str, float, float, float]]:
    """(label, schedule, predicted ms, measured ms, relative error) for the measured rows the model covers."""
    found = []
    for row in rows:
        if row["kind"] != "time" or row["dtype"] != "bfloat16" or row["frozen_weight"] or not row["ms"]:
            continue
        if row["implementation"] not in ("single_pass", "recompute") or row["ignored"]:
            continue
        shape = Shape(row["tokens"], row["vocab"], row["hidden"])
        schedule = "forward" if row["forward_only"] else row["implementation"]
        ms, _ = predict(schedule, shape, GPUS["h200"])
        found.append((f"{row['sweep']} {row['label']}", schedule, ms, row["ms"], ms / row["ms"] - 1))
    return found


def error_line(rows: list[dict]) -> str:
    errors = sorted(abs(error) for *_, error in check(rows))
    middle, worst = errors[len(errors) // 2], errors[-1]
    return f"median {middle:.1%}, largest {worst:.1%} of {len(errors)} rows"


def main(gpu: str) -> int:
    chosen = GPUS[gpu]
    note = "rates measured" if chosen.measured else "PREDICTED, nothing of it measured"
    print(f"{chosen.name}, reference shape N=8192, V=128256, H=4096, bf16 ({note})")
    for schedule in ("forward", "floor", "single_pass", "recompute"):
        ms, mb = predict(schedule, REFERENCE, chosen)
        print(f"  {schedule:12} {ms:7.2f} ms  {mb:7.0f} MB")
    for schedule, ranks in itertools.product(("recompute", "single_pass"), (1, 2, 4, 8)):
        ms, mb = predict_vocab_parallel(REFERENCE, chosen, ranks, schedule)
        print(f"  {schedule:11}, vocabulary over {ranks} GPUs (PREDICTED) {ms:7.2f} ms  {mb:7.0f} MB a GPU")
    if gpu in ("b200", "b300"):
        for name, (ms, mb) in PUBLISHED_B200.items():
            print(f"  {name:20} {ms:.2f} ms  {mb:.0f} MB on a B200, as published there")
    if H200.exists():
        rows = read(H200)
        print(f"against measured H200 rows: {error_line(rows)}")
        for label, schedule, ms, measured, error in check(rows):
            print(f"  {label:32} {schedule:12} predicted {ms:8.2f} ms, measured {measured:8.2f} ms, {error:+.1%}")
    return 0

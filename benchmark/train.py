"""SmolLM2-135M trained on text with sampled gradients, next to exact ones: does the sample show in the loss?

python -m benchmark train                   every τ with every seed, on one GPU, within --seconds; resumes
python -m benchmark train --steps 2 --workers 1   whether it works, with the kernels compiled and kept for the rest
python -m benchmark train --cpu --steps 3   a tiny untrained model, to try the harness

A run is one pass over the text: so many steps of SEQUENCES × 512 tokens, AdamW (betas 0.9 and 0.95, no decay of
weights, no clipping) on float32 weights of which the model's bf16 ones are roundings, a rate that rises for WARM_UP
steps and falls to a tenth. A seed says in which order the text's sequences come, the same for each τ, and what torch's
generators draw: what seeds of `exact` differ by is the order alone. The held-out loss is that of every sixteenth
sequence, none of which is trained on.

--workers processes share the GPU, because one alone waits for its host. Each takes the next run of the list, which has
all τ of a seed before the next seed; a run that the time does not suffice for leaves no row.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import queue
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmark import smollm2
from benchmark.records import RESULTS, environment, read, slug
from benchmark.sampling_report import SEEDS, ended, final, training_table
from liger_cutedsl import explain, fused_linear_cross_entropy

# Exact; those that are proposed; and one whose noise is some ten times the gradient (python -m benchmark density).
TAUS = (0.0, 3e-3, 1e-2, 1e-3, 100.0)
STEPS, SEQUENCES, WARM_UP = 240, 4, 20
RATE, BETAS = 2e-4, (0.9, 0.95)
READINGS = 8  # of the held-out loss, besides the one before the first step
AT_ONCE = 17  # held-out sequences
GRACE = 20  # seconds beyond the deadline until a worker is ended


@dataclass(frozen=True)
class Run:
    """One training run. deadline: of time.monotonic(), which all processes of a machine share."""

    tau: float
    seed: int
    steps: int
    deadline: float


class Master:
    """float32 weights in one piece, AdamW's, and the model's, which are views of a piece that is their rounding."""

    def __init__(self, model: smollm2.Decoder, dtype: torch.dtype):
        parameters = list(model.parameters())
        self.wide = torch.cat([p.detach().float().flatten() for p in parameters])
        self.rounded = self.wide.to(dtype)
        self.gradient = torch.zeros_like(self.rounded)
        start = 0
        for p in parameters:
            part = slice(start, start := start + p.numel())
            p.data, p.grad = self.rounded[part].view_as(p), self.gradient[part].view_as(p)
        self.first = self.wide.clone()
        self.reset()

    def reset(self) -> None:
        """The weights as they were before the first run."""
        self.wide.copy_(self.first)
        self.rounded.copy_(self.wide)
        self.gradient.zero_()
        self.wide.grad = torch.zeros_like(self.wide)
        self.optimizer = torch.optim.AdamW([self.wide], RATE, BETAS, weight_decay=0.0, fused=True)

    def step(self, rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = rate
        self.wide.grad.copy_(self.gradient)
        self.optimizer.step()
        self.rounded.copy_(self.wide)
        self.gradient.zero_()


def rate_of(step: int, steps: int) -> float:
    """Of step 1 to steps."""
    rise = min(WARM_UP, steps // 4)
    if step <= rise:
        return RATE * step / rise
    return RATE * (0.1 + 0.9 * (1 - (step - rise) / (steps - rise)))


def loss_of(model: smollm2.Decoder, tokens: torch.Tensor, **call):
    """The mean loss of each token but the first, by the package's head."""
    return fused_linear_cross_entropy(model(tokens[:, :-1]), model.embedding, tokens[:, 1:], **call)


@torch.no_grad()
def held_out_loss(model: smollm2.Decoder, text: smollm2.Text) -> torch.Tensor:
    parts = text.held_out.split(AT_ONCE)
    return sum(loss_of(model, part, gradient_sampling=0.0) * len(part) for part in parts) / len(text.held_out)


def trained(run: Run, model: smollm2.Decoder, master: Master, text: smollm2.Text) -> dict | None:
    """The row of a run, or None where the deadline came first."""
    start = time.monotonic()
    master.reset()
    torch.manual_seed(run.seed)
    found = Curves([], [(0, held_out_loss(model, text))], [])
    marks = {math.ceil(k * run.steps / READINGS) for k in range(1, READINGS + 1)}
    for step, batch in enumerate(batches(text.training, run), 1):
        if time.monotonic() > run.deadline:
            return None
        found.losses.append(backward(model, batch, run.tau, found.samples if step in marks else None))
        master.step(rate_of(step, run.steps))
        if step in marks:
            found.held_out.append((step, held_out_loss(model, text)))
    row = {"kind": "training", "tau": run.tau, "seed": run.seed, "steps": run.steps, "skipped": ""}
    row["route"] = route_of(model, batch, run.tau)
    row |= found.row()
    if not all(map(math.isfinite, row["losses"])):
        row["skipped"] = "a loss is not finite"
    return row | {"seconds": round(time.monotonic() - start, 1)}


def batches(tokens: torch.Tensor, run: Run):
    """SEQUENCES of them a step, in the seed's order."""
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(run.seed))
    order = order[torch.arange(run.steps * SEQUENCES) % len(order)].to(tokens.device)
    return (tokens[some] for some in order.view(run.steps, SEQUENCES))


def backward(model: smollm2.Decoder, tokens: torch.Tensor, tau: float, samples: list | None) -> torch.Tensor:
    """The loss, its gradients added to the model's; samples: a list to which the share of pairs and the noise are."""
    if samples is None:
        loss = loss_of(model, tokens, gradient_sampling=tau)
    else:
        found = loss_of(model, tokens, gradient_sampling=tau, return_gradient_sampling=True)
        loss = found.loss
        samples.append(torch.stack([found.share_kept, found.noise_dx, found.noise_dw]))
    loss.backward()
    return loss.detach()


def route_of(model: smollm2.Decoder, tokens: torch.Tensor, tau: float) -> str:
    return str(explain(model(tokens[:, :-1]), model.embedding, tokens[:, 1:], gradient_sampling=tau))


@dataclass
class Curves:
    """On the device until a run has ended: each step's loss, (step, held-out loss), and (share of pairs kept, noise of
    dX, of dW as the call estimates it) of the steps after which held-out losses are read."""

    losses: list[torch.Tensor]
    held_out: list[tuple[int, torch.Tensor]]
    samples: list[torch.Tensor]

    def row(self) -> dict:
        pairs, dx, dw = (float(f"{value:.4g}") for value in torch.stack(self.samples).mean(0).tolist())
        return {
            "pairs": pairs,
            "noise_dx": dx,
            "noise_dw": dw,
            "losses": [round(loss, 4) for loss in torch.stack(self.losses).tolist()],
            "held_out": [[step, round(float(loss), 5)] for step, loss in self.held_out],
        }


def setting(device: str, folder: Path) -> tuple[smollm2.Decoder, Master, smollm2.Text]:
    if device == "cpu":
        model, text = smollm2.tiny(device)
        return model, Master(model, torch.float32), text
    model, text = smollm2.load(folder, device, torch.float32), smollm2.Text.load(folder, device)
    return model, Master(model, torch.bfloat16), text


def work(runs: list[Run], taken, rows, device: str, folder: Path) -> None:
    """A worker: takes runs off the list, and puts a row for each that ends, the reason where one fails."""
    torch.set_num_threads(1)
    model, master, text = setting(device, folder)
    while True:
        with taken.get_lock():
            index, taken.value = taken.value, taken.value + 1
        if index >= len(runs):
            return
        run = runs[index]
        try:
            row = trained(run, model, master, text)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            row = {"kind": "training", "tau": run.tau, "seed": run.seed, "steps": run.steps, "skipped": reason}
        if row is None:
            return
        rows.put(row)


def finished(runs: list[Run], device: str, folder: Path, workers: int):
    """The rows of runs as they end, from processes of their own, which are over when this is."""
    context = multiprocessing.get_context("spawn")
    taken, rows = context.Value("i", 0), context.Queue()
    arguments = (runs, taken, rows, device, folder)
    processes = [context.Process(target=work, args=arguments) for _ in range(min(workers, len(runs)))]
    for process in processes:
        process.start()
    try:
        while time.monotonic() < runs[0].deadline + GRACE:
            alive = any(process.is_alive() for process in processes)
            try:
                yield rows.get(timeout=0.5)
            except queue.Empty:
                if not alive:
                    return
    finally:
        for process in processes:
            process.terminate()
            process.join()


@dataclass(frozen=True)
class Chosen:
    """What the command line says. out: None for a file of the GPU's name in results."""

    cpu: bool
    out: str | None
    folder: Path
    steps: int
    seconds: float
    workers: int


def main(chosen: Chosen) -> int:
    """1 where a run failed: its row says why."""
    device = "cpu" if chosen.cpu else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("python -m benchmark train needs an NVIDIA GPU; --cpu runs the harness without one", file=sys.stderr)
        return 2
    path = Path(chosen.out) if chosen.out else RESULTS / f"{slug(device)}-train.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + chosen.seconds
    rows = read(path) if path.exists() else []
    done = {(row["tau"], row["seed"]) for row in rows if ended(row) and row["steps"] == chosen.steps}
    runs = [Run(tau, seed, chosen.steps, deadline) for seed in range(SEEDS) for tau in TAUS if (tau, seed) not in done]
    failed = False
    with path.open("a") as file:
        if runs:
            command = "python -m benchmark train" + " --cpu" * chosen.cpu
            file.write(json.dumps(environment(device, command)) + "\n")
        for row in finished(runs, device, chosen.folder, chosen.workers) if runs else ():
            file.write(json.dumps(row) + "\n")
            file.flush()
            failed |= bool(row["skipped"])
            print(row["tau"], row["seed"], row["skipped"] or f"{final(row):.4f} in {row['seconds']} s", flush=True)
    print(training_table(read(path)))
    return int(failed)

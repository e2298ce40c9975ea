"""The Hopper kernels' results on a GPU, kept in a small file, and how far the interpreter's are from them.

    python test/ptx record test/ptx/recorded/sm_90a.json      # on a Hopper GPU

For each case: a hash of its inputs, and of each output of its kernel (as written: partial sums before they are folded)
a hash and the values at some places. Those are compared
    bit by bit where the hash agrees, else at those places:
    logits (target_logit, tile_max_out, largest)     twice z's bound of cases.py: both sides sum, in different orders
    lse, sum_exp, weighted_sum                       twice their bounds there
    D                                                a unit of its 16 bits where the values before rounding may differ
    column                                           equal, but where the two largest logits are as close as z's bound
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ptx import package
from ptx.cases import CASES, LONG, Case, Expected, U, make, smallest, unit

FILE = Path(__file__).parent / "recorded" / "sm_90a.json"
PLACES = 96  # of an output whose values are kept


def recorded_cases() -> dict[str, Case]:
    return {name: case for name, case in CASES.items() if name not in LONG}


def digest(*tensors) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            sha.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:32]


def portable_normal(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Sums of twelve integers, scaled to a mean of 0 and a variance of 1: exact in float32, so the same on any machine.

    torch.randn's last bits are those of the CPU's vector width.
    """
    twelve = torch.randint(0, 4096, (12, *shape), generator=generator)
    return (twelve.sum(0) - 6 * 4095).float() / 4096


@dataclass
class Run:
    """inputs: their hash.  outputs: name → tensor on the CPU."""

    inputs: str
    outputs: dict[str, torch.Tensor]
    expected: Expected


def run(case: Case, device: str) -> Run:
    """One launch of the case's kernel on "cuda", or on "cpu" while launches are executed."""
    problem = make(case, portable_normal)
    expected = Expected(problem)
    a = torch.rand(case.n, generator=torch.Generator().manual_seed(5)) + 0.5
    lse = (expected.lse * 1024).round().float() / 1024  # the same whatever the order in which a machine sums
    c = a * 0.01 if case.flags.smoothing else None
    inputs = digest(problem.x, problem.weight, problem.target, problem.bias, problem.ce_weight, a, lse)
    moved, a, lse = package.on_device(problem, device), a.to(device), lse.to(device)
    out = torch.zeros(case.n, -(-case.vocab // 8) * 8 + 8, dtype=problem.x.dtype, device=device)[:, : case.vocab]
    with package.exact_folds(), package.captured() as written:
        if case.kernel == "forward":
            package.run_forward(moved)
        elif case.kernel == "exp":
            package.run_exp(moved, out)
        else:
            package.run_backward(moved, lse, package.coefficients(a, None if c is None else c.to(device)), out)
    return Run(inputs, {name: value.cpu() for name, value in written.items()}, expected)


def places(value: torch.Tensor) -> torch.Tensor:
    g = torch.Generator().manual_seed(value.numel())
    return torch.randperm(value.numel(), generator=g)[:PLACES].sort().values


def sampled(value: torch.Tensor) -> list[float]:
    """As float64, which holds every number of these dtypes; JSON writes it so that it comes back the same."""
    return value.reshape(-1)[places(value)].double().tolist()


def described(outputs: dict[str, torch.Tensor]) -> dict:
    return {name: {"hash": digest(value), "values": sampled(value)} for name, value in outputs.items()}


def record(file: Path) -> None:
    """Runs the cases on the GPU and writes the file. Raises RuntimeError where it is not Hopper's."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise RuntimeError("this is to be run on a Hopper GPU (sm_90): its results are what is compared with")
    found = {}
    for name, case in recorded_cases().items():
        done = run(case, "cuda")
        found[name] = {"inputs": done.inputs, "outputs": described(done.outputs)}
        print(name, list(done.outputs), flush=True)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **package.versions()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"about": about, "cases": found}) + "\n")
    print(f"wrote {file}")


def hopper_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Σ_k a_ik·b_ik of two matrices (n, H), H a multiple of 8, as an H200's wgmma was seen to sum: 16 products and the
    sum so far at a time, each cut towards zero 25 bits below the leading bit of the largest, and what they give cut to
    float32. The interpreter rounds these sums instead of cutting them.
    """
    total = torch.zeros(len(a), 1, dtype=torch.float64)
    for x, w in zip(a.double().split(16, dim=1), b.double().split(16, dim=1), strict=True):
        terms = torch.cat([total, x * w], dim=1)
        total = _cut(terms, terms.abs().amax(dim=1, keepdim=True), 25).sum(dim=1, keepdim=True)
        total = _cut(total, total.abs(), 23)
    return total[:, 0].float()


def _cut(values: torch.Tensor, largest: torch.Tensor, bits: int) -> torch.Tensor:
    """Towards zero, so many bits below the leading bit of the largest."""
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - bits)
    return (values / unit).trunc() * unit


def compare(name: str, recorded: dict, done: Run) -> dict[str, tuple[float, float]]:
    """Output → (share of its sampled values that are the same bits, largest difference as a share of its bound).

    Raises ValueError where the inputs or outputs are others than those recorded.
    """
    if done.inputs != recorded["inputs"]:
        raise ValueError(f"{name}: its inputs are not those that were recorded: record again")
    if set(done.outputs) != set(recorded["outputs"]):
        raise ValueError(f"{name}: outputs {sorted(done.outputs)}, recorded {sorted(recorded['outputs'])}")
    result = {}
    for output, value in done.outputs.items():
        if digest(value) == recorded["outputs"][output]["hash"]:
            result[output] = (1.0, 0.0)
            continue
        theirs = torch.tensor(recorded["outputs"][output]["values"], dtype=torch.float64)
        ours = value.reshape(-1)[places(value)].double()
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        shares = (ours - theirs).abs() / _bound(output, value, theirs, done.expected)
        shares = torch.where(same, 0.0, shares.nan_to_num(nan=torch.inf))  # a tile of −inf has sums, and bounds, of 0
        result[output] = (float(same.double().mean()), float(shares.max()))
    return result


def _bound(output: str, value: torch.Tensor, theirs: torch.Tensor, expected: Expected):
    z, exponent = expected.z_bound, expected.exponent
    if output in ("target_logit", "tile_max_out", "largest"):
        return 2 * z
    if output == "lse":
        return 2 * (z + exponent + 256 * U)
    if output == "sum_exp":  # of exponentials relative to the maximum
        return theirs.abs() * 2 * (2 * z + exponent + 256 * U)
    if output == "weighted_sum":
        size = float((expected.z.abs() * expected.weights).sum(1).max())
        return 2 * (z * float(expected.weights.sum()) + 256 * U * size)
    if output == "D":  # the next number, and what may differ before rounding
        relative = unit(value.dtype) + 4 * z + 2 * exponent + 2 * expected.slope_bound
        return theirs.abs() * relative + 2 * smallest(value.dtype)
    return 0.5  # column and is_max: columns

"""python -m liger_cutedsl --check: a small call on this machine, through each entrance, held against plain PyTorch."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from liger_cutedsl.api import fused_linear_cross_entropy
from liger_cutedsl.api_explain import explain
from liger_cutedsl.first_call import replaced
from liger_cutedsl.liger.switch import disable, enable
from liger_cutedsl.route import GRADIENT_SAMPLING
from liger_cutedsl.versions import installed

TOKENS, HIDDEN, VOCAB, IGNORED = 256, 64, 4000, -100
LIGER = "liger_kernel.transformers.functional"  # what patched models call
CLASS = "LigerFusedLinearCrossEntropyFunction"
# Relative, of a loss near 8: its logits are summed in another order, in float32. Of a gradient: one rounding to
# bfloat16, 2⁻⁸ at most, and of plain PyTorch two and its logits' besides; float32 where there is no GPU.
BOUNDS = {torch.bfloat16: (1e-3, 2e-2), torch.float32: (1e-5, 1e-5)}


@dataclass(frozen=True)
class Answer:
    """What one entrance gave: which class answered, and how far loss and gradients are from plain PyTorch's.

    right: whether both are within BOUNDS, and the class is the one that was expected.
    """

    entrance: str
    answered: str
    found: str
    right: bool

    def __str__(self) -> str:
        return f"{self.entrance}\n    answered by {self.answered}\n    {'ok' if self.right else 'WRONG'}: {self.found}"


def check() -> tuple[list[str], bool]:
    """Lines to print, and whether everything is as it should be."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = _inputs(device, dtype)
    try:
        route = explain(inputs[0], inputs[1], inputs[2])
    except (RuntimeError, ValueError) as error:  # of an environment variable that asks for what cannot be
        return [f"{type(error).__name__}: {error}"], False
    lines = [f"N={TOKENS}, H={HIDDEN}, V={VOCAB}, {str(dtype).removeprefix('torch.')} on {device}: {route}"]
    answers = [_asked("liger_cutedsl.fused_linear_cross_entropy", fused_linear_cross_entropy, inputs, __package__)]
    if not installed("liger-kernel"):
        lines.append("liger-kernel is not installed: nothing is to be replaced")
    else:
        answers += _through_liger(inputs)
    return [*lines, *map(str, answers)], all(answer.right for answer in answers)


def _through_liger(inputs) -> list[Answer]:
    """As the environment has it, where it asks for this package, and behind enable()."""
    found = []
    if os.environ.get("LIGER_KERNEL_IMPL", "").strip().lower() == "cutedsl":
        found.append(_liger("Liger-Kernel, by LIGER_KERNEL_IMPL=cutedsl", inputs))
    try:
        enable()
        names = ", ".join(replaced())
        found.append(_liger("Liger-Kernel, by liger_cutedsl.enable()", inputs, f"; in place of {names}"))
    except ImportError as error:
        found.append(Answer("Liger-Kernel, by liger_cutedsl.enable()", "nothing", str(error), False))
    finally:
        disable()
    return found


def _liger(entrance: str, inputs, more: str = "") -> Answer:
    try:
        module = importlib.import_module(LIGER)
    except Exception as error:  # a broken installation of Liger-Kernel or triton fails in many ways
        return Answer(entrance, "nothing", f"{LIGER} does not import ({type(error).__name__}: {error})", False)
    answered = getattr(module, CLASS)
    name = f"{answered.__module__}.{answered.__qualname__}"
    return _asked(f"{entrance}: {LIGER}.liger_fused_linear_cross_entropy", _call(module), inputs, name, more)


def _call(module) -> Callable:
    def call(x, weight, target):
        return module.liger_fused_linear_cross_entropy(x, weight, target)

    return call


@contextlib.contextmanager
def _exact():
    """Without the sample of the gradient that the environment may ask for: its noise is no error."""
    before = os.environ.pop(GRADIENT_SAMPLING, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[GRADIENT_SAMPLING] = before


def _asked(entrance: str, call: Callable, inputs, answered: str, more: str = "") -> Answer:
    """The call next to plain PyTorch in float64."""
    try:
        with _exact():
            loss = call(*inputs)
            grads = torch.autograd.grad(loss, inputs[:2])
    except Exception as error:  # the report is what it is for
        return Answer(entrance, answered, f"{type(error).__name__}: {error}", False)
    wide = [v.detach().double().requires_grad_() for v in inputs[:2]]
    expected = torch.nn.functional.cross_entropy(wide[0] @ wide[1].t(), inputs[2], ignore_index=IGNORED)
    true = torch.autograd.grad(expected, wide)
    off = abs(float((loss.detach() - expected.detach()) / expected.detach()))
    worst = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(grads, true, strict=True))
    bounds = BOUNDS[inputs[0].dtype]
    right = off <= bounds[0] and worst <= bounds[1]  # NaN is not
    ours = answered.split(".")[0] == __package__
    found = f"loss off by {off:.0e} of it, gradients by {worst:.0e}" + ("" if ours else "; not by this package")
    return Answer(entrance, answered, found + more, right and ours)


def _inputs(device: str, dtype: torch.dtype):
    generator = torch.Generator("cpu").manual_seed(0)
    x, weight = (
        torch.randn(n, HIDDEN, generator=generator, dtype=torch.float32, device="cpu") for n in (TOKENS, VOCAB)
    )
    target = torch.arange(TOKENS, dtype=torch.int64, device="cpu") * 13 % VOCAB
    target[::8] = IGNORED
    leaves = [v.to(device, dtype).requires_grad_() for v in (x, weight / HIDDEN**0.5)]
    return (*leaves, target.to(device))
